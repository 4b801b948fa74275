"""The demo, as a user runs it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernel.conftest import Llama
from tests.support import REPOSITORY, alone_with_real_flags, wait_until

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
    with alone_with_real_flags():
        ended = run_demo("--", "sh", "-c", script, str(llama.program), "--cpu-moe", "-m", "moe.gguf")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ok      its launch says experts on the CPU: the floor was raised" in ended.stdout
    os.unlink(re.search(r"what it prints goes to (\S+);", ended.stdout)[1])  # type: ignore[index]


def test_a_command_that_never_calls_ends_the_demo_with_a_failure() -> None:
    ended = run_demo("--", "true", "--cpu-moe")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "FAILED  its launch says experts on the CPU: the floor was raised" in ended.stdout
    os.unlink(re.search(r"what it prints goes to (\S+);", ended.stdout)[1])  # type: ignore[index]


def test_a_command_that_cannot_run_is_one_clear_line() -> None:
    ended = run_demo("--", "/nonexistent/llama-server")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        "moe-gpu-stabilizer: cannot run /nonexistent/llama-server; name a program that is there and executable\n"
    )


def test_a_command_that_fails_is_quoted() -> None:
    ended = run_demo("--", "sh", "-c", "echo no such model >&2; exit 3")
    assert ended.returncode == 1
    assert "has ended with status 3" in ended.stdout
    assert "FAILED  the command came to a good end" in ended.stdout
    assert "no such model" in ended.stdout
    os.unlink(re.search(r"what it prints goes to (\S+);", ended.stdout)[1])  # type: ignore[index]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_demo_that_is_ended_leaves_nothing_running(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "moe_gpu_stabilizer", "--demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as demo:
        assert demo.stdout is not None
        directory = next(found[0] for line in demo.stdout if (found := re.search(r"/tmp/[^/]*-demo\.\w+", line)))
        assert processes_of(directory) != []
        demo.send_signal(number)
        demo.wait(timeout=20)
        wait_until(lambda: processes_of(directory) == [], "the daemon and the stand-ins gone")
    assert demo.returncode == {signal.SIGINT: 130, signal.SIGKILL: -9}.get(number, 128 + number)
    if number == signal.SIGKILL:
        shutil.rmtree(directory)
    assert not Path(directory).exists()


def processes_of(directory: str) -> list[str]:
    """The command lines that name this directory."""
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(cmdline.read_text(errors="replace"))
    return [line for line in found if directory in line]


def test_without_a_compiler_the_demo_says_what_to_install(tmp_path: Path) -> None:
    ended = run_demo(env={**os.environ, "PATH": str(tmp_path)})
    assert ended.returncode == 1
    assert ended.stderr == (
        "moe-gpu-stabilizer: the demo needs a C compiler for its stand-in; apt-get install gcc libc6-dev\n"
    )
