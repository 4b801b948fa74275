"""Raise and give back the floor as the policy wants, say so in the log, and live with a node that comes and goes."""

from __future__ import annotations

import contextlib
import logging
import time

from . import devfreq
from .devfreq import mhz
from .errors import StabilizerError
from .floor import Floor, RivalWrite
from .journal import Troubles, fields
from .processes import printable
from .runtime import Runtime
from .settings import Settings
from .tracker import Known

logger = logging.getLogger(__name__)


class UpTime:
    """How often, and for how many seconds in all, the floor has been up since the start; since when it is as it is."""

    def __init__(self) -> None:
        self.times = 0
        self.is_up = False
        self.since = time.monotonic()
        self._seconds = 0.0

    def begin(self) -> None:
        if not self.is_up:
            self.times += 1
            self.is_up, self.since = True, time.monotonic()

    def end(self) -> None:
        if self.is_up:
            self._seconds = self.seconds
            self.is_up, self.since = False, time.monotonic()

    @property
    def seconds(self) -> float:
        return self._seconds + (time.monotonic() - self.since if self.is_up else 0.0)


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

    @property
    def rival_write(self) -> RivalWrite | None:
        """What another program wrote last, as far as that was noticed."""
        return self._floor.rival_write

    def undo_left_over(self) -> None:
        """Give back what an earlier run, killed on the way, left raised."""
        try:
            baseline_hz = self._floor.undo_left_over()
        except StabilizerError as error:
            message = f"cannot give back an earlier run's floor: {error}"
            self._troubles.begin("left over", message, logging.ERROR, NODE=self.node)
            return
        if baseline_hz is not None:
            self._say_given_back(baseline_hz, "left over from a run that was killed", logging.WARNING)

    def raise_for(self, known: Known) -> None:
        """Raise the floor on behalf of a process."""
        try:
            floor_hz = self._floor.raise_to(self.settings.floor_hz)
        except StabilizerError as error:
            self._troubles.begin("floor", f"cannot raise the floor: {error}", NODE=self.node)
            return
        if floor_hz is None:
            message = "min_freq is already as high as the floor: nothing to raise"
            self._troubles.begin("already high", message, logging.INFO, NODE=self.node)
            return
        self._troubles.end("already high", "min_freq is below the floor again", NODE=self.node)
        self._troubles.end("floor", "the floor can be raised again", NODE=self.node)
        pid, reason = known.process.tgid, printable(known.verdict.reason)
        told = fields("raise", FLOOR_HZ=floor_hz, NODE=self.node, TARGET_PID=pid, TARGET_COMM=known.name, REASON=reason)
        logger.info("floor %s (pid %d inference)", mhz(floor_hz), pid, extra=told)
        self.up_time.begin()

    def give_back(self, reason: str) -> None:
        """Put back what was there before."""
        try:
            baseline_hz = self._floor.give_back()
        except StabilizerError as error:
            self._troubles.begin("give back", f"cannot give the floor back: {error}", logging.ERROR, NODE=self.node)
            return
        self._troubles.end("give back", "the floor could be given back", NODE=self.node)
        self.up_time.end()
        if baseline_hz is not None:
            self._say_given_back(baseline_hz, reason)

    def _say_given_back(self, baseline_hz: int, reason: str, level: int = logging.INFO) -> None:
        told = fields("give-back", FLOOR_HZ=baseline_hz, NODE=self.node, REASON=reason)
        logger.log(level, "floor %s (%s)", mhz(baseline_hz), reason, extra=told)

    def look_for_node(self) -> None:
        """Find the GPU's node where there is none yet, and notice when it has gone."""
        if self.node and self.node.is_there():
            self._review()
            return
        if self.node:
            gone, was_raised = self.node, self._floor.raised is not None
            self.give_back("the GPU node is gone")
            if was_raised and self._floor.raised is None:  # what was asked of a node goes with it
                told = fields("give-back", NODE=gone, REASON="the GPU node is gone")
                logger.info("the floor is gone with the GPU node", extra=told)
        self._floor.node = devfreq.find(self.settings.devfreq)
        if self.node:
            self._troubles.end("node", f"found the GPU node {self.node}", NODE=self.node)
        else:
            wanted = printable(self.settings.devfreq) or f"a GPU in {devfreq.CLASS_DIRECTORY}"
            every = f"looking again every {self.settings.rebind_seconds:g} s"
            self._troubles.begin("node", f"no GPU node yet ({wanted}); {every}; --check says more")

    def _review(self) -> None:
        """Is min_freq still as high as the floor, with nobody to raise it for?"""
        if "already high" not in self._troubles.lasting or self.node is None:
            return
        with contextlib.suppress(StabilizerError):  # the next look will tell
            if self.node.min_hz < self.node.floor_hz(self.settings.floor_hz):
                self._troubles.end("already high", "min_freq is below the floor again", NODE=self.node)

    def apply(self, settings: Settings, known: Known | None) -> None:
        """Use other settings from now on, also for a floor that is up, on behalf of `known`."""
        before, self.settings = self.settings, settings
        if settings.devfreq != before.devfreq:
            self.give_back("another GPU node")
            self._floor.node = None
            self.look_for_node()
        if known is not None and (settings.devfreq, settings.floor_hz) != (before.devfreq, before.floor_hz):
            self.raise_for(known)

    def describe(self) -> str:
        """The node and the floor, for the log."""
        wanted_hz = self.settings.floor_hz
        try:
            floor_hz = self.node.floor_hz(wanted_hz) if self.node else wanted_hz
        except StabilizerError:  # it went this very moment; the next tick says so
            floor_hz = wanted_hz
        return f"GPU node {self.node or 'none yet'}, floor {mhz(floor_hz) if floor_hz else 'the highest available'}"
