"""Call what another process may make the kernel wait for, and go on without it.

/proc/PID/maps and map_files are read under the lock of the process's address space, and a probe is set under that lock
of everybody who maps the file. A thread that waits for a page of a FUSE file, and another one that waits to map
something, keep everybody out for as long as they like. So such calls happen in a thread of their own, which is left
behind when it comes to nothing; it ends with the process that keeps it waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

# Looking at one process takes less than a millisecond.
STALL_SECONDS = 0.5

# The unit allows 32 tasks. Some for each user, so that one cannot have them all.
MOST_LEFT_BEHIND = 8
MOST_LEFT_BEHIND_BY_ONE = 2

T = TypeVar("T")


class KeptWaitingError(Exception):
    """Somebody keeps us waiting, or has done so too often."""


class LeftBehind(NamedTuple):
    thread: threading.Thread
    share: int


class Patience:
    """Calls functions in a thread, and waits for them no longer than they make progress."""

    def __init__(self) -> None:
        self._left_behind: list[LeftBehind] = []

    def is_out(self, share: int) -> bool:
        """Has this share of the users (shares.py) left too many threads waiting?"""
        self._left_behind = [left for left in self._left_behind if left.thread.is_alive()]
        by_one = sum(left.share == share for left in self._left_behind)
        return by_one >= MOST_LEFT_BEHIND_BY_ONE or len(self._left_behind) >= MOST_LEFT_BEHIND

    def call(
        self,
        function: Callable[[], T],
        dispose: Callable[[T], object] = lambda answer: None,
        progress: Callable[[], int] = lambda: 0,
        share: Callable[[], int] = lambda: 0,
    ) -> T:
        """Return what `function` returns, or raise what it raises.

        Raises KeptWaitingError where `progress` has been the same for STALL_SECONDS; that is laid to the `share` of
        that moment. The function may then still be running: what it returns at last is given to `dispose`.
        """
        answers: list[T] = []
        errors: list[BaseException] = []
        lock, abandoned = threading.Lock(), threading.Event()

        def work() -> None:
            try:
                answer = function()
            except BaseException as error:
                errors.append(error)
                return
            with lock:
                if not abandoned.is_set():
                    answers.append(answer)
                    return
            dispose(answer)

        thread = threading.Thread(target=work, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no memory or process left for a thread: at the next tick, perhaps
            raise KeptWaitingError from None
        seen = progress()
        while True:
            thread.join(STALL_SECONDS)
            with lock:
                if not thread.is_alive() or answers:
                    break
                if progress() == seen:
                    abandoned.set()
                    self._left_behind.append(LeftBehind(thread, share()))
                    raise KeptWaitingError
            seen = progress()
        if errors:
            raise errors[0]
        return answers[0]
