"""A function in a child process: its answer comes back, its memory and its misfortunes do not."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_gpu_stabilizer.errors import ConfigError, DevfreqError, StabilizerError
from moe_gpu_stabilizer.isolated import CHILD_MEMORY_BYTES, Child, ChildError, call_in_child
from tests.support import wait_until

# Long enough for any answer here, also on a busy machine.
PATIENT_SECONDS = 20


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "answer", [None, 0, 1.5, "", "größe\n\0", "\udcff", [1, [2]], {"a": None}, "x" * 3_000_000], ids=type
)
def test_the_answer_comes_back(answer: Any) -> None:
    assert call_in_child(lambda: answer, PATIENT_SECONDS) == answer


def test_tuples_come_back_as_lists() -> None:
    assert call_in_child(lambda: (1, (2, 3)), PATIENT_SECONDS) == [1, [2, 3]]


def test_what_the_child_does_to_its_memory_stays_there() -> None:
    seen: list[int] = []

    def change() -> int:
        seen.append(1)
        sys.modules["only_in_the_child"] = sys
        return os.getpid()

    assert call_in_child(change, PATIENT_SECONDS) != os.getpid()
    assert seen == []
    assert "only_in_the_child" not in sys.modules


@pytest.mark.parametrize("error", [StabilizerError("what", "how"), ConfigError("what", "how"), ConfigError("what")])
def test_an_error_that_explains_itself_arrives_as_it_was(error: StabilizerError) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        call_in_child(fail, PATIENT_SECONDS)
    assert type(caught.value) is type(error)
    assert (caught.value.message, caught.value.hint) == (error.message, error.hint)
    assert caught.value.exit_code == error.exit_code


def test_any_other_error_of_ours_arrives_with_its_text() -> None:
    def fail() -> None:
        raise DevfreqError("what", "how")

    with pytest.raises(StabilizerError, match="what; how"):
        call_in_child(fail, PATIENT_SECONDS)


def test_any_other_exception_is_no_answer_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("a reader's bug")

    with pytest.raises(ChildError, match="without an answer"):
        call_in_child(fail, PATIENT_SECONDS)
    assert capfd.readouterr() == ("", "")


def test_an_answer_that_json_cannot_carry_is_no_answer() -> None:
    with pytest.raises(ChildError):
        call_in_child(lambda: [1, 2, {3, 4}], PATIENT_SECONDS)


def test_a_child_that_is_killed_gives_no_answer() -> None:
    with pytest.raises(ChildError, match="without an answer"):
        call_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL), PATIENT_SECONDS)


@pytest.fixture
def told() -> Iterator[int]:
    """Signals become bytes in a pipe, as in the daemon; returns the descriptor to read them from."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    reader, writer = os.pipe2(os.O_NONBLOCK)
    wakeup_fd = signal.set_wakeup_fd(writer)
    handlers = [signal.signal(number, lambda _number, _frame: None) for number in numbers]
    yield reader
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
    signal.set_wakeup_fd(wakeup_fd)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_child_ends_it_and_is_not_taken_for_the_daemons(told: int, number: signal.Signals) -> None:
    """systemd sends them to every process of the unit."""
    with pytest.raises(ChildError, match="without an answer"):
        call_in_child(lambda: os.kill(os.getpid(), number), PATIENT_SECONDS)
    with pytest.raises(BlockingIOError):
        os.read(told, 1)


def test_a_child_that_wants_all_memory_gets_none() -> None:
    with pytest.raises(ChildError, match="without an answer"):
        call_in_child(lambda: len(bytearray(2 * CHILD_MEMORY_BYTES)), PATIENT_SECONDS)


def test_a_child_has_its_memory_whatever_its_parent_has_reserved() -> None:
    """Each thread of the parent reserves some 70 MB of addresses, and uses next to nothing of them."""
    with mmap.mmap(-1, 2 * CHILD_MEMORY_BYTES, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ):
        assert call_in_child(lambda: len(bytearray(CHILD_MEMORY_BYTES // 2)), PATIENT_SECONDS) > 0


def test_a_child_that_leaves_gives_no_answer() -> None:
    with pytest.raises(ChildError, match="without an answer"):
        call_in_child(lambda: sys.exit(3), PATIENT_SECONDS)


def test_a_child_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def never_end() -> None:
        pid_file.write_text(str(os.getpid()))
        while True:
            signal.pause()

    started = time.monotonic()
    with pytest.raises(ChildError, match="too long"):
        call_in_child(never_end, 1.0)
    assert 1.0 <= time.monotonic() - started < PATIENT_SECONDS
    pid = int(pid_file.read_text())
    wait_until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "the child's end"
    )


def test_an_ended_child_is_waited_for_and_leaves_no_descriptor() -> None:
    """Nothing of it may be left as <defunct> in the owner's list of processes."""
    call_in_child(lambda: None, PATIENT_SECONDS)
    descriptors = open_descriptors()
    call_in_child(lambda: None, PATIENT_SECONDS)
    with pytest.raises(ChildError):
        call_in_child(lambda: os._exit(1), PATIENT_SECONDS)
    assert open_descriptors() == descriptors
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_child_at_work_can_be_watched_and_its_answer_taken_in_pieces() -> None:
    child = Child(lambda: "x" * 200_000)
    receives = 1
    while not child.receive():
        receives += 1
    assert receives > 1
    assert child.end() == "x" * 200_000


def test_a_child_can_be_given_up_before_its_answer() -> None:
    descriptors = open_descriptors()
    child = Child(signal.pause)
    with pytest.raises(ChildError):
        child.end()
    assert open_descriptors() == descriptors


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """As in a daemon with a descriptor for each probe and each process: select(2) knows none from 1,024 on."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    with ExitStack() as stack:
        for _ in range(1024):
            stack.enter_context(open(os.devnull, "rb"))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("many_descriptors")
def test_a_process_with_many_descriptors_can_have_children_too() -> None:
    assert call_in_child(lambda: "here", PATIENT_SECONDS) == "here"
