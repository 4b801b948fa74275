"""Reads new files in children, some at a time, each user's in turn: what one user has made delays no other's."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping

from .elf import Offsets, Reading
from .files import FileId, Place, Version
from .isolated import ChildError
from .shares import share_of

# Reading a file's symbols takes some milliseconds. A child is given no more files than this.
MOST_READ_AT_ONCE = 32

# Somebody may start programs that nobody has seen before, thousands of them. Children read for so long without a rest,
# and then for a quarter of the time.
LONGEST_ROW_NS = 2_000_000_000
REST_FACTOR = 3

LIKELY = re.compile("llama|libggml")


class Reader:
    """Which functions the files have that were seen. `reading` is what a child reads now."""

    def __init__(self) -> None:
        self.reading: Reading | None = None
        self.reads_likely = False  # files that look like llama.cpp
        self.is_done = False  # with all that was seen
        self.offsets: dict[Version, Offsets] = {}
        self.rests_until_ns: int | None = None  # of CLOCK_MONOTONIC, where there is more to read then
        # Files that were in a reading which failed: each is read once more, by itself.
        self._suspects: set[Version] = set()
        # Files that could not be opened there. They are tried again where another process leads to them.
        self._closed: dict[Version, Place] = {}
        self._turn = 0
        self._served: dict[int, int] = {}  # whose files were read in which turn, by share
        self._began_ns = 0
        self._free_at_ns = 0  # when all that was read would be paid for with rest

    def keep(self, seen: Mapping[Version, Place]) -> None:
        """Forget all but these files."""
        self.offsets = {version: offsets for version, offsets in self.offsets.items() if version in seen}
        self._suspects &= seen.keys()
        self._closed = {version: place for version, place in self._closed.items() if seen.get(version) == place}

    def forget(self, file: FileId) -> None:
        """Read this file again."""
        self.offsets = {version: offsets for version, offsets in self.offsets.items() if version.file != file}

    def start(self, seen: Mapping[Version, Place], first: Collection[Version], in_haste: bool) -> None:
        """Begin to read files that are not known, unless some are being read or, not `in_haste`, it is time to rest."""
        self.rests_until_ns = None
        known = self.offsets.keys() | self._closed.keys()
        unread: dict[int, dict[Version, Place]] = {}
        for version, place in seen.items():
            if version not in known:
                unread.setdefault(share_of(place.owner_id), {})[version] = place
        self._served = {share: turn for share, turn in self._served.items() if share in unread}
        self.is_done = not unread and not self.reading
        if self.reading or not unread:
            return
        now_ns = time.monotonic_ns()
        if not in_haste and self._free_at_ns - now_ns > LONGEST_ROW_NS * REST_FACTOR:
            self.rests_until_ns = self._free_at_ns - LONGEST_ROW_NS * REST_FACTOR
            return
        likely = {
            version
            for version in (version for files in unread.values() for version in files)
            if version in first or LIKELY.search(os.path.basename(seen[version].path))
        }
        # At the start nobody has had a turn: then those with files that look like llama.cpp come first.
        share = min(unread, key=lambda share: (self._served.get(share, 0), likely.isdisjoint(unread[share])))
        self._turn += 1
        self._served[share] = self._turn
        self._began_ns = now_ns
        chosen = self._choose(unread[share], first, likely)
        self.reads_likely = not likely.isdisjoint(chosen)
        self.reading = Reading(chosen)

    def _choose(
        self, unread: Mapping[Version, Place], first: Collection[Version], likely: Collection[Version]
    ) -> dict[Version, Place]:
        """Those that look like llama.cpp first; suspects last and alone."""
        fresh = [version for version in unread if version not in self._suspects]
        chosen = sorted((version for version in fresh if version in likely), key=lambda version: version not in first)
        chosen = chosen or fresh or sorted(unread, key=lambda version: version not in first)[:1]
        return {version: unread[version] for version in chosen[:MOST_READ_AT_ONCE]}

    def finish(self) -> None:
        """Take what has been read. Files that made their reader fail, or take too long, are taken to have nothing."""
        assert self.reading is not None
        reading, self.reading = self.reading, None
        now_ns = time.monotonic_ns()
        self._free_at_ns = max(self._free_at_ns, now_ns) + (now_ns - self._began_ns) * REST_FACTOR
        try:
            answers = reading.end()
        except ChildError:
            if len(reading.files) > 1:
                self._suspects.update(reading.files)
                return
            # Closed there, not useless: another process may lead to it in another way.
            answers = dict.fromkeys(reading.files)
        for version, offsets in answers.items():
            if offsets is None:
                self._closed[version] = reading.files[version]
            else:
                self.offsets[version] = offsets

    def wait(self) -> None:
        """Finish what is being read, and wait for that."""
        assert self.reading is not None
        self.reading.child.receive_until(self.reading.deadline_ns)
        self.finish()

    def close(self) -> None:
        """Give up what is being read."""
        if self.reading:
            self.finish()
