"""What the service manager hears of us: ready, what we are doing, that we are alive (sd_notify(3))."""

from __future__ import annotations

import contextlib
import os
import re
import time

from .processes import printable

NANOSECONDS_PER_MICROSECOND = 1_000

# Of the time after which systemd takes us for hung; it recommends a half.
PING_SHARE = 3

# systemd ignores messages of more than 4,096 bytes.
STATUS_CHARACTERS = 500


class ServiceManager:
    """Tells systemd of changes, and feeds its watchdog. Does nothing where nobody listens."""

    def __init__(self) -> None:
        # An "@" stands for the NUL of an address in the abstract name space.
        self._address = re.sub("^@", "\0", os.environ.get("NOTIFY_SOCKET", ""))
        self._ping_ns = self._watchdog_ns() // PING_SHARE
        self._status = ""
        # When on_deadline() is due (CLOCK_MONOTONIC); None: no watchdog.
        self.deadline_ns: int | None = None

    def ready(self) -> None:
        """Start-up is over; the watchdog watches from here on."""
        self._tell("READY=1")
        self.on_deadline()

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    def status(self, line: str) -> None:
        """What `systemctl status` shows. It is sent when it changes: each message wakes systemd."""
        line = printable(line)  # a line break would begin another message: MAINPID=, say
        if len(line) > STATUS_CHARACTERS:
            line = f"{line[:STATUS_CHARACTERS]}... (--status has all of it)"
        if line != self._status and self._tell(f"STATUS={line}"):
            self._status = line

    def on_deadline(self) -> None:
        """The event loop turns. Called at each rebind tick, it seldom needs a wake-up of its own at the deadline."""
        if not self._ping_ns:
            return
        now_ns = time.monotonic_ns()
        if self.deadline_ns is None or self.deadline_ns - self._ping_ns // 2 <= now_ns:
            self.deadline_ns = now_ns + self._ping_ns
            self._tell("WATCHDOG=1")

    @staticmethod
    def _watchdog_ns() -> int:
        """After how long without a sign of life systemd kills us; 0: never (sd_watchdog_enabled(3))."""
        try:
            if int(os.environ.get("WATCHDOG_PID", os.getpid())) != os.getpid():
                return 0
            return max(0, int(os.environ.get("WATCHDOG_USEC", 0))) * NANOSECONDS_PER_MICROSECOND
        except ValueError:
            return 0

    def _tell(self, message: str) -> bool:
        """Send if that can be done now, and never wait: systemd-python's notify() would, for a systemd that is stuck.

        Returns whether it was sent.
        """
        if not self._address:
            return False
        import socket

        with (
            contextlib.suppress(OSError),  # whoever listened has gone, or has more to read than it can
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sender,
        ):
            sender.sendto(message.encode(), self._address)
            return True
        return False
