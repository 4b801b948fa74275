"""What every kind of test uses: waiting on conditions, a plain directory as a GPU node, the real daemon."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

LOWEST_HZ, HIGHEST_HZ = 306_000_000, 1_020_000_000
LADDER_HZ = (306_000_000, 408_000_000, 510_000_000, 612_000_000, 714_000_000, 816_000_000, 918_000_000, 1_020_000_000)


def wait_until(condition: Callable[[], object], what: str, seconds: float = 15.0) -> None:
    """Return as soon as the condition holds; fail with `what` and the time when it does not within the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


def stays(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Fail as soon as the condition does not hold; return after `seconds` of it holding."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition(), f"did not stay for {seconds:g} s: {what}"
        time.sleep(0.01)


class PlainNode:
    """A directory with the files of a devfreq node, and nothing behind them."""

    def __init__(self, directory: Path, min_hz: int = LOWEST_HZ, max_hz: int = HIGHEST_HZ) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        self.write("min_freq", min_hz)
        self.write("max_freq", max_hz)
        self.write("cur_freq", min_hz)
        self.write("governor", "nvhost_podgov")
        self.write("available_frequencies", " ".join(map(str, LADDER_HZ)))

    def write(self, name: str, value: object) -> None:
        (self.directory / name).write_text(f"{value}\n")

    @property
    def min_hz(self) -> int:
        """The floor now; a file that is just being rewritten is read again."""
        while True:
            text = (self.directory / "min_freq").read_text().strip()
            if text:
                return int(text)


class RunningDaemon:
    """The real daemon as a child process, with a configuration, run-time directory and log of its own."""

    def __init__(self, directory: Path, node: Path | str | None, **settings: object) -> None:
        """`settings` are keys of the configuration without their prefix: hold_seconds=1."""
        self.directory = directory
        self.runtime = directory / "run"
        self.config = directory / "moe-gpu-stabilizer.conf"
        self.log_path = directory / "daemon.log"
        directory.mkdir(parents=True, exist_ok=True)
        self.configure(**({} if node is None else {"devfreq": node}), **settings)
        self.process: subprocess.Popen[bytes] | None = None

    def configure(self, **settings: object) -> None:
        """Write the configuration; signal HUP to a running daemon to make it read it."""
        self.config.write_text("".join(f'STABILIZER_{key.upper()}="{value}"\n' for key, value in settings.items()))

    def start(self) -> RunningDaemon:
        environment = {**os.environ, "RUNTIME_DIRECTORY": str(self.runtime), "PYTHONUNBUFFERED": "1"}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moe_gpu_stabilizer", "--config", str(self.config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            )  # fmt: skip
        self.wait_for_log(r"^ready: ")
        return self

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def has_logged(self, pattern: str) -> bool:
        """Is there a line that this regular expression matches somewhere?"""
        return re.search(pattern, self.log, re.MULTILINE) is not None

    def wait_for_log(self, pattern: str, seconds: float = 15.0) -> None:
        wait_until(
            lambda: self.has_logged(pattern) or self._ended(), f"a log line like {pattern!r}\n{self.log}", seconds
        )
        assert self.has_logged(pattern), f"the daemon ended without a line like {pattern!r}:\n{self.log}"

    def _ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the daemon and return its exit status (negative: the signal that killed it)."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the daemon did not leave within 10 s:\n{self.log}") from None

    def __enter__(self) -> RunningDaemon:
        try:
            return self.start()
        except BaseException:
            if self.process:
                self.process.kill()
                self.process.wait()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(f"--- the daemon's log ({self.log_path})\n{self.log}")
        self.stop()
