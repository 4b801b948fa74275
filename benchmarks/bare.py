"""What a probe costs at the least: one that does nothing, and one that asks who calls and looks that up in a map."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from moe_gpu_stabilizer import perf
from moe_gpu_stabilizer.elf import function_offsets
from moe_gpu_stabilizer.libbcc import load_library

KPROBE, LRU_HASH = 2, 9


def instruction(opcode: int, registers: int = 0, offset: int = 0, immediate: int = 0) -> bytes:
    """One struct bpf_insn; `registers`: the destination in the low half of the byte, the source in the high one."""
    return struct.pack("<BBhi", opcode, registers, offset, immediate)


# return 0
NOTHING = instruction(0xB7) + instruction(0x95)


def look_up(map_fd: int) -> bytes:
    """key = bpf_get_current_pid_tgid(); bpf_map_lookup_elem(map, &key); return 0"""
    return b"".join(
        [
            instruction(0x85, immediate=14),  # call bpf_get_current_pid_tgid
            instruction(0x63, 0x0A, -4),  # *(u32 *)(r10 - 4) = r0
            instruction(0x18, 0x11, immediate=map_fd),  # r1 = map
            instruction(0x00),
            instruction(0xBF, 0xA2),  # r2 = r10
            instruction(0x07, 0x02, immediate=-4),  # r2 += -4
            instruction(0x85, immediate=1),  # call bpf_map_lookup_elem
            NOTHING,
        ]
    )


@contextmanager
def bare_probe(libraries: Sequence[Path]) -> Iterator[None]:
    """Entry probes that do nothing on all that we probe in these libraries."""
    with attached(NOTHING, libraries):
        yield


@contextmanager
def look_up_probe(libraries: Sequence[Path], tid: int) -> Iterator[None]:
    """Entry probes that do nothing but find the calling thread in a map, as thread `tid` is."""
    bcc = load_library()
    map_fd = bcc.bcc_create_map(LRU_HASH, b"known", 4, 4, 4096, 0)
    assert map_fd >= 0, "the kernel refused a map"
    try:
        bcc.bpf_update_elem(map_fd, struct.pack("<I", tid), struct.pack("<I", 1), 0)
        with attached(look_up(map_fd), libraries):
            yield
    finally:
        os.close(map_fd)


@contextmanager
def attached(code: bytes, libraries: Sequence[Path]) -> Iterator[None]:
    program = load_library().bcc_prog_load(KPROBE, b"bare", code, len(code), b"GPL", 0, 0, None, 0, None)
    assert program >= 0, "the kernel refused the program"
    with ExitStack() as stack:
        stack.callback(os.close, program)
        for library in libraries:
            for offset in offsets_of(library).values():
                stack.callback(os.close, perf.attach(program, str(library), offset))
        yield


def offsets_of(library: Path) -> dict[str, int]:
    """Where the functions that we probe lie in a library."""
    with library.open("rb") as file:
        return function_offsets(file.fileno())
