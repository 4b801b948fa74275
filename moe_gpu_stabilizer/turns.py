"""How CPU and GPU take turns, as the BPF program has counted it, in numbers and in words. Pure.

The counting itself, and when a process begins and ceases to count, is turns.h.
"""

from __future__ import annotations

from typing import NamedTuple

# The next section of a graph is waited for as long as this many of them have taken on average. Layers differ: in some
# models every fourth has the costly kind of attention.
PATIENCE = 4

# A graph is known to be complete when the next one begins.
GRAPHS_THAT_TELL = 2


class ProcessTurns(NamedTuple):
    """How CPU and GPU take turns in one process."""

    graphs: int  # scheduled graphs that have begun
    turning: bool  # graph after graph has many turns
    per_graph: int  # turns in the last complete graph; while it is turning, in the last such


class ThreadTurns(NamedTuple):
    """How far one thread is with its graph: the one in progress, or the last."""

    tgid: int
    sections: int  # on the CPU, that have begun
    last_turns: int  # of the graph before
    began_ns: int  # the graph; CLOCK_MONOTONIC, as all times
    last_section_ns: int  # when it began; 0 before the first
    section_ns: int  # from one section to the next, on average, in the graph before


def per_graph(turns: int) -> str:
    """40 turns per graph."""
    return f"{turns or 'no'} {'turn' if turns == 1 else 'turns'} per graph"


def takes_no_turns(turns: ProcessTurns | None) -> bool:
    """Is it known that its last complete graph had none?"""
    return turns is not None and turns.graphs >= GRAPHS_THAT_TELL and turns.per_graph == 0


def remark(counts: bool, reason: str, turns: ProcessTurns | None) -> str:
    """What is to be added to a verdict with this reason, once a graph is complete: the turns, and what they mean."""
    if turns is None or turns.graphs < GRAPHS_THAT_TELL or reason == per_graph(turns.per_graph):
        return ""
    if counts and takes_no_turns(turns):
        return ", but shows no turns: has it any layer on the GPU?"
    return f" ({per_graph(turns.per_graph)})"


def is_in_graph(thread: ThreadTurns, now_ns: int, min_turns: int) -> bool | None:
    """Is the thread in the middle of a graph? None: that cannot be said.

    Nothing tells of the end of a graph, but the one before tells how many sections it will have. True while more of
    them are to come, in due time, though the thread may wait for the GPU. False when the last one must be over: what
    the thread computes then is something else. None also where the graph before was no turning one.
    """
    if thread.last_turns < min_turns:
        return None
    section_ns = thread.section_ns
    if thread.sections:
        section_ns = max(section_ns, (thread.last_section_ns - thread.began_ns) // thread.sections)
    in_time = now_ns - (thread.last_section_ns or thread.began_ns) <= PATIENCE * section_ns
    last_has_begun = thread.sections > thread.last_turns
    if in_time:
        return None if last_has_begun else True
    return False if last_has_begun else None
