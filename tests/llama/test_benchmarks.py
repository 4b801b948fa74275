"""The benchmark with a real llama-bench runs, and what it measures can be true."""

from __future__ import annotations

from benchmarks import real_llama
from benchmarks.effort import SHORT
from benchmarks.place import make_place


def test_llama_bench_with_and_without_the_daemon() -> None:
    with make_place() as place:
        speed, lost = real_llama.measure(place, SHORT)
    assert speed.yardstick is not None
    assert speed.ours.median > 0 < speed.yardstick.median
    assert lost.ours.low <= lost.ours.median <= lost.ours.high
    assert lost.unit == "%"


def test_the_interval_of_a_mean() -> None:
    """Ten pairs: Student's t with nine degrees of freedom is 2.26; the deviation of these is 1.05."""
    assert round(real_llama.half_of_interval([-1.0, 1.0] * 5), 2) == 0.75
