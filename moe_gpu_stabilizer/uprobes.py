"""The BPF program in the kernel: load it, attach it to libraries, hear from it."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
from pathlib import Path
from typing import Any

from . import elf, perf
from .errors import ProbeError
from .libbcc import CALLBACK, kernel_refusal, load_library
from .records import (
    ACTIVITY,
    ID,
    SETTINGS,
    THREAD,
    TURNS,
    VERDICT_COUNTS,
    VERDICT_IGNORED,
    WAKE,
    Activity,
    Wake,
    read_activity,
    read_process_turns,
    read_thread_turns,
)
from .settings import Settings
from .turns import ProcessTurns, ThreadTurns

# What tools/compile-probe makes of probe.c.
BYTECODE = Path(__file__).with_name("probe.json")

# linux/bpf.h
BPF_ANY = 0

# probe.c has room for so many processes.
MOST_PROCESSES = 4096

# The kernel's own, for an instruction that it cannot step over; it is in no header of the C library.
ENOTSUPP = 524

# Which program runs at which function.
PROGRAM_OF = {
    **dict.fromkeys(elf.CALLS, "on_call"),
    elf.GRAPH: "on_graph",
    elf.SECTION: "on_section",
}

# One that the ring buffer holds.
RECORD = ctypes.c_char * WAKE.size

# struct bpf_insn, and the source register that marks an ld_imm64 as "this is a map's descriptor".
INSTRUCTION_BYTES = 8
IMMEDIATE_OFFSET = 4

# proc(5): the inode of the initial pid namespace is a constant of the kernel (PROC_PID_INIT_INO).
INITIAL_PID_NAMESPACE_INODE = 0xEFFFFFFC


def pid_namespace() -> tuple[int, int]:
    """Return (device, inode) of this process's pid namespace, (0, 0) for the initial one."""
    namespace = os.stat("/proc/self/ns/pid")
    if namespace.st_ino == INITIAL_PID_NAMESPACE_INODE:
        return 0, 0
    return namespace.st_dev, namespace.st_ino


class Probe:
    """The program and its maps, loaded once for the daemon's life.

    Raises ProbeError where the kernel or the library refuses. Everything in the kernel hangs on this process's file
    descriptors: when the process ends, however it ends, the probes are gone.
    """

    def __init__(self, wake_interval_ns: int, bytecode: Path = BYTECODE, min_turns: int = Settings.min_turns) -> None:
        self._bcc = load_library()
        self._fds: dict[str, int] = {}
        self._ringbuf: int | None = None
        self._wakes: list[Wake] = []
        # An exception inside a ctypes callback is printed, not raised: it only copies.
        self._callback = CALLBACK(self._copy_record)
        try:
            # Without uprobes nothing will ever be seen: better said now than at the first library.
            perf.uprobe_type()
            self._load(json.loads(bytecode.read_text(encoding="ascii")))
            self.configure(wake_interval_ns, min_turns)
        except BaseException:
            self.close()
            raise

    def _load(self, compiled: dict[str, Any]) -> None:
        for name, spec in compiled["maps"].items():
            fd = self._bcc.bcc_create_map(
                spec["map_type"],
                name.encode(),
                spec["key_size"],
                spec["value_size"],
                spec["max_entries"],
                spec["map_flags"],
            )
            if fd < 0:
                raise kernel_refusal(f"create the BPF map {name}", ctypes.get_errno())
            self._fds[name] = fd
        for name, spec in compiled["programs"].items():
            self._fds[name] = self._load_program(name, spec)
        # The raw tracepoint needs no tracefs.
        link = self._bcc.bpf_attach_raw_tracepoint(self._fds["on_exec"], b"sched_process_exec")
        if link < 0:
            raise kernel_refusal("attach to sched_process_exec", ctypes.get_errno())
        self._fds["exec link"] = link
        self._ringbuf = self._bcc.bpf_new_ringbuf(self._fds["wakes"], self._callback, None)
        if not self._ringbuf:
            raise kernel_refusal("map the BPF ring buffer", ctypes.get_errno())

    def _load_program(self, name: str, spec: dict[str, Any]) -> int:
        code = bytearray.fromhex(spec["code"])
        for index, map_name in spec["maps"].items():
            struct.pack_into("=i", code, int(index) * INSTRUCTION_BYTES + IMMEDIATE_OFFSET, self._fds[map_name])
        fd: int = self._bcc.bcc_prog_load(
            spec["program_type"], name.encode(), bytes(code), len(code), b"GPL", 0, 0, None, 0, None
        )
        if fd < 0:
            raise kernel_refusal(f"load the BPF program {name}", ctypes.get_errno())
        return fd

    def close(self) -> None:
        """Take everything out of the kernel. Uprobes are their holders' to close, before this."""
        if self._ringbuf:
            self._bcc.bpf_free_ringbuf(self._ringbuf)
            self._ringbuf = None
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def fileno(self) -> int:
        """What epoll waits on: readable when there are records."""
        return self._fds["wakes"]

    def _copy_record(self, _context: int | None, data: int, _size: int) -> int:
        # Not string_at(), which is a foreign call of its own: the floor waits for this.
        self._wakes.append(Wake._make(WAKE.unpack_from(RECORD.from_address(data))))
        return 0

    def read_wakes(self) -> list[Wake]:
        """Take what the kernel has said since the last call."""
        self._bcc.bpf_consume_ringbuf(self._ringbuf)
        wakes, self._wakes = self._wakes, []
        return wakes

    def configure(self, wake_interval_ns: int, min_turns: int = Settings.min_turns) -> None:
        """A process that counts wakes the daemon at most once in `wake_interval_ns`.

        `min_turns` is from how many turns on a graph is a turning one.
        """
        self._update("settings", ID.pack(0), SETTINGS.pack(wake_interval_ns, *pid_namespace(), min_turns))

    def set_verdict(self, tgid: int, counts: bool) -> None:
        """Tell the kernel what to do with calls of this process."""
        self._update("verdicts", ID.pack(tgid), ID.pack(VERDICT_COUNTS if counts else VERDICT_IGNORED))

    def active(self) -> list[int]:
        """The processes of which the kernel has noted something."""
        found: dict[int, None] = {}
        key, following = None, ctypes.create_string_buffer(ID.size)
        # An entry that goes while it is asked for what follows it makes the kernel begin anew.
        for _ in range(2 * MOST_PROCESSES):
            if self._bcc.bpf_get_next_key(self._fds["activity"], key, following) < 0:
                break
            key = following.raw
            found[ID.unpack(key)[0]] = None
        return list(found)

    def activity(self, tgid: int) -> Activity | None:
        """What the kernel noted of a process; None where it knows nothing of it."""
        value = self._look_up("activity", tgid, ACTIVITY.size)
        return None if value is None else read_activity(value)

    def turns(self, tgid: int) -> ProcessTurns | None:
        """How CPU and GPU take turns in a process; None where no graph of it has been seen."""
        value = self._look_up("behaviour", tgid, TURNS.size)
        return None if value is None else read_process_turns(value)

    def thread_turns(self, tid: int) -> ThreadTurns | None:
        """How far a thread is with its graph; None where no graph of it has been seen."""
        value = self._look_up("threads", tid, THREAD.size)
        return None if value is None else read_thread_turns(value)

    def forget(self, tgid: int) -> None:
        """Drop what is known of a process; its next call makes it unknown again."""
        for name in ("verdicts", "activity", "threads"):
            self._delete(name, tgid)
        self.forget_turns(tgid)

    def forget_verdict(self, tgid: int) -> None:
        """Make a process unknown without losing what was counted: its next call wakes us."""
        self._delete("verdicts", tgid)

    def forget_turns(self, tgid: int) -> None:
        """Drop how CPU and GPU take turns in a process: its next graphs tell anew."""
        self._delete("behaviour", tgid)

    def _look_up(self, name: str, key: int, value_bytes: int) -> bytes | None:
        value = ctypes.create_string_buffer(value_bytes)
        if self._bcc.bpf_lookup_elem(self._fds[name], ID.pack(key), value) < 0:
            return None
        return value.raw

    def _delete(self, name: str, key: int) -> None:
        # Fails only where there is nothing to drop.
        self._bcc.bpf_delete_elem(self._fds[name], ID.pack(key))

    def _update(self, name: str, key: bytes, value: bytes) -> None:
        if self._bcc.bpf_update_elem(self._fds[name], key, value, BPF_ANY) < 0:
            raise kernel_refusal(f"write the BPF map {name}", ctypes.get_errno())

    def attach(self, path: str, offset: int, function: str = elf.CALLS[0]) -> Uprobe:
        """Attach to one of elf.PROBED_FUNCTIONS, at `offset` bytes in the file at `path`, in every process."""
        try:
            return Uprobe(perf.attach(self._fds[PROGRAM_OF[function]], path, offset))
        except OSError as error:
            what = f"attach a uprobe at {offset:#x}"
            if error.errno in (errno.EINVAL, ENOTSUPP):
                raise ProbeError(f"the kernel refused to {what}: no probe can be set there") from None
            raise kernel_refusal(what, error.errno or 0) from None


class Uprobe:
    """One attached probe; close() takes the breakpoint out of every process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        os.close(self._descriptor)
