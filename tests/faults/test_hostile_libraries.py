"""What other users of the machine may put in the daemon's way: files that never answer, lie, swarm or change places.

The daemon goes on, gives the clock back, and tells in a line what it leaves alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from moe_gpu_stabilizer.choice import MOST_PROBED_FILES
from moe_gpu_stabilizer.elf import CALLS
from moe_gpu_stabilizer.mappings import MOST_LIBRARIES_OF_A_PROCESS
from tests.faults.ledger import Ledger
from tests.faults.load import QUIET_THREADS
from tests.faults.silent_fuse import silent_fuse
from tests.kernel.conftest import Llama
from tests.kernel.test_libraries import raises_the_floor
from tests.support import PlainNode, RunningDaemon, wait_until
from tests.workload import Workload

Start = Callable[..., RunningDaemon]
Run = Callable[..., Workload]

NOT_WATCHED = "which may not answer: not watched; copy it to a local disk$"


# What unshare(1) gives any user.
OWN_NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount")


def entering(pid: int) -> tuple[str, ...]:
    """The command that runs another in the namespaces of this process."""
    return ("nsenter", "--target", str(pid), "--user", "--preserve-credentials", "--mount")


NOBODY = 65534

# Maps the files that it is given, as a program maps its libraries, and goes on until it is killed.
MAPPER = """
import mmap, signal, sys
maps = []
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        maps.append(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC))
print("mapped", flush=True)
signal.pause()
"""


@contextmanager
def mapped(paths: Sequence[Path], at_once: int = MOST_LIBRARIES_OF_A_PROCESS) -> Iterator[list[int]]:
    """Some processes that map all these files; yields their pids."""
    with ExitStack() as stack:
        processes = []
        for start in range(0, len(paths), at_once):
            command = [sys.executable, "-c", MAPPER, *map(str, paths[start : start + at_once])]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"mapped\n"
        yield [process.pid for process in processes]


def copies(library: Path, directory: Path, count: int, owner_id: int = NOBODY) -> list[Path]:
    """Distinct files with the same content."""
    paths = [directory / f"{number:05}" / "libllama.so" for number in range(count)]
    for path in paths:
        path.parent.mkdir(parents=True)
        shutil.copy(library, path)
        os.chown(path, owner_id, owner_id)
    return paths


def watched_by(daemon: RunningDaemon) -> list[str]:
    status = json.loads(daemon.command("--status", "--json").stdout)
    return [library["path"] for library in status["libraries"]]


def probes_of(pid: int) -> int:
    """How many probes a process holds, those that are being taken out included but for the one at hand."""
    names = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed since
            names.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return names.count("anon_inode:[perf_event]")


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def loads_from(directory: Path) -> dict[str, str]:
    return {**os.environ, "LD_LIBRARY_PATH": str(directory)}


# A server that never answers. Whoever asks it for anything waits in the kernel, and not even SIGKILL ends that.


def test_a_running_library_on_a_server_that_has_fallen_silent(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    """Mapped and configured, by its path, by a glob and through a link; --check looks at it, too."""
    mount, link = tmp_path / "mount", tmp_path / "link" / "libllama.so"
    link.parent.mkdir()
    link.symlink_to(mount / "libllama.so")
    with silent_fuse(mount, llama.library, llama.program) as fuse:
        there = run(program=mount / llama.program.name, env=loads_from(mount))
        there.do("call 1")
        fuse.be_silent()
        configured = f"{llama.library}:{mount}/libllama.so:{mount}/*.so:{link.parent}/*.so"
        daemon = start_daemon(libraries=configured, rebind_seconds=0.3, hold_seconds=0.3)
        for path in (mount / "libllama.so", mount, link, mount / llama.program.name):
            daemon.wait_for_log(rf"^{path} lies on fuse\.silent, {NOT_WATCHED}")
        with run() as good:
            raises_the_floor(good, node)
        check = daemon.command("--check", "--config", str(daemon.config)).stdout
        assert f"{mount}/libllama.so lies on fuse.silent" in " ".join(check.split())
        assert "lies on fuse.silent" in daemon.command("--status").stdout
        assert daemon.stop() == 0
        assert there.process.poll() is None
    ledger.kept("a library on a server that never answers")


def test_a_silent_server_in_a_namespace_of_its_users_own(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    """Any user may mount FUSE where the daemon's own table of mounts does not show it."""
    mount = tmp_path / "mount"
    with silent_fuse(mount, llama.library, llama.program, prefix=OWN_NAMESPACES) as fuse:
        there = run(program=mount / llama.program.name, prefix=entering(fuse.pid), env=loads_from(mount))
        there.do("call 1")
        fuse.be_silent()
        daemon = start_daemon(libraries=llama.library, rebind_seconds=0.3, hold_seconds=0.3)
        daemon.wait_for_log(rf"^{mount}/libllama.so lies on fuse\.silent, {NOT_WATCHED}")
        with run() as good:
            raises_the_floor(good, node)
        assert daemon.stop() == 0
        assert there.process.poll() is None
    ledger.kept("a silent server in another mount namespace")


@pytest.mark.parametrize("hidden", [False, True], ids=["open", "hidden"])
def test_a_silent_server_below_an_overlay(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger, hidden: bool
) -> None:
    """An overlay is local, what it lies over need not be; and who made it may unmount that, so that no table has it."""
    mount, overlay, empty = (tmp_path / name for name in ("mount", "overlay", "empty"))
    overlay.mkdir()
    empty.mkdir()
    with silent_fuse(mount, llama.library, llama.program, prefix=OWN_NAMESPACES) as fuse:
        inside = entering(fuse.pid)
        layers = f"lowerdir={mount}:{empty}"
        subprocess.run([*inside, "mount", "-t", "overlay", "-o", layers, "overlay", overlay], check=True)
        if hidden:
            subprocess.run([*inside, "umount", "--lazy", mount], check=True)
        there = run(program=overlay / llama.program.name, prefix=inside, env=loads_from(overlay))
        there.do("call 1")
        fuse.be_silent()
        daemon = start_daemon(libraries=llama.library, rebind_seconds=0.3, hold_seconds=0.3)
        daemon.wait_for_log(rf"^{overlay}/libllama.so lies on overlay of a user namespace, {NOT_WATCHED}")
        with run() as good:
            raises_the_floor(good, node)
        assert daemon.stop() == 0
        assert there.process.poll() is None
    ledger.kept("a silent server below an overlay")


def test_a_silent_server_that_no_table_shows(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    """A dead mount that was taken away with `umount --lazy` while it was in use."""
    mount = tmp_path / "mount"
    with silent_fuse(mount, llama.library, llama.program) as fuse:
        there = run(program=mount / llama.program.name, env=loads_from(mount))
        there.do("call 1")
        fuse.be_silent()
        subprocess.run(["umount", "--lazy", mount], check=True)
        daemon = start_daemon(libraries=llama.library, rebind_seconds=0.3, hold_seconds=0.3)
        daemon.wait_for_log(rf"^\S*libllama.so lies on a hidden mount, {NOT_WATCHED}")
        with run() as good:
            raises_the_floor(good, node)
        assert daemon.stop() == 0
        assert there.process.poll() is None
    ledger.kept("a silent server that is unmounted already")


# A swarm of files. The kernel takes 100 ms for each probe that it takes out, also when it ends a daemon that is killed.


def test_one_users_swarm_of_copies_takes_nothing_from_others(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    """80 copies of a library, all mapped, then another user's one and a configured one that nobody uses yet."""
    swarm = copies(llama.library, tmp_path / "swarm", 80)
    configured, late = copies(llama.library, tmp_path / "configured", 2)
    others = copies(llama.library, tmp_path / "others", 1, owner_id=1)
    with mapped(swarm):
        daemon = start_daemon(libraries=configured, rebind_seconds=0.3, hold_seconds=0.3)
        more = rf"^libraries that are not watched, as there are more than {MOST_PROBED_FILES}: \d+; "
        daemon.wait_for_log(f"{more}name those that must be in STABILIZER_LIBRARIES$")
        wait_until(lambda: len(watched_by(daemon)) == MOST_PROBED_FILES, "as many watched as may be")
        with mapped(others), run() as good:
            daemon.wait_for_log(rf"^attached {others[0]} ")
            daemon.wait_for_log(rf"^attached {llama.library} ")
            raises_the_floor(good, node)
            assert len(watched_by(daemon)) <= MOST_PROBED_FILES
            daemon.configure(**{**daemon.settings, "libraries": f"{configured}:{late}"}, devfreq=node.directory)
            daemon.send(signal.SIGHUP)
            wait_until(lambda: {str(configured), str(late)} <= set(watched_by(daemon)), "what is configured is watched")
            raises_the_floor(good, node)
        assert daemon.log.count("libraries that are not watched") == 1
        assert f"more than {MOST_PROBED_FILES}" in daemon.command("--status").stdout
    daemon.wait_for_log("^all libraries are watched again$")
    ledger.kept("a swarm of copies of a library")


def test_copies_that_come_and_go_all_the_time_pile_nothing_up(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    """Each tick finds other ones. Those whose probes are being taken out count, so only what is left is probed."""
    swarm = copies(llama.library, tmp_path / "swarm", 120)
    daemon = start_daemon(libraries=llama.library, rebind_seconds=0.2, hold_seconds=0.3)
    probes: list[int] = []

    def some_are_watched(generation: Sequence[Path]) -> bool:
        probes.append(probes_of(daemon.pid))
        assert threads_of(daemon.pid) <= QUIET_THREADS + 1
        return sum(f"attached {path} " in daemon.log for path in generation) > 4

    for start in range(0, len(swarm), 40):
        generation = swarm[start : start + 40]
        with mapped(generation):
            wait_until(lambda: some_are_watched(generation), "some of these watched", seconds=120)  # noqa: B023
    assert max(probes) <= MOST_PROBED_FILES * len(CALLS)
    with run() as good:
        raises_the_floor(good, node)
    wait_until(lambda: threads_of(daemon.pid) == QUIET_THREADS, "all probes taken out", seconds=120)
    ledger.kept("copies of a library that come and go")


def test_a_daemon_that_is_killed_with_all_it_may_watch_is_gone_in_bounded_time(
    start_daemon: Start, llama: Llama, tmp_path: Path, ledger: Ledger
) -> None:
    """The clock is given back when its process is gone; there would be 80 libraries to let go of."""
    with mapped(copies(llama.library, tmp_path / "swarm", 80)):
        daemon = start_daemon(libraries=llama.library, rebind_seconds=0.3)
        wait_until(lambda: len(watched_by(daemon)) == MOST_PROBED_FILES, "as many watched as may be")
        assert daemon.process is not None
        began = time.monotonic()
        daemon.process.kill()
        daemon.process.wait(120)
        print(f"gone in {time.monotonic() - began:.1f} s")
    ledger.kept("killed while it watches as many libraries as it may")
