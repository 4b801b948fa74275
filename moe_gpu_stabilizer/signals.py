"""Signals as bytes to read, and whether a hang-up is one."""

from __future__ import annotations

import os
import signal

# SIGIO: somebody wants to write to a file that we hold a lease on.
HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGIO)


class Terminal:
    """The terminal that the daemon was started from in the foreground. When it goes, that is a SIGHUP, too."""

    def __init__(self) -> None:
        self._was_there = self._is_there()

    def has_hung_up(self) -> bool:
        return self._was_there and not self._is_there()

    @staticmethod
    def _is_there() -> bool:
        try:
            os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        except OSError:  # ENXIO: no terminal, or one that has hung up
            return False
        return True


def listen_for_signals() -> int:
    """Turn HEARD into bytes to read from the returned descriptor."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in HEARD:
        signal.signal(number, lambda _number, _frame: None)
    # Whoever started us may have left these blocked or ignored.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return reader
