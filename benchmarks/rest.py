"""What the daemon takes by being there: memory, CPU and wake-ups, and its start."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support import LOWEST_HZ, REPOSITORY, PlainNode, wait_until
from tests.workload import Workload

from .effort import Effort
from .latency import watchers
from .place import ENDS_SECONDS, HOLD_SECONDS, Place, Watcher
from .results import Figure, Row

MEMORY, CPU, START = "Memory", "CPU and wake-ups", "Start"
KIB_PER_MB = 1e6 / 1024
CALLS_PER_SECOND, BURSTS_PER_SECOND = 3_000, 100
CALLS_PER_TOKEN = 3  # llama_process, one graph, one section
TICK_SECONDS = 5
NS_PER_PERCENT = 1e7
MOST_GROWTH_MB = 0.25
OTHERS_SHARE = 1.5


def measure_rest(place: Place, effort: Effort) -> list[Row]:
    """CPU and wake-ups, and memory, with nobody there who counts: idle, then with 3,000 calls a second."""
    used: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(effort.rest_rounds):
        for name, watcher in watchers(place):
            with watcher as watched, place.workload(counts=False) as dense:
                dense.do("tokens 1 1")
                # It is judged, and the daemon's first minute, in which it looks at each process more often, is over.
                time.sleep(2 * HOLD_SECONDS + (effort.settle_seconds if name == "ours" else 0))
                for what, during in {
                    "nothing infers": time.sleep,
                    f"{CALLS_PER_SECOND} calls/s of a process that does not match": lambda s: decode(dense, s),
                }.items():
                    percent, per_second = while_watched(watched, during, effort.rest_seconds)
                    used.setdefault((what, "%", name), []).append(percent)
                    used.setdefault((what, "wake-ups/s", name), []).append(per_second)
                for kind in ("Pss", "Private", "Rss"):
                    used.setdefault((kind, "MB", name), []).append(watched.memory_kib(kind) / KIB_PER_MB)
    limits = {
        "%": (0.1, "under 0.1 % of a core"),
        "wake-ups/s": (OTHERS_SHARE / TICK_SECONDS, "the rebind tick, one in 5 s"),
    }
    rows = []
    for what, unit in dict.fromkeys((what, unit) for what, unit, _ in used if unit != "MB"):
        ours, yardstick = Figure.of(used[what, unit, "ours"]), Figure.of(used[what, unit, "yardstick"])
        names = {"%": "% of a core", "wake-ups/s": "wake-ups per second"}
        rows.append(Row(CPU, what, names[unit], ours, yardstick, *limits[unit]))
    budgets = {"Pss": (20.0, "20 MB"), "Private": (None, ""), "Rss": (None, "")}
    names = {"Pss": "proportional set size", "Private": "private", "Rss": "resident, what is shared included"}
    memory = [
        Row(
            MEMORY,
            names[kind],
            "MB",
            Figure.of(used[kind, "MB", "ours"]),
            Figure.of(used[kind, "MB", "yardstick"]),
            *budget,
        )
        for kind, budget in budgets.items()
    ]
    return memory + rows


def while_watched(watched: Watcher, during: Callable[[float], object], seconds: float) -> tuple[float, float]:
    """Percent of a core and wake-ups per second of whoever watches."""
    cpu_ns, woken, began = watched.cpu_ns, watched.times_woken, time.monotonic()
    during(seconds)
    passed = time.monotonic() - began
    return (watched.cpu_ns - cpu_ns) / passed / NS_PER_PERCENT, (watched.times_woken - woken) / passed


def decode(dense: Workload, seconds: float) -> None:
    """A model on the GPU alone: one graph with one section in each llama_process."""
    began = time.monotonic()
    tokens = CALLS_PER_SECOND // CALLS_PER_TOKEN // BURSTS_PER_SECOND
    for burst in range(round(seconds * BURSTS_PER_SECOND)):
        dense.do(f"tokens {tokens} 1")
        time.sleep(max(0.0, began + (burst + 1) / BURSTS_PER_SECOND - time.monotonic()))


def measure_growth(place: Place, effort: Effort) -> list[Row]:
    """An hour of use in a minute: stretches of inference, processes that come and go, libraries that are replaced.

    The first batch fills what is kept on purpose, as the allocator's pools; after it, nothing may grow.
    """
    private_mb = []
    copy = place.directory / "replaced" / "libllama.so"
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(place.library, copy)
    with place.watched_by_daemon(rebind_seconds=0.5, libraries=f"{place.library}:{copy}") as watched:
        for _ in range(effort.growth_batches):
            for _ in range(effort.stretches):
                use(place, watched, copy)
            time.sleep(2)  # what is let go of leaves in a thread of its own
            private_mb.append(watched.memory_kib("Private") / KIB_PER_MB)
    grown = Figure.of([private_mb[-1] - private_mb[0]])
    used = f"{(effort.growth_batches - 1) * effort.stretches}"
    what = (
        f"private memory, grown over {used} stretches of inference, ten times as many processes, {used} new libraries"
    )
    return [Row(MEMORY, what, "MB", grown, None, MOST_GROWTH_MB, "nothing, within 0.25 MB")]


def use(place: Place, watched: Watcher, copy: Path) -> None:
    """One stretch with ten processes of which every other counts, and a library that is replaced meanwhile."""
    for index in range(10):
        with place.workload(counts=index % 2 == 0) as caller:
            caller.do("tokens 100 5")
    fresh = copy.with_suffix(".new")
    shutil.copy(place.library, fresh)
    fresh.rename(copy)
    wait_until(lambda: watched.node.min_hz == LOWEST_HZ, "the floor down")


def measure_start(place: Place, effort: Effort) -> list[Row]:
    """From the command to READY=1, as systemd sees it; of the yardstick, to the first call that it has seen."""
    ours = [seconds_to_ready(place) for _ in range(effort.starts)]
    yardstick = []
    for _ in range(effort.rest_rounds):
        with place.watched_by_yardstick() as watched:
            yardstick.append(watched.took_seconds)
    return [
        Row(
            START,
            "to READY=1 (yardstick: to the first call it sees)",
            "s",
            Figure.of(ours),
            Figure.of(yardstick),
            0.5,
            "under 0.5 s",
        )
    ]


def seconds_to_ready(place: Place) -> float:
    directory = place.new_directory()
    node = PlainNode(directory / "17000000.gpu")
    config = directory / "conf"
    config.write_text(f"STABILIZER_DEVFREQ={node.directory}\nSTABILIZER_LIBRARIES={place.library}\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(directory / "notify"))
        manager.settimeout(ENDS_SECONDS)
        environment = {
            **os.environ,
            "RUNTIME_DIRECTORY": str(directory / "run"),
            "NOTIFY_SOCKET": str(directory / "notify"),
        }
        began = time.monotonic()
        daemon = subprocess.Popen(
            [sys.executable, "-m", "moe_gpu_stabilizer", "--config", str(config)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=environment, cwd=REPOSITORY,
        )  # fmt: skip
        try:
            while b"READY=1" not in manager.recv(4096):
                pass
            return time.monotonic() - began
        finally:
            daemon.terminate()
            daemon.wait(ENDS_SECONDS)
