"""Calls that the kernel may keep waiting are left behind, and cost no more than a moment."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_gpu_stabilizer.mounts import Mounts
from moe_gpu_stabilizer.patience import MOST_LEFT_BEHIND_BY_ONE, KeptWaitingError, Patience, Task
from moe_gpu_stabilizer.visits import Visits
from tests.support import wait_until


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Ends what waits."""
    event = threading.Event()
    yield event
    event.set()


def fail() -> None:
    raise FileNotFoundError("gone")


def test_what_is_called_returns_and_raises_as_ever() -> None:
    patience = Patience()
    assert patience.call(lambda: 5) == 5
    with pytest.raises(FileNotFoundError, match="gone"):
        patience.call(fail)


def test_what_keeps_us_waiting_is_left_behind_and_its_late_answer_disposed_of(released: threading.Event) -> None:
    patience = Patience()
    disposed: list[bool] = []
    with pytest.raises(KeptWaitingError):
        patience.call(lambda: released.wait(60), dispose=disposed.append)
    released.set()
    wait_until(lambda: disposed == [True], "the late answer")


def test_what_makes_progress_may_take_longer() -> None:
    steps: list[int] = []

    def slowly() -> str:
        for step in range(4):
            threading.Event().wait(0.3)
            steps.append(step)
        return "done"

    assert Patience().call(slowly, progress=lambda: len(steps)) == "done"


def test_a_call_that_never_begins_is_nobodys_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine so busy that the thread does not get to run."""
    make_process(tmp_path, 10, 1000, locked=False)
    visits = Visits(Mounts(), tmp_path)
    monkeypatch.setattr(Task, "run", lambda task: None)
    visits.update(0)
    assert not any(visit.uses for visit in visits.by_pid.values())


def test_a_user_who_keeps_us_waiting_again_and_again_is_out_and_others_are_not(released: threading.Event) -> None:
    patience = Patience()
    for _ in range(MOST_LEFT_BEHIND_BY_ONE):
        assert not patience.is_out(share=1000)
        with pytest.raises(KeptWaitingError):
            patience.call(lambda: released.wait(60), share=lambda: 1000)
    assert patience.is_out(share=1000)
    assert not patience.is_out(share=1001)
    released.set()
    wait_until(lambda: not patience.is_out(share=1000), "all threads ended")


def test_the_thread_ends_with_whom_it_worked_for() -> None:
    def thread_of(patience: Patience) -> threading.Thread:
        return patience.call(threading.current_thread)

    thread = thread_of(Patience())
    wait_until(lambda: not thread.is_alive(), "the thread's end")


# Processes whose maps cannot be read: a pipe that nobody writes to keeps its reader waiting as well.


def make_process(proc: Path, pid: int, user_id: int, locked: bool) -> Path:
    directory = proc / str(pid)
    directory.mkdir(parents=True)
    (directory / "status").write_text(f"Name:\tllama-server\nUid:\t{user_id}\t{user_id}\t{user_id}\t{user_id}\n")
    (directory / "exe").symlink_to("/bin/cat")
    if locked:
        os.mkfifo(directory / "maps")
    else:
        (directory / "maps").write_text("")
    return directory


def test_a_process_whose_maps_cannot_be_read_keeps_nobody_from_being_looked_at(tmp_path: Path) -> None:
    locked = [make_process(tmp_path, pid, 1000, locked=True) for pid in range(10, 16)]
    for pid in (16, 17):
        make_process(tmp_path, pid, 1001, locked=False)
    visits = Visits(Mounts(), tmp_path)
    try:
        began = time.monotonic()
        for second in range(4):
            visits.update(second * 10_000_000_000)
        assert time.monotonic() - began < 30, "two threads were left behind, and then no more"
        assert {pid for pid, visit in visits.by_pid.items() if visit.uses} == {16, 17}
    finally:
        for directory in locked:  # whoever waits for a writer goes on
            os.close(os.open(directory / "maps", os.O_RDWR | os.O_NONBLOCK))
