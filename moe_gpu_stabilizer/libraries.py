"""Which files hold the functions we probe: the configured ones, those in the usual places, those that processes use.

A file counts when it defines one of the functions, whatever it is called. Looked at are files named libllama*.so*,
those of ggml's libraries that have them, and the executables of processes, because a statically linked llama-server
carries the functions itself.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .elf import Offsets, Reading
from .files import FileId, Place, Version
from .isolated import ChildError
from .mappings import files_used_by
from .processes import PROC, ProcessVanishedError, every_pid_and_inode

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

# Reading a file's symbols takes some milliseconds. A child is given no more files than this.
MOST_READ_AT_ONCE = 32

LIKELY = re.compile("llama|libggml")

NOTHING_TO_PROBE = "it has no llama_decode, nor what ggml computes graphs with"

# A process may load the library long after its start (a Python program that imports a binding). It is looked at when
# it is new, again whenever the time it is known for has doubled, and at last about once a minute.
FIRST_REVISIT_NS = 1_000_000_000
LAST_REVISIT_NS = 60_000_000_000
NEVER_NS = 1 << 62


@dataclass(frozen=True)
class Library:
    """A file worth probing. `offsets`: function name to file offset in bytes."""

    version: Version
    place: Place
    offsets: Offsets = field(hash=False)

    def is_probed_as(self, other: Library) -> bool:
        """Is it the same content, with the same functions to probe?"""
        return (self.version, self.offsets) == (other.version, other.offsets)

    def only(self, functions: Collection[str]) -> Library:
        """The same with no more than these functions to probe."""
        return replace(self, offsets={name: at for name, at in self.offsets.items() if name in functions})


@dataclass
class Visit:
    """When to look at a running process next, and which files it uses."""

    inode: int  # of its directory in /proc, which is another one when the pid is used again
    known_since_ns: int
    next_ns: int
    uses: dict[Version, Place] = field(default_factory=dict)
    readable: bool = True


class Finder:
    """Finds libraries, and remembers what it has read, so that a scan in which nothing changed costs little."""

    def __init__(self, patterns: Sequence[str] = (), places: Sequence[str] = USUAL_PLACES, proc: Path = PROC) -> None:
        self.patterns = tuple(patterns)
        self.visits: dict[int, Visit] = {}
        self._places = tuple(places)
        self._proc = proc
        self.reading: Reading | None = None
        self._offsets: dict[Version, Offsets] = {}
        # Files that were in a reading which failed: each is read once more, by itself.
        self._suspects: set[Version] = set()
        # Files that could not be opened there. They are tried again where another process leads to them.
        self._closed: dict[Version, Place] = {}

    def scan(self, now_ns: int) -> dict[FileId, Library]:
        """Return what is worth probing, by file, and wait until all files have been read."""
        found = self.look(now_ns)
        while self.reading:
            self.reading.child.receive_until(self.reading.deadline_ns)
            self.finish_reading()
            found = self.look(now_ns)
        return found

    def look(self, now_ns: int) -> dict[FileId, Library]:
        """Return what is known to be worth probing, by file, without waiting.

        New files are read meanwhile: look again when `reading` is complete, or its deadline has passed, and
        finish_reading() called.
        """
        self._visit_processes(now_ns)
        seen: dict[Version, Place] = {}
        for visit in self.visits.values():
            seen.update(visit.uses)
        lying = self.lying_about()
        seen.update(lying)
        self._offsets = {version: offsets for version, offsets in self._offsets.items() if version in seen}
        self._suspects &= set(seen)
        self._closed = {version: place for version, place in self._closed.items() if seen.get(version) == place}
        if self.reading is None:
            self._start_reading(seen, first=lying)
        found: dict[FileId, Library] = {}
        # Of two contents of one file only the later is real: a process may have been visited before the rewrite.
        for version, place in sorted(seen.items(), key=lambda item: item[0].modified_ns):
            found.pop(version.file, None)
            offsets = self._offsets.get(version)
            if offsets:
                found[version.file] = Library(version, place, offsets)
        return found

    def visit_soon(self, pid: int) -> None:
        """This process uses a library, perhaps only since the last visit: look at it at the next scan."""
        if pid in self.visits:
            self.visits[pid].next_ns = 0

    def look_again(self, file: FileId) -> None:
        """The file's content may have changed, also where size and times say nothing: read it again."""
        self._offsets = {version: offsets for version, offsets in self._offsets.items() if version.file != file}
        for visit in self.visits.values():
            if any(version.file == file for version in visit.uses):
                visit.next_ns = 0

    def lying_about(self) -> dict[Version, Place]:
        """The files that match a configured pattern or lie in a usual place."""
        versions: dict[Version, Place] = {}
        for pattern in (*self.patterns, *self._places):
            for path in matches(pattern):
                try:
                    status = os.stat(path)
                except OSError:  # a dangling link, or deleted since
                    continue
                if stat.S_ISREG(status.st_mode):
                    versions.setdefault(Version.of(status), Place(os.path.realpath(path), path))
        return versions

    def without_functions(self) -> dict[str, str]:
        """What the owner should know is not watched, and why: a libllama without the functions, a pattern in vain."""
        lying = self.lying_about()
        watched = {place.path for version, place in lying.items() if self._offsets.get(version)}
        cores = {place.path for place in lying.values() if CORE_NAME.match(os.path.basename(place.path))}
        useless = dict.fromkeys(cores - watched, "it has no llama_decode")
        for pattern in self.patterns:
            paths = matches(pattern)
            if watched.isdisjoint(map(os.path.realpath, paths)):
                useless[pattern] = NOTHING_TO_PROBE if any(map(os.path.isfile, paths)) else "no such file"
        return useless

    def _visit_processes(self, now_ns: int) -> None:
        alive = every_pid_and_inode(self._proc)
        self.visits = {pid: visit for pid, visit in self.visits.items() if alive.get(pid) == visit.inode}
        for pid, inode in alive.items():
            visit = self.visits.get(pid)
            if visit is None:
                visit = self.visits[pid] = Visit(inode, now_ns, now_ns)
            if visit.next_ns <= now_ns:
                self._visit(pid, visit, now_ns)

    def _visit(self, pid: int, visit: Visit, now_ns: int) -> None:
        wait_ns = min(max(now_ns - visit.known_since_ns, FIRST_REVISIT_NS), LAST_REVISIT_NS)
        # Spread by pid, or all that was there at the start would be visited in the same tick for ever.
        visit.next_ns = now_ns + wait_ns - wait_ns // 4 * (pid % 8) // 8
        directory = self._proc / str(pid)
        try:
            visit.uses = dict(files_used_by(directory))
        except FileNotFoundError:  # a kernel thread has no executable
            visit.next_ns = NEVER_NS
        except ProcessVanishedError:
            pass
        except OSError:  # another user's, without root; or its executable lies where no disk answers
            visit.readable = False

    def _start_reading(self, seen: dict[Version, Place], first: Collection[Version]) -> None:
        """Begin to read files that are not known: `first` and what looks like llama.cpp, suspects last and alone."""
        known = self._offsets.keys() | self._closed.keys()
        unread = {version: place for version, place in seen.items() if version not in known}
        likely = [
            version for version, place in unread.items() if version in first or LIKELY.search(place.path.split("/")[-1])
        ]
        for choice, most in (
            ([version for version in likely if version not in self._suspects], MOST_READ_AT_ONCE),
            ([version for version in unread if version not in self._suspects], MOST_READ_AT_ONCE),
            ([version for version in unread if version in self._suspects], 1),
        ):
            if choice:
                self.reading = Reading({version: unread[version] for version in choice[:most]})
                return

    def finish_reading(self) -> None:
        """Take what has been read. Files that made their reader fail, or take too long, are taken to have nothing."""
        assert self.reading is not None
        reading, self.reading = self.reading, None
        try:
            answers = reading.end()
        except ChildError:
            if len(reading.files) > 1:
                self._suspects.update(reading.files)
                return
            answers = {version: {} for version in reading.files}
        for version, offsets in answers.items():
            if offsets is None:
                self._closed[version] = reading.files[version]
            else:
                self._offsets[version] = offsets

    def close(self) -> None:
        """Give up what is being read."""
        if self.reading:
            self.finish_reading()


def matches(pattern: str) -> list[str]:
    """The paths that a glob leads to, or the path itself: a file's own name may have brackets in it."""
    return glob.glob(pattern) or ([pattern] if os.path.exists(pattern) else [])
