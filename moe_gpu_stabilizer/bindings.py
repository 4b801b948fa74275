"""The probed libraries: attach to new ones, let go of dead ones, never leave a probe in code that has changed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from .errors import ProbeError
from .files import FileId, Version
from .libraries import Library
from .mounts import Mounts

# For how long an update waits for the kernel to let go of what is to be probed anew. What is not done then fails.
LEAVING_SECONDS = 0.5


class Closable(Protocol):
    def close(self) -> None: ...


class Attacher(Protocol):
    """What bindings need of uprobes.Probe."""

    def attach(self, path: str, offset: int, function: str) -> Closable: ...


class Watcher(Protocol):
    """What bindings need of fanotify.WriteWatch."""

    def add(self, path: str) -> None: ...
    def remove(self, path: str) -> None: ...


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
    waiting: int = 0  # for the kernel to let go of others


class Bindings:
    """The probed files, by device and inode."""

    def __init__(self, attacher: Attacher, watcher: Watcher | None, mounts: Mounts, most_files: int) -> None:
        """No more than `most_files` have probes at any time, those included whose probes are being taken out."""
        self._attacher = attacher
        self._mounts = mounts
        self._most_files = most_files
        self._watcher = watcher
        self._bound: dict[FileId, Binding] = {}
        self._leaving: dict[FileId, list[threading.Thread]] = {}

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
        patient_until_seconds = time.monotonic() + LEAVING_SECONDS
        self._leaving = {
            file: threads for file, threads in self._leaving.items() if any(thread.is_alive() for thread in threads)
        }
        for file, binding in list(self._bound.items()):
            if file in found and not found[file].is_probed_as(binding.library):
                change.detached.append(self._let_go(file))
        for file, library in found.items():
            if file not in self._bound:
                held = self.files | {file for file in self._leaving if self.is_leaving(file)}
                if len(held - {file}) >= self._most_files:
                    change.waiting += 1
                    continue
                try:
                    self._bound[file] = self._attach(library, patient_until_seconds)
                    change.attached.append(library)
                except (OSError, ProbeError) as error:
                    change.failed.append((library, str(error)))
        changed = self.changed_unheard() if keep else []
        for file in list(self._bound):
            if file not in found and (file not in keep or file in changed):
                change.detached.append(self._let_go(file))
        return change

    def written(self, file: FileId) -> Library | None:
        """Somebody writes, or wants to write, to a probed file: let go of it.

        A program that starts next would get our breakpoint in the middle of an instruction of the new code. Where there
        is a lease, the writer waits for the thread that lets go; we do not, for there may be many such files. The file
        stays watched: the end of the write is to be heard, too. Returns what it was, None where it is not probed.
        """
        binding = self._bound.pop(file, None)
        if binding is None:
            return None
        self._retire(binding)
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
        for file in list(self._leaving):
            self._wait_until_gone(file)

    def _attach(self, library: Library, patient_until_seconds: float) -> Binding:
        if not self._is_gone(library.version.file, patient_until_seconds):
            raise ProbeError("the kernel has not let go of its old content yet")
        descriptor = library.place.open(library.version, self._mounts)
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
                binding.probes.append(self._attacher.attach(binding.path_by_descriptor, offset, function))
            return binding
        except BaseException:
            self._close(binding)
            raise

    def _let_go(self, file: FileId) -> Library:
        binding = self._bound.pop(file)
        self._close(binding)
        return binding.library

    def _close(self, binding: Binding) -> None:
        if self._watcher:
            with contextlib.suppress(OSError):  # the mark went with the inode, or was never set
                self._watcher.remove(binding.path_by_descriptor)
        self._retire(binding)

    def _retire(self, binding: Binding) -> None:
        """Begin to take the probes out.

        It takes the kernel about 100 ms for each, one after the other, for it waits until nobody can be inside. A
        thread that does nothing else does the waiting, so that a first call does not.
        """
        thread = threading.Thread(target=retire, args=(binding,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no memory or process left for a thread: then everything waits
            retire(binding)
            return
        self._leaving.setdefault(binding.library.version.file, []).append(thread)

    def _is_gone(self, file: FileId, patient_until_seconds: float) -> bool:
        """A probe that is still leaving would lend its copy of the old instruction to a new one at the same place.

        A writer that had to wait comes back when the thread is all but done; it is worth a moment.
        """
        for thread in self._leaving.get(file, []):
            thread.join(max(0, patient_until_seconds - time.monotonic()))
        return not self.is_leaving(file)

    def is_leaving(self, file: FileId) -> bool:
        """Are probes of its old content still being taken out?"""
        return any(thread.is_alive() for thread in self._leaving.get(file, []))

    def _wait_until_gone(self, file: FileId) -> None:
        for thread in self._leaving.pop(file, []):
            thread.join()


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


def retire(binding: Binding) -> None:
    """Take the probes out, and only then drop the lease: with it a waiting writer goes on."""
    for probe in binding.probes:
        probe.close()
    os.close(binding.descriptor)
