"""A machine to install on: a real systemd as PID 1 in a container, with the real kernel and a fake GPU node.

The container's / is the machine's own one with a layer in memory above it. It has the machine's network and kernel, and
process ids, mounts and /run of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tests.support import PlainNode, wait_until
from tests.system.node import make_node
from tests.system.snapshot import Snapshot, changes

STAGE = Path(__file__).resolve().parent / "stage.py"
BOOT_SECONDS = 120
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}


class BootError(Exception):
    """The container did not come up; the text has its console."""


class Container:
    """Use it in a with statement. Inside, the source tree is at /mnt/src, read-only.

    `node` is the GPU's devfreq directory as the machine itself sees it, with plain files: what the container's
    /sys/class/devfreq/17000000.gpu leads to.
    """

    node: PlainNode

    def __init__(self, source: Path | None = None) -> None:
        self.name = f"moe-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._source = source
        self._work: Path | None = None
        self._stage: subprocess.Popen[bytes] | None = None

    # Up and down.

    def boot(self) -> Container:
        """Start, and return when systemd says "running". Raises BootError with the console."""
        self._work = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        try:
            self.node = make_node(self._work)
            source = [] if self._source is None else [str(self._source)]
            command = [
                *("setpriv", "--pdeathsig", "TERM", "unshare", "--mount", "--propagation", "private"),
                *(sys.executable, "-I", str(STAGE), self.name, str(self._work), *source),
            ]
            with (self._work / "console").open("wb") as console:
                self._stage = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True
                )
            self._wait_for_boot()
        except BaseException:
            self.close()
            raise
        return self

    def _wait_for_boot(self) -> None:
        deadline = time.monotonic() + BOOT_SECONDS
        state = "not started"
        while time.monotonic() < deadline and self._runs() and state not in ("running", "degraded"):
            time.sleep(0.1)
            if self._leader():
                state = self.run("systemctl", "is-system-running", check=False).stdout.strip() or state
        if state != "running":
            raise BootError(f"container {self.name} is {state} instead of running\n{self._what_failed()}")

    def _what_failed(self) -> str:
        shown = [f"--- console of {self.name}\n{self.console}"]
        if self._leader():
            for command in (("systemctl", "--failed"), ("journalctl", "--boot", "--priority=warning", "--no-pager")):
                shown.append(f"--- {' '.join(command)}\n{self.run(*command, check=False).stdout}")
        return "\n".join(shown)

    def reboot(self) -> None:
        """Shut down cleanly and boot again; the file tree stays."""
        before = self.leader
        self.run("systemctl", "reboot", check=False)
        self.wait_for(lambda: self._leader() not in (None, before) or not self._runs(), "the reboot", BOOT_SECONDS)
        self._wait_for_boot()

    def power_off(self) -> None:
        """Shut down cleanly, and return when all of it has ended. The node can still be read."""
        self.run("systemctl", "poweroff", check=False)
        self.wait_for(lambda: not self._runs(), "the shutdown", BOOT_SECONDS)

    def close(self) -> None:
        """End all at once, as if the power went, and remove all traces. Does nothing the second time."""
        if self._stage is not None:
            self._stage.terminate()
            try:
                status = self._stage.wait(60)
            except subprocess.TimeoutExpired:
                self._stage.kill()
                self._stage.wait()
                raise AssertionError(f"container {self.name} did not go\n{self.console}") from None
            assert status in (0, -signal.SIGTERM), f"container {self.name} left traces\n{self.console}"
        self._stage = None
        if self._work is not None and self._work.exists():
            shutil.rmtree(self._work)

    def __enter__(self) -> Container:
        return self.boot()

    def __exit__(self, _k: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        self.close()

    # Inside.

    def _runs(self) -> bool:
        """Is it starting, up or shutting down?"""
        if self._stage is None or self._work is None or self._stage.poll() is not None:
            return False
        return not (self._work / "ended").exists()

    def _leader(self) -> int | None:
        """The container's PID 1, as the machine itself numbers it; None where it has not come so far."""
        if self._stage is None:
            return None
        for nspawn in _children(self._stage.pid):
            for child in _children(nspawn):
                try:
                    status = Path(f"/proc/{child}/status").read_text()
                except OSError:  # it has ended since
                    continue
                # Before it becomes systemd, it is not at home in the container's / yet.
                if re.search(r"^Name:\tsystemd$", status, re.M) and re.search(r"^NSpid:.*\t1$", status, re.M):
                    return child
        return None

    @property
    def leader(self) -> int:
        leader = self._leader()
        assert leader is not None, f"container {self.name} is not running\n{self.console}"
        return leader

    @property
    def console(self) -> str:
        """What systemd-nspawn and systemd said, and the whole journal, from the first boot on; also after the end."""
        return (self._work / "console").read_bytes().decode(errors="replace").replace("\r", "") if self._work else ""

    def path(self, inside: str) -> Path:
        """A path of the container, as the machine itself reaches it. Absolute symlinks on the way lead astray."""
        return Path(f"/proc/{self.leader}/root") / inside.lstrip("/")

    def enter(self, *command: object, as_user: str | None = None) -> list[str]:
        """The command line that runs this one inside, with a clean environment. It ends with its nsenter."""
        namespaces = ("--mount", "--uts", "--ipc", "--pid", "--cgroup", "--root", "--wd")
        user = []
        if as_user is not None:
            group = self.run("id", "--group", as_user).stdout.strip()
            user = ["--reuid", as_user, "--regid", group, "--init-groups", "--reset-env"]
        environment = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
        return [
            *("nsenter", "--target", str(self.leader), *namespaces, "--", "env", "-i", *environment),
            *("setpriv", "--pdeathsig", "KILL", *user, "--", *map(str, command)),
        ]

    def run(
        self,
        *command: object,
        check: bool = True,
        input: str | None = None,  # noqa: A002 (as subprocess calls it)
        as_user: str | None = None,
        seconds: float = 240,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside and return what it wrote; a failure shows all of that. It has `seconds` of time."""
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        process = subprocess.Popen(
            self.enter(*command, as_user=as_user), start_new_session=True, text=True,
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        shown = " ".join(map(str, command))
        try:
            output, errors = process.communicate(input, seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # with the command's own children
            output, errors = process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise AssertionError(f"not within {seconds:g} s: {shown}\n{output}{errors}") from None
            raise
        assert not check or process.returncode == 0, f"exit {process.returncode}: {shown}\n{output}{errors}"
        return subprocess.CompletedProcess(list(map(str, command)), process.returncode, output, errors)

    def show(self, unit: str, name: str) -> str:
        """One property of a unit, as systemctl show has it."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).stdout.strip()

    def journal(self, unit: str | None = None, *options: str) -> str:
        """The journal, of a unit or all of it; `options` are journalctl's."""
        self.run("journalctl", "--sync")
        of_unit = () if unit is None else ("--unit", unit)
        return self.run("journalctl", "--no-pager", "--quiet", *of_unit, *options).stdout

    def journal_entries(self, unit: str | None = None, *options: str) -> list[dict[str, object]]:
        """The same with all fields."""
        return [json.loads(line) for line in self.journal(unit, "--output=json", "--all", *options).splitlines()]

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = 30) -> None:
        """Like wait_until, for conditions that cost a process each time."""

        def patient() -> bool:
            if condition():
                return True
            time.sleep(0.1)
            return False

        wait_until(patient, what, seconds)

    def wait_for_journal(self, unit: str, pattern: str, seconds: float = 30) -> None:
        """Wait for a line of a unit that this regular expression matches somewhere."""
        what = f"a line like {pattern!r} in the journal of {unit}"
        self.wait_for(lambda: re.search(pattern, self.journal(unit, "--output=cat"), re.M), what, seconds)

    def uprobes(self, pid: int | str) -> int:
        """How many perf events a process holds; `pid` as the container numbers it. Ours are one for each uprobe."""
        links = self.path(f"/proc/{pid}/fd")
        return sum(os.readlink(links / name) == "anon_inode:[perf_event]" for name in os.listdir(links))

    def snapshot(self) -> Snapshot:
        """What differs now from the machine itself, without what systemd, journald and apt write on their own."""
        assert self._stage is not None
        return changes(Path(f"/proc/{self._stage.pid}/root{self._work}/layers/upper"))


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []
