"""What the BPF program and the daemon tell each other: the structs of probe.c and turns.h."""

from __future__ import annotations

import struct
from typing import NamedTuple

from .turns import ProcessTurns, ThreadTurns

VERDICT_IGNORED = 1
VERDICT_COUNTS = 2
KIND_CALL = 1
KIND_EXEC = 2
KIND_TURNS = 3

SETTINGS = struct.Struct("=QQQI4x")
ACTIVITY = struct.Struct("=QQQI4x")
TURNS = struct.Struct("=QQIIII")
THREAD = struct.Struct("=IIIIIIQQQ")
WAKE = struct.Struct("=QIIII")
ID = struct.Struct("=I")


class Wake(NamedTuple):
    """One record from the kernel.

    A process called (KIND_CALL), became another program (KIND_EXEC), began or ceased to take turns (KIND_TURNS).
    """

    at_ns: int  # CLOCK_MONOTONIC
    tgid: int
    tid: int
    kind: int
    verdict: int  # 0 where the kernel knows none yet


class Activity(NamedTuple):
    """What the kernel noted of one process: calls of libllama, scheduled graphs and their CPU sections."""

    last_call_ns: int  # CLOCK_MONOTONIC
    last_wake_ns: int
    calls: int
    last_tid: int


def read_activity(value: bytes) -> Activity:
    return Activity(*ACTIVITY.unpack(value))


def read_process_turns(value: bytes) -> ProcessTurns:
    graphs, _last_turning_ns, turning, _told, per_graph, _unused = TURNS.unpack(value)
    return ProcessTurns(graphs, bool(turning), per_graph)


def read_thread_turns(value: bytes) -> ThreadTurns:
    tgid, _in_graph, sections, last_turns, _turned, _plain_graphs, *times_ns = THREAD.unpack(value)
    return ThreadTurns(tgid, sections, last_turns, *times_ns)
