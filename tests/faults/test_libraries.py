"""Libraries that come and go, in the ways that tests/kernel/test_libraries.py does not have."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_gpu_stabilizer.mounts import OWN_MOUNTS, MayNotAnswerError, Mounts
from tests.faults.ledger import Ledger
from tests.kernel.conftest import Llama
from tests.kernel.test_libraries import OTHER_CODE, raises_the_floor
from tests.support import PlainNode, RunningDaemon, wait_until
from tests.workload import Workload, build_library, build_program, build_static, copy_with_libraries

Start = Callable[..., RunningDaemon]
Run = Callable[..., Workload]


def loads_from(directory: Path) -> dict[str, str]:
    return {**os.environ, "LD_LIBRARY_PATH": str(directory)}


def in_mounts_of_its_own(*commands: str) -> tuple[str, ...]:
    """The command that runs another in a mount namespace of its own, in which these commands were run before."""
    return ("unshare", "--mount", "sh", "-ec", "\n".join([*commands, 'exec "$@"']), "sh")


@pytest.mark.parametrize("where", ["lower", "upper"])
def test_a_library_on_an_overlay(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger, where: str
) -> None:
    """As in an image of a container, and as in what was installed in the container since."""
    layers = {name: tmp_path / "disk" / name for name in ("lower", "upper", "work")}
    for layer in layers.values():
        layer.mkdir(parents=True)
    shutil.copy(llama.library, layers[where])
    seen = tmp_path / "seen"
    seen.mkdir()
    options = f"lowerdir={layers['lower']},upperdir={layers['upper']},workdir={layers['work']}"
    prefix = in_mounts_of_its_own(f"mount -t overlay -o '{options}' overlay '{seen}'")
    daemon = start_daemon(rebind_seconds=0.3, hold_seconds=0.3)
    with run(prefix=prefix, env=loads_from(seen)) as workload:
        daemon.wait_for_log(rf"^attached {seen}/libllama.so ")
        raises_the_floor(workload, node)
    daemon.wait_for_log(rf"^detached {seen}/libllama.so$")
    ledger.kept("a library on an overlay")


def test_a_library_in_a_mount_namespace_of_its_own(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    """On a tmpfs that nobody outside can see, under a path that outside leads to nothing."""
    inside = tmp_path / "inside"
    inside.mkdir()
    prefix = in_mounts_of_its_own(f"mount -t tmpfs tmpfs '{inside}'", f"cp '{llama.library}' '{inside}'")
    daemon = start_daemon(rebind_seconds=0.3, hold_seconds=0.3)
    with run(prefix=prefix, env=loads_from(inside)) as workload:
        daemon.wait_for_log(rf"^attached {inside}/libllama.so ")
        assert not (inside / "libllama.so").exists()
        raises_the_floor(workload, node)
    daemon.wait_for_log(rf"^detached {inside}/libllama.so$")
    ledger.kept("a library in another mount namespace")


def test_a_container_that_is_started_later(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    """With processes, mounts and a root of its own: an overlay, as container engines make it."""
    image, root = tmp_path / "image", tmp_path / "root"
    copy_with_libraries(llama.program, image)
    for directory in (root, tmp_path / "upper", tmp_path / "work", image / "old"):
        directory.mkdir()
    options = f"lowerdir={image},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    daemon = start_daemon(rebind_seconds=0.3, hold_seconds=0.3)
    script = f"mount -t overlay -o '{options}' overlay '{root}'\ncd '{root}'\npivot_root . old\nexec \"$@\""
    container = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "sh", "-ec", script, "sh")
    with run(prefix=container) as workload:
        assert workload.own_pid == 1
        daemon.wait_for_log(rf"^attached {llama.library} ")
        raises_the_floor(workload, node)
    daemon.wait_for_log(rf"^detached {llama.library}$")
    ledger.kept("a container that is started later")


def test_two_builds_at_once(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    other = build_library(tmp_path / "other" / "libllama.so", *OTHER_CODE)
    program = build_program(tmp_path / "other" / "llama-server", other)
    daemon = start_daemon(rebind_seconds=0.3, hold_seconds=0.3)
    with run() as first:
        daemon.wait_for_log(rf"^attached {llama.library} ")
        with run(program=program) as second:
            daemon.wait_for_log(rf"^attached {other} ")
            raises_the_floor(second, node)
            raises_the_floor(first, node)
        daemon.wait_for_log(rf"^detached {other}$")
        raises_the_floor(first, node)
    ledger.kept("two builds at once")


def test_a_stripped_library(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    """Its dynamic symbols stay, or nobody could load it."""
    subprocess.run(["strip", llama.library], check=True)
    daemon = start_daemon(rebind_seconds=0.3, hold_seconds=0.3)
    with run() as workload:
        daemon.wait_for_log(rf"^attached {llama.library} ")
        raises_the_floor(workload, node)
    ledger.kept("a stripped library")


def test_a_stripped_static_program_does_no_harm(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    """Nothing in it has a name. It cannot be watched, which README says; others are all the same."""
    program = build_static(tmp_path / "static" / "llama-server")
    subprocess.run(["strip", program], check=True)
    daemon = start_daemon(libraries=llama.library, rebind_seconds=0.3, hold_seconds=0.3)
    with run(program=program) as silent, run() as workload:
        silent.do("call 100")
        raises_the_floor(workload, node)
        assert str(program) not in daemon.log
    ledger.kept("a stripped static program")


def test_the_new_library_is_attached_to_before_the_old_one_is_let_go(
    start_daemon: Start, run: Run, llama: Llama, tmp_path: Path, ledger: Ledger
) -> None:
    """Replaced by rename while nobody runs it, so that one tick does both."""
    daemon = start_daemon(libraries=llama.library, rebind_seconds=0.3)
    daemon.wait_for_log(rf"^attached {llama.library} ")
    os.rename(build_library(tmp_path / "new" / "libllama.so", *OTHER_CODE), llama.library)
    wait_until(lambda: f"detached {llama.library}" in daemon.log, "let go of the old one")
    lines = [line.split()[0] for line in daemon.log.splitlines() if f" {llama.library}" in line]
    assert lines == ["attached", "attached", "detached"]
    ledger.kept("replaced by rename while nobody runs it")


def test_mounts_of_the_machine_are_known_to_a_service_with_mounts_of_its_own(tmp_path: Path) -> None:
    """As systemd starts it. Here another process stands for the machine's first one, whose table is looked into."""
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", "echo ready; read line"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as machine:  # fmt: skip
        assert machine.stdout is not None
        assert machine.stdout.readline() == "ready\n"
        mounts = Mounts([OWN_MOUNTS, f"/proc/{machine.pid}/mountinfo"])
        enter = ("nsenter", "--target", str(machine.pid), "--mount")
        try:
            subprocess.run([*enter, "mount", "-t", "tmpfs", "tmpfs", tmp_path], check=True)
            # By a path that gives no hint of whose table to look into.
            handle = os.open(f"/proc/{machine.pid}/root{tmp_path}", os.O_PATH)
            mounts.check(handle, "/anywhere")
            os.close(handle)
            subprocess.run([*enter, "umount", tmp_path], check=True)
            subprocess.run([*enter, "mount", "-t", "proc", "proc", tmp_path], check=True)
            handle = os.open(f"/proc/{machine.pid}/root{tmp_path}", os.O_PATH)
            with pytest.raises(MayNotAnswerError):
                mounts.check(handle, "/anywhere")
            os.close(handle)
        finally:
            mounts.close()
            machine.kill()
