"""Run one function in a child process: for what would stay in memory, or might not come back.

pydantic and pyelftools are needed for a moment and would then stay for good; a file that another user made may be
built to keep its reader busy. Both happen in a child that ends.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from .errors import ConfigError, StabilizerError

CHUNK_BYTES = 65536
CHILD_MEMORY_BYTES = 1 << 30


class ChildError(StabilizerError):
    """The child died, or was ended because it took too long."""


def call_in_child(function: Callable[[], Any], timeout_seconds: float) -> Any:
    """Return what `function` returns in a forked child, as JSON carries it (tuples arrive as lists).

    A StabilizerError in the child is raised here as it was. Raises ChildError where the child takes longer than
    `timeout_seconds` or ends without an answer.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(function, reader, writer)
    os.close(writer)
    try:
        text = _read_until(reader, time.monotonic() + timeout_seconds)
    finally:
        os.close(reader)
        # It has answered, or never will.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if text is None:
        raise ChildError(f"took longer than {timeout_seconds:g} s and was given up")
    if not text:
        raise ChildError("ended without an answer (out of memory?)")
    answer = json.loads(text)
    if "error" in answer:
        kind, message, hint = answer["error"]
        raise (ConfigError if kind == ConfigError.__name__ else StabilizerError)(message, hint)
    return answer["value"]


def _answer(function: Callable[[], Any], reader: int, writer: int) -> None:
    """The child's whole life: it must never return into the parent's code.

    Any other exception ends it without an answer, which the parent understands.
    """
    try:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_AS, (CHILD_MEMORY_BYTES, CHILD_MEMORY_BYTES))
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        try:
            answer = {"value": function()}
        except StabilizerError as error:
            answer = {"error": [type(error).__name__, error.message, error.hint]}
        with open(writer, "w", encoding="utf-8") as pipe:
            json.dump(answer, pipe)
    finally:
        os._exit(0)


def _read_until(reader: int, deadline: float) -> str | None:
    """Read to the end of the pipe; None where the deadline (time.monotonic()) came first."""
    chunks: list[bytes] = []
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    while poller.poll(max(0, round((deadline - time.monotonic()) * 1000))):
        chunk = os.read(reader, CHUNK_BYTES)
        if not chunk:
            return b"".join(chunks).decode("utf-8")
        chunks.append(chunk)
    return None
