"""The real daemon, real uprobes, a plain directory as the GPU: when the floor rises, and when it is given back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from moe_gpu_stabilizer.libbcc import LIBRARY, load_library
from tests.kernel.conftest import Llama
from tests.support import HIGHEST_HZ, LOWEST_HZ, PlainNode, RunningDaemon, stays, wait_until
from tests.workload import Workload, build_static

Start = Callable[..., RunningDaemon]
Run = Callable[..., Workload]


def raised(node: PlainNode) -> bool:
    return node.min_hz == HIGHEST_HZ


def raise_the_floor(workload: Workload, node: PlainNode) -> None:
    """One call of a process that counts."""
    workload.do("call 1")
    wait_until(lambda: raised(node), "the floor up")


def given_back(node: PlainNode) -> bool:
    return node.min_hz == LOWEST_HZ


def test_a_call_raises_the_floor_and_a_second_later_it_is_given_back(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=llama.library)
    with run() as workload:
        stays(lambda: given_back(node), 0.3, "no call, no floor")
        called = time.monotonic()
        raise_the_floor(workload, node)
        wait_until(lambda: given_back(node), "the floor given back")
        assert time.monotonic() - called >= 1.0, "the hold is a second"
        pid = workload.pid
    daemon.stop()
    library = str(llama.library)
    expected = [
        f"attached {library} (llama_decode, llama_process, llama_synchronize)",
        f"pid {pid} (llama-server) counts: {daemon.flag}",
        f"floor 1020 MHz (pid {pid} inference)",
        "floor 306 MHz (idle)",
    ]
    lines = [
        line for line in daemon.log.splitlines() if library in line or str(pid) in line or line.startswith("floor")
    ]
    assert lines == expected


def test_the_first_call_of_a_new_process_is_handled_at_once(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    start_daemon(libraries=llama.library, rebind_seconds=3600)
    with run() as workload:
        workload.do("call 1")
        wait_until(lambda: raised(node), "the floor up without a tick", seconds=5)


def test_a_process_without_the_flag_never_raises_the_floor(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=llama.library)
    with run(counts=False) as workload:
        workload.do("call 1")
        daemon.wait_for_log(rf"^pid {workload.pid} \(llama-server\) is ignored: no MoE flag")
        workload.begin("call 100000")
        stays(lambda: given_back(node), 0.5, "no floor")
        workload.finish()


# Wake-ups for which other programs are to blame: tests that run beside these have llama.cpp processes of their own.
WAKES_OF_OTHERS = 100


def test_an_ignored_process_does_not_wake_the_daemon(start_daemon: Start, run: Run, llama: Llama) -> None:
    """Not once: test_probe.py has the exact count. Here: the whole daemon sleeps through a hundred thousand calls."""
    daemon = start_daemon(libraries=llama.library, rebind_seconds=3600)
    with run(counts=False) as workload:
        workload.do("call 1")
        daemon.wait_for_log(r"is ignored")
        daemon.wait_until_quiet()
        before = daemon.times_woken
        workload.do("call 100003")
        assert daemon.times_woken <= before + WAKES_OF_OTHERS


def test_steady_decoding_wakes_the_daemon_a_few_times_per_hold(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=llama.library, rebind_seconds=3600, hold_seconds=1)
    with run() as workload:
        raise_the_floor(workload, node)
        before, calls, began = daemon.times_woken, 0, time.monotonic()
        while time.monotonic() < began + 3 or calls < 10 * WAKES_OF_OTHERS:
            workload.do("call 100")
            calls += 100
        a_few_per_hold = 6 * (time.monotonic() - began + 1)
        assert daemon.times_woken - before <= a_few_per_hold + WAKES_OF_OTHERS < calls
        assert raised(node)
    assert daemon.log.count("inference)") == 1, "one stretch, no flicker"


def test_one_long_call_keeps_the_floor_up(start_daemon: Start, run: Run, llama: Llama, node: PlainNode) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.5)
    with run() as workload:
        workload.begin("busy 4000")
        wait_until(lambda: raised(node), "the floor up")
        stays(lambda: raised(node), 3, "a prefill of many holds is one stretch")
        workload.finish()
        wait_until(lambda: given_back(node), "the floor given back after the work", seconds=5)
    assert daemon.log.count("inference)") == 1


def test_a_long_call_that_is_heard_of_late_still_raises_the_floor(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    """The daemon does not get to run for longer than a hold, as on a machine that swaps."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.5)
    with run() as workload:
        daemon.send(signal.SIGSTOP)
        workload.begin("busy 5000")
        stays(lambda: given_back(node), 1, "nobody raises it")
        daemon.send(signal.SIGCONT)
        wait_until(lambda: raised(node), "the floor up")
        stays(lambda: raised(node), 2, "the call goes on")
        workload.finish()
        wait_until(lambda: given_back(node), "the floor given back", seconds=5)


def test_a_daemon_that_could_not_run_for_a_while_still_gives_the_floor_back(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.5)
    with run() as workload:
        raise_the_floor(workload, node)
        daemon.send(signal.SIGSTOP)
        # Soon after the first call, so that the kernel sees no need to wake the daemon for it.
        workload.do("call 1")
        stays(lambda: raised(node), 1, "nobody gives it back")
        daemon.send(signal.SIGCONT)
        wait_until(lambda: given_back(node), "the floor given back", seconds=5)


def test_a_call_that_only_sleeps_loses_the_floor(start_daemon: Start, run: Run, llama: Llama, node: PlainNode) -> None:
    start_daemon(libraries=llama.library, hold_seconds=0.5)
    with run() as workload:
        workload.begin("sleep 6000")
        wait_until(lambda: raised(node), "the floor up")
        wait_until(lambda: given_back(node), "the floor given back although the call has not returned", seconds=4)
        workload.finish()


def test_two_processes_that_overlap_make_one_stretch(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.6)
    with run() as one, run() as other:
        raise_the_floor(one, node)
        for next_to_call in (other, one, other):
            stays(lambda: raised(node), 0.4, "less than a hold passes between their calls")
            next_to_call.do("call 1")
        one.kill()
        assert raised(node), "the other one still holds it"
        wait_until(lambda: given_back(node), "the floor given back")
    daemon.wait_for_log(r"\(idle\)")
    assert daemon.log.count("inference)") == 1
    assert daemon.log.count("(idle)") == 1


def test_a_process_killed_in_the_middle_of_a_call_loses_the_floor_at_once(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    start_daemon(libraries=llama.library, hold_seconds=30)
    with run() as workload:
        workload.begin("busy 60000")
        wait_until(lambda: raised(node), "the floor up")
        workload.kill()
        wait_until(lambda: given_back(node), "the floor given back long before the hold is over", seconds=5)


def test_a_process_that_becomes_another_program_loses_the_floor_at_once(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    start_daemon(libraries=llama.library, hold_seconds=30)
    with run() as workload:
        raise_the_floor(workload, node)
        workload.become("/bin/sleep 60")
        wait_until(lambda: given_back(node), "the floor given back long before the hold is over", seconds=5)


def test_a_process_is_judged_again_when_it_becomes_another_program(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=llama.library)
    with run(counts=False) as workload:
        workload.do("call 1")
        daemon.wait_for_log(rf"^pid {workload.pid} \(llama-server\) is ignored")
        workload.become(f"{llama.program} {daemon.flag}")
        raise_the_floor(workload, node)
        daemon.wait_for_log(rf"^pid {workload.pid} \(llama-server\) counts")


def test_a_static_program_is_found_by_its_own_symbols(
    start_daemon: Start, run: Run, node: PlainNode, tmp_path: Path
) -> None:
    program = build_static(tmp_path / "odd-name")
    daemon = start_daemon(rebind_seconds=0.3)
    with run(program=program) as workload:
        daemon.wait_for_log(rf"^attached {program} \(llama_decode, llama_process, llama_synchronize\)$")
        raise_the_floor(workload, node)


def test_only_the_configured_users_processes_count(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=llama.library, users="nobody")
    with run() as workload:
        workload.do("call 1")
        daemon.wait_for_log(rf"^pid {workload.pid} \(llama-server\) is ignored: its user is not in STABILIZER_USERS$")
        assert given_back(node)


def test_a_stop_gives_the_floor_back(start_daemon: Start, run: Run, llama: Llama, node: PlainNode) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=60)
    for number in (signal.SIGTERM, signal.SIGINT):
        with run() as workload:
            raise_the_floor(workload, node)
            assert daemon.stop(number) == 0
            assert given_back(node)
        assert daemon.log.splitlines()[-2:] == ["floor 306 MHz (stop)", "stopped"]
        daemon.start()


def test_a_killed_daemons_floor_is_given_back_by_the_next_start(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=60)
    with run() as workload:
        raise_the_floor(workload, node)
        daemon.stop(signal.SIGKILL)
    assert raised(node), "nobody was left to give it back"
    daemon.start()
    assert given_back(node)
    assert daemon.has_logged(r"^floor 306 MHz \(left over from a run that was killed\)$")


def test_restore_gives_a_killed_daemons_floor_back_once(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=60)
    with run() as workload:
        raise_the_floor(workload, node)
        assert daemon.command("--restore").stdout == "a daemon is running; it gives back its floor itself\n"
        daemon.stop(signal.SIGKILL)
    assert daemon.command("--restore").stdout == "floor 306 MHz (restored)\n"
    assert given_back(node)
    node.write("min_freq", HIGHEST_HZ)
    assert daemon.command("--restore").stdout == "nothing to give back\n"
    assert raised(node), "the owner's own setting stays"


def test_restore_needs_nothing_but_what_it_gives_back(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=60)
    with run() as workload:
        raise_the_floor(workload, node)
        daemon.stop(signal.SIGKILL)
    (daemon.runtime / "status.json").write_text('{"pid": 1, "from": "another version"}')
    assert daemon.command("--restore").stdout == "floor 306 MHz (restored)\n"
    assert given_back(node)


def test_an_edited_configuration_is_applied_at_once_and_a_bad_one_is_not(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=60)
    common = {"devfreq": node.directory, "libraries": llama.library, "moe_flags": daemon.flag, "detect": "flags"}
    with run() as workload:
        raise_the_floor(workload, node)
        daemon.configure(**common, hold_seconds=60, floor_mhz=612)
        daemon.send(signal.SIGHUP)
        wait_until(lambda: node.min_hz == 612_000_000, "the new floor")
        daemon.configure(**common, hold_seconds="soon")
        daemon.send(signal.SIGHUP)
        daemon.wait_for_log(
            r"^the old settings stay: .*:5: STABILIZER_HOLD_SECONDS='soon' cannot be used; allowed: a number"
        )
        assert node.min_hz == 612_000_000
        daemon.configure(**common, hold_seconds=0.5, floor_mhz=612)
        daemon.send(signal.SIGHUP)
        wait_until(lambda: given_back(node), "the shorter hold, at once", seconds=5)


def test_reload_waits_for_the_daemon_and_passes_on_what_is_wrong(
    start_daemon: Start, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=llama.library)
    common = {"devfreq": node.directory, "libraries": llama.library, "moe_flags": daemon.flag}
    daemon.configure(**common, hold_seconds=2)
    reloaded = daemon.command("--reload")
    assert (reloaded.returncode, reloaded.stdout, reloaded.stderr) == (0, "", "")
    assert daemon.has_logged(r"^settings read again: .* hold 2 s"), "before --reload ends"
    daemon.configure(**common, hold_seconds=2, hold_second=3)
    refused = daemon.command("--reload")
    assert refused.returncode == 2
    assert "unknown key 'STABILIZER_HOLD_SECOND'; did you mean STABILIZER_HOLD_SECONDS?" in refused.stderr
    assert refused.stderr.count("\n") == 1
    status = daemon.command("--status").stdout
    assert "STABILIZER_HOLD_SECONDS=2" in status, "the old ones are in force"
    assert "trouble" in status
    daemon.stop()
    missing = daemon.command("--reload")
    assert (missing.returncode, "the daemon is not running" in missing.stderr) == (1, True)


def test_a_daemon_that_does_not_get_to_run_has_a_stale_status(start_daemon: Start) -> None:
    daemon = start_daemon(rebind_seconds=0.2)
    assert daemon.command("--status").returncode == 0
    daemon.send(signal.SIGSTOP)
    try:
        wait_until(lambda: "STALE" in daemon.command("--status").stdout, "it to be noticed")
        assert daemon.command("--status").returncode == 1
    finally:
        daemon.send(signal.SIGCONT)
    wait_until(lambda: daemon.command("--status").returncode == 0, "the daemon to write again")


def test_a_late_node_is_waited_for_and_raised_when_it_comes(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    hidden = node.directory.with_name("not yet")
    node.directory.rename(hidden)
    daemon = start_daemon(libraries=llama.library, rebind_seconds=0.3, hold_seconds=30)
    with run() as workload:
        workload.do("call 1")
        daemon.wait_for_log(r"^cannot raise the floor: no GPU node$")
        hidden.rename(node.directory)
        wait_until(lambda: raised(node), "the floor up")
    assert daemon.log.count("no GPU node yet") == 1, "said once"


def test_another_node_is_not_raised_while_the_first_is_still_to_be_given_back(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path
) -> None:
    other = PlainNode(tmp_path / "other")
    daemon = start_daemon(libraries=llama.library, rebind_seconds=0.3, hold_seconds=1)
    with run() as workload:
        raise_the_floor(workload, node)
        node.refuse()
        daemon.configure(
            devfreq=other.directory,
            libraries=llama.library,
            moe_flags=daemon.flag,
            detect="flags",
            rebind_seconds=0.3,
        )
        daemon.send(signal.SIGHUP)
        daemon.wait_for_log(r"^cannot give the floor back: cannot read .*/min_freq: Is a directory")
        node.relent()
        wait_until(lambda: given_back(node), "the first node given back")
        wait_until(lambda: given_back(other), "the other one left as it was")
        raise_the_floor(workload, other)
    wait_until(lambda: given_back(other), "the other one given back")


def test_a_storm_of_hangups_neither_delays_a_call_nor_the_end(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=llama.library)
    with run() as workload:
        for _ in range(200):
            daemon.send(signal.SIGHUP)
        workload.do("call 1")
        wait_until(lambda: raised(node), "the floor up", seconds=5)
        for _ in range(200):
            daemon.send(signal.SIGHUP)
        assert daemon.stop() == 0
    assert given_back(node)


def test_a_log_that_nobody_reads_does_not_stop_the_daemon(
    tmp_path: Path, package_root: Path, run: Run, llama: Llama, node: PlainNode, flag: str
) -> None:
    """As on a terminal that was stopped with Ctrl-S."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    daemon = RunningDaemon(
        tmp_path, node.directory, package_root, libraries=llama.library, moe_flags=flag, detect="flags"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "moe_gpu_stabilizer", "--config", str(daemon.config)],
        stderr=writer, cwd=package_root, env={**os.environ, "RUNTIME_DIRECTORY": str(daemon.runtime)},
    ) as process, run() as workload:  # fmt: skip
        wait_until(lambda: (daemon.runtime / "status.json").exists(), "the daemon at work")
        wait_until(lambda: workload.do("call 1") and raised(node), "the floor up")
        wait_until(lambda: given_back(node), "the floor given back")
        raise_the_floor(workload, node)
        process.terminate()
        assert process.wait(timeout=10) == 0
    assert given_back(node)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_closed_or_full_standard_streams_do_no_harm(
    tmp_path: Path, package_root: Path, llama: Llama, node: PlainNode, flag: str, run: Run, redirection: str
) -> None:
    daemon = RunningDaemon(
        tmp_path, node.directory, package_root, libraries=llama.library, moe_flags=flag, detect="flags"
    )
    script = f'exec "$0" -m moe_gpu_stabilizer --config "$1" {redirection}'
    with subprocess.Popen(
        ["sh", "-c", script, sys.executable, str(daemon.config)],
        cwd=package_root, env={**os.environ, "RUNTIME_DIRECTORY": str(daemon.runtime)},
    ) as process, run() as workload:  # fmt: skip
        wait_until(lambda: (daemon.runtime / "status.json").exists(), "the daemon at work")
        wait_until(lambda: workload.do("call 1") and raised(node), "the floor up")
        process.terminate()
        assert process.wait(timeout=10) == 0
    assert given_back(node)


def test_a_second_daemon_refuses_to_start(start_daemon: Start) -> None:
    daemon = start_daemon()
    second = daemon.command("--config", str(daemon.config))
    assert second.returncode == 1
    assert second.stderr.startswith("moe-gpu-stabilizer: another moe-gpu-stabilizer is running; see ")
    assert second.stderr.endswith(" --status\n")


def test_status_says_for_whom_the_floor_is_up(start_daemon: Start, run: Run, llama: Llama, node: PlainNode) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=30)
    with run() as workload:
        raise_the_floor(workload, node)
        wait_until(lambda: "floor 1020 MHz" in daemon.command("--status").stdout, "the status")
        said = daemon.command("--status").stdout
        assert f"floor 1020 MHz for llama-server (pid {workload.pid})" in said
        assert f"pid {workload.pid} (llama-server) counts: {daemon.flag}" in said
    daemon.stop()
    after = daemon.command("--status")
    assert (after.returncode, after.stderr.startswith("moe-gpu-stabilizer: the daemon is not running")) == (1, True)


def test_what_keeps_it_from_starting_is_one_clear_line(tmp_path: Path, package_root: Path) -> None:
    """Without the right to load BPF programs, on a kernel without uprobes, and without the library."""
    config = tmp_path / "empty.conf"
    config.touch()
    command = [sys.executable, "-m", "moe_gpu_stabilizer", "--config", str(config)]
    no_rights = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
    load_library()
    (library,) = {Path(mapping.path) for mapping in psutil.Process().memory_maps() if LIBRARY in mapping.path}
    no_library = ["unshare", "--mount", "sh", "-c", f'mount --bind /dev/null {library} && exec "$@"', "sh"]
    no_uprobes = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs none /sys/bus/event_source/devices && exec "$@"',
        "sh",
    ]
    environment = {**os.environ, "RUNTIME_DIRECTORY": str(tmp_path / "run")}
    for prefix, said in (
        (no_rights, "the kernel refused to create the BPF map settings: Operation not permitted; run as root"),
        (no_uprobes, "this kernel has no uprobes; it needs CONFIG_UPROBE_EVENTS=y"),
        (no_library, "install the package libbpfcc: apt-get install libbpfcc"),
    ):
        ended = subprocess.run(
            [*prefix, *command], capture_output=True, text=True, cwd=package_root, env=environment, check=False
        )
        assert ended.returncode == 1, ended
        assert said in ended.stderr
        assert ended.stderr.count("\n") == 1, "one line"
