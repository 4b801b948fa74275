"""The machine at hand, in words, and what a run needs of it."""

from __future__ import annotations

import os
import platform
import re
import shutil
from pathlib import Path

from moe_gpu_stabilizer.errors import ProbeError
from moe_gpu_stabilizer.libbcc import load_library


def describe() -> dict[str, str]:
    """Its processor, cores, kernel and distribution: no name that somebody has given it."""
    memory_kib = int(re.findall(r"^MemTotal: +(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)[0])
    return {
        "CPU": processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_kib / (1 << 20):.0f} GiB",
        "kernel": f"{platform.system()} {re.match(r'[0-9.]+', platform.release())[0]} {platform.machine()}",  # type: ignore[index]
        "distribution": platform.freedesktop_os_release().get("PRETTY_NAME", "unknown"),
        "Python": platform.python_version(),
    }


def processor() -> str:
    """The model's name; boards with ARM processors say theirs in the device tree."""
    named = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    if named:
        virtual = " (virtual)" if "hypervisor" in Path("/proc/cpuinfo").read_text() else ""
        return named[1] + virtual
    board = Path("/proc/device-tree/model")
    return board.read_text().rstrip("\0") if board.exists() else platform.machine()


def missing() -> list[str]:
    """What has to be there first, one line for each thing that is not."""
    lines = []
    if os.geteuid() != 0:
        lines.append("root: uprobes and 1,000 processes of its own")
    if shutil.which("bpftrace") is None:
        lines.append("bpftrace, the yardstick: apt-get install bpftrace")
    if shutil.which("cc") is None:
        lines.append("a C compiler: ./install.sh --test installs one")
    try:
        load_library()
    except ProbeError as error:
        lines.append(str(error))
    return lines
