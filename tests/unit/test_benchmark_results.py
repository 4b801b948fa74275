"""How the benchmarks write down what they have measured, and that what is written in docs/ was measured."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.plot import draw
from benchmarks.results import Curve, Figure, Results, Row, as_json, as_markdown, cells, from_json, in_short, number
from tests.support import REPOSITORY

DOCS = REPOSITORY / "docs"
HERE = {"CPU": "a processor", "cores": "2"}


def one_row(ours: float, limit: float | None) -> Row:
    return Row("Memory", "private", "MB", Figure.of([ours]), Figure.of([80.0, 100.0, 90.0]), limit, "20 MB")


def test_a_figure_is_a_median_with_quartiles() -> None:
    assert Figure.of([3.0, 1.0, 2.0]) == Figure(2.0, 1.0, 3.0, 3)
    assert Figure.of([float(value) for value in range(1, 102)]) == Figure(51.0, 26.0, 76.0, 101)


@pytest.mark.parametrize(("value", "shown"), [(0.0, "0"), (0.0312, "0.0312"), (9.876, "9.88"), (1234.5, "1234")])
def test_numbers_have_three_digits(value: float, shown: str) -> None:
    assert number(value) == shown


def test_a_row_says_whether_its_budget_is_met() -> None:
    assert cells(one_row(10.0, 20.0)) == ("private, MB", "10", "90 (80 to 100; 3)", "0.11", "20 MB", "yes")
    assert cells(one_row(20.0, 20.0))[-1] == "yes"
    assert cells(one_row(20.1, 20.0))[-1] == "**no**"
    assert cells(one_row(20.1, None))[-1] == ""


def test_results_that_miss_a_budget_name_it() -> None:
    results = Results(HERE, [one_row(10.0, 20.0), one_row(30.0, 20.0)])
    assert results.missed == [results.rows[1]]


def test_the_figures_for_the_readme_come_from_the_rows() -> None:
    lost = Row("llama-bench", "lost with it, mean", "%", Figure(0.12, -0.3, 0.5, 10))
    memory = Row("Memory", "proportional set size", "MB", Figure.of([14.4]), Figure.of([97.0]))
    assert in_short([lost, one_row(1.0, None), memory]) == [
        "14.4 MB of memory (bpftrace and a script in its place: 97 MB)",
        "0.12 % slower in llama-bench, where the 95 % interval is -0.3 % to 0.5 %",
    ]
    assert in_short([]) == []


def test_what_is_written_as_data_is_read_back_the_same() -> None:
    curve = Curve("a tick", "processes", "ms", {1: 2.0, 10: 3.0}, "another", {1: 1.0})
    results = Results(HERE, [one_row(10.0, 20.0), Row("Start", "start", "s", Figure.of([0.2]))], [curve], 61.5)
    assert from_json(as_json(results)) == results


def test_a_plot_is_a_picture_of_its_points() -> None:
    curves = [
        Curve("a tick & more", "processes", "ms", {0: 2.0, 10: 3.0, 20: 4.0}),
        Curve("b", "x", "us", {1: 0.0}, "bare", {1: 0.0}),
    ]
    picture = ElementTree.fromstring(draw(curves))
    circles = [element for element in picture.iter() if element.tag.endswith("circle")]
    assert len(circles) == 3 + 2
    assert "a tick & more, ms" in [element.text for element in picture.iter()]
    heights = [float(circle.get("cy", "")) for circle in circles[:3]]
    assert heights == sorted(heights, reverse=True), "more is further up"


def test_the_results_in_docs_are_what_was_measured() -> None:
    """Nobody has edited the table by hand, and the plot is of the same run."""
    results = from_json((DOCS / "performance-results.json").read_text())
    table = as_markdown(results, "performance-results.json", "performance-results.svg")
    assert (DOCS / "performance-results.md").read_text() == table
    assert (DOCS / "performance-results.svg").read_text() == draw(results.curves)
