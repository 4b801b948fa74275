"""Which files may be touched at all: those on a file system that always answers.

stat(), open(), even close() of a file on FUSE or NFS ask a server, and wait in the kernel for as long as it does not
answer; not even SIGKILL ends that. Any user may run such a server. So nothing is asked of a file before the mount is
known that it is on, and whatever is not known to be local is left alone: a new kind of local disk costs a line in the
log, a new kind of network disk would cost the daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .processes import ProcessVanishedError, read_proc

# On a disk of this machine, or in its memory. Not proc and the like: reading one of its files may do something.
LOCAL_KIND = re.compile(
    "bcachefs|btrfs|cramfs|devtmpfs|erofs|exfat|ext2|ext3|ext4|f2fs|hfs|hfsplus|hugetlbfs|iso9660|jffs2|jfs|minix|"
    "nilfs2|ntfs|ntfs3|ramfs|reiserfs|romfs|rootfs|squashfs|tmpfs|ubifs|udf|vfat|xfs|zfs"
)
OVERLAY = "overlay"
LAYERS = re.compile(rb"(?:^|,)(?:lowerdir\+?|datadir\+|upperdir)=([^,]*)")

# A service has a namespace of its own, in which each mount has another number; programs are mostly in the machine's.
OWN_MOUNTS, MACHINES_MOUNTS = "/proc/self/mountinfo", "/proc/1/mountinfo"
# Some 100 bytes a mount. In a namespace of their own any user may have 100,000 (the sysctl fs.mount-max).
MOST_MOUNTS_BYTES = 1 << 20
MOUNT_ID = re.compile(rb"^mnt_id:\t(\d+)$", re.MULTILINE)
HIDDEN = "a hidden mount"
AT_NO_AUTOMOUNT, AT_EMPTY_PATH, AT_STATX_DONT_SYNC = 0x800, 0x1000, 0x4000
# struct statx: its size, and where the device's two numbers are.
STATX_BYTES, STATX_DEVICE_AT, STATX_DEVICE = 256, 136, struct.Struct("=II")
OF_PROCESS = re.compile(r"/proc/\d+(?=/)")
ESCAPED = re.compile(rb"\\([0-7]{3})")


class MayNotAnswerError(OSError):
    """The file lies where nobody may answer. `kind`: the file system's type, or HIDDEN."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"it lies on {kind}, which may not answer")
        self.kind = kind


class Mount(NamedTuple):
    """A line of /proc/PID/mountinfo (proc_pid_mountinfo(5))."""

    device: bytes
    point: bytes
    kind: str
    options: bytes

    @classmethod
    def of(cls, line: bytes) -> Mount:
        before, _, behind = line.partition(b" - ")
        _id, _parent, device, _root, point, *_ = before.split(b" ")
        kind, _source, options = behind.split(b" ", 2)
        return cls(device, unescaped(point), kind.decode("ascii", "replace"), options)


def mounts_in(text: bytes) -> Iterator[Mount]:
    return (Mount.of(line) for line in text.split(b"\n")[:-1])


class MountTable:
    """The mounts of one namespace, as the kernel lists them."""

    def __init__(self, text: bytes) -> None:
        # The last line is cut off where there was more than was read, or the namespace ended meanwhile.
        self._text = text[: text.rfind(b"\n") + 1]
        self._known: dict[int, Mount | None] = {}

    def mount(self, mount_id: int) -> Mount | None:
        """The mount with this number; None where it is not in this namespace."""
        if mount_id not in self._known:
            line = re.search(rb"^%d .*$" % mount_id, self._text, re.MULTILINE)
            self._known[mount_id] = Mount.of(line[0]) if line else None
        return self._known[mount_id]

    def mount_of(self, device: bytes) -> Mount | None:
        """A mount of this device; None where there is none in this namespace."""
        return next((mount for mount in mounts_in(self._text) if mount.device == device), None)

    def device_of_root(self) -> bytes | None:
        return next((mount.device for mount in mounts_in(self._text) if mount.point == b"/"), None)

    def doubtful(self, mount: Mount, trusted_device: bytes | None) -> str | None:
        """Return the type of a file system that may not answer, None for one that does.

        What is on `trusted_device` does, whatever it is.
        """
        if LOCAL_KIND.fullmatch(mount.kind) or mount.device == trusted_device:
            return None
        if mount.kind != OVERLAY:
            return mount.kind
        # An overlay answers when what it lies over does.
        layers = [unescaped(path) for paths in LAYERS.findall(mount.options) for path in paths.split(b":")]
        below = (self._mount_at(path) for path in layers if path.startswith(b"/"))
        kinds = [
            mount.kind for mount in below if mount and mount.kind != OVERLAY and self.doubtful(mount, trusted_device)
        ]
        return f"{OVERLAY} over {kinds[0]}" if kinds else None

    def _mount_at(self, path: bytes) -> Mount | None:
        """What is mounted at this path or nearest above it: of several at one point the last covers the others."""
        above = [mount for mount in mounts_in(self._text) if is_below(path, mount.point)]
        return max(reversed(above), key=lambda mount: len(mount.point), default=None)


def is_below(path: bytes, point: bytes) -> bool:
    return (path + b"/").startswith(point.rstrip(b"/") + b"/")


class Listing:
    """A namespace's table of mounts, kept current."""

    def __init__(self, path: str) -> None:
        # Its descriptor becomes urgent when a mount comes or goes (proc_pid_mounts(5)).
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._poller = select.poll()
        self._poller.register(self._file, select.POLLPRI)
        self._table = self._read()

    def close(self) -> None:
        self._file.close()

    def table(self) -> MountTable:
        """The table as it is now: it is read again only where it has changed."""
        if self._poller.poll(0):
            self._table = self._read()
        return self._table

    def _read(self) -> MountTable:
        self._file.seek(0)
        return MountTable(b"".join(iter(lambda: self._file.read(65536), b"")))


class Mounts:
    """Tells whether the file behind an open descriptor may be asked for anything."""

    def __init__(self, paths: Sequence[str] = (OWN_MOUNTS, MACHINES_MOUNTS)) -> None:
        """`paths` lead to the tables of our own namespace and of those whose mounts root has made."""
        self._listings = []
        for path in paths:
            with contextlib.suppress(OSError):  # another user's, without root; or the table of a closed /proc
                self._listings.append(Listing(path))
        # What the machine runs from is local, be it NFS: when that does not answer, nothing does.
        self._trusted_device = self._listings[0].table().device_of_root() if self._listings else None
        self._user_namespace = _user_namespace("/proc/self")
        memory = os.memfd_create("mount")
        # Programs that run from memory: a mount of the kernel's own, in no table.
        self._of_memory = mount_id_of(memory)
        os.close(memory)

    def close(self) -> None:
        for listing in self._listings:
            listing.close()

    def check(self, descriptor: int, path: str) -> None:
        """Raise MayNotAnswerError unless what this O_PATH descriptor holds lies on a file system that answers.

        `path` is what led there: a process's own mounts count where it begins with /proc/PID. While the descriptor is
        open, its mount's number belongs to no other; so a table that is current now, and has it, is right.
        """
        mount_id = mount_id_of(descriptor)
        if mount_id == self._of_memory:
            return
        kind = self._doubtful(mount_id, path, descriptor)
        if kind:
            raise MayNotAnswerError(kind)

    def _doubtful(self, mount_id: int, path: str, descriptor: int) -> str | None:
        for table in (listing.table() for listing in self._listings):
            mount = table.mount(mount_id)
            if mount:
                return table.doubtful(mount, self._trusted_device)
        return self._doubtful_elsewhere(mount_id, path, descriptor)

    def _doubtful_elsewhere(self, mount_id: int, path: str, descriptor: int) -> str | None:
        process = OF_PROCESS.match(path)
        if process is None:
            return HIDDEN
        try:
            text = read_proc(Path(process[0], "mountinfo"), MOST_MOUNTS_BYTES)
        except (OSError, ProcessVanishedError):
            return HIDDEN
        table = MountTable(text)
        mount = table.mount(mount_id)
        if mount is None:
            # A process in a chroot has a table without the mount that this is on. It may be one of ours all the same.
            return self._doubtful_by_device(device_of(descriptor))
        if mount.kind == OVERLAY and _user_namespace(process[0]) != self._user_namespace:
            # Its owner may have hidden what it lies over.
            return f"{OVERLAY} of a user namespace"
        return table.doubtful(mount, self._trusted_device)

    def _doubtful_by_device(self, device: bytes) -> str | None:
        for table in (listing.table() for listing in self._listings):
            mount = table.mount_of(device)
            if mount:
                return table.doubtful(mount, self._trusted_device)
        return HIDDEN


def mount_id_of(descriptor: int) -> int:
    """The number of the mount that a descriptor leads to. No file system is asked."""
    told = os.open(f"/proc/self/fdinfo/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = MOUNT_ID.search(os.read(told, 4096))
    finally:
        os.close(told)
    assert found, "every kernel since 3.15 says it"
    return int(found[1])


def device_of(descriptor: int) -> bytes:
    """The device that a descriptor's file system counts as, in the form that the table has.

    What the kernel knows must do: neither FUSE nor NFS, nor an overlay above them, asks anybody then (statx(2)).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(STATX_BYTES)
    if libc.statx(descriptor, b"", AT_EMPTY_PATH | AT_NO_AUTOMOUNT | AT_STATX_DONT_SYNC, 0, answer):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return b"%d:%d" % STATX_DEVICE.unpack_from(answer, STATX_DEVICE_AT)


def unescaped(path: bytes) -> bytes:
    """Blanks and the like are octal in the table."""
    return ESCAPED.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), path)


def _user_namespace(process: str) -> str | None:
    try:
        return os.readlink(f"{process}/ns/user")
    except OSError:
        return None
