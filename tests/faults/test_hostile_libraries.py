"""What other users of the machine may put in the daemon's way: files that never answer, lie, swarm or change places.

The daemon goes on, gives the clock back, and tells in a line what it leaves alone.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.ledger import Ledger
from tests.faults.silent_fuse import silent_fuse
from tests.kernel.conftest import Llama
from tests.kernel.test_libraries import raises_the_floor
from tests.support import PlainNode, RunningDaemon
from tests.workload import Workload

Start = Callable[..., RunningDaemon]
Run = Callable[..., Workload]

NOT_WATCHED = "which may not answer: not watched; copy it to a local disk$"


# What unshare(1) gives any user.
OWN_NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount")


def entering(pid: int) -> tuple[str, ...]:
    """The command that runs another in the namespaces of this process."""
    return ("nsenter", "--target", str(pid), "--user", "--preserve-credentials", "--mount")


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
