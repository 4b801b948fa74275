"""The floor: one number in one node, raised and given back, and never lost in between.

What was there before is saved before the first write. A daemon that was killed leaves that file, and the next start, or
`--restore`, undoes what it says.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from .devfreq import Node, mhz, same_frequency
from .errors import DevfreqError
from .journal import fields
from .runtime import Raised, Runtime

logger = logging.getLogger(__name__)


class Floor:
    """Holds one node's min_freq up, or not. `node` is None while the board shows no GPU."""

    def __init__(self, runtime: Runtime, node: Node | None = None) -> None:
        self._node: Node | None = None
        self.node = node
        self.raised: Raised | None = None
        self._runtime = runtime

    @property
    def node(self) -> Node | None:
        return self._node

    @node.setter
    def node(self, node: Node | None) -> None:
        if self._node:
            self._node.let_go()
        self._node = node
        if node:
            node.hold()

    @property
    def raised_hz(self) -> int | None:
        """What min_freq has been raised to; None while it is not."""
        return self.raised.written_hz[-1] if self.raised else None

    @property
    def is_up_here(self) -> bool:
        """Is it this node's floor that is up, not that of another one that has refused to take it back?"""
        return self.raised is not None and self.raised.node == str(self.node)

    def raise_to(self, wanted_hz: int | None) -> int | None:
        """Raise min_freq to `wanted_hz` (None: the highest available), or change a raised one to that.

        Returns the floor in Hz; None where what was there before is as high already: then there is nothing to do, and
        what had been raised is given back. Raises StabilizerError where there is no node, or it cannot be written, or
        what it takes to give it back cannot be saved.
        """
        if self.node is None:
            raise DevfreqError("no GPU node")
        if self.raised is not None and not self.is_up_here:
            raise DevfreqError(f"the floor of {self.raised.node} is still to be given back")
        floor_hz = self.node.floor_hz(wanted_hz)
        now_hz = self.node.min_hz
        if floor_hz <= (self.raised.baseline_hz if self.raised else now_hz):
            self.give_back()
            return None
        if self.raised is None:
            raised = Raised(str(self.node), now_hz, (floor_hz,))
        else:
            raised = replace(self.raised, written_hz=(*self.raised.written_hz[-1:], floor_hz))
        took_time = self._runtime.save_raised(raised)
        try:
            if took_time and self.node.min_hz != now_hz:  # what they wrote meanwhile must not be lost
                raise DevfreqError("another program is writing min_freq")
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

    def let_go(self) -> None:
        """Another program has set min_freq: what is there now is its own, and nothing is to be given back.

        Raises StabilizerError where that cannot be noted.
        """
        self.raised = None
        self._runtime.forget_raised()

    def is_undone(self) -> bool:
        """Is the floor up, and yet min_freq not what was written? Raises DevfreqError."""
        if self.raised is None or self.node is None or not self.is_up_here:
            return False
        return not self._is_ours(self.node, self.node.min_hz, self.raised)

    def keep(self) -> None:
        """Save what is to be given back again where somebody has removed it. Raises StabilizerError."""
        if self.raised and not self._runtime.has_raised():
            self._runtime.save_raised(self.raised)

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
            if not same_frequency(now_hz, raised.baseline_hz):  # else it has been put back already
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
