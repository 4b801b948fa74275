"""Turns as the BPF program counts them, with a small C program as ggml: how many, and whom it speaks of."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from moe_gpu_stabilizer.records import KIND_CALL, KIND_TURNS, Wake
from moe_gpu_stabilizer.turns import ProcessTurns
from moe_gpu_stabilizer.uprobes import Probe
from tests.kernel.conftest import Llama
from tests.kernel.test_probe import HOUR_NS, calls_of, offsets_of, wakes_of
from tests.support import wait_until
from tests.workload import Workload, build_library, build_part, build_program

Run = Callable[..., Workload]

MIN_TURNS = 3
SOME_PRIME = 10_007
SMALL_PRIME = 1_009

# turns.h
NEAR_GRAPHS, STRETCH_GRAPHS, STRETCH_SECONDS = 64, 512, 10


@pytest.fixture
def llama(tmp_path: Path) -> Llama:
    """The stand-in, ggml included, under names that no daemon looks for."""
    directory = tmp_path / "probed"
    library = build_library(directory / "libprobed.so")
    parts = [
        build_part(directory / "libsections.so", "-DPART_GGML_CPU"),
        build_part(directory / "libgraphs.so", "-DPART_GGML_BASE"),
    ]
    return Llama(library, build_program(directory / "program", library, *parts))


@pytest.fixture
def probe(package_root: Path, llama: Llama) -> Iterator[Probe]:
    """The program in the kernel, attached to all of the stand-in. A process that counts wakes us once an hour."""
    probe = Probe(HOUR_NS, package_root / "moe_gpu_stabilizer" / "probe.json", min_turns=MIN_TURNS)
    with ExitStack() as stack:
        stack.callback(probe.close)
        for library in llama.library.parent.glob("*.so"):
            for function, offset in offsets_of(library).items():
                stack.callback(probe.attach(str(library), offset, function).close)
        yield probe


def turns_of(probe: Probe, workload: Workload) -> ProcessTurns:
    turns = probe.turns(workload.pid)
    assert turns is not None, "no graph was seen"
    return turns


def changes(probe: Probe, workload: Workload) -> list[Wake]:
    """How often the kernel has said that the process began or ceased to take turns, since the last look."""
    return [wake for wake in wakes_of(probe, workload) if wake.kind == KIND_TURNS]


def ignored(workload: Workload, probe: Probe) -> Workload:
    probe.set_verdict(workload.pid, counts=False)
    return workload


@pytest.mark.parametrize(("sections", "turns"), [(0, 0), (1, 0), (2, 1), (5, 4), (41, 40), (1009, 1008)])
def test_turns_are_sections_but_one(probe: Probe, run: Run, sections: int, turns: int) -> None:
    with run() as workload:
        workload.do(f"graphs 7 {sections}")
        assert turns_of(probe, workload) == ProcessTurns(7, turns >= MIN_TURNS, turns)


def test_graphs_within_calls_are_the_same(probe: Probe, run: Run) -> None:
    with run() as workload:
        workload.do("tokens 7 41")
        assert turns_of(probe, workload) == ProcessTurns(7, True, 40)


def test_the_number_is_known_when_the_next_graph_begins(probe: Probe, run: Run) -> None:
    with run() as workload:
        workload.do("graphs 1 41")
        assert turns_of(probe, workload).per_graph == 0
        workload.do("graphs 1 31")
        assert turns_of(probe, workload).per_graph == 40
        workload.do("graphs 1 2")
        assert turns_of(probe, workload).per_graph == 30


def test_the_second_graph_with_many_turns_is_told_of_and_no_other(probe: Probe, run: Run) -> None:
    with ignored(run(), probe) as workload:
        workload.do("graphs 1 41")
        assert changes(probe, workload) == []
        workload.do("graphs 1 41")
        assert len(changes(probe, workload)) == 1
        workload.do(f"graphs {SMALL_PRIME} 41")
        assert changes(probe, workload) == []


def test_it_is_told_in_the_middle_of_the_graph(probe: Probe, run: Run) -> None:
    """A graph of a long prompt takes seconds."""
    with ignored(run(), probe) as workload:
        workload.do("graphs 1 41")
        workload.begin("slow 10 -500")
        assert select.select([probe.fileno()], [], [], 10)[0]
        wait_until(lambda: changes(probe, workload) != [], "the change told")
        assert select.select([workload.process.stdout], [], [], 0)[0] == [], "the graph goes on"
        assert turns_of(probe, workload).per_graph == 40, "as in the graph before"


@pytest.mark.parametrize("sections", [1, MIN_TURNS])
def test_few_turns_are_never_told_of(probe: Probe, run: Run, sections: int) -> None:
    with ignored(run(), probe) as workload:
        workload.do(f"graphs {SOME_PRIME} {sections}")
        assert wakes_of(probe, workload) == []
        assert probe.activity(workload.pid) is None
        assert turns_of(probe, workload) == ProcessTurns(SOME_PRIME, False, sections - 1)


def test_just_enough_turns(probe: Probe, run: Run) -> None:
    with ignored(run(), probe) as workload:
        workload.do(f"graphs 2 {MIN_TURNS + 1}")
        assert len(changes(probe, workload)) == 1


def test_a_single_graph_with_many_turns_is_no_behaviour(probe: Probe, run: Run) -> None:
    with ignored(run(), probe) as workload:
        for _ in range(5):
            workload.do("graphs 1 41")
            workload.do(f"graphs {NEAR_GRAPHS} 1")
        assert wakes_of(probe, workload) == []


def test_graphs_of_a_draft_model_in_between_do_not_hide_the_turns(probe: Probe, run: Run) -> None:
    with ignored(run(), probe) as workload:
        workload.do("rounds 2 16 41")
        assert len(changes(probe, workload)) == 1
        workload.do(f"rounds {SMALL_PRIME} 16 41")
        assert changes(probe, workload) == []
        assert turns_of(probe, workload).per_graph == 40, "the draft model's graphs are not what it is about"


def test_two_models_in_two_threads_are_counted_apart(probe: Probe, run: Run) -> None:
    with ignored(run(), probe) as workload:
        workload.do(f"both {2 * STRETCH_GRAPHS} 2")
        assert wakes_of(probe, workload) == [], "two times one section are not one time two"
        assert turns_of(probe, workload).per_graph <= 1
        workload.do(f"both {2 * STRETCH_GRAPHS} 41")
        # Two threads that see it at the same moment may both say so.
        assert len(changes(probe, workload)) in (1, 2), "the other thread's model does not take it back"
        assert turns_of(probe, workload).turning


def test_computing_on_the_cpu_alone_is_no_section(probe: Probe, run: Run) -> None:
    with ignored(run(), probe) as workload:
        workload.do(f"alone {SMALL_PRIME}")
        assert probe.turns(workload.pid) is None
        for _ in range(5):
            workload.do("tokens 1 1")
            workload.do("synchronize 1")
            workload.do("alone 100")
        assert turns_of(probe, workload) == ProcessTurns(5, False, 0)


def test_a_long_stretch_without_turns_takes_it_back(probe: Probe, run: Run) -> None:
    """A server that now runs another model. A long prompt, which a GPU may compute alone, is no such stretch."""
    with ignored(run(), probe) as workload:
        workload.do("graphs 3 41")
        assert len(changes(probe, workload)) == 1
        workload.do(f"graphs {2 * STRETCH_GRAPHS} 1")
        assert turns_of(probe, workload).turning, "so many graphs, in too short a time"
        wait_until(
            lambda: workload.do("graphs 1 1") and not turns_of(probe, workload).turning,
            "taken back",
            STRETCH_SECONDS + 5,
        )
        assert len(changes(probe, workload)) == 1
        assert turns_of(probe, workload).per_graph == 0
        workload.do("graphs 2 41")
        assert len(changes(probe, workload)) == 1, "and back again"


def test_a_change_that_found_no_room_is_told_with_the_next_graph(probe: Probe, run: Run) -> None:
    with run() as workload, run() as other:
        probe.configure(1, MIN_TURNS)
        probe.set_verdict(other.pid, counts=True)
        other.do(f"call {SOME_PRIME}")
        ignored(workload, probe).do("graphs 2 41")
        assert changes(probe, workload) == [], "the other process has filled the ring buffer"
        workload.do("graphs 1 1")
        assert len(changes(probe, workload)) == 1


def test_graphs_and_sections_are_activity_like_calls(probe: Probe, run: Run) -> None:
    """An engine that uses ggml without libllama."""
    with run() as workload:
        workload.do("graphs 7 5")
        assert calls_of(probe, workload) == 7 * (1 + 5)
        assert [(wake.kind, wake.verdict) for wake in wakes_of(probe, workload)] == [
            (KIND_CALL, 0),
            (KIND_TURNS, 0),
        ]


def test_a_section_is_a_sign_of_life(probe: Probe, run: Run) -> None:
    with run() as workload:
        workload.begin("slow 5 -300")
        signs = []
        for sections in range(1, 1 + 5):
            wait_until(lambda: calls_of(probe, workload) == 1 + sections, f"{sections} sections")  # noqa: B023
            activity = probe.activity(workload.pid)
            assert activity is not None
            signs.append(activity.last_call_ns)
        workload.finish()
        assert signs == sorted(set(signs)), "each later than the one before"


def test_a_thread_is_known_by_how_far_it_is_with_its_graph(probe: Probe, run: Run) -> None:
    with run() as workload:
        workload.do("graphs 2 41")
        workload.do("graphs 1 3")
        thread = probe.thread_turns(workload.pid)
        assert thread is not None
        assert (thread.tgid, thread.sections, thread.last_turns) == (workload.pid, 3, 40)


def test_exec_forgets_the_turns(probe: Probe, run: Run, llama: Llama) -> None:
    with ignored(run(), probe) as workload:
        workload.do("graphs 1 41")
        workload.become(str(llama.program))
        workload.do("graphs 1 41")
        assert turns_of(probe, workload) == ProcessTurns(1, False, 0)
        assert changes(probe, workload) == []


def test_turns_can_be_forgotten(probe: Probe, run: Run) -> None:
    """As a daemon does it whose settings change."""
    with ignored(run(), probe) as workload:
        workload.do("graphs 2 41")
        probe.forget_turns(workload.pid)
        assert probe.turns(workload.pid) is None
        probe.configure(HOUR_NS, 50)
        workload.do("graphs 5 41")
        assert turns_of(probe, workload) == ProcessTurns(5, False, 40)
        probe.configure(HOUR_NS, 40)
        workload.do("graphs 2 41")
        assert turns_of(probe, workload).turning
