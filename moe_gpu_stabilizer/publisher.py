"""Publishes what the daemon is doing: to a file under /run, readable by all, and to systemd.

Times in the file are seconds of the monotonic clock: a board without a battery learns the date some time after its
start.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from . import __version__
from .control import FloorControl
from .devfreq import mhz
from .errors import StabilizerError
from .journal import Troubles
from .notify import ServiceManager
from .policy import Process
from .processes import identify, printable
from .rebind import Rebinder
from .runtime import Runtime, TakenOverError
from .settings import Settings
from .status import counted, for_systemctl
from .tracker import Tracker

# The first change is published at once; those that follow within this time, together.
GAP_NS = 200_000_000

# Any user can start thousands of processes that call.
MOST_PROCESSES = 50


@dataclass(frozen=True)
class Reload:
    """How the last reading of the settings went, for `--reload`; the time is of the monotonic clock."""

    began_at_seconds: float
    error: str = ""
    hint: str = ""


class Publisher:
    """Publishes the state of these parts of the daemon."""

    def __init__(
        self,
        runtime: Runtime,
        troubles: Troubles,
        manager: ServiceManager,
        control: FloorControl,
        rebinder: Rebinder,
        tracker: Tracker,
    ) -> None:
        self._runtime = runtime
        self._troubles = troubles
        self._manager = manager
        self._control = control
        self._rebinder = rebinder
        self._tracker = tracker
        self._changed = False
        self._published_ns = 0
        self._start_ticks = identify(os.getpid()).start_ticks

    def describe(self, settings: Settings) -> str:
        """The program, the node, the floor and what is watched in one line, for the log."""
        node, floor_hz = self._control.node, settings.floor_hz
        if node:
            with contextlib.suppress(StabilizerError):  # it went this very moment; the next tick says so
                floor_hz = node.floor_hz(floor_hz)
        floor = mhz(floor_hz) if floor_hz else "the highest available"
        libraries = counted(len(self._rebinder.libraries), "library", "libraries")
        gpu = f"GPU node {node or 'none yet'}, floor {floor}"
        return f"moe-gpu-stabilizer {__version__}, {gpu}, hold {settings.hold_seconds:g} s, {libraries}"

    def note_change(self) -> None:
        """There is something new to publish; many changes at once are one."""
        self._changed = True

    @property
    def deadline_ns(self) -> int | None:
        """When publish() is due (CLOCK_MONOTONIC); None where there is nothing new."""
        return self._published_ns + GAP_NS if self._changed or self._troubles.changed else None

    def publish(self, settings: Settings, claims: Collection[Process], reload: Reload | None) -> None:
        """Say what is so now. That the file cannot be written is a trouble, and ends nothing.

        Raises TakenOverError.
        """
        self._changed = self._troubles.changed = False
        self._published_ns = time.monotonic_ns()
        status = self._snapshot(settings, claims, reload)
        try:
            self._runtime.keep_lock()
            self._runtime.save_status(status)
        except TakenOverError:
            raise
        except StabilizerError as error:
            self._troubles.begin("status", f"cannot publish the status: {error}")
        else:
            self._troubles.end("status", "the status can be published again")
        self._manager.status(for_systemctl(status))

    def _snapshot(self, settings: Settings, claims: Collection[Process], reload: Reload | None) -> dict[str, Any]:
        """Describe the daemon as JSON carries it; `floor_hz` is None while the floor is not up."""
        control, rival_write = self._control, self._control.rivals.last
        shown = self._tracker.most_important(claims, MOST_PROCESSES)
        return {
            "version": __version__,
            "pid": os.getpid(),
            "start_ticks": self._start_ticks,
            "written_at_seconds": time.monotonic(),
            "node": None if control.node is None else str(control.node),
            "floor_hz": control.raised_hz,
            "state_since_seconds": control.up_time.since,
            "raised_times": control.up_time.times,
            "raised_seconds": round(control.up_time.seconds, 3),
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
                for one in shown
            ],
            "processes_left_out": len(self._tracker.known) - len(shown),
            "holders": len(claims),
            "libraries": [
                {"path": printable(library.place.path), "functions": sorted(library.offsets)}
                for library in self._rebinder.libraries
            ],
            "last_rival_write": None if rival_write is None else rival_write._asdict(),
            "troubles": list(self._troubles.lasting.values()),
            "last_trouble": None if self._troubles.last is None else self._troubles.last._asdict(),
            "settings": asdict(settings),
            "last_reload": None if reload is None else asdict(reload),
        }
