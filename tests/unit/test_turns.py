"""Turns in numbers and words, and what is made of a graph whose end nothing tells."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_gpu_stabilizer import policy
from moe_gpu_stabilizer.in_flight import look
from moe_gpu_stabilizer.matching import Verdict, either, judge_behaviour
from moe_gpu_stabilizer.processes import ThreadMeter
from moe_gpu_stabilizer.records import Activity
from moe_gpu_stabilizer.settings import Settings
from moe_gpu_stabilizer.turns import PATIENCE, ProcessTurns, ThreadTurns, is_complete, per_graph, remark

MILLISECOND_NS = 1_000_000
MIN_TURNS = 3


@pytest.mark.parametrize(
    ("turns", "words"), [(0, "no turns per graph"), (1, "1 turn per graph"), (40, "40 turns per graph")]
)
def test_words(turns: int, words: str) -> None:
    assert per_graph(turns) == words


@pytest.mark.parametrize(
    ("turns", "verdict"),
    [
        (None, Verdict(False, "fewer than 3 turns per graph seen")),
        (ProcessTurns(1, False, 0), Verdict(False, "fewer than 3 turns per graph seen")),
        (ProcessTurns(2, False, 0), Verdict(False, "fewer than 3 turns per graph seen")),
        (ProcessTurns(900, False, 2), Verdict(False, "fewer than 3 turns per graph seen")),
        (ProcessTurns(2, True, 40), Verdict(True, "40 turns per graph")),
        (ProcessTurns(2, True, 3), Verdict(True, "3 turns per graph")),
        # Counted under other settings.
        (ProcessTurns(2, True, 2), Verdict(False, "fewer than 3 turns per graph seen")),
    ],
)
def test_a_verdict_by_behaviour(turns: ProcessTurns | None, verdict: Verdict) -> None:
    assert judge_behaviour(turns, MIN_TURNS) == verdict


@given(st.builds(Verdict, st.booleans(), st.just("launch")), st.builds(Verdict, st.booleans(), st.just("behaviour")))
def test_one_of_the_two_will_do(launch: Verdict, behaviour: Verdict) -> None:
    verdict = either(launch, behaviour)
    assert verdict.counts == (launch.counts or behaviour.counts)
    expected = {(True, True): "launch", (True, False): "launch", (False, True): "behaviour"}
    assert verdict.reason == expected.get((launch.counts, behaviour.counts), "launch, behaviour")


@pytest.mark.parametrize(
    ("counts", "reason", "turns", "more"),
    [
        (True, "--cpu-moe", None, ""),
        (True, "--cpu-moe", ProcessTurns(1, False, 0), ""),
        (True, "--cpu-moe", ProcessTurns(2, False, 0), ", but shows no turns: has it any layer on the GPU?"),
        (True, "--cpu-moe", ProcessTurns(2, False, 1), " (1 turn per graph)"),
        (True, "--cpu-moe", ProcessTurns(2, True, 40), " (40 turns per graph)"),
        (True, "40 turns per graph", ProcessTurns(2, True, 40), ""),
        (True, "40 turns per graph", ProcessTurns(2, True, 39), " (39 turns per graph)"),
        (False, "no flag", ProcessTurns(2, False, 0), " (no turns per graph)"),
    ],
)
def test_what_is_added_to_a_verdict(counts: bool, reason: str, turns: ProcessTurns | None, more: str) -> None:
    assert remark(counts, reason, turns) == more


# 41 sections of 100 ms each, the last of which began at 4,100 ms.
LAST = ThreadTurns(7, 41, 40, 0)
LAST_NS = 4_100 * MILLISECOND_NS


@pytest.mark.parametrize(
    ("why", "thread", "after_ms", "complete"),
    [
        ("a section as long as the others", LAST, 100, False),
        ("twice as long", LAST, 200, False),
        ("much longer", LAST, 201, True),
        ("sections are still to come", LAST._replace(sections=40), 5000, False),
        ("the graph has just begun", LAST._replace(sections=0), 5000, False),
        ("the graph before says nothing", LAST._replace(last_turns=0), 5000, False),
        ("few turns", LAST._replace(sections=3, last_turns=2), 5000, False),
    ],
)
def test_when_a_graph_is_complete(why: str, thread: ThreadTurns, after_ms: int, complete: bool) -> None:
    now_ns = LAST_NS + after_ms * MILLISECOND_NS
    assert is_complete(thread, LAST_NS, now_ns, MIN_TURNS) == complete, why


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 10**12), st.integers(0, 10**12))
def test_a_graph_that_is_complete_stays_so(sections: int, last_turns: int, took_ns: int, after_ns: int) -> None:
    thread = ThreadTurns(7, sections, last_turns, 5)
    last_ns = 5 + took_ns
    complete = is_complete(thread, last_ns, last_ns + after_ns, MIN_TURNS)
    if complete:
        assert is_complete(thread, last_ns, last_ns + after_ns + 1, MIN_TURNS)
        assert sections > last_turns >= MIN_TURNS
    elif sections > last_turns >= MIN_TURNS:
        assert after_ns <= PATIENCE * took_ns / sections


class Notes:
    """What the kernel would have noted."""

    def __init__(self, activity: Activity | None, thread: ThreadTurns | None) -> None:
        self._activity, self._thread = activity, thread

    def activity(self, _tgid: int) -> Activity | None:
        return self._activity

    def thread_turns(self, _tid: int) -> ThreadTurns | None:
        return self._thread


class Busy(ThreadMeter):
    """A thread that computes all the time."""

    def at_work(self, _tid: int, _since_ns: int, _now_ns: int) -> bool:
        return True


PROCESS = policy.Process(7, 1)
CLAIM = policy.Claim(LAST_NS, 0)


@pytest.mark.parametrize(
    ("why", "activity", "thread", "event"),
    [
        ("the kernel has dropped it", None, None, policy.ThreadChecked(PROCESS, False)),
        ("a newer section", Activity(LAST_NS + 1, 0, 1, 8), LAST, policy.CallSeen(PROCESS, LAST_NS + 1)),
        ("in the graph", Activity(LAST_NS, 0, 1, 8), LAST._replace(sections=9), policy.ThreadChecked(PROCESS, True)),
        ("after the graph", Activity(LAST_NS, 0, 1, 8), LAST, policy.ThreadChecked(PROCESS, False)),
        ("no graphs are known", Activity(LAST_NS, 0, 1, 8), None, policy.ThreadChecked(PROCESS, True)),
        ("a dead one's notes", Activity(LAST_NS, 0, 1, 8), LAST._replace(tgid=6), policy.ThreadChecked(PROCESS, True)),
    ],
)
def test_a_busy_thread_is_in_flight_until_its_graph_is_complete(
    why: str, activity: Activity | None, thread: ThreadTurns | None, event: policy.Event
) -> None:
    now_ns = LAST_NS + 1000 * MILLISECOND_NS
    assert look(Notes(activity, thread), PROCESS, Busy(7), CLAIM, Settings(), now_ns) == event, why


def test_where_sections_are_not_probed_the_threads_work_decides() -> None:
    notes, now_ns = Notes(Activity(LAST_NS, 0, 1, 8), LAST), LAST_NS + 1000 * MILLISECOND_NS
    flags_alone = replace(Settings(), detect="flags")
    assert look(notes, PROCESS, Busy(7), CLAIM, flags_alone, now_ns) == policy.ThreadChecked(PROCESS, True)
