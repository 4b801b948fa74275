"""Call what another process may make the kernel wait for, and go on without it.

/proc/PID/maps and map_files are read under the lock of the process's address space, and a probe is set under that lock
of everybody who maps the file. A thread that waits for a page of a FUSE file, and another one that waits to map
something, keep everybody out for as long as they like. So such calls happen in another thread. It is left behind where
that comes to nothing, and ends with the process that keeps it waiting; the next call gets a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

# Looking at one process takes less than a millisecond.
STALL_SECONDS = 0.5

# The unit allows 32 tasks. Some for each user, so that one cannot have them all.
MOST_LEFT_BEHIND = 8
MOST_LEFT_BEHIND_BY_ONE = 2

# A share that no user has: of what is nobody's fault.
NOBODY = 1 << 40

T = TypeVar("T")


class KeptWaitingError(Exception):
    """Somebody keeps us waiting, or has done so too often."""


@dataclass
class Task:
    """One call. `done` is held until it is over; what it came to is kept in what is there already.

    Out of memory, nothing new can be made.
    """

    function: Callable[[], Any]
    dispose: Callable[[Any], object]
    done: threading.Lock
    lock: threading.Lock
    answer: Any = None
    error: BaseException | None = None
    is_over: bool = False
    is_abandoned: bool = False

    def run(self) -> None:
        try:
            answer = self.function()
            with self.lock:
                self.is_over = True
                if not self.is_abandoned:
                    self.answer = answer
                    return
            self.dispose(answer)
        except BaseException as error:
            self.error = error
            self.is_over = True
        finally:
            self.done.release()


class Worker:
    """A thread that runs one task after the other."""

    def __init__(self) -> None:
        """Start it. Raises RuntimeError where there is no memory or process left."""
        self.share = NOBODY  # whose fault it is that it was left behind
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=run_all, args=(self.tasks,), daemon=True)
        self._thread.start()

    def __del__(self) -> None:
        """Nobody is left who could give it another task."""
        self.tasks.put(None)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()


def run_all(tasks: SimpleQueue[Task | None]) -> None:
    """A worker's thread, which knows the worker's tasks but not the worker: that would keep it for ever."""
    while (task := tasks.get()) is not None:
        task.run()
        del task  # with all that it holds on to, until there is another one


class Patience:
    """Calls functions in a thread, and waits for them no longer than they make progress."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._left_behind: list[Worker] = []

    def is_out(self, share: int) -> bool:
        """Has this share of the users (shares.py) left too many threads waiting?"""
        self._left_behind = [worker for worker in self._left_behind if worker.is_alive]
        by_one = sum(worker.share == share for worker in self._left_behind)
        return by_one >= MOST_LEFT_BEHIND_BY_ONE or len(self._left_behind) >= MOST_LEFT_BEHIND

    def call(
        self,
        function: Callable[[], T],
        dispose: Callable[[T], object] = lambda answer: None,
        progress: Callable[[], int] = lambda: 0,
        share: Callable[[], int] = lambda: NOBODY,
    ) -> T:
        """Return what `function` returns, or raise what it raises.

        Raises KeptWaitingError where `progress` has been the same for STALL_SECONDS; that is laid to the `share` of
        that moment. The function may then still be running: what it returns at last is given to `dispose`.
        """
        task = Task(function, dispose, threading.Lock(), threading.Lock())
        task.done.acquire()
        try:
            self._worker = self._worker or Worker()
        except RuntimeError:  # no memory or process left for a thread: at the next tick, perhaps
            raise KeptWaitingError from None
        self._worker.tasks.put(task)
        seen = progress()
        while not task.done.acquire(timeout=STALL_SECONDS):
            with task.lock:
                if progress() == seen and not task.is_over:
                    task.is_abandoned = True
                    self._leave_behind(self._worker, share())
                    raise KeptWaitingError
            seen = progress()
        if task.error is not None:
            raise task.error
        return task.answer  # type: ignore[no-any-return]

    def _leave_behind(self, worker: Worker, share: int) -> None:
        worker.share = share
        worker.tasks.put(None)
        self._left_behind.append(worker)
        self._worker = None
