"""The status that the running daemon publishes for `--status` (publisher.py says what is in it), in words."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from .config import KEYS
from .devfreq import mhz
from .processes import printable
from .rivals import RivalWrite
from .turns import ProcessTurns, remark

# How many ticks a file may be late before its daemon is said not to get to run, and how many seconds more.
LATE_TICKS = 2
LATE_SECONDS = 5

# How many processes a headline names.
MOST_HOLDERS = 3

SECONDS_PER_UNIT = (("d", 86_400), ("h", 3_600), ("min", 60))


def counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def headline(status: Mapping[str, Any]) -> str:
    """One line: what the daemon is doing now."""
    if status["floor_hz"] is None and not status["holders"]:
        return f"idle, {counted(len(status['libraries']), 'library', 'libraries')} watched"
    holders = [f"{one['name']} (pid {one['pid']})" for one in status["processes"] if one["holds_the_floor"]]
    named = holders[:MOST_HOLDERS]
    if status["holders"] > len(named):
        named.append(f"{status['holders'] - len(named)} more")
    state = "not raised" if status["floor_hz"] is None else f"floor {mhz(status['floor_hz'])}"
    return f"{state} for {', '.join(named) or 'nobody any more'}"


def for_systemctl(status: Mapping[str, Any]) -> str:
    """The line that `systemctl status` shows: what the daemon is doing, and what troubles it."""
    return "; ".join([headline(status), *status["troubles"]])


def turns_of(process: Mapping[str, Any]) -> ProcessTurns | None:
    """The turns of one of the published processes."""
    return ProcessTurns(**process["turns"]) if process["turns"] else None


def is_stale(status: Mapping[str, Any], now_seconds: float) -> bool:
    """Has the daemon, which writes its status at each tick, missed some?"""
    allowed_seconds = LATE_TICKS * status["settings"]["rebind_seconds"] + LATE_SECONDS
    return bool(now_seconds - status["written_at_seconds"] > allowed_seconds)


def render(status: Mapping[str, Any], now_seconds: float) -> str:
    """Lay a published status out; `now_seconds` is of the monotonic clock, as the times in it are."""
    label_characters = max(len(label) for label, _ in rows(status, now_seconds))
    lines = [f"  {label:<{label_characters}}  {text}" for label, text in rows(status, now_seconds)]
    return "\n".join([f"moe-gpu-stabilizer {status['version']}, pid {status['pid']}", *lines])


def rows(status: Mapping[str, Any], now_seconds: float) -> Iterator[tuple[str, str]]:
    yield "state", f"{headline(status)}, {ago('since', status['state_since_seconds'], now_seconds)}"
    if is_stale(status, now_seconds):
        late = duration(now_seconds - status["written_at_seconds"])
        yield "STALE", f"the daemon last wrote this {late} ago: it is stopped or stuck, and what follows may be past"
    yield "GPU node", status["node"] or "none found yet"
    if status["clock"]:
        yield "clock", ", ".join(f"{attribute} {mhz(hz)}" for attribute, hz in status["clock"].items())
    yield "raised", raised(status, now_seconds)
    for one in status["processes"]:
        says = "counts" if one["counts"] else "is ignored"
        more = remark(one["counts"], one["reason"], turns_of(one))
        yield "process", f"pid {one['pid']} ({one['name']}) {says}: {one['reason']}{more}"
    if status["processes_left_out"]:
        yield "process", f"{status['processes_left_out']} more have called"
    for one in status["libraries"]:
        yield "library", f"{one['path']} ({', '.join(one['functions'])})"
    if status["last_rival_write"]:
        rival = RivalWrite(**status["last_rival_write"])
        yield "rival", f"{rival} ({ago('at', rival.at_seconds, now_seconds)})"
    for line in settings_in_force(status["settings"]):
        yield "setting", line
    for trouble in status["troubles"]:
        yield "trouble", trouble
    last = status["last_trouble"]
    if last and last["message"] not in status["troubles"]:
        yield "last trouble", f"{last['message']} ({ago('over now; said', last['at_seconds'], now_seconds)})"


def raised(status: Mapping[str, Any], now_seconds: float) -> str:
    if status["raised_times"] == 0:
        return "never since the daemon started"
    times = "once" if status["raised_times"] == 1 else f"{status['raised_times']} times"
    seconds = status["raised_seconds"]
    if status["floor_hz"] is not None:  # the file is not written again while nothing changes
        seconds += now_seconds - status["written_at_seconds"]
    return f"{times}, {duration(seconds)} in all since the daemon started"


def settings_in_force(settings: Mapping[str, Any]) -> Iterator[str]:
    """As the file could have them, one line each, defaults included."""
    for name, key in KEYS.items():
        value = settings[key.field]
        if isinstance(value, (list, tuple)):
            value = (":" if name == "STABILIZER_LIBRARIES" else " ").join(map(str, value))
        text = "" if value is None else printable(f"{value:g}" if isinstance(value, float) else str(value))
        yield f'{name}="{text}"' if " " in text else f"{name}={text}"


def ago(what: str, at_seconds: float, now_seconds: float) -> str:
    """A moment as the time of day, and how long ago that was."""
    age_seconds = max(0.0, now_seconds - at_seconds)
    wall = time.strftime("%H:%M:%S", time.localtime(time.time() - age_seconds))
    return f"{what} {wall} ({duration(age_seconds)} ago)"


def duration(seconds: float) -> str:
    """Two units at most: 4.2 s, 3 min 4 s, 2 h 5 min, 3 d 1 h."""
    for index, (unit, size) in enumerate(SECONDS_PER_UNIT):
        if seconds >= size:
            smaller, smaller_size = (*SECONDS_PER_UNIT, ("s", 1))[index + 1]
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller_size)} {smaller}"
    return f"{seconds:.1f} s"
