"""Finding, reading and writing the GPU's devfreq node, in a tree as each board's kernel shows it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moe_gpu_stabilizer.devfreq import Node, candidates, find, mhz, same_frequency
from moe_gpu_stabilizer.errors import DevfreqError
from tests.support import HIGHEST_HZ, LADDER_HZ, LOWEST_HZ, PlainNode

# Readable by all and writable by nobody, not even root.
UNWRITABLE_ATTRIBUTE = Path("/proc/sys/kernel/ngroups_max")


class Board:
    """A /sys of its own: /sys/class/devfreq holds symlinks into /sys/devices, as on every board."""

    def __init__(self, sys: Path) -> None:
        self.class_directory = sys / "class/devfreq"
        self.class_directory.mkdir(parents=True)
        self._devices = sys / "devices/platform"

    def add(self, name: str, device: str = "", of_name: str | None = None) -> PlainNode:
        """Register a devfreq node; `device` is its parent's name, `of_name` what the device tree calls that."""
        directory = self._devices / (device or name) / "devfreq" / name
        node = PlainNode(directory)
        parent = directory.parent.parent
        (directory / "device").symlink_to(os.path.relpath(parent, directory))
        if of_name is not None:
            tree = self._devices.parent.parent / "firmware/devicetree" / (device or name)
            tree.mkdir(parents=True)
            (tree / "name").write_bytes(of_name.encode() + b"\0")
            (parent / "of_node").symlink_to(os.path.relpath(tree, parent))
        entry = self.class_directory / name
        entry.symlink_to(os.path.relpath(directory, self.class_directory))
        return node

    @property
    def found(self) -> str | None:
        node = find(class_directory=self.class_directory)
        return node.name if node else None

    @property
    def all_found(self) -> list[str]:
        return [node.name for node in candidates(self.class_directory)]


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path / "sys")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(PlainNode(tmp_path / "17000000.gpu").directory)


@pytest.mark.parametrize(
    ("gpu", "others"),
    [
        # Orin: memory controller and video engines have nodes of their own.
        ("17000000.gpu", ["15340000.vic", "15480000.nvdec", "154c0000.nvenc", "15880000.nvdla0"]),
        ("17000000.ga10b", ["15340000.vic", "15480000.nvdec"]),
        ("17000000.gv11b", ["15340000.vic", "15a80000.nvenc"]),
        ("17000000.gp10b", ["15340000.vic"]),
        ("57000000.gpu", ["54340000.vic"]),
        # Thor: the other one is the video decoder, and there is no device tree name.
        ("gpu-gpc-0", ["gpu-nvd-0", "8188050000.vic"]),
        ("fb000000.gpu", ["dmc", "fdab0000.npu"]),
        ("ff9a0000.gpu", ["dmc"]),
        ("fde60000.gpu", ["dmc", "fde40000.npu"]),
        ("3d00000.gpu", ["soc:qcom,cpubw"]),
        ("3d00000.qcom,kgsl-3d0", ["soc:qcom,gpubw", "1d84000.ufshc"]),
        ("5000000.qcom,kgsl-3d0", ["1d84000.ufshc"]),
        ("1800000.gpu", ["dmc"]),
    ],
)
def test_the_gpu_of_each_board_is_found_and_nothing_else(board: Board, gpu: str, others: list[str]) -> None:
    for name in (*others, gpu):
        board.add(name)
    assert board.all_found == [gpu]


def test_an_unheard_of_name_is_known_by_the_device_tree(board: Board) -> None:
    board.add("dmc", of_name="dmc")
    board.add("soc:mali", of_name="gpu")
    assert board.found == "soc:mali"


def test_a_known_name_goes_before_a_device_tree_name(board: Board) -> None:
    board.add("aaa", of_name="gpu")
    board.add("fb000000.gpu", of_name="gpu")
    assert board.all_found == ["fb000000.gpu", "aaa"]


def test_the_first_of_two_gpcs_is_taken(board: Board) -> None:
    for name in ("gpu-gpc-1", "gpu-nvd-0", "gpu-gpc-0"):
        board.add(name)
    assert board.all_found == ["gpu-gpc-0", "gpu-gpc-1"]


def test_a_board_without_a_gpu_has_none(board: Board) -> None:
    board.add("dmc", of_name="dmc")
    board.add("1d84000.ufshc")
    assert board.found is None


def test_a_kernel_without_devfreq_has_none(tmp_path: Path) -> None:
    assert find(class_directory=tmp_path / "class/devfreq") is None


def test_an_entry_that_leads_nowhere_does_no_harm(board: Board) -> None:
    """A device may be unregistered while the class is listed."""
    (board.class_directory / "vic").symlink_to("../../devices/gone")
    board.add("17000000.gpu")
    assert board.found == "17000000.gpu"


def test_a_configured_node_is_taken_whatever_its_name(board: Board) -> None:
    board.add("17000000.gpu")
    other = board.add("mine")
    node = find(str(other.directory), board.class_directory)
    assert node is not None
    assert (node.name, str(node)) == ("mine", str(other.directory))
    link = find(str(board.class_directory / "mine"), board.class_directory)
    assert link is not None
    assert link.min_hz == LOWEST_HZ


def test_a_configured_node_that_is_not_there_is_waited_for_and_not_replaced(board: Board, tmp_path: Path) -> None:
    board.add("17000000.gpu")
    assert find(str(tmp_path / "missing"), board.class_directory) is None
    (tmp_path / "empty").mkdir()
    assert find(str(tmp_path / "empty"), board.class_directory) is None


# Reading.


def test_a_node_is_read(node: Node) -> None:
    assert (node.min_hz, node.max_hz) == (LOWEST_HZ, HIGHEST_HZ)
    assert node.available_hz() == list(LADDER_HZ)
    assert node.read("governor") == "nvhost_podgov"


def test_frequencies_may_be_listed_in_any_order(node: Node) -> None:
    (node.directory / "available_frequencies").write_text("612000000 1020000000 306000000 \n")
    assert node.available_hz() == [306_000_000, 612_000_000, 1_020_000_000]


@pytest.mark.parametrize("text", ["", "\n", "<unsupported>", "-1", "306 MHz", "306000000.0", "0x10", "²"])
def test_what_is_no_frequency_is_an_error_that_shows_it(node: Node, text: str) -> None:
    (node.directory / "min_freq").write_text(text)
    with pytest.raises(DevfreqError, match="not a frequency"):
        _ = node.min_hz


def test_a_node_that_has_vanished_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DevfreqError, match=r"cannot read .*/gone/min_freq: No such file or directory"):
        _ = Node(tmp_path / "gone").min_hz


# Which floor?


def test_the_drivers_table_is_read_once_and_the_cap_each_time(node: Node) -> None:
    """A first call waits for what is read here."""
    assert node.floor_hz(None) == HIGHEST_HZ
    (node.directory / "available_frequencies").unlink()
    assert node.floor_hz(None) == HIGHEST_HZ
    (node.directory / "max_freq").write_text("612000000\n")
    assert node.floor_hz(None) == 612_000_000


def test_the_default_floor_is_the_highest_available_frequency(node: Node) -> None:
    assert node.floor_hz(None) == HIGHEST_HZ


def test_a_wanted_floor_is_taken_as_it_is(node: Node) -> None:
    """devfreq takes any frequency; the driver rounds."""
    assert node.floor_hz(612_000_000) == 612_000_000
    assert node.floor_hz(700_000_000) == 700_000_000


@pytest.mark.parametrize("wanted_hz", [None, 1_020_000_000, 2_000_000_000])
def test_the_floor_is_never_above_max_freq(node: Node, wanted_hz: int | None) -> None:
    (node.directory / "max_freq").write_text("816000000\n")
    assert node.floor_hz(wanted_hz) == 816_000_000


@pytest.mark.parametrize("listed", [None, "", "\n", "none"])
def test_where_the_driver_lists_no_frequencies_the_floor_is_max_freq(node: Node, listed: str | None) -> None:
    if listed is None:
        (node.directory / "available_frequencies").unlink()
    else:
        (node.directory / "available_frequencies").write_text(listed)
    assert node.available_hz() == []
    assert node.floor_hz(None) == HIGHEST_HZ
    assert node.floor_hz(612_000_000) == 612_000_000


def test_without_max_freq_there_is_no_floor(node: Node) -> None:
    (node.directory / "max_freq").unlink()
    with pytest.raises(DevfreqError, match="max_freq"):
        node.floor_hz(None)


# Writing.


def test_only_min_freq_is_written(node: Node) -> None:
    def contents() -> dict[str, str]:
        return {path.name: path.read_text() for path in node.directory.iterdir()}

    before = contents()
    node.write_min_hz(HIGHEST_HZ)
    assert contents() == {**before, "min_freq": "1020000000\n"}


def test_a_node_that_refuses_says_value_file_and_cause(node: Node) -> None:
    (node.directory / "min_freq").unlink()
    (node.directory / "min_freq").symlink_to(UNWRITABLE_ATTRIBUTE)
    assert node.min_hz == int(UNWRITABLE_ATTRIBUTE.read_text()), "it can still be read"
    with pytest.raises(DevfreqError, match=r"cannot write 1020000000 to .*/min_freq: (Permission|Read-only)"):
        node.write_min_hz(HIGHEST_HZ)


def test_a_vanished_node_is_not_made_anew(tmp_path: Path) -> None:
    with pytest.raises(DevfreqError, match="No such file or directory"):
        Node(tmp_path / "gone").write_min_hz(HIGHEST_HZ)


@pytest.mark.parametrize(
    ("hz", "text"),
    [
        (1_020_000_000, "1020 MHz"),
        (306_000_000, "306 MHz"),
        (114_750_000, "114.75 MHz"),
        (1_300_500_000, "1300.5 MHz"),
        (7, "7 Hz"),
        (0, "0 Hz"),
    ],
)
def test_frequencies_are_written_in_mhz(hz: int, text: str) -> None:
    assert mhz(hz) == text


def test_a_frequency_that_the_kernel_rounds_to_khz_is_the_same() -> None:
    assert same_frequency(612_000_001, 612_000_000)
    assert same_frequency(612_000_000, 612_000_999)
    assert not same_frequency(612_000_000, 612_001_000)


# Holding the directory and its limits open spares the way to them, which is long on a board: the floor waits for that.


def test_a_node_that_is_held_is_read_and_written_wherever_the_way_to_it_leads(tmp_path: Path) -> None:
    PlainNode(tmp_path / "gpu", min_hz=LOWEST_HZ)
    (tmp_path / "way").symlink_to("gpu")
    node = Node(tmp_path / "way")
    node.hold()
    (tmp_path / "way").unlink()
    node.write_min_hz(HIGHEST_HZ)
    assert node.min_hz == HIGHEST_HZ
    node.let_go()
    with pytest.raises(DevfreqError, match="No such file"):
        _ = node.min_hz


def test_a_node_in_the_place_of_one_that_was_held_is_found(tmp_path: Path) -> None:
    """A driver that goes and comes back: the kernel refuses to read what has gone, in sysfs as in /proc."""
    directory = PlainNode(tmp_path / "gpu").directory
    with subprocess.Popen(["sleep", "infinity"]) as process:
        (directory / "min_freq").unlink()
        (directory / "min_freq").symlink_to(f"/proc/{process.pid}/oom_score")
        node = Node(directory)
        node.hold()
        assert node.min_hz >= 0
        process.kill()
    with pytest.raises(DevfreqError, match="No such file"):
        _ = node.min_hz
    shutil.rmtree(directory)
    PlainNode(directory, min_hz=HIGHEST_HZ)
    assert node.min_hz == HIGHEST_HZ
    node.write_min_hz(LOWEST_HZ)
    assert (directory / "min_freq").read_text() == f"{LOWEST_HZ}\n"


def test_a_node_is_held_anew_at_each_tick_as_it_may_have_been_moved(tmp_path: Path) -> None:
    directory = PlainNode(tmp_path / "gpu", min_hz=LOWEST_HZ).directory
    node = Node(directory)
    node.hold()
    directory.rename(tmp_path / "aside")
    PlainNode(directory, min_hz=HIGHEST_HZ)
    node.hold()
    assert node.min_hz == HIGHEST_HZ


def test_a_node_is_held_by_three_descriptors_and_none_is_left(node: Node) -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        node.hold()
    assert len(os.listdir("/proc/self/fd")) == len(before) + 3
    node.let_go()
    assert os.listdir("/proc/self/fd") == before


def test_a_node_without_a_limit_is_held_as_far_as_it_goes(node: Node) -> None:
    (node.directory / "max_freq").unlink()
    node.hold()
    assert node.min_hz == LOWEST_HZ
    with pytest.raises(DevfreqError, match="max_freq: No such file"):
        _ = node.max_hz
