"""What is said to, and heard from, a running daemon: --status, --reload; and --restore, for one that was killed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from . import __version__
from .devfreq import Node, mhz
from .errors import ConfigError, DevfreqError, StabilizerError
from .floor import Floor
from .invocation import again_as_root, command, start_command
from .journal import fields, set_up_logging, under_systemd
from .runtime import Runtime
from .status import is_stale, render

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 30  # longer than the daemon waits for the child that reads its settings
LOOK_SECONDS = 0.02


def show_status(as_json: bool) -> int:
    """Print what the running daemon has published, and the clock; return 1 where the daemon's word is out of date."""
    runtime = Runtime()
    status = load_status(runtime)
    now_seconds = time.monotonic()
    try:
        stale = is_stale(status, now_seconds)
        status["clock"] = clock_of(status["node"])
        text = json.dumps({**status, "stale": stale}, indent=2) if as_json else render(status, now_seconds)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise damaged(runtime) from None
    print(text, flush=True)
    return 1 if stale else 0


def clock_of(directory: str | None) -> dict[str, int]:
    """What the GPU's clock is at this moment, and between which limits, in Hz; what cannot be read is left out."""
    clock: dict[str, int] = {}
    for attribute in ("cur_freq", "min_freq", "max_freq") if directory else ():
        with contextlib.suppress(DevfreqError):
            clock[attribute] = Node(Path(str(directory))).read_hz(attribute)
    return clock


def damaged(runtime: Runtime) -> StabilizerError:
    return StabilizerError(f"what is in {runtime.directory} is damaged", f"restart it: {start_command('restart')}")


def load_status(runtime: Runtime) -> dict[str, Any]:
    """Return the running daemon's status. Raises StabilizerError where none is running, or one of another version."""
    status = runtime.load_status()
    if status is not None and status.get("version") != __version__:
        message = f"the running daemon is version {status.get('version')}, this program {__version__}"
        raise StabilizerError(message, f"restart it: {start_command('restart')}")
    if status is not None:
        return status
    if runtime.load_raised():
        message = "the daemon is not running, and one that was killed has left min_freq raised"
        raise StabilizerError(message, f"give it back: {command('--restore')}")
    raise StabilizerError("the daemon is not running", f"start it: {start_command()}")


def reload() -> int:
    """Make the running daemon read its settings again, and wait for what comes of it.

    Raises ConfigError where they are wrong, so that the old ones stay; StabilizerError where there is no daemon, or
    none that answers.
    """
    runtime = Runtime()
    pid = int(load_status(runtime)["pid"])
    asked_at_seconds = time.monotonic()
    try:
        os.kill(pid, signal.SIGHUP)
    except PermissionError:
        raise StabilizerError("the daemon is not yours to signal", f"it needs root: {again_as_root()}") from None
    except ProcessLookupError:
        raise StabilizerError("the daemon has just ended", f"start it: {start_command()}") from None
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        try:
            answer = load_status(runtime)["last_reload"] or {"began_at_seconds": 0}
            answered = answer["began_at_seconds"] >= asked_at_seconds  # not one that somebody else had asked for before
        except (LookupError, TypeError):
            raise damaged(runtime) from None
        if answered:
            if answer["error"] and under_systemd():
                return ConfigError.exit_code  # the daemon has said in the same journal what is wrong
            if answer["error"]:
                raise ConfigError(f"the old settings stay: {answer['error']}", answer["hint"])
            return 0
        time.sleep(LOOK_SECONDS)
    raise StabilizerError(f"the daemon has not answered within {ANSWER_SECONDS} s", f"see {command('--status')}")


def restore() -> int:
    """Give back what a killed daemon left raised; a running one is left alone.

    As ExecStopPost= it runs after each stop, and then says something only if it had something to do.
    """
    runtime = Runtime()
    if not runtime.directory.exists():
        return _do_nothing("nothing to give back")
    if not runtime.lock():
        return _do_nothing("a daemon is running; it gives back its floor itself")
    if under_systemd():
        set_up_logging("info")
    left_over = runtime.load_raised()
    baseline_hz = Floor(runtime).undo_left_over()
    if left_over is None or baseline_hz is None:
        return _do_nothing("nothing to give back")
    line = f"floor {mhz(baseline_hz)} (restored)"
    if under_systemd():
        told = fields("give-back", FLOOR_HZ=baseline_hz, NODE=left_over.node, REASON="restored")
        logger.warning("%s", line, extra=told)
    else:
        print(line)
    return 0


def _do_nothing(why: str) -> int:
    if not under_systemd():
        print(why)
    return 0
