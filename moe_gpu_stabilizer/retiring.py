"""Probes that are being taken out: by a thread, one after the other.

The kernel takes about 100 ms for each, for it waits until nobody can be inside. Several threads would hardly be faster,
and while they are at it, attaching a probe takes seconds instead of a tenth: all of them take the same lock.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .files import FileId

# Less than the unit's TimeoutStopSec. The clock has been given back before.
LONGEST_WAIT_SECONDS = 20


class Closable(Protocol):
    def close(self) -> None: ...


class Leaving(NamedTuple):
    """The probes of one file, and the descriptor that holds the lease on it."""

    file: FileId
    probes: Sequence[Closable]
    descriptor: int
    done: threading.Event


class Retiring:
    """Takes probes out in a thread, which is there only while there are any."""

    def __init__(self) -> None:
        self._leaving: dict[FileId, list[Leaving]] = {}
        self._queue: deque[Leaving] = deque()
        self._lock = threading.Lock()
        self._at_work = False

    def add(self, file: FileId, probes: Sequence[Closable], descriptor: int, in_haste: bool) -> None:
        """Take these out, and then close the descriptor; `in_haste` before others, as somebody waits for that file."""
        leaving = Leaving(file, probes, descriptor, threading.Event())
        self._leaving.setdefault(file, []).append(leaving)
        with self._lock:
            (self._queue.appendleft if in_haste else self._queue.append)(leaving)
            starts, self._at_work = not self._at_work, True
        if starts:
            try:
                threading.Thread(target=self._work, daemon=True).start()
            except RuntimeError:  # no memory or process left for a thread: then everything waits
                self._work()

    def files(self) -> set[FileId]:
        """The files that still have probes which are on their way out."""
        self._leaving = {
            file: those for file, those in self._leaving.items() if not all(leaving.done.is_set() for leaving in those)
        }
        return set(self._leaving)

    def wait_for(self, file: FileId, until_seconds: float) -> bool:
        """Wait until the file has no such probes, or that moment of the monotonic clock; say whether it has none."""
        those = self._leaving.get(file, [])
        return all(leaving.done.wait(max(0, until_seconds - time.monotonic())) for leaving in those)

    def wait_for_all(self) -> None:
        """Wait until all are out, but not for ever: a process may lock up the memory that the kernel waits for."""
        until_seconds = time.monotonic() + LONGEST_WAIT_SECONDS
        for file in list(self._leaving):
            self.wait_for(file, until_seconds)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._at_work = False
                    return
                leaving = self._queue.popleft()
            for probe in leaving.probes:
                probe.close()
            # Only now the lease is dropped, and with it a waiting writer goes on.
            os.close(leaving.descriptor)
            leaving.done.set()
