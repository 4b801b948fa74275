"""The probed libraries: attach to new ones, let go of dead ones, never leave a probe in code that has changed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from .errors import ProbeError
from .files import FileId, Version
from .libraries import Library
from .mounts import Mounts
from .patience import KeptWaitingError, Patience
from .retiring import Closable, Retiring
from .shares import share_of

# For how long an update may attach, and wait for the kernel to let go of what is to be probed anew. It takes no time
# unless probes are being taken out meanwhile. What is not done then waits for the next update.
ATTACHING_SECONDS = 0.5

# Files that stay watched after somebody has written to them. The kernel keeps 8,192 or more marks for each user, and
# each keeps a file's inode in memory (fanotify(7), max_user_marks).
MOST_LEFT_WATCHED = 64


class Attacher(Protocol):
    """What bindings need of uprobes.Probe."""

    def attach(self, path: str, offset: int, function: str) -> Closable: ...


class Watcher(Protocol):
    """What bindings need of fanotify.WriteWatch."""

    def add(self, path: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def clear(self) -> None: ...


@dataclass
class Binding:
    """One probed file. The open descriptor keeps its inode number from being used again.

    `leased`: nobody writes to the file before we have let go of it. Whoever opens it for writing waits until we drop
    the lease, and we hear of that through SIGIO (fcntl(2), F_SETLEASE).
    """

    library: Library
    descriptor: int
    probes: list[Closable]
    leased: bool = False

    @property
    def path_by_descriptor(self) -> str:
        """A path that leads to this inode whatever becomes of its name."""
        return f"/proc/self/fd/{self.descriptor}"


@dataclass
class Change:
    """What update() did, for the log."""

    attached: list[Library]
    detached: list[Library]
    failed: list[tuple[Library, str]]
    waiting: int = 0  # for the kernel to let go of others, or for the next update


T = TypeVar("T")


class Bindings:
    """The probed files, by device and inode."""

    def __init__(self, attacher: Attacher, watcher: Watcher | None, mounts: Mounts, most_files: int) -> None:
        """No more than `most_files` have probes at any time, those included whose probes are being taken out."""
        self._attacher = attacher
        self._mounts = mounts
        self._most_files = most_files
        self._watcher = watcher
        self._bound: dict[FileId, Binding] = {}
        self._left_watched = 0
        self._retiring = Retiring()
        self._patience = Patience()

    @property
    def files(self) -> set[FileId]:
        return set(self._bound)

    @property
    def libraries(self) -> list[Library]:
        return [binding.library for binding in self._bound.values()]

    def update(self, found: dict[FileId, Library], keep: Collection[FileId] = ()) -> Change:
        """Make the probed files those in `found`, and those of `keep` that are probed and unchanged.

        A file with new content is let go of first: the kernel keeps one copy of the instruction for each inode and
        offset, and must not use the old one in the new code. All others are let go of last, so that no call goes
        unseen in between.
        """
        change = Change([], [], [])
        self._forget_watched()
        until_seconds = time.monotonic() + ATTACHING_SECONDS
        for file, binding in list(self._bound.items()):
            if file in found and not found[file].is_probed_as(binding.library):
                change.detached.append(self._let_go(file))
        for file, library in found.items():
            if file not in self._bound:
                held = (self.files | self._retiring.files()) - {file}
                if len(held) >= self._most_files or time.monotonic() > until_seconds:
                    change.waiting += 1
                    continue
                try:
                    self._bound[file] = self._attach(library, until_seconds)
                    change.attached.append(library)
                except (OSError, ProbeError) as error:
                    change.failed.append((library, str(error)))
        changed = self.changed_unheard() if keep else []
        for file in list(self._bound):
            if file not in found and (file not in keep or file in changed):
                change.detached.append(self._let_go(file))
        return change

    def _forget_watched(self) -> None:
        """Watch the probed files alone again, lest the marks of thousands of files that were written to pile up."""
        if self._watcher and self._left_watched > MOST_LEFT_WATCHED:
            self._left_watched = 0
            self._watcher.clear()
            for binding in self._bound.values():
                with contextlib.suppress(OSError):  # its times tell at the next tick
                    self._watcher.add(binding.path_by_descriptor)

    def written(self, file: FileId) -> Library | None:
        """Somebody writes, or wants to write, to a probed file: let go of it.

        A program that starts next would get our breakpoint in the middle of an instruction of the new code. Where there
        is a lease, the writer waits for the thread that lets go; we do not, for there may be many such files. The file
        stays watched: the end of the write is to be heard, too. Returns what it was, None where it is not probed.
        """
        binding = self._bound.pop(file, None)
        if binding is None:
            return None
        self._retire(binding, in_haste=True)
        self._left_watched += 1
        return binding.library

    def wanted_for_writing(self) -> list[FileId]:
        """The probed files that somebody is opening for writing and waits for us to let go of."""
        return [
            file
            for file, binding in self._bound.items()
            if binding.leased and fcntl.fcntl(binding.descriptor, fcntl.F_GETLEASE) == fcntl.F_UNLCK
        ]

    def changed_unheard(self) -> list[FileId]:
        """The probed files whose content has changed although no write was heard of (no fanotify, a lost event)."""
        return [
            file
            for file, binding in self._bound.items()
            if Version.of(os.fstat(binding.descriptor)) != binding.library.version
        ]

    def close(self) -> None:
        """Let go of everything, and wait until the probes are gone."""
        for file in list(self._bound):
            self._let_go(file)
        self._retiring.wait_for_all()

    def _attach(self, library: Library, until_seconds: float) -> Binding:
        # A probe that is still leaving would lend its copy of the old instruction to a new one at the same place. A
        # writer that had to wait comes back when the thread is all but done; it is worth a moment.
        if not self._retiring.wait_for(library.version.file, until_seconds):
            raise ProbeError("the kernel has not let go of its old content yet")
        share = share_of(library.place.owner_id)
        descriptor = self._patiently(lambda: library.place.open(library.version, self._mounts), close_if_open, share)
        if descriptor is None:
            raise ProbeError("it has gone or changed since it was looked at")
        binding = Binding(library, descriptor, [])
        try:
            # Held and watched first, compared then: a write in between is either heard of or seen.
            binding.leased = take_lease(descriptor)
            if self._watcher:
                self._watcher.add(binding.path_by_descriptor)
            if Version.of(os.fstat(descriptor)) != library.version:
                raise ProbeError("it is being rewritten")
            # Functions of the same code are one place.
            for offset, function in {offset: name for name, offset in library.offsets.items()}.items():
                attach = partial(self._attacher.attach, binding.path_by_descriptor, offset, function)
                binding.probes.append(self._patiently(attach, lambda probe: probe.close(), share))
            return binding
        except BaseException:
            self._close(binding)
            raise

    def _patiently(self, function: Callable[[], T], dispose: Callable[[T], object], share: int) -> T:
        """Call it for a file of this share of the users (shares.py), but wait neither for long nor often."""
        if not self._patience.is_out(share):
            with contextlib.suppress(KeptWaitingError):
                return self._patience.call(function, dispose, share=lambda: share)
        raise ProbeError("a process that uses it keeps the kernel waiting")

    def _let_go(self, file: FileId) -> Library:
        binding = self._bound.pop(file)
        self._close(binding)
        return binding.library

    def _close(self, binding: Binding) -> None:
        if self._watcher:
            with contextlib.suppress(OSError):  # the mark went with the inode, or was never set
                self._watcher.remove(binding.path_by_descriptor)
        self._retire(binding)

    def _retire(self, binding: Binding, in_haste: bool = False) -> None:
        self._retiring.add(binding.library.version.file, binding.probes, binding.descriptor, in_haste)

    def is_leaving(self, file: FileId) -> bool:
        """Are probes of its old content still being taken out?"""
        return file in self._retiring.files()


def close_if_open(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def take_lease(descriptor: int) -> bool:
    """Be asked before anybody writes to the file; False where its file system has no leases (NFS, FUSE).

    Raises ProbeError where somebody has it open for writing: what is read of it may not be what runs.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        raise ProbeError("somebody has it open for writing") from None
    except OSError:
        return False
    return True
