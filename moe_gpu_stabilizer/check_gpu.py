"""For --check: the GPU's devfreq node, and whether the floor would change anything."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import devfreq
from .devfreq import mhz
from .errors import DevfreqError, StabilizerError
from .invocation import again_as_root, command
from .kernel_support import Finding
from .processes import printable
from .runtime import MOST_HZ, Runtime
from .settings import Settings

MOST_GOVERNOR_CHARACTERS = 60

gpu_finding = partial(Finding, "GPU")


@dataclass(frozen=True)
class Node:
    """A GPU's devfreq node, in Hz. None is what cannot be read; `problems` says why, where the daemon needs it."""

    name: str
    path: str
    governor: str | None
    available_hz: tuple[int, ...]
    min_hz: int | None
    max_hz: int | None
    cur_hz: int | None
    floor_hz: int | None  # what the daemon would write
    baseline_hz: int | None  # what a daemon, running or killed, has to give back
    writable: bool | None  # None: not to be told without root
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Gpu:
    """What devfreq has. `refusal` says why the configured node could not be looked at."""

    class_directory: str
    node: Node | None
    refusal: str
    gpu_nodes: tuple[str, ...]
    other_nodes: tuple[str, ...]
    has_jetson_clocks: bool


def look_at_gpu(settings: Settings, class_directory: Path, runtime: Runtime, as_root: bool) -> Gpu:
    """Find the GPU's node as the daemon does, and see what else there is."""
    gpu_nodes = [node.name for node in devfreq.candidates(class_directory)]
    try:
        names = sorted(os.listdir(class_directory))
    except OSError:  # no devfreq in this kernel
        names = []
    refusal = refusal_of(settings.devfreq) if settings.devfreq else ""
    node = None if refusal else devfreq.find(settings.devfreq, class_directory)
    return Gpu(
        class_directory=printable(str(class_directory)),
        node=look_at_node(node, settings.floor_hz, runtime, as_root) if node else None,
        refusal=refusal,
        gpu_nodes=tuple(map(printable, gpu_nodes)),
        other_nodes=tuple(printable(name) for name in names if name not in gpu_nodes),
        has_jetson_clocks=shutil.which("jetson_clocks") is not None,
    )


def refusal_of(configured: str) -> str:
    """Why it cannot be told whether this node is there: mostly a directory on the way that is closed to this user."""
    try:
        os.stat(Path(configured) / "min_freq")
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL, which no path contains
        return ""
    except OSError as error:
        return error.strerror or "refused"
    return ""


def look_at_node(node: devfreq.Node, wanted_hz: int | None, runtime: Runtime, as_root: bool) -> Node:
    """Read a node, whatever its files hold."""
    (min_hz, min_problem), (max_hz, max_problem), (cur_hz, _) = (
        read_hz(node, attribute) for attribute in ("min_freq", "max_freq", "cur_freq")
    )
    try:
        governor = printable(node.read("governor"))[:MOST_GOVERNOR_CHARACTERS]
    except DevfreqError:
        governor = None
    try:
        available_hz = tuple(hz for hz in node.available_hz() if hz < MOST_HZ)
        floor_hz = None if max_hz is None else min(node.floor_hz(wanted_hz), max_hz)
    except (DevfreqError, ValueError):  # it has gone since, or lists a number that is too long for int()
        available_hz, floor_hz = (), None
    return Node(
        name=printable(node.name),
        path=printable(str(node)),
        governor=governor,
        available_hz=available_hz,
        min_hz=min_hz,
        max_hz=max_hz,
        cur_hz=cur_hz,
        floor_hz=floor_hz,
        baseline_hz=read_baseline_hz(node, runtime),
        writable=os.access(node.directory / "min_freq", os.W_OK) if as_root else None,
        problems=tuple(problem for problem in (min_problem, max_problem) if problem),
    )


def read_hz(node: devfreq.Node, attribute: str) -> tuple[int | None, str]:
    """Return a frequency, or None and what is wrong with it."""
    try:
        frequency_hz = node.read_hz(attribute)
    except DevfreqError as error:
        return None, printable(str(error))
    except ValueError:  # a number too long for int()
        frequency_hz = MOST_HZ
    return (frequency_hz, "") if frequency_hz < MOST_HZ else (None, f"{attribute} reads an impossible frequency")


def read_baseline_hz(node: devfreq.Node, runtime: Runtime) -> int | None:
    try:
        raised = runtime.load_raised()
    except StabilizerError:  # damaged; the daemon says so when it starts
        return None
    return raised.baseline_hz if raised and raised.node == str(node) else None


def gpu_findings(gpu: Gpu, settings: Settings, as_root: bool, daemon_runs: bool) -> Iterator[Finding]:
    """Judge what was seen. Pure, as all below."""
    if gpu.node is None:
        yield absent_node(gpu, printable(settings.devfreq), as_root)
    else:
        yield gpu_finding("node", "ok", gpu.node.path)
    yield from other_nodes(gpu, chosen=bool(settings.devfreq))
    if gpu.node:
        yield from node_findings(gpu.node)
        yield from floor_findings(gpu.node, settings.floor_hz, daemon_runs)
    if gpu.has_jetson_clocks:
        text = "jetson_clocks --store, run while the floor is up, stores the floor as if it were yours"
        yield gpu_finding("jetson_clocks", "note", text, "store while nothing infers, or with the service stopped")


def absent_node(gpu: Gpu, configured: str, as_root: bool) -> Finding:
    if gpu.refusal:
        text = f"STABILIZER_DEVFREQ={configured} cannot be looked at: {gpu.refusal}"
        return (
            gpu_finding("node", "missing", text, "correct it")
            if as_root
            else gpu_finding("node", "unknown", text, again_as_root())
        )
    if configured:
        text = f"STABILIZER_DEVFREQ={configured} is not there, or is no devfreq directory"
        return gpu_finding("node", "missing", text, "correct it, or leave it empty: then the GPU's node is looked for")
    return gpu_finding(
        "node",
        "missing",
        f"no GPU devfreq node under {gpu.class_directory}",
        "some boards register it when the GPU is first used, and the daemon waits for it; "
        f"on another kind of machine try: {command('--demo')}",
    )


def other_nodes(gpu: Gpu, chosen: bool) -> Iterator[Finding]:
    """What else devfreq has, and how to choose one of them. `chosen`: STABILIZER_DEVFREQ has done so."""
    others = [name for name in gpu.gpu_nodes + gpu.other_nodes if gpu.node is None or name != gpu.node.name]
    if not others:
        return
    setting = f"STABILIZER_DEVFREQ={gpu.class_directory}/{others[0]}"
    if gpu.node is None:
        yield gpu_finding("other nodes", "note", ", ".join(others), f"if one is the GPU's, name it: {setting}")
    elif len(gpu.gpu_nodes) > 1 and not chosen:
        text = f"{len(gpu.gpu_nodes)} look like a GPU: {', '.join(gpu.gpu_nodes)}; the first is taken"
        yield gpu_finding("other nodes", "note", text, f"{setting} takes another")
    else:
        yield gpu_finding("other nodes", "ok", f"{', '.join(others)}: left alone")


def node_findings(node: Node) -> Iterator[Finding]:
    for problem in node.problems:
        yield gpu_finding("node", "missing", problem, "is it a GPU's devfreq directory? See STABILIZER_DEVFREQ")
    if node.writable is False:
        remedy = "in a container: mount /sys writable, or run it on the host"
        yield gpu_finding("node", "missing", "min_freq cannot be written, even by root", remedy)
    text = f"{in_mhz(*node.available_hz)} MHz" if node.available_hz else "the driver lists none"
    yield gpu_finding("frequencies", "ok" if node.available_hz else "note", text)
    now = f"cur_freq {in_mhz(node.cur_hz)}, min_freq {in_mhz(node.min_hz)}, max_freq {in_mhz(node.max_hz)} MHz"
    yield gpu_finding("now", "ok", f"{now}; governor {node.governor or '?'}")


def floor_findings(node: Node, wanted_hz: int | None, daemon_runs: bool) -> Iterator[Finding]:
    """Would the floor change anything?"""
    if node.min_hz is None or node.max_hz is None or node.floor_hz is None:
        return
    if node.baseline_hz is not None:
        yield raised_floor(node.min_hz, node.baseline_hz, daemon_runs)
    elif node.min_hz >= node.max_hz:
        text = "min_freq is already at max_freq (jetson_clocks?): the daemon will leave it alone"
        yield gpu_finding("floor", "note", text, "sudo jetson_clocks --restore lets the clock vary again")
    elif node.min_hz >= node.floor_hz:
        text = (
            f"min_freq {mhz(node.min_hz)} is no lower than the floor, {mhz(node.floor_hz)}: there is nothing to raise"
        )
        yield gpu_finding("floor", "note", text)
    else:
        yield gpu_finding("floor", "ok", f"would raise min_freq from {in_mhz(node.min_hz)} to {mhz(node.floor_hz)}")
    if wanted_hz is not None:
        yield from wanted_floor(wanted_hz, node.max_hz, node.available_hz)


def raised_floor(min_hz: int, baseline_hz: int, daemon_runs: bool) -> Finding:
    if daemon_runs:
        text = f"min_freq is raised to {mhz(min_hz)} now; {mhz(baseline_hz)} comes back after inference"
        return gpu_finding("floor", "ok", text)
    text = f"a daemon that was killed left min_freq raised; it was {mhz(baseline_hz)}"
    return gpu_finding("floor", "note", text, f"{command('--restore')}, or start the daemon")


def wanted_floor(wanted_hz: int, max_hz: int, available_hz: Sequence[int]) -> Iterator[Finding]:
    """What becomes of STABILIZER_FLOOR_MHZ?"""
    setting = f"STABILIZER_FLOOR_MHZ={in_mhz(wanted_hz)}"
    if wanted_hz > max_hz:
        yield gpu_finding("floor", "note", f"{setting} is above max_freq: capped to {mhz(max_hz)}")
    elif available_hz and not any(devfreq.same_frequency(wanted_hz, hz) for hz in available_hz):
        below = [hz for hz in available_hz if hz < wanted_hz][-1:]
        above = [hz for hz in available_hz if hz > wanted_hz][:1]
        near = " or ".join(map(in_mhz, below + above))
        yield gpu_finding("floor", "note", f"{setting} is not listed: the driver rounds it to {near} MHz")


def in_mhz(*frequencies_hz: int | None) -> str:
    """Frequencies for people, without the unit: "306, 114.75, ?"."""
    return ", ".join("?" if hz is None else mhz(hz).removesuffix(" MHz") for hz in frequencies_hz)
