"""Read how a process was launched, in a child: the kernel may keep whoever reads that waiting for ever.

/proc/PID/cmdline and environ are read out of the process's own memory, under the lock of its address space. A thread of
it that waits for a page of a FUSE file, or of a disk that went with the network, holds that lock, and so can any user
(the known trap of ps). A child that waits so can be killed, a thread of ours could not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from dataclasses import dataclass
from pathlib import Path

from .isolated import end_child
from .processes import PROC, ProcessVanishedError, is_dead
from .settings import NANOSECONDS

# A few tenths of a millisecond and no memory of ours: two thirds faster than a fork of this program. It opens the files
# itself, for that may wait, too.
READER = "/bin/cat"

# Between the two files, it copies what is not known before: no process can have that in its arguments.
TOKEN_BYTES = 16

# execve() takes a quarter of the stack limit for both, 2 MB by default, and never more than 6 MB.
MOST_LAUNCH_BYTES = 8 << 20
CHUNK_BYTES = 1 << 16

# For a board that reads a model from its disk, and the reader's own code after it.
READ_NS = 2 * NANOSECONDS

NANOSECONDS_PER_MILLISECOND = 1_000_000


class UnreadableError(Exception):
    """The reader was kept waiting."""


@dataclass(frozen=True)
class Launch:
    """How a process was started: NUL-ended strings, as the kernel keeps them."""

    cmdline: bytes
    environ: bytes


class LaunchReader:
    """A child that reads. fileno() becomes readable when something of it has arrived; call receive() then."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        """Start it. Raises OSError: out of descriptors or processes; PermissionError: another user's, without root.

        Raises ProcessVanishedError where the process has ended.
        """
        self._directory = living_thread(proc / str(pid))
        if not os.access(self._directory / "environ", os.R_OK):
            if is_dead(self._directory):
                raise ProcessVanishedError
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self._directory / "environ"))
        self.deadline_ns = time.monotonic_ns() + READ_NS
        self._token = os.urandom(TOKEN_BYTES)
        self._received = bytearray()
        self._complete = False
        self._reader, writer = os.pipe()
        try:
            self._pid = _start(self._directory, self._token, writer)
        except OSError:
            os.close(self._reader)
            raise
        finally:
            os.close(writer)

    def fileno(self) -> int:
        return self._reader

    def receive(self) -> bool:
        """Take what has arrived; wait for some if nothing has. True when there is no more to come."""
        chunk = os.read(self._reader, CHUNK_BYTES)
        self._received += chunk
        # As much as no honest launch has is enough of it.
        self._complete = not chunk or len(self._received) >= MOST_LAUNCH_BYTES
        return self._complete

    def end(self) -> Launch:
        """End the child and return what it has read.

        Raises UnreadableError where that is not all, ProcessVanishedError where the process has ended meanwhile.
        """
        os.close(self._reader)
        end_child(self._pid)
        if not self._complete:
            raise UnreadableError
        cmdline, _, environ = self._received.partition(self._token)
        if not cmdline and not environ and is_dead(self._directory):
            raise ProcessVanishedError
        return Launch(bytes(cmdline), bytes(environ))


def launch_of(pid: int, proc: Path = PROC) -> Launch:
    """Return argv and environment; wait for them for READ_NS at most.

    Raises ProcessVanishedError, UnreadableError, and PermissionError for another user's without root.
    """
    reader = LaunchReader(pid, proc)
    try:
        poller = select.poll()
        poller.register(reader, select.POLLIN)
        while poller.poll(max(0, (reader.deadline_ns - time.monotonic_ns()) / NANOSECONDS_PER_MILLISECOND)):
            if reader.receive():
                break
    except BaseException:
        with contextlib.suppress(UnreadableError, ProcessVanishedError):
            reader.end()
        raise
    return reader.end()


def _start(directory: Path, token: bytes, writer: int) -> int:
    """Start a child that writes cmdline, the token and environ; return its pid. Raises OSError."""
    with contextlib.ExitStack() as after:
        standard_input, token_writer = os.pipe()
        after.callback(os.close, standard_input)
        after.callback(os.close, token_writer)
        os.write(token_writer, token)
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        after.callback(os.close, nowhere)
        return os.posix_spawn(
            READER,
            [READER, str(directory / "cmdline"), "-", str(directory / "environ")],
            {},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, standard_input, 0),
                (os.POSIX_SPAWN_DUP2, writer, 1),
                (os.POSIX_SPAWN_DUP2, nowhere, 2),
            ],
        )


def living_thread(directory: Path) -> Path:
    """Of a process whose main thread has ended and left others behind, one of those: the dead one has no memory."""
    if not is_dead(directory):
        return directory
    try:
        threads = sorted(directory.joinpath("task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessVanishedError from None
    return next((thread for thread in threads if not is_dead(thread)), directory)
