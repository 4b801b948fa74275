"""The board as the checks see it: the kernel's devfreq node, the knobs of its driver, the service, llama.cpp."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.faults.rival import Rival
from tests.support import HIGHEST_HZ, LOWEST_HZ, wait_until
from tests.workload import Workload

NAME = "moe-gpu-stabilizer"
PROGRAM = f"/usr/local/bin/{NAME}"
SETTINGS = Path(f"/etc/default/{NAME}")
STATUS = Path(f"/run/{NAME}/status.json")
NODE = Path("/sys/class/devfreq/17000000.gpu")
PARAMETERS = Path("/sys/module/gpudevfreq/parameters")
LLAMA = Path("/opt/llama.cpp/build/bin")
BCC = Path("/opt/bcc")

# An emulated machine takes its time.
PATIENCE_SECONDS = 60

# An uninstall removes some thousand files and starts the program twice: a minute, on a busy host.
MOST_COMMAND_SECONDS = 300

# What the driver is told between two checks: no load, no cap, no failing and no slow change.
NEUTRAL = {"load_permille": 0, "demand_mhz": 0, "cap_mhz": 0, "fail": 0, "delay_us": 0}


def run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_COMMAND_SECONDS, check=False)
    assert not check or done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def until(condition: Any, what: str) -> None:
    wait_until(condition, what, PATIENCE_SECONDS)


class Gpu:
    """The devfreq node, and the driver behind it (gpudevfreq.c)."""

    def load(self) -> None:
        """Load the driver; the node is there when that returns."""
        run("modprobe", "gpudevfreq")
        assert NODE.exists()

    def unload(self) -> None:
        run("rmmod", "gpudevfreq")

    @staticmethod
    def set(**parameters: int) -> None:
        for name, value in parameters.items():
            (PARAMETERS / name).write_text(f"{value}\n")

    @staticmethod
    def read(attribute: str) -> int:
        return int((NODE / attribute).read_text())

    @property
    def min_hz(self) -> int:
        return self.read("min_freq")

    @property
    def cur_hz(self) -> int:
        return self.read("cur_freq")

    def state(self) -> str:
        names = ("min_freq", "cur_freq", "max_freq", "governor")
        return (
            ", ".join(f"{name} {(NODE / name).read_text().strip()}" for name in names) if NODE.exists() else "no node"
        )


class Service:
    """The installed service, and what its journal says since the check began."""

    def __init__(self) -> None:
        self._lines_before = 0

    def systemctl(self, *arguments: str) -> None:
        run("systemctl", *arguments, NAME)

    @staticmethod
    def show(name: str) -> str:
        return run("systemctl", "show", "--property", name, "--value", NAME).strip()

    @property
    def is_active(self) -> bool:
        return self.show("ActiveState") == "active"

    @property
    def pid(self) -> int:
        return int(self.show("MainPID"))

    def forget_journal(self) -> None:
        """What is there so far is no longer looked at."""
        self._lines_before = 0
        self._lines_before = len(self.journal())

    def journal(self, output: str = "cat") -> list[str]:
        """Its lines of this boot, those of systemd about it among them.

        They are counted, as `journalctl --after-cursor` skips one more where the cursor is at another unit's line.
        """
        said = run("journalctl", "--quiet", "--boot", f"--unit={NAME}", f"--output={output}")
        return said.splitlines()[self._lines_before :]

    def has_said(self, start: str) -> bool:
        """Does a line begin so?"""
        return any(line.startswith(start) for line in self.journal())

    def wait_for(self, start: str) -> None:
        until(lambda: self.has_said(start), f"a line that begins with {start!r}")

    def wait_until_active(self, other_than: int = 0) -> None:
        until(lambda: self.is_active and self.pid not in (0, other_than), "an active service")

    def command(self, *arguments: str, check: bool = True) -> str:
        """What the program prints; it runs as root."""
        return run(PROGRAM, *arguments, check=check)

    @staticmethod
    def status() -> dict[str, Any]:
        """What it has published: read here, as starting the program takes seconds on this machine."""
        status: dict[str, Any] = json.loads(STATUS.read_text())
        return status

    def is_troubled_by(self, start: str) -> bool:
        """Does its status name a trouble that begins so?"""
        return any(trouble.startswith(start) for trouble in self.status()["troubles"])


class Board:
    """All of it, and the few things that every check does."""

    def __init__(self) -> None:
        self.gpu = Gpu()
        self.service = Service()

    def neutral(self) -> None:
        """As a check expects it: the driver loaded, its knobs at rest, the service idle with its default settings."""
        self.service.forget_journal()
        if not NODE.exists():
            self.gpu.load()
        self.gpu.set(**NEUTRAL)
        if SETTINGS.read_text():
            self.configure()
        if not self.service.is_active:
            self.service.systemctl("start")
        until(lambda: self.service.status()["floor_hz"] is None, "an idle service")
        until(lambda: self.service.status()["node"] == str(NODE), "the node found")
        for limit, hz in (("max_freq", HIGHEST_HZ), ("min_freq", LOWEST_HZ)):
            if self.gpu.read(limit) != hz:
                (NODE / limit).write_text(f"{hz}\n")
        until(lambda: self.gpu.cur_hz == LOWEST_HZ, "a GPU at rest")
        until(lambda: not self.service.status()["troubles"], "no troubles any more")

    def configure(self, **settings: object) -> None:
        """Set these and no others, and let a running service read them."""
        SETTINGS.write_text("".join(f'STABILIZER_{key.upper()}="{value}"\n' for key, value in settings.items()))
        if self.service.is_active:
            self.service.systemctl("reload")

    @contextmanager
    def llama(self, name: str = "llama-server", *arguments: str) -> Iterator[Workload]:
        """A running stand-in for llama.cpp."""
        with Workload(LLAMA / name, *arguments) as workload:
            yield workload

    @contextmanager
    def raised(self) -> Iterator[Workload]:
        """A process that counts, inside one long call, and the floor up for it."""
        with self.llama("llama-server", "--cpu-moe") as workload:
            workload.begin("busy 600000")
            self.wait_until_raised()
            yield workload

    def wait_until_raised(self, floor_hz: int = HIGHEST_HZ) -> None:
        """Wait until min_freq is this, and the service has published that it is its floor."""
        until(lambda: self.gpu.min_hz == floor_hz, "the floor up")
        until(lambda: self.service.status()["floor_hz"] == floor_hz, "the status says so, too")

    def wait_until_given_back(self, baseline_hz: int = LOWEST_HZ) -> None:
        """Wait until the service, whose floor was up, holds nothing any more; then min_freq is this."""
        until(lambda: self.service.status()["floor_hz"] is None, "nothing held up")
        assert self.gpu.min_hz == baseline_hz, self.gpu.state()

    @contextmanager
    def rival(self, name: str) -> Iterator[Rival]:
        """Another program, of this name, that sets the node's limits."""
        with tempfile.TemporaryDirectory() as scripts, Rival(Path(scripts), NODE, name) as rival:
            yield rival

    @staticmethod
    def probes_of(pid: int) -> int:
        """How many uprobes a process holds."""
        count = 0
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                count += "[perf_event]" in os.readlink(f"/proc/{pid}/fd/{descriptor}")
        return count

    def wait_for_probes(self, count: int) -> None:
        pid = self.service.pid
        until(lambda: self.probes_of(pid) == count, f"{count} probes")
