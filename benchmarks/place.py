"""Where it is measured: a stand-in for llama.cpp, a node, and the two that watch it: the daemon, and the yardstick."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from moe_gpu_stabilizer.daemon import WAKES_PER_HOLD
from moe_gpu_stabilizer.settings import NANOSECONDS
from moe_gpu_stabilizer.uprobes import Probe
from tests.support import HIGHEST_HZ, LOWEST_HZ, REPOSITORY, PlainNode, RunningDaemon, only_child, wait_until
from tests.workload import Workload, build_ggml, build_library, build_program

from .bare import offsets_of

# /run is in memory on a real system, and so is sysfs.
IN_MEMORY = Path("/dev/shm")

# Nothing else on the machine may count.
HOLD_SECONDS = 0.25
ENDS_SECONDS = 60
ANSWERS_SECONDS = 2  # or it has not heard
LINES_OF_A_FAILURE = 12
CPU_CLOCK_OF_PROCESS = 2  # CPUCLOCK_SCHED, of all threads


class Place:
    """The stand-in's files, one flag that counts, and how to start what is measured. Made by make_place()."""

    def __init__(self, directory: Path, memory: Path) -> None:
        self.directory = directory
        self.memory = memory
        self.flag = f"--cpu-moe-{uuid.uuid4().hex[:8]}"
        here = directory / "llama"
        # No other daemon on the machine looks for these names.
        self.library = build_library(here / "probed-llama.so")
        self.ggml = build_ggml(here, "-probed.so")
        self.program = build_program(here / "llama-server", self.library, *self.ggml)
        self._made = 0

    @property
    def libraries(self) -> tuple[Path, ...]:
        return self.library, *self.ggml

    def new_directory(self) -> Path:
        """A directory in memory."""
        self._made += 1
        directory = self.memory / str(self._made)
        directory.mkdir()
        return directory

    def workload(self, counts: bool) -> Workload:
        return Workload(self.program, *([self.flag] if counts else []))

    @contextmanager
    def watched_by_daemon(self, **settings: object) -> Iterator[Watcher]:
        """The daemon, with default settings but for what counts and how long it holds."""
        directory = self.new_directory()
        node = PlainNode(directory / "17000000.gpu")
        wanted: dict[str, Any] = {
            "libraries": ":".join(map(str, self.libraries)), "moe_flags": self.flag, "hold_seconds": HOLD_SECONDS,
            **settings,
        }  # fmt: skip
        daemon = RunningDaemon(directory / "daemon", node.directory, **wanted)
        try:
            daemon.start()
            os.setpriority(os.PRIO_PROCESS, daemon.pid, nice_of_unit())
            daemon.wait_until_quiet()
            yield Watcher(node, (daemon.pid,))
        except BaseException:
            print("the end of the daemon's log:", *daemon.log.splitlines()[-LINES_OF_A_FAILURE:], sep="\n  ")
            raise
        finally:
            assert daemon.process is not None
            daemon.process.terminate()
            # Longer than RunningDaemon.stop() would wait: on a machine with other llama.cpp it has more to let go of.
            daemon.process.wait(ENDS_SECONDS)

    @contextmanager
    def watched_by_least(self) -> Iterator[Watcher]:
        """A C program that does nothing but write: what is left when all that the daemon has to know is taken away."""
        directory = self.new_directory()
        node = PlainNode(directory / "17000000.gpu")
        program = self.directory / "least"
        if not program.exists():
            subprocess.run(["cc", "-O2", "-Wall", "-o", program, Path(__file__).with_name("least.c")], check=True)
        with ExitStack() as stack:
            probe = Probe(round(HOLD_SECONDS * NANOSECONDS) // WAKES_PER_HOLD)
            stack.callback(probe.close)
            for function, offset in offsets_of(self.library).items():
                stack.callback(probe.attach(str(self.library), offset, function).close)
            ring, hold_ms = probe.fileno(), round(HOLD_SECONDS * 1000)
            command = [str(program), str(ring), str(node.directory / "min_freq"), str(hold_ms)]
            least = stack.enter_context(subprocess.Popen(command, pass_fds=(ring,)))
            stack.callback(least.kill)
            os.setpriority(os.PRIO_PROCESS, least.pid, nice_of_unit())
            yield Watcher(node, (least.pid,))

    @contextmanager
    def watched_by_yardstick(self) -> Iterator[Watcher]:
        """bpftrace and its reader, once they have seen a call."""
        directory = self.new_directory()
        node = PlainNode(directory / "17000000.gpu")
        arguments = [str(self.library), str(node.directory / "min_freq"), str(HOLD_SECONDS), self.flag]
        began = time.monotonic()
        # With it tests/runtimes/run gives our daemon another BCC, which is not bpftrace's.
        environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
        reader = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.reader", *arguments],
            stdin=subprocess.DEVNULL, cwd=REPOSITORY, env=environment,
        )  # fmt: skip
        try:
            with self.workload(counts=True) as caller:
                wait_until(lambda: caller.do("call 1") and node.min_hz == HIGHEST_HZ, "the yardstick", ENDS_SECONDS)
            took_seconds = time.monotonic() - began
            wait_until(lambda: node.min_hz == LOWEST_HZ, "the yardstick at rest")
            yield Watcher(node, (reader.pid, only_child(reader.pid)), took_seconds)
        finally:
            wait_until(lambda: is_ended(reader), "the yardstick's end", ENDS_SECONDS)


def is_ended(reader: subprocess.Popen[bytes]) -> bool:
    """Ask the yardstick to end. Again, if need be: bpftrace does not hear a signal just before it begins to wait."""
    reader.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        reader.wait(ANSWERS_SECONDS)
    return reader.returncode is not None


class Watcher:
    """What watches a node: one process or two. `took_seconds`: from its start to the first call that it saw."""

    def __init__(self, node: PlainNode, pids: tuple[int, ...], took_seconds: float = 0.0) -> None:
        self.node = node
        self.pids = pids
        self.took_seconds = took_seconds

    @property
    def cpu_ns(self) -> int:
        """What all their threads have used."""
        return sum(cpu_time_ns(pid) for pid in self.pids)

    @property
    def times_woken(self) -> int:
        """How often their threads have gone to sleep."""
        threads = [thread for pid in self.pids for thread in Path(f"/proc/{pid}/task").iterdir()]
        return sum(said(thread / "status", "voluntary_ctxt_switches") for thread in threads)

    def memory_kib(self, kind: str) -> int:
        """Pss, Rss or Private, as /proc/PID/smaps_rollup has them."""
        files = [Path(f"/proc/{pid}/smaps_rollup") for pid in self.pids]
        names = ("Private_Clean", "Private_Dirty") if kind == "Private" else (kind,)
        return sum(said(file, name) for file in files for name in names)


def nice_of_unit() -> int:
    """The priority with which the service runs."""
    unit = (REPOSITORY / "systemd/moe-gpu-stabilizer.service").read_text()
    return int(re.findall(r"^Nice=(-?\d+)$", unit, re.MULTILINE)[0])


def cpu_time_ns(pid: int) -> int:
    """What all threads of a process have used, those that have ended included: its clock, as libc numbers it.

    clock_getcpuclockid(3), for which Python has no function.
    """
    return time.clock_gettime_ns((~pid << 3) | CPU_CLOCK_OF_PROCESS)


def said(file: Path, name: str) -> int:
    """A number that the kernel gives in a file of lines with names."""
    (line,) = (line for line in file.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


@contextmanager
def make_place() -> Iterator[Place]:
    with ExitStack() as stack:
        prefix = "moe-gpu-stabilizer-benchmark."
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix))
        memory = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=IN_MEMORY))
        yield Place(Path(directory), Path(memory))


@contextmanager
def tracefs() -> Iterator[None]:
    """bpftrace wants it to let go of its probes. Mounted where it is not, and unmounted again."""
    where = Path("/sys/kernel/tracing")
    if (where / "uprobe_events").exists():
        yield
        return
    subprocess.run(["mount", "-t", "tracefs", "tracefs", where], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", where], check=True)
