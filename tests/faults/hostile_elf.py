"""Files that lie about themselves: a real library, changed in ways that a reader may stumble over.

The same ones at each run.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

TERABYTE = 1 << 40

# struct Elf64_Ehdr: where the program and section headers are, how long one is, how many there are.
PROGRAMS_FIELD, SECTIONS_FIELD, PROGRAM_COUNT_FIELD, SECTION_COUNT_FIELD = 0x20, 0x28, 0x38, 0x3C
HEADER_BYTES, PROGRAM_BYTES, SECTION_BYTES = 64, 56, 64
# struct Elf64_Shdr: type, offset, size; struct Elf64_Sym: value.
TYPE, OFFSET, SIZE = 4, 0x18, 0x20
SYMBOL_TABLES = (2, 11)
SYMBOL_BYTES, VALUE = 24, 8
NUMBERS = (0, 1, 2, 7, 0x7F, 0xFFF, 0xFFFF, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, -1)


class Hostile(NamedTuple):
    """A file's content; `length_bytes` is more than that where it goes on with a hole."""

    content: bytes
    length_bytes: int

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(self.content)
            file.truncate(self.length_bytes)
        return path


def hostile_files(library: bytes, count: int, seed: int = 1) -> Iterator[Hostile]:
    """Yield files, each with one to four changes of the library."""
    chance = random.Random(seed)
    for number in range(count):
        content = bytearray(library)
        for _ in range(chance.randint(1, 4)):
            chance.choice(CHANGES)(content, chance)
        holes = number % 50 == 0
        yield Hostile(bytes(content), TERABYTE if holes else len(content))


def cut(content: bytearray, chance: random.Random) -> None:
    del content[chance.randint(0, len(content)) :]


def flip(content: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 10, 100, 1000))):
        if content:
            content[chance.randrange(len(content))] = chance.randrange(256)


def lie_in_header(content: bytearray, chance: random.Random) -> None:
    put(content, chance.randrange(0x10, HEADER_BYTES), number(content, chance), chance.choice("BHIQ"))


def lie_in_section(content: bytearray, chance: random.Random) -> None:
    put(
        content,
        section(content, chance) + chance.randrange(SECTION_BYTES),
        number(content, chance),
        chance.choice("IQ"),
    )


def lie_in_segment(content: bytearray, chance: random.Random) -> None:
    start, count = at(content, PROGRAMS_FIELD, "Q"), at(content, PROGRAM_COUNT_FIELD, "H")
    place = start + chance.randrange(max(1, count)) * PROGRAM_BYTES + chance.randrange(PROGRAM_BYTES)
    put(content, place, number(content, chance), chance.choice("IQ"))


def overlap(content: bytearray, chance: random.Random) -> None:
    """Two sections that are the same place."""
    one, other = section(content, chance), section(content, chance)
    for field in (OFFSET, SIZE):
        put(content, other + field, at(content, one + field, "Q"), "Q")


def more_tables(content: bytearray, chance: random.Random) -> None:
    """Every section is a symbol table."""
    for _ in range(40):
        put(content, section(content, chance) + TYPE, chance.choice(SYMBOL_TABLES), "I")


def lie_in_symbols(content: bytearray, chance: random.Random) -> None:
    """Functions in the middle of an instruction, in data, beyond the file."""
    for _ in range(40):
        place = section(content, chance)
        if at(content, place + TYPE, "I") in SYMBOL_TABLES:
            symbols, size = at(content, place + OFFSET, "Q"), at(content, place + SIZE, "Q")
            for symbol in range(symbols, min(symbols + size, len(content)), SYMBOL_BYTES):
                before = at(content, symbol + VALUE, "Q")
                put(content, symbol + VALUE, chance.choice((before + 1, before + 3, number(content, chance))), "Q")
            return


def repeat(content: bytearray, chance: random.Random) -> None:
    """All names are names of ours."""
    for place in range(chance.randrange(1, 64), len(content) - 64, chance.randrange(64, 4096)):
        content[place : place + 14] = b"\0llama_decode\0"


CHANGES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    cut, flip, lie_in_header, lie_in_section, lie_in_segment, overlap, more_tables, lie_in_symbols, repeat,
)  # fmt: skip


def number(content: bytearray, chance: random.Random) -> int:
    near = len(content) + chance.choice((-1, 0, 1, -SECTION_BYTES))
    return chance.choice((*NUMBERS, near, chance.randrange(1 << 64)))


def section(content: bytearray, chance: random.Random) -> int:
    start, count = at(content, SECTIONS_FIELD, "Q"), at(content, SECTION_COUNT_FIELD, "H")
    return start + chance.randrange(max(1, min(count, 64))) * SECTION_BYTES


def at(content: bytearray, place: int, kind: str) -> int:
    """The number at a place; 0 where the file has no such place (any more)."""
    if place + struct.calcsize(kind) > len(content):
        return 0
    value: int = struct.unpack_from(f"<{kind}", content, place)[0]
    return value


def put(content: bytearray, place: int, value: int, kind: str) -> None:
    size = struct.calcsize(kind)
    if place + size <= len(content):
        struct.pack_into(f"<{kind}", content, place, value & ((1 << 8 * size) - 1))
