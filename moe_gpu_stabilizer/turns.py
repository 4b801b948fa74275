"""How CPU and GPU take turns, as the BPF program has counted it, in numbers and in words. Pure.

The counting itself, and when a process begins and ceases to count, is turns.h.
"""

from __future__ import annotations

from typing import NamedTuple

# The last section of a graph is taken for over when it has had this many times as long as the others of its graph.
PATIENCE = 2

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
    began_ns: int  # CLOCK_MONOTONIC


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


def is_complete(thread: ThreadTurns, last_section_ns: int, now_ns: int, min_turns: int) -> bool:
    """Has the CPU done its part of the thread's graph, so that what the thread computes now is something else?

    Nothing tells of the end of a graph, but the one before it tells how many sections it will have. That of a prompt
    may take seconds for each, the last one too. False where the graph before was no turning one.
    """
    if thread.last_turns < min_turns or thread.sections <= thread.last_turns:
        return False
    section_ns = (last_section_ns - thread.began_ns) / thread.sections
    return now_ns - last_section_ns > PATIENCE * section_ns
