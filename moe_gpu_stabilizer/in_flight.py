"""Is a process in flight? The kernel's notes come first, then what its thread does."""

from __future__ import annotations

from typing import Protocol

from . import policy
from .processes import ThreadMeter
from .records import Activity
from .settings import Settings
from .turns import ThreadTurns, is_in_graph


class Notes(Protocol):
    """What is needed of uprobes.Probe."""

    def activity(self, tgid: int) -> Activity | None: ...

    def thread_turns(self, tid: int) -> ThreadTurns | None: ...


def look(
    notes: Notes, process: policy.Process, meter: ThreadMeter, claim: policy.Claim, settings: Settings, now_ns: int
) -> policy.Event:
    """Was there a newer call, graph or section that the kernel did not wake us for? Else: is its thread at work?

    Where CPU and GPU take turns, the sections say more: a thread that does nothing may wait for the GPU, and one that
    computes may compute something of its own. A Python program may go on so for hours.
    """
    activity = notes.activity(process.tgid)
    if activity is None:  # among thousands of processes, the kernel has dropped this one's entry
        return policy.ThreadChecked(process, at_work=False)
    if activity.last_call_ns > claim.last_in_flight_ns:
        return policy.CallSeen(process, activity.last_call_ns)
    at_work = meter.at_work(activity.last_tid, activity.last_call_ns, now_ns)
    thread = None if settings.detect == "flags" else notes.thread_turns(activity.last_tid)
    if thread and thread.tgid == process.tgid:
        in_graph = is_in_graph(thread, now_ns, settings.min_turns)
        at_work = at_work if in_graph is None else in_graph
    return policy.ThreadChecked(process, at_work)
