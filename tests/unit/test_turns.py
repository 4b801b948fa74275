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
from moe_gpu_stabilizer.turns import PATIENCE, ProcessTurns, ThreadTurns, is_in_graph, per_graph, remark

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


# The graph before had 41 sections, of 100 ms each; the last one of this, too, began at 4,100 ms.
SECTION_NS = 100 * MILLISECOND_NS
LAST_NS = 41 * SECTION_NS
LAST = ThreadTurns(7, 41, 40, 0, LAST_NS, SECTION_NS)
WITHIN = LAST._replace(sections=9, last_section_ns=9 * SECTION_NS)
BEGUN = LAST._replace(sections=0, last_section_ns=0)


@pytest.mark.parametrize(
    ("why", "thread", "waited_ms", "in_graph"),
    [
        ("the last section, as long as the others", LAST, 100, None),
        ("somewhat longer", LAST, 400, None),
        ("much longer", LAST, 401, False),
        ("sections are still to come", WITHIN, 100, True),
        ("they take their time", WITHIN, 400, True),
        ("too long: has it been given up?", WITHIN, 401, None),
        ("they take longer than in the graph before", WITHIN._replace(section_ns=1), 400, True),
        ("the graph has just begun", BEGUN, 400, True),
        ("and seems to end there", BEGUN, 401, None),
        ("the graph before says nothing", LAST._replace(last_turns=0), 5000, None),
        ("few turns", LAST._replace(sections=3, last_turns=2), 5000, None),
    ],
)
def test_when_a_thread_is_in_a_graph(why: str, thread: ThreadTurns, waited_ms: int, in_graph: bool | None) -> None:
    now_ns = thread.last_section_ns + waited_ms * MILLISECOND_NS
    assert is_in_graph(thread, now_ns, MIN_TURNS) == in_graph, why


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 10**12))
def test_nothing_keeps_a_thread_in_its_graph_for_ever(
    sections: int, last_turns: int, took_ns: int, section_ns: int, after_ns: int
) -> None:
    began_ns = 5
    thread = ThreadTurns(7, sections, last_turns, began_ns, began_ns + took_ns if sections else 0, section_ns)
    now_ns = began_ns + took_ns + after_ns
    answer = is_in_graph(thread, now_ns, MIN_TURNS)
    later = is_in_graph(thread, now_ns + PATIENCE * (took_ns + section_ns) + 1, MIN_TURNS)
    assert later is not True
    if answer is False:
        assert later is False
        assert sections > last_turns >= MIN_TURNS


class Notes:
    """What the kernel would have noted."""

    def __init__(self, activity: Activity | None, thread: ThreadTurns | None) -> None:
        self._activity, self._thread = activity, thread

    def activity(self, _tgid: int) -> Activity | None:
        return self._activity

    def thread_turns(self, _tid: int) -> ThreadTurns | None:
        return self._thread


class Meter(ThreadMeter):
    """A thread that computes all the time, or never."""

    def __init__(self, busy: bool) -> None:
        super().__init__(7)
        self._busy = busy

    def at_work(self, _tid: int, _since_ns: int, _now_ns: int) -> bool:
        return self._busy


PROCESS = policy.Process(7, 1)
CLAIM = policy.Claim(LAST_NS, 0)
CALL = Activity(LAST_NS, 0, 1, 8)
OVER_AT_NS = LAST_NS + 1000 * MILLISECOND_NS
BUSY, RESTING = Meter(True), Meter(False)


@pytest.mark.parametrize(
    ("why", "activity", "thread", "meter", "event"),
    [
        ("the kernel has dropped it", None, LAST, BUSY, policy.ThreadChecked(PROCESS, False)),
        (
            "a newer section",
            CALL._replace(last_call_ns=LAST_NS + 1),
            LAST,
            RESTING,
            policy.CallSeen(PROCESS, LAST_NS + 1),
        ),
        (
            "it waits for the GPU",
            CALL,
            WITHIN._replace(last_section_ns=LAST_NS),
            RESTING,
            policy.ThreadChecked(PROCESS, True),
        ),
        ("it computes something else", CALL, LAST, BUSY, policy.ThreadChecked(PROCESS, False)),
        ("no graphs are known", CALL, None, BUSY, policy.ThreadChecked(PROCESS, True)),
        ("no graphs are known, it rests", CALL, None, RESTING, policy.ThreadChecked(PROCESS, False)),
        ("a dead thread's notes", CALL, LAST._replace(tgid=6), BUSY, policy.ThreadChecked(PROCESS, True)),
    ],
)
def test_sections_say_more_than_the_threads_work(
    why: str, activity: Activity | None, thread: ThreadTurns | None, meter: Meter, event: policy.Event
) -> None:
    assert look(Notes(activity, thread), PROCESS, meter, CLAIM, Settings(), OVER_AT_NS) == event, why


def test_where_sections_are_not_probed_the_threads_work_decides() -> None:
    flags_alone = replace(Settings(), detect="flags")
    event = look(Notes(CALL, LAST), PROCESS, BUSY, CLAIM, flags_alone, OVER_AT_NS)
    assert event == policy.ThreadChecked(PROCESS, True)
