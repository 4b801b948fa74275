"""What was measured, as rows and curves, and how it is written down: a table for people, JSON for programs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

COMMAND = ".venv/bin/python -m benchmarks"

HEAD = """\
# What it costs: results

Written by `{command}` (as root, after `./install.sh --test`); not to be edited. What each row means and how it is
measured: [performance.md](performance.md). The same as data: [{json_name}]({json_name}).

Measured on {machine}

"""


@dataclass(frozen=True)
class Figure:
    """Some measurements of one thing. `low` and `high` are quartiles; the extremes where there are less than eight."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Figure:
        ordered = sorted(samples)
        aside = len(ordered) // 4 if len(ordered) >= 8 else 0
        return cls(statistics.median(ordered), ordered[aside], ordered[-1 - aside], len(ordered))

    def plus(self, other: float) -> Figure:
        return Figure(self.median + other, self.low + other, self.high + other, self.n)


@dataclass(frozen=True)
class Row:
    """One line of the table. `limit`: the most that `ours` may be, in the same unit, with what it stands for in words.

    A row without a limit is there to be read with others.
    """

    group: str
    what: str
    unit: str
    ours: Figure
    yardstick: Figure | None = None
    limit: float | None = None
    budget: str = ""

    @property
    def met(self) -> bool:
        return self.limit is None or self.ours.median <= self.limit


@dataclass(frozen=True)
class Curve:
    """A cost as something grows, with a second line to compare with where there is one."""

    name: str
    x_name: str
    unit: str
    points: dict[int, float]
    compared_with: str = ""
    compared: dict[int, float] = field(default_factory=dict)


@dataclass
class Results:
    """Everything that one run has measured."""

    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    took_seconds: float = 0.0

    @property
    def missed(self) -> list[Row]:
        return [row for row in self.rows if not row.met]


def number(value: float) -> str:
    """Three digits are as many as any of these figures is worth."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def describe(figure: Figure | None) -> str:
    if figure is None:
        return ""
    if figure.n == 1:
        return number(figure.median)
    return f"{number(figure.median)} ({number(figure.low)} to {number(figure.high)}; {figure.n})"


def cells(row: Row) -> tuple[str, ...]:
    """The columns: what, ours, the yardstick's, the ratio, the budget, whether it is met."""
    ratio = f"{row.ours.median / row.yardstick.median:.2f}" if row.yardstick and row.yardstick.median else ""
    verdict = "" if row.limit is None else "yes" if row.met else "**no**"
    return f"{row.what}, {row.unit}", describe(row.ours), describe(row.yardstick), ratio, row.budget, verdict


def table(rows: Sequence[Row]) -> str:
    lines = []
    for group in dict.fromkeys(row.group for row in rows):
        lines += [f"## {group}", "", "| | ours | yardstick | ratio | budget | met |", "|---|---|---|---|---|---|"]
        lines += [f"| {' | '.join(cells(row))} |" for row in rows if row.group == group]
        lines.append("")
    return "\n".join(lines)


# The three figures that a user cares about, by the row that has them: README.md quotes these lines.
IN_SHORT = {
    "proportional set size": "{ours} MB of memory (bpftrace and a script in its place: {yardstick} MB)",
    "lost with it": "{ours} % slower in llama-bench, where the 95 % interval is {low} % to {high} %",
    "median, machine idle": "{ours} ms from the first call after a pause to the raised clock (a script: {yardstick})",
}


def in_short(rows: Sequence[Row]) -> list[str]:
    """One line for each of the figures in short that were measured."""
    lines = []
    for what, sentence in IN_SHORT.items():
        for row in rows:
            if row.what.startswith(what):
                yardstick = number(row.yardstick.median) if row.yardstick else ""
                ours, low, high = map(number, (row.ours.median, row.ours.low, row.ours.high))
                lines.append(sentence.format(ours=ours, yardstick=yardstick, low=low, high=high))
                break
    return lines


def as_markdown(results: Results, json_name: str, plot_name: str) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    text = HEAD.format(
        command=COMMAND, machine=f"{machine}, in {results.took_seconds / 60:.0f} minutes.", json_name=json_name
    )
    text += "".join(f"- {line}\n" for line in in_short(results.rows)) + "\n"
    text += "Median (quartiles, or the extremes where there are fewer than eight; number of measurements).\n\n"
    text += table(results.rows)
    text += f"\n## Curves\n\n![cost as the number of processes or libraries grows]({plot_name})\n\n"
    for curve in results.curves:
        names = [curve.x_name, *map(str, curve.points)]
        text += f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n"
        for name, points in ((curve.name, curve.points), (curve.compared_with, curve.compared)):
            if points:
                text += f"| {' | '.join([f'{name}, {curve.unit}', *map(number, points.values())])} |\n"
        text += "\n"
    return text.rstrip("\n") + "\n"


def as_json(results: Results) -> str:
    content: dict[str, Any] = {"command": COMMAND, **asdict(results)}
    for row, written in zip(results.rows, content["rows"], strict=True):
        written["met"] = row.met
    return json.dumps(content, indent=1) + "\n"


def from_json(text: str) -> Results:
    """The results that as_json() has written."""

    def figure(of: dict[str, Any] | None) -> Figure | None:
        return None if of is None else Figure(**of)

    def points(of: dict[str, float]) -> dict[int, float]:
        return {int(x): y for x, y in of.items()}

    content = json.loads(text)
    rows = []
    for row in content["rows"]:
        row.pop("met")
        rows.append(Row(**{**row, "ours": figure(row["ours"]), "yardstick": figure(row["yardstick"])}))
    curves = [
        Curve(**{**curve, "points": points(curve["points"]), "compared": points(curve["compared"])})
        for curve in content["curves"]
    ]
    return Results(content["machine"], rows, curves, content["took_seconds"])


def write(results: Results, directory: Path, plot: str) -> None:
    """Write the table, the data and the plot."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = "performance-results"
    (directory / f"{stem}.md").write_text(as_markdown(results, f"{stem}.json", f"{stem}.svg"))
    (directory / f"{stem}.json").write_text(as_json(results))
    (directory / f"{stem}.svg").write_text(plot)
