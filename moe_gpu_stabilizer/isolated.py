"""Run one function in a child process: for what would stay in memory, or might not come back.

pydantic and pyelftools are needed for a moment and would then stay for good; a file that another user made may be
built to keep its reader busy. Both happen in a child that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from .errors import ConfigError, StabilizerError
from .settings import NANOSECONDS

CHUNK_BYTES = 65536
KILL_MILLISECONDS = 100
NANOSECONDS_PER_MILLISECOND = 1_000_000
STANDARD_ERROR = 2
CHILD_MEMORY_BYTES = 1 << 30

# Killed children that could not be waited for at once: one that waits for a dead disk ends when it can.
unreaped: set[int] = set()


class ChildError(StabilizerError):
    """The child died, or was ended because it took too long."""


class Child:
    """A function at work in a forked child. fileno() becomes readable when some of its answer has arrived."""

    def __init__(self, function: Callable[[], Any]) -> None:
        """Start it. Raises ChildError where there is no memory, process or descriptor left."""
        reap()
        self._chunks: list[bytes] = []
        self._complete = False
        try:
            self._reader, writer = os.pipe()
        except OSError as error:
            raise ChildError(f"cannot be started: {error.strerror}") from None
        try:
            self._pid = os.fork()
        except OSError as error:
            os.close(self._reader)
            os.close(writer)
            raise ChildError(f"cannot be started: {error.strerror}") from None
        if self._pid == 0:
            _answer(function, writer)
        os.close(writer)

    def fileno(self) -> int:
        return self._reader

    def receive(self) -> bool:
        """Take what has arrived; wait for some if none has. True when the answer is complete."""
        chunk = os.read(self._reader, CHUNK_BYTES)
        self._chunks.append(chunk)
        self._complete = not chunk
        return self._complete

    @property
    def is_complete(self) -> bool:
        """Has all of the answer arrived?"""
        return self._complete

    def receive_until(self, deadline_ns: int) -> None:
        """Receive until the answer is complete, or until that moment of CLOCK_MONOTONIC."""
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        while poller.poll(max(0, (deadline_ns - time.monotonic_ns()) / NANOSECONDS_PER_MILLISECOND)):
            if self.receive():
                return

    def end(self) -> Any:
        """End the child and return its answer.

        A StabilizerError in the child is raised here as it was. Raises ChildError where the answer is not complete.
        """
        os.close(self._reader)
        end_child(self._pid)
        text = b"".join(self._chunks)
        if not self._complete:
            raise ChildError("took too long and was given up")
        if not text:
            raise ChildError("ended without an answer (out of memory?)")
        try:
            answer = json.loads(text)
        except ValueError:
            raise ChildError("ended in the middle of its answer") from None
        if "error" in answer:
            kind, message, hint = answer["error"]
            raise (ConfigError if kind == ConfigError.__name__ else StabilizerError)(message, hint)
        return answer["value"]


def end_child(pid: int) -> None:
    """Kill a child, unless it has ended by itself, and wait for its end."""
    os.kill(pid, signal.SIGKILL)
    unreaped.add(pid)
    # Dead within a moment, unless it waits for a disk that does not answer: then it is left for later.
    with contextlib.suppress(OSError), open(os.pidfd_open(pid), "rb") as pidfd:
        poller = select.poll()  # not select(), which knows no descriptor from 1,024 on
        poller.register(pidfd, select.POLLIN)
        poller.poll(KILL_MILLISECONDS)
    reap()


def reap() -> None:
    """Take leave of the killed children that have ended."""
    for pid in list(unreaped):
        if os.waitpid(pid, os.WNOHANG)[0]:
            unreaped.remove(pid)


def call_in_child(function: Callable[[], Any], timeout_seconds: float) -> Any:
    """Return what `function` returns in a child, as JSON carries it (tuples arrive as lists).

    A StabilizerError in the child is raised here as it was. Raises ChildError where the child takes longer than
    `timeout_seconds` or ends without an answer.
    """
    child = Child(function)
    try:
        child.receive_until(time.monotonic_ns() + round(timeout_seconds * NANOSECONDS))
    except BaseException:
        with contextlib.suppress(StabilizerError):
            child.end()
        raise
    return child.end()


def _answer(function: Callable[[], Any], writer: int) -> None:
    """The child's whole life: it must never return into the parent's code.

    Any other exception ends it without an answer, which the parent understands.
    """
    try:
        # Above all the probes: they live as long as any process holds their descriptors, and this child may outlive a
        # daemon that is killed.
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > STANDARD_ERROR and descriptor != writer:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(descriptor)
        limit_memory()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGIO, signal.SIG_IGN)  # about the parent's leases
        try:
            answer = {"value": function()}
        except StabilizerError as error:
            answer = {"error": [type(error).__name__, error.message, error.hint]}
        text = json.dumps(answer)
        with open(writer, "w", encoding="utf-8") as pipe:
            pipe.write(text)
    finally:
        os._exit(0)


def limit_memory() -> None:
    """A file that lies about its sizes may cost this much. Whoever started us may have allowed less.

    This much more than what it was born with: the limit is one of addresses, and the parent's threads reserve many.
    """
    with open("/proc/self/statm", "rb") as statm:
        inherited_bytes = int(statm.read().split()[0]) * resource.getpagesize()  # proc(5)
    wanted = inherited_bytes + CHILD_MEMORY_BYTES
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def limit_cpu(seconds: int) -> None:
    """End this process when it has computed for so long."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    allowed = seconds if most == resource.RLIM_INFINITY else min(seconds, most)
    resource.setrlimit(resource.RLIMIT_CPU, (allowed, allowed))
