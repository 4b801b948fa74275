"""The processes that have called, and what is known of each."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from .journal import fields
from .launch import Launch, UnreadableError, launch_of
from .matching import Verdict, either, judge_behaviour, judge_launch
from .policy import Process
from .processes import ProcessVanishedError, ThreadMeter, identify, name_of, printable, user_id_of
from .settings import Settings
from .turns import ProcessTurns

logger = logging.getLogger(__name__)

# Its memory is locked up (launch.py), or it hides it.
UNREADABLE = Verdict(False, "its arguments and environment cannot be read")


class VerdictTable(Protocol):
    """What the tracker needs of uprobes.Probe."""

    def set_verdict(self, tgid: int, counts: bool) -> None: ...

    def turns(self, tgid: int) -> ProcessTurns | None: ...

    def forget_turns(self, tgid: int) -> None: ...


@dataclass
class Known:
    """One judged process. `pidfd` becomes readable when it ends (pidfd_open(2)).

    `by_launch`: what its launch alone says; None where that has not been asked for.
    """

    process: Process
    pidfd: int
    name: str
    verdict: Verdict
    meter: ThreadMeter
    turns: ProcessTurns | None
    by_launch: Verdict | None


class Tracker:
    """Judges processes, and keeps each verdict here and in the kernel until it is forgotten."""

    def __init__(self, table: VerdictTable, settings: Settings) -> None:
        self.known: dict[int, Known] = {}
        self._settings = settings
        self._table = table

    def use(self, settings: Settings) -> None:
        """Judge by other settings from now on. What is known already has to be judged again."""
        before, self._settings = self._settings, settings
        for tgid, known in self.known.items():
            if settings.min_turns != before.min_turns:
                self._table.forget_turns(tgid)
            if settings.moe_flags != before.moe_flags:
                known.by_launch = None

    def most_important(self, claims: Collection[Process], most: int) -> list[Known]:
        """At most so many known processes, with the turns they take now.

        First those that hold the floor, then those that count, then those that called first most lately.
        """
        newest_first = reversed(self.known.values())
        ranked = sorted(newest_first, key=lambda known: (known.process not in claims, not known.verdict.counts))
        for known in ranked[:most]:
            known.turns = self._table.turns(known.process.tgid)
        return ranked[:most]

    def is_current(self, tgid: int) -> bool:
        """Is the process that is known by this tgid still the one that has it?"""
        try:
            return identify(tgid) == self.known[tgid].process
        except ProcessVanishedError:
            return False

    def needs_launch(self, tgid: int) -> bool:
        """Must the launch be read before this process can be judged? Raises ProcessVanishedError."""
        known = self.known.get(tgid)
        return (
            self._settings.detect != "behaviour"
            and (known is None or known.by_launch is None)
            and not is_strangers(tgid, self._settings)
        )

    def by_launch(self, launch: Launch) -> Verdict:
        """What the launch alone says."""
        return judge_launch(launch.cmdline, launch.environ, self._settings.moe_flags)

    def judge(self, process: Process, pidfd: int | None, by_launch: Verdict | None) -> Known:
        """Judge a process; one that is known already, for which there is no new `pidfd`, is judged again.

        `by_launch`: what has just been read says so. Raises ProcessVanishedError where it has ended meanwhile.
        """
        tgid, before = process.tgid, self.known.get(process.tgid)
        meter = ThreadMeter(tgid)
        if before:
            pidfd, meter, by_launch = before.pidfd, before.meter, by_launch or before.by_launch
        if pidfd is None or identify(tgid) != process:
            raise ProcessVanishedError
        turns = self._table.turns(tgid)
        verdict = combine(tgid, self._settings, turns, by_launch)
        known = Known(process, pidfd, name_of(tgid), verdict, meter, turns, by_launch)
        self._table.set_verdict(tgid, verdict.counts)
        self.known[tgid] = known
        return known


def announce(known: Known) -> None:
    """Say in the log what a process was judged to be, and why."""
    pid, name, reason = known.process.tgid, known.name, printable(known.verdict.reason)
    event, says = ("counts", "counts") if known.verdict.counts else ("ignored", "is ignored")
    told = fields(event, TARGET_PID=pid, TARGET_COMM=name, REASON=reason)
    logger.info("pid %d (%s) %s: %s", pid, name, says, reason, extra=told)


def judge_now(tgid: int, settings: Settings, turns: ProcessTurns | None) -> Verdict:
    """Judge the process that has this tgid now, at once. Raises ProcessVanishedError; without root PermissionError."""
    by_launch = None
    if settings.detect != "behaviour" and not is_strangers(tgid, settings):
        try:
            launch = launch_of(tgid)
        except UnreadableError:
            by_launch = UNREADABLE
        else:
            by_launch = judge_launch(launch.cmdline, launch.environ, settings.moe_flags)
    return combine(tgid, settings, turns, by_launch)


def is_strangers(tgid: int, settings: Settings) -> bool:
    """Does the process belong to a user whose processes never count? Raises ProcessVanishedError."""
    return bool(settings.user_ids) and user_id_of(tgid) not in settings.user_ids


def combine(tgid: int, settings: Settings, turns: ProcessTurns | None, by_launch: Verdict | None) -> Verdict:
    """The verdict on a process from all there is. Raises ProcessVanishedError."""
    if is_strangers(tgid, settings):
        return Verdict(False, "its user is not in STABILIZER_USERS")
    behaviour = judge_behaviour(turns, settings.min_turns)
    if settings.detect == "behaviour" or by_launch is None:
        return behaviour
    return by_launch if settings.detect == "flags" else either(by_launch, behaviour)
