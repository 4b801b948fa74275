"""What a determined try to break the daemon has found, each with the remedy that holds now.

Tried from an ordinary user's shell and with root's tools, with the source at hand, and found harmless: a rival's
writes, the floor's own value among them, 0 to 20 ms around a raise and a give-back (300 rounds), and in a tight loop
of several programs; kill -9 in a rival's pause, then --restore; a reload in that pause to another node and back;
max_freq below the baseline, 0, 10 GHz; attributes that are empty, binary, negative, 30 digits long; a node renamed,
deleted, replaced by a file at random; status.json, raised.json and the lock as directories; one to seven free
descriptors; a log whose reader leaves; storms of SIGSTOP and SIGCONT; a CPU quota of 3 %; loops of exec and of fork;
400 callers at once; 150 reloads; userfaultfd behind argv; turns that come and go. Found and mended elsewhere: a table
of mounts that is cut off (test_mounts.py), readers of launches by user and not by share, a second pidfd
(test_judging.py), a thread that does not get to run (test_patience.py).

Left, because it is the kernel's: a process that maps a probed file and locks up its memory holds up whoever sets or
takes out a probe, and with it each fork() on the machine, until it is killed (README, Limits).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from moe_gpu_stabilizer.mappings import MOST_PATH_BYTES, files_used_by
from moe_gpu_stabilizer.mounts import Mounts
from tests.faults.ledger import Ledger
from tests.faults.test_daemon_starved import cpu_seconds
from tests.kernel.conftest import Llama
from tests.support import HIGHEST_HZ, LOWEST_HZ, REPOSITORY, PlainNode, RunningDaemon, wait_until
from tests.workload import Workload, build_library

Start = Callable[..., RunningDaemon]
Run = Callable[..., Workload]


def is_up(node: PlainNode) -> bool:
    return node.min_hz == HIGHEST_HZ


def given_back(node: PlainNode) -> bool:
    return node.min_hz == LOWEST_HZ


def test_a_runtime_directory_that_has_become_a_file_ends_nothing(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.5, rebind_seconds=0.3)
    away = daemon.runtime.with_name("away")
    daemon.runtime.rename(away)
    daemon.runtime.touch()
    daemon.wait_for_log(r"^cannot publish the status: ")
    daemon.runtime.unlink()
    away.rename(daemon.runtime)
    daemon.wait_for_log(r"^the status can be published again$")
    with run() as workload:
        workload.do("call 1")
        wait_until(lambda: is_up(node), "the floor up")
        wait_until(lambda: given_back(node), "the floor given back")
    ledger.kept("/run/moe-gpu-stabilizer replaced by a file")


def test_no_limit_at_all_is_given_back_after_a_kill(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """A min_freq of 0 is what some drivers begin with."""
    node.write("min_freq", 0)
    daemon = start_daemon(libraries=llama.library, hold_seconds=60)
    with run() as workload:
        workload.do("call 1")
        wait_until(lambda: is_up(node), "the floor up")
        daemon.stop(signal.SIGKILL)
        assert daemon.command("--restore").stdout == "floor 0 Hz (restored)\n"
        assert node.min_hz == 0
    ledger.kept("killed where min_freq was 0")


def test_a_node_that_has_refused_is_given_back_in_the_middle_of_a_call(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    """The settings name another node while the first refuses: inference that goes on must not keep both as they are."""
    other = PlainNode(tmp_path / "other")
    daemon = start_daemon(libraries=llama.library, rebind_seconds=0.3, hold_seconds=0.5)
    with run() as workload:
        workload.begin("busy 6000")
        wait_until(lambda: is_up(node), "the floor up")
        node.refuse()
        daemon.configure(**{**daemon.settings, "devfreq": other.directory})
        daemon.send(signal.SIGHUP)
        daemon.wait_for_log(r"^cannot give the floor back: ")
        node.relent()
        wait_until(lambda: given_back(node) and is_up(other), "the first node given back, the other one raised")
        workload.finish()
        wait_until(lambda: given_back(other), "the floor given back")
    ledger.kept("another node while the first refuses")


def test_who_writes_to_an_own_library_all_the_time_does_not_keep_the_daemon_busy(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    own = build_library(tmp_path / "own" / "libllama.so")
    daemon = start_daemon(libraries=f"{llama.library}:{own}")
    own.write_bytes(b"")
    daemon.wait_for_log(rf"^detached {own}")
    over = threading.Event()

    def write_on() -> None:
        while not over.wait(0.001):
            os.close(os.open(own, os.O_WRONLY))

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        began, before = time.monotonic(), cpu_seconds(daemon)
        wait_until(lambda: time.monotonic() > began + 3, "three seconds of it")
        assert (cpu_seconds(daemon) - before) / (time.monotonic() - began) < 0.4
        with run() as workload:
            workload.do("call 1")
            wait_until(lambda: is_up(node), "the floor up all the same")
    finally:
        over.set()
        writer.join()
    wait_until(lambda: given_back(node), "the floor given back")
    ledger.kept("a library opened for writing a thousand times a second")


def test_a_killed_daemon_is_not_said_to_run(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """The kernel takes its probes out before it lets go of it."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=60)
    with run() as workload:
        workload.do("call 1")
        wait_until(lambda: is_up(node), "the floor up")
        wait_until(lambda: "floor 1020 MHz for" in daemon.command("--status").stdout, "it to be published")
        os.kill(daemon.pid, signal.SIGKILL)
        assert daemon.command("--status").returncode == 1
        assert daemon.command("--restore").stdout == "floor 306 MHz (restored)\n"
    ledger.kept("asked for its status while it dies")


def test_a_line_is_never_longer_than_what_a_pipe_has_room_for() -> None:
    """A pipe that is not full takes PIPE_BUF bytes at once, and would keep the daemon waiting for more."""
    code = (
        "import logging; from moe_gpu_stabilizer.journal import set_up_logging; set_up_logging('info');"
        "logging.getLogger('moe_gpu_stabilizer').info('x' * 10000)"
    )
    said = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, cwd=REPOSITORY, check=True).stderr
    assert len(said) == select.PIPE_BUF
    assert said.endswith(b"x...\n")


def test_paths_without_bound_are_not_remembered(tmp_path: Path) -> None:
    """Of a process that maps many files at the longest of paths each is four times as large in memory."""
    process = tmp_path / "10"
    process.mkdir()
    (process / "exe").symlink_to("/bin/cat")
    long = "/" + "x" * MOST_PATH_BYTES
    lines = [f"7f00{number:08x}-7f01{number:08x} r-xp 0 08:01 {number} {long}/libllama.so\n" for number in range(9)]
    (process / "maps").write_text("".join(lines))
    assert [place.path for _, place in files_used_by(process, Mounts(), lambda _path, _kind: None)] == ["/bin/cat"]
