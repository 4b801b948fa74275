"""For --check: which libllama there is to watch, who uses it, and what the daemon would make of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import psutil

from . import status
from .choice import choose, say_left_out
from .errors import StabilizerError
from .files import FileId
from .invocation import again_as_root
from .kernel_support import Finding
from .libraries import Finder, Library, say_refused
from .matching import Verdict
from .mounts import Mounts
from .policy import Process
from .processes import PROC, ProcessVanishedError, identify, printable
from .reach import reached
from .runtime import Runtime
from .settings import Settings
from .tracker import judge_now
from .turns import ProcessTurns, remark, takes_no_turns

MOST_NAME_CHARACTERS = 60

llama_finding = partial(Finding, "llama.cpp")


@dataclass(frozen=True)
class WatchedLibrary:
    path: str
    functions: tuple[str, ...]


@dataclass(frozen=True)
class UnwatchedLibrary:
    """A libllama, or a pattern of STABILIZER_LIBRARIES, that gives nothing to watch."""

    path: str
    configured: bool
    readable: bool


@dataclass(frozen=True)
class UntouchedLibrary:
    """What may be a library, where nobody may answer: whoever asks for it might wait for ever."""

    path: str
    file_system: str


@dataclass(frozen=True)
class UsingProcess:
    """A process that uses a watched library. `counts` is None where its launch cannot be read."""

    pid: int
    user: str
    name: str
    counts: bool | None
    reason: str
    turns: ProcessTurns | None = None  # as the running daemon has counted them


class Seen(NamedTuple):
    """What a running daemon says of a process."""

    verdict: Verdict
    turns: ProcessTurns | None


@dataclass(frozen=True)
class Llama:
    """What there is of llama.cpp."""

    libraries: tuple[WatchedLibrary, ...]
    unwatched: tuple[UnwatchedLibrary, ...]
    untouched: tuple[UntouchedLibrary, ...]
    left_out: int  # libraries beyond as many as may be watched
    processes: tuple[UsingProcess, ...]
    unseen_processes: int | None  # None: /proc shows only one's own


def look_at_llama(settings: Settings, places: Sequence[str], runtime: Runtime) -> Llama:
    """Look as the daemon does, with the rights of this user. Turns are counted in the kernel, by a running daemon."""
    finder = Finder(settings.libraries, places)
    found = finder.scan(time.monotonic_ns())
    libraries = choose(found, ())
    listed = {process.pid: process.info for process in psutil.process_iter(["name", "username", "memory_info"])}
    return Llama(
        libraries=tuple(
            WatchedLibrary(printable(library.place.path), tuple(sorted(library.offsets)))
            for library in sorted(libraries.values(), key=lambda library: library.place.path)
        ),
        unwatched=tuple(look_at_unwatched(finder)),
        untouched=tuple(UntouchedLibrary(printable(path), printable(kind)) for path, kind in finder.refused().items()),
        left_out=len(found) - len(libraries),
        processes=tuple(look_at_processes(finder, libraries, listed, settings, seen_by_daemon(runtime))),
        unseen_processes=count_unseen(finder, listed),
    )


def look_at_unwatched(finder: Finder) -> Iterator[UnwatchedLibrary]:
    for path in sorted(finder.without_functions()):
        configured = path in finder.patterns
        yield UnwatchedLibrary(printable(path), configured, configured or is_readable(path, finder.mounts))


def is_readable(path: str, mounts: Mounts) -> bool:
    try:
        with reached(path, mounts) as handle:
            return os.access(f"/proc/self/fd/{handle}", os.R_OK)
    except OSError:  # it went while it was looked at
        return False


def look_at_processes(
    finder: Finder,
    libraries: Mapping[FileId, Library],
    listed: Mapping[int, dict[str, Any]],
    settings: Settings,
    seen: Mapping[Process, Seen],
) -> Iterator[UsingProcess]:
    """Judge the processes that use a library, as the daemon would at their next call.

    Where that cannot be seen, a running daemon's word is taken.
    """
    using = {pid for pid, visit in finder.visits.items() if any(one.file in libraries for one in visit.uses)}
    for pid in sorted((using | {process.tgid for process in seen}) & listed.keys()):
        counts: bool | None
        try:
            said = seen.get(identify(pid))
            if pid not in using and said is None:  # another process has that pid by now
                continue
            turns = said.turns if said else None
            verdict = judge_now(pid, settings, turns)
            counts, reason = verdict.counts, verdict.reason
        except ProcessVanishedError:
            continue
        except PermissionError:
            counts, reason = None, "its arguments and environment cannot be read"
            if said:
                counts, reason = said.verdict.counts, said.verdict.reason
        user, name = (printable(listed[pid][key] or "?")[:MOST_NAME_CHARACTERS] for key in ("username", "name"))
        yield UsingProcess(pid, user, name, counts, printable(reason), turns)


def seen_by_daemon(runtime: Runtime) -> dict[Process, Seen]:
    """What a running daemon says; nothing where none runs, or where it is of another version."""
    try:
        published = runtime.load_status() or {"processes": []}
        return {
            Process(one["pid"], one["start_ticks"]): Seen(Verdict(one["counts"], one["reason"]), status.turns_of(one))
            for one in published["processes"]
        }
    except (StabilizerError, LookupError, TypeError):
        return {}


def count_unseen(finder: Finder, listed: Mapping[int, dict[str, Any]]) -> int | None:
    """How many processes could not be looked into; None where /proc hides other users' (its mount option hidepid)."""
    if not os.path.exists(PROC / "1"):
        return None
    # Kernel threads and zombies have no memory, and no library in it; None is a process that hides even that.
    memory = {pid: info["memory_info"] for pid, info in listed.items()}
    closed = [pid for pid, visit in finder.visits.items() if not visit.readable and pid in memory]
    return len([pid for pid in closed if memory[pid] is None or memory[pid].vms > 0])


def llama_findings(llama: Llama, as_root: bool) -> Iterator[Finding]:
    """Judge what was seen. Pure, as all below."""
    for library in llama.libraries:
        yield llama_finding("library", "ok", f"{library.path} ({', '.join(library.functions)})")
    if not llama.libraries:
        yield llama_finding("library", "note", "none found yet; the daemon attaches when one is in use")
    for unwatched in llama.unwatched:
        yield unwatched_finding(unwatched, as_root)
    for untouched in llama.untouched:
        yield llama_finding("library", "note", *said_with_remedy(say_refused(untouched.path, untouched.file_system)))
    if llama.left_out:
        yield llama_finding("library", "note", *said_with_remedy(say_left_out(llama.left_out)))
    for process in llama.processes:
        says = {True: "counts", False: "is ignored", None: "unknown"}[process.counts]
        more = remark(process.counts is True, process.reason, process.turns)
        text = f"pid {process.pid} {process.name} ({process.user}) {says}: {process.reason}{more}"
        if process.counts and takes_no_turns(process.turns):
            yield llama_finding("process", "note", text, "STABILIZER_DETECT=behaviour does not raise the floor for it")
        else:
            yield llama_finding("process", "unknown" if process.counts is None else "ok", text)
    if llama.libraries and not llama.processes and llama.unseen_processes == 0:
        yield llama_finding("process", "ok", "none is running with these libraries")
    if llama.unseen_processes != 0:
        yield unseen_finding(llama.unseen_processes, as_root)


def said_with_remedy(line: str) -> tuple[str, str]:
    """What the log says in one line, in two."""
    says, _, remedy = line.rpartition("; ")
    return says, remedy


def unwatched_finding(unwatched: UnwatchedLibrary, as_root: bool) -> Finding:
    if not unwatched.readable:
        text = f"{unwatched.path} cannot be read"
        return (
            llama_finding("library", "note", text)
            if as_root
            else llama_finding("library", "unknown", text, again_as_root())
        )
    if unwatched.configured:
        seen = "" if as_root else " that this user can see"
        text = f"STABILIZER_LIBRARIES has {unwatched.path}, which gives nothing to watch{seen}"
        remedy = "it should match a libllama that exports llama_decode, or a static llama-server"
        return llama_finding("library", "note", text, remedy)
    return llama_finding("library", "note", f"{unwatched.path} has no llama_decode: not watched")


def unseen_finding(unseen: int | None, as_root: bool) -> Finding:
    """Say what could not be looked into. What root cannot see, the daemon cannot either."""
    which = "processes" if unseen is None else status.counted(unseen, "process", "processes")
    if as_root:
        return llama_finding("process", "note", f"{which} cannot be looked into, even by root")
    text = f"{which} of other users cannot be seen without root, nor libraries in places that are closed to you"
    return llama_finding("process", "unknown", text, again_as_root())
