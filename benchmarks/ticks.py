"""What one rebind tick costs with many processes and many libraries when nothing has changed.

The real rebinder looks at real processes and files, and an hour of ticks passes in seconds: its clock is ours. What it
attaches is not real, because the cost of a tick does not depend on that, and letting go of it would take minutes.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from moe_gpu_stabilizer import rebind
from moe_gpu_stabilizer.journal import Troubles
from moe_gpu_stabilizer.settings import Settings

from .effort import Effort
from .place import Place
from .results import Curve, Figure, Row

GROUP = "One rebind tick when nothing has changed"
TICK_NS = 5_000_000_000
NS_PER_MS = 1e6

# A process is asked again how large it is after 1, 2, 4 ... seconds, and at last every half minute.
SETTLED_TICKS = 24
PROCESSES, LIBRARIES = 1_000, 50
MOST_MS = 20.0

# The second half of a line is as steep as the first, that of a square three times as steep.
AS_A_LINE = 2.0

# Forks of a Python that has a library mapped: about as many mappings as an ordinary program has.
CROWD = """
import mmap, os, signal, sys
libraries = sys.argv[2:]
for index in range(int(sys.argv[1])):
    if os.fork() == 0:
        if libraries:
            with open(libraries[index % len(libraries)], "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
        signal.pause()
print("there", flush=True)
signal.pause()
"""


class Nothing:
    """A probe that is none."""

    def close(self) -> None: ...


class Attacher:
    """Attaches nothing."""

    def attach(self, path: str, offset: int, function: str) -> Nothing:
        return Nothing()


def measure(place: Place, effort: Effort) -> tuple[list[Row], list[Curve]]:
    most = min(PROCESSES, max(effort.processes))
    few, many = min(LIBRARIES, max(effort.libraries)), [copies(place, count) for count in effort.libraries]
    by_processes = {}
    for count in effort.processes:
        with crowd(count, copies(place, few)):
            by_processes[count] = ticks_ms(copies(place, few), effort.ticks)
    by_libraries = {}
    with crowd(max(effort.libraries), many[-1]):
        for paths in many:
            by_libraries[len(paths)] = ticks_ms(paths, effort.ticks)
    taken = by_processes[most]
    name = f"{most} processes, {few} libraries"
    rows = [
        Row(GROUP, name, "ms of CPU", Figure.of(taken), None, MOST_MS, "under 20 ms"),
        Row(GROUP, f"{name}, the worst of {len(taken)} ticks", "ms of CPU", Figure.of([max(taken)])),
    ]
    curves = [
        Curve(
            "one rebind tick", f"other processes on the machine, with {few} libraries", "ms of CPU", means(by_processes)
        ),
        Curve(
            "one rebind tick", f"libraries, with {max(effort.libraries)} processes", "ms of CPU", means(by_libraries)
        ),
    ]
    rows += [growth_row("processes", curves[0]), growth_row("libraries", curves[1])]
    return rows, curves


def means(taken: dict[int, list[float]]) -> dict[int, float]:
    return {count: sum(ticks) / len(ticks) for count, ticks in taken.items()}


def growth_row(what: str, curve: Curve) -> Row:
    """The cost of one more in the second half of the curve, compared with the first half: 1 where it is a line."""
    counts = list(curve.points)
    first, middle, last = counts[0], counts[len(counts) // 2] if len(counts) > 2 else counts[0], counts[-1]
    if middle == first:
        middle, ratio = last, 1.0
    else:
        slope = (curve.points[middle] - curve.points[first]) / (middle - first)
        ratio = (curve.points[last] - curve.points[middle]) / (last - middle) / max(slope, 1e-6)
    name = f"one tick, for each one more: from {middle} to {last} {what}, compared with {first} to {middle}"
    return Row("Growth", name, "times", Figure.of([ratio]), None, AS_A_LINE, "no faster than linear: at most 2")


def copies(place: Place, count: int) -> list[Path]:
    """That many library files of different inodes, made where they are not there yet."""
    directory = place.directory / "copies"
    directory.mkdir(exist_ok=True)
    paths = [directory / str(index) / "libllama-probed.so" for index in range(count)]
    for path in paths:
        if not path.exists():
            path.parent.mkdir()
            shutil.copy(place.library, path)
    return paths


@contextmanager
def crowd(count: int, libraries: list[Path]) -> Iterator[None]:
    """That many processes, each with one of the libraries."""
    parent = subprocess.Popen(
        [sys.executable, "-c", CROWD, str(count), *map(str, libraries)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"there\n"
        yield
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()


def ticks_ms(libraries: list[Path], ticks: int) -> list[float]:
    """CPU time, of all threads, of each of that many ticks once all libraries are known."""
    settings = Settings(libraries=tuple(map(str, libraries)))
    now_ns = time.monotonic_ns()
    clock = SimpleNamespace(monotonic_ns=lambda: now_ns, monotonic=lambda: now_ns / 1e9)
    with selectors.DefaultSelector() as selector:
        rebinder = rebind.Rebinder(Attacher(), settings, Troubles(), selector, changed=lambda: None)
        try:
            rebinder.rebind_and_wait()
            while rebinder.deadline_ns is not None:
                for key, _ in selector.select(0.1):
                    key.data()
            taken = []
            with mock.patch.object(rebind, "time", clock):
                for tick in range(SETTLED_TICKS + ticks):
                    now_ns += TICK_NS
                    before_ns = time.process_time_ns()
                    rebinder.rebind()
                    if tick >= SETTLED_TICKS:
                        taken.append((time.process_time_ns() - before_ns) / NS_PER_MS)
                    while rebinder.deadline_ns is not None and selector.select(0):
                        for key, _ in selector.select(0):
                            key.data()
            return taken
        finally:
            rebinder.close()
