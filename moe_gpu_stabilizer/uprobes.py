"""The BPF program in the kernel: load it, attach it to libraries, hear from it. The only module that knows libbcc_bpf.

The bytecode is compiled at development time (tools/compile-probe). At run time only the half of BCC without a
compiler is used: libbcc_bpf.so.0, from Debian's and Ubuntu's package libbpfcc, 0.18 and newer.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

from . import perf
from .errors import ProbeError

# What tools/compile-probe makes of probe.c.
BYTECODE = Path(__file__).with_name("probe.json")

LIBRARY = "libbcc_bpf.so.0"
INSTALL_HINT = "install the package libbpfcc: apt-get install libbpfcc"

# Constants of linux/bpf.h and of BCC's libbpf.h.
BPF_ANY = 0
VERDICT_IGNORED = 1
VERDICT_COUNTS = 2
KIND_CALL = 1
KIND_EXEC = 2

# The structs of probe.c.
SETTINGS = struct.Struct("=QQQ")
ACTIVITY = struct.Struct("=QQQII")
WAKE = struct.Struct("=QIIII")
TGID = struct.Struct("=I")

# struct bpf_insn, and the source register that marks an ld_imm64 as "this is a map's descriptor".
INSTRUCTION_BYTES = 8
IMMEDIATE_OFFSET = 4

# proc(5): the inode of the initial pid namespace is a constant of the kernel (PROC_PID_INIT_INO).
INITIAL_PID_NAMESPACE_INODE = 0xEFFFFFFC

CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Wake(NamedTuple):
    """One record from the kernel: a process called (KIND_CALL) or became another program (KIND_EXEC)."""

    at_ns: int  # CLOCK_MONOTONIC
    tgid: int
    tid: int
    kind: int
    verdict: int  # 0 where the kernel knows none yet


class Activity(NamedTuple):
    """What the kernel noted of one process."""

    last_call_ns: int  # CLOCK_MONOTONIC
    last_wake_ns: int
    calls: int
    last_tid: int


def load_library() -> ctypes.CDLL:
    """Load BCC's run-time half and declare what is used of it.

    Raises ProbeError where it is missing.
    """
    try:
        bcc = ctypes.CDLL(LIBRARY, use_errno=True)
    except OSError as error:
        raise ProbeError(f"cannot load {LIBRARY} ({error})", INSTALL_HINT) from None
    pointer, number, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    prototypes: dict[str, list[Any]] = {
        "bcc_create_map": [number, text, number, number, number, number],
        # The last argument exists since 0.21; older versions ignore it.
        "bcc_prog_load": [number, text, text, number, text, ctypes.c_uint, number, pointer, ctypes.c_uint, pointer],
        "bpf_attach_raw_tracepoint": [number, text],
        "bpf_update_elem": [number, pointer, pointer, ctypes.c_uint64],
        "bpf_lookup_elem": [number, pointer, pointer],
        "bpf_delete_elem": [number, pointer],
        "bpf_consume_ringbuf": [pointer],
        "bpf_free_ringbuf": [pointer],
        "bpf_new_ringbuf": [number, CALLBACK, pointer],
    }
    try:
        for name, argument_types in prototypes.items():
            getattr(bcc, name).argtypes = argument_types
        bcc.bpf_new_ringbuf.restype = pointer
        bcc.bpf_free_ringbuf.restype = None
    except AttributeError as error:
        raise ProbeError(f"{LIBRARY} is too old ({error})", "BCC 0.18 or newer is needed") from None
    return bcc


def kernel_refusal(what: str, code: int) -> ProbeError:
    """Explain an errno of bpf() or perf_event_open() in one line with its remedy."""
    hints = {
        errno.EPERM: "run as root; in a container it needs CAP_SYS_ADMIN and CAP_BPF, and seccomp must allow bpf() "
        "and perf_event_open(); a kernel in lockdown may refuse as well",
        errno.EACCES: "it needs CAP_SYS_ADMIN beside CAP_BPF and CAP_PERFMON",
        errno.ENOSYS: "this kernel has no bpf(): it needs CONFIG_BPF_SYSCALL=y",
        errno.EINVAL: "Linux 5.8 or newer is needed",
    }
    return ProbeError(f"the kernel refused to {what}: {os.strerror(code)}", hints.get(code, ""))


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

    def __init__(self, wake_interval_ns: int, bytecode: Path = BYTECODE) -> None:
        self._bcc = load_library()
        self._fds: dict[str, int] = {}
        self._ringbuf: int | None = None
        self._records: list[bytes] = []
        # An exception inside a ctypes callback is printed, not raised: it only copies.
        self._callback = CALLBACK(self._copy_record)
        try:
            # Without uprobes nothing will ever be seen: better said now than at the first library.
            perf.uprobe_type()
            self._load(json.loads(bytecode.read_text(encoding="ascii")))
            self.set_wake_interval(wake_interval_ns)
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

    def _copy_record(self, _context: int | None, data: int, size: int) -> int:
        self._records.append(ctypes.string_at(data, size))
        return 0

    def read_wakes(self) -> list[Wake]:
        """Take what the kernel has said since the last call."""
        self._bcc.bpf_consume_ringbuf(self._ringbuf)
        records, self._records = self._records, []
        return [Wake._make(WAKE.unpack_from(record)) for record in records]

    def set_wake_interval(self, wake_interval_ns: int) -> None:
        """A process that counts wakes the daemon at most once in `wake_interval_ns`."""
        self._update("settings", TGID.pack(0), SETTINGS.pack(wake_interval_ns, *pid_namespace()))

    def set_verdict(self, tgid: int, counts: bool) -> None:
        """Tell the kernel what to do with calls of this process."""
        self._update("verdicts", TGID.pack(tgid), TGID.pack(VERDICT_COUNTS if counts else VERDICT_IGNORED))

    def activity(self, tgid: int) -> Activity | None:
        """What the kernel noted of a process; None where it knows nothing of it."""
        value = ctypes.create_string_buffer(ACTIVITY.size)
        if self._bcc.bpf_lookup_elem(self._fds["activity"], TGID.pack(tgid), value) < 0:
            return None
        return Activity(*ACTIVITY.unpack(value.raw)[:4])

    def forget(self, tgid: int) -> None:
        """Drop what is known of a process; its next call makes it unknown again."""
        for name in ("verdicts", "activity"):
            # Fails only where there is nothing to drop.
            self._bcc.bpf_delete_elem(self._fds[name], TGID.pack(tgid))

    def _update(self, name: str, key: bytes, value: bytes) -> None:
        if self._bcc.bpf_update_elem(self._fds[name], key, value, BPF_ANY) < 0:
            raise kernel_refusal(f"write the BPF map {name}", ctypes.get_errno())

    def attach(self, path: str, offset: int) -> Uprobe:
        """Attach to the instruction at `offset` bytes in the file at `path`, in every process."""
        try:
            return Uprobe(perf.attach(self._fds["on_call"], path, offset))
        except OSError as error:
            what = f"attach a uprobe at {offset:#x} in {path}"
            if error.errno == errno.EINVAL:
                raise ProbeError(f"the kernel refused to {what}: no probe can be set there") from None
            raise kernel_refusal(what, error.errno or 0) from None


class Uprobe:
    """One attached probe; close() takes the breakpoint out of every process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        os.close(self._descriptor)
