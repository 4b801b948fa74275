"""Offsets of the probed functions, in files as compilers make them and in files that lie.

nm and readelf say what is right; they share no code with what is tested.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from moe_gpu_stabilizer.elf import CALLS, READ_SECONDS, Offsets, Reading, function_offsets
from moe_gpu_stabilizer.files import Place, Version
from moe_gpu_stabilizer.isolated import ChildError, call_in_child
from tests.support import wait_until
from tests.workload import build_library, build_static

# As many flipped copies as fit into two seconds.
FLIPPED_FILES = 150

# struct Elf64_Ehdr: where the section headers are, how long one is, how many there are.
SECTION_TABLE_FIELD, SECTION_COUNT_FIELD = 0x28, 0x3C
ELF_HEADER_BYTES, PROGRAM_HEADER_BYTES, SECTION_HEADER_BYTES = 64, 56, 64
SECTION_OFFSET_FIELD, SECTION_SIZE_FIELD, SECTION_LINK_FIELD, SECTION_ENTRY_FIELD = 0x18, 0x20, 0x28, 0x38


def offsets_of(path: Path) -> Offsets:
    with open(path, "rb") as file:
        return function_offsets(file.fileno())


def reading_of(*paths: Path) -> Reading:
    return Reading({Version.of(path.stat()): Place(str(path), str(path)) for path in paths})


def answer_of(reading: Reading) -> list[Offsets | None]:
    reading.child.receive_until(reading.deadline_ns)
    return list(reading.end().values())


def compile_c(source: str, output: Path, *arguments: str) -> Path:
    subprocess.run(["cc", "-xc", "-", "-o", output, *arguments], input=source, text=True, check=True)
    return output


def run(*command: str | Path) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def offsets_by_binutils(path: Path, table: str) -> Offsets:
    """The same by nm (`table`: -D for the dynamic symbols, -a for all) and by readelf's program headers."""
    segments = [
        tuple(int(number, 16) for number in match)
        for match in re.findall(
            r"^ +LOAD +(0x\w+) (0x\w+) 0x\w+ (0x\w+) 0x\w+ R.E", run("readelf", "-lW", path), re.MULTILINE
        )
    ]
    found: Offsets = {}
    for address_text, name in re.findall(r"^(\w+) T (\w+)$", run("nm", table, path), re.MULTILINE):
        address = int(address_text, 16)
        for offset, start, size in segments:
            if name in CALLS and start <= address < start + size:
                found[name] = address - start + offset
    return found


@contextmanager
def no_child_left() -> Iterator[None]:
    """Whatever the file, its reader is gone; at most its exit status still waits to be asked for."""
    yield
    wait_until(
        lambda: all(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children()), "no child at work"
    )
    assert len(psutil.Process().children()) <= 1, "dead children pile up"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elf")


@pytest.fixture(scope="module")
def library(built: Path) -> Path:
    return build_library(built / "libllama.so")


# Files as compilers make them.


def test_a_library(library: Path) -> None:
    offsets = offsets_of(library)
    assert set(offsets) == set(CALLS)
    assert offsets == offsets_by_binutils(library, "-D")


def test_a_stripped_library(library: Path, built: Path) -> None:
    stripped = built / "stripped.so"
    run("strip", "-o", stripped, library)
    assert offsets_of(stripped) == offsets_of(library)


def test_a_library_whose_code_lies_elsewhere_than_in_memory(built: Path) -> None:
    """Large pages between the segments, packed in the file: an address is then not an offset."""
    library = build_library(built / "packed.so", "-Wl,-z,noseparate-code", "-Wl,-Ttext-segment=0x400000")
    offsets = offsets_of(library)
    assert offsets == offsets_by_binutils(library, "-D")
    addresses = {
        name: int(address, 16) for address, name in re.findall(r"^(\w+) T (\w+)$", run("nm", "-D", library), re.M)
    }
    assert all(addresses[name] - offset == 0x400000 for name, offset in offsets.items())


def test_a_static_program(built: Path) -> None:
    program = build_static(built / "static-program")
    offsets = offsets_of(program)
    assert set(offsets) == set(CALLS)
    assert offsets == offsets_by_binutils(program, "-a")
    # Here the difference shows: the addresses of a program that is not relocatable begin far above 0.
    assert all(offset < program.stat().st_size for offset in offsets.values())


def test_a_stripped_static_program_has_no_names_to_find(built: Path) -> None:
    program = build_static(built / "static-stripped")
    run("strip", program)
    assert offsets_of(program) == {}


def test_a_library_of_an_older_api(built: Path) -> None:
    library = compile_c("int llama_decode(void) { return 7; }", built / "older.so", "-shared", "-fPIC")
    offsets = offsets_of(library)
    assert offsets == offsets_by_binutils(library, "-D")
    assert set(offsets) == {"llama_decode"}


@pytest.mark.parametrize(
    ("what", "source"),
    [
        ("uses", "int llama_decode(void); int other(void) { return llama_decode(); }"),
        ("resembles", "int llama_decode_batch(void) { return 1; } int my_llama_decode(void) { return 2; }"),
        ("has data", "int llama_decode = 7;"),
        ("has none", "int other(void) { return 1; }"),
    ],
)
def test_a_library_that_defines_none_of_them(built: Path, what: str, source: str) -> None:
    assert offsets_of(compile_c(source, built / f"{what}.so", "-shared", "-fPIC")) == {}


def test_a_constant_of_that_name_is_no_function(built: Path) -> None:
    """Constants and code share a segment here."""
    source = "const int llama_decode = 7; int other(void) { return 1; }"
    assert offsets_of(compile_c(source, built / "constant.so", "-shared", "-fPIC", "-Wl,-z,noseparate-code")) == {}


def test_a_program_that_only_calls_them_has_none_also_where_the_symbol_has_an_address(built: Path) -> None:
    """In a program that is not relocatable, the address of a foreign function is that of its jump table entry."""
    library = compile_c("int llama_decode(void) { return 7; }", built / "foreign.so", "-shared", "-fPIC")
    source = """
        int llama_decode(void);
        int main(void) { int (*f)(void) = llama_decode; __asm__ volatile("" : "+r"(f)); return f(); }
    """
    program = compile_c(source, built / "caller", "-no-pie", "-fno-pie", "-xnone", str(library))
    symbols = run("readelf", "-W", "--dyn-syms", program)
    (address,) = re.findall(r"(\w+) +\d+ FUNC .* UND llama_decode", symbols)
    assert int(address, 16) > 0, f"not what is to be tested:\n{symbols}"
    assert offsets_of(program) == {}


def test_a_name_that_is_the_tail_of_another(built: Path) -> None:
    """Linkers store it once: the shorter one points into the longer one."""
    source = "int my_llama_decode(void) { return 1; } int llama_decode(void) { return 2; }"
    library = compile_c(source, built / "tail.so", "-shared", "-fPIC", "-Wl,-O2")
    assert offsets_of(library) == offsets_by_binutils(library, "-D")


def test_two_names_of_one_function(built: Path) -> None:
    source = 'int llama_decode(void) { return 1; } int llama_process(void) __attribute__((alias("llama_decode")));'
    offsets = offsets_of(compile_c(source, built / "alias.so", "-shared", "-fPIC"))
    assert offsets["llama_decode"] == offsets["llama_process"]


def test_a_function_that_is_hidden_in_a_library_with_all_its_symbols(built: Path) -> None:
    source = '__attribute__((visibility("hidden"))) int llama_decode(void) { return 1; }'
    library = compile_c(source, built / "hidden.so", "-shared", "-fPIC")
    offsets = offsets_of(library)
    assert set(offsets) == {"llama_decode"}


def test_where_the_descriptor_stands_does_not_matter(library: Path) -> None:
    with open(library, "rb") as file:
        file.seek(1000)
        assert function_offsets(file.fileno()) == offsets_of(library)


# A reading of several files, in a child.


def test_several_files_are_read_at_once_and_answered_in_order(library: Path, built: Path) -> None:
    other = compile_c("int other;", built / "other.so", "-shared")
    stripped = built / "stripped-too.so"
    run("strip", "-o", stripped, library)
    with no_child_left():
        assert answer_of(reading_of(library, other, stripped)) == [offsets_of(library), {}, offsets_of(library)]


def test_a_file_that_has_gone_or_changed_since_gets_no_answer(library: Path, tmp_path: Path) -> None:
    gone, changed = tmp_path / "gone.so", tmp_path / "changed.so"
    for path in (gone, changed):
        shutil.copy(library, path)
    versions = {Version.of(path.stat()): Place(str(path), str(path)) for path in (gone, changed, library)}
    gone.unlink()
    with changed.open("ab") as file:
        file.write(b"more")
    assert answer_of(Reading(versions)) == [None, None, offsets_of(library)]


def test_a_reading_can_be_given_up(library: Path) -> None:
    with no_child_left(), pytest.raises(ChildError):
        reading_of(library).end()


# Files that are none, or lie. Whoever owns them, the reader says what it has found, or fails alone, and in time.


def read_without_harm(path: Path | str) -> Offsets:
    """Read it in a child, as the daemon does, and return what was found: nothing, where the child has failed."""
    failure = ""
    offsets: Offsets = {}
    with no_child_left():
        try:
            offsets = call_in_child(lambda: offsets_of(Path(path)), READ_SECONDS)
        except ChildError as error:
            failure = str(error)
    assert "too long" not in failure
    assert set(offsets) <= set(CALLS)
    assert all(isinstance(offset, int) for offset in offsets.values())
    return offsets


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x7f",
        b"\x7fELF",
        b"\x7fELF\x02\x01",
        b"\x7fELF\x02\x01" + bytes(200),
        b"\x7fELF\x02\x01" + b"\xff" * 4096,
        b"\x7fELF\x01\x01" + bytes(200),
        b"\x7fELF\x02\x02" + bytes(200),
        b"#!/bin/sh\necho llama_decode\n",
        b"INPUT(libllama.so.0)\n",
        b"llama_decode\0" * 1000,
    ],
)
def test_what_is_no_elf_file_has_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "libllama.so"
    file.write_bytes(content)
    assert read_without_harm(file) == {}


def test_a_32_bit_header_has_nothing(library: Path, tmp_path: Path) -> None:
    file = tmp_path / "libllama.so"
    content = bytearray(library.read_bytes())
    content[4] = 1  # EI_CLASS
    file.write_bytes(content)
    assert offsets_of(file) == {}


@pytest.mark.parametrize("path", ["/", "/dev/zero", "/dev/null", "/proc/self/mem"])
def test_what_is_no_plain_file_has_nothing(path: str) -> None:
    assert read_without_harm(path) == {}


def header_boundaries(content: bytes) -> list[int]:
    """Where the headers, each section header and each section begin."""
    (table,) = struct.unpack_from("<Q", content, SECTION_TABLE_FIELD)
    (count,) = struct.unpack_from("<H", content, SECTION_COUNT_FIELD)
    headers = [table + index * SECTION_HEADER_BYTES for index in range(count + 1)]
    sections = [struct.unpack_from("<Q", content, header + SECTION_OFFSET_FIELD)[0] for header in headers[:-1]]
    programs = [ELF_HEADER_BYTES + index * PROGRAM_HEADER_BYTES for index in range(4)]
    return sorted({0, *programs, *headers, *sections})


def test_a_file_that_ends_at_any_boundary_does_no_harm(library: Path, tmp_path: Path) -> None:
    """As one that is just being written, too."""
    content = library.read_bytes()
    file = tmp_path / "libllama.so"
    for boundary in header_boundaries(content):
        for length in (boundary, boundary + 1, max(boundary - 1, 0)):
            file.write_bytes(content[:length])
            read_without_harm(file)


def test_flipped_bits_do_no_harm(library: Path, tmp_path: Path) -> None:
    content = library.read_bytes()
    interesting = [*range(ELF_HEADER_BYTES + 8 * PROGRAM_HEADER_BYTES), *range(len(content) - 40 * 64, len(content))]
    chance = random.Random(20250)
    file = tmp_path / "libllama.so"
    for _ in range(FLIPPED_FILES):
        flipped = bytearray(content)
        for _ in range(chance.choice([1, 1, 4, 64])):
            flipped[chance.choice(interesting)] ^= 1 << chance.randrange(8)
        file.write_bytes(flipped)
        read_without_harm(file)


@pytest.mark.parametrize("field", [SECTION_OFFSET_FIELD, SECTION_SIZE_FIELD, SECTION_LINK_FIELD, SECTION_ENTRY_FIELD])
@pytest.mark.parametrize("lie", [0, 1, 0xFFFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 1 << 40, (1 << 64) - 1])
def test_sections_that_lie_do_no_harm(library: Path, tmp_path: Path, field: int, lie: int) -> None:
    content = bytearray(library.read_bytes())
    (table,) = struct.unpack_from("<Q", content, SECTION_TABLE_FIELD)
    (count,) = struct.unpack_from("<H", content, SECTION_COUNT_FIELD)
    for index in range(count):
        where = table + index * SECTION_HEADER_BYTES + field
        if field == SECTION_LINK_FIELD:
            struct.pack_into("<I", content, where, lie & 0xFFFF_FFFF)
        else:
            struct.pack_into("<Q", content, where, lie)
    file = tmp_path / "libllama.so"
    file.write_bytes(content)
    read_without_harm(file)


def test_a_file_that_claims_more_sections_than_there_are_does_no_harm(library: Path, tmp_path: Path) -> None:
    content = bytearray(library.read_bytes())
    struct.pack_into("<H", content, SECTION_COUNT_FIELD, 0xFFFF)
    file = tmp_path / "libllama.so"
    file.write_bytes(content)
    read_without_harm(file)


def test_a_file_that_is_cut_while_it_is_read_does_no_harm(library: Path, tmp_path: Path) -> None:
    file = tmp_path / "libllama.so"
    shutil.copy(library, file)
    with open(file, "rb") as opened:
        os.truncate(file, 0)
        assert function_offsets(opened.fileno()) == {}
