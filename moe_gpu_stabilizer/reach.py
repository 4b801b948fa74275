"""Go to files by their paths, and by globs, without ever touching a place where nobody may answer.

The kernel would go all the way in one call, through whatever a user has mounted or linked there meanwhile. So this goes
step by step. Each step opens a name as a mere handle (O_PATH), which asks no file system but the one that was checked
before; the handle is checked, and only then asked what it is. Nothing can be put in its place in between.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .listings import Listings
from .mounts import MayNotAnswerError, Mounts

HANDLE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# As many as the kernel follows on one path.
MOST_LINKS = 40

# Links of /proc that lead straight to a file, or to another root, past all names.
TO_FILE = re.compile(r"/proc/(?:\d+|self)/(?:exe|map_files/[0-9a-f]+-[0-9a-f]+)$")
TO_ROOT = re.compile(r"(/proc/\d+/root)(/.*)$", re.DOTALL)


class Reached(NamedTuple):
    """A file that a pattern leads to: under which path, and its own one."""

    path: str
    real: str
    status: os.stat_result


@contextmanager
def reached(path: str, mounts: Mounts) -> Iterator[int]:
    """Hold a handle (O_PATH) on what the path leads to; fstat() of it can be asked for.

    Raises MayNotAnswerError where it lies, or the way leads, where nobody may answer; and OSError.
    """
    descriptor = _reach(path, mounts)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def expand(pattern: str, mounts: Mounts, listings: Listings, refused: Callable[[str, str], None]) -> Iterator[Reached]:
    """Yield the regular files that a glob leads to, or the path itself: a file's own name may have brackets in it.

    `refused` is told of each place where nobody may answer, and of its kind.
    """
    found = False
    if glob.has_magic(pattern):
        with _walk("/", "/", mounts) as walk:
            parts = [part for part in pattern.split("/") if part]
            for one in walk.expand(walk.root, "", parts, listings, refused):
                found = True
                yield one
    if not found:
        try:
            with reached(pattern, mounts) as descriptor:
                yield from _regular(pattern, descriptor)
        except MayNotAnswerError as error:
            refused(pattern, error.kind)
        except OSError:  # no such file, a loop, closed to us
            pass


def open_for_reading(descriptor: int) -> int:
    """Open the very file that a handle holds. Raises OSError, also where somebody holds it with a lease."""
    # Without O_NONBLOCK it would be waited for until that one lets go.
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def _reach(path: str, mounts: Mounts) -> int:
    if TO_FILE.match(path):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            mounts.check(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    other = TO_ROOT.match(path)
    with _walk(other[1] if other else "/", path, mounts) as walk:
        return walk.follow(walk.root, other[2] if other else path, [])


def _regular(path: str, descriptor: int) -> Iterator[Reached]:
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        yield Reached(path, os.readlink(f"/proc/self/fd/{descriptor}"), status)


@contextmanager
def _walk(root: str, path: str, mounts: Mounts) -> Iterator[_Walk]:
    descriptor = os.open(root, os.O_PATH | os.O_CLOEXEC)
    try:
        mounts.check(descriptor, path)
        yield _Walk(descriptor, path, mounts)
    finally:
        os.close(descriptor)


class _Walk:
    """Steps below one root, which is another for a process in a container."""

    def __init__(self, root: int, path: str, mounts: Mounts) -> None:
        self.root = root
        self._path = path
        self._mounts = mounts

    def follow(self, start: int, path: str, links: list[str]) -> int:
        """Return a handle on what the path leads to from a folder; `links` are those that were followed so far."""
        here = os.dup(self.root if path.startswith("/") else start)
        try:
            for name in path.split("/"):
                if name not in ("", "."):
                    there = self.step(here, name, links)
                    os.close(here)
                    here = there
        except BaseException:
            os.close(here)
            raise
        return here

    def step(self, folder: int, name: str, links: list[str]) -> int:
        """Return a handle on what the name in this folder is, or leads to where it is a link."""
        descriptor = os.open(name, HANDLE, dir_fd=folder)
        try:
            self._mounts.check(descriptor, self._path)
            if not stat.S_ISLNK(os.fstat(descriptor).st_mode):
                return descriptor
            target = os.readlink("", dir_fd=descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        links.append(target)
        if len(links) > MOST_LINKS:
            raise OSError("too many links")
        return self.follow(folder, target, links)

    def expand(
        self, folder: int, done: str, parts: list[str], listings: Listings, refused: Callable[[str, str], None]
    ) -> Iterator[Reached]:
        part, *rest = parts
        names = listings.names(folder, part) if glob.has_magic(part) else [part]
        for name in names:
            path = f"{done}/{name}"
            try:
                there = self.step(folder, name, [])
            except MayNotAnswerError as error:
                refused(path, error.kind)
                continue
            except OSError:  # a dangling link, a loop, gone since
                continue
            try:
                yield from self.expand(there, path, rest, listings, refused) if rest else _regular(path, there)
            finally:
                os.close(there)
