"""Which files hold the functions we probe: the configured ones, those in the usual places, those that processes use.

A file counts when it defines one of the functions, whatever it is called. Looked at are files named libllama*.so*,
those of ggml's libraries that have them, and the executables of processes, because a statically linked llama-server
carries the functions itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from .elf import Offsets
from .files import FileId, Place, Version
from .listings import Listings
from .mounts import Mounts
from .processes import PROC
from .reach import Reached, expand
from .reader import LIKELY, Reader
from .shares import Standing
from .visits import Visit, Visits

# Where distributions, `cmake --install` and a build in place put libllama. No recursion: they are looked through at
# every tick.
USUAL_PLACES = (
    "/usr/lib/libllama*.so*",
    "/usr/lib/*-linux-gnu/libllama*.so*",
    "/usr/lib/*-linux-gnu/llama/libllama*.so*",
    "/usr/local/lib/libllama*.so*",
    "/usr/local/lib/*-linux-gnu/libllama*.so*",
    "/opt/*/lib/libllama*.so*",
    "/opt/*/build/bin/libllama*.so*",
    "/root/llama.cpp/build/bin/libllama*.so*",
    "/home/*/llama.cpp/build/bin/libllama*.so*",
)

# libllama.so.0.5.0, libllama.v0.5.0.so; not libllama-common.so, which comes with it and has none of the functions.
CORE_NAME = re.compile(r"libllama\.(so|v\d)")

NOTHING_TO_PROBE = "it has no llama_decode, nor what ggml computes graphs with"

# So many of one kind are worth a line each.
MOST_TOLD = 8


@dataclass(frozen=True)
class Library:
    """A file worth probing. `offsets`: function name to file offset in bytes."""

    version: Version
    place: Place
    offsets: Offsets = field(hash=False)
    standing: Standing = Standing.USED
    called: bool = False  # by one of the processes that use it

    def is_probed_as(self, other: Library) -> bool:
        """Is it the same content, with the same functions to probe?"""
        return (self.version, self.offsets) == (other.version, other.offsets)

    def only(self, functions: Collection[str]) -> Library:
        """The same with no more than these functions to probe."""
        return replace(self, offsets={name: at for name, at in self.offsets.items() if name in functions})


class Lying(NamedTuple):
    """A file that a pattern leads to, whether it is in use or not."""

    version: Version
    place: Place
    standing: Standing
    pattern: str

    @classmethod
    def of(cls, one: Reached, standing: Standing, pattern: str) -> Lying:
        return cls(Version.of(one.status), Place(one.real, one.path, one.status.st_uid), standing, pattern)


class Finder:
    """Finds libraries, and remembers what it has read, so that a scan in which nothing changed costs little."""

    def __init__(self, patterns: Sequence[str] = (), places: Sequence[str] = USUAL_PLACES, proc: Path = PROC) -> None:
        self.patterns = tuple(patterns)
        self.mounts = Mounts()
        self.reader = Reader()
        self._visits = Visits(self.mounts, proc)
        self._places = tuple(places)
        self._listings = Listings()
        self._lying: list[Lying] = []
        self._refused: dict[str, dict[str, str]] = {}  # by configured pattern: which places may not be touched

    @property
    def visits(self) -> dict[int, Visit]:
        """The running processes, by pid."""
        return self._visits.by_pid

    def scan(self, now_ns: int) -> dict[FileId, Library]:
        """Return what is worth probing, by file, and wait until all files have been read."""
        found = self.look(now_ns, in_haste=True)
        while self.reader.reading:
            self.reader.wait()
            found = self.look(now_ns, in_haste=True)
        return found

    def look(self, now_ns: int, in_haste: bool = False) -> dict[FileId, Library]:
        """Return what is known to be worth probing, by file, without waiting.

        New files are read meanwhile: look again when the reader's `reading` is complete, or its deadline has passed,
        and finish() called. `in_haste` it does not rest between readings.
        """
        self._visits.update(now_ns)
        self._look_around(now_ns)
        seen, standings = self._visits.used(), {}
        for lying in reversed(self._lying):  # what is configured has the last word
            seen[lying.version] = lying.place
            standings[lying.version] = lying.standing
        self.reader.keep(seen)
        self.reader.start(seen, standings.keys(), in_haste)
        found: dict[FileId, Library] = {}
        called = self._visits.called()
        # Of two contents of one file only the later is real: a process may have been visited before the rewrite.
        for version, place in sorted(seen.items(), key=lambda item: item[0].modified_ns):
            found.pop(version.file, None)
            offsets = self.reader.offsets.get(version)
            if offsets:
                standing = standings.get(version, Standing.USED)
                found[version.file] = Library(version, place, offsets, standing, version.file in called)
        # What lies about is in the order in which it is named.
        named = {lying.version: place for place, lying in enumerate(reversed(self._lying))}
        return dict(sorted(found.items(), key=lambda item: -named.get(item[1].version, -1)))

    def visit_soon(self, pid: int) -> None:
        """This process uses a library, perhaps only since the last visit: look at it at the next scan."""
        self._visits.soon(pid)

    def look_again(self, file: FileId) -> None:
        """The file's content may have changed, also where size and times say nothing: read it again."""
        self.reader.forget(file)
        self._visits.of_file_soon(file)

    def _refuse(self, pattern: str, path: str, kind: str) -> None:
        self._refused.setdefault(pattern, {})[path] = kind

    def _look_around(self, now_ns: int) -> None:
        """Note the files that match a configured pattern or lie in a usual place."""
        self._lying, self._refused = [], {}
        self._listings.begin_turn(now_ns)
        for pattern in self.patterns:
            for one in expand(pattern, self.mounts, self._listings, partial(self._refuse, pattern)):
                self._lying.append(Lying.of(one, Standing.CONFIGURED, pattern))
        for pattern in self._places:
            # Somebody's home may lie on a server; that is worth no line before a library is in use there.
            for one in expand(pattern, self.mounts, self._listings, lambda _path, _kind: None):
                roots_own = one.status.st_uid == 0 and not pattern.startswith("/home/")
                self._lying.append(Lying.of(one, Standing.USUAL if roots_own else Standing.USED, pattern))

    def refused(self) -> dict[str, str]:
        """What may not be touched, with the kind of its place: configured, or by its name a part of llama.cpp."""
        used = {path: kind for path, kind in self._visits.refused().items() if LIKELY.search(os.path.basename(path))}
        configured = {path: kind for places in self._refused.values() for path, kind in places.items()}
        return dict(list({**configured, **dict(sorted(used.items()))}.items())[:MOST_TOLD])

    def without_functions(self) -> dict[str, str]:
        """What the owner should know is not watched, and why: a libllama without the functions, a pattern in vain."""
        useless: dict[str, str] = {}
        for pattern in self.patterns:
            versions = [lying.version for lying in self._lying if lying.pattern == pattern]
            if pattern not in self._refused and not any(map(self.reader.offsets.get, versions)):
                useless[pattern] = NOTHING_TO_PROBE if versions else "no such file"
        cores = [lying for lying in self._lying if CORE_NAME.match(os.path.basename(lying.place.path))]
        silent = [lying.place.path for lying in cores if not self.reader.offsets.get(lying.version)]
        return {**dict.fromkeys(sorted(set(silent))[:MOST_TOLD], "it has no llama_decode"), **useless}

    def close(self) -> None:
        """Give up what is being read."""
        self.reader.close()
        self.mounts.close()


def say_refused(path: str, kind: str) -> str:
    return f"{path} lies on {kind}, which may not answer: not watched; copy it to a local disk"
