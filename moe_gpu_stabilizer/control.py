"""Raise and give back the floor as the policy wants, say so in the log, and live with a node that comes and goes."""

from __future__ import annotations

import logging

from . import devfreq
from .devfreq import mhz
from .errors import StabilizerError
from .floor import Floor
from .journal import Troubles
from .runtime import Runtime
from .settings import Settings
from .status import UpTime

logger = logging.getLogger(__name__)


class FloorControl:
    """The floor with its log lines. A refusal is said once and tried again at each tick; it never ends the daemon."""

    def __init__(self, settings: Settings, runtime: Runtime, troubles: Troubles) -> None:
        self.settings = settings
        self.up_time = UpTime()
        self._floor = Floor(runtime)
        self._troubles = troubles

    @property
    def node(self) -> devfreq.Node | None:
        return self._floor.node

    @property
    def raised_hz(self) -> int | None:
        """What min_freq has been raised to; None while it is not."""
        return self._floor.raised.written_hz[-1] if self._floor.raised else None

    def undo_left_over(self) -> None:
        """Give back what an earlier run, killed on the way, left raised."""
        try:
            baseline_hz = self._floor.undo_left_over()
        except StabilizerError as error:
            self._troubles.begin("left over", f"cannot give back an earlier run's floor: {error}", logging.ERROR)
            return
        if baseline_hz is not None:
            logger.warning("floor %s (left over from a run that was killed)", mhz(baseline_hz))

    def raise_for(self, pid: int) -> None:
        """Raise the floor on behalf of a process."""
        try:
            floor_hz = self._floor.raise_to(self.settings.floor_hz)
        except StabilizerError as error:
            self._troubles.begin("floor", f"cannot raise the floor: {error}")
            return
        if floor_hz is None:
            message = "min_freq is already as high as the floor: nothing to raise"
            self._troubles.begin("floor", message, logging.INFO)
            return
        self._troubles.end("floor", "the floor can be raised again")
        logger.info("floor %s (pid %d inference)", mhz(floor_hz), pid)
        self.up_time.begin()

    def give_back(self, reason: str) -> None:
        """Put back what was there before."""
        try:
            baseline_hz = self._floor.give_back()
        except StabilizerError as error:
            self._troubles.begin("give back", f"cannot give the floor back: {error}", logging.ERROR)
            return
        self._troubles.end("give back", "the floor could be given back")
        self.up_time.end()
        if baseline_hz is not None:
            logger.info("floor %s (%s)", mhz(baseline_hz), reason)

    def look_for_node(self) -> None:
        """Find the GPU's node where there is none yet, and notice when it has gone."""
        if self.node and self.node.is_there():
            return
        if self.node:
            # What was asked of a node goes with it.
            self.give_back("the GPU node is gone")
        self._floor.node = devfreq.find(self.settings.devfreq)
        if self.node:
            self._troubles.end("node", f"found the GPU node {self.node}")
        else:
            wanted = self.settings.devfreq or f"a GPU in {devfreq.CLASS_DIRECTORY}"
            every = f"looking again every {self.settings.rebind_seconds:g} s"
            self._troubles.begin("node", f"no GPU node yet ({wanted}); {every}; --check says more")

    def apply(self, settings: Settings, pid: int | None) -> None:
        """Use other settings from now on, also for a floor that is up, on behalf of `pid`."""
        before, self.settings = self.settings, settings
        if settings.devfreq != before.devfreq:
            self.give_back("another GPU node")
            self._floor.node = None
            self.look_for_node()
        if pid is not None and (settings.devfreq, settings.floor_hz) != (before.devfreq, before.floor_hz):
            self.raise_for(pid)

    def describe(self) -> str:
        """The node and the floor, for the log."""
        wanted_hz = self.settings.floor_hz
        try:
            floor_hz = self.node.floor_hz(wanted_hz) if self.node else wanted_hz
        except StabilizerError:  # it went this very moment; the next tick says so
            floor_hz = wanted_hz
        return f"GPU node {self.node or 'none yet'}, floor {mhz(floor_hz) if floor_hz else 'the highest available'}"
