"""Where lines go: the journal, with fields, under systemd; plain text on standard error elsewhere.

The fields, for `journalctl FIELD=value` and `-o json`: EVENT, FLOOR_HZ (what min_freq is now), NODE, TARGET_PID,
TARGET_COMM, REASON, LIBRARY. The man page says which event has which.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from .ration import ALWAYS_SAID, Ration, kind_of

logger = logging.getLogger(__name__)

JOURNAL_SOCKET = "/run/systemd/journal/socket"
IDENTIFIER = "moe-gpu-stabilizer"

# Priorities of syslog(3), which journalctl -p filters on.
ERROR_PRIORITY = 3
PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: ERROR_PRIORITY}


def under_systemd() -> bool:
    """Is standard error the journal? systemd names the file in JOURNAL_STREAM (systemd.exec(5))."""
    status = os.fstat(sys.stderr.fileno())
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def set_up_logging(level: str) -> None:
    """Send the program's lines to where they belong, from this level on."""
    logging.getLogger(__package__).addHandler(JournalHandler() if under_systemd() else StandardErrorHandler())
    set_log_level(level)


def set_log_level(level: str) -> None:
    """Say nothing below this level ("debug", "info", "warning", "error")."""
    logging.getLogger(__package__).setLevel(level.upper())


def say_left_out() -> None:
    """Say what was left out of the log, though nothing more of its kind comes."""
    for handler in logging.getLogger(__package__).handlers:
        if isinstance(handler, PatientHandler):
            handler.say_left_out()


class PatientHandler(logging.Handler):
    """Never waits: where nobody reads, lines are lost, not the floor. How many, it says when it can.

    Of each kind of line it says so many in a while, and how many it left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lost = 0
        self._ration = Ration()

    def has_room(self) -> bool:
        """Can a line be written without waiting?"""
        raise NotImplementedError

    def write(self, line: str, level: int, told: Mapping[str, object]) -> None:
        """Write a line, with its fields. May raise OSError."""
        raise NotImplementedError

    def emit(self, record: logging.LogRecord) -> None:
        told = getattr(record, "fields", {})
        event = told.get("EVENT", "other")
        self.say_left_out(to_the_end=event == "stop")
        kind, now_seconds = kind_of(event, str(told.get("REASON", ""))), time.monotonic()
        always = record.levelno >= logging.ERROR or event in ALWAYS_SAID
        if always or self._ration.admits(kind, record.levelno, now_seconds):
            self._say(record.getMessage(), record.levelno, told)

    def say_left_out(self, to_the_end: bool = False) -> None:
        """Say how many lines were left out, of each kind whose time is over."""
        for left_out in self._ration.left_out(time.monotonic(), to_the_end):
            self._say(str(left_out), left_out.level, {})

    def _say(self, line: str, level: int, told: Mapping[str, object]) -> None:
        if not self.has_room():
            self._lost += 1
            return
        lost, self._lost = self._lost, 0
        with contextlib.suppress(OSError):  # the reader has left, the disk is full: there is nobody to tell
            if lost:
                self.write(f"({lost} lines were lost: nobody read them)", logging.WARNING, {})
                if not self.has_room():
                    self._lost = 1
                    return
            self.write(line, level, told)


CUT = b"...\n"


class StandardErrorHandler(PatientHandler):
    """Writes to standard error: a terminal may be stopped, a pipe full."""

    def __init__(self) -> None:
        super().__init__()
        self._poller = select.poll()
        self._poller.register(sys.stderr, select.POLLOUT)

    def has_room(self) -> bool:
        return bool(self._poller.poll(0))

    def write(self, line: str, level: int, told: Mapping[str, object]) -> None:
        # A pipe that is not full has room for PIPE_BUF bytes, and would keep us waiting for more.
        text = (line + "\n").encode("utf-8", "backslashreplace")
        if len(text) > select.PIPE_BUF:
            text = text[: select.PIPE_BUF - len(CUT)] + CUT
        os.write(sys.stderr.fileno(), text)


class JournalHandler(PatientHandler):
    """Writes to the journal, which may be stopped, or stuck on its disk.

    Of what systemd-python's own handler adds, places in our code and the like, nobody would filter on anything.
    """

    def __init__(self) -> None:
        from systemd.journal import sendv

        super().__init__()
        self._send = sendv

    def has_room(self) -> bool:
        return journal_listens()

    def write(self, line: str, level: int, told: Mapping[str, object]) -> None:
        sent = {"MESSAGE": line, "PRIORITY": PRIORITIES[level], "SYSLOG_IDENTIFIER": IDENTIFIER, **told}
        self._send(*(f"{name}={value}" for name, value in sent.items()))


def journal_listens() -> bool:
    """Has the journal room for one more message? sendv() would wait for it."""
    import socket

    poller = select.poll()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.connect(JOURNAL_SOCKET)
        except OSError:  # there is none, or it starts just now
            return False
        poller.register(sender, select.POLLOUT)
        return bool(poller.poll(0))


def fields(event: str, **values: object) -> dict[str, Any]:
    """What the journal is told beside a line: logger.info(line, extra=fields("raise", FLOOR_HZ=...))."""
    return {"fields": {"EVENT": event, **{name: value for name, value in values.items() if value is not None}}}


def complain(message: str) -> None:
    """Say the one line that a program ends with; in the journal it is an error, by the prefix of sd-daemon(3)."""
    print(f"<{ERROR_PRIORITY}>{message}" if under_systemd() else message, file=sys.stderr)


class Trouble(NamedTuple):
    message: str
    at_seconds: float  # of the monotonic clock


class Troubles:
    """Says a lasting trouble once, and once more when it is over."""

    def __init__(self) -> None:
        self.lasting: dict[str, str] = {}
        self.last: Trouble | None = None
        self.changed = False  # since somebody set this to False

    def begin(self, cause: str, message: str, level: int = logging.WARNING, **values: object) -> None:
        """Say `message`, with these fields, unless it was the last thing said about this cause."""
        if self.lasting.get(cause) == message:
            return
        self.lasting[cause] = message
        self.changed = True
        if level >= logging.WARNING:
            self.last = Trouble(message, time.monotonic())
        logger.log(level, "%s", message, extra=fields("trouble", REASON=cause, **values))

    def replace(self, kind: str, messages: Mapping[str, str]) -> None:
        """The troubles of this kind with libraries are now these, by path; those that are not among them are over."""
        for cause in [cause for cause in self.lasting if cause.startswith(f"{kind} ")]:
            if cause.removeprefix(f"{kind} ") not in messages:
                del self.lasting[cause]
                self.changed = True
        for path, message in messages.items():
            self.begin(f"{kind} {path}", message, LIBRARY=path)

    def end(self, cause: str, message: str, **values: object) -> None:
        """Say `message`, with these fields, if there was trouble with this cause."""
        if self.lasting.pop(cause, None):
            self.changed = True
            logger.info("%s", message, extra=fields("trouble-over", REASON=cause, **values))
