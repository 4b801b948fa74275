"""Processes that end, fork, exec, freeze and come in crowds, each with real uprobes and the real daemon.

Each time: the program itself runs on as it would, the floor is up exactly while it should be, the daemon keeps nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.hostile import Hostile
from tests.faults.ledger import Ledger
from tests.faults.load import QUIET_THREADS
from tests.kernel.conftest import Llama
from tests.support import HIGHEST_HZ, LOWEST_HZ, PlainNode, RunningDaemon, stays, wait_until
from tests.workload import Workload, build_library, build_program

Start = Callable[..., RunningDaemon]
Run = Callable[..., Workload]
StartHostile = Callable[..., Hostile]

# As many as issue 5 asks for, of which so many go on calling.
CROWD, CALLING = 1000, 200

AS_NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]


def raised(node: PlainNode) -> bool:
    return node.min_hz == HIGHEST_HZ


def given_back(node: PlainNode) -> bool:
    return node.min_hz == LOWEST_HZ


def descriptors(daemon: RunningDaemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def test_killed_in_the_middle_of_a_call(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    start_daemon(libraries=llama.library, hold_seconds=60)
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM):
        with run() as workload:
            workload.begin("busy 60000")
            wait_until(lambda: raised(node), "the floor up")
            workload.process.send_signal(number)
            wait_until(lambda: given_back(node), "the floor given back long before the hold is over")
        ledger.kept("killed in the middle of a call")


@pytest.mark.parametrize("mode", ["exit", "exec"])
def test_it_leaves_in_the_middle_of_a_call(
    start_daemon: Start, hostile: StartHostile, llama: Llama, node: PlainNode, ledger: Ledger, mode: str
) -> None:
    """One thread is inside of a call when another one returns from main(), or becomes /bin/sleep under the same pid."""
    start_daemon(libraries=llama.library, hold_seconds=60)
    leaving = hostile(mode)
    wait_until(lambda: raised(node), "the floor up")
    leaving.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: given_back(node), "the floor given back long before the hold is over")
    if mode == "exec":
        assert Path(f"/proc/{leaving.pid}/comm").read_text() == "sleep\n"
    else:
        assert leaving.process.wait(timeout=30) == 0
    ledger.kept(f"{mode} in the middle of a call")


def test_a_program_that_becomes_itself_over_and_over_is_judged_each_time(
    start_daemon: Start, hostile: StartHostile, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=60)
    becoming = hostile("execs", 300)
    becoming.wait_until_ready()
    wait_until(lambda: raised(node), "the floor up for the last of them")
    before = descriptors(daemon)
    becoming.kill()
    wait_until(lambda: given_back(node), "the floor given back")
    assert descriptors(daemon) < before
    ledger.kept("became itself 300 times")


def test_a_child_goes_on_calling_when_its_parent_has_ended(
    start_daemon: Start, hostile: StartHostile, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    start_daemon(libraries=llama.library, hold_seconds=1)
    family = hostile("orphan")
    family.wait_until_ready()
    assert family.process.wait(timeout=30) == 0
    wait_until(lambda: raised(node), "the floor up")
    stays(lambda: raised(node), 2, "the child goes on")
    family.kill()
    wait_until(lambda: given_back(node), "the floor given back")
    ledger.kept("the parent ended, its child went on")


@pytest.mark.parametrize("mode", ["parent", "vfork"])
def test_a_child_that_ends_takes_only_its_own_claim(
    start_daemon: Start, hostile: StartHostile, llama: Llama, node: PlainNode, ledger: Ledger, mode: str
) -> None:
    """Also a child that shares its parent's memory, the probed code in it included (vfork(2), posix_spawn(3))."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=1)
    family = hostile(mode)
    family.wait_until_ready()
    if mode == "parent":
        wait_until(lambda: raised(node), "the floor up")
        stays(lambda: raised(node), 2, "the parent goes on")
    else:
        wait_until(lambda: given_back(node), "no claim is left")
    assert family.process.poll() is None
    family.kill()
    wait_until(lambda: given_back(node), "the floor given back")
    assert daemon.command("--status").returncode == 0
    ledger.kept(f"a child of a {mode} ended")


def test_a_thread_that_entered_and_sleeps_for_ever(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    start_daemon(libraries=llama.library, hold_seconds=1)
    with run() as workload:
        workload.begin("sleep 600000")
        wait_until(lambda: raised(node), "the floor up")
        wait_until(lambda: given_back(node), "the floor given back although the call never returns")
        stays(lambda: given_back(node), 1, "it stays down")
        assert workload.process.poll() is None
    ledger.kept("a call that sleeps for ever")


@contextmanager
def frozen_by_signal(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def frozen_by_cgroup(pid: int) -> Iterator[None]:
    """As a container is paused."""
    (mount,) = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if " cgroup2 " in line][:1]
    root, group = Path(mount), Path(mount) / f"moe-gpu-stabilizer-{pid}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "cgroup.freeze").write_text("1")
        wait_until(lambda: "frozen 1" in (group / "cgroup.events").read_text(), "the process frozen")
        yield
    finally:
        (group / "cgroup.freeze").write_text("0")
        (root / "cgroup.procs").write_text(str(pid))
        group.rmdir()


@pytest.mark.parametrize("frozen", [frozen_by_signal, frozen_by_cgroup], ids=["SIGSTOP", "cgroup"])
def test_frozen_while_it_infers_and_thawed(
    start_daemon: Start,
    hostile: StartHostile,
    llama: Llama,
    node: PlainNode,
    ledger: Ledger,
    frozen: Callable[[int], AbstractContextManager[None]],
) -> None:
    start_daemon(libraries=llama.library, hold_seconds=1)
    server = hostile("rate", 50)
    wait_until(lambda: raised(node), "the floor up")
    with frozen(server.pid):
        wait_until(lambda: given_back(node), "the floor given back: what is frozen does not infer")
    wait_until(lambda: raised(node), "the floor up again when it goes on")
    assert server.process.poll() is None
    ledger.kept(f"frozen and thawed by {frozen.__name__.removeprefix('frozen_by_')}")


def test_frozen_inside_of_a_long_call(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """No new call tells that it goes on: that one floor is missing until the next call, and nothing else is."""
    start_daemon(libraries=llama.library, hold_seconds=1)
    with run() as workload:
        workload.begin("busy 3000")
        wait_until(lambda: raised(node), "the floor up")
        with frozen_by_signal(workload.pid):
            wait_until(lambda: given_back(node), "the floor given back")
        assert workload.finish() == "done"
        workload.do("call 1")
        wait_until(lambda: raised(node), "the floor up at the next call")
    ledger.kept("frozen inside of a long call")


def test_a_debugger_beside_our_breakpoints(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """gdb attaches, its own breakpoint is hit, it steps and leaves again; the probed calls go on being seen."""
    start_daemon(libraries=llama.library, hold_seconds=1)
    with run() as workload:
        workload.do("call 1")
        script = ["set breakpoint pending off", "break write", "continue", "stepi 200", "continue", "detach"]
        commands = [word for line in script for word in ("-ex", line)]
        with subprocess.Popen(
            ["gdb", "--batch", "-nx", "-p", str(workload.pid), *commands],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as debugger:  # fmt: skip
            wait_until(lambda: f"TracerPid:\t{debugger.pid}" in status_of(workload.pid), "gdb attached", 60)
            workload.begin("call 20")
            workload.begin("call 20")
            said, _ = debugger.communicate(timeout=60)
        assert "Breakpoint 1, " in said, said
        for _ in range(2):
            assert workload.finish() == "done"
        assert workload.do("call 1000") == "done"
        wait_until(lambda: raised(node), "the floor up")
        assert workload.process.poll() is None
    ledger.kept("a debugger beside our breakpoints")


def status_of(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def test_a_crowd_calls_and_is_killed_at_once(
    start_daemon: Start, hostile: StartHostile, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """A thousand processes call, 200 of them for ever. What is said and published of them stays short."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=1)
    daemon.wait_until_quiet()
    before = descriptors(daemon)
    crowd = hostile("crowd", CROWD, CALLING)
    crowd.wait_until_ready()
    wait_until(lambda: raised(node), "the floor up")
    wait_until(lambda: descriptors(daemon) >= before + CROWD, "all of them judged", 120)
    stays(lambda: raised(node), 2, "200 go on calling")
    wait_until(lambda: "holders" in (status := published(daemon)) and status["holders"] >= CALLING, "they hold it")
    status = published(daemon)
    assert len(status["processes"]) <= 50
    assert status["processes_left_out"] >= CROWD - 50
    assert all(one["holds_the_floor"] for one in status["processes"]), "those that matter come first"
    assert len(daemon.command("--status").stdout) < 20_000
    crowd.kill()
    wait_until(lambda: given_back(node), "the floor given back", 30)
    wait_until(lambda: descriptors(daemon) <= before + 2, f"no pidfd is left of {CROWD}", 60)
    daemon.stop()
    lines = [line for line in daemon.log.splitlines() if "(hostile) counts" in line]
    assert len(lines) < CROWD / 2, "the others are counted in a line"
    assert daemon.has_logged(r"^\(\d+ more lines about 'counts' left out in \d+ s\)$")
    assert daemon.log.count("inference)") == daemon.log.count("(idle)") == 1, "one stretch, which a flood cannot hide"
    ledger.kept(f"{CROWD} processes, {CALLING} of them calling, killed at once")


def published(daemon: RunningDaemon) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((daemon.runtime / "status.json").read_text())
    return status


def test_ten_thousand_calls_a_second(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """As many as the machine can make, 10,000 at least in all: the daemon sleeps through nearly all of them."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=1)
    with run() as workload:
        workload.do("call 1")
        wait_until(lambda: raised(node), "the floor up")
        before, began = daemon.times_woken, time.monotonic()
        workload.do("call 100000")
        assert raised(node)
        assert daemon.times_woken - before < 1000 + 20 * (time.monotonic() - began)
    ledger.kept("100,000 calls as fast as can be")


def test_a_flood_of_processes_that_call_once_and_end_at_once(
    start_daemon: Start, hostile: StartHostile, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """Their /proc entries vanish between any two looks. Another process's floor comes and goes in time meanwhile."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=1)
    daemon.wait_until_quiet()
    before = descriptors(daemon)
    flood = hostile("flood", 3000, counts=False)
    with run() as workload:
        tries = 0
        while flood.process.poll() is None:
            workload.do("call 1")
            wait_until(lambda: raised(node), "the floor up in the flood")
            wait_until(lambda: given_back(node), "the floor given back in the flood")
            tries += 1
        assert tries
    wait_until(lambda: descriptors(daemon) <= before + 2, "no pidfd is left", 60)
    assert daemon.command("--status").returncode == 0
    assert len(os.listdir(f"/proc/{daemon.pid}/task")) <= QUIET_THREADS, "no thread is left"
    ledger.kept("3,000 processes that called once and ended")


def test_a_flood_is_published_a_few_times_a_second(
    start_daemon: Start, hostile: StartHostile, llama: Llama, ledger: Ledger
) -> None:
    """Each process that comes and goes is a change; the last one is not lost."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=1)
    daemon.wait_until_quiet()
    began, written = time.monotonic(), set()
    flood = hostile("flood", 6000)
    while flood.process.poll() is None:
        written.add(published(daemon)["written_at_seconds"])
        time.sleep(0.002)
    # One each 0.2 s, ticks apart.
    assert len(written) <= 6 * (time.monotonic() - began) + 5
    wait_until(lambda: published(daemon)["processes"] == [], "the last change")
    ledger.kept("6,000 processes that count came and went")


def test_the_main_thread_ends_and_another_goes_on_calling(
    start_daemon: Start, hostile: StartHostile, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """The process's /proc/PID/cmdline is empty then, and it is not dead."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=1)
    headless = hostile("leader")
    headless.wait_until_ready()
    wait_until(lambda: "State:\tZ" in status_of(headless.pid), "the main thread's end")
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.stop()
    daemon.start()  # one that has not seen it before
    wait_until(lambda: raised(node), "the floor up")
    stays(lambda: raised(node), 2, "it goes on calling")
    headless.kill()
    wait_until(lambda: given_back(node), "the floor given back")
    ledger.kept("the main thread ended")


# Runs in a pid namespace of its own: two processes with one pid, one after the other, within a clock tick.
SAME_PID = r"""
import os, subprocess, sys
program, flag = sys.argv[1:]

def start(*words):
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write("4999")
    return subprocess.Popen([program, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

def do(process, command):
    process.stdin.write(command + "\n")
    return process.stdout.readline()

first = start(flag)
assert first.pid == 5000, first.pid
do(first, "call 1")
print("called", flush=True)
sys.stdin.readline()
first.kill()
first.wait()
second = start()
assert second.pid == 5000, second.pid
do(second, "call 1000")
print("called again", flush=True)
sys.stdin.readline()
"""


def test_a_pid_that_is_used_again_at_once_inherits_nothing(
    start_daemon: Start, llama: Llama, node: PlainNode, ledger: Ledger, flag: str
) -> None:
    """The daemon is stopped meanwhile, so that it hears of both at once: the end of one, the calls of the other."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=1)
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", SAME_PID]
    with subprocess.Popen(
        [*command, str(llama.program), flag], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as namespace:
        assert namespace.stdin
        assert namespace.stdout
        try:
            assert namespace.stdout.readline() == "called\n"
            wait_until(lambda: raised(node), "the floor up")
            daemon.send(signal.SIGSTOP)
            namespace.stdin.write("\n")
            assert namespace.stdout.readline() == "called again\n"
            daemon.send(signal.SIGCONT)
            wait_until(lambda: given_back(node), "the floor given back")
            stays(lambda: given_back(node), 1.5, "the second process does not count")
        finally:
            daemon.send(signal.SIGCONT)
            namespace.kill()
    ledger.kept("a pid used again within a tick")


@pytest.fixture
def open_llama() -> Iterator[Llama]:
    """Where every user can run it."""
    with tempfile.TemporaryDirectory(prefix="moe-gpu-stabilizer-test.") as directory:
        Path(directory).chmod(0o755)
        library = build_library(Path(directory) / "libllama.so")
        yield Llama(library, build_program(Path(directory) / "llama-server", library))


def test_proc_that_hides_other_users_processes_does_not_hide_them_from_the_daemon(
    start_daemon: Start, run: Run, open_llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """hidepid=2, as hardened machines have it, and subset=pid as in the service's own sandbox."""
    llama = open_llama
    for option in ("hidepid=2", "hidepid=2,subset=pid"):
        script = f'mount -t proc -o {option} proc /proc && exec "$@"'
        daemon = start_daemon(
            prefix=("unshare", "--mount", "--fork", "sh", "-c", script, "sh"), libraries=llama.library, hold_seconds=1
        )
        with run(
            program=llama.program, prefix=["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        ) as workload:
            workload.do("call 1")
            wait_until(lambda: raised(node), f"the floor up with {option}")
            wait_until(lambda: given_back(node), "the floor given back")
        daemon.stop()
        ledger.kept(option)
