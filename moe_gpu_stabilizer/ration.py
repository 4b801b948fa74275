"""How many lines of one kind are said: any user can make the daemon say thousands. Pure: the time comes in.

journald drops what a service says beyond 10,000 lines in 30 seconds (RateLimitBurst=, journald.conf(5)), whatever it
is. There are about twenty kinds of lines, so that this many of each stay far below; and nobody reads more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

LINES = 50
PERIOD_SECONDS = 10.0

# What is never left out, by its EVENT: nobody but the owner and his own programs can make it many.
ALWAYS_SAID = frozenset({"raise", "give-back", "ready", "stop", "reload"})


@dataclass
class Period:
    """What became of one kind of line since a moment, and the highest level among those that were left out."""

    since_seconds: float
    said: int = 0
    left_out: int = 0
    level: int = 0


@dataclass(frozen=True)
class LeftOut:
    """Lines that were not said, to be said in one."""

    kind: str
    lines: int
    seconds: float
    level: int

    def __str__(self) -> str:
        lines = "1 more line" if self.lines == 1 else f"{self.lines} more lines"
        return f"({lines} about {self.kind!r} left out in {self.seconds:.0f} s)"


class Ration:
    """Lets through so many lines of each kind in a period, and counts the others."""

    def __init__(self) -> None:
        self._periods: dict[str, Period] = {}

    def admits(self, kind: str, level: int, now_seconds: float) -> bool:
        """May a line of this kind be said now? Ask left_out() first: it ends the periods that are over."""
        period = self._periods.setdefault(kind, Period(now_seconds))
        if period.said < LINES:
            period.said += 1
            return True
        period.left_out += 1
        period.level = max(period.level, level)
        return False

    def left_out(self, now_seconds: float, to_the_end: bool = False) -> Iterator[LeftOut]:
        """What was left out in the periods that are over, each once; `to_the_end`: in all."""
        for kind, period in list(self._periods.items()):
            seconds = now_seconds - period.since_seconds
            if to_the_end or seconds >= PERIOD_SECONDS:
                del self._periods[kind]
                if period.left_out:
                    yield LeftOut(kind, period.left_out, seconds, period.level)


def kind_of(event: str, reason: str) -> str:
    """What a line is counted as. Troubles have a cause each, which is followed by a path where it is about a file."""
    return " ".join([event, *reason.split()[:1]]) if event.startswith("trouble") else event
