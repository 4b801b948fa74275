"""Which launches count. launches.json holds launches as people really write them, with what must be said of each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_gpu_stabilizer.matching import REASON_CHARACTERS, Verdict, flag_in, judge_launch, variable_in
from moe_gpu_stabilizer.settings import Settings

FLAGS = Settings().moe_flags
LAUNCHES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "launches.json").read_text())

# execve() takes 2 MB by default. A judgement takes well under a millisecond; what is ruled out is one that grows with
# the square of the size.
LARGE_BYTES = 2 << 20
MOST_SECONDS = 0.05


def block(*strings: str | bytes) -> bytes:
    """argv or environ as /proc shows it."""
    return b"".join((text.encode() if isinstance(text, str) else text) + b"\0" for text in strings)


def judge(*arguments: str | bytes, environ: bytes = b"", flags: tuple[str, ...] = FLAGS) -> Verdict:
    return judge_launch(block("llama-server", *arguments), environ, flags)


def judge_environ(*assignments: str | bytes) -> Verdict:
    return judge("-m", "moe.gguf", environ=block("PATH=/usr/bin", *assignments, "HOME=/root"))


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch["why"])
def test_launches_as_people_write_them(launch: dict[str, Any]) -> None:
    environ = block(*(f"{name}={value}" for name, value in launch.get("environ", {}).items()))
    verdict = judge_launch(block(*launch["argv"]), environ, FLAGS)
    assert verdict.reason
    if launch["flags"] is not None:
        assert verdict.counts == launch["flags"], verdict.reason


# The command line.


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--cpu-moe"], "--cpu-moe"),
        (["-cmoe"], "-cmoe"),
        (["--n-cpu-moe", "8"], "--n-cpu-moe 8"),
        (["--n-cpu-moe", "0"], "--n-cpu-moe 0"),
        (["--n-cpu-moe=8"], "--n-cpu-moe=8"),
        (["--n-cpu-moe="], "--n-cpu-moe="),
        (["-ncmoe", "48", "-t", "8"], "-ncmoe 48"),
        (["--cpu-moe", "-ngl", "99"], "--cpu-moe"),
        (["--n-cpu-moe", "lots"], "--n-cpu-moe"),
        (["-m", "moe.gguf", "--n-cpu-moe"], "--n-cpu-moe"),
        (["", "--cpu-moe"], "--cpu-moe"),
    ],
)
def test_a_flag_counts_with_any_value_and_the_reason_shows_it(arguments: list[str], reason: str) -> None:
    assert judge(*arguments) == Verdict(True, reason)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--cpu-moe-draft"],
        ["--no-cpu-moe"],
        ["x--cpu-moe"],
        ["--cpu-mo"],
        ["-cmoed"],
        ["--CPU-MOE"],
        ["--n-cpu-moex=8"],
        ["--n-cpu-moe-draft=8"],
        ["tell me about --cpu-moe"],
        ["--cpu-moe and why"],
        ["--cpu-moe 8"],
        ["-p", "a\n--cpu-moe\nb"],
    ],
)
def test_what_only_looks_like_a_flag_does_not_count(arguments: list[str]) -> None:
    assert not judge(*arguments).counts


def test_the_programs_own_name_is_no_flag() -> None:
    assert not judge_launch(block("--cpu-moe"), b"", FLAGS).counts
    assert not judge_launch(block("--cpu-moe", "-ngl", "99"), b"", FLAGS).counts
    assert judge_launch(block("", "--cpu-moe"), b"", FLAGS).counts, "an empty name is a name"


@pytest.mark.parametrize("cmdline", [b"", b"\0", b"\0\0\0", b"llama-server", b"llama-server\0"])
def test_a_process_without_arguments_does_not_count(cmdline: bytes) -> None:
    # A kernel thread or a zombie has an empty one.
    assert not judge_launch(cmdline, b"", FLAGS).counts


@pytest.mark.parametrize(
    ("cmdline", "reason"),
    [
        (b"llama-server\0--cpu-moe", "--cpu-moe"),
        (b"llama-server\0--n-cpu-moe\x008", "--n-cpu-moe 8"),
        (b"llama-server\0--n-cpu-moe=8", "--n-cpu-moe=8"),
    ],
)
def test_a_last_argument_may_lack_its_end(cmdline: bytes, reason: str) -> None:
    """As in a command line that a program has overwritten, or that was cut."""
    assert judge_launch(cmdline, b"", FLAGS) == Verdict(True, reason)


def test_bytes_that_are_no_text_are_harmless() -> None:
    assert judge(b"\xff\xfe", "--cpu-moe", b"\x80").counts
    assert not judge(b"\xff--cpu-moe", b"--cpu-moe\xff").counts
    verdict = judge(b"--n-cpu-moe=\xff\xfe8")
    assert verdict.counts
    verdict.reason.encode("utf-8")  # it can be logged


def test_the_configured_flags_replace_ours() -> None:
    assert judge("--my-moe", flags=("--my-moe",)) == Verdict(True, "--my-moe")
    assert not judge("--cpu-moe", flags=("--my-moe",)).counts
    assert not judge("--cpu-moe", flags=()).counts
    assert flag_in(block("llama-server", "--größe=3"), ("--größe",)) == "--größe=3"


def test_the_environment_counts_whatever_the_flags_are() -> None:
    assert judge(environ=block("LLAMA_ARG_CPU_MOE=1"), flags=()).counts


# The environment.


@pytest.mark.parametrize("word", ["1", "true", "on", "enabled", "yes"])
def test_what_llama_cpp_takes_for_true(word: str) -> None:
    assert judge_environ(f"LLAMA_ARG_CPU_MOE={word}") == Verdict(True, f"LLAMA_ARG_CPU_MOE={word}")


@pytest.mark.parametrize("word", ["", "0", "false", "off", "disabled", "no", "TRUE", "On", "2", " 1", "1 ", "true\n"])
def test_what_llama_cpp_does_not_take_for_true(word: str) -> None:
    assert not judge_environ(f"LLAMA_ARG_CPU_MOE={word}").counts


@pytest.mark.parametrize("count", ["8", "+3", " 5", "\t5", "8abc", "8 9", "08", "1" * 60])
def test_a_count_of_layers_as_stoi_reads_it(count: str) -> None:
    assert judge_environ(f"LLAMA_ARG_N_CPU_MOE={count}") == Verdict(True, f"LLAMA_ARG_N_CPU_MOE={count}")


@pytest.mark.parametrize("count", ["", "0", "-1", "+0", "000", "x", "x8", "+", "-", "+-8", "0x8", "0.9"])
def test_a_count_of_no_layers(count: str) -> None:
    assert not judge_environ(f"LLAMA_ARG_N_CPU_MOE={count}").counts


def test_of_a_variable_that_is_there_twice_the_first_counts() -> None:
    """As with getenv()."""
    assert judge_environ("LLAMA_ARG_CPU_MOE=1", "LLAMA_ARG_CPU_MOE=0").counts
    assert not judge_environ("LLAMA_ARG_CPU_MOE=0", "LLAMA_ARG_CPU_MOE=1").counts
    assert judge_environ("LLAMA_ARG_N_CPU_MOE=8", "LLAMA_ARG_N_CPU_MOE=0").counts
    assert not judge_environ("LLAMA_ARG_N_CPU_MOE=0", "LLAMA_ARG_N_CPU_MOE=8").counts


@pytest.mark.parametrize(
    "assignment",
    [
        "MY_LLAMA_ARG_CPU_MOE=1",
        "XLLAMA_ARG_CPU_MOE=1",
        "LLAMA_ARG_CPU_MOE_DRAFT=1",
        "LLAMA_ARG_SPEC_DRAFT_CPU_MOE=1",
        "LLAMA_ARG_CPU_MOE",
        "llama_arg_cpu_moe=1",
        "ECHO=LLAMA_ARG_CPU_MOE=1",
        "LLAMA_ARG_N_CPU_MOE_DRAFT=8",
    ],
)
def test_a_variable_whose_name_only_resembles_ours(assignment: str) -> None:
    assert not judge_environ(assignment).counts


def test_a_variable_is_found_wherever_it_stands() -> None:
    assert judge(environ=block("LLAMA_ARG_CPU_MOE=1", "A=b")).counts, "first"
    assert judge(environ=block("A=b", "LLAMA_ARG_CPU_MOE=1")).counts, "last"
    assert judge(environ=b"A=b\0LLAMA_ARG_CPU_MOE=1").counts, "without its end"
    assert variable_in(block("A=b"), "B") is None
    assert variable_in(block("A="), "A") == ""


def test_both_variables_are_asked() -> None:
    assert judge_environ("LLAMA_ARG_CPU_MOE=0", "LLAMA_ARG_N_CPU_MOE=8").counts


# Sizes that only somebody who means harm would use: any user may start such a process.

Shape = Callable[[bytes], bytes]


def filled(piece: bytes) -> bytes:
    return piece * (LARGE_BYTES // len(piece))


HUGE = {
    "many arguments of one character": filled(b"x\0"),
    "many empty arguments": filled(b"\0"),
    "many that are almost a flag": filled(b"--n-cpu-mo\0"),
    "many that begin with a flag": filled(b"--n-cpu-moex\0"),
    "many that end like one": filled(b"\0x-n-cpu-moe"),
    "many flags without their end": filled(b"--cpu-moe--cpu-moe"),
    "many variables that are almost ours": filled(b"LLAMA_ARG_CPU_MO=1\0"),
    "many variables that begin like ours": filled(b"LLAMA_ARG_N_CPU_MOEX=8\0"),
    "many variables that end like ours": filled(b"XLLAMA_ARG_CPU_MOE=1\0"),
    "one giant argument": filled(b"x") + b"\0",
    "one giant argument of a flag's characters": filled(b"-") + b"\0",
}


def timed(cmdline: bytes, environ: bytes) -> Verdict:
    """Judge; of three tries one must be fast, so that a busy machine does not fail the test."""
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        verdict = judge_launch(cmdline, environ, FLAGS)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < MOST_SECONDS
    assert len(verdict.reason) <= 2 * REASON_CHARACTERS
    return verdict


@pytest.mark.parametrize("huge", HUGE.values(), ids=HUGE.keys())
def test_a_huge_launch_is_judged_at_once(huge: bytes) -> None:
    assert not timed(b"llama-server\0" + huge, b"").counts
    assert not timed(b"llama-server\0", huge).counts


@pytest.mark.parametrize("huge", HUGE.values(), ids=HUGE.keys())
def test_a_flag_behind_a_huge_launch_is_found(huge: bytes) -> None:
    assert timed(b"llama-server\0" + huge + b"\0--cpu-moe\0", b"") == Verdict(True, "--cpu-moe")
    assert timed(b"", huge + b"\0LLAMA_ARG_CPU_MOE=1\0") == Verdict(True, "LLAMA_ARG_CPU_MOE=1")


@pytest.mark.parametrize("giant", [b"8", b" ", b"+", b"x", b"\xff", b"\n"])
def test_a_giant_value_does_not_get_into_the_reason(giant: bytes) -> None:
    value = filled(giant)
    timed(block("llama-server", b"--n-cpu-moe=" + value), b"")
    timed(block("llama-server", b"--n-cpu-moe", value), b"")
    timed(block("llama-server"), block(b"LLAMA_ARG_N_CPU_MOE=" + value))
    timed(block("llama-server"), block(b"LLAMA_ARG_CPU_MOE=" + value))
