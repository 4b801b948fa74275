"""Installing, upgrading and removing the service as an owner would, and everything that may fail meanwhile."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import LOWEST_HZ, REPOSITORY, wait_until
from tests.system.container import Container
from tests.system.service import HOME, INSTALL, NAME, SETTINGS, UNINSTALL, Service

LOCK = f"/run/{NAME}-install.lock"
NO_NETWORK = "http://127.0.0.1:9/"  # the discard port: nobody listens


@pytest.fixture
def service(fresh_container: Container) -> Service:
    """An installed service whose only setting is the flag of its own workloads: an edited file."""
    fresh_container.run(INSTALL)
    service = Service(fresh_container)
    service.configure(hold_seconds=60)
    service.systemctl("reload")
    return service


@pytest.fixture
def newer(fresh_container: Container) -> Iterator[Path]:
    """A copy of the source that a test may change, at /opt/newer inside."""
    fresh_container.run("cp", "-r", "/mnt/src", "/opt/newer")
    edit_newer(fresh_container, "__init__.py", '^__version__ = .*/__version__ = "99.0"')
    yield fresh_container.path("/opt/newer")
    fresh_container.run("rm", "-rf", "/opt/newer")


def edit_newer(container: Container, module: str, substitution: str) -> None:
    container.run("sed", "-i", f"s/{substitution}/", f"/opt/newer/moe_gpu_stabilizer/{module}")


def keep_newer_from_starting(container: Container) -> None:
    edit_newer(
        container, "__main__.py", '^    settings = load_in_child.*/    raise StabilizerError("this one is broken")'
    )


def version_in_use(container: Container) -> str:
    return container.run(NAME, "--version").stdout.strip()


def releases(container: Container) -> list[str]:
    return container.run("sh", "-c", f"ls -d {HOME}/venv-*").stdout.split()


def assert_works(service: Service) -> None:
    """The service that runs sees a workload and raises the clock."""
    assert service.show("ActiveState") == "active"
    with service.llama_server() as server:
        service.container.wait_for(lambda: "libllama.so" in service.container.run(NAME, "--status").stdout, "a library")
        server.do("call 1")
        service.wait_until_raised()
    service.wait_until_given_back()


# Installing.


def test_a_dry_run_says_what_would_be_done_and_does_nothing(fresh_container: Container) -> None:
    before = fresh_container.snapshot()
    said = fresh_container.run(INSTALL, "--dry-run", as_user="nobody").stdout
    assert f"would write {SETTINGS}" in said
    assert "would enable the service and start it" in said
    assert fresh_container.snapshot() == before


def test_it_ends_with_a_check_and_the_commands_that_are_needed_next(fresh_container: Container) -> None:
    said = fresh_container.run(INSTALL).stdout
    assert "ok       node          /sys/class/devfreq/17000000.gpu" in said
    assert "The daemon works." in said
    *_, status, journal, reload = said.splitlines()
    for line in (status, journal.replace("--follow", "--no-pager"), reload):
        fresh_container.run("sh", "-c", re.split("  +", line.strip())[0])
    assert fresh_container.show(NAME, "ActiveState") == "active"
    assert fresh_container.run("systemctl", "is-enabled", NAME).stdout == "enabled\n"
    assert version_in_use(fresh_container).startswith(f"{NAME} ")
    manual = fresh_container.path(f"/usr/local/share/man/man8/{NAME}.8")
    assert manual.read_bytes() == (REPOSITORY / "man" / f"{NAME}.8").read_bytes()
    assert "Every line is optional" in fresh_container.run("cat", SETTINGS).stdout
    # The service uses what was installed, not the clone.
    assert fresh_container.run("readlink", "-f", f"/proc/{fresh_container.show(NAME, 'MainPID')}/cwd").stdout == "/\n"


def test_everything_is_gone_after_an_uninstall(fresh_container: Container) -> None:
    before = fresh_container.snapshot()
    fresh_container.run(INSTALL)
    service = Service(fresh_container)
    service.configure(hold_seconds=60)
    service.systemctl("reload")
    pid = service.pid
    with service.llama_server("/tmp/llama.cpp") as server:
        fresh_container.wait_for_journal(NAME, "^attached ")
        server.do("call 1")
        service.wait_until_raised()
        assert fresh_container.uprobes(pid) > 0
        removed = fresh_container.run(UNINSTALL, "--purge").stdout
        assert fresh_container.node.min_hz == LOWEST_HZ
        assert server.do("call 1") == "done", "the program runs on"
    assert removed == f"{NAME} is removed\n"
    assert not fresh_container.path(f"/proc/{pid}").exists(), "with it its uprobes"
    assert fresh_container.snapshot() == before
    assert fresh_container.run("sh", "-c", f"ls -d /run/{NAME}*", check=False).stdout == ""
    assert fresh_container.run("systemctl", "list-units", "--all", "--plain", "--no-legend", f"{NAME}*").stdout == ""
    assert fresh_container.run("systemctl", "list-unit-files", "--no-legend", f"{NAME}*", check=False).stdout == ""


def test_settings_stay_unless_they_are_to_go(service: Service) -> None:
    container = service.container
    edited = container.run("cat", SETTINGS).stdout
    container.run("mkdir", "-p", f"/etc/systemd/system/{NAME}.service.d")
    container.run("tee", f"/etc/systemd/system/{NAME}.service.d/override.conf", input="[Service]\nNice=5\n")
    said = container.run(INSTALL, "--uninstall").stdout
    assert SETTINGS in said
    assert "override.conf" not in said
    assert f"{NAME}.service.d" in said
    assert container.run("cat", SETTINGS).stdout == edited
    container.run(INSTALL)
    assert container.run("cat", SETTINGS).stdout == edited, "as they were before"
    container.run(UNINSTALL, "--purge")
    assert container.run("sh", "-c", f"ls -d {SETTINGS}* /etc/systemd/system/{NAME}*", check=False).stdout == ""
    assert container.run(INSTALL, "--uninstall").stdout == f"{NAME} is not installed\n"


def test_an_uninstall_that_is_only_tried_changes_nothing(service: Service) -> None:
    before = service.container.snapshot()
    said = service.container.run(UNINSTALL, "--dry-run").stdout
    assert f"would run: rm -rf {HOME}\n" in said
    assert service.container.snapshot() == before
    assert service.show("ActiveState") == "active"


def test_without_a_start_it_waits_for_the_next_boot(fresh_container: Container) -> None:
    """As in an image that is being made: systemd need not run."""
    hidden = ("unshare", "--mount", "sh", "-ec", 'mount -t tmpfs none /run/systemd; exec "$@"', "sh")
    fresh_container.run(*hidden, INSTALL, "--no-start")
    assert fresh_container.run("systemctl", "is-enabled", NAME).stdout == "enabled\n"
    assert fresh_container.show(NAME, "ActiveState") == "inactive"
    fresh_container.reboot()
    Service(fresh_container).wait_until_active()


# Upgrading.


def test_an_upgrade_keeps_edited_settings_and_shows_the_new_ones_beside(service: Service, newer: Path) -> None:
    container = service.container
    edited = container.run("cat", SETTINGS).stdout
    (first,) = releases(container)
    container.run("sh", "-c", f"echo '# A new line.' >>/opt/newer/etc/default/{NAME}")
    said = container.run("/opt/newer/install.sh").stdout
    assert f"{SETTINGS} was edited and stays as it is; the new default is {SETTINGS}.new" in said
    assert container.run("cat", SETTINGS).stdout == edited
    assert container.run("cat", f"{SETTINGS}.new").stdout.endswith("# A new line.\n")
    assert version_in_use(container) == f"{NAME} 99.0"
    assert "ready: moe-gpu-stabilizer 99.0" in service.journal(), "the service was restarted"
    assert first not in releases(container)
    assert len(releases(container)) == 1
    service.configure(hold_seconds=1)
    service.systemctl("reload")
    assert_works(service)


def test_settings_that_nobody_edited_are_replaced(fresh_container: Container, newer: Path) -> None:
    fresh_container.run(INSTALL)
    fresh_container.run("sh", "-c", f"echo '# A new line.' >>/opt/newer/etc/default/{NAME}")
    fresh_container.run("/opt/newer/install.sh")
    assert fresh_container.run("cat", SETTINGS).stdout.endswith("# A new line.\n")
    assert not fresh_container.path(f"{SETTINGS}.new").exists()


def test_the_same_version_again_changes_nothing_that_is_seen(service: Service) -> None:
    edited = service.container.run("cat", SETTINGS).stdout
    service.container.run(INSTALL)
    assert service.container.run("cat", SETTINGS).stdout == edited
    assert not service.container.path(f"{SETTINGS}.new").exists()
    assert len(releases(service.container)) == 1
    assert service.show("ActiveState") == "active"


def test_an_upgrade_while_raised_gives_the_clock_back_and_raises_again(service: Service) -> None:
    with service.llama_server() as server:
        service.container.wait_for_journal(NAME, "^attached ")
        server.do("call 1")
        service.wait_until_raised()
        service.container.run(INSTALL)
        service.wait_until_given_back()
        service.container.wait_for(lambda: "libllama.so" in service.container.run(NAME, "--status").stdout, "a library")
        server.do("call 1")
        service.wait_until_raised()


def test_a_service_that_was_disabled_stays_so(service: Service) -> None:
    service.container.run("systemctl", "disable", "--now", NAME)
    assert "the service was disabled, and stays so" in service.container.run(INSTALL).stdout
    assert service.show("ActiveState") == "inactive"


# What may fail: the version that works goes on working.


def assert_nothing_changed(service: Service, before: object, version: str) -> None:
    container = service.container
    assert container.snapshot() == before
    assert version_in_use(container) == version
    assert service.show("ActiveState") == "active"


@pytest.mark.parametrize("fault", ["no network", "disk full", "cannot run", "bad settings"])
def test_a_failed_upgrade_leaves_the_old_version_at_work(service: Service, newer: Path, fault: str) -> None:
    container = service.container
    environment: tuple[str, ...] = ()
    if fault == "no network":
        environment = ("env", f"PIP_INDEX_URL={NO_NETWORK}", "PIP_EXTRA_INDEX_URL=", "PIP_NO_INDEX=", "PIP_FIND_LINKS=",
                       "PIP_CONFIG_FILE=/dev/null", "PIP_RETRIES=0")  # fmt: skip
    elif fault == "disk full":  # what is in use shows through, but nothing more fits in
        full = (
            "mkdir /tmp/up; mount -t tmpfs -o size=2m none /tmp/up; mkdir /tmp/up/work /tmp/up/top;"
            f"mount -t overlay -o lowerdir={HOME},upperdir=/tmp/up/top,workdir=/tmp/up/work none {HOME};"
            'exec "$@"'
        )
        environment = ("unshare", "--mount", "sh", "-ec", full, "sh")
    elif fault == "cannot run":
        container.run("sh", "-c", "echo 'import nonsense' >>/opt/newer/moe_gpu_stabilizer/__main__.py")
    elif fault == "bad settings":
        service.configure(no_such_key=1)
    before, version, pid = container.snapshot(), version_in_use(container), service.pid
    failed = container.run(*environment, "/opt/newer/install.sh", check=False)
    assert failed.returncode == 1, failed
    assert re.search("^install.sh: .*nothing was changed$", failed.stderr, re.M), failed.stderr
    assert "Traceback" not in failed.stderr or fault == "cannot run"
    assert_nothing_changed(service, before, version)
    assert service.pid == pid, "not even restarted"


def test_a_version_that_does_not_start_is_replaced_by_the_old_one(service: Service, newer: Path) -> None:
    container = service.container
    keep_newer_from_starting(container)
    before, version = container.snapshot(), version_in_use(container)
    failed = container.run("/opt/newer/install.sh", check=False)
    assert failed.returncode == 1
    assert "moe-gpu-stabilizer: this one is broken" in failed.stderr
    assert "install.sh: the service did not start, for the reason above" in failed.stderr
    assert "putting the earlier version back" in failed.stderr
    assert_nothing_changed(service, before, version)
    service.configure(hold_seconds=1)
    service.systemctl("reload")
    assert_works(service)


def test_a_first_version_that_does_not_start_is_taken_off_again(fresh_container: Container, newer: Path) -> None:
    keep_newer_from_starting(fresh_container)
    before = fresh_container.snapshot()
    failed = fresh_container.run("/opt/newer/install.sh", check=False)
    assert failed.returncode == 1
    assert "this one is broken" in failed.stderr
    assert fresh_container.snapshot() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_upgrade_leaves_the_old_version_at_work(service: Service, number: signal.Signals) -> None:
    """Even after SIGKILL; what that leaves, the next one removes."""
    container = service.container
    before, version = container.snapshot(), version_in_use(container)
    old = set(releases(container))
    installing = subprocess.Popen(
        container.enter("setsid", "--wait", INSTALL), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: set(releases(container)) - old, "a new release in the making")
        container.run("pkill", f"-{number.value}", "--full", f"^/bin/bash {INSTALL}")
        installing.wait(60)
    finally:
        installing.kill()
        installing.wait()
    if number != signal.SIGKILL:
        wait_until(lambda: set(releases(container)) == old, "what was made is removed")
        assert container.snapshot() == before
    assert version_in_use(container) == version
    assert service.show("ActiveState") == "active"
    lock = ("flock", "--nonblock", LOCK, "true")
    container.wait_for(lambda: container.run(*lock, check=False).returncode == 0, "the children of a killed one to end")
    container.run(INSTALL)
    assert len(releases(container)) == 1
    assert service.show("ActiveState") == "active"


def test_a_first_try_that_was_killed_is_made_good_by_the_next(fresh_container: Container) -> None:
    """Killed when all was in place, but for the service being enabled."""
    tampered, kill = "/opt/killed", "s/^ *systemctl --quiet enable.*/kill -9 $$; false ||/"
    fresh_container.run("cp", "-r", "/mnt/src", tampered)
    fresh_container.run("sed", "-i", kill, f"{tampered}/tools/service.sh")
    assert fresh_container.run(f"{tampered}/install.sh", check=False).returncode < 0
    fresh_container.run(INSTALL)
    assert fresh_container.run("systemctl", "is-enabled", NAME).stdout == "enabled\n"
    assert fresh_container.show(NAME, "ActiveState") == "active"


def test_what_root_has_in_its_environment_and_home_changes_nothing(fresh_container: Container) -> None:
    """Least of all packages that a later change there would take from under the service."""
    container = fresh_container
    container.run("/usr/bin/python3", "-m", "venv", "/opt/elsewhere")
    site = container.run(
        "/opt/elsewhere/bin/python", "-c", "import site; print(site.getsitepackages()[0])"
    ).stdout.strip()
    container.run("/opt/elsewhere/bin/pip", "install", "--quiet", "pydantic")
    own = container.run("/usr/bin/python3", "-m", "site", "--user-site", check=False).stdout.strip()
    container.run("sh", "-ec", f"mkdir -p {own}; cp -r {site}/. {own}")
    mine = (f"PYTHONPATH={site}", "PYTHONHOME=/nonexistent", "PIP_USER=1", "PIP_PREFIX=/opt/prefix", "CDPATH=/mnt")
    container.run("env", *mine, "sh", "-c", "umask 077; cd /mnt; bash src/install.sh")
    assert not container.path("/opt/prefix").exists()
    container.run("rm", "-rf", own, "/opt/elsewhere")
    container.run("systemctl", "restart", NAME)
    assert container.show(NAME, "ActiveState") == "active"
    container.run(NAME, "--status", as_user="nobody")
    shared = "find /usr/local /opt -type d ! -perm -055"
    assert container.run("sh", "-c", shared).stdout == "", "all may look into what was made"


# Where it cannot be installed.


@pytest.mark.parametrize(
    ("where", "said", "status"),
    [
        ("as a user", "install.sh: root is needed\n  -> sudo ./install.sh\n", 1),
        ("without systemd", "install.sh: systemd is not running here, so a service cannot be started\n", 1),
        ("without apt-get", "install.sh: this needs apt-get: Debian 12 or 13, Ubuntu 22.04 or 24.04", 1),
        ("an old Python", "install.sh: Python 3.9.2 is too old\n  -> Python 3.10 or newer is needed", 1),
        ("a wrong option", "install.sh: what is '--instal'?\n", 2),
        (
            "something of the owner's",
            f"install.sh: {HOME} is there, and not made by this program; nothing was changed",
            1,
        ),
        ("another program", f"install.sh: /usr/local/bin/{NAME} is there, and is not ours\n", 1),
    ],
)
def test_what_keeps_it_from_being_installed_is_one_clear_line(
    fresh_container: Container, where: str, said: str, status: int
) -> None:
    before_it = {
        "without systemd": "mount -t tmpfs none /run/systemd",
        "without apt-get": (
            "mkdir /tmp/bin; mount -t tmpfs none /tmp/bin; mkdir /tmp/bin/work /tmp/bin/top;"
            "mount -t overlay -o lowerdir=/usr/bin,upperdir=/tmp/bin/top,workdir=/tmp/bin/work none /usr/bin;"
            "rm /usr/bin/apt-get"
        ),
        "an old Python": (
            "printf '#!/bin/sh\\n[ \"$1\" = --version ] && echo Python 3.9.2 || exit 1' >/tmp/old; chmod +x /tmp/old;"
            "mount --bind /tmp/old $(readlink -f /usr/bin/python3)"
        ),
        "something of the owner's": f"mount -t tmpfs none /opt; mkdir {HOME}; echo mine >{HOME}/notes",
        "another program": f"mount -t tmpfs none /usr/local/bin; echo mine >/usr/local/bin/{NAME}",
    }.get(where, "true")
    options = ["--instal"] if where == "a wrong option" else []
    command = ("unshare", "--mount", "sh", "-ec", f'{before_it}; exec "$@"', "sh", INSTALL, *options)
    before = fresh_container.snapshot()
    if where == "as a user":
        failed = fresh_container.run(INSTALL, as_user="nobody", check=False)
    else:
        failed = fresh_container.run(*command, check=False)
    assert (failed.returncode, failed.stderr.startswith(said)) == (status, True), failed
    assert fresh_container.snapshot() == before


def test_two_at_once_do_not_meet(fresh_container: Container) -> None:
    failed = fresh_container.run("flock", LOCK, INSTALL, check=False)
    message = "install.sh: another install or uninstall is at work\n  -> wait for it\n"
    assert (failed.returncode, failed.stderr) == (1, message)


def test_an_uninstall_leaves_a_daemon_that_was_started_by_hand_alone(service: Service) -> None:
    """It runs from a clone, in the same run-time directory."""
    container = service.container
    container.run("cp", "-r", "/mnt/src", "/opt/clone")
    container.run("systemctl", "stop", NAME)
    container.run("systemd-run", "--unit=by-hand", "--property=WorkingDirectory=/opt/clone",
                  f"{HOME}/venv/bin/python", "-m", "moe_gpu_stabilizer")  # fmt: skip
    container.wait_for_journal("by-hand", "^ready: ")
    container.run(UNINSTALL)
    assert container.path(f"/run/{NAME}/status.json").exists()
    container.run("systemctl", "stop", "by-hand")
