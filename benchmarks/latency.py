"""From the first call after idleness to min_freq written, on an idle machine and with every core busy."""

from __future__ import annotations

import ctypes
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from tests.support import HIGHEST_HZ, LOWEST_HZ, PlainNode, wait_until
from tests.workload import Workload

from .effort import Effort
from .place import Place, Watcher
from .results import Figure, Row

GROUP = "From the first call after idleness to min_freq written"
IN_MODIFY = 0x2
IDLE_SECONDS = 0.1

# After its first calls a process is judged and known, and its libraries have been looked for.
CALLS_UNTIL_KNOWN = 4
LONGEST_SECONDS = 15
PRIORITY = 50
STRANGER = "the first call that a process ever makes"
NS_PER_MS = 1e6


def measure(place: Place, effort: Effort) -> list[Row]:
    samples: dict[tuple[str, str], list[float]] = {}
    loads: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "machine idle": nullcontext,
        "every core busy": every_core_busy,
    }
    for round_number in range(effort.latency_rounds):
        least = [] if round_number else [("least", place.watched_by_least())]  # it is not what the budget is about
        for name, watcher in (*watchers(place), *least):
            with watcher as watched, place.workload(counts=True) as caller:
                for _ in range(CALLS_UNTIL_KNOWN):
                    first_call_ms(watched, caller)
                for load, begin in loads.items():
                    with begin(), first_in_line():
                        taken = [first_call_ms(watched, caller) for _ in range(effort.latency_samples)]
                    samples.setdefault((load, name), []).extend(taken)
                taken = [first_call_of_stranger_ms(place, watched) for _ in range(effort.strangers)]
                samples.setdefault((STRANGER, name), []).extend(taken)
    rows = []
    for load in loads:
        ours, yardstick = samples[load, "ours"], samples[load, "yardstick"]
        rows += [
            compare(f"median, {load}", Figure.of(ours), Figure.of(yardstick)),
            compare(f"99th percentile, {load}", of_percentile(ours), of_percentile(yardstick)),
            Row(GROUP, f"median, {load}, a C program that only writes", "ms", Figure.of(samples[load, "least"])),
        ]
    strange, strange_to_yardstick = (Figure.of(samples[STRANGER, name]) for name in ("ours", "yardstick"))
    return [*rows, Row(GROUP, f"median, machine idle, {STRANGER}", "ms", strange, strange_to_yardstick)]


def watchers(place: Place) -> Iterator[tuple[str, AbstractContextManager[Watcher]]]:
    yield "ours", place.watched_by_daemon()
    yield "yardstick", place.watched_by_yardstick()


def compare(what: str, ours: Figure, yardstick: Figure) -> Row:
    return Row(GROUP, what, "ms", ours, yardstick, yardstick.median, "no slower than the yardstick")


def of_percentile(samples: list[float]) -> Figure:
    """The value that 99 of 100 samples do not exceed."""
    value = sorted(samples)[math.ceil(0.99 * len(samples)) - 1]
    return Figure(value, value, max(samples), len(samples))


def first_call_ms(watched: Watcher, caller: Workload) -> float:
    """One call when the floor has been down for a moment."""
    wait_until(lambda: reads(watched.node, LOWEST_HZ), "the floor down")
    time.sleep(IDLE_SECONDS)
    with Observer(watched.node) as observer:
        caller.begin("stamp")
        seen_ns = observer.wait_until_raised()
    return (seen_ns - int(caller.finish())) / NS_PER_MS


def first_call_of_stranger_ms(place: Place, watched: Watcher) -> float:
    """The very first call of a process: who it is must be found out, too."""
    with place.workload(counts=True) as caller, first_in_line():
        return first_call_ms(watched, caller)


def reads(node: PlainNode, frequency_hz: int) -> bool:
    """Asked once: whoever is first in line must not wait for a writer that has to have its core."""
    return (node.directory / "min_freq").read_text().strip() == str(frequency_hz)


class Observer:
    """Sees a write to min_freq when it happens. The node is a file, so inotify tells of it; of sysfs it would not."""

    def __init__(self, node: PlainNode) -> None:
        self._node = node
        libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        watched = libc.inotify_add_watch(self._inotify, os.fsencode(node.directory / "min_freq"), IN_MODIFY)
        assert watched >= 0, os.strerror(ctypes.get_errno())

    def wait_until_raised(self) -> int:
        """When it was seen, in ns of CLOCK_MONOTONIC."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while select.select([self._inotify], [], [], max(0.0, deadline - time.monotonic()))[0]:
            seen_ns = time.monotonic_ns()
            os.read(self._inotify, 4096)
            if reads(self._node, HIGHEST_HZ):  # some empty it first, then write
                return seen_ns
        raise AssertionError(f"not raised within {LONGEST_SECONDS} s")

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._inotify)


@contextmanager
def first_in_line() -> Iterator[None]:
    """Whoever measures must not wait for a core itself."""
    os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(PRIORITY))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@contextmanager
def every_core_busy() -> Iterator[None]:
    """As many programs that only compute as there are cores."""
    with ExitStack() as stack:
        for _ in os.sched_getaffinity(0):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        yield
