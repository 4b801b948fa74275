"""Judge the processes that call, a few at a time, and forget those that end. Nothing here waits for any of them."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from . import policy
from .errors import StabilizerError
from .fairness import FairQueue
from .journal import Troubles
from .launch import LaunchReader, UnreadableError
from .matching import Verdict
from .processes import ProcessVanishedError, identify, pidfd_of, user_id_of
from .records import KIND_EXEC, KIND_TURNS, Wake
from .settings import Settings
from .shares import share_of
from .tracker import UNREADABLE, Tracker, VerdictTable, announce

# The unit allows 32 tasks and 256 MB; each may hold a launch of 8 MB.
READERS_AT_ONCE = 4


class Verdicts(VerdictTable, Protocol):
    """What judging needs of uprobes.Probe."""

    def forget(self, tgid: int) -> None: ...

    def forget_verdict(self, tgid: int) -> None: ...


@dataclass
class Case:
    """A process whose launch is being read. `called_ns`: when it called, which is to be told once it is judged.

    `pidfd` is None for a process that is known already.
    """

    process: policy.Process
    pidfd: int | None
    share: int
    called_ns: int | None
    reader: LaunchReader


class Judging:
    """Judges each process at its first call, and again when the kernel says that it behaves otherwise."""

    def __init__(
        self, probe: Verdicts, settings: Settings, troubles: Troubles, selector: selectors.BaseSelector,
        feed: Callable[[policy.Event], None], changed: Callable[[], None], appeared: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`feed` takes what the policy has to know, `changed` hears of what is new, `appeared` of a first call."""
        self.tracker = Tracker(probe, settings)
        self._probe = probe
        self._troubles = troubles
        self._selector = selector
        self._feed = feed
        self._changed = changed
        self._appeared = appeared
        self._queue = FairQueue()
        self._cases: dict[int, Case] = {}
        self._reviewed: set[int] = set()

    @property
    def deadline_ns(self) -> int | None:
        """When on_deadline() is due (CLOCK_MONOTONIC); None while nothing is read."""
        return min((case.reader.deadline_ns for case in self._cases.values()), default=None)

    @property
    def is_reviewing(self) -> bool:
        """Is a process that was known when the settings changed still to be judged by the new ones?"""
        return bool(self._reviewed)

    def on_wake(self, wake: Wake) -> None:
        """The kernel says that a process called, took turns, or became another program."""
        if wake.kind == KIND_EXEC:
            self.forget(wake.tgid)
        elif not wake.verdict or wake.kind == KIND_TURNS:
            self.judge(wake.tgid, wake.at_ns)
        else:
            self.on_call(wake.tgid, wake.at_ns)

    def on_call(self, tgid: int, at_ns: int) -> None:
        """A process called, at that moment or since."""
        known = self.tracker.known.get(tgid)
        if known is None:
            self.judge(tgid, at_ns)
        else:
            self._feed(policy.CallSeen(known.process, at_ns))

    def use(self, settings: Settings) -> None:
        """Judge all that is known by other settings."""
        self.tracker.use(settings)
        self._reviewed = set(self.tracker.known)
        for tgid in list(self.tracker.known):
            self.judge(tgid)

    def try_again(self) -> None:
        """Read one of the launches that could not be read: at a tick, for each may keep its reader waiting again."""
        for known in self.tracker.known.values():
            if known.by_launch is UNREADABLE:
                known.by_launch = None
                self.judge(known.process.tgid)
                return

    def judge(self, tgid: int, called_ns: int | None = None) -> None:
        """Judge a process, at once or when its launch has been read."""
        try:
            before = self.tracker.known.get(tgid)
            if before and not self.tracker.is_current(tgid):
                self.forget(tgid)
                before = None
            if self.tracker.needs_launch(tgid):
                if tgid not in self._cases:
                    self._queue.add(tgid, called_ns)
            else:
                pidfd = None if before else pidfd_of(tgid)
                self._conclude(identify(tgid), pidfd, called_ns, None)
        except (ProcessVanishedError, OSError, StabilizerError) as error:
            self._fail(tgid, error)
        self._begin_cases()

    def _begin_cases(self) -> None:
        while len(self._cases) < READERS_AT_ONCE:
            taken = self._queue.take(share_of_process, {case.share for case in self._cases.values()})
            if taken is None:
                return
            self._begin(*taken)

    def _begin(self, tgid: int, called_ns: int | None) -> None:
        pidfd = None
        try:
            if tgid not in self.tracker.known:
                # First the pidfd, then /proc: if the process is still there at the end, all was about this one.
                pidfd = pidfd_of(tgid)
            case = Case(identify(tgid), pidfd, share_of(user_id_of(tgid)), called_ns, LaunchReader(tgid))
        except (ProcessVanishedError, OSError, StabilizerError) as error:
            close(pidfd)
            self._fail(tgid, error)
            return
        self._cases[tgid] = case
        self._selector.register(case.reader, selectors.EVENT_READ, lambda: self._on_reader(case))

    def _on_reader(self, case: Case) -> None:
        # It may have been forgotten since select() returned.
        if self._cases.get(case.process.tgid) is case and case.reader.receive():
            self._end(case)

    def on_deadline(self) -> None:
        """Give up what is not read by now."""
        for case in list(self._cases.values()):
            if case.reader.deadline_ns <= time.monotonic_ns():
                self._queue.note_slow(case.share)
                self._end(case)

    def _end(self, case: Case) -> None:
        """Judge by what has been read, and begin with the next."""
        self._selector.unregister(case.reader)
        del self._cases[case.process.tgid]
        try:
            self._conclude(case.process, case.pidfd, case.called_ns, self._verdict_on(case))
        except (ProcessVanishedError, OSError, StabilizerError) as error:
            self._fail(case.process.tgid, error)
        self._begin_cases()

    def _verdict_on(self, case: Case) -> Verdict:
        try:
            return self.tracker.by_launch(case.reader.end())
        except UnreadableError:
            return UNREADABLE
        except BaseException:
            close(case.pidfd)
            raise

    def _conclude(
        self, process: policy.Process, pidfd: int | None, called_ns: int | None, by_launch: Verdict | None
    ) -> None:
        """Judge, and tell everybody. A new process's `pidfd` is kept, or closed where this fails."""
        tgid, before = process.tgid, self.tracker.known.get(process.tgid)
        try:
            known = self.tracker.judge(process, pidfd, by_launch)
        except BaseException:
            close(pidfd)
            raise
        close(pidfd if before else None)  # it was judged while its launch was read: other settings, or another user
        self._troubles.end("judge", "processes can be judged again")
        self._reviewed.discard(tgid)
        if before is None:
            self._appeared(tgid)
            self._selector.register(known.pidfd, selectors.EVENT_READ, lambda: self.forget(tgid))
        if before is None or before.verdict != known.verdict:
            announce(known)
            self._changed()
        self._feed(policy.Judged(process, known.verdict.counts))
        if called_ns is not None:
            self._feed(policy.CallSeen(process, called_ns))

    def _fail(self, tgid: int, error: Exception) -> None:
        """It has ended; or we are out of descriptors or memory, and the kernel will ask again at its next call."""
        if isinstance(error, ProcessVanishedError):
            self.forget(tgid)
            return
        why = getattr(error, "strerror", None) or error  # without the file's name: one trouble, however many processes
        self._troubles.begin("judge", f"cannot judge a process: {why}")
        # What was said of it may no longer be true.
        self._forget_here(tgid)
        self._probe.forget_verdict(tgid)

    def forget(self, tgid: int) -> None:
        """It has ended, or is another program now."""
        self._forget_here(tgid)
        self._probe.forget(tgid)

    def _forget_here(self, tgid: int) -> None:
        self._queue.discard(tgid)
        self._reviewed.discard(tgid)
        case = self._cases.pop(tgid, None)
        if case:
            self._selector.unregister(case.reader)
            with contextlib.suppress(UnreadableError, ProcessVanishedError):
                case.reader.end()
            close(case.pidfd)
        known = self.tracker.known.pop(tgid, None)
        if known:
            self._selector.unregister(known.pidfd)
            os.close(known.pidfd)
            self._feed(policy.ProcessGone(known.process))
            self._changed()

    def close(self) -> None:
        for case in self._cases.values():
            with contextlib.suppress(UnreadableError, ProcessVanishedError):
                case.reader.end()


def share_of_process(tgid: int) -> int | None:
    with contextlib.suppress(ProcessVanishedError, OSError):  # out of descriptors: beginning its case tells
        return share_of(user_id_of(tgid))
    return None


def close(pidfd: int | None) -> None:
    if pidfd is not None:
        os.close(pidfd)
