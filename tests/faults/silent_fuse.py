"""A FUSE file system that answers until it is told to be silent: what a dead server of any kind looks like.

    python -m tests.faults.silent_fuse DIRECTORY FILE...

mounts copies of the files on DIRECTORY. It prints a line when they are there. A line on its standard input makes it
silent: from then on it takes requests and answers none, so that whoever made one waits in the kernel and cannot even
be killed. Its end ends the connection, and with it all waiting. Protocol: linux/fuse.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR = (
    1, 2, 3, 14, 15, 17, 18, 25, 26, 27, 28, 29,
)  # fmt: skip
ACCESS, INTERRUPT, BATCH_FORGET = 34, 36, 42
WITHOUT_ANSWER = (FORGET, INTERRUPT, BATCH_FORGET)
ROOT_NODE = 1
MOST_REQUEST_BYTES = 1 << 18
MNT_DETACH = 2
# The server's own end, whatever becomes of the test: who waits for it cannot be killed.
LIFE_SECONDS = 120

REQUEST = struct.Struct("=IIQQIIII")  # length, opcode, unique, node, uid, gid, pid, padding
ANSWER = struct.Struct("=IiQ")  # length, error, unique
ATTRIBUTES = struct.Struct("=QQQQQQIIIIIIIIII")
KEPT_ENTRY = struct.Struct("=QQQQII")  # node, generation, seconds that name and attributes are good for, nanoseconds
INIT_ANSWER = struct.Struct("=IIIIHHIIHHI28x")


class Server:
    """Answers the kernel's requests about a folder of files."""

    def __init__(self, directory: str, files: dict[str, bytes]) -> None:
        self._names = list(files)
        self._contents = list(files.values())
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"silent", os.fsencode(directory), b"fuse.silent", 0, options):
            raise OSError(ctypes.get_errno(), "mount: " + os.strerror(ctypes.get_errno()))

    def serve(self) -> None:
        silent = False
        while True:
            ready, _, _ = select.select([self._device] if silent else [self._device, sys.stdin], [], [])
            if sys.stdin in ready:
                silent = True
                sys.stdin.readline()
                print("silent", flush=True)
            elif self._device in ready:
                try:
                    request = os.read(self._device, MOST_REQUEST_BYTES)
                except OSError:  # unmounted
                    return
                if not silent:
                    self._answer(request)

    def _answer(self, request: bytes) -> None:
        _length, opcode, unique, node, *_ = REQUEST.unpack_from(request)
        if opcode in WITHOUT_ANSWER:
            return
        body = self._body(opcode, node, request[REQUEST.size :])
        error, text = (-body, b"") if isinstance(body, int) else (0, body)
        os.write(self._device, ANSWER.pack(ANSWER.size + len(text), error, unique) + text)

    def _body(self, opcode: int, node: int, arguments: bytes) -> bytes | int:
        """The answer's content, or an error number."""
        if opcode == INIT:
            return INIT_ANSWER.pack(7, 31, 65536, 0, 16, 12, 65536, 1, 16, 0, 0)
        if opcode == LOOKUP:
            name = os.fsdecode(arguments.rstrip(b"\0"))
            if name not in self._names:
                return errno.ENOENT
            found = ROOT_NODE + 1 + self._names.index(name)
            return KEPT_ENTRY.pack(found, 0, 0, 0, 0, 0) + self._attributes(found)
        if opcode == GETATTR:
            return struct.pack("=QII", 0, 0, 0) + self._attributes(node)
        if opcode in (OPEN, OPENDIR):
            return struct.pack("=QII", 0, 0, 0)
        if opcode == STATFS:
            return struct.pack("=5Q4I24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0)
        if opcode == READ:
            _handle, offset, size = struct.unpack_from("=QQI", arguments)
            return self._contents[node - ROOT_NODE - 1][offset : offset + size]
        return b"" if opcode in (READDIR, RELEASE, RELEASEDIR, FLUSH, ACCESS) else errno.ENOSYS

    def _attributes(self, node: int) -> bytes:
        size = 0 if node == ROOT_NODE else len(self._contents[node - ROOT_NODE - 1])
        mode = 0o755 | (stat.S_IFDIR if node == ROOT_NODE else stat.S_IFREG)
        return ATTRIBUTES.pack(node, size, size // 512 + 1, 1, 1, 1, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


class SilentFuse:
    """Files on a mounted file system whose server is still talking."""

    def __init__(self, directory: Path, server: subprocess.Popen[str]) -> None:
        self.directory = directory
        self._server = server

    @property
    def pid(self) -> int:
        return self._server.pid

    def be_silent(self) -> None:
        """From now on nobody gets an answer."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write("\n")
        self._server.stdin.flush()
        assert self._server.stdout.readline() == "silent\n"


@contextmanager
def silent_fuse(directory: Path, *files: Path, prefix: Sequence[str] = ()) -> Iterator[SilentFuse]:
    """Mount copies of the files; at the end all who wait are let go of, and the mount is gone.

    `prefix` is a command that starts the server, in a mount namespace of its own for instance.
    """
    directory.mkdir(parents=True, exist_ok=True)
    command = [*prefix, sys.executable, "-m", "tests.faults.silent_fuse", str(directory), *map(str, files)]
    with subprocess.Popen(command, cwd=REPOSITORY, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "mounted\n"
            yield SilentFuse(directory, server)
        finally:
            server.kill()
            ctypes.CDLL(None).umount2(os.fsencode(directory), MNT_DETACH)


def main() -> None:
    signal.alarm(LIFE_SECONDS)
    directory, *paths = sys.argv[1:]
    server = Server(directory, {os.path.basename(path): Path(path).read_bytes() for path in paths})
    print("mounted", flush=True)
    server.serve()


if __name__ == "__main__":
    main()
