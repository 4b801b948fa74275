"""A real llama-bench with and without the daemon: tokens per second, by turns."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.llama.server import environment_for
from tests.llama.tiny_model import write_model
from tests.support import REPOSITORY

from .effort import Effort
from .place import Place
from .results import Figure, Row

GROUP = "llama-bench with and without the daemon"
BENCH_SECONDS = 120

# Of each: two sides, 97.5 %, by degrees of freedom (Student's t); from 30 on it is about 2.
T = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 11: 2.20, 15: 2.13}


def measure(place: Place, effort: Effort) -> list[Row]:
    """Pairs of runs, one with and one without, the first of each pair being the one and the other by turns."""
    programs = build()
    model = place.directory / "moe.gguf"
    write_model(model, layers=26, expert_width=effort.expert_width)
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(effort.bench_pairs):
        for watched in (pair % 2 == 0, pair % 2 == 1):
            with ExitStack() as stack:
                if watched:
                    found = ":".join(
                        f"{programs}/{name}" for name in ("libllama.so", "libggml-base.so", "libggml-cpu.so")
                    )
                    stack.enter_context(place.watched_by_daemon(libraries=found))
                speeds[watched].append(tokens_per_second(programs, model, effort.bench_tokens))
    lost = [100 * (1 - with_it / without) for with_it, without in zip(speeds[True], speeds[False], strict=True)]
    mean, half = statistics.mean(lost), half_of_interval(lost)
    within = Figure(mean, mean - half, mean + half, len(lost))
    budget = f"not told from none: the 95 % interval, {mean - half:+.2f} % to {mean + half:+.2f} %, holds 0"
    return [
        Row(
            GROUP, "with the daemon (yardstick: without)", "tokens/s", Figure.of(speeds[True]), Figure.of(speeds[False])
        ),
        Row(GROUP, "lost with it, mean and 95 % interval of the pairs", "%", within, None, max(half, 0.0), budget),
    ]


def half_of_interval(samples: list[float]) -> float:
    """Half of the 95 % interval of their mean."""
    degrees = len(samples) - 1
    factor = next((value for least, value in sorted(T.items(), reverse=True) if degrees >= least), T[1])
    return factor * statistics.stdev(samples) / math.sqrt(len(samples))


def build() -> Path:
    """The folder of llama.cpp's programs. The first build takes minutes, and is no part of what is measured."""
    script = REPOSITORY / "tests/llama/build-llama.sh"
    return Path(subprocess.check_output([str(script), sys.executable], text=True).strip())


def tokens_per_second(programs: Path, model: Path, tokens: int) -> float:
    """One run that only generates, with the flag that counts and all on the CPU: each token is probed calls."""
    arguments = [
        "-m",
        str(model),
        "-ngl",
        "0",
        "-ncmoe",
        "99",
        "-p",
        "0",
        "-n",
        str(tokens),
        "-r",
        "1",
        "-t",
        "1",
        "-o",
        "json",
    ]
    said = subprocess.run(
        [str(programs / "llama-bench"), *arguments],
        env=environment_for(programs), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
        timeout=BENCH_SECONDS,
    )  # fmt: skip
    speed: float = json.loads(said.stdout)[0]["avg_ts"]
    return speed
