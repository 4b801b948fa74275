"""The GPU's node: absent, late, gone while raised, back under another name, refusing, capped, not following.

Each error number that sysfs gives is tried, by a library that is preloaded into the daemon; what the kernel's own
devfreq does is tried on an emulated board.
"""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.ledger import Ledger
from tests.kernel.conftest import REPOSITORY, Llama
from tests.support import HIGHEST_HZ, LOWEST_HZ, PlainNode, RunningDaemon, stays, wait_until
from tests.workload import Workload

Start = Callable[..., RunningDaemon]
Run = Callable[..., Workload]

LOW_HZ, MIDDLE_HZ = 408_000_000, 714_000_000

# A child is what RunningDaemon looks for behind a prefix.
AS_A_CHILD = ("sh", "-c", '"$@"; exit "$?"', "sh")


def is_up(node: PlainNode, hz: int = HIGHEST_HZ) -> bool:
    return node.min_hz == hz


def given_back(node: PlainNode) -> bool:
    return node.min_hz == LOWEST_HZ


# Boards whose node comes and goes.


@pytest.fixture
def class_directory(tmp_path: Path) -> Path:
    """The daemon's /sys/class/devfreq, without a node yet."""
    directory = tmp_path / "class" / "devfreq"
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def board(tmp_path: Path, class_directory: Path, llama: Llama, flag: str) -> Iterator[RunningDaemon]:
    """A daemon that has to find the GPU's node by itself."""
    mount = f'mount --bind {class_directory.parent} /sys/class && exec "$@"'
    daemon = RunningDaemon(
        tmp_path, None, REPOSITORY, ("unshare", "--mount", "--fork", "sh", "-c", mount, "sh"),
        libraries=llama.library, moe_flags=flag, detect="flags", rebind_seconds=0.3, hold_seconds=0.5,
    )  # fmt: skip
    with daemon:
        yield daemon


def test_a_node_that_is_absent_at_boot_is_raised_when_it_appears(
    board: RunningDaemon, class_directory: Path, run: Run, ledger: Ledger
) -> None:
    board.wait_for_log(r"^no GPU node yet \(a GPU in /sys/class/devfreq\)")
    with run() as workload:
        workload.begin("busy 3000")
        board.wait_for_log(r"^cannot raise the floor: no GPU node$")
        node = PlainNode(class_directory / "17000000.gpu")
        wait_until(lambda: is_up(node), "the floor up in the middle of the call")
        workload.finish()
        wait_until(lambda: given_back(node), "the floor given back")
    ledger.kept("node absent at boot, appears during a call")


def test_a_node_that_vanishes_while_raised_comes_back_under_another_name(
    board: RunningDaemon, class_directory: Path, run: Run, tmp_path: Path, ledger: Ledger
) -> None:
    """As JetPack 5's 17000000.ga10b after a reload of the driver: a new directory, whose min_freq nobody has raised."""
    first = PlainNode(class_directory / "17000000.gpu")
    board.wait_for_log(r"^found the GPU node /sys/class/devfreq/17000000.gpu$")
    with run() as workload:
        workload.begin("busy 4000")
        wait_until(lambda: is_up(first), "the floor up")
        first.directory.rename(tmp_path / "gone")
        board.wait_for_log(r"^the floor is gone with the GPU node$")
        assert not (board.runtime / "raised.json").exists(), "nothing is to be given back"
        second = PlainNode(class_directory / "17000000.ga10b")
        wait_until(lambda: is_up(second), "the floor up at the other name")
        workload.finish()
        wait_until(lambda: given_back(second), "the floor given back")
    assert board.log.count("floor 1020 MHz") == 2
    ledger.kept("node gone while raised, back under another name")


def test_of_several_gpu_nodes_the_best_known_is_taken_and_the_others_are_named(
    board: RunningDaemon, class_directory: Path, run: Run, ledger: Ledger
) -> None:
    nodes = class_directory.with_name("both")
    other, best = PlainNode(nodes / "13000000.gpu"), PlainNode(nodes / "17000000.gpu")
    class_directory.rmdir()
    nodes.rename(class_directory)  # both at once
    board.wait_for_log(r"^found the GPU node /sys/class/devfreq/17000000.gpu$")
    board.wait_for_log(r"^13000000.gpu may be a GPU, too: STABILIZER_DEVFREQ takes another node$")
    other.directory, best.directory = class_directory / "13000000.gpu", class_directory / "17000000.gpu"
    with run() as workload:
        workload.do("call 1")
        wait_until(lambda: is_up(best), "the floor up")
        wait_until(lambda: given_back(best), "the floor given back")
    assert given_back(other)
    ledger.kept("several GPU nodes")


# A node that refuses.


@pytest.fixture(scope="session")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("refuse") / "refuse.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("refuse.c")], check=True)
    return library


@pytest.mark.parametrize("name", ["EACCES", "EROFS", "EINVAL", "EBUSY", "ENODEV", "EIO"])
def test_a_refused_write_is_said_once_and_tried_again(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, refusing: Path, tmp_path: Path, ledger: Ledger,
    name: str,
) -> None:  # fmt: skip
    number = getattr(errno, name)
    control = tmp_path / "refuse"

    def refuse() -> None:
        (tmp_path / "number").write_text(str(number))
        (tmp_path / "number").rename(control)

    prefix = ("env", f"LD_PRELOAD={refusing}", f"REFUSE_WITH={control}", *AS_A_CHILD)
    refuse()
    daemon = start_daemon(prefix=prefix, libraries=llama.library, hold_seconds=0.5, log_level="debug")
    with run() as workload:
        workload.begin("busy 5000")
        why = rf"cannot write \d+ to {node.directory}/min_freq: {os.strerror(number)}"
        daemon.wait_for_log(rf"^cannot raise the floor: {why}$")
        assert not (daemon.runtime / "raised.json").exists(), "nothing was raised, and nothing is to be given back"
        control.unlink()
        wait_until(lambda: is_up(node), "the floor up without a tick")
        refuse()
        workload.finish()
        daemon.wait_for_log(rf"^cannot give the floor back: {why}$")
        stays(lambda: is_up(node), 2.5, "refused")
        control.unlink()
        wait_until(lambda: given_back(node), "the floor given back without a tick", seconds=5)
    assert 1 < daemon.log.count("writing 306000000") <= 20, "about once a second: no spinning"
    for line in ("cannot raise the floor", "cannot give the floor back"):
        assert daemon.log.count(line) == 1, "said once"
    ledger.kept(f"write refused with {name}")


# What the clock does.


def replace(node: PlainNode, name: str, hz: int) -> None:
    """Let the kernel change what an attribute reads: no program writes, and fanotify tells nothing of a mapping."""
    with (node.directory / name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        content[:] = str(hz).encode().ljust(len(content), b"\n")


def test_a_thermal_cap_below_the_floor_comes_and_goes(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """Under a cap min_freq reads the cap, and what was asked for when it goes."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.5, rebind_seconds=0.2)
    with run() as workload:
        workload.begin("busy 3000")
        wait_until(lambda: is_up(node), "the floor up")
        replace(node, "max_freq", MIDDLE_HZ)
        replace(node, "min_freq", MIDDLE_HZ)
        stays(lambda: is_up(node, MIDDLE_HZ), 0.7, "left to the kernel")
        replace(node, "min_freq", HIGHEST_HZ)
        replace(node, "max_freq", HIGHEST_HZ)
        workload.finish()
        wait_until(lambda: given_back(node), "the floor given back")

        # One that is there before the floor is: the floor rises with it.
        replace(node, "max_freq", MIDDLE_HZ)
        workload.begin("busy 3000")
        wait_until(lambda: is_up(node, MIDDLE_HZ), "as high as the cap")
        replace(node, "max_freq", HIGHEST_HZ)
        wait_until(lambda: is_up(node), "as high as it may now be")
        replace(node, "max_freq", MIDDLE_HZ)
        replace(node, "min_freq", MIDDLE_HZ)
        workload.finish()
        wait_until(lambda: given_back(node), "the floor given back under the cap")
    assert "set to" not in daemon.log, "nobody else has written"
    ledger.kept("cap below the floor comes and goes")


def test_a_clock_that_does_not_follow_is_said_once(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """The driver fails to change the clock; the write to min_freq has succeeded all the same."""
    node.write("cur_freq", LOWEST_HZ)
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.5, rebind_seconds=0.2)
    with run() as workload:
        workload.begin("busy 4000")
        daemon.wait_for_log(r"^the clock stayed at 306 MHz when min_freq was raised to 1020 MHz: the GPU's driver does")
        wait_until(lambda: "does not follow" in daemon.command("--status").stdout, "it to be published")
        node.write("cur_freq", HIGHEST_HZ)
        daemon.wait_for_log(r"^the clock follows min_freq again$")
        workload.finish()
        wait_until(lambda: given_back(node), "the floor given back")
    assert daemon.log.count("does not follow") == 1, "said once"
    ledger.kept("clock does not follow min_freq")


@pytest.mark.parametrize("powered_down", [True, False], ids=["0 Hz", "no cur_freq"])
def test_a_clock_that_cannot_be_known_is_not_complained_of(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, powered_down: bool
) -> None:
    if powered_down:
        node.write("cur_freq", 0)
    else:
        (node.directory / "cur_freq").unlink()
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.5, rebind_seconds=0.2)
    with run() as workload:
        workload.do("busy 1500")
        wait_until(lambda: given_back(node), "the floor given back")
    assert daemon.has_logged(r"^floor 1020 MHz")
    assert "does not follow" not in daemon.log
