"""The processes that have called, and what is known of each."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from .journal import fields
from .matching import Verdict, either, judge_behaviour, judge_launch
from .policy import Process
from .processes import ProcessVanishedError, ThreadMeter, identify, launch_of, name_of, printable, user_id_of
from .settings import Settings
from .turns import ProcessTurns

logger = logging.getLogger(__name__)


class VerdictTable(Protocol):
    """What the tracker needs of uprobes.Probe."""

    def set_verdict(self, tgid: int, counts: bool) -> None: ...

    def turns(self, tgid: int) -> ProcessTurns | None: ...

    def forget_turns(self, tgid: int) -> None: ...

    def forget(self, tgid: int) -> None: ...


@dataclass
class Known:
    """One judged process. `pidfd` becomes readable when it ends (pidfd_open(2))."""

    process: Process
    pidfd: int
    name: str
    verdict: Verdict
    meter: ThreadMeter
    turns: ProcessTurns | None


class Tracker:
    """Judges processes, and keeps each verdict here and in the kernel until the process ends or execs."""

    def __init__(self, table: VerdictTable, settings: Settings) -> None:
        self.known: dict[int, Known] = {}
        self._settings = settings
        self._table = table

    def use(self, settings: Settings) -> None:
        """Judge by other settings from now on. What is known already has to be judged again."""
        if settings.min_turns != self._settings.min_turns:
            for tgid in self.known:
                self._table.forget_turns(tgid)
        self._settings = settings

    def up_to_date(self) -> Iterable[Known]:
        """All known processes, with the turns they take now."""
        for tgid, known in self.known.items():
            known.turns = self._table.turns(tgid)
        return self.known.values()

    def is_current(self, tgid: int) -> bool:
        """Is the process that is known by this tgid still the one that has it?"""
        try:
            return identify(tgid) == self.known[tgid].process
        except ProcessVanishedError:
            return False

    def judge(self, tgid: int) -> Known:
        """Judge the process that has this tgid now; one that is known already is judged again.

        Raises ProcessVanishedError where it has ended meanwhile.
        """
        before = self.known.get(tgid)
        # First the pidfd, then /proc: if the process is still there at the end, all of it was about this one.
        pidfd = before.pidfd if before else _pidfd(tgid)
        try:
            process = identify(tgid)
            meter = before.meter if before else ThreadMeter(tgid)
            turns = self._table.turns(tgid)
            known = Known(process, pidfd, name_of(tgid), judge_now(tgid, self._settings, turns), meter, turns)
            if identify(tgid) != process:
                raise ProcessVanishedError
            self._table.set_verdict(tgid, known.verdict.counts)
        except BaseException:
            if not before:
                os.close(pidfd)
            raise
        self.known[tgid] = known
        return known

    def forget(self, tgid: int) -> Known | None:
        """Drop what is known of a tgid, here and in the kernel; return what it was. Its pidfd is closed."""
        self._table.forget(tgid)
        known = self.known.pop(tgid, None)
        if known:
            os.close(known.pidfd)
        return known


def announce(known: Known) -> None:
    """Say in the log what a process was judged to be, and why."""
    pid, name, reason = known.process.tgid, known.name, printable(known.verdict.reason)
    event, says = ("counts", "counts") if known.verdict.counts else ("ignored", "is ignored")
    told = fields(event, TARGET_PID=pid, TARGET_COMM=name, REASON=reason)
    logger.info("pid %d (%s) %s: %s", pid, name, says, reason, extra=told)


def judge_now(tgid: int, settings: Settings, turns: ProcessTurns | None) -> Verdict:
    """Judge the process that has this tgid now. Raises ProcessVanishedError, and PermissionError without root."""
    if settings.user_ids and user_id_of(tgid) not in settings.user_ids:
        return Verdict(False, "its user is not in STABILIZER_USERS")
    behaviour = judge_behaviour(turns, settings.min_turns)
    if settings.detect == "behaviour":
        return behaviour
    launch = launch_of(tgid)
    by_launch = judge_launch(launch.cmdline, launch.environ, settings.moe_flags)
    return by_launch if settings.detect == "flags" else either(by_launch, behaviour)


def _pidfd(tgid: int) -> int:
    try:
        return os.pidfd_open(tgid)
    except ProcessLookupError:
        raise ProcessVanishedError from None
