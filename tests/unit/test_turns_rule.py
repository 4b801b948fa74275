"""turns.h, the rule inside the BPF program, compiled for this machine and put to sequences of graphs."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import moe_gpu_stabilizer

HEADER = Path(moe_gpu_stabilizer.__file__).with_name("turns.h")

EXPORTED = """
#include "turns.h"
typedef unsigned long long u64;
unsigned int near_graphs(void) { return NEAR_GRAPHS; }
unsigned int stretch_graphs(void) { return STRETCH_GRAPHS; }
u64 stretch_ns(void) { return STRETCH_NS; }
void graph(struct thread_turns *t, struct process_turns *p, unsigned int min_turns, u64 now_ns)
{
    graph_begins(t, p, min_turns, now_ns);
}
void section(struct thread_turns *t, struct process_turns *p, unsigned int min_turns, u64 now_ns)
{
    if (section_begins(t, min_turns, now_ns))
        graph_turns(t, p, now_ns);
}
"""

SECOND_NS = 1_000_000_000


class ThreadState(ctypes.Structure):
    _fields_ = [
        ("tgid", ctypes.c_uint),
        ("in_graph", ctypes.c_uint),
        ("sections", ctypes.c_uint),
        ("last_turns", ctypes.c_uint),
        ("turned", ctypes.c_uint),
        ("plain_graphs", ctypes.c_uint),
        ("began_ns", ctypes.c_ulonglong),
        ("last_section_ns", ctypes.c_ulonglong),
        ("section_ns", ctypes.c_ulonglong),
    ]


class ProcessState(ctypes.Structure):
    _fields_ = [
        ("graphs", ctypes.c_ulonglong),
        ("last_turning_ns", ctypes.c_ulonglong),
        ("turning", ctypes.c_uint),
        ("told", ctypes.c_uint),
        ("turns", ctypes.c_uint),
        ("unused", ctypes.c_uint),
    ]


@pytest.fixture(scope="module")
def rule(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("rule") / "rule.so"
    command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{HEADER.parent}", "-xc", "-"]
    subprocess.run([*command, "-o", library], input=EXPORTED, text=True, check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.stretch_ns.restype = ctypes.c_ulonglong
    return loaded


@dataclass
class Model:
    """A process with some threads, as the kernel sees it. `now_ns` only grows."""

    rule: ctypes.CDLL
    min_turns: int = 3
    now_ns: int = SECOND_NS
    process: ProcessState = field(default_factory=ProcessState)
    threads: dict[int, ThreadState] = field(default_factory=dict)

    def graph(self, sections: int, thread: int = 0, lasts_ns: int = 10_000_000) -> None:
        state = self.threads.setdefault(thread, ThreadState())
        self._call(self.rule.graph, state)
        for _ in range(sections):
            self.now_ns += lasts_ns // (sections + 1)
            self._call(self.rule.section, state)
        self.now_ns += lasts_ns // (sections + 1)

    def _call(self, function: Callable[..., None], thread: ThreadState) -> None:
        function(
            ctypes.byref(thread), ctypes.byref(self.process), self.min_turns, ctypes.c_ulonglong(self.now_ns)
        )  # fmt: skip

    @property
    def counts(self) -> bool:
        return bool(self.process.turning)


sections_of_a_graph = st.integers(0, 60)
graphs = st.lists(sections_of_a_graph, max_size=300)


@given(graphs)
def test_each_graph_is_counted(rule: ctypes.CDLL, sequence: list[int]) -> None:
    model = Model(rule)
    for sections in sequence:
        model.graph(sections)
    assert model.process.graphs == len(sequence)


@given(st.integers(1, 50), st.lists(st.tuples(st.integers(0, 3), sections_of_a_graph), max_size=300))
def test_a_process_whose_graphs_have_few_turns_never_counts(
    rule: ctypes.CDLL, min_turns: int, sequence: list[tuple[int, int]]
) -> None:
    model = Model(rule, min_turns)
    for thread, sections in sequence:
        model.graph(min(sections, min_turns), thread)
        assert not model.counts


@given(st.integers(1, 50), graphs, st.integers(0, 200))
def test_two_graphs_with_many_turns_in_a_row_count_whatever_was_before(
    rule: ctypes.CDLL, min_turns: int, before: list[int], more: int
) -> None:
    model = Model(rule, min_turns)
    for sections in before:
        model.graph(sections)
    model.graph(min_turns + 1 + more)
    model.graph(min_turns + 1)
    assert model.counts


@given(st.lists(st.integers(0, 200), min_size=2))
def test_two_graphs_with_many_turns_count_if_they_are_near(rule: ctypes.CDLL, plain_between: list[int]) -> None:
    model = Model(rule)
    model.graph(41)
    for plain in plain_between:
        before = model.counts
        for _ in range(plain):
            model.graph(1)
        model.graph(41)
        assert model.counts == (before or plain < rule.near_graphs())


@settings(max_examples=30)
@example([(1, 401, 1), (1, 385, 25)])
@given(st.lists(st.tuples(st.sampled_from([1, 41]), st.integers(1, 700), st.integers(1, 60)), max_size=8))
def test_it_is_taken_back_after_a_stretch_that_is_long_in_graphs_and_in_time(
    rule: ctypes.CDLL, runs: list[tuple[int, int, int]]
) -> None:
    """Against a definition that looks at all of the past."""
    model = Model(rule)
    model.graph(41)
    model.graph(41)
    began_plain_ns, plain = model.now_ns, 0
    for sections, count, milliseconds in runs:
        for _ in range(count):
            before, now_ns = model.counts, model.now_ns
            last_turning_ns = model.process.last_turning_ns
            model.graph(sections, lasts_ns=milliseconds * 1_000_000)
            if before and not model.counts:
                assert plain > rule.stretch_graphs()
                assert now_ns - last_turning_ns > rule.stretch_ns()
            if plain > rule.stretch_graphs() + 1 and now_ns - began_plain_ns > rule.stretch_ns():
                assert not model.counts or sections > 1
            plain = plain + 1 if sections == 1 else 0
            began_plain_ns = began_plain_ns if sections == 1 else model.now_ns


@given(st.lists(st.integers(4, 60), min_size=2, max_size=50))
def test_the_number_is_that_of_the_last_complete_graph(rule: ctypes.CDLL, sequence: list[int]) -> None:
    model = Model(rule)
    for before, sections in zip([None, *sequence], sequence, strict=False):
        model.graph(sections)
        assert model.process.turns == (0 if before is None else before - 1)
        assert model.threads[0].last_turns == model.process.turns


@given(st.integers(2, 100), st.integers(1, 10**9), st.integers(0, 10**10))
def test_how_long_sections_take_does_not_include_the_time_between_graphs(
    rule: ctypes.CDLL, sections: int, section_ns: int, pause_ns: int
) -> None:
    model = Model(rule)
    model.graph(sections, lasts_ns=section_ns * (sections + 1))
    model.now_ns += pause_ns
    model.graph(0)
    assert model.threads[0].section_ns == section_ns


@given(st.integers(2, 100), st.integers(0, 99))
def test_sections_whose_time_was_not_taken_are_counted_and_nothing_is_said_of_how_long_they_take(
    rule: ctypes.CDLL, sections: int, timed: int
) -> None:
    """Those of a process that is ignored, and that may begin to count in the middle of a graph."""
    model = Model(rule, min_turns=200)
    model.graph(0)
    thread = model.threads[0]
    for index in range(sections):
        model.now_ns += 1000
        now_ns = model.now_ns if index < timed < sections else 0
        rule.section(ctypes.byref(thread), ctypes.byref(model.process), 200, ctypes.c_ulonglong(now_ns))
    model.graph(0)
    assert thread.last_turns == sections - 1
    assert thread.section_ns == 0


@given(st.integers(4, 60), st.integers(0, 63))
def test_the_number_is_about_the_graphs_with_many_turns_while_such_are_near(
    rule: ctypes.CDLL, sections: int, plain: int
) -> None:
    model = Model(rule)
    for _ in range(3):
        model.graph(sections)
        for _ in range(plain):
            model.graph(1)
    assert model.process.turns in (sections - 1, 0 if plain == 0 else sections - 1)


@given(st.integers(2, 100))
def test_another_threads_model_takes_nothing_back(rule: ctypes.CDLL, plain_per_turning: int) -> None:
    model = Model(rule)
    model.graph(41, thread=1)
    for _ in range(30):
        model.graph(41, thread=1)
        for _ in range(plain_per_turning):
            model.graph(1, thread=2)
        assert model.counts


def test_another_model_in_another_thread_takes_it_back_when_the_first_is_silent(rule: ctypes.CDLL) -> None:
    model = Model(rule)
    model.graph(41, thread=1)
    model.graph(41, thread=1)
    for _ in range(2000):
        model.graph(1, thread=2)
    assert not model.counts


def test_a_prompt_that_fills_the_context_is_no_such_stretch(rule: ctypes.CDLL) -> None:
    """A GPU may take over what is worth copying: large batches. 262,144 tokens are 512 of 512, here a second each."""
    model = Model(rule)
    model.graph(41)
    model.graph(41)
    for _ in range(rule.stretch_graphs()):
        model.graph(1, lasts_ns=SECOND_NS)
    model.graph(41)
    assert model.counts


@given(st.lists(st.sampled_from([1, 41]), min_size=700, max_size=1500))
@settings(max_examples=20)
def test_it_never_flaps(rule: ctypes.CDLL, sequence: list[int]) -> None:
    model = Model(rule)
    flips_ns = []
    for sections in sequence:
        before = model.counts
        model.graph(sections)
        if before and not model.counts:
            flips_ns.append(model.now_ns)
    assert all(later - earlier > rule.stretch_ns() for earlier, later in pairwise(flips_ns))
