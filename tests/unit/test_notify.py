"""What systemd is told, and how often."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_gpu_stabilizer.notify import PING_SHARE, ServiceManager

WATCHDOG_SECONDS = 30
PING_NS = WATCHDOG_SECONDS * 10**9 // PING_SHARE


class Listener:
    """Plays systemd's end of the notification socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)

    def heard(self) -> list[str]:
        """What has arrived since the last time."""
        messages = []
        while True:
            try:
                messages.append(self.socket.recv(65536).decode())
            except BlockingIOError:
                return messages


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    listener = Listener(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    yield listener
    listener.socket.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The monotonic clock in nanoseconds, as a list of one number that the test sets."""
    now = [1_000 * 10**9]
    monkeypatch.setattr("moe_gpu_stabilizer.notify.time.monotonic_ns", lambda: now[0])
    return now


def test_systemd_hears_of_the_start_and_the_end(systemd: Listener) -> None:
    manager = ServiceManager()
    manager.ready()
    manager.stopping()
    assert systemd.heard() == ["READY=1", "STOPPING=1"]


def test_a_status_is_sent_when_it_changes(systemd: Listener) -> None:
    manager = ServiceManager()
    for line in (
        "idle, 3 libraries watched",
        "idle, 3 libraries watched",
        "floor 1020 MHz for llama-server (pid 4242)",
    ):
        manager.status(line)
    assert systemd.heard() == [
        "STATUS=idle, 3 libraries watched",
        "STATUS=floor 1020 MHz for llama-server (pid 4242)",
    ]


def test_no_status_can_be_taken_for_another_message(systemd: Listener) -> None:
    """systemd believes every line: it would take another program for the service, and end it in its place."""
    ServiceManager().status("no GPU node yet (/nope\nMAINPID=263\nSTOPPING=1)")
    assert systemd.heard() == ["STATUS=no GPU node yet (/nope\\nMAINPID=263\\nSTOPPING=1)"]


def test_a_status_is_short_enough_for_systemd(systemd: Listener) -> None:
    ServiceManager().status("cannot attach to /a/long/path; " * 1000)
    (message,) = systemd.heard()
    assert len(message.encode()) < 4096
    assert message.endswith("... (--status has all of it)")


def test_a_status_that_was_lost_is_sent_again(systemd: Listener) -> None:
    manager = ServiceManager()
    for number in range(1000):
        manager.status(f"line {number}")
    systemd.heard()
    manager.status("line 999")
    assert systemd.heard() == ["STATUS=line 999"]


def test_without_a_watchdog_no_sign_of_life_is_sent(systemd: Listener) -> None:
    manager = ServiceManager()
    manager.on_deadline()
    assert (systemd.heard(), manager.deadline_ns) == ([], None)


@pytest.mark.usefixtures("clock")
def test_a_watchdog_is_fed_from_the_start(systemd: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", str(WATCHDOG_SECONDS * 10**6))
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    ServiceManager().ready()
    assert systemd.heard() == ["READY=1", "WATCHDOG=1"]


def test_ticks_feed_it_so_that_no_wake_up_of_its_own_is_needed(
    systemd: Listener, clock: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", str(WATCHDOG_SECONDS * 10**6))
    manager = ServiceManager()
    manager.ready()
    pings = 0
    for _ in range(12):
        clock[0] += 5 * 10**9
        assert manager.deadline_ns is not None
        assert manager.deadline_ns > clock[0], "the tick comes first"
        manager.on_deadline()
        pings += systemd.heard().count("WATCHDOG=1")
    assert pings >= 60 * PING_SHARE // WATCHDOG_SECONDS


def test_signs_of_life_are_not_sent_more_often_than_needed(
    systemd: Listener, clock: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", str(WATCHDOG_SECONDS * 10**6))
    manager = ServiceManager()
    manager.ready()
    systemd.heard()
    for _ in range(100):
        clock[0] += PING_NS // 100
        manager.on_deadline()
    assert len(systemd.heard()) <= 2


@pytest.mark.parametrize(
    ("usec", "pid"), [("30000000", "1"), ("0", ""), ("-5", ""), ("soon", ""), ("30000000", "nobody")]
)
def test_a_watchdog_that_is_anothers_or_nonsense_is_none(
    systemd: Listener, monkeypatch: pytest.MonkeyPatch, usec: str, pid: str
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    if pid:
        monkeypatch.setenv("WATCHDOG_PID", pid)
    manager = ServiceManager()
    manager.ready()
    assert (systemd.heard(), manager.deadline_ns) == (["READY=1"], None)


def test_a_systemd_that_does_not_read_keeps_nobody_waiting(systemd: Listener) -> None:
    manager = ServiceManager()
    for number in range(5_000):  # far more than a socket holds
        manager.status(f"line {number}")
    assert 0 < len(systemd.heard()) < 5_000


def test_an_abstract_address_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"moe-gpu-stabilizer-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        ServiceManager().ready()
        assert listener.recv(100) == b"READY=1"


def test_a_listener_that_has_gone_ends_nothing(systemd: Listener) -> None:
    systemd.socket.close()
    ServiceManager().status("idle")


def test_without_a_listener_nothing_is_told_and_nothing_is_loaded() -> None:
    program = (
        "import sys; from moe_gpu_stabilizer.notify import ServiceManager;"
        "ServiceManager().ready(); print('socket' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "")
