"""How often and for how long the floor has been up."""

from __future__ import annotations

import time


class UpTime:
    """How often, and for how many seconds in all, the floor has been up since the start; since when it is as it is."""

    def __init__(self) -> None:
        self.times = 0
        self.is_up = False
        self.since = time.monotonic()
        self._seconds = 0.0

    def begin(self) -> None:
        if not self.is_up:
            self.times += 1
            self.is_up, self.since = True, time.monotonic()

    def end(self) -> None:
        if self.is_up:
            self._seconds = self.seconds
            self.is_up, self.since = False, time.monotonic()

    @property
    def seconds(self) -> float:
        return self._seconds + (time.monotonic() - self.since if self.is_up else 0.0)
