"""Run a command for which the kernel refuses some system calls: deny.py CALL[,CALL...] COMMAND...

With a seccomp filter that answers EPERM, as a sandbox or an older kernel's policy does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import subprocess
import sys

NUMBERS = {
    "x86_64": {"fanotify_init": 300, "pidfd_open": 434},
    "aarch64": {"fanotify_init": 262, "pidfd_open": 434},
}

# linux/filter.h, linux/seccomp.h, linux/prctl.h
BPF_LD_W_ABS, BPF_JEQ_K, BPF_RET_K = 0x20, 0x15, 0x06
SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x00050000, 0x7FFF0000
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2


def instruction(code: int, if_true: int, if_false: int, operand: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def filter_of(numbers: list[int]) -> bytes:
    """Load the system call's number; refuse it where it is one of these."""
    tests = b"".join(instruction(BPF_JEQ_K, len(numbers) - index, 0, number) for index, number in enumerate(numbers))
    allow = instruction(BPF_RET_K, 0, 0, SECCOMP_RET_ALLOW)
    refuse = instruction(BPF_RET_K, 0, 0, SECCOMP_RET_ERRNO | errno.EPERM)
    return instruction(BPF_LD_W_ABS, 0, 0, 0) + tests + allow + refuse


def main() -> None:
    numbers = NUMBERS[platform.machine()]
    code = ctypes.create_string_buffer(filter_of([numbers[name] for name in sys.argv[1].split(",")]))
    program = struct.pack("HP", (len(code) - 1) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    # As root no_new_privs is not needed, and the daemon wants its privileges.
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) != 0:
        sys.exit(f"seccomp: {os.strerror(ctypes.get_errno())}")
    sys.exit(subprocess.call(sys.argv[2:]))


if __name__ == "__main__":
    main()
