"""Judging real processes, with a table in place of the kernel's, and readers that may be kept waiting."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from moe_gpu_stabilizer import judging as module
from moe_gpu_stabilizer import launch, policy
from moe_gpu_stabilizer.journal import Troubles
from moe_gpu_stabilizer.judging import READERS_AT_ONCE, Judging
from moe_gpu_stabilizer.launch import LaunchReader
from moe_gpu_stabilizer.records import KIND_CALL, KIND_EXEC, VERDICT_COUNTS, Wake
from moe_gpu_stabilizer.settings import Settings
from moe_gpu_stabilizer.turns import ProcessTurns
from tests.support import wait_until

FLAG = "--cpu-moe-unit"
READ_NS = 300_000_000


class Table:
    """What the kernel would know."""

    def __init__(self) -> None:
        self.verdicts: dict[int, bool] = {}

    def set_verdict(self, tgid: int, counts: bool) -> None:
        self.verdicts[tgid] = counts

    def turns(self, _tgid: int) -> ProcessTurns | None:
        return None

    def forget_turns(self, _tgid: int) -> None:
        pass

    def forget(self, tgid: int) -> None:
        self.verdicts.pop(tgid, None)

    forget_verdict = forget


class Court:
    """A Judging with all that it speaks to."""

    def __init__(self) -> None:
        self.table, self.troubles, self.selector = Table(), Troubles(), selectors.DefaultSelector()
        self.told: list[policy.Event] = []
        self.judging = Judging(
            self.table, Settings(detect="flags", moe_flags=(FLAG,)), self.troubles, self.selector,
            feed=self.told.append, changed=lambda: None, appeared=lambda _tgid: None,
        )  # fmt: skip

    def call(self, pid: int, kind: int = KIND_CALL, verdict: int = 0) -> None:
        self.judging.on_wake(Wake(time.monotonic_ns(), pid, pid, kind, verdict))

    def turn(self) -> None:
        """One round of the daemon's loop."""
        for key, _ in self.selector.select(0.01):
            key.data()
        deadline_ns = self.judging.deadline_ns
        if deadline_ns is not None and deadline_ns <= time.monotonic_ns():
            self.judging.on_deadline()

    def rests(self) -> bool:
        self.turn()
        return self.judging.deadline_ns is None

    def judged(self, *pids: int) -> bool:
        self.turn()
        return set(pids) <= self.judging.tracker.known.keys()


@pytest.fixture
def court() -> Iterator[Court]:
    court = Court()
    yield court
    court.judging.close()
    for pid in list(court.judging.tracker.known):
        court.judging.forget(pid)
    court.selector.close()


@pytest.fixture
def processes() -> Iterator[list[int]]:
    """A dozen, with the flag that counts."""
    with ExitStack() as stack:
        started = [
            stack.enter_context(subprocess.Popen(["sh", "-c", "read line", "sh", FLAG], stdin=subprocess.PIPE))
            for _ in range(12)
        ]
        yield [process.pid for process in started]
        for process in started:
            process.kill()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The processes whose memory is locked up: a FIFO that nobody writes to stands for it."""
    pids: set[int] = set()

    def reader(pid: int) -> LaunchReader:
        if pid not in pids:
            return LaunchReader(pid)
        return StuckReader(pid)

    monkeypatch.setattr(module, "LaunchReader", reader)
    monkeypatch.setattr(launch, "READ_NS", READ_NS)
    return pids


class StuckReader(LaunchReader):
    """One that never gets anything."""

    def fileno(self) -> int:
        if not hasattr(self, "_silent"):
            self._silent, self._writer = os.pipe()
        return self._silent

    def end(self) -> launch.Launch:
        os.close(self._silent)
        os.close(self._writer)
        return super().end()


def test_a_process_is_judged_by_its_launch_and_its_call_is_told(court: Court, processes: list[int]) -> None:
    pid = processes[0]
    court.call(pid)
    wait_until(lambda: court.judged(pid), "the verdict")
    process = court.judging.tracker.known[pid].process
    assert [type(event) for event in court.told] == [policy.Judged, policy.CallSeen]
    assert court.told[0] == policy.Judged(process, counts=True)
    assert court.table.verdicts == {pid: True}


def test_a_second_call_while_it_is_read_makes_no_second_reader(court: Court, processes: list[int]) -> None:
    for _ in range(5):
        court.call(processes[0])
    wait_until(lambda: court.judged(processes[0]), "the verdict")
    assert len(court.told) == 2
    court.call(processes[0], verdict=VERDICT_COUNTS)
    assert isinstance(court.told[-1], policy.CallSeen)


def test_a_process_that_becomes_another_while_it_is_read_is_not_judged_by_the_old_one(
    court: Court, processes: list[int]
) -> None:
    before = os.listdir("/proc/self/fd")
    court.call(processes[0])
    court.call(processes[0], kind=KIND_EXEC)
    for _ in range(20):
        court.turn()
    assert court.told == []
    assert os.listdir("/proc/self/fd") == before


def test_one_that_ends_while_it_is_read_leaves_nothing(court: Court, processes: list[int]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    court.call(processes[0])
    os.kill(processes[0], 9)
    wait_until(lambda: court.judged() and len(os.listdir("/proc/self/fd")) == before, "nothing left")
    assert court.judging.tracker.known == {}
    assert court.judging.deadline_ns is None


def test_only_so_many_are_read_at_once(court: Court, processes: list[int], stuck: set[int]) -> None:
    stuck.update(processes)
    for pid in processes:
        court.call(pid)
    assert len(court.selector.get_map()) == READERS_AT_ONCE


def test_locked_up_memory_is_given_up_and_tried_again_one_at_a_time(
    court: Court, processes: list[int], stuck: set[int]
) -> None:
    """Its verdict keeps the kernel from asking again at each call; a tick does, in case it has come free."""
    locked = processes[0]
    stuck.add(locked)
    court.call(locked)
    wait_until(lambda: court.judged(locked), "it given up")
    assert court.judging.tracker.known[locked].verdict.reason == "its arguments and environment cannot be read"
    assert court.table.verdicts == {locked: False}
    court.judging.try_again()
    wait_until(lambda: court.judged() and court.judging.deadline_ns is None, "it given up again")
    assert court.table.verdicts == {locked: False}
    stuck.clear()
    court.judging.try_again()
    wait_until(lambda: court.judged() and court.table.verdicts == {locked: True}, "judged at last")


def test_who_can_be_read_does_not_wait_for_those_who_cannot(
    court: Court, processes: list[int], stuck: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dozen hostile processes of another user, and then the owner's: it waits for the first four at most."""
    *hostile, honest = processes
    stuck.update(hostile)
    monkeypatch.setattr(module, "user_id_of", lambda pid: 1000 if pid == honest else 1001)
    for pid in processes:
        court.call(pid)
    wait_until(lambda: court.judged(honest), "the honest one judged")
    given_up = len(court.judging.tracker.known) - 1
    assert given_up <= READERS_AT_ONCE


def test_other_flags_are_in_force_when_all_is_judged_by_them(court: Court, processes: list[int]) -> None:
    for pid in processes[:3]:
        court.call(pid)
    wait_until(lambda: court.judged(*processes[:3]), "the verdicts")
    court.judging.use(Settings(detect="flags", moe_flags=("--another",)))
    assert court.judging.is_reviewing
    wait_until(lambda: court.judged() and not court.judging.is_reviewing, "all judged anew")
    assert court.table.verdicts == dict.fromkeys(processes[:3], False)


def test_out_of_descriptors_is_one_trouble_and_the_kernel_asks_again(
    court: Court, processes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> LaunchReader:
        raise OSError(24, "Too many open files", f"/proc/{pid}/stat")

    with monkeypatch.context() as patched:
        patched.setattr(module, "LaunchReader", refuse)
        for pid in processes:
            court.call(pid)
    assert court.troubles.lasting == {"judge": "cannot judge a process: Too many open files"}
    assert court.table.verdicts == {}
    court.call(processes[0])
    wait_until(lambda: court.judged(processes[0]), "the verdict")
    assert court.troubles.lasting == {}


def open_pidfds() -> int:
    links = (
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    )
    return sum("pidfd" in link for link in links)


def test_who_is_judged_otherwise_while_its_launch_is_read_leaves_no_descriptor(
    court: Court, processes: list[int]
) -> None:
    """The settings change meanwhile to those that need no launch, and it calls again: it is judged twice."""
    before = open_pidfds()
    for pid in processes:
        court.judging.use(Settings(detect="flags", moe_flags=(FLAG,)))
        court.call(pid)
        court.judging.use(Settings(detect="behaviour"))
        court.call(pid)
        wait_until(court.rests, "nothing being read")
    assert len(court.judging.tracker.known) == len(processes)
    for pid in processes:
        court.judging.forget(pid)
    assert open_pidfds() == before


def test_subordinate_users_share_one_users_turn(
    court: Court, processes: list[int], stuck: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who owns thousands of user ids keeps no more readers waiting than who owns one."""
    own, others = processes[0], processes[1:]
    users = {pid: 100_000 + number for number, pid in enumerate(others)} | {own: 1000}
    monkeypatch.setattr(module, "user_id_of", users.__getitem__)
    stuck.update(others)
    for pid in others:
        court.call(pid)
    wait_until(lambda: court.judged(others[0]), "the first is given up, and its user known as slow")
    court.call(own)
    wait_until(lambda: court.judged(own), "the other user's process judged")
    assert len(court.judging.tracker.known) <= READERS_AT_ONCE + 2, "not behind the next of them"
