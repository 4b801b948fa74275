"""Builds and runs what any user's program may do beside the daemon (hostile.c)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

SOURCE = Path(__file__).with_name("hostile.c")
READY_SECONDS = 60


def build_hostile(path: Path, library: Path) -> Path:
    """Build it against this libllama, which it finds where that lies now."""
    words = ["-Wl,--no-as-needed", str(library), f"-Wl,-rpath,{library.parent}", "-pthread"]
    subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-o", path, SOURCE, *words], check=True)
    return path


def build_hostile_alone(path: Path) -> Path:
    """Build it with a llama_process() that nobody finds, let alone probes."""
    words = ["-Dllama_process=nothing", "-DALONE", "-pthread"]
    subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-o", path, SOURCE, *words], check=True)
    return path


class Hostile:
    """One of hostile.c's modes at work, with all that it starts in a process group of its own; killed at the end."""

    def __init__(self, program: Path, *arguments: str | int, prefix: Sequence[str] = (), **options: object) -> None:
        """`prefix` is a command that starts the program; `options` are Popen's."""
        self.process = subprocess.Popen(  # type: ignore[call-overload]
            [*prefix, str(program), *map(str, arguments)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0, start_new_session=True, **options,
        )  # fmt: skip
        self.pid: int = self.process.pid

    def wait_until_ready(self) -> None:
        """It has done, or does, what it is told to."""
        readable, _, _ = select.select([self.process.stdout], [], [], READY_SECONDS)
        assert readable, f"not ready within {READY_SECONDS} s"
        answer = self.process.stdout.readline()
        assert answer == b"ready\n", f"it ended with {self.process.wait()}"

    @property
    def group(self) -> list[int]:
        """The process ids of all that it has started and that is alive, itself included."""
        members = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state, _parent, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if int(group) == self.pid and state != "Z":
                    members.append(int(entry.name))
        return members

    def kill(self) -> None:
        """Kill them all at once."""
        os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Hostile:
        return self

    def __exit__(self, _k: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
