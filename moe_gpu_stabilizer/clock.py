"""Does the clock follow min_freq? A driver that fails to change it lets the write to min_freq succeed all the same."""

from __future__ import annotations

import time

from .devfreq import ROUNDING_HZ, Node, mhz
from .errors import StabilizerError
from .journal import Troubles
from .settings import NANOSECONDS

# A clock that has not followed by then does not follow. It is looked at twice, as the driver may just be changing it.
LOOK_NS = NANOSECONDS // 2
LOOKS_THAT_TELL = 2


class ClockWatch:
    """Looks at cur_freq a little after min_freq was raised, and says so where it stays below."""

    def __init__(self, troubles: Troubles) -> None:
        self._troubles = troubles
        self._looks = 0
        self.deadline_ns: int | None = None  # when look() is due (CLOCK_MONOTONIC)

    def begin(self) -> None:
        """min_freq has been raised."""
        self._looks = 0
        self.deadline_ns = time.monotonic_ns() + LOOK_NS

    def end(self) -> None:
        """min_freq has been given back."""
        self.deadline_ns = None

    def look(self, node: Node, floor_hz: int) -> None:
        """Compare cur_freq with the floor; below a cap on max_freq, with that."""
        self.deadline_ns = None
        try:
            cur_hz, wanted_hz = node.read_hz("cur_freq"), min(floor_hz, node.max_hz)
        except StabilizerError:  # not every driver has cur_freq
            return
        # A GPU that is powered down has no clock.
        if cur_hz == 0 or cur_hz > wanted_hz - ROUNDING_HZ:
            self._troubles.end("clock", "the clock follows min_freq again", NODE=node)
            return
        self._looks += 1
        if self._looks < LOOKS_THAT_TELL:
            self.deadline_ns = time.monotonic_ns() + LOOK_NS
            return
        stayed = f"the clock stayed at {mhz(cur_hz)} when min_freq was raised to {mhz(wanted_hz)}"
        message = f"{stayed}: the GPU's driver does not follow"
        self._troubles.begin("clock", message, NODE=node)
