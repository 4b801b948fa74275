"""How a process was launched, as its own memory says: also where it does not want to be read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from moe_gpu_stabilizer import launch as launch_module
from moe_gpu_stabilizer.launch import CHUNK_BYTES, MOST_LAUNCH_BYTES, LaunchReader, UnreadableError, launch_of
from moe_gpu_stabilizer.processes import ProcessVanishedError
from tests.support import wait_until

# Longer than any pid can be: it is no process's.
NO_PID = 2**22 + 1


@contextmanager
def started(*command: str, environment: dict[str, str] | None = None) -> Iterator[int]:
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_launch_is_argv_and_environment() -> None:
    with started("sleep", "60", "0", environment={"LLAMA_ARG_CPU_MOE": "1", "A": ""}) as pid:
        wait_until(lambda: launch_of(pid).cmdline.startswith(b"sleep"), "the exec")
        launch = launch_of(pid)
    assert launch.cmdline == b"sleep\x0060\x000\0"
    assert launch.environ == b"LLAMA_ARG_CPU_MOE=1\0A=\0"


@pytest.mark.parametrize("argument", ["", " ", "a\nb", "--cpu-moe)", "\udcff", "größe", "x" * 100_000])
def test_any_argument_comes_whole(argument: str) -> None:
    with started(sys.executable, "-c", "import sys; sys.stdin.read()", argument, "end") as pid:
        expected = os.fsencode(argument) + b"\0end\0"
        wait_until(lambda: launch_of(pid).cmdline.endswith(expected), "the exec")


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    """A directory as /proc has one for each process, of pid 7."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_text("7 (llama-server) S " + "0 " * 49)
    (tmp_path / "7/cmdline").write_bytes(b"llama-server\0")
    (tmp_path / "7/environ").write_bytes(b"A=1\0")
    return tmp_path / "7"


def test_the_launch_is_read_to_its_end_but_no_further_than_any_honest_one(entry: Path) -> None:
    (entry / "cmdline").write_bytes(b"x" * (3 << 20))
    (entry / "environ").write_bytes(b"y" * (2 << 20))
    launch = launch_of(7, entry.parent)
    assert (launch.cmdline, launch.environ) == (b"x" * (3 << 20), b"y" * (2 << 20))
    (entry / "environ").write_bytes(b"y" * (2 * MOST_LAUNCH_BYTES))
    launch = launch_of(7, entry.parent)
    assert launch.cmdline == b"x" * (3 << 20)
    assert len(launch.environ) <= MOST_LAUNCH_BYTES - (3 << 20) + CHUNK_BYTES


def test_arguments_without_end_are_all_that_is_read(entry: Path) -> None:
    """A process may have its argv point to gigabytes (PR_SET_MM_MAP, prctl(2))."""
    (entry / "cmdline").write_bytes(b"x" * (2 * MOST_LAUNCH_BYTES))
    launch = launch_of(7, entry.parent)
    assert MOST_LAUNCH_BYTES <= len(launch.cmdline) <= MOST_LAUNCH_BYTES + CHUNK_BYTES
    assert launch.environ == b""


@pytest.mark.parametrize("file", ["cmdline", "environ"])
def test_whoever_keeps_the_reader_waiting_is_given_up(entry: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO that nobody writes to stands for memory that is locked up; tests/faults has the real thing."""
    (entry / file).unlink()
    os.mkfifo(entry / file)
    monkeypatch.setattr(launch_module, "READ_NS", 300_000_000)
    began, before = time.monotonic(), os.listdir("/proc/self/fd")
    with pytest.raises(UnreadableError):
        launch_of(7, entry.parent)
    assert 0.3 <= time.monotonic() - began < 10
    assert os.listdir("/proc/self/fd") == before
    assert psutil.Process().children() == []


def test_a_dead_process_has_no_launch() -> None:
    with subprocess.Popen(["true"]) as process:
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "the process's end")
        with pytest.raises(ProcessVanishedError):
            launch_of(process.pid)


@pytest.mark.parametrize("pid", [NO_PID, 2**31])
def test_no_process_has_none_either(pid: int) -> None:
    with pytest.raises(ProcessVanishedError):
        launch_of(pid)


def test_a_process_that_ends_while_it_is_read_has_vanished() -> None:
    with started("sleep", "60") as pid:
        wait_until(lambda: launch_of(pid).cmdline.startswith(b"sleep"), "the exec")
    reader = None
    with started("sleep", "60") as pid:
        reader = LaunchReader(pid)
    with pytest.raises((UnreadableError, ProcessVanishedError)):
        reader.end()


def test_a_process_whose_main_thread_has_ended_is_read_by_another() -> None:
    """The dead thread's cmdline and environ are empty: it has no memory any more."""
    program = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); "
    program += "ctypes.PyDLL(None).pthread_exit(None)"
    with started(sys.executable, "-c", program) as pid:
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "the main thread's end")
        assert program.encode() in launch_of(pid).cmdline


def test_without_descriptors_it_says_so_and_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> int:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "posix_spawn", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="unavailable"):
        LaunchReader(os.getpid())
    assert os.listdir("/proc/self/fd") == before
