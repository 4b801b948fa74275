"""The demo, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.kernel.conftest import Llama
from tests.support import REPOSITORY

EXPECTATION = re.compile(r"^  (ok    |FAILED)  (.*)$", re.MULTILINE)


def run_demo(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moe_gpu_stabilizer", "--demo", *arguments]
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command, capture_output=True, text=True, timeout=120, check=False, cwd=REPOSITORY, **options
    )


def test_the_demo_tells_its_story_and_ends_well() -> None:
    ended = run_demo()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [mark for mark, _ in EXPECTATION.findall(ended.stdout)] == ["ok    "] * 5
    assert re.search(r"daemon +floor 1020 MHz \(pid \d+ inference\)$", ended.stdout, re.MULTILINE)
    assert re.search(r" 306 MHz +\d+ MHz +daemon +floor 306 MHz \(idle\)$", ended.stdout, re.MULTILINE)
    assert ended.stdout.endswith("\nEverything happened as it should.\n")
    assert ended.stderr == ""


def test_the_demo_runs_ones_own_command(llama: Llama, tmp_path: Path) -> None:
    """A script that starts a program, which calls for two seconds once the daemon has found it."""
    script = 'i=0; while [ $i -lt 40 ]; do echo "call 10"; sleep 0.1; i=$((i+1)); done | "$0" "$@"'
    ended = run_demo("--", "sh", "-c", script, str(llama.program), "--cpu-moe", "-m", "moe.gguf")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ok      its launch says experts on the CPU: the floor was raised" in ended.stdout
    os.unlink(re.search(r"what it prints goes to (\S+);", ended.stdout)[1])  # type: ignore[index]


def test_a_command_that_never_calls_ends_the_demo_with_a_failure() -> None:
    ended = run_demo("--", "true", "--cpu-moe")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "FAILED  calls into libllama were seen" in ended.stdout
    os.unlink(re.search(r"what it prints goes to (\S+);", ended.stdout)[1])  # type: ignore[index]


def test_a_command_that_cannot_run_is_one_clear_line() -> None:
    ended = run_demo("--", "/nonexistent/llama-server")
    assert ended.returncode == 1
    assert ended.stderr == "moe-gpu-stabilizer: cannot run /nonexistent/llama-server: No such file or directory\n"


def test_without_a_compiler_the_demo_says_what_to_install(tmp_path: Path) -> None:
    ended = run_demo(env={**os.environ, "PATH": str(tmp_path)})
    assert ended.returncode == 1
    assert ended.stderr == (
        "moe-gpu-stabilizer: the demo needs a C compiler for its stand-in; apt-get install gcc libc6-dev\n"
    )
