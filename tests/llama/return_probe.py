"""A return probe, as a tracer would place it. The daemon must never do this; a test shows why."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path

UPROBE_UNIT = Path("/sys/bus/event_source/devices/uprobe")
PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}[platform.machine()]
PERF_FLAG_FD_CLOEXEC = 8
NO_CPU, NO_GROUP = -1, -1


class PerfEventAttributes(ctypes.Structure):
    """struct perf_event_attr of <linux/perf_event.h>, as long as the uprobe unit needs it (PERF_ATTR_SIZE_VER1)."""

    _fields_ = [
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64),
        ("sample_type", ctypes.c_uint64),
        ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("wakeup_events", ctypes.c_uint32),
        ("bp_type", ctypes.c_uint32),
        ("uprobe_path", ctypes.c_char_p),
        ("probe_offset", ctypes.c_uint64),
    ]


@contextlib.contextmanager
def return_probe(pid: int, file: Path, offset: int) -> Iterator[None]:
    """Probe the return of the function at `offset` (bytes) in `file`, in one process only.

    No BPF program is needed: that the event counts is enough to make the kernel rewrite the return address.
    """
    return_bit = int((UPROBE_UNIT / "format/retprobe").read_text().removeprefix("config:"))
    attributes = PerfEventAttributes(
        type=int((UPROBE_UNIT / "type").read_text()),
        size=ctypes.sizeof(PerfEventAttributes),
        config=1 << return_bit,
        uprobe_path=os.fsencode(file),
        probe_offset=offset,
    )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    event = libc.syscall(
        ctypes.c_long(PERF_EVENT_OPEN), ctypes.byref(attributes), ctypes.c_int(pid), ctypes.c_int(NO_CPU),
        ctypes.c_int(NO_GROUP), ctypes.c_ulong(PERF_FLAG_FD_CLOEXEC),
    )  # fmt: skip
    if event < 0:
        raise OSError(ctypes.get_errno(), f"perf_event_open: {os.strerror(ctypes.get_errno())}", str(file))
    try:
        yield
    finally:
        os.close(event)
