"""Which names in a folder match a pattern: remembered while the folder stays as it is, for most never change.

A /usr/lib/*-linux-gnu has some 5,000 names, and to go through them at every tick would cost more than all the rest.
"""

from __future__ import annotations

import fnmatch
import os
import re
from typing import NamedTuple

# Anybody may fill a folder of their own: 20 ms for as many names, 5 ms for as many matches. Of a /usr/lib/*-linux-gnu
# one or two match; a /home may have a thousand.
MOST_NAMES, MOST_MATCHES_BUT_IN_ROOTS = 20_000, 256
# More are looked for anew each time.
MOST_REMEMBERED = 256

# A file system may note the time of a change in steps of 2 s (vfat): of two changes in one step the second is not told
# from the first. A listing is trusted that was made so long after the change was first seen.
STEP_NS = 4_000_000_000


class Names(NamedTuple):
    """The names that match, sorted; the folder's time of change, and since when (CLOCK_MONOTONIC) it has been that."""

    changed: int
    since_ns: int
    is_trusted: bool
    names: list[str]


class Listings:
    """The names in the folders that were asked for in this turn and the one before."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int, str], Names] = {}
        self._now: dict[tuple[int, int, str], Names] = {}
        self._now_ns = 0

    def begin_turn(self, now_ns: int) -> None:
        """Forget what was not asked for since the last turn began."""
        self._before, self._now, self._now_ns = self._now, {}, now_ns

    def names(self, folder: int, pattern: str) -> list[str]:
        """Return the names in the folder behind a handle (O_PATH) that match; none where it is no folder."""
        status = os.fstat(folder)
        key = status.st_dev, status.st_ino, pattern
        # Unlike the time of its last change of content (mtime), that of any change cannot be set by its owner.
        changed, since_ns = status.st_ctime_ns, self._now_ns
        known = self._before.get(key)
        if known and known.changed == changed:
            since_ns = known.since_ns
            if known.is_trusted:
                self._now[key] = known
                return known.names
        try:
            names = _names(folder, pattern, is_roots=status.st_uid == 0)
        except OSError:  # no folder, closed to us, or we are out of descriptors
            return []
        if len(names) <= MOST_REMEMBERED:
            self._now[key] = Names(changed, since_ns, self._now_ns >= since_ns + STEP_NS, names)
        return names


def _names(folder: int, pattern: str, is_roots: bool) -> list[str]:
    """Raises OSError."""
    matches = re.compile(fnmatch.translate(pattern)).match
    names: list[str] = []
    listing = os.open(f"/proc/self/fd/{folder}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with os.scandir(listing) as entries:
            for _, entry in zip(range(MOST_NAMES), entries, strict=False):
                if matches(entry.name) and (pattern.startswith(".") or not entry.name.startswith(".")):
                    names.append(entry.name)
    finally:
        os.close(listing)
    return sorted(names)[: MOST_NAMES if is_roots else MOST_MATCHES_BUT_IN_ROOTS]
