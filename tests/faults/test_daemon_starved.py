"""The daemon runs short of time, descriptors, memory: it says so once, does not spin, and is right again after."""

from __future__ import annotations

import ast
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.hostile import Hostile
from tests.faults.ledger import Ledger
from tests.faults.load import FULL, Load, seeded
from tests.kernel.conftest import Llama
from tests.support import HIGHEST_HZ, LOWEST_HZ, REPOSITORY, PlainNode, RunningDaemon, stays, wait_until
from tests.workload import Workload, build_library, build_program

Start = Callable[..., RunningDaemon]
Run = Callable[..., Workload]
StartHostile = Callable[..., Hostile]

STOPPED_SECONDS = 60 if FULL else 4

# Of one core, and of a time in which nothing but the shortage is to be dealt with.
MOST_CPU_SHARE = 0.3


def raised(node: PlainNode) -> bool:
    return node.min_hz == HIGHEST_HZ


def given_back(node: PlainNode) -> bool:
    return node.min_hz == LOWEST_HZ


def cpu_seconds(daemon: RunningDaemon) -> float:
    fields = Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_stopped_for_long_under_load(
    start_daemon: Start,
    llama: Llama,
    node: PlainNode,
    flag: str,
    ledger: Ledger,
    run: Run,
    hostile: StartHostile,
    request: pytest.FixtureRequest,
) -> None:
    """As on a machine that swaps. More happens meanwhile than the kernel's buffer holds: what is lost is not missed."""
    chance = seeded(request)
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.5, rebind_seconds=0.5)
    load = Load(chance, llama.program, llama.library, flag)
    try:
        daemon.send(signal.SIGSTOP)
        hostile("flood", 3000, counts=False).wait_until_ready()  # 3,000 records; there is room for 2,048
        ends_at = time.monotonic() + STOPPED_SECONDS
        while time.monotonic() < ends_at:
            load.step()
        load.rest()
        load.end()
        with run() as late:
            late.begin("busy 60000")
            daemon.send(signal.SIGCONT)
            wait_until(lambda: raised(node), "the floor up for one that called in the dark")
            late.kill()
            wait_until(lambda: given_back(node), "the floor given back")
    finally:
        daemon.send(signal.SIGCONT)
        load.end()
    with run() as workload:
        workload.do("call 1")
        wait_until(lambda: raised(node), "the floor up")
    wait_until(lambda: given_back(node), "the floor given back")
    ledger.kept(f"stopped for {STOPPED_SECONDS} s under load")


def test_a_suspended_machine_wakes_up_changed(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """Imitated: daemon and program stop together, CLOCK_MONOTONIC with them as far as they can tell.

    Meanwhile the node has got another max_freq, the library is another file, and the program has gone.
    """
    daemon = start_daemon(libraries=llama.library, hold_seconds=1, rebind_seconds=0.5)
    with run() as workload:
        workload.do("call 1")
        wait_until(lambda: raised(node), "the floor up")
        daemon.send(signal.SIGSTOP)
        workload.kill()
        build_library(llama.library)
        program = build_program(llama.program.with_name("llama-server-2"), llama.library)
        daemon.send(signal.SIGCONT)
        wait_until(lambda: given_back(node), "the floor given back: whoever it was for has gone")
        node.write("max_freq", 714_000_000)
        with run(program=program) as newer:
            wait_until(lambda: newer.do("call 1") and node.min_hz == 714_000_000, "the new library, the new limit")
        wait_until(lambda: given_back(node), "the floor given back")
    ledger.kept("suspended and resumed (imitated)")


def test_no_time_that_is_compared_comes_from_a_clock_that_may_be_set() -> None:
    """A board without a battery learns the date some time after its start: time.time() is for what is shown only."""
    users = []
    for module in sorted((REPOSITORY / "moe_gpu_stabilizer").glob("*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now"):
                users.append(module.name)
            if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
                users.append(module.name)
    assert users == ["status.py"], "which writes moments as the time of day"


def test_out_of_descriptors(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger, hostile: StartHostile
) -> None:
    """EMFILE, with processes that wait to be judged: said once, no spinning, all judged when there is room again."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.5, rebind_seconds=0.5)
    daemon.wait_until_quiet()
    soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{daemon.pid}/fd")), hard))
    crowd = hostile("crowd", 20, 20)
    crowd.wait_until_ready()
    daemon.wait_for_log(r"^cannot judge a process: .*Too many open files")
    before, began = cpu_seconds(daemon), time.monotonic()
    stays(lambda: given_back(node), 2, "nobody can be judged")
    share = (cpu_seconds(daemon) - before) / (time.monotonic() - began)
    assert share < MOST_CPU_SHARE, "it does not spin"
    assert daemon.log.count("Too many open files") <= 6, "said once of each cause"
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (soft, hard))
    wait_until(lambda: raised(node), "the floor up when there is room again")
    daemon.wait_for_log(r"^processes can be judged again$")
    crowd.kill()
    wait_until(lambda: given_back(node), "the floor given back")
    ledger.kept("out of descriptors")


def test_out_of_descriptors_while_the_floor_is_up(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """What was saved to be given back is given back all the same, at the latest when there is room again."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.5, rebind_seconds=0.5)
    with run() as workload:
        workload.do("call 1")
        wait_until(lambda: raised(node), "the floor up")
        soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (3, hard))
        began, before = time.monotonic(), cpu_seconds(daemon)
        stays(lambda: daemon.process is not None and daemon.process.poll() is None, 2, "the daemon runs")
        assert (cpu_seconds(daemon) - before) / (time.monotonic() - began) < MOST_CPU_SHARE, "it does not spin"
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (soft, hard))
        wait_until(lambda: given_back(node), "the floor given back")
        workload.do("call 1")
        wait_until(lambda: raised(node), "and up again")
    ledger.kept("out of descriptors while the floor is up")


def test_out_of_memory(start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger) -> None:
    """ENOMEM for all that it asks for from now on (RLIMIT_AS): it goes on with what it has, or gives back and ends."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.5, rebind_seconds=0.5)
    with run() as workload, run() as other:
        workload.do("call 1")
        wait_until(lambda: raised(node), "the floor up")
        soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_AS)
        resource.prlimit(daemon.pid, resource.RLIMIT_AS, (1 << 20, hard))
        for _ in range(3):
            other.do("call 1")
        wait_until(lambda: given_back(node), "the floor given back")
        process = daemon.process
        assert process
        if process.poll() is None:
            resource.prlimit(daemon.pid, resource.RLIMIT_AS, (soft, hard))
        wait_until(lambda: workload.do("call 1") and (raised(node) or process.poll() is not None), "up, or ended")
        if process.poll() is not None:  # systemd starts it anew
            assert given_back(node)
            daemon.start()
            wait_until(lambda: workload.do("call 1") and raised(node), "the floor up again")
    wait_until(lambda: given_back(node), "the floor given back")
    ledger.kept("out of memory")
