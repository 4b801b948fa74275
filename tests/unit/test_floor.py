"""The floor is raised, given back, and never lost in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_gpu_stabilizer.devfreq import Node
from moe_gpu_stabilizer.errors import DevfreqError, StabilizerError
from moe_gpu_stabilizer.floor import Floor
from moe_gpu_stabilizer.runtime import Raised, Runtime
from tests.support import HIGHEST_HZ, LOWEST_HZ, PlainNode

from .test_devfreq import UNWRITABLE_ATTRIBUTE

MIDDLE_HZ = 612_000_000


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    runtime = Runtime(tmp_path / "run")
    runtime.create()
    return runtime


@pytest.fixture
def gpu(tmp_path: Path) -> PlainNode:
    return PlainNode(tmp_path / "17000000.gpu")


@pytest.fixture
def floor(runtime: Runtime, gpu: PlainNode) -> Floor:
    return Floor(runtime, Node(gpu.directory))


def after_a_kill(runtime: Runtime) -> Floor:
    """What the next start, or --restore, has: the run-time directory and nothing else."""
    return Floor(Runtime(runtime.directory))


# Up and down.


def test_the_floor_is_raised_and_what_was_there_is_given_back(floor: Floor, gpu: PlainNode) -> None:
    assert floor.raise_to(None) == HIGHEST_HZ
    assert gpu.min_hz == HIGHEST_HZ
    assert floor.give_back() == LOWEST_HZ
    assert gpu.min_hz == LOWEST_HZ


def test_what_was_there_is_given_back_also_where_it_is_not_the_lowest(floor: Floor, gpu: PlainNode) -> None:
    gpu.write("min_freq", MIDDLE_HZ)
    floor.raise_to(None)
    assert floor.give_back() == MIDDLE_HZ
    assert gpu.min_hz == MIDDLE_HZ


def test_what_is_there_is_looked_up_at_each_raise(floor: Floor, gpu: PlainNode) -> None:
    floor.raise_to(None)
    floor.give_back()
    gpu.write("min_freq", MIDDLE_HZ)
    floor.raise_to(None)
    assert floor.give_back() == MIDDLE_HZ


def test_it_is_given_back_once_only(floor: Floor, gpu: PlainNode) -> None:
    floor.raise_to(None)
    floor.give_back()
    gpu.write("min_freq", MIDDLE_HZ)
    assert floor.give_back() is None
    assert gpu.min_hz == MIDDLE_HZ


def test_nothing_is_given_back_where_nothing_was_raised(floor: Floor, gpu: PlainNode) -> None:
    assert floor.give_back() is None
    assert gpu.min_hz == LOWEST_HZ


@pytest.mark.parametrize("already_hz", [MIDDLE_HZ, MIDDLE_HZ + 1, HIGHEST_HZ])
def test_where_min_freq_is_that_high_already_there_is_nothing_to_do(
    floor: Floor, gpu: PlainNode, runtime: Runtime, already_hz: int
) -> None:
    """jetson_clocks is on, or another program asks for more than we would."""
    gpu.write("min_freq", already_hz)
    assert floor.raise_to(MIDDLE_HZ) is None
    assert floor.give_back() is None
    assert gpu.min_hz == already_hz
    assert runtime.load_raised() is None


def test_the_floor_is_not_raised_above_max_freq(floor: Floor, gpu: PlainNode) -> None:
    gpu.write("max_freq", 816_000_000)
    assert floor.raise_to(None) == 816_000_000
    assert gpu.min_hz == 816_000_000


def test_without_a_node_the_floor_cannot_be_raised(runtime: Runtime) -> None:
    floor = Floor(runtime)
    with pytest.raises(DevfreqError, match="no GPU node"):
        floor.raise_to(None)
    assert floor.give_back() is None


# Another floor while it is up (the settings were edited).


@pytest.mark.parametrize("other_hz", [816_000_000, HIGHEST_HZ])
def test_a_raised_floor_can_be_changed_and_the_first_baseline_is_given_back(
    floor: Floor, gpu: PlainNode, other_hz: int
) -> None:
    floor.raise_to(MIDDLE_HZ)
    assert floor.raise_to(other_hz) == other_hz
    assert gpu.min_hz == other_hz
    assert floor.raise_to(MIDDLE_HZ) == MIDDLE_HZ
    assert floor.give_back() == LOWEST_HZ
    assert gpu.min_hz == LOWEST_HZ


def test_a_changed_floor_is_never_below_what_was_there_before(floor: Floor, gpu: PlainNode) -> None:
    gpu.write("min_freq", MIDDLE_HZ)
    floor.raise_to(None)
    floor.raise_to(408_000_000)
    assert gpu.min_hz >= MIDDLE_HZ
    floor.give_back()
    assert gpu.min_hz == MIDDLE_HZ


def test_a_change_that_is_refused_leaves_what_it_takes_to_give_back(
    floor: Floor, gpu: PlainNode, runtime: Runtime
) -> None:
    floor.raise_to(MIDDLE_HZ)
    min_freq = gpu.directory / "min_freq"
    min_freq.unlink()
    min_freq.symlink_to(UNWRITABLE_ATTRIBUTE)
    with pytest.raises(DevfreqError):
        floor.raise_to(None)
    min_freq.unlink()
    gpu.write("min_freq", MIDDLE_HZ)
    saved = runtime.load_raised()
    assert saved is not None
    assert (saved.baseline_hz, saved.written_hz) == (LOWEST_HZ, (MIDDLE_HZ, HIGHEST_HZ)), "after a kill, either is ours"
    assert floor.give_back() == LOWEST_HZ
    assert gpu.min_hz == LOWEST_HZ


# What other programs do meanwhile.


def test_what_another_program_writes_while_it_is_up_is_left_alone(
    floor: Floor, gpu: PlainNode, runtime: Runtime
) -> None:
    floor.raise_to(None)
    gpu.write("min_freq", MIDDLE_HZ)
    assert floor.give_back() is None
    assert gpu.min_hz == MIDDLE_HZ
    assert runtime.load_raised() is None
    assert floor.give_back() is None


def test_a_value_that_the_kernel_rounded_is_still_ours(floor: Floor, gpu: PlainNode) -> None:
    floor.raise_to(612_000_001)
    gpu.write("min_freq", 612_000_000)
    assert floor.give_back() == LOWEST_HZ


def test_below_a_cap_min_freq_reads_the_cap_and_is_still_ours(floor: Floor, gpu: PlainNode) -> None:
    """A hot board caps max_freq; min_freq then reads no more than that, and jumps back up with the cap's end."""
    floor.raise_to(None)
    gpu.write("max_freq", 714_000_000)
    gpu.write("min_freq", 714_000_000)
    assert floor.give_back() == LOWEST_HZ
    assert gpu.min_hz == LOWEST_HZ


def test_a_value_at_max_freq_that_is_higher_than_ours_is_not_ours(floor: Floor, gpu: PlainNode) -> None:
    floor.raise_to(MIDDLE_HZ)
    gpu.write("min_freq", HIGHEST_HZ)
    assert floor.give_back() is None
    assert gpu.min_hz == HIGHEST_HZ


def test_a_node_that_vanishes_takes_the_floor_with_it(floor: Floor, gpu: PlainNode, runtime: Runtime) -> None:
    floor.raise_to(None)
    gpu.directory.rename(gpu.directory.with_name("gone"))
    assert floor.give_back() is None
    assert runtime.load_raised() is None

    # It is there again, as after a reload of the driver: nothing of it is ours.
    gpu.directory.with_name("gone").rename(gpu.directory)
    assert floor.give_back() is None
    assert gpu.min_hz == HIGHEST_HZ


def test_a_node_that_refuses_is_still_to_be_given_back(floor: Floor, gpu: PlainNode, runtime: Runtime) -> None:
    floor.raise_to(None)
    min_freq = gpu.directory / "min_freq"
    min_freq.rename(gpu.directory / "aside")
    min_freq.mkdir()
    with pytest.raises(DevfreqError, match="Is a directory"):
        floor.give_back()
    assert runtime.load_raised() is not None
    min_freq.rmdir()
    (gpu.directory / "aside").rename(min_freq)
    assert floor.give_back() == LOWEST_HZ


def test_what_is_let_go_of_is_not_given_back_nor_after_a_kill(floor: Floor, gpu: PlainNode, runtime: Runtime) -> None:
    """Another program has set min_freq, to the floor's own value: only fanotify could tell."""
    floor.raise_to(None)
    floor.let_go()
    assert floor.give_back() is None
    assert after_a_kill(runtime).undo_left_over() is None
    assert gpu.min_hz == HIGHEST_HZ


def test_it_is_undone_when_min_freq_reads_something_else(floor: Floor, gpu: PlainNode) -> None:
    assert not floor.is_undone()
    floor.raise_to(None)
    assert not floor.is_undone()
    gpu.write("min_freq", MIDDLE_HZ)
    assert floor.is_undone()
    floor.node = Node(PlainNode(gpu.directory.with_name("other")).directory)
    assert not floor.is_undone(), "this node has not been raised; the other refuses"


def test_what_is_written_while_the_baseline_is_saved_is_not_lost(gpu: PlainNode, runtime: Runtime) -> None:
    class Slow(Runtime):
        def save_raised(self, raised: Raised) -> bool:
            took_time = super().save_raised(raised)
            gpu.write("min_freq", MIDDLE_HZ)
            return took_time

    floor = Floor(Slow(runtime.directory), Node(gpu.directory))
    with pytest.raises(DevfreqError, match="another program is writing min_freq"):
        floor.raise_to(None)
    assert gpu.min_hz == MIDDLE_HZ
    assert runtime.load_raised() is None
    assert floor.raise_to(None) == HIGHEST_HZ, "it works when they are done"
    assert floor.give_back() == MIDDLE_HZ


def test_a_lower_max_freq_leaves_nothing_to_raise(floor: Floor, gpu: PlainNode) -> None:
    gpu.write("min_freq", MIDDLE_HZ)
    floor.raise_to(None)
    gpu.write("max_freq", LOWEST_HZ)
    assert floor.raise_to(None) is None
    assert gpu.min_hz == MIDDLE_HZ
    assert floor.raised is None


def test_what_somebody_has_removed_is_saved_again(floor: Floor, runtime: Runtime) -> None:
    floor.keep()
    assert runtime.load_raised() is None
    floor.raise_to(None)
    saved = runtime.load_raised()
    runtime.forget_raised()
    floor.keep()
    assert runtime.load_raised() == saved


# Saved before it is written.


def test_the_baseline_is_on_disk_before_the_node_is_written(runtime: Runtime, gpu: PlainNode) -> None:
    found_at_write: list[object] = []

    class WatchedNode(Node):
        def write_min_hz(self, frequency_hz: int) -> None:
            found_at_write.append(json.loads((runtime.directory / "raised.json").read_text()))
            super().write_min_hz(frequency_hz)

    floor = Floor(runtime, WatchedNode(gpu.directory))
    floor.raise_to(None)
    assert found_at_write == [{"node": str(gpu.directory), "baseline_hz": LOWEST_HZ, "written_hz": [HIGHEST_HZ]}]


def test_what_cannot_be_saved_is_not_raised(gpu: PlainNode, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    floor = Floor(Runtime(tmp_path / "file"), Node(gpu.directory))
    with pytest.raises(StabilizerError, match="cannot write"):
        floor.raise_to(None)
    assert gpu.min_hz == LOWEST_HZ
    assert floor.raised is None


def test_a_raise_that_is_refused_leaves_nothing_to_give_back(floor: Floor, gpu: PlainNode, runtime: Runtime) -> None:
    min_freq = gpu.directory / "min_freq"
    min_freq.unlink()
    min_freq.symlink_to(UNWRITABLE_ATTRIBUTE)
    with pytest.raises(DevfreqError, match="cannot write"):
        floor.raise_to(None)
    assert runtime.load_raised() is None
    assert floor.give_back() is None


# After a kill.


def test_a_floor_that_was_left_raised_is_undone(floor: Floor, gpu: PlainNode, runtime: Runtime) -> None:
    floor.raise_to(None)
    assert after_a_kill(runtime).undo_left_over() == LOWEST_HZ
    assert gpu.min_hz == LOWEST_HZ
    assert after_a_kill(runtime).undo_left_over() is None, "once only"


def test_without_a_kill_there_is_nothing_to_undo(floor: Floor, gpu: PlainNode, runtime: Runtime) -> None:
    assert after_a_kill(runtime).undo_left_over() is None
    floor.raise_to(None)
    floor.give_back()
    gpu.write("min_freq", HIGHEST_HZ)
    assert after_a_kill(runtime).undo_left_over() is None
    assert gpu.min_hz == HIGHEST_HZ


@pytest.mark.parametrize("now_hz", [MIDDLE_HZ, HIGHEST_HZ])
def test_killed_between_two_floors_either_of_them_is_ours(gpu: PlainNode, runtime: Runtime, now_hz: int) -> None:
    """The file is saved before the write: it cannot tell whether that still happened."""
    runtime.save_raised(Raised(str(gpu.directory), LOWEST_HZ, (MIDDLE_HZ, HIGHEST_HZ)))
    gpu.write("min_freq", now_hz)
    assert after_a_kill(runtime).undo_left_over() == LOWEST_HZ


def test_killed_before_the_write_there_is_nothing_to_undo(gpu: PlainNode, runtime: Runtime) -> None:
    runtime.save_raised(Raised(str(gpu.directory), LOWEST_HZ, (HIGHEST_HZ,)))
    assert after_a_kill(runtime).undo_left_over() is None
    assert gpu.min_hz == LOWEST_HZ
    assert runtime.load_raised() is None


def test_what_another_program_wrote_since_the_kill_is_left_alone(
    floor: Floor, gpu: PlainNode, runtime: Runtime
) -> None:
    floor.raise_to(None)
    gpu.write("min_freq", MIDDLE_HZ)
    assert after_a_kill(runtime).undo_left_over() is None
    assert gpu.min_hz == MIDDLE_HZ


def test_a_node_that_is_gone_since_the_kill_is_forgotten(floor: Floor, gpu: PlainNode, runtime: Runtime) -> None:
    floor.raise_to(None)
    gpu.directory.rename(gpu.directory.with_name("gone"))
    assert after_a_kill(runtime).undo_left_over() is None
    assert runtime.load_raised() is None


def test_a_saved_file_that_names_no_written_floor_is_damaged(gpu: PlainNode, runtime: Runtime) -> None:
    (runtime.directory / "raised.json").write_text(
        json.dumps({"node": str(gpu.directory), "baseline_hz": LOWEST_HZ, "written_hz": []})
    )
    gpu.write("min_freq", HIGHEST_HZ)
    with pytest.raises(StabilizerError, match="damaged"):
        after_a_kill(runtime).undo_left_over()
    assert gpu.min_hz == HIGHEST_HZ
