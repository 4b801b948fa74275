"""What is added to one probed call: by our probe, for each verdict, by the yardstick's, and at the least."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from moe_gpu_stabilizer.uprobes import Probe
from tests.workload import Workload

from .bare import bare_probe, look_up_probe, offsets_of
from .effort import Effort
from .place import Place, cpu_time_ns
from .results import Curve, Figure, Row

GROUP = "Added to one probed call, in its thread"
HALF_A_HOLD_NS = 500_000_000
UNKNOWN, IGNORED, COUNTS = None, False, True
VERDICTS = {"unknown": UNKNOWN, "ignored": IGNORED, "counts": COUNTS}
NS_PER_US = 1e3

# Two measurements of one and the same probe differ by that.
SAME = 1.05

# What a second and a third look-up in the kernel's maps may add to the first.
FEW_LOOK_UPS = 1.25

# The commands that make N calls, N CPU sections in one graph, N graphs without a section.
COMMANDS = {"call": "call {}", "section": "graphs 1 {}", "graph": "graphs {} 0"}
NAMES = {"call": "a call of llama_process", "section": "a CPU section", "graph": "a graph"}


@dataclass
class Samples:
    """CPU time of one call in ns, by what is probed how: (kind, variant)."""

    taken: dict[tuple[str, str], list[float]]

    def add(self, variant: str, workload: Workload, calls: int, kinds: tuple[str, ...] = tuple(COMMANDS)) -> None:
        for kind in kinds:
            self.taken.setdefault((kind, variant), []).append(time_of_one_ns(workload, COMMANDS[kind], calls))

    def added_us(self, kind: str, variant: str) -> Figure:
        """More than the same costs unprobed."""
        unprobed = statistics.median(self.taken[kind, "unprobed"])
        return Figure.of([(taken - unprobed) / NS_PER_US for taken in self.taken[kind, variant]])


def measure(place: Place, effort: Effort) -> list[Row]:
    samples = Samples({})
    with place.workload(counts=True) as workload:
        for _ in range(effort.call_rounds):
            samples.add("unprobed", workload, effort.calls)
            with bare_probe(place.libraries):
                samples.add("bare", workload, effort.calls)
            with look_up_probe(place.libraries, workload.pid):
                samples.add("look-up", workload, effort.calls)
            with our_probe(place, workload) as probe:
                for name, verdict in VERDICTS.items():
                    judge(probe, workload, verdict)
                    samples.add(name, workload, effort.calls)
            with place.watched_by_yardstick():
                samples.add("yardstick", workload, effort.calls, ("call",))
    return rows_of(samples)


def rows_of(samples: Samples) -> list[Row]:
    yardstick = samples.added_us("call", "yardstick")
    rows = [
        Row(
            GROUP, f"{NAMES['call']}, {name}", "us", samples.added_us("call", name), yardstick,
            yardstick.median / 2, "at most half of the yardstick",
        )
        for name in ("counts", "unknown")
    ]  # fmt: skip
    bare = samples.added_us("call", "bare")
    rows.append(
        Row(
            GROUP, f"{NAMES['call']}, ignored", "us", samples.added_us("call", "ignored"), yardstick,
            SAME * bare.median, f"no more than a bare entry probe ({bare.median:.2f}), within 5 %",
        )
    )  # fmt: skip
    rows += [Row(GROUP, f"{NAMES['call']}, a bare entry probe", "us", bare)]
    for kind in ("section", "graph"):
        least = samples.added_us(kind, "look-up")
        for name in ("ignored", "counts"):
            limit = FEW_LOOK_UPS * least.median if name == "ignored" else None
            budget = f"at most {FEW_LOOK_UPS} times a probe that only looks its caller up" if limit else ""
            rows.append(Row(GROUP, f"{NAMES[kind]}, {name}", "us", samples.added_us(kind, name), None, limit, budget))
        rows.append(Row(GROUP, f"{NAMES[kind]}, a probe that looks its caller up", "us", least))
        rows.append(Row(GROUP, f"{NAMES[kind]}, a bare entry probe", "us", samples.added_us(kind, "bare")))
    return rows


@contextmanager
def our_probe(place: Place, *workloads: Workload) -> Iterator[Probe]:
    """The BPF program as the daemon loads it, without the daemon; nobody is woken by it."""
    with ExitStack() as stack:
        probe = Probe(HALF_A_HOLD_NS)
        stack.callback(probe.close)
        for library in place.libraries:
            for function, offset in offsets_of(library).items():
                stack.callback(probe.attach(str(library), offset, function).close)
        yield probe


def judge(probe: Probe, workload: Workload, verdict: bool | None) -> None:
    if verdict is UNKNOWN:
        probe.forget_verdict(workload.pid)
    else:
        probe.set_verdict(workload.pid, verdict)


def time_of_one_ns(workload: Workload, command: str, calls: int) -> float:
    """CPU time, so that other programs on the machine do not count; after a tenth of the calls to warm up."""
    workload.do(command.format(max(1, calls // 10)))
    before_ns = cpu_time_ns(workload.pid)
    workload.do(command.format(calls))
    return (cpu_time_ns(workload.pid) - before_ns) / calls


def measure_callers(place: Place, effort: Effort) -> tuple[list[Row], list[Curve]]:
    """Many processes that count call at once: does one call cost more?"""
    ours: dict[int, float] = {}
    bare: dict[int, float] = {}
    with ExitStack() as stack:
        workloads = [stack.enter_context(place.workload(counts=True)) for _ in range(max(effort.callers))]
        unprobed = {count: together_us(workloads[:count], effort.calls) for count in effort.callers}
        with bare_probe(place.libraries):
            for count in effort.callers:
                bare[count] = together_us(workloads[:count], effort.calls) - unprobed[count]
        with our_probe(place) as probe:
            for workload in workloads:
                probe.set_verdict(workload.pid, counts=True)
            for count in effort.callers:
                ours[count] = together_us(workloads[:count], effort.calls) - unprobed[count]
    most = max(effort.callers)
    row = Row(
        "Growth", f"added to one call while {most} processes call at once", "us", Figure.of([ours[most]]),
        Figure.of([bare[most]]), 2 * max(ours[min(effort.callers)], bare[most]),
        "at most twice what it is with one process, or what a bare probe (here as the yardstick) takes",
    )  # fmt: skip
    return [row], [Curve("added to one call", "processes that call at once", "us", ours, "a bare entry probe", bare)]


def together_us(workloads: list[Workload], calls: int) -> float:
    """CPU time of one call while all of them call at once; as many calls in all, however many they are."""
    each = max(1, calls // len(workloads))
    before_ns = sum(cpu_time_ns(workload.pid) for workload in workloads)
    for workload in workloads:
        workload.begin(f"call {each}")
    for workload in workloads:
        workload.finish()
    used_ns = sum(cpu_time_ns(workload.pid) for workload in workloads) - before_ns
    return used_ns / (each * len(workloads)) / NS_PER_US
