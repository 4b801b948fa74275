"""What /proc says of real processes, also of those with names that somebody chose to confuse us."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from moe_gpu_stabilizer.policy import Process
from moe_gpu_stabilizer.processes import (
    AT_WORK_SHARE,
    ProcessVanishedError,
    ThreadMeter,
    every_pid_and_inode,
    identify,
    is_dead,
    is_running,
    name_of,
    printable,
    read_proc,
    user_id_of,
)
from tests.support import stays, wait_until

PR_SET_NAME = 15
MS = 1_000_000

# Longer than any pid can be: it is no process's.
NO_PID = 2**22 + 1

# proc(5): 52 fields. The one behind the name and the 20th behind that matter here.
STAT = "{pid} ({name}) {state} 1 1 1 0 -1 4194304 0 0 0 0 {utime} {stime} 0 0 20 0 1 0 {start} 0 0\n"


@contextmanager
def started(*command: str, environment: dict[str, str] | None = None) -> Iterator[int]:
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@contextmanager
def named(name: bytes) -> Iterator[None]:
    """Give this very thread another name: exec would undo that of a child."""
    prctl = ctypes.CDLL(None).prctl
    before = Path("/proc/thread-self/comm").read_bytes().rstrip(b"\n")
    prctl(PR_SET_NAME, name)
    try:
        yield
    finally:
        prctl(PR_SET_NAME, before)


@pytest.fixture
def ended() -> int:
    """The pid of a process that is over."""
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


ODD_NAMES = [b"(", b")", b") R 1 1 1 1", b"a) Z (b", b"a b", b"a\nb", b"\xff\xfe", b"\x1b[31mred", b"(()()) S 1 2 3"]


# Who is it?


def test_a_process_is_known_by_pid_and_start(ended: int) -> None:
    with started("sleep", "60") as pid:
        first = identify(pid)
        assert first.tgid == pid
        assert identify(pid) == first
        seconds = first.start_ticks / os.sysconf("SC_CLK_TCK")
        assert abs(psutil.boot_time() + seconds - psutil.Process(pid).create_time()) < 2
        assert is_running(first)
        assert not is_running(Process(pid, first.start_ticks + 1)), "another process with the same pid"
    assert not is_running(first)
    with pytest.raises(ProcessVanishedError):
        identify(ended)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_name_cannot_forge_the_fields_behind_it(name: bytes) -> None:
    before = identify(os.getpid())
    with named(name):
        assert Path("/proc/self/comm").read_bytes() == name + b"\n"
        assert identify(os.getpid()) == before


def test_a_dead_process_whose_parent_has_not_asked_still_has_its_pid() -> None:
    with subprocess.Popen(["true"]) as process:
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "the process's end")
        assert identify(process.pid).tgid == process.pid
        assert is_dead(Path(f"/proc/{process.pid}"))


@pytest.mark.parametrize("pid", [NO_PID, 2**31])
def test_no_process_has_vanished(pid: int) -> None:
    for look in (identify, user_id_of):
        with pytest.raises(ProcessVanishedError):
            look(pid)
    assert name_of(pid) == "?"


def test_every_process_is_listed_with_its_directory() -> None:
    with started("sleep", "60") as pid:
        listed = every_pid_and_inode()
        assert listed[pid] == os.stat(f"/proc/{pid}").st_ino
        assert {1, os.getpid()} <= set(listed)


def test_only_numbers_are_processes(tmp_path: Path) -> None:
    for name in ("1", "4242", "self", "sys", "4242x", "-1"):
        (tmp_path / name).mkdir()
    assert set(every_pid_and_inode(tmp_path)) == {1, 4242}


def test_a_process_belongs_to_its_user() -> None:
    assert user_id_of(os.getpid()) == os.getuid()


def test_a_file_of_proc_is_read_whole_in_pieces() -> None:
    """One read() of maps gives a page."""
    maps = read_proc(Path(f"/proc/{os.getpid()}/maps"), 1 << 26)
    assert len(maps) > 4096
    assert maps.endswith(b"\n")
    assert len(read_proc(Path(f"/proc/{os.getpid()}/maps"), 100)) == 100


# What is it called?


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"llama-server", "llama-server"),
        (b"two words", "two words"),
        ("größe".encode(), "größe"),
        (b"a\nb", r"a\nb"),
        (b"\x1b[31mred", r"\x1b[31mred"),
        (b"\xffx", "\ufffdx"),
        (b"(a) (b", "(a) (b"),
    ],
)
def test_a_name_is_shown_without_what_a_terminal_trips_over(name: bytes, shown: str) -> None:
    with named(name):
        assert name_of(os.getpid()) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain größe (1) ' \" \\", "plain größe (1) ' \" \\"),
        ("a\nb\r\tc\0", r"a\nb\r\tc\x00"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\udcff", r"\udcff"),
        ("\u202eright to left", r"\u202eright to left"),
        ("\u200bzero width", r"\u200bzero width"),
        ("", ""),
    ],
)
def test_what_is_not_printable_is_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(text).isprintable()


# Is a thread at work?


class Thread:
    """A thread of this process that computes or waits, as told."""

    def __init__(self, computes: bool) -> None:
        self.tid = 0
        self._end = threading.Event()
        self._known = threading.Event()
        self._thread = threading.Thread(target=self._compute if computes else self._wait)

    def _compute(self) -> None:
        self._begin()
        while not self._end.is_set():
            sum(range(1000))

    def _wait(self) -> None:
        self._begin()
        self._end.wait()

    def _begin(self) -> None:
        self.tid = threading.get_native_id()
        self._known.set()

    def __enter__(self) -> Thread:
        self._thread.start()
        assert self._known.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def look(meter: ThreadMeter, tid: int, since_ns: int = 0) -> bool:
    return meter.at_work(tid, since_ns, time.monotonic_ns())


def test_a_thread_that_computes_is_at_work() -> None:
    with Thread(computes=True) as thread:
        meter = ThreadMeter(os.getpid())
        assert not look(meter, thread.tid), "the first look has nothing to compare with"
        # On a busy machine it may have to wait for its turn; sooner or later it is seen.
        wait_until(lambda: look(meter, thread.tid), "a look that sees it at work")


def test_a_thread_that_waits_is_not_at_work() -> None:
    with Thread(computes=False) as thread:
        meter = ThreadMeter(os.getpid())
        assert not look(meter, thread.tid)
        stays(lambda: not look(meter, thread.tid), 0.3, "a thread at rest")


def test_a_thread_that_has_stopped_computing_is_not_at_work() -> None:
    """A process that is stopped is the surest thing to rest."""
    with started(sys.executable, "-c", "while True: pass") as pid:
        meter = ThreadMeter(pid)
        wait_until(lambda: look(meter, pid), "a look that sees it at work")
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "its stop")
        look(meter, pid)
        wait_until(lambda: not look(meter, pid), "a look that sees it at rest")


def test_a_thread_that_has_ended_is_not_at_work(ended: int) -> None:
    with Thread(computes=True) as thread:
        pass
    assert not look(ThreadMeter(os.getpid()), thread.tid)
    assert not look(ThreadMeter(ended), ended)


class Threads:
    """A /proc in which one process's threads have used exactly so much CPU time."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.meter = ThreadMeter(7, proc)

    def set(self, tid: int, used_ms: float, state: str = "S", schedstat: bool = True, name: str = "llama") -> None:
        directory = self.proc / f"7/task/{tid}"
        directory.mkdir(parents=True, exist_ok=True)
        ticks = int(used_ms / 1000 * os.sysconf("SC_CLK_TCK"))
        (directory / "stat").write_text(STAT.format(pid=tid, name=name, state=state, utime=ticks, stime=0, start=1234))
        if schedstat:
            (directory / "schedstat").write_text(f"{int(used_ms * MS)} 0 1\n")

    def at_work(self, tid: int, now_ms: float, since_ms: float = 0) -> bool:
        return self.meter.at_work(tid, int(since_ms * MS), int(now_ms * MS))


@pytest.fixture
def threads(tmp_path: Path) -> Threads:
    return Threads(tmp_path)


def test_a_few_per_cent_of_the_time_are_work(threads: Threads) -> None:
    threads.set(7, 0)
    assert not threads.at_work(7, 1000)
    threads.set(7, 250 * AT_WORK_SHARE - 0.1)
    assert not threads.at_work(7, 1250)
    threads.set(7, 2 * 250 * AT_WORK_SHARE)
    assert threads.at_work(7, 1500)


def test_an_idle_servers_thousandth_is_not_work(threads: Threads) -> None:
    for look_number in range(10):
        threads.set(7, look_number * 0.25)
        assert not threads.at_work(7, look_number * 250)


def test_work_before_the_last_call_is_no_sign_of_work_after_it(threads: Threads) -> None:
    threads.set(7, 0)
    threads.at_work(7, 1000)
    threads.set(7, 500)
    assert not threads.at_work(7, 1750, since_ms=1500), "the look before was before the call"
    threads.set(7, 750)
    assert threads.at_work(7, 2000, since_ms=1500)


def test_another_thread_has_nothing_to_compare_with(threads: Threads) -> None:
    threads.set(7, 0)
    threads.set(8, 5000)
    threads.at_work(7, 1000)
    assert not threads.at_work(8, 1250)
    threads.set(8, 5250)
    assert threads.at_work(8, 1500)


def test_a_thread_that_waits_for_the_disk_is_at_work_at_the_first_look(threads: Threads) -> None:
    """A model that is larger than memory is read while it computes."""
    threads.set(7, 0, state="D")
    assert threads.at_work(7, 1000)
    threads.set(7, 0, state="S")
    assert not threads.at_work(7, 1250)


def test_a_thread_named_like_a_state_is_not_in_that_state(threads: Threads) -> None:
    threads.set(7, 0, name="x) D 1 1 (y")
    assert not threads.at_work(7, 1000)


def test_without_schedstat_clock_ticks_must_do(threads: Threads) -> None:
    threads.set(7, 1000, schedstat=False)
    assert not threads.at_work(7, 1000)
    threads.set(7, 1250, schedstat=False)
    assert threads.at_work(7, 1250)
    assert not threads.at_work(7, 1500)


def test_a_schedstat_that_says_nothing_is_none(threads: Threads) -> None:
    """Kernels without CONFIG_SCHED_INFO."""
    threads.set(7, 1000)
    (threads.proc / "7/task/7/schedstat").write_text("")
    threads.at_work(7, 1000)
    threads.set(7, 1250, schedstat=False)
    assert threads.at_work(7, 1250)
