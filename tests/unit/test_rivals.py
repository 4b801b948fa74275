"""Who else writes the node's limits, and what that means for the floor."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_gpu_stabilizer.devfreq import Node
from moe_gpu_stabilizer.rivals import MOST_ROUNDS, PAUSE_NS, YIELD_NS, Contest, LimitWatch, RivalWrite
from tests.support import PlainNode

SECOND_NS = 1_000_000_000

# The rule.


def test_after_a_rivals_write_the_floor_stays_down_for_a_moment() -> None:
    contest = Contest()
    contest.undone(5 * SECOND_NS)
    assert contest.down_until_ns == 5 * SECOND_NS + PAUSE_NS
    assert not contest.yields


def test_after_some_rounds_in_a_minute_the_rival_has_won_for_a_minute() -> None:
    contest = Contest()
    for round_number in range(MOST_ROUNDS):
        assert not contest.yields
        contest.undone(round_number * 10 * SECOND_NS)
    assert contest.yields
    assert contest.down_until_ns == (MOST_ROUNDS - 1) * 10 * SECOND_NS + YIELD_NS


def test_writes_that_are_far_apart_are_no_fight() -> None:
    """nvpmodel, every half hour, while a long job runs."""
    contest = Contest()
    for hour in range(2 * MOST_ROUNDS):
        contest.undone(hour * 1800 * SECOND_NS)
        assert not contest.yields


def test_a_floor_that_could_be_given_back_ends_the_fight() -> None:
    contest = Contest()
    for _ in range(MOST_ROUNDS):
        contest.undone(SECOND_NS)
    contest.calm()
    assert not contest.yields
    contest.undone(2 * SECOND_NS)
    assert contest.down_until_ns == 2 * SECOND_NS + PAUSE_NS


# In words.


def write_of(hz: int = 612_000_000, pid: int | None = 812, name: str = "sh", at_seconds: float = 5.0) -> RivalWrite:
    return RivalWrite("min_freq", hz, pid, name, at_seconds)


@pytest.mark.parametrize(
    ("later", "repeats"),
    [
        (write_of(at_seconds=20), True),
        (write_of(pid=813), True),
        (write_of(hz=714_000_000), False),
        (write_of(name="nvpmodel"), False),
        (write_of(at_seconds=70), False),
        (write_of()._replace(attribute="max_freq"), False),
    ],
)
def test_the_same_write_of_the_same_program_is_not_said_twice(later: RivalWrite, repeats: bool) -> None:
    assert later.repeats(write_of()) is repeats
    assert not later.repeats(None)


# Heard by the real kernel, on a plain directory.


@pytest.fixture
def gpu(tmp_path: Path) -> PlainNode:
    return PlainNode(tmp_path / "17000000.gpu")


@pytest.fixture
def watch(gpu: PlainNode) -> Iterator[LimitWatch]:
    watch = LimitWatch()
    watch.follow(Node(gpu.directory))
    yield watch
    watch.close()


def another_writes(gpu: PlainNode, name: str, value: int) -> int:
    """Let another process set a limit; return its pid."""
    with subprocess.Popen(["sh", "-c", f"echo {value} >{gpu.directory / name}"]) as process:
        pass
    return process.pid


def test_a_write_by_another_process_is_heard_with_its_pid(gpu: PlainNode, watch: LimitWatch) -> None:
    assert watch.read() == {}
    pid = another_writes(gpu, "min_freq", 1)
    assert watch.read() == {"min_freq": pid}
    assert watch.read() == {}
    pid = another_writes(gpu, "max_freq", 2)
    assert watch.read() == {"max_freq": pid}


def test_our_own_writes_are_nobody_elses(gpu: PlainNode, watch: LimitWatch) -> None:
    Node(gpu.directory).write_min_hz(1)
    assert watch.read() == {}


@pytest.mark.parametrize("name", ["cur_freq", "governor", "available_frequencies"])
def test_only_the_limits_are_listened_to(gpu: PlainNode, watch: LimitWatch, name: str) -> None:
    another_writes(gpu, name, 1)
    assert watch.read() == {}


def test_who_was_the_last_to_write_counts(gpu: PlainNode, watch: LimitWatch) -> None:
    another_writes(gpu, "min_freq", 1)
    Node(gpu.directory).write_min_hz(2)
    assert watch.read() == {}, "what they wrote is past"
    Node(gpu.directory).write_min_hz(3)
    pid = another_writes(gpu, "min_freq", 3)
    assert watch.read() == {"min_freq": pid}, "the value is theirs, though it is the same"


def test_the_files_of_another_node_are_followed_instead(gpu: PlainNode, watch: LimitWatch, tmp_path: Path) -> None:
    other = PlainNode(tmp_path / "17000000.ga10b")
    watch.follow(Node(other.directory))
    another_writes(gpu, "min_freq", 1)
    assert watch.read() == {}
    pid = another_writes(other, "min_freq", 1)
    assert watch.read() == {"min_freq": pid}
    watch.follow(None)
    another_writes(other, "min_freq", 2)
    assert watch.read() == {}


def test_files_that_were_made_anew_are_followed(gpu: PlainNode, watch: LimitWatch) -> None:
    """A driver that was loaded again has a new min_freq at the old path."""
    (gpu.directory / "min_freq").unlink()
    watch.follow(Node(gpu.directory))
    gpu.write("min_freq", 1)
    watch.follow(Node(gpu.directory))
    pid = another_writes(gpu, "min_freq", 2)
    assert watch.read() == {"min_freq": pid}
    assert pid != os.getpid()
