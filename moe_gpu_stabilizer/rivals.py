"""Who else writes a GPU's limits: nvpmodel, jetson_clocks, jtop, a user's echo. fanotify tells of each write, and who.

A write to min_freq by another program makes the value that program's, also where it equals ours. So the floor is then
no longer raised by us, and there is nothing to give back; it may be raised anew, a moment later, from what they wrote.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .devfreq import LIMITS, Node, mhz
from .errors import DevfreqError
from .fanotify import WriteWatch
from .files import FileId
from .journal import Troubles, fields
from .processes import name_of
from .settings import NANOSECONDS

logger = logging.getLogger(__name__)

# A tool that changes the power mode writes one limit after the other, and may read them back: it is done by then.
PAUSE_NS = NANOSECONDS

# Who undoes the floor this often within this time wants it down, and is left alone for as long.
MOST_ROUNDS = 3
YIELD_NS = 60 * NANOSECONDS

# The same write of the same program is not said again within this time.
SAME_WRITE_SECONDS = 60


class RivalWrite(NamedTuple):
    """Another program's write to a limit. `pid` is None where only the value was found, 0 where the kernel hides it."""

    attribute: str
    hz: int
    pid: int | None
    name: str  # of the process, "?" where it has ended
    at_seconds: float  # of the monotonic clock; of its discovery, where only the value was found

    @property
    def writer(self) -> str:
        """Who that was, in words."""
        if self.pid is None:
            return "another program"
        if self.pid == 0:
            return "a program in another pid namespace"
        return f"a program that has ended (pid {self.pid})" if self.name == "?" else f"{self.name} (pid {self.pid})"

    def __str__(self) -> str:
        return f"{self.attribute} set to {mhz(self.hz)} by {self.writer}"

    def repeats(self, before: RivalWrite | None) -> bool:
        """Is it what was said a moment ago? A shell's echo has another pid each time."""
        if before is None or self.at_seconds - before.at_seconds > SAME_WRITE_SECONDS:
            return False
        return (self.attribute, self.hz, self.name) == (before.attribute, before.hz, before.name)


@dataclass
class Contest:
    """How often another program has undone the floor lately, and until when it stays down for that. Pure.

    All times are of CLOCK_MONOTONIC, in ns.
    """

    down_until_ns: int = 0
    _undone_ns: list[int] = field(default_factory=list)

    def undone(self, now_ns: int) -> None:
        """Another program has written min_freq while the floor was up."""
        self._undone_ns = [*(at_ns for at_ns in self._undone_ns if now_ns - at_ns < YIELD_NS), now_ns]
        self.down_until_ns = now_ns + (YIELD_NS if self.yields else PAUSE_NS)

    @property
    def yields(self) -> bool:
        """Is it a fight, which the other program has won?"""
        return len(self._undone_ns) >= MOST_ROUNDS

    def calm(self) -> None:
        """The floor could be given back as it had been raised: nobody fights."""
        self._undone_ns.clear()


class LimitWatch:
    """Hears of writes to the limits of one node. Raises OSError where the kernel refuses (fanotify(7))."""

    def __init__(self) -> None:
        self._writes = WriteWatch()
        self._followed: dict[FileId, tuple[str, str]] = {}  # the attribute and its path

    def fileno(self) -> int:
        return self._writes.fileno()

    def close(self) -> None:
        self._writes.close()

    def follow(self, node: Node | None) -> None:
        """Hear of this node's limits and of no other's; called again, of the files that are there now."""
        files: dict[FileId, tuple[str, str]] = {}
        for attribute in LIMITS if node else ():
            path = f"{node}/{attribute}"
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # the node is about to vanish
                files[FileId.of(os.stat(path))] = attribute, path
        for file, (_, path) in self._followed.items():
            if file not in files:
                with contextlib.suppress(OSError):  # the mark went with the file
                    self._writes.remove(path)
        before, self._followed = self._followed, {}
        for file, (attribute, path) in files.items():
            if file not in before:
                self._writes.add(path)
            self._followed[file] = attribute, path

    def read(self) -> dict[str, int]:
        """Return, for each limit that another program was the last to write, that program's pid.

        What was written before a write of our own is past: so this is called before each of those.
        """
        last: dict[str, int] = {}
        while writes := self._writes.read():
            for write in writes:
                if write.modified and write.file in self._followed:
                    last[self._followed[write.file][0]] = write.pid
        return {attribute: pid for attribute, pid in last.items() if pid != os.getpid()}


class Rivals:
    """The other programs that write to the node, as far as the kernel tells, with their log lines."""

    def __init__(
        self, troubles: Troubles, selector: selectors.BaseSelector, written: Callable[[str, int | None], None]
    ) -> None:
        """`written` is called with the attribute that another program has written, and its pid.

        That happens in hear(), which the daemon's selector also calls as soon as something was written.
        """
        self.last: RivalWrite | None = None
        self._troubles = troubles
        self._selector = selector
        self._written = written
        self._watch: LimitWatch | None = None

    def follow(self, node: Node | None, every_seconds: float) -> None:
        """Hear of this node's limits; called again at each tick, `every_seconds`, for the node may have changed."""
        try:
            if self._watch is None:
                self._watch = LimitWatch()
                self._selector.register(self._watch, selectors.EVENT_READ, self.hear)
            self._watch.follow(node)
        except OSError as error:
            why = f"cannot hear of other programs' writes to min_freq: {error.strerror}"
            message = f"{why}; it is read every {every_seconds:g} s instead, and one that equals the floor goes unseen"
            self._troubles.begin("limits", message, NODE=node)
        else:
            self._troubles.end("limits", "writes of other programs are heard of again", NODE=node)

    def hear(self) -> None:
        """Take what other programs have written since the last call."""
        for attribute, pid in (self._watch.read() if self._watch else {}).items():
            self._written(attribute, pid)

    def say(self, node: Node, attribute: str, pid: int | None, undoes: bool) -> RivalWrite | None:
        """Say who has set a limit, and to what; None while that cannot be read. `pid` is None where nobody knows.

        What `undoes` a raise is always said.
        """
        try:
            hz = node.read_hz(attribute)
        except DevfreqError:  # it has gone, or is a plain file that is being written: the next write tells
            return None
        name = name_of(pid) if pid else "?"
        before, self.last = self.last, RivalWrite(attribute, hz, pid, name, time.monotonic())
        if undoes or not self.last.repeats(before):
            floor_hz = hz if attribute == "min_freq" else None
            told = fields("rival", FLOOR_HZ=floor_hz, NODE=node, TARGET_PID=pid, TARGET_COMM=name)
            logger.info("%s set to %s by %s", attribute, mhz(hz), self.last.writer, extra=told)
        return self.last
