"""Attach a BPF program to the entry of a function: a uprobe through perf_event_open(2).

BCC's own bpf_attach_uprobe() is not used. Where the kernel refuses, it falls back to tracefs, complains on standard
error about that, and leaves an event behind for the whole system in uprobe_events; its errno is the fallback's.

Only ever entry probes: the bit that would ask for a return probe is nowhere in this program. A return probe rewrites
the return address on the traced stack, and a C++ exception that crosses that frame then ends the program. llama-server
survives an exception in llama_process, and would not.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct
from pathlib import Path

from .errors import ProbeError

# The kernel's number for its uprobe unit; absent where the kernel was built without uprobes.
TYPE_FILE = Path("/sys/bus/event_source/devices/uprobe/type")

SYSCALL_NUMBERS = {"x86_64": 298, "aarch64": 241, "riscv64": 241}

# struct perf_event_attr up to PERF_ATTR_SIZE_VER5: type, size, config, sample_period, sample_type, read_format, flags,
# wakeup_events, bp_type, uprobe_path, probe_offset, and nothing more.
ATTRIBUTES = struct.Struct("=IIQQQQQIIQQ40x")
EVERY_PROCESS, ANY_CPU_WILL_DO, NO_GROUP, CLOSE_ON_EXEC = -1, 0, -1, 8
SET_BPF, ENABLE = 0x40042408, 0x2400


def attach(program_fd: int, path: str, offset: int) -> int:
    """Run the BPF program whenever any process executes the instruction at `offset` bytes in the file at `path`.

    Returns a descriptor; closing it takes the probe away. Raises OSError where the kernel refuses: EINVAL for a place
    that cannot hold a probe, ENOENT or EACCES for the file, EPERM for want of CAP_SYS_ADMIN. Raises ProbeError where
    there are no uprobes.
    """
    name = ctypes.create_string_buffer(os.fsencode(path))
    attributes = ctypes.create_string_buffer(
        ATTRIBUTES.pack(uprobe_type(), ATTRIBUTES.size, 0, 1, 0, 0, 0, 1, 0, ctypes.addressof(name), offset)
    )
    descriptor = open_event(attributes)
    try:
        fcntl.ioctl(descriptor, SET_BPF, program_fd)
        fcntl.ioctl(descriptor, ENABLE, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def uprobe_type() -> int:
    """The type number of uprobes. Raises ProbeError where this kernel has none."""
    try:
        return int(TYPE_FILE.read_text())
    except FileNotFoundError:
        raise ProbeError("this kernel has no uprobes", "it needs CONFIG_UPROBE_EVENTS=y") from None
    except OSError as error:
        raise ProbeError(f"cannot read {TYPE_FILE}: {error.strerror}") from None


def open_event(attributes: ctypes.Array[ctypes.c_char]) -> int:
    """perf_event_open(2), for which libc has no function. Raises OSError, and ProbeError on an unknown architecture."""
    machine = platform.machine()
    if machine not in SYSCALL_NUMBERS:
        raise ProbeError(
            f"on {machine} this program does not know how to attach", "it knows " + ", ".join(SYSCALL_NUMBERS)
        )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    descriptor: int = libc.syscall(
        ctypes.c_long(SYSCALL_NUMBERS[machine]), ctypes.byref(attributes), ctypes.c_long(EVERY_PROCESS),
        ctypes.c_long(ANY_CPU_WILL_DO), ctypes.c_long(NO_GROUP), ctypes.c_ulong(CLOSE_ON_EXEC),
    )  # fmt: skip
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor
