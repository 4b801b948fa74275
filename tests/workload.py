"""The C stand-in for llama.cpp (workload.c), built and driven by the tests."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.support import wait_until

SOURCE = Path(__file__).resolve().parent.parent / "moe_gpu_stabilizer" / "workload.c"
ANSWER_SECONDS = 30


def compile_workload(output: Path, *arguments: str) -> Path:
    """Compile workload.c with these arguments of the C compiler; the file is new, never a rewritten one."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    subprocess.run(["cc", "-O2", "-o", output, SOURCE, *arguments], check=True)
    return output


def build_library(path: Path, *arguments: str) -> Path:
    """Build libllama under this name."""
    return compile_workload(path, "-shared", "-fPIC", "-DPART_LIBRARY", f"-Wl,-soname,{path.name}", *arguments)


def build_ggml(directory: Path, suffix: str = ".so") -> tuple[Path, Path]:
    """Build libggml-cpu and libggml-base with this end of their names."""
    cpu = build_part(directory / f"libggml-cpu{suffix}", "-DPART_GGML_CPU")
    return cpu, build_part(directory / f"libggml-base{suffix}", "-DPART_GGML_BASE")


def build_part(path: Path, *arguments: str) -> Path:
    return compile_workload(path, "-shared", "-fPIC", f"-Wl,-soname,{path.name}", *arguments)


def build_program(path: Path, *libraries: Path) -> Path:
    """Build the program that uses these libraries and finds them where they lie now."""
    names = [word for library in libraries for word in (str(library), f"-Wl,-rpath,{library.parent}")]
    return compile_workload(path, "-DPART_PROGRAM", "-Wl,--no-as-needed", *names, "-pthread")


def build_static(path: Path, *arguments: str) -> Path:
    """Build a program that carries the functions itself."""
    return compile_workload(path, "-static", "-DPART_PROGRAM", "-DPART_LIBRARY", *arguments, "-pthread")


def copy_with_libraries(program: Path, root: Path) -> None:
    """Copy a program and all that it loads to the same paths below another root."""
    needed = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    paths = [word for line in needed.splitlines() for word in line.split() if word.startswith("/")]
    for path in [str(program), *paths]:
        copy = root / path.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)


class Workload:
    """A running workload. `pid` is what the tests started; `own_pid` what it calls itself, in its own pid namespace."""

    def __init__(self, program: Path, *arguments: str, prefix: Sequence[str] = (), **options: object) -> None:
        """`prefix` is a command that starts the program; `options` are Popen's."""
        self.process = subprocess.Popen(  # type: ignore[call-overload]
            [*prefix, str(program), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, **options
        )
        self.pid: int = self.process.pid
        # The answer says that the program runs: right after Popen() the kernel may still be busy with its exec.
        self.own_pid = int(self.do("pid"))

    def begin(self, command: str) -> None:
        """Give a command and do not wait for its end."""
        self.process.stdin.write(command.encode() + b"\n")

    def finish(self) -> str:
        """Wait for the answer to a command, and return it."""
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_SECONDS)
        assert ready, f"the workload gave no answer within {ANSWER_SECONDS} s"
        answer: bytes = self.process.stdout.readline()
        assert answer, f"the workload ended: {self.process.wait()}"
        return answer.decode().strip()

    def do(self, command: str) -> str:
        """Give a command and wait for its end."""
        self.begin(command)
        return self.finish()

    def become(self, command: str) -> None:
        """Exec another program, and wait until it is that: what is written earlier, the old one would read."""
        before = self.cmdline
        self.begin(f"exec {command}")
        wait_until(lambda: self.cmdline not in (before, b""), f"the exec of {command}")

    @property
    def cmdline(self) -> bytes:
        return Path(f"/proc/{self.pid}/cmdline").read_bytes()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Workload:
        return self

    def __exit__(self, _k: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


def code_in_memory(pid: int, library: Path, offset: int, size_bytes: int = 4) -> bytes:
    """Read what process `pid` has in memory at a file offset of `library`: a breakpoint shows there."""
    file = os.stat(library)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and "x" in fields[1] and int(fields[4]) == file.st_ino:
            start = int(fields[0].split("-")[0], 16)
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                memory.seek(start + offset - int(fields[2], 16))
                return memory.read(size_bytes)
    raise AssertionError(f"process {pid} does not map {library}")
