"""The installed service at work, under a real systemd."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import pytest

from tests.support import HIGHEST_HZ, LOWEST_HZ, stays, wait_until
from tests.system.container import Container
from tests.system.service import FUNCTIONS, HOME, INSTALL, NAME, SETTINGS, Service, build
from tests.workload import Workload

CAPABILITIES = {"cap_sys_admin", "cap_sys_ptrace", "cap_dac_read_search", "cap_lease"}
MOST_EXPOSED = 2.2


@pytest.fixture(scope="module")
def installed(container: Container) -> Service:
    container.run("useradd", "--create-home", "owner")
    container.run(INSTALL)
    build(container, "/opt/llama.cpp/build/bin")  # in one of the usual places: probed at each start
    return Service(container)


@pytest.fixture
def service(installed: Service) -> Iterator[Service]:
    """The service, freshly started, with a workload's flag as its only setting."""
    installed.systemctl("reset-failed")
    installed.forget_settings()
    installed.container.node.write("min_freq", LOWEST_HZ)
    installed.systemctl("restart")
    yield installed
    installed.systemctl("stop")


# The whole path.


def test_it_is_ready_only_when_the_probes_are_in_place(service: Service) -> None:
    program = build(service.container, "/opt/first/build/bin")
    service.configure(libraries=program.parent / "libllama.so", rebind_seconds=3600)
    service.systemctl("restart")
    assert service.container.uprobes(service.pid) >= FUNCTIONS
    lines = service.journal().splitlines()
    attached = next(index for index, line in enumerate(lines) if line.startswith(f"attached {program.parent}"))
    assert attached < next(index for index, line in enumerate(lines) if index > attached and line.startswith("ready: "))


def test_a_workload_raises_the_clock_and_gives_it_back(service: Service) -> None:
    with service.llama_server() as server:
        service.container.wait_for_journal(NAME, "^attached /opt/llama.cpp/build/bin/libllama.so")
        assert re.fullmatch(r"idle, (1 library|\d+ libraries) watched", service.show("StatusText"))
        server.begin("busy 1500")
        service.wait_until_raised()
        service.container.wait_for(
            lambda: service.show("StatusText") == f"floor 1020 MHz for llama-server (pid {server.own_pid})",
            "what systemctl status says",
        )
        server.finish()
        service.wait_until_given_back()
        service.container.wait_for_journal(NAME, r"^floor 306 MHz \(idle\)$")
    assert f"floor 1020 MHz (pid {server.own_pid} inference)\n" in service.journal()
    assert service.show("StatusText").startswith("idle, ")


def test_lines_carry_fields_that_journalctl_filters_on(service: Service) -> None:
    container = service.container
    with service.llama_server() as server:
        server.do("call 1")
        container.wait_for_journal(NAME, r"^floor 306 MHz \(idle\)$")
        pid = str(server.own_pid)
    (raised,) = container.journal_entries(NAME, "EVENT=raise", f"TARGET_PID={pid}")
    wanted = {
        "MESSAGE": f"floor 1020 MHz (pid {pid} inference)",
        "PRIORITY": "6",
        "SYSLOG_IDENTIFIER": NAME,
        "FLOOR_HZ": str(HIGHEST_HZ),
        "NODE": "/sys/class/devfreq/17000000.gpu",
        "TARGET_COMM": "llama-server",
        "REASON": service.flag,
    }
    assert {name: raised[name] for name in wanted} == wanted
    given_back = container.journal_entries(NAME, "EVENT=give-back")[-1]
    assert (given_back["FLOOR_HZ"], given_back["REASON"]) == (str(LOWEST_HZ), "idle")
    (counts,) = container.journal_entries(NAME, "EVENT=counts", f"TARGET_PID={pid}")
    assert counts["REASON"] == service.flag
    attached = [entry["LIBRARY"] for entry in container.journal_entries(NAME, "EVENT=attach")]
    assert "/opt/llama.cpp/build/bin/libllama.so" in attached
    assert container.journal_entries(NAME, "EVENT=ready")


def test_anyone_may_ask_what_it_does_and_check_it(service: Service) -> None:
    container = service.container
    with service.llama_server() as server:
        server.begin("busy 3000")
        service.wait_until_raised()
        container.wait_for(
            lambda: (
                f"floor 1020 MHz for llama-server (pid {server.own_pid}), since "
                in container.run(NAME, "--status", as_user="owner").stdout
            ),
            "the floor in the status",
        )
        asked = container.run(NAME, "--status", as_user="owner").stdout
        assert f"STABILIZER_MOE_FLAGS={service.flag}" in asked
        status = json.loads(container.run(NAME, "--status", "--json", as_user="owner").stdout)
        assert (status["floor_hz"], status["raised_times"], status["stale"]) == (HIGHEST_HZ, 1, False)
        checked = container.run(NAME, "--check", as_user="owner").stdout
        assert "is running: floor 1020 MHz for llama-server" in checked
    service.systemctl("stop")
    stopped = container.run(NAME, "--status", as_user="owner", check=False)
    assert (stopped.returncode, stopped.stdout) == (1, "")
    assert re.match(f"{NAME}: the daemon is not running; start it: .*systemctl start {NAME}", stopped.stderr)


# Settings.


def test_a_reload_applies_an_edit_at_once_also_while_raised(service: Service) -> None:
    with service.held_up():
        service.configure(floor_mhz=612)
        service.systemctl("reload")
        assert service.container.node.min_hz == 612_000_000, "done when the reload is"
        service.configure(hold_seconds=0.2)
        service.systemctl("reload")
        service.wait_until_given_back()


def test_a_bad_edit_keeps_the_old_settings_and_says_why(service: Service) -> None:
    service.configure(hold_second=3)
    assert service.systemctl("reload", check=False) != 0
    assert service.show("ActiveState") == "active"
    why = "the old settings stay: /etc/default/moe-gpu-stabilizer:2: unknown key 'STABILIZER_HOLD_SECOND'; did you mean"
    assert why in service.show("StatusText")
    (said,) = [entry for entry in service.container.journal_entries(NAME) if why in str(entry["MESSAGE"])]
    assert said["PRIORITY"] == "3"
    with service.llama_server() as server:
        server.do("call 1")
        service.wait_until_raised()
    service.forget_settings()
    service.systemctl("reload")
    assert "old settings" not in service.show("StatusText")


def test_a_bad_setting_at_the_start_is_said_once_and_not_tried_again(service: Service) -> None:
    service.configure(hold_seconds="soon")
    assert service.systemctl("restart", check=False) != 0
    found = [service.show(name) for name in ("ActiveState", "ExecMainStatus", "NRestarts")]
    assert found == ["failed", "2", "0"]
    error = service.container.journal_entries(NAME, "--priority=err", "SYSLOG_IDENTIFIER=moe-gpu-stabilizer")[-1]
    assert "STABILIZER_HOLD_SECONDS='soon' cannot be used; allowed: a number of seconds from 0.2 to 60" in str(
        error["MESSAGE"]
    )


# However it ends, the clock is given back.


def test_a_stop_gives_the_clock_back(service: Service) -> None:
    with service.held_up() as server:
        service.systemctl("stop")
        assert service.container.node.min_hz == LOWEST_HZ
        assert server.do("pid") == str(server.own_pid), "the program runs on"
    assert (service.show("Result"), service.show("ExecMainStatus")) == ("success", "0")


def test_a_killed_daemon_gives_back_and_works_again(service: Service) -> None:
    with service.held_up() as server:
        killed = service.pid
        service.container.run("kill", "-KILL", killed)
        service.wait_until_given_back()
        service.wait_until_active(other_than=killed)
        service.container.wait_for_journal(NAME, r"^floor 306 MHz \(restored\)$")
        server.do("call 1")
        service.wait_until_raised()


def test_a_daemon_that_hangs_is_ended_gives_back_and_works_again(service: Service) -> None:
    container = service.container
    drop_in = f"/run/systemd/system/{NAME}.service.d/soon.conf"
    container.run("mkdir", "-p", drop_in.rpartition("/")[0])
    container.run("tee", drop_in, input="[Service]\nWatchdogSec=2\n")
    container.run("systemctl", "daemon-reload")
    service.configure(hold_seconds=60)
    service.systemctl("restart")
    try:
        stays(lambda: service.show("NRestarts") == "0", 5, "a daemon that does not hang is left alone")
        with service.llama_server() as server:
            server.do("call 1")
            service.wait_until_raised()
            hung = service.pid
            service.container.run("kill", "-STOP", hung)
            service.wait_until_given_back(seconds=30)
            service.wait_until_active(other_than=hung)
            server.do("call 1")
            service.wait_until_raised()
        container.wait_for_journal(NAME, "Watchdog timeout")
    finally:
        container.run("rm", "-r", drop_in.rpartition("/")[0])
        container.run("systemctl", "daemon-reload")


FILL_JOURNAL = """
import socket
journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
journal.connect("/run/systemd/journal/socket")
try:
    while True:
        journal.send(b"MESSAGE=one of many")
except BlockingIOError:
    pass
"""


def test_a_stuck_journal_does_not_keep_the_clock_up(service: Service) -> None:
    """As one on a dying SD card: journald waits for its disk, and whoever writes to it would wait with it."""
    container = service.container
    pid, journald = service.pid, container.show("systemd-journald", "MainPID")
    with service.llama_server() as server:
        container.run("kill", "-STOP", journald)
        try:
            container.run("python3", "-c", FILL_JOURNAL)
            server.do("call 1")
            service.wait_until_raised()
            service.wait_until_given_back()
        finally:
            container.run("kill", "-CONT", journald)
    assert service.pid == pid, "not by the watchdog"
    with service.llama_server() as server:
        server.do("call 1")
        container.wait_for_journal(NAME, r"^\(\d+ lines were lost: nobody read them\)$")


def test_a_shutdown_gives_the_clock_back_and_the_next_boot_starts_it(fresh_container: Container) -> None:
    fresh_container.run(INSTALL)
    service = Service(fresh_container)
    program = build(fresh_container, "/opt/llama.cpp/build/bin")
    service.configure(hold_seconds=60, libraries=program.parent / "libllama.so")
    service.systemctl("reload")
    fresh_container.wait_for_journal(NAME, f"^attached {program.parent}/libllama.so")  # it makes one call only
    # A unit of its own, as an owner would have one, so that it takes part in the shutdown.
    server = f"(echo 'call 1'; sleep 1000) | {program} {service.flag}"
    fresh_container.run("systemd-run", "--unit=llama-server", "sh", "-c", server)
    service.wait_until_raised()
    fresh_container.reboot()
    assert fresh_container.node.min_hz == LOWEST_HZ
    service.wait_until_active()
    assert fresh_container.run("systemctl", "is-enabled", NAME).stdout == "enabled\n"


# What is not there yet.


def test_a_late_gpu_node_does_not_keep_it_from_starting(service: Service) -> None:
    node = service.container.node.directory
    away = node.with_name("away")
    service.systemctl("stop")
    node.rename(away)
    service.configure(rebind_seconds=0.5)
    try:
        service.systemctl("start")
        assert service.show("ActiveState") == "active"
        assert "no GPU node yet" in service.show("StatusText")
    finally:
        away.rename(node)
    service.container.wait_for_journal(NAME, "^found the GPU node /sys/class/devfreq/17000000.gpu$")
    with service.llama_server() as server:
        server.do("call 1")
        service.wait_until_raised()
    wait_until(lambda: service.show("StatusText").startswith("idle, "), "no trouble any more")


# Its sandbox.


def test_the_sandbox_is_on(service: Service) -> None:
    status = service.container.run("cat", f"/proc/{service.pid}/status").stdout
    field = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (field["Seccomp"], field["NoNewPrivs"]) == ("2", "1")
    for held in ("CapEff", "CapPrm", "CapBnd"):
        names = service.container.run("capsh", f"--decode={field[held]}").stdout.strip().partition("=")[2]
        assert set(names.split(",")) == CAPABILITIES, held
    assert field["CapAmb"].strip("0") == ""


def test_the_sandbox_leaves_nothing_to_write_but_the_clock(service: Service) -> None:
    """Written from inside of the service's own file systems, by a process with all capabilities."""
    container = service.container
    inside = ("nsenter", "--target", str(service.pid), "--mount", "--")
    read_only = ("/etc/x", "/usr/x", f"{HOME}/x", "/home/owner/x", "/root/x", "/var/x", "/proc/sys/kernel/core_pattern")
    for path in read_only:
        refused = container.run(*inside, "sh", "-c", f"echo x >{path}", check=False)
        assert "Read-only file system" in refused.stderr or "Directory nonexistent" in refused.stderr, path
    container.run(*inside, "sh", "-c", "echo 306000000 >/sys/class/devfreq/17000000.gpu/min_freq")
    container.run(*inside, "test", "!", "-e", "/run/user/0/anything")
    assert container.run(*inside, "ls", "/proc").stdout.split().count("kallsyms") == 0


def test_systemd_calls_it_well_protected(service: Service) -> None:
    said = service.container.run("systemd-analyze", "security", NAME).stdout
    exposure = re.search(r"Overall exposure level for .*: ([0-9.]+)", said)
    assert exposure, said
    assert float(exposure[1]) <= MOST_EXPOSED, said


def test_it_shares_sysfs_with_the_programs_that_it_has_to_hear_of(service: Service) -> None:
    """fanotify hears of writes through the same mount of sysfs, or one of the same file system: not through another."""
    show_device = ("stat", "--format=%d")
    mine = service.container.run(*show_device, "/sys").stdout
    assert service.container.run(*show_device, f"/proc/{service.pid}/root/sys").stdout == mine
    # It has a network namespace's own from systemd 254 on.
    assert service.show("PrivateNetwork") == "no"


def test_another_programs_setting_is_named_and_is_what_comes_back(service: Service) -> None:
    min_freq = "/sys/class/devfreq/17000000.gpu/min_freq"
    with service.held_up():
        service.container.run("sh", "-c", f"echo 612000000 >{min_freq}; sleep 0.5")
        service.container.wait_for_journal(
            NAME, r"^min_freq set to 612 MHz by (sh|a program that has ended) \(pid \d+\)$"
        )
        service.wait_until_raised()
        service.systemctl("stop")
        assert service.container.node.min_hz == 612_000_000


def test_it_outlives_memory_pressure_and_has_a_ceiling(service: Service) -> None:
    # Only what systemd was told: on a machine without CAP_SYS_RESOURCE it cannot do either.
    assert service.show("OOMScoreAdjust") == "-900"
    assert int(service.show("MemoryMax")) == 256 << 20


@pytest.mark.parametrize(
    "place", ["/home/owner/llama.cpp/build/bin", "/root/llama.cpp/build/bin", "/tmp/llama.cpp/bin"]
)
def test_the_sandbox_hides_no_library(service: Service, place: str) -> None:
    """In a home that only its owner may enter, and in /tmp, of which the service has its own."""
    service.container.run("chmod", "700", "/home/owner")
    service.configure(rebind_seconds=0.5)
    service.systemctl("restart")
    with service.llama_server(place) as server:
        service.container.wait_for_journal(NAME, f"^attached .*{re.escape(place)}/libllama.so")
        server.do("call 1")
        service.wait_until_raised()


def test_a_home_that_is_mounted_later_is_seen(service: Service) -> None:
    container = service.container
    service.configure(rebind_seconds=0.5)
    service.systemctl("restart")
    container.run("mkdir", "-p", "/home/late")
    container.run("mount", "-t", "tmpfs", "-o", "exec,size=20m", "late", "/home/late")
    try:
        with service.llama_server("/home/late/llama.cpp/build/bin") as server:
            container.wait_for_journal(NAME, "^attached .*/home/late/llama.cpp/build/bin/libllama.so")
            server.do("call 1")
            service.wait_until_raised()
    finally:
        container.run("umount", "--lazy", "/home/late")


def test_users_are_told_apart_inside_the_sandbox(service: Service) -> None:
    service.configure(users="owner", rebind_seconds=0.5)
    service.systemctl("restart")
    container = service.container
    with service.llama_server() as of_root:
        container.wait_for_journal(NAME, "^attached ")
        of_root.do("call 1")
        container.wait_for_journal(NAME, rf"^pid {of_root.own_pid} .* is ignored: its user is not in STABILIZER_USERS$")
        program = build(container, "/opt/llama.cpp/build/bin")
        with Workload(program, service.flag, prefix=container.enter(as_user="owner")) as of_owner:
            of_owner.do("call 1")
            service.wait_until_raised()
        service.wait_until_given_back()
        # An edit holds for those who are known already, too.
        service.configure(users="root")
        service.systemctl("reload")
        wait_until(lambda: of_root.do("call 1") and service.raised, "the floor up for root")


def test_no_core_is_left_when_it_is_killed(service: Service) -> None:
    limits = service.container.run("cat", f"/proc/{service.pid}/limits").stdout
    assert re.search(r"^Max core file size\s+0\s+0\s", limits, re.M)
    killed = service.pid
    service.container.run("kill", f"-{signal.SIGABRT.value}", killed)
    service.wait_until_active(other_than=killed)


def test_the_settings_are_readable_and_only_roots_to_write(service: Service) -> None:
    assert service.container.run("stat", "--format=%a %U", SETTINGS).stdout == "644 root\n"
