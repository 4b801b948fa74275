"""Does a process suffer from CPU and GPU taking turns?

Pure: what /proc and the BPF program say of it come in, a verdict with its reason comes out. There are two sources of
verdicts: how the process was launched, and how it behaves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .turns import ProcessTurns, per_graph

CPU_MOE_VARIABLE = "LLAMA_ARG_CPU_MOE"
N_CPU_MOE_VARIABLE = "LLAMA_ARG_N_CPU_MOE"

# What llama.cpp takes for true in the environment (common/arg.cpp, is_truthy), and "yes", which some of its forks take.
TRUE_WORDS = ("1", "true", "on", "yes", "enabled")

# llama.cpp reads a count with std::stoi: leading blanks, a sign, digits; the rest is ignored.
LEADING_INTEGER = re.compile(r"\s*([+-]?\d+)")

# A reason is for a line in a log: a 2 MB argument has no place there.
REASON_CHARACTERS = 80


@dataclass(frozen=True)
class Verdict:
    """Whether a process counts, and why, in words for the log."""

    counts: bool
    reason: str


def judge_launch(cmdline: bytes, environ: bytes, flags: Sequence[str]) -> Verdict:
    """Judge a process by its launch.

    `cmdline` and `environ` are as in /proc/PID/cmdline and /proc/PID/environ: strings that each end with a NUL. They
    are searched, not split: any user may start a process with megabytes of either. `flags` are the argv tokens that
    make it count, with any value or none.
    """
    found = flag_in(cmdline, flags)
    if found:
        return Verdict(True, found)
    cpu_moe = variable_in(environ, CPU_MOE_VARIABLE)
    if cpu_moe in TRUE_WORDS:
        return Verdict(True, f"{CPU_MOE_VARIABLE}={cpu_moe}")
    n_cpu_moe = variable_in(environ, N_CPU_MOE_VARIABLE)
    count = LEADING_INTEGER.match(n_cpu_moe or "")
    if count and int(count[1]) > 0:
        return Verdict(True, f"{N_CPU_MOE_VARIABLE}={n_cpu_moe}")
    return Verdict(False, "no MoE flag in its arguments or environment")


def judge_behaviour(turns: ProcessTurns | None, min_turns: int) -> Verdict:
    """Judge a process by its graphs; None where none has been seen.

    A refusal has one reason, whatever has been seen so far: it is given once, and true for as long as it stands.
    """
    if turns and turns.turning and turns.per_graph >= min_turns:
        return Verdict(True, per_graph(turns.per_graph))
    return Verdict(False, f"fewer than {per_graph(min_turns)} seen")


def either(launch: Verdict, behaviour: Verdict) -> Verdict:
    """One of the two will do; the launch is named first, for it does not change."""
    if launch.counts:
        return launch
    return behaviour if behaviour.counts else Verdict(False, f"{launch.reason}, {behaviour.reason}")


def flag_in(cmdline: bytes, flags: Sequence[str]) -> str:
    """Return the first of `flags` that is an argument, as "--n-cpu-moe 8" or "--n-cpu-moe=8"; "" if none is.

    The program's own name (argv[0]) is not an argument.
    """
    start = cmdline.find(b"\0")
    if start < 0:
        return ""
    arguments = cmdline[start:]
    if not arguments.endswith(b"\0"):
        arguments += b"\0"
    for flag in flags:
        token = b"\0" + flag.encode("utf-8", "surrogateescape")
        whole = arguments.find(token + b"\0")
        if whole >= 0:
            value = _string_at(arguments, whole + len(token) + 1)
            return f"{flag} {value}" if LEADING_INTEGER.fullmatch(value) else flag
        assigned = arguments.find(token + b"=")
        if assigned >= 0:
            return _string_at(arguments, assigned + 1)
    return ""


def variable_in(environ: bytes, name: str) -> str | None:
    """Return an environment variable, cut to REASON_CHARACTERS, or None. The first one wins, as with getenv()."""
    start = (b"\0" + environ).find(b"\0" + name.encode() + b"=")
    return None if start < 0 else _string_at(environ, start + len(name) + 1)


def _string_at(block: bytes, start: int) -> str:
    """The NUL-ended string that begins at `start`, cut to REASON_CHARACTERS."""
    window = block[start : start + 4 * REASON_CHARACTERS]
    return window.split(b"\0", 1)[0].decode("utf-8", "replace")[:REASON_CHARACTERS]
