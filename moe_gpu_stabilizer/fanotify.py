"""Hear of writes to files: fanotify(7). Python has no module for it; libc has two functions."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import NamedTuple

from .files import FileId

FAN_CLOEXEC = 0x1
FAN_NONBLOCK = 0x2
FAN_CLASS_NOTIF = 0x0
FAN_MODIFY = 0x2
FAN_CLOSE_WRITE = 0x8
FAN_MARK_ADD = 0x1
FAN_MARK_REMOVE = 0x2
FAN_MARK_FLUSH = 0x80
AT_FDCWD = -100

# struct fanotify_event_metadata: event_len, vers, reserved, metadata_len, mask, fd, pid.
EVENT = struct.Struct("=IBBHQii")
READ_BYTES = 4096


class Write(NamedTuple):
    """Somebody wrote to a watched file, or closed it after writing, or both."""

    file: FileId
    modified: bool
    closed: bool
    pid: int


class WriteWatch:
    """Watches files for writes by any process. Raises OSError where the kernel refuses (it wants CAP_SYS_ADMIN)."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.fanotify_mark.argtypes = [
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_char_p,
        ]
        flags = FAN_CLOEXEC | FAN_CLASS_NOTIF | FAN_NONBLOCK
        self._fd = self._libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_LARGEFILE", 0))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "fanotify_init: " + os.strerror(ctypes.get_errno()))

    def fileno(self) -> int:
        return int(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def add(self, path: str) -> None:
        self._mark(FAN_MARK_ADD, path)

    def remove(self, path: str) -> None:
        self._mark(FAN_MARK_REMOVE, path)

    def clear(self) -> None:
        """Watch nothing any more."""
        self._libc.fanotify_mark(self._fd, FAN_MARK_FLUSH, 0, AT_FDCWD, None)

    def _mark(self, action: int, path: str) -> None:
        if self._libc.fanotify_mark(self._fd, action, FAN_MODIFY | FAN_CLOSE_WRITE, AT_FDCWD, os.fsencode(path)) < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)

    def read(self) -> list[Write]:
        """Take what happened since the last call."""
        writes: list[Write] = []
        try:
            events = os.read(self._fd, READ_BYTES)
        except OSError:  # nothing there; or no descriptor left for the event's file: its times tell at the next tick
            return writes
        offset = 0
        while offset < len(events):
            length, _version, _reserved, _metadata, mask, event_fd, pid = EVENT.unpack_from(events, offset)
            offset += length
            if event_fd < 0:  # the queue overflowed; the file's times tell at the next tick
                continue
            status = os.fstat(event_fd)
            os.close(event_fd)
            writes.append(Write(FileId.of(status), bool(mask & FAN_MODIFY), bool(mask & FAN_CLOSE_WRITE), pid))
        return writes
