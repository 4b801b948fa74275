"""Where in an ELF file are the functions we probe?

Read with pyelftools, in a child process: any user may have made the file.
"""

from __future__ import annotations

import itertools
import os
import signal
import struct
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .files import Place, Version
from .isolated import Child, limit_cpu
from .mounts import Mounts
from .settings import NANOSECONDS

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

# libllama's entrances.
CALLS = ("llama_decode", "llama_process", "llama_synchronize")
# ggml's: one scheduled graph, wherever its parts are computed, and in it each part that the CPU computes.
GRAPH, SECTION = "ggml_backend_sched_graph_compute_async", "ggml_graph_compute"
PROBED_FUNCTIONS = (*CALLS, GRAPH, SECTION)

# For one child. Reading a libllama takes 5 ms, a file that is made to take long a second. The rest of the time is for a
# machine that is busy: a good library must not be taken for a bad one because a hundred programs compute.
READ_CPU_SECONDS, READ_SECONDS = 5, 60
# Opening one takes a moment.
OPEN_SECONDS = 5

# libllama has about 1 MB of symbols; a big static program 20 MB. What claims more is not read.
MOST_TABLE_BYTES = 64 << 20
MOST_SECTIONS = 4096
# A file has one or two. Each may be as large as that, and takes a second then.
MOST_SYMBOL_TABLES = 4

# What files that lie have made pyelftools raise, and its like. Anything else ends the child.
STUMBLES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError,
    ValueError, struct.error,
)  # fmt: skip

ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"

# struct Elf64_Sym: name, info, other, section index, value, size.
SYMBOL = struct.Struct("<IBBHQQ")
UNDEFINED_SECTION = 0
TYPE_MASK, FUNCTION = 0xF, 2
EXECUTABLE = 1

Offsets = dict[str, int]


class Reading:
    """The symbols of some files, being read in a child. Readable, as Child is, when some of the answer has arrived."""

    def __init__(self, files: Mapping[Version, Place]) -> None:
        """Start it. Raises ChildError where there is no memory, process or descriptor left."""
        self.files = dict(files)
        self.deadline_ns = time.monotonic_ns() + READ_SECONDS * NANOSECONDS
        self.child = Child(lambda: read_offsets(self.files))

    def end(self) -> dict[Version, Offsets | None]:
        """End the child and return what it has found; None for a file that could not be opened.

        Raises ChildError where the child has not come to an end by itself.
        """
        return dict(zip(self.files, self.child.end(), strict=True))


def read_offsets(files: Mapping[Version, Place]) -> list[Offsets | None]:
    """Return function_offsets() of each file; None where it is not there any more, or has changed. For a child."""
    limit_cpu(READ_CPU_SECONDS)
    # A process that locks up its memory keeps whoever opens a file by way of it waiting: the alarm ends this child.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    mounts = Mounts()
    answers: list[Offsets | None] = []
    for version, place in files.items():
        signal.setitimer(signal.ITIMER_REAL, OPEN_SECONDS)
        descriptor = place.open(version, mounts)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.append(None if descriptor is None else offsets_or_none(descriptor))
    return answers


def offsets_or_none(descriptor: int) -> Offsets:
    """Return function_offsets(), which are none in a file that its reader stumbles over."""
    from elftools.common.exceptions import ELFError

    try:
        return function_offsets(descriptor)
    except (ELFError, *STUMBLES):
        return {}
    finally:
        os.close(descriptor)


def function_offsets(file_descriptor: int) -> Offsets:
    """Return the file offsets, in bytes, of those PROBED_FUNCTIONS that this 64-bit little-endian ELF file defines.

    Empty where it is no such file or defines none. A file that lies about itself may raise anything that pyelftools
    and struct raise. A uprobe's offset is st_value - p_vaddr +
    p_offset of the executable segment that holds the symbol.
    """
    from elftools.elf.elffile import ELFFile

    with open(file_descriptor, "rb", closefd=False) as stream:
        stream.seek(0)
        if stream.read(len(ELF64_LITTLE_ENDIAN)) != ELF64_LITTLE_ENDIAN:
            return {}
        elf = ELFFile(stream)
        segments = [
            segment
            for segment in elf.iter_segments()
            if segment["p_type"] == "PT_LOAD" and segment["p_flags"] & EXECUTABLE
        ]
        offsets: Offsets = {}
        file_bytes = os.fstat(file_descriptor).st_size
        for name, address in _defined_functions(elf, file_bytes):
            for segment in segments:
                offset = address - segment["p_vaddr"] + segment["p_offset"]
                if segment["p_vaddr"] <= address < segment["p_vaddr"] + segment["p_filesz"] and offset < file_bytes:
                    offsets[name] = offset
        return offsets


def _defined_functions(elf: ELFFile, file_bytes: int) -> Iterator[tuple[str, int]]:
    """Yield (name, address) of the probed functions in every symbol table.

    A library has them in its dynamic table, a static program in its full one.

    The name's place in the string table is searched first; then only symbols with that place are looked at.
    """
    sections = map(elf.get_section, range(min(elf.num_sections(), MOST_SECTIONS)))
    tables = (section for section in sections if section["sh_type"] in ("SHT_SYMTAB", "SHT_DYNSYM"))
    for header in itertools.islice(tables, MOST_SYMBOL_TABLES):
        strings = _table(elf, elf.get_section(header["sh_link"]), file_bytes)
        places = {place: name for name in PROBED_FUNCTIONS for place in _places(strings, name)}
        if not places:
            continue
        symbols = _table(elf, header, file_bytes)
        whole = len(symbols) - len(symbols) % SYMBOL.size
        for place, info, _other, section, address, _size in SYMBOL.iter_unpack(symbols[:whole]):
            if place in places and section != UNDEFINED_SECTION and info & TYPE_MASK == FUNCTION:
                yield places[place], address


def _places(strings: bytes, name: str) -> Iterator[int]:
    """Every place where this NUL-ended name stands, also as the tail of a longer one: linkers share tails."""
    wanted = name.encode() + b"\0"
    place = strings.find(wanted)
    while place >= 0:
        yield place
        place = strings.find(wanted, place + 1)


def _table(elf: ELFFile, header: Any, file_bytes: int) -> bytes:
    """A section's bytes; empty where it is larger than any honest one, or than the file."""
    size = header["sh_size"]
    if size > MOST_TABLE_BYTES or header["sh_offset"] + size > file_bytes:
        return b""
    elf.stream.seek(header["sh_offset"])
    table: bytes = elf.stream.read(size)
    return table
