"""The BPF program by itself: what it counts, whom it wakes the daemon for, and what it leaves behind (nothing)."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from moe_gpu_stabilizer.elf import function_offsets
from moe_gpu_stabilizer.errors import ProbeError
from moe_gpu_stabilizer.records import KIND_CALL, KIND_EXEC, VERDICT_COUNTS, Wake
from moe_gpu_stabilizer.uprobes import Probe, Uprobe
from tests.kernel.conftest import Llama
from tests.support import wait_until
from tests.workload import Workload, build_library, build_program, code_in_memory

HOUR_NS = 3_600_000_000_000
SOME_PRIME = 10_007
SMALL_PRIME = 1_009


def offsets_of(library: Path) -> dict[str, int]:
    with library.open("rb") as file:
        return function_offsets(file.fileno())


@pytest.fixture
def llama(tmp_path: Path) -> Llama:
    """The stand-in under a name that no daemon looks for: one that runs beside these tests would probe it, too."""
    library = build_library(tmp_path / "probed" / "libprobed.so")
    return Llama(library, build_program(tmp_path / "probed" / "program", library))


@pytest.fixture
def probe(package_root: Path) -> Iterator[Probe]:
    """The program in the kernel. A process that counts wakes us at most once an hour."""
    probe = Probe(HOUR_NS, package_root / "moe_gpu_stabilizer" / "probe.json")
    yield probe
    probe.close()


@pytest.fixture
def attached(probe: Probe, llama: Llama) -> Iterator[Probe]:
    uprobes = [probe.attach(str(llama.library), offset) for offset in offsets_of(llama.library).values()]
    assert len(uprobes) == 3
    yield probe
    for uprobe in uprobes:
        uprobe.close()


def wakes_of(probe: Probe, workload: Workload) -> list[Wake]:
    """What the kernel has said of this process since the last look. (On exec it speaks of every process it knows.)"""
    return [wake for wake in probe.read_wakes() if wake.tgid == workload.pid]


def calls_of(probe: Probe, workload: Workload) -> int:
    activity = probe.activity(workload.pid)
    return activity.calls if activity else 0


def test_every_call_of_a_process_is_counted(attached: Probe, run: Callable[..., Workload]) -> None:
    with run() as workload:
        workload.do(f"call {SOME_PRIME}")
        assert calls_of(attached, workload) == SOME_PRIME


def test_all_three_functions_are_counted(attached: Probe, run: Callable[..., Workload]) -> None:
    with run() as workload:
        workload.do("call 3")
        workload.do("decode 5")
        workload.do("synchronize 7")
        assert calls_of(attached, workload) == 3 + 5 + 7


def test_calls_of_many_threads_at_once_are_counted(attached: Probe, run: Callable[..., Workload]) -> None:
    with run() as workload:
        workload.do(f"threads 7 {SMALL_PRIME}")
        assert calls_of(attached, workload) == 7 * SMALL_PRIME
        activity = attached.activity(workload.pid)
        assert activity is not None
        assert activity.last_tid != workload.pid, "the calls came from other threads than the main one"


def test_processes_are_counted_apart(attached: Probe, run: Callable[..., Workload]) -> None:
    with run() as one, run() as other:
        one.do("call 101")
        other.do("call 211")
        one.do("call 2")
        assert (calls_of(attached, one), calls_of(attached, other)) == (103, 211)


def test_an_unknown_process_wakes_the_daemon_with_its_first_call(attached: Probe, run: Callable[..., Workload]) -> None:
    with run() as workload:
        workload.begin("call 1")
        assert select.select([attached.fileno()], [], [], 10)[0], "no wake-up within 10 s"
        (wake,) = wakes_of(attached, workload)
        assert (wake.kind, wake.tid, wake.verdict) == (KIND_CALL, workload.pid, 0)


def test_an_ignored_process_never_wakes_the_daemon(attached: Probe, run: Callable[..., Workload]) -> None:
    with run() as workload:
        attached.set_verdict(workload.pid, counts=False)
        workload.do(f"threads 3 {SOME_PRIME}")
        assert wakes_of(attached, workload) == []
        assert attached.activity(workload.pid) is None, "an ignored process costs a look-up and nothing else"


def test_a_process_that_counts_wakes_the_daemon_once_per_interval(
    attached: Probe, run: Callable[..., Workload]
) -> None:
    with run() as workload:
        attached.set_verdict(workload.pid, counts=True)
        workload.do(f"call {SMALL_PRIME}")
        assert [wake.verdict for wake in wakes_of(attached, workload)] == [VERDICT_COUNTS]
        workload.do(f"call {SMALL_PRIME}")
        assert wakes_of(attached, workload) == [], "the interval is an hour"
        attached.configure(1)
        workload.do("call 3")
        assert len(wakes_of(attached, workload)) == 3, "the interval is a nanosecond"


def test_a_full_ring_buffer_loses_nothing_that_matters(attached: Probe, run: Callable[..., Workload]) -> None:
    attached.configure(1)
    with run() as workload:
        attached.set_verdict(workload.pid, counts=True)
        workload.do(f"call {SOME_PRIME}")
        heard = wakes_of(attached, workload)
        assert 1000 < len(heard) < SOME_PRIME, "the ring buffer has room for some of them"
        activity = attached.activity(workload.pid)
        assert activity is not None
        assert activity.calls == SOME_PRIME, "the map knows every call"
        assert activity.last_wake_ns == heard[-1].at_ns, "a lost record does not count as a wake-up"
        workload.do("call 1")
        assert len(wakes_of(attached, workload)) == 1, "the next call wakes us again"


def test_exec_makes_a_process_unknown_again(attached: Probe, run: Callable[..., Workload], llama: Llama) -> None:
    with run() as workload:
        attached.set_verdict(workload.pid, counts=False)
        workload.become(str(llama.program))
        wait_until(lambda: select.select([attached.fileno()], [], [], 0)[0], "a record of the exec")
        assert [wake.kind for wake in wakes_of(attached, workload)] == [KIND_EXEC]
        workload.do("call 1")
        assert [(wake.kind, wake.verdict) for wake in wakes_of(attached, workload)] == [(KIND_CALL, 0)]


def test_forgetting_a_process_makes_it_unknown(attached: Probe, run: Callable[..., Workload]) -> None:
    with run() as workload:
        attached.set_verdict(workload.pid, counts=False)
        attached.forget(workload.pid)
        attached.forget(workload.pid)
        workload.do("call 1")
        assert [wake.verdict for wake in wakes_of(attached, workload)] == [0]


def test_closing_a_uprobe_leaves_the_code_as_it_was(probe: Probe, llama: Llama, run: Callable[..., Workload]) -> None:
    offset = offsets_of(llama.library)["llama_process"]
    with run() as workload:
        workload.do("call 1")
        original = code_in_memory(workload.pid, llama.library, offset)
        uprobe: Uprobe = probe.attach(str(llama.library), offset)
        assert code_in_memory(workload.pid, llama.library, offset) != original, "a breakpoint is there"
        uprobe.close()
        wait_until(lambda: code_in_memory(workload.pid, llama.library, offset) == original, "the breakpoint gone")
        workload.do("call 1")
        assert calls_of(probe, workload) == 0


HOLDER = """
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from moe_gpu_stabilizer.uprobes import Probe
probe = Probe(1)
uprobe = probe.attach(sys.argv[1], int(sys.argv[2]))
print("attached", flush=True)
sys.stdin.read()
"""


def test_a_killed_holder_leaves_no_probe(llama: Llama, run: Callable[..., Workload], package_root: Path) -> None:
    offset = offsets_of(llama.library)["llama_process"]
    with run() as workload:
        original = code_in_memory(workload.pid, llama.library, offset)
        command = [sys.executable, "-c", HOLDER, str(llama.library), str(offset)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=package_root) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"attached\n"
            assert code_in_memory(workload.pid, llama.library, offset) != original
            os.kill(holder.pid, signal.SIGKILL)
        wait_until(lambda: code_in_memory(workload.pid, llama.library, offset) == original, "the breakpoint gone")
        workload.do("call 1")


def test_a_place_that_cannot_hold_a_probe_is_refused_and_nothing_is_left_behind(probe: Probe, llama: Llama) -> None:
    """BCC's own way of attaching would leave an event in the kernel's global list of uprobes here."""
    with tracefs() as events:
        before = events.read_text()
        with pytest.raises(ProbeError, match=r"no probe can be set there"):
            probe.attach(str(llama.library), 1 << 40)
        with pytest.raises(ProbeError, match=r"No such file or directory"):
            probe.attach("/nonexistent", 0)
        assert events.read_text() == before


@contextmanager
def tracefs() -> Iterator[Path]:
    """The kernel's list of the uprobes that were made through tracefs."""
    with TemporaryDirectory() as directory:
        subprocess.run(["mount", "-t", "tracefs", "tracefs", directory], check=True)
        try:
            yield Path(directory) / "uprobe_events"
        finally:
            subprocess.run(["umount", directory], check=True)
