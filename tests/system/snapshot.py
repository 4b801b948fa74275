"""What differs in a container's file tree from the machine that it was made from."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import stat
from pathlib import Path
from typing import NamedTuple

# Left out, with all below. /proc, /sys, /dev, /run and /tmp are file systems of their own and not in the tree at all.
EXCLUDED = (
    "/var/log/journal",  # journald, all the time
    "/var/log/wtmp",  # systemd notes each boot and shutdown there
    "/var/lib/systemd",  # stamps of timers, the random seed, what has been enabled before
    "/var/tmp/systemd-private-*",  # services with a /tmp of their own
    *("/etc/.updated", "/var/.updated"),  # systemd's stamps of its last update of /etc and /var
    # apt and dpkg: lists, archives, what is installed, their logs, and what packages have them run each time
    *("/var/lib/apt", "/var/cache/apt", "/var/lib/dpkg", "/var/cache/debconf", "/var/lib/PackageKit", "/var/cache/man"),
    *("/var/log/apt", "/var/log/dpkg.log", "/var/log/alternatives.log", "/etc/ld.so.cache", "/var/cache/ldconfig"),
)


class Entry(NamedTuple):
    """One path. `kind` is file, directory, emptied directory, symlink, removed, or other."""

    kind: str
    mode: int
    uid: int
    gid: int
    content: str  # sha256 of a file, target of a symlink


Snapshot = dict[str, Entry]


def changes(upper: Path, lower: Path = Path("/")) -> Snapshot:
    """All that an overlay's upper layer makes different from its lower one, by absolute path."""
    found: Snapshot = {}
    _collect(upper, lower, "", True, found)
    return found


def _collect(upper: Path, lower: Path, directory: str, has_lower: bool, found: Snapshot) -> None:
    """`has_lower`: the lower layer's directory shows through."""
    for name in sorted(os.listdir(f"{upper}{directory}")):
        path = f"{directory}/{name}"
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in EXCLUDED):
            continue
        entry = _entry(f"{upper}{path}")
        before = _entry(f"{lower}{path}") if has_lower and os.path.lexists(f"{lower}{path}") else None
        if entry.kind == "removed" and before is None:
            continue
        if entry != before:
            found[path] = entry
        if entry.kind.endswith("directory"):
            shows_through = before is not None and before.kind == entry.kind == "directory"
            _collect(upper, lower, path, shows_through, found)


def _entry(path: str) -> Entry:
    status = os.lstat(path)
    kind, content = "other", ""
    if stat.S_ISREG(status.st_mode):
        kind, content = "file", hashlib.sha256(Path(path).read_bytes()).hexdigest()
    elif stat.S_ISLNK(status.st_mode):
        kind, content = "symlink", os.readlink(path)
    elif stat.S_ISDIR(status.st_mode):
        kind = "emptied directory" if "trusted.overlay.opaque" in os.listxattr(path) else "directory"
    elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        return Entry("removed", 0, 0, 0, "")  # so overlayfs marks it
    return Entry(kind, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, content)
