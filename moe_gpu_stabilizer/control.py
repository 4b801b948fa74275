"""Raise and give back the floor as the policy wants, say so in the log, and live with a node that comes and goes.

And with other programs that write the same node: what they write is theirs, and the floor waits (rivals.py).
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable

from . import devfreq
from .clock import ClockWatch
from .devfreq import mhz
from .errors import StabilizerError
from .floor import Floor
from .journal import Troubles, fields
from .processes import printable
from .rivals import Contest, Rivals
from .runtime import Runtime
from .settings import NANOSECONDS, Settings
from .tracker import Known
from .up_time import UpTime

logger = logging.getLogger(__name__)

# A node that does not take its floor, or does not take it back, is asked again this soon.
RETRY_NS = NANOSECONDS


class FloorControl:
    """The floor with its log lines. A refusal is said once and tried again at each tick; it never ends the daemon.

    Writes of other programs register in the daemon's selector, with the function to call as the key's data.
    """

    def __init__(
        self,
        settings: Settings,
        runtime: Runtime,
        troubles: Troubles,
        selector: selectors.BaseSelector,
        changed: Callable[[], None],
        settle: Callable[[], None],
    ) -> None:
        """`changed` is called when another program has written to the node, `settle` when what had to wait is due."""
        self.settings = settings
        self.up_time = UpTime()
        self._floor = Floor(runtime)
        self._clock = ClockWatch(troubles)
        self._contest = Contest()
        self.rivals = Rivals(troubles, selector, self._written)
        self._settle_ns: int | None = None
        self._troubles = troubles
        self._changed = changed
        self._settle = settle

    @property
    def node(self) -> devfreq.Node | None:
        return self._floor.node

    @property
    def raised_hz(self) -> int | None:
        """What min_freq has been raised to; None while it is not."""
        return self._floor.raised_hz

    @property
    def is_up_elsewhere(self) -> bool:
        """Is it another node that is still to be given back?"""
        return self.raised_hz is not None and not self._floor.is_up_here

    @property
    def deadline_ns(self) -> int | None:
        """When on_deadline() is due (CLOCK_MONOTONIC); None while nothing is waited for."""
        return min((at for at in (self._settle_ns, self._clock.deadline_ns) if at is not None), default=None)

    def on_deadline(self) -> None:
        """Raise or give back what has had to wait; look whether the clock has followed."""
        now_ns = time.monotonic_ns()
        if self._settle_ns is not None and self._settle_ns <= now_ns:
            self._settle_ns = None
            self._settle()
        if self._clock.deadline_ns is not None and self._clock.deadline_ns <= now_ns:
            self._look_at_clock()

    def _look_at_clock(self) -> None:
        if self.node is not None and self.raised_hz is not None:
            self._clock.look(self.node, self.raised_hz)

    def begin(self) -> None:
        """Find the node, and give back what an earlier run, killed on the way, left raised."""
        self.look_for_node()
        try:
            baseline_hz = self._floor.undo_left_over()
        except StabilizerError as error:
            message = f"cannot give back an earlier run's floor: {error}"
            self._troubles.begin("left over", message, logging.ERROR, NODE=self.node)
            return
        if baseline_hz is not None:
            self._say_given_back(baseline_hz, "left over from a run that was killed", logging.WARNING)

    def raise_for(self, known: Known) -> None:
        """Raise the floor on behalf of a process, unless another program has just set min_freq."""
        self._raise(f"pid {known.process.tgid} inference", known.verdict.reason, known)

    def _raise(self, why: str, reason: str, known: Known | None = None) -> None:
        if self.raised_hz is not None:
            self.rivals.hear()  # while it is down, the value that is read next says all that matters
        elif time.monotonic_ns() < self._contest.down_until_ns:
            return
        before = self._floor.raised
        try:
            floor_hz = self._floor.raise_to(self.settings.floor_hz)
        except StabilizerError as error:
            self._troubles.begin("floor", f"cannot raise the floor: {error}", NODE=self.node)
            self._settle_ns = time.monotonic_ns() + RETRY_NS
            return
        self._troubles.end("floor", "the floor can be raised again", NODE=self.node)
        if floor_hz is None:
            message = "min_freq is already as high as the floor: nothing to raise"
            self._troubles.begin("already high", message, logging.INFO, NODE=self.node)
            self._is_down()
            if before:
                self._say_given_back(before.baseline_hz, "nothing to raise")
            return
        self._troubles.end("already high", "min_freq is below the floor again", NODE=self.node)
        self._troubles.end("rival", "the floor is up again", NODE=self.node)
        pid, name = (known.process.tgid, known.name) if known else (None, None)
        told = fields(
            "raise", FLOOR_HZ=floor_hz, NODE=self.node, TARGET_PID=pid, TARGET_COMM=name, REASON=printable(reason)
        )
        logger.info("floor %s (%s)", mhz(floor_hz), why, extra=told)
        self.up_time.begin()
        self._clock.begin()

    def give_back(self, reason: str) -> None:
        """Put back what was there before."""
        self.rivals.hear()
        if self.raised_hz is None:
            return
        try:
            baseline_hz = self._floor.give_back()
        except StabilizerError as error:
            self._troubles.begin("give back", f"cannot give the floor back: {error}", logging.ERROR, NODE=self.node)
            self._settle_ns = time.monotonic_ns() + RETRY_NS
            return
        self._troubles.end("give back", "the floor could be given back", NODE=self.node)
        self._is_down()
        self._contest.calm()
        if baseline_hz is not None:
            self._say_given_back(baseline_hz, reason)

    def _is_down(self) -> None:
        self.up_time.end()
        self._clock.end()

    def _say_given_back(self, baseline_hz: int, reason: str, level: int = logging.INFO) -> None:
        told = fields("give-back", FLOOR_HZ=baseline_hz, NODE=self.node, REASON=reason)
        logger.log(level, "floor %s (%s)", mhz(baseline_hz), reason, extra=told)

    def _written(self, attribute: str, pid: int | None) -> None:
        """Another program has set a limit. `pid` is None where only the value was found."""
        undoes = attribute == "min_freq" and self._floor.is_up_here
        if undoes:
            self._contest.undone(time.monotonic_ns())
            self._settle_ns = self._contest.down_until_ns
            self._is_down()
            self._note(self._floor.let_go)
        write = self.rivals.say(self.node, attribute, pid, undoes) if self.node else None
        if write and undoes and self._contest.yields:
            message = f"{write.name} sets min_freq whenever it is raised: left to it for a minute each time"
            self._troubles.begin("rival", message, NODE=self.node)
        if attribute == "max_freq":
            self._follow_max(either_way=True)
        self._changed()

    def _follow_max(self, either_way: bool) -> None:
        """max_freq may allow another floor now. The kernel follows a lower one, a thermal cap, without being told."""
        if self.node is None or self.raised_hz is None or not self._floor.is_up_here:
            return
        try:
            floor_hz = self.node.floor_hz(self.settings.floor_hz)
        except StabilizerError:  # the next tick tells more
            return
        if floor_hz > self.raised_hz or (either_way and floor_hz < self.raised_hz):
            self._raise("max_freq has changed", "max_freq")

    def _note(self, what: Callable[[], None]) -> None:
        """Write down, or strike out, what is to be given back."""
        try:
            what()
        except StabilizerError as error:
            self._troubles.begin("state", f"after a kill the floor may stay as it is: {error}", NODE=self.node)
        else:
            self._troubles.end("state", "the floor will be given back also after a kill", NODE=self.node)

    def look_for_node(self) -> None:
        """Find the GPU's node where there is none yet, notice when it has gone, and what has become of its limits."""
        if self.node and self.node.is_there():
            self.node.hold()
            self.rivals.follow(self.node, self.settings.rebind_seconds)
            self._review(self.node)
            return
        if self.node:
            gone, was_raised = self.node, self.raised_hz is not None
            self.give_back("the GPU node is gone")
            if was_raised:  # what was asked of a node goes with it
                told = fields("give-back", NODE=gone, REASON="the GPU node is gone")
                logger.info("the floor is gone with the GPU node", extra=told)
        self._floor.node = devfreq.find(self.settings.devfreq)
        self.rivals.follow(self.node, self.settings.rebind_seconds)
        if self.node:
            self._troubles.end("node", f"found the GPU node {self.node}", NODE=self.node)
            self._say_others(self.node)
        else:
            wanted = printable(self.settings.devfreq) or f"a GPU in {devfreq.CLASS_DIRECTORY}"
            every = f"looking again every {self.settings.rebind_seconds:g} s"
            self._troubles.begin("node", f"no GPU node yet ({wanted}); {every}; --check says more")

    def _say_others(self, node: devfreq.Node) -> None:
        others = [] if self.settings.devfreq else [one.name for one in devfreq.candidates() if one.name != node.name]
        if others:
            message = f"{', '.join(map(printable, others))} may be a GPU, too: STABILIZER_DEVFREQ takes another node"
            self._troubles.begin("other nodes", message, logging.INFO, NODE=node)

    def _review(self, node: devfreq.Node) -> None:
        """Is the floor what it should be, also where no write was heard of?"""
        self.rivals.hear()
        self._note(self._floor.keep)
        try:
            if self._floor.is_undone():
                self._written("min_freq", None)
            if "already high" in self._troubles.lasting and node.min_hz < node.floor_hz(self.settings.floor_hz):
                self._troubles.end("already high", "min_freq is below the floor again", NODE=node)
        except StabilizerError:  # the next look will tell
            return
        self._follow_max(either_way=False)
        if "clock" in self._troubles.lasting and self.raised_hz is not None:
            self._clock.look(node, self.raised_hz)

    def apply(self, settings: Settings, known: Known | None) -> None:
        """Use other settings from now on, also for a floor that is up, on behalf of `known`."""
        before, self.settings = self.settings, settings
        if settings.devfreq != before.devfreq:
            self.give_back("another GPU node")
            self._floor.node = None
            self.look_for_node()
        if known is not None and (settings.devfreq, settings.floor_hz) != (before.devfreq, before.floor_hz):
            self.raise_for(known)
