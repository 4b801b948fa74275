"""What the demo plays on: a simulated GPU, the real daemon, a stand-in for llama.cpp, and a timeline of it all."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .devfreq import mhz
from .errors import StabilizerError
from .simulator import AVAILABLE_HZ, SimulatedGpu

SOURCE = Path(__file__).with_name("workload.c")
PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.02
READY_SECONDS = 20


class Stage:
    """The simulated GPU with its governor, the daemon, and the timeline. Everything moves while play() runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.gpu = SimulatedGpu(directory / "17000000.gpu")
        self.daemon_lines: list[str] = []
        self._daemon: subprocess.Popen[bytes] | None = None
        self._unfinished = b""
        self._began = time.monotonic()
        self._shown_hz = self.gpu.cur_hz
        print(f"\n  {'time':>7}  {'min_freq':>9}  {'cur_freq':>9}  {'who':<9} event")

    def say(self, who: str, event: str) -> None:
        """Add a line to the timeline."""
        if who == "governor":
            self._shown_hz = self.gpu.cur_hz
        passed = time.monotonic() - self._began
        print(f"  {passed:6.2f}s  {mhz(self.gpu.min_hz):>9}  {mhz(self.gpu.cur_hz):>9}  {who:<9} {event}", flush=True)

    def play(self, seconds: float, load: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let the world go on with the GPU under this load (0 to 1); end early, with True, when `until` holds."""
        deadline = time.monotonic() + seconds
        while True:
            before_hz = self.gpu.cur_hz
            self.gpu.poll(load)
            self._hear_daemon()
            if self.gpu.cur_hz == before_hz != self._shown_hz:
                # It has arrived: the steps on the way are not worth a line each.
                why = "as min_freq says" if before_hz == self.gpu.min_hz > AVAILABLE_HZ[0] else f"at {load:.0%} load"
                self.say("governor", f"went from {mhz(self._shown_hz)} to {mhz(before_hz)} {why}")
            left = deadline - time.monotonic()
            if until():
                return True
            if left <= 0:
                return False
            time.sleep(min(left, POLL_SECONDS))

    @property
    def is_settled(self) -> bool:
        """Has the governor arrived, and the timeline said so?"""
        return self._shown_hz == self.gpu.cur_hz

    def start_daemon(self, **settings: object) -> None:
        """Start the real daemon on the simulated node. Raises StabilizerError where it does not come up."""
        config = self.directory / "demo.conf"
        settings = {"devfreq": self.gpu.directory, **settings}
        config.write_text("".join(f'STABILIZER_{key.upper()}="{value}"\n' for key, value in settings.items()))
        self._daemon = subprocess.Popen(
            [sys.executable, "-m", __package__, "--config", str(config)],
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment_of(self.directory / "run"),
            preexec_fn=die_with_parent,
        )  # fmt: skip
        assert self._daemon.stderr is not None
        os.set_blocking(self._daemon.stderr.fileno(), False)
        if not self.play(READY_SECONDS, 0, lambda: self.has_said("ready: ") or self._daemon_ended()):
            raise StabilizerError("the daemon was not ready in time")
        if not self.has_said("ready: "):
            last = self.daemon_lines[-1] if self.daemon_lines else "it said nothing"
            raise StabilizerError(f"the daemon did not start: {last.removeprefix('moe-gpu-stabilizer: ')}")

    def stop_daemon(self) -> None:
        """Stop the daemon as systemd would, and hear what it says last."""
        if self._daemon is None:
            return
        self._daemon.terminate()
        self._daemon.wait()
        self.play(0, 0)
        assert self._daemon.stderr is not None
        self._daemon.stderr.close()
        self._daemon = None

    def has_said(self, words: str) -> bool:
        """Has the daemon logged a line with these words?"""
        return any(words in line for line in self.daemon_lines)

    def _daemon_ended(self) -> bool:
        return self._daemon is None or self._daemon.poll() is not None

    def _hear_daemon(self) -> None:
        if self._daemon is None or self._daemon.stderr is None:
            return
        *lines, self._unfinished = (self._unfinished + (self._daemon.stderr.read() or b"")).split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "replace")
            self.daemon_lines.append(text)
            self.say("daemon", text)


def die_with_parent() -> None:
    """In a child: be told to stop when the demo is killed (prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def environment_of(runtime: Path) -> dict[str, str]:
    """The environment for this very package, wherever it was started from, with a run-time directory of its own."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "RUNTIME_DIRECTORY": str(runtime), "PYTHONPATH": os.pathsep.join(paths)}


class StandIn:
    """A small program that exports and calls the functions of libllama. See workload.c for its commands."""

    def __init__(self, program: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.pid = self._process.pid

    def do(self, command: str) -> None:
        """Give a command and wait until it is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command.encode() + b"\n")
        self._process.stdout.readline()

    def close(self) -> None:
        with self._process:
            self._process.kill()


def build_stand_in(directory: Path) -> tuple[Path, Path]:
    """Compile workload.c and return (library, program). Raises StabilizerError where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise StabilizerError("the demo needs a C compiler for its stand-in", "apt-get install gcc libc6-dev")
    library, program = directory / "libllama.so", directory / "llama-demo"
    compile_c(compiler, "-shared", "-fPIC", "-DPART_LIBRARY", "-o", str(library))
    linked = ("-Wl,--no-as-needed", str(library), f"-Wl,-rpath,{directory}")
    compile_c(compiler, "-DPART_PROGRAM", "-o", str(program), *linked, "-pthread")
    return library, program


def compile_c(compiler: str, *arguments: str) -> None:
    command: Sequence[str] = [compiler, "-O2", str(SOURCE), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise StabilizerError(f"the demo's C program does not compile: {last}", "apt-get install gcc libc6-dev")
