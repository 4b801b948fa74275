"""The processes that have called, and what is known of each."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Protocol

from .journal import fields
from .matching import Verdict, judge_launch
from .policy import Process
from .processes import ProcessVanishedError, ThreadMeter, identify, launch_of, name_of, printable, user_id_of
from .settings import Settings

logger = logging.getLogger(__name__)


class VerdictTable(Protocol):
    """What the tracker needs of uprobes.Probe."""

    def set_verdict(self, tgid: int, counts: bool) -> None: ...

    def forget(self, tgid: int) -> None: ...


@dataclass
class Known:
    """One judged process. `pidfd` becomes readable when it ends (pidfd_open(2))."""

    process: Process
    pidfd: int
    name: str
    verdict: Verdict
    meter: ThreadMeter


class Tracker:
    """Judges processes, and keeps each verdict here and in the kernel until the process ends or execs."""

    def __init__(self, table: VerdictTable, settings: Settings) -> None:
        self.settings = settings
        self.known: dict[int, Known] = {}
        self._table = table

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
            known = Known(process, pidfd, name_of(tgid), judge_now(tgid, self.settings), meter)
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


def judge_now(tgid: int, settings: Settings) -> Verdict:
    """Judge the process that has this tgid now. Raises ProcessVanishedError, and PermissionError without root."""
    if settings.user_ids and user_id_of(tgid) not in settings.user_ids:
        return Verdict(False, "its user is not in STABILIZER_USERS")
    launch = launch_of(tgid)
    return judge_launch(launch.cmdline, launch.environ, settings.moe_flags)


def _pidfd(tgid: int) -> int:
    try:
        return os.pidfd_open(tgid)
    except ProcessLookupError:
        raise ProcessVanishedError from None
