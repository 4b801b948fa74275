"""What the running daemon publishes for `--status`: one JSON file under /run, readable by all."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from . import __version__, policy
from .devfreq import Node, mhz
from .libraries import Library
from .processes import identify, printable
from .settings import Settings
from .tracker import Known
from .turns import ProcessTurns, remark


class UpTime:
    """How often, and for how many seconds in all, the floor has been up since the start."""

    def __init__(self) -> None:
        self.times = 0
        self.since: float | None = None  # seconds of the monotonic clock, while it is up
        self._seconds = 0.0

    def begin(self) -> None:
        if self.since is None:
            self.times += 1
            self.since = time.monotonic()

    def end(self) -> None:
        if self.since is not None:
            self._seconds += time.monotonic() - self.since
            self.since = None

    @property
    def seconds(self) -> float:
        running = 0.0 if self.since is None else time.monotonic() - self.since
        return self._seconds + running


def snapshot(
    settings: Settings,
    node: Node | None,
    floor_hz: int | None,
    claims: Collection[policy.Process],
    known: Iterable[Known],
    libraries: Iterable[Library],
    up_time: UpTime,
    troubles: Mapping[str, str],
) -> dict[str, Any]:
    """Describe the daemon as JSON carries it; `floor_hz` is None while it is not up. Times are seconds since 1970."""
    return {
        "version": __version__,
        "pid": os.getpid(),
        "start_ticks": identify(os.getpid()).start_ticks,
        "written_at": time.time(),
        "node": None if node is None else str(node),
        "floor_hz": floor_hz,
        "raised_since": None if up_time.since is None else time.time() - (time.monotonic() - up_time.since),
        "raised_times": up_time.times,
        "raised_seconds": round(up_time.seconds, 3),
        "processes": [
            {
                "pid": one.process.tgid,
                "start_ticks": one.process.start_ticks,
                "name": one.name,
                "counts": one.verdict.counts,
                "reason": printable(one.verdict.reason),
                "turns": None if one.turns is None else one.turns._asdict(),
                "holds_the_floor": one.process in claims,
            }
            for one in known
        ],
        "libraries": [
            {"path": printable(library.place.path), "functions": sorted(library.offsets)} for library in libraries
        ],
        "troubles": list(troubles.values()),
        "settings": dataclasses.asdict(settings),
    }


def counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def headline(status: Mapping[str, Any]) -> str:
    """One line: what the daemon is doing now."""
    if status["floor_hz"] is None:
        return f"idle, {counted(len(status['libraries']), 'library', 'libraries')} watched"
    holders = [f"{one['name']} (pid {one['pid']})" for one in status["processes"] if one["holds_the_floor"]]
    return f"floor {mhz(status['floor_hz'])} for {', '.join(holders) or 'nobody any more'}"


def turns_of(process: Mapping[str, Any]) -> ProcessTurns | None:
    """The turns of one of the processes in snapshot()."""
    return ProcessTurns(**process["turns"]) if process["turns"] else None


def render(status: Mapping[str, Any]) -> str:
    """The report of `--status` for people."""
    node = status["node"] or "none found yet"
    times = {0: "never", 1: "once"}.get(status["raised_times"], f"{status['raised_times']} times")
    # It is not written again while nothing changes: the stretch that goes on has grown since.
    seconds = status["raised_seconds"] + (time.time() - status["written_at"] if status["raised_since"] else 0)
    rows = [
        ("state", headline(status)),
        ("GPU node", node),
        ("raised", f"{times}, {seconds:.1f} s in all since the daemon started"),
    ]
    rows += [("library", f"{one['path']} ({', '.join(one['functions'])})") for one in status["libraries"]]
    for one in status["processes"]:
        says = "counts" if one["counts"] else "is ignored"
        more = remark(one["counts"], one["reason"], turns_of(one))
        rows.append(("process", f"pid {one['pid']} ({one['name']}) {says}: {one['reason']}{more}"))
    rows += [("trouble", trouble) for trouble in status["troubles"]]
    return f"moe-gpu-stabilizer {status['version']}, pid {status['pid']}\n" + "\n".join(
        f"  {label:<9} {text}" for label, text in rows
    )
