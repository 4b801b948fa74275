"""How much is measured: enough for figures that can be trusted, or just enough to see that it works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """How often and how long. All rounds take ours and the yardstick in turns."""

    call_rounds: int = 7
    calls: int = 20_000
    latency_rounds: int = 3
    latency_samples: int = 45  # in each round
    strangers: int = 8
    rest_rounds: int = 2
    rest_seconds: float = 60.0  # as long as the time between two looks at a process
    settle_seconds: float = 65.0
    starts: int = 12
    growth_batches: int = 3
    stretches: int = 12  # in each batch
    ticks: int = 240
    processes: tuple[int, ...] = (0, 250, 500, 1000)
    libraries: tuple[int, ...] = (1, 25, 50, 100, 200)
    callers: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    bench_pairs: int = 10
    bench_tokens: int = 96
    expert_width: int = 8192  # of the model for llama-bench: 1.3 GB, some 15 ms for each token


FULL = Effort()

# For the tests.
SHORT = Effort(
    call_rounds=2, calls=200, latency_rounds=1, latency_samples=3, strangers=2, rest_rounds=1, rest_seconds=0.5,
    settle_seconds=0, starts=2, growth_batches=3, stretches=1, ticks=3, processes=(0, 20), libraries=(1, 3),
    callers=(1, 3), bench_pairs=2, bench_tokens=8, expert_width=64,
)  # fmt: skip
