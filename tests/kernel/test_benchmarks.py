"""The benchmarks run, and what they measure can be true. How much it is, is for people to judge: machines differ."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from benchmarks import calls, latency, machine, rest, ticks
from benchmarks.effort import SHORT
from benchmarks.place import Place, make_place, tracefs
from benchmarks.results import Curve, Row, cells
from tests.support import alone_with_real_flags


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    assert machine.missing() == [], "the benchmarks can run here"
    with alone_with_real_flags(), tracefs(), make_place() as place:
        yield place


def are_sane(rows: list[Row], *names: str) -> None:
    """Every row that is expected is there, with real numbers in order; printed for whoever looks at the log."""
    for row in rows:
        print(*cells(row), sep=" | ")
        for figure in filter(None, (row.ours, row.yardstick)):
            assert all(math.isfinite(value) for value in (figure.low, figure.median, figure.high))
            assert figure.low <= figure.median <= figure.high
            assert figure.n >= 1
    for name in names:
        assert any(name in row.what for row in rows), name


def are_positive(rows: list[Row]) -> None:
    assert [row.what for row in rows if row.ours.median <= 0 or (row.yardstick and row.yardstick.median <= 0)] == []


def test_what_a_call_costs(place: Place) -> None:
    rows = calls.measure(place, SHORT)
    are_sane(rows, *calls.VERDICTS, "a CPU section, ignored", "a graph, counts", "a bare entry probe")
    are_positive(rows)


def test_how_soon_the_floor_is_up(place: Place) -> None:
    rows = latency.measure(place, SHORT)
    are_sane(rows, "median, machine idle", "99th percentile, every core busy")
    are_positive(rows)


def test_what_it_takes_to_be_there(place: Place) -> None:
    rows = rest.measure_rest(place, SHORT)
    are_sane(rows, "proportional set size", "nothing infers", "3000 calls/s")
    are_positive([row for row in rows if row.group == rest.MEMORY])
    assert all(row.ours.median >= 0 for row in rows), "no process has given CPU time back"


def test_growth_over_use(place: Place) -> None:
    are_sane(rest.measure_growth(place, SHORT), "private memory, grown")


def test_the_start(place: Place) -> None:
    rows = rest.measure_start(place, SHORT)
    are_sane(rows, "READY=1")
    are_positive(rows)


def test_ticks(place: Place) -> None:
    rows, curves = ticks.measure(place, SHORT)
    are_sane(rows, "20 processes, 3 libraries")
    assert all(cost > 0 for curve in curves for cost in curve.points.values())
    assert [list(curve.points) for curve in curves] == [[*SHORT.processes], [*SHORT.libraries]]


def test_many_callers_at_once(place: Place) -> None:
    rows, (curve,) = calls.measure_callers(place, SHORT)
    are_sane(rows, "3 processes call at once")
    assert list(curve.points) == list(curve.compared) == list(SHORT.callers)


def test_a_cost_that_grows_faster_than_a_line_is_seen() -> None:
    line = {0: 2.0, 100: 3.0, 200: 4.0}
    assert ticks.growth_row("libraries", Curve("", "", "", line)).met
    assert not ticks.growth_row("libraries", Curve("", "", "", {x: 2 + x * x / 100 for x in line})).met
