"""Measure all that DESIGN promises of the program's cost, and write the results into docs/.

    .venv/bin/python -m benchmarks        as root, after ./install.sh --test; about twenty minutes

Exit status: 0 where every budget is met, 1 where one is missed (the table marks it), 2 where something is not there
that the benchmark needs. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support import REPOSITORY, alone_with_real_flags

from . import calls, latency, machine, plot, real_llama, rest, ticks
from .effort import FULL, Effort
from .place import Place, make_place, tracefs
from .results import Curve, Results, Row, cells, in_short, write

Part = Callable[[Place, Effort, Results], None]


def add_rows(measure: Callable[[Place, Effort], list[Row]]) -> Part:
    return lambda place, effort, results: results.rows.extend(measure(place, effort))


def add_growth(measure: Callable[[Place, Effort], tuple[list[Row], list[Curve]]]) -> Part:
    def part(place: Place, effort: Effort, results: Results) -> None:
        rows, curves = measure(place, effort)
        results.rows.extend(rows)
        results.curves.extend(curves)

    return part


PARTS: dict[str, Part] = {
    "memory, CPU and wake-ups": add_rows(rest.measure_rest),
    "memory over an hour of use": add_rows(rest.measure_growth),
    "calls": add_rows(calls.measure),
    "first call": add_rows(latency.measure),
    "ticks": add_growth(ticks.measure),
    "start": add_rows(rest.measure_start),
    "llama-bench": add_rows(real_llama.measure),
    "processes at once": add_growth(calls.measure_callers),
}


def run(effort: Effort, parts: dict[str, Part]) -> Results:
    """Measure these parts, and say on the way what was found."""
    results = Results(machine.describe())
    began = time.monotonic()
    with alone_with_real_flags(), tracefs(), make_place() as place:
        for name, part in parts.items():
            done, part_began = len(results.rows), time.monotonic()
            part(place, effort, results)
            print(f"{name}, {time.monotonic() - part_began:.0f} s")
            for row in results.rows[done:]:
                print(f"  {'  ' if row.met else '!!'} {' | '.join(cells(row))}", flush=True)
    results.took_seconds = time.monotonic() - began
    return results


def leave(number: int, _frame: object) -> None:
    """End with nothing left running, mounted or probed."""
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what the program costs.")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs", help="the directory for the results (docs)")
    parser.add_argument("part", nargs="*", metavar="PART", help=f"measure only this: {', '.join(PARTS)}")
    options = parser.parse_args()
    if unknown := set(options.part) - set(PARTS):
        parser.error(f"there is no part {', '.join(map(repr, unknown))}")
    if lines := machine.missing():
        print(*(f"missing: {line}" for line in lines), sep="\n", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    results = run(FULL, {name: PARTS[name] for name in options.part or PARTS})
    if options.part:
        print("nothing written: these are parts of a run")
    else:
        write(results, options.output, plot.draw(results.curves))
    print(*(f"in short: {line}" for line in in_short(results.rows)), sep="\n")
    for row in results.missed:
        print(f"missed: {row.what}: {row.ours.median:.3g} {row.unit}; budget: {row.budget}")
    return 1 if results.missed else 0


if __name__ == "__main__":
    sys.exit(main())
