"""The floor: one number in one node, raised and given back, and never lost in between.

What was there before is saved before the first write. A daemon that was killed leaves that file, and the next start, or
`--restore`, undoes what it says.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from .devfreq import Node, mhz, same_frequency
from .errors import DevfreqError
from .journal import fields
from .runtime import Raised, Runtime

logger = logging.getLogger(__name__)


class RivalWrite(NamedTuple):
    """Another program's value, found in min_freq where ours was to be given back."""

    min_hz: int
    found_at_seconds: float  # of the monotonic clock


class Floor:
    """Holds one node's min_freq up, or not. `node` is None while the board shows no GPU."""

    def __init__(self, runtime: Runtime, node: Node | None = None) -> None:
        self.node = node
        self.raised: Raised | None = None
        self.rival_write: RivalWrite | None = None
        self._runtime = runtime

    def raise_to(self, wanted_hz: int | None) -> int | None:
        """Raise min_freq to `wanted_hz` (None: the highest available), or change a raised one to that.

        Returns the floor in Hz; None where min_freq was already that high, so that there is nothing to do or to give
        back. Raises StabilizerError where there is no node, or it cannot be written, or what it takes to give it back
        cannot be saved.
        """
        if self.node is None:
            raise DevfreqError("no GPU node")
        floor_hz = self.node.floor_hz(wanted_hz)
        if self.raised is not None and self.raised.node != str(self.node):
            raise DevfreqError(f"the floor of {self.raised.node} is still to be given back")
        if self.raised is None:
            baseline_hz = self.node.min_hz
            if baseline_hz >= floor_hz:
                return None
            raised = Raised(str(self.node), baseline_hz, (floor_hz,))
        else:
            floor_hz = max(floor_hz, self.raised.baseline_hz)
            raised = replace(self.raised, written_hz=(*self.raised.written_hz[-1:], floor_hz))
        self._runtime.save_raised(raised)
        try:
            self.node.write_min_hz(floor_hz)
        except DevfreqError:
            if self.raised is None:
                self._runtime.forget_raised()
            raise
        self.raised = raised
        return floor_hz

    def give_back(self) -> int | None:
        """Put back what was there before and return it in Hz; None where there is nothing to put back.

        Raises DevfreqError where the node refuses; it is then still to be given back.
        """
        if self.raised is None:
            return None
        baseline_hz = self._undo(self.raised)
        self.raised = None
        return baseline_hz

    def undo_left_over(self) -> int | None:
        """Undo what an earlier daemon left raised. Returns and raises as give_back()."""
        raised = self._runtime.load_raised()
        return None if raised is None else self._undo(raised)

    def _undo(self, raised: Raised) -> int | None:
        node = Node(Path(raised.node))
        if not node.is_there():
            # The node went away, and with it what was asked of it.
            self._runtime.forget_raised()
            return None
        now_hz = node.min_hz
        if not self._is_ours(node, now_hz, raised):
            self.rival_write = RivalWrite(now_hz, time.monotonic())
            line = f"min_freq of {node.name} is {mhz(now_hz)}, set by another program meanwhile: left as it is"
            logger.info("%s", line, extra=fields("rival", FLOOR_HZ=now_hz, NODE=node))
            self._runtime.forget_raised()
            return None
        node.write_min_hz(raised.baseline_hz)
        self._runtime.forget_raised()
        return raised.baseline_hz

    @staticmethod
    def _is_ours(node: Node, now_hz: int, raised: Raised) -> bool:
        """Does min_freq read what we left there? Below a cap on max_freq it reads the cap, whatever was asked."""
        capped = now_hz == node.max_hz and now_hz < max(raised.written_hz)
        return capped or any(same_frequency(now_hz, written_hz) for written_hz in raised.written_hz)
