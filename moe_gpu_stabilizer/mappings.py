"""Which files a running process uses: its executable, and every libllama and libggml that it maps."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from .files import Place, Version
from .mounts import MayNotAnswerError, Mounts
from .processes import read_proc
from .reach import reached

# An executable mapping of such a file, in /proc/PID/maps: address range, permissions, offset, device, inode, path.
# Of ggml those that compute graphs: not its GPU backends, which are large.
NAMES = rb"(?:libllama|libggml(?:-base|-cpu[^/\n]*)?(?=\.))[^/\n]*\.so[^/\n]*"
MAPPED = re.compile(rb"^([0-9a-f]+-[0-9a-f]+) ..x. \S+ (\S+ \d+) +(/(?:.*/)?" + NAMES + rb")$", re.MULTILINE)

# A llama-server has about 300 mappings, 100 bytes each. Any user may make a process with 65,000.
MOST_MAPS_BYTES = 4 << 20
# libllama, libggml, its base and its CPU part; a program that tries them all has a dozen of the latter for a moment.
MOST_LIBRARIES_OF_A_PROCESS = 16
# Each is remembered, and one odd character makes four bytes of each (PEP 393).
MOST_PATH_BYTES = 512


def files_used_by(
    directory: Path, mounts: Mounts, refused: Callable[[str, str], None]
) -> Iterator[tuple[Version, Place]]:
    """Yield the executable and the mapped files of llama.cpp of the process behind /proc/PID.

    `refused` is told of each that lies where nobody may answer, and of the kind of that place. Raises
    FileNotFoundError for a kernel thread or a process that is gone, PermissionError for another user's without root.
    """
    executable = directory / "exe"
    name = os.readlink(executable)[-MOST_PATH_BYTES:]
    try:
        yield _use(name, executable, mounts)
    except MayNotAnswerError as error:  # what it maps may lie elsewhere
        refused(name, error.kind)
    maps = read_proc(directory / "maps", MOST_MAPS_BYTES)
    if b"/libllama" not in maps and b"/libggml" not in maps:
        return
    # A file that is mapped a thousand times is one file; nobody needs many of them.
    once = {file: (addresses, path) for addresses, file, path in MAPPED.findall(maps) if len(path) <= MOST_PATH_BYTES}
    for addresses, path in list(once.values())[:MOST_LIBRARIES_OF_A_PROCESS]:
        name = os.fsdecode(path)
        # map_files leads to the very inode, whatever has become of the name; it is open to root alone.
        for openable in (directory / "map_files" / addresses.decode(), Path(f"{directory}/root{name}")):
            try:
                yield _use(name, openable, mounts)
                break
            except MayNotAnswerError as error:
                refused(name, error.kind)
                break
            except OSError:
                continue


def _use(name: str, openable: Path, mounts: Mounts) -> tuple[Version, Place]:
    with reached(str(openable), mounts) as handle:
        status = os.fstat(handle)
    return Version.of(status), Place(name, str(openable), status.st_uid)
