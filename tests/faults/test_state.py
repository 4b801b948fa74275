"""What is to be given back is in /run before it is raised, and survives whatever happens to us or to /run.

Tried here: a directory that is full, that cannot be written, that somebody removes while the floor is up; a file that a
power cut has cut short; --restore at any time, twice, and beside a running daemon; a user's own setting after a kill.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.ledger import Ledger
from tests.kernel.conftest import REPOSITORY, Llama
from tests.support import HIGHEST_HZ, LOWEST_HZ, PlainNode, RunningDaemon, stays, wait_until
from tests.workload import Workload

Start = Callable[..., RunningDaemon]
Run = Callable[..., Workload]

MIDDLE_HZ = 612_000_000


def is_up(node: PlainNode) -> bool:
    return node.min_hz == HIGHEST_HZ


def given_back(node: PlainNode) -> bool:
    return node.min_hz == LOWEST_HZ


@contextmanager
def small_file_system(directory: Path) -> Iterator[None]:
    """A file system with room for a few files of a page each."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "tmpfs", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("way", ["full", "read-only"])
def test_what_could_not_be_given_back_after_a_kill_is_not_raised(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger, way: str
) -> None:
    runtime, filler = tmp_path / "run", tmp_path / "run" / "filler"
    with small_file_system(runtime):
        daemon = start_daemon(libraries=llama.library, hold_seconds=0.5, rebind_seconds=0.3)
        try:
            if way == "full":
                fill(filler)
            else:
                subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", runtime], check=True)
            with run() as workload:
                workload.begin("busy 4000")
                daemon.wait_for_log(r"^cannot raise the floor: cannot write .*/raised.json: (No space|Read-only)")
                stays(lambda: given_back(node), 0.5, "not raised")
                if way == "full":
                    filler.unlink()
                else:
                    subprocess.run(["umount", runtime], check=True)
                wait_until(lambda: is_up(node), "the floor up when there is room")
                workload.finish()
                wait_until(lambda: given_back(node), "the floor given back")
        finally:
            daemon.stop()
    assert daemon.log.count("cannot raise the floor") == 1, "said once"
    ledger.kept(f"/run {way}")


def test_a_directory_that_is_removed_while_the_floor_is_up_is_made_anew(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=60, rebind_seconds=0.3)
    with run() as workload:
        workload.do("call 1")
        wait_until(lambda: is_up(node), "the floor up")
        shutil.rmtree(daemon.runtime)
        wait_until(lambda: (daemon.runtime / "raised.json").exists(), "what is to be given back, saved again")
        wait_until(lambda: (daemon.runtime / "lock").exists(), "the lock taken again")
        second = daemon.command("--config", str(daemon.config))
        assert second.returncode == 1
        assert "another moe-gpu-stabilizer is running" in second.stderr
        daemon.stop(signal.SIGKILL)
        assert daemon.command("--restore").stdout == "floor 306 MHz (restored)\n"
        assert given_back(node)
    ledger.kept("/run/moe-gpu-stabilizer removed while raised")


def test_where_another_daemon_was_faster_after_the_directory_was_removed_the_first_one_ends(
    start_daemon: Start, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    first = start_daemon(libraries=llama.library, rebind_seconds=0.3)
    first.freeze()
    shutil.rmtree(first.runtime)
    first.runtime.mkdir()
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "run").symlink_to(first.runtime)
    with RunningDaemon(
        tmp_path / "second", node.directory, REPOSITORY,
        libraries=llama.library, moe_flags=first.flag, detect="flags", rebind_seconds=0.3,
    ) as second:  # fmt: skip
        first.send(signal.SIGCONT)
        assert first.process is not None
        assert first.process.wait(timeout=15) == 1
        assert "another moe-gpu-stabilizer has been started: this one ends" in first.log
        wait_until(lambda: second.command("--status").returncode == 0, "the second one goes on")
    ledger.kept("/run/moe-gpu-stabilizer removed, a second daemon started")


def test_restore_beside_a_running_daemon_changes_nothing(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=60)
    with run() as workload:
        workload.do("call 1")
        wait_until(lambda: is_up(node), "the floor up")
        for _ in range(2):
            restored = daemon.command("--restore")
            assert (restored.returncode, restored.stdout) == (
                0,
                "a daemon is running; it gives back its floor itself\n",
            )
            assert is_up(node)
            assert (daemon.runtime / "raised.json").exists()
            ledger.kept("--restore beside a running daemon")


@pytest.mark.parametrize("own_hz", [MIDDLE_HZ, LOWEST_HZ])
def test_a_users_own_setting_after_a_kill_is_not_mistaken_for_ours(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger, own_hz: int
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=60)
    with run() as workload:
        workload.do("call 1")
        wait_until(lambda: is_up(node), "the floor up")
        daemon.stop(signal.SIGKILL)
    node.write("min_freq", own_hz)
    assert daemon.command("--restore").returncode == 0
    assert node.min_hz == own_hz
    node.write("min_freq", HIGHEST_HZ)
    daemon.start()
    assert node.min_hz == HIGHEST_HZ, "undone once, or not at all"
    ledger.kept("a user's own setting after a kill")


@pytest.mark.parametrize("content", ["", '{"node": "/sys', '{"node": 1}', "[]", "\0" * 40])
def test_a_saved_file_that_was_cut_short_is_one_line_and_changes_nothing(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger, content: str
) -> None:
    """Our own writing cannot leave such a file; a disk or a hand can."""
    runtime = tmp_path / "run"
    runtime.mkdir()
    (runtime / "raised.json").write_text(content)
    (runtime / "raised.new").write_text("what a write that was cut short leaves")
    node.write("min_freq", MIDDLE_HZ)
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.5)
    assert daemon.has_logged(r"^cannot give back an earlier run's floor: (cannot read )?.*raised.json")
    assert node.min_hz == MIDDLE_HZ
    with run() as workload:
        workload.do("call 1")
        wait_until(lambda: is_up(node), "the floor up all the same")
        wait_until(lambda: node.min_hz == MIDDLE_HZ, "given back")
    assert daemon.stop() == 0
    ledger.kept("saved state damaged")


def test_what_is_saved_can_be_read_by_all_and_written_by_root_alone(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=60)
    with run() as workload:
        workload.do("call 1")
        wait_until(lambda: is_up(node), "the floor up")
        saved = daemon.runtime / "raised.json"
        status = saved.stat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o644, 0)
        assert json.loads(saved.read_text()) == {
            "node": str(node.directory),
            "baseline_hz": LOWEST_HZ,
            "written_hz": [HIGHEST_HZ],
        }
