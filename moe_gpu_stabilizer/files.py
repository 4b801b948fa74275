"""How files are told apart: by device and inode, by content, by the paths that lead to them."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from .mounts import Mounts
from .reach import open_for_reading, reached


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
    owner_id: int = 0  # the user whose file it is

    def open(self, version: Version, mounts: Mounts) -> int | None:
        """Open the file for reading; None where it is gone, closed to us, or its content is another by now."""
        try:
            with reached(self.openable, mounts) as handle:
                status = os.fstat(handle)
                if Version.of(status) != version or not stat.S_ISREG(status.st_mode):
                    return None
                descriptor = open_for_reading(handle)
        except OSError:
            return None
        if Version.of(os.fstat(descriptor)) == version:
            return descriptor
        os.close(descriptor)
        return None
