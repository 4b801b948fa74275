"""Where lines go: the journal, with fields, under systemd; plain text on standard error elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

IDENTIFIER = "moe-gpu-stabilizer"


def under_systemd() -> bool:
    """Is standard error the journal? systemd names the file in JOURNAL_STREAM (systemd.exec(5))."""
    status = os.fstat(sys.stderr.fileno())
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def set_up_logging(level: str) -> None:
    """Send the program's lines to where they belong, from this level on."""
    logging.getLogger(__package__).addHandler(_journal_handler() if under_systemd() else PatientHandler())
    set_log_level(level)


def set_log_level(level: str) -> None:
    """Say nothing below this level ("debug", "info", "warning", "error")."""
    logging.getLogger(__package__).setLevel(level.upper())


class PatientHandler(logging.Handler):
    """Writes to standard error, and never waits: a stopped terminal or a full pipe loses lines, not the floor."""

    def __init__(self) -> None:
        super().__init__()
        self._lost = 0
        self._poller = select.poll()
        self._poller.register(sys.stderr, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        if not self._poller.poll(0):
            self._lost += 1
            return
        lost, self._lost = self._lost, 0
        with contextlib.suppress(OSError):  # the reader has left, the disk is full: there is nobody to tell
            if lost:
                sys.stderr.write(f"({lost} lines were lost: nobody read them)\n")
            sys.stderr.write(record.getMessage() + "\n")
            sys.stderr.flush()


def _journal_handler() -> logging.Handler:
    from systemd.journal import JournalHandler

    handler: logging.Handler = JournalHandler(SYSLOG_IDENTIFIER=IDENTIFIER)
    return handler


def notify(**state: Any) -> None:
    """Tell systemd of a change (sd_notify(3)): READY=1, STATUS="idle". Does nothing where nobody listens."""
    if not os.environ.get("NOTIFY_SOCKET"):
        return
    from systemd.daemon import notify as sd_notify

    sd_notify("\n".join(f"{key}={value}" for key, value in state.items()))


class Troubles:
    """Says a lasting trouble once, and once more when it is over."""

    def __init__(self) -> None:
        self.lasting: dict[str, str] = {}

    def begin(self, cause: str, message: str, level: int = logging.WARNING) -> None:
        """Say `message`, unless it was the last thing said about this cause."""
        if self.lasting.get(cause) != message:
            self.lasting[cause] = message
            logger.log(level, "%s", message)

    def replace(self, kind: str, messages: Mapping[str, str]) -> None:
        """The troubles of this kind are now these, by what they are about; those that are not among them are over."""
        for cause in [cause for cause in self.lasting if cause.startswith(f"{kind} ")]:
            if cause.removeprefix(f"{kind} ") not in messages:
                del self.lasting[cause]
        for about, message in messages.items():
            self.begin(f"{kind} {about}", message)

    def end(self, cause: str, message: str) -> None:
        """Say `message` if there was trouble with this cause."""
        if self.lasting.pop(cause, None):
            logger.info("%s", message)
