"""What every kind of test uses: waiting on conditions, a plain directory as a GPU node, the real daemon."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

REPOSITORY = Path(__file__).resolve().parent.parent
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


@contextmanager
def alone_with_real_flags() -> Iterator[None]:
    """Tests whose processes carry --cpu-moe itself, or take turns, run one at a time: every daemon here sees them."""
    with (Path(tempfile.gettempdir()) / "moe-gpu-stabilizer-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def only_child(pid: int) -> int:
    """The process that `pid` has started, as unshare and its like start one."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


class PlainNode:
    """A directory with the files of a devfreq node, and nothing behind them."""

    def __init__(self, directory: Path, min_hz: int = LOWEST_HZ, max_hz: int = HIGHEST_HZ) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        self.write("min_freq", min_hz)
        self.write("max_freq", max_hz)
        self.write("cur_freq", max_hz)  # a clock that is always high enough: see test_devices.py
        self.write("governor", "nvhost_podgov")
        self.write("available_frequencies", " ".join(map(str, LADDER_HZ)))

    def write(self, name: str, value: object) -> None:
        (self.directory / name).write_text(f"{value}\n")

    def refuse(self) -> None:
        """Let min_freq be neither read nor written from now on: it leads to a directory. It is never missing."""
        os.link(self.directory / "min_freq", self.directory / "aside")
        (self.directory / "link").symlink_to(self.directory)
        os.replace(self.directory / "link", self.directory / "min_freq")

    def relent(self) -> None:
        """Be as it was before refuse()."""
        os.replace(self.directory / "aside", self.directory / "min_freq")

    @property
    def min_hz(self) -> int:
        """The floor now; a file that is just being rewritten is read again."""
        deadline = time.monotonic() + 10
        while not (text := (self.directory / "min_freq").read_text().strip()):
            assert time.monotonic() < deadline, "min_freq stays empty"
        return int(text)


class RunningDaemon:
    """The real daemon as a child process, with a configuration, run-time directory and log of its own."""

    def __init__(
        self,
        directory: Path,
        node: Path | None,
        package_root: Path = REPOSITORY,
        prefix: Sequence[str] = (),
        **settings: object,
    ) -> None:
        """`settings` are keys of the configuration, without their prefix (hold_seconds=1).

        `prefix` is a command that starts the daemon.
        """
        self._package_root = package_root
        self._prefix = prefix
        self._settings = settings
        self.runtime = directory / "run"
        self.config = directory / "moe-gpu-stabilizer.conf"
        self.log_path = directory / "daemon.log"
        directory.mkdir(parents=True, exist_ok=True)
        self.configure(**({} if node is None else {"devfreq": node}), **settings)
        self.process: subprocess.Popen[bytes] | None = None
        self._environment = {**os.environ, "RUNTIME_DIRECTORY": str(self.runtime)}

    def configure(self, **settings: object) -> None:
        """Write the configuration; signal HUP to a running daemon to make it read it."""
        self.config.write_text("".join(f'STABILIZER_{key.upper()}="{value}"\n' for key, value in settings.items()))

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start the daemon, and do not wait until it is ready."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._prefix, sys.executable, "-m", "moe_gpu_stabilizer", "--config", str(self.config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, cwd=self._package_root,
            )  # fmt: skip
        return self.process

    def start(self) -> RunningDaemon:
        starts = self.log.count("ready: ") if self.log_path.exists() else 0
        self.spawn()
        # Where other tests have many probes taken out at the same time, the kernel lets ours wait.
        wait_until(lambda: self.log.count("ready: ") > starts or self._ended(), f"ready\n{self.log}", seconds=60)
        assert not self._ended(), f"the daemon ended:\n{self.log}"
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

    def command(self, *arguments: str, prefix: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run the program with these arguments beside the daemon, with the same run-time directory."""
        return subprocess.run(
            [*prefix, sys.executable, "-m", "moe_gpu_stabilizer", *arguments],
            capture_output=True, text=True, timeout=60, check=False, env=self._environment, cwd=self._package_root,
        )  # fmt: skip

    @property
    def flag(self) -> str:
        """The first flag that counts in this daemon's settings."""
        return str(self._settings["moe_flags"]).split()[0]

    @property
    def settings(self) -> dict[str, object]:
        """The keys of its configuration, without their prefix, as it was started with."""
        return dict(self._settings)

    @property
    def times_woken(self) -> int:
        """How often the daemon has gone to sleep since it started: once per wake-up."""
        return int(self._said_by_kernel("voluntary_ctxt_switches"))

    def wait_until_quiet(self) -> None:
        """Wait until the daemon has slept for half a second: what it does after its start is done."""
        slept_since, woken = time.monotonic(), -1
        while time.monotonic() < slept_since + 0.5:
            if woken != self.times_woken:
                slept_since, woken = time.monotonic(), self.times_woken
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        """The daemon's process id: the prefix's only child where there is one."""
        assert self.process is not None
        return only_child(self.process.pid) if self._prefix else self.process.pid

    def _said_by_kernel(self, field: str) -> str:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)[field]

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def freeze(self) -> None:
        """Stop it as Ctrl-Z does, until SIGCONT."""
        self.send(signal.SIGSTOP)
        wait_until(lambda: self._said_by_kernel("State").startswith("T"), "the daemon stopped")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the daemon and return its exit status (negative: the signal that killed it)."""
        assert self.process is not None
        if self.process.poll() is None:
            self.send(number)
        try:
            # With as many libraries as it may watch, the kernel takes ten seconds to let go of their probes.
            return self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._kill()
            raise AssertionError(f"the daemon did not leave within 30 s:\n{self.log}") from None

    def _kill(self) -> None:
        """Leave nothing behind where a test has failed: the prefix's child first."""
        if self.process is None or self.process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError, ValueError):  # it has gone, or was never started
            os.kill(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> RunningDaemon:
        try:
            return self.start()
        except BaseException:
            self._kill()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(f"--- the daemon's log ({self.log_path})\n{self.log}")
        self.stop()
        assert kind is not None or "internal error" not in self.log, f"a fault of the daemon:\n{self.log}"
