"""What it costs to see CPU and GPU take turns, as ratios within one run, because machines differ.

    .venv/bin/python -m benchmarks.sections        (as root; a minute)

1. What is added to one CPU section: by the program's probe, in a process that is ignored and in one that counts,
   compared with a bare entry probe, whose program does nothing at all. The trap is the kernel's; the rest is ours.
2. What a process costs the daemon that computes 3,000 graphs a second on the CPU alone, compared with none.
"""

from __future__ import annotations

import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from moe_gpu_stabilizer import perf
from moe_gpu_stabilizer.elf import GRAPH, SECTION, function_offsets
from moe_gpu_stabilizer.libbcc import load_library
from moe_gpu_stabilizer.uprobes import Probe
from tests.support import PlainNode, RunningDaemon, wait_until
from tests.workload import Workload, build_ggml, build_library, build_program

SECTIONS, ROUNDS = 50_000, 7
GRAPHS_PER_SECOND, BURSTS_PER_SECOND, SECONDS = 3_000, 100, 10
HOUR_NS = 3_600_000_000_000
KPROBE = 2

# Two instructions of BPF: return 0.
NOTHING = struct.pack("=BBhi", 0xB7, 0, 0, 0) + struct.pack("=BBhi", 0x95, 0, 0, 0)


def main() -> int:
    if os.geteuid() != 0:
        print("this attaches uprobes: run it as root", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="moe-gpu-stabilizer-benchmark.") as name:
        measure_sections(Path(name))
        measure_daemon(Path(name))
    return 0


def measure_sections(directory: Path) -> None:
    # Names that no daemon looks for.
    libraries = build_ggml(directory / "probed", ".probed")
    program = build_program(directory / "probed" / "program", *libraries)
    with Workload(program) as workload:
        variants: dict[str, Callable[[], AbstractContextManager[None]]] = {
            "unprobed": nullcontext,
            "bare entry probe": lambda: bare_probe(libraries),
            "ignored process": lambda: our_probe(libraries, workload, counts=False),
            "process that counts": lambda: our_probe(libraries, workload, counts=True),
        }
        samples_ns: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(ROUNDS):
            for name, attached in variants.items():
                with attached():
                    samples_ns[name].append(time_of_a_section_ns(workload))
    medians_ns = {name: statistics.median(samples) for name, samples in samples_ns.items()}
    added_ns = {name: median - medians_ns["unprobed"] for name, median in medians_ns.items()}
    print(f"one CPU section, median of {ROUNDS} times {SECTIONS}:")
    for name, median_ns in medians_ns.items():
        ratio = "" if name == "unprobed" else f"{added_ns[name] / added_ns['bare entry probe']:9.2f} of a bare probe"
        print(f"  {name:<20} {median_ns:9.0f} ns {added_ns[name]:+9.0f} ns {ratio}")


def time_of_a_section_ns(workload: Workload) -> float:
    began_ns = time.monotonic_ns()
    workload.do(f"graphs 1 {SECTIONS}")
    return (time.monotonic_ns() - began_ns) / SECTIONS


@contextmanager
def bare_probe(libraries: tuple[Path, ...]) -> Iterator[None]:
    program = load_library().bcc_prog_load(KPROBE, b"nothing", NOTHING, len(NOTHING), b"GPL", 0, 0, None, 0, None)
    assert program >= 0, "the kernel refused two instructions"
    with ExitStack() as stack:
        stack.callback(os.close, program)
        for library in libraries:
            for offset in offsets_of(library).values():
                stack.callback(os.close, perf.attach(program, str(library), offset))
        yield


@contextmanager
def our_probe(libraries: tuple[Path, ...], workload: Workload, counts: bool) -> Iterator[None]:
    with ExitStack() as stack:
        probe = Probe(HOUR_NS)
        stack.callback(probe.close)
        probe.set_verdict(workload.pid, counts)
        for library in libraries:
            for function, offset in offsets_of(library).items():
                assert function in (GRAPH, SECTION)
                stack.callback(probe.attach(str(library), offset, function).close)
        yield


def offsets_of(library: Path) -> dict[str, int]:
    with library.open("rb") as file:
        return function_offsets(file.fileno())


def measure_daemon(directory: Path) -> None:
    here = directory / "watched"
    libraries = (build_library(here / "libllama.so"), *build_ggml(here))
    program = build_program(here / "program", *libraries)
    node = PlainNode(directory / "17000000.gpu")
    print(f"\nthe daemon, in {SECONDS} s:")
    with ExitStack() as stack:
        daemon = stack.enter_context(RunningDaemon(directory / "daemon", node.directory, libraries=f"{here}/*.so"))
        workload = stack.enter_context(Workload(program))
        workload.do("tokens 1 1")
        wait_until(lambda: f"pid {workload.pid} " in daemon.log, "the process judged")
        daemon.wait_until_quiet()
        show("no inference", daemon, lambda: time.sleep(SECONDS))
        show(f"{GRAPHS_PER_SECOND} graphs/s", daemon, lambda: compute(workload))


def compute(workload: Workload) -> None:
    began = time.monotonic()
    for burst in range(SECONDS * BURSTS_PER_SECOND):
        workload.do(f"tokens {GRAPHS_PER_SECOND // BURSTS_PER_SECOND} 1")
        time.sleep(max(0.0, began + (burst + 1) / BURSTS_PER_SECOND - time.monotonic()))


def show(what: str, daemon: RunningDaemon, during: Callable[[], None]) -> None:
    """The daemon wakes for its ticks, two in ten seconds, and for other llama.cpp on this machine."""
    cpu_ns, woken, began = cpu_time_ns(daemon.pid), daemon.times_woken, time.monotonic()
    during()
    used_ns, seconds = cpu_time_ns(daemon.pid) - cpu_ns, time.monotonic() - began
    print(f"  {what:<20} {used_ns / seconds / 1e7:9.3f} % of a core, {daemon.times_woken - woken} wake-ups")


def cpu_time_ns(pid: int) -> int:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


if __name__ == "__main__":
    sys.exit(main())
