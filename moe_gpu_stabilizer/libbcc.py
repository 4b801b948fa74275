"""BCC's run-time library, libbcc_bpf. uprobes.py uses it; nothing else knows it.

The bytecode is compiled at development time (tools/compile-probe). At run time only the half of BCC without a
compiler is used: libbcc_bpf.so.0, from Debian's and Ubuntu's package libbpfcc, 0.18 and newer.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

from .errors import ProbeError

LIBRARY = "libbcc_bpf.so.0"
INSTALL_HINT = "install the package libbpfcc: apt-get install libbpfcc"

CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


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
        "bpf_get_next_key": [number, pointer, pointer],
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
