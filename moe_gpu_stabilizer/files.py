"""How files are told apart: by device and inode, by content, by the paths that lead to them."""

from __future__ import annotations

import os
from typing import NamedTuple


class FileId(NamedTuple):
    """A file, whatever it is called."""

    device: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileId:
        return cls(status.st_dev, status.st_ino)


class Version(NamedTuple):
    """One content of a file: rewriting a file in place changes its times, not its inode."""

    file: FileId
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Version:
        return cls(FileId.of(status), status.st_size, status.st_mtime_ns)


class Place(NamedTuple):
    """Where a file is: as people know it, and as this process can open it, also inside a container or deleted."""

    path: str
    openable: str

    def open(self, version: Version) -> int | None:
        """Open the file for reading; None where it is gone, closed to us, or its content is another by now."""
        try:
            # Without O_NONBLOCK, opening a FIFO that somebody has put there would wait for a writer.
            descriptor = os.open(self.openable, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        if Version.of(os.fstat(descriptor)) == version:
            return descriptor
        os.close(descriptor)
        return None
