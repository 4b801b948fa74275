"""--demo: a story with a simulated GPU in it; all else is real. It ends well only if what should happen happened."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from .devfreq import mhz
from .errors import StabilizerError
from .invocation import again_as_root
from .matching import judge_launch
from .processes import printable
from .settings import Settings
from .simulator import AVAILABLE_HZ
from .stage import Stage, StandIn, build_stand_in, die_with_parent

# One token of a model whose experts are on the CPU, scaled to a tenth: 36 % of it on the GPU at the lowest clock.
CPU_SECONDS, GPU_SECONDS_AT_LOWEST = 0.064, 0.036
TAKING_TURNS, BUSY, IDLE = 0.36, 0.95, 0.02
DECODE_SECONDS = 2.5
RAISE_SECONDS, GIVE_BACK_SECONDS = 2.0, 4.0
# The sampling of a thread's work may add a quarter of the hold; a busy machine a little more.
GIVE_BACK_TOLERANCE_SECONDS = 0.8
COMMAND_ENDS_SECONDS = 10
REBIND_SECONDS = 0.5
LINES_OF_A_FAILURE = 5
TURNS = re.compile(r" counts: \d+ turns? per graph$")
LOWEST_HZ, HIGHEST_HZ = AVAILABLE_HZ[0], AVAILABLE_HZ[-1]

INTRODUCTION = """\
moe-gpu-stabilizer demo. The GPU is simulated: a directory with the files of a devfreq node and a governor that follows
the load. The daemon, its uprobes and the programs they watch are real. min_freq is the only file the daemon writes.
All files are in a temporary directory. As ever, the daemon also watches whatever other llama.cpp this machine runs."""


class Expectations:
    """What should have happened, and whether it did."""

    def __init__(self) -> None:
        self._held: list[tuple[str, bool]] = []

    def expect(self, text: str, held: bool) -> None:
        self._held.append((text, held))

    def summarize(self) -> int:
        """Print them; return the exit status."""
        print("\nsummary")
        for text, held in self._held:
            print(f"  {'ok    ' if held else 'FAILED'}  {text}")
        failed = sum(not held for _, held in self._held)
        print(f"\n{failed} of {len(self._held)} did not happen." if failed else "\nEverything happened as it should.")
        return 1 if failed else 0


def main(command: Sequence[str]) -> int:
    """Run the demo, with the user's own `command` where one is given. Returns the exit status."""
    if os.geteuid() != 0:
        raise StabilizerError("the demo attaches real uprobes and needs root", again_as_root())
    if command and shutil.which(command[0]) is None:
        raise StabilizerError(f"cannot run {command[0]}", "name a program that is there and executable")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    print(INTRODUCTION)
    with tempfile.TemporaryDirectory(prefix="moe-gpu-stabilizer-demo.") as name, ExitStack() as stack:
        directory = Path(name)
        # Programs of other users (the daemon never is one, the stand-in might be) can look into it, too.
        directory.chmod(0o755)
        library, program = (None, None) if command else build_stand_in(directory)
        stage = Stage(directory)
        stack.callback(stage.stop_daemon)
        if library and program:
            expectations = play_story(stage, stack, library, program)
        else:
            expectations = play_command(stage, stack, command)
    return expectations.summarize()


def leave(number: int, _frame: object) -> None:
    """End the demo as Ctrl-C does: with nothing left running."""
    raise SystemExit(128 + number)


def play_story(stage: Stage, stack: ExitStack, library: Path, program: Path) -> Expectations:
    """The built-in demo: without the daemon, then with it: a dense model, a MoE model, idleness."""
    expectations = Expectations()
    # Tagged for this demo alone: it must not take your llama.cpp, or another demo's, for its own.
    flag = f"--demo-cpu-moe={os.getpid()}"  # no other daemon shall take the story for inference
    moe, dense = StandIn(program, flag), StandIn(program)
    for stand_in in (moe, dense):
        stack.callback(stand_in.close)
    stage.say("demo", f"a MoE model with its experts on the CPU decodes; no daemon yet (pid {moe.pid}, {flag})")
    before = decode(stage, moe, TAKING_TURNS)
    stays_low = stage.gpu.cur_hz == LOWEST_HZ
    expectations.expect(f"left alone, the governor stays at {mhz(LOWEST_HZ)} at 36 % load", stays_low)

    stage.start_daemon(moe_flags=flag, detect="flags", libraries=library)
    stage.say("demo", f"a dense model decodes on the GPU alone (pid {dense.pid}, no flag)")
    decode(stage, dense, BUSY)
    expectations.expect("a dense model gets no floor; the governor climbs by itself", untouched_but_fast(stage))
    let_the_clock_fall(stage)

    stage.say("demo", f"the MoE model decodes again (pid {moe.pid})")
    called = time.monotonic()
    moe.do("call 1")
    raised = stage.play(RAISE_SECONDS, TAKING_TURNS, lambda: stage.gpu.min_hz == HIGHEST_HZ)
    waited_ms = (time.monotonic() - called) * 1000
    expectations.expect(f"the floor is up at {mhz(HIGHEST_HZ)} within {waited_ms:.0f} ms of the first call", raised)
    after = decode(stage, moe, TAKING_TURNS)
    expectations.expect("it stays up while the model decodes", stage.gpu.min_hz == HIGHEST_HZ)

    stage.say("demo", "the model has answered; its process stays, idle")
    ended = time.monotonic()
    given_back = stage.play(GIVE_BACK_SECONDS, IDLE, lambda: stage.gpu.min_hz == LOWEST_HZ)
    waited_seconds = time.monotonic() - ended
    in_time = given_back and abs(waited_seconds - Settings().hold_seconds) < GIVE_BACK_TOLERANCE_SECONDS
    expectations.expect(f"it is given back about a second after the last call ({waited_seconds:.1f} s)", in_time)
    let_the_clock_fall(stage)
    ratio = after / before
    stage.say("demo", f"simulated speed: {before:.1f} tokens/s before, {after:.1f} with the floor (x{ratio:.2f})")
    return expectations


def let_the_clock_fall(stage: Stage) -> None:
    """Let the idle governor go down to the lowest clock, and say so."""
    stage.play(GIVE_BACK_SECONDS, IDLE, lambda: stage.is_settled and stage.gpu.cur_hz == LOWEST_HZ)


def untouched_but_fast(stage: Stage) -> bool:
    return stage.gpu.min_hz == LOWEST_HZ and stage.gpu.cur_hz == HIGHEST_HZ and not stage.has_said("inference)")


def decode(stage: Stage, model: StandIn, load: float) -> float:
    """Decode tokens for DECODE_SECONDS; return tokens per second. A higher clock shortens the GPU's part of a token."""
    began, tokens = time.monotonic(), 0
    while time.monotonic() < began + DECODE_SECONDS:
        model.do("call 1")
        model.do("synchronize 1")
        stage.play(CPU_SECONDS + GPU_SECONDS_AT_LOWEST * LOWEST_HZ / stage.gpu.cur_hz, load)
        tokens += 1
    return tokens / (time.monotonic() - began)


def play_command(stage: Stage, stack: ExitStack, command: Sequence[str]) -> Expectations:
    """Run the user's own command under the real daemon, until it ends or Ctrl-C."""
    expectations = Expectations()
    log = Path(tempfile.mkstemp(prefix="moe-gpu-stabilizer-demo-command.", suffix=".log")[1])
    stage.start_daemon(rebind_seconds=REBIND_SECONDS)
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=die_with_parent
            )
        except OSError as error:
            log.unlink()
            raise StabilizerError(f"cannot run {command[0]}: {error.strerror}") from None
    stack.callback(process.kill)
    stage.say("demo", f"started pid {process.pid}: {shlex.join(command)}")
    stage.say("demo", f"what it prints goes to {log}; Ctrl-C ends it")
    interrupted = False
    try:
        play_until_ended(stage, process)
    except KeyboardInterrupt:
        interrupted = True
        # The terminal has told the command, too: a second signal would make llama-server leave without a good-bye.
        if not stage.play(COMMAND_ENDS_SECONDS, IDLE, lambda: process.poll() is not None):
            process.terminate()
    stage.say("demo", f"pid {process.pid} {describe_end(process.wait())}")
    given_back = stage.play(GIVE_BACK_SECONDS, IDLE, lambda: stage.gpu.min_hz == LOWEST_HZ)
    expectations.expect("the command came to a good end", process.returncode == 0 or interrupted)
    judged = stage.has_said(") counts: ") or stage.has_said(") is ignored: ")
    expectations.expect("calls into libllama were seen", judged)
    raised = stage.has_said("inference)")
    if counts_by_launch(command):
        expectations.expect("its launch says experts on the CPU: the floor was raised", raised)
    elif any(TURNS.search(line) for line in stage.daemon_lines):
        expectations.expect("its CPU and GPU take turns: the floor was raised", raised)
    else:
        expectations.expect("neither its launch nor its turns say so: the floor was left alone", not raised)
    expectations.expect("min_freq is as it was", given_back)
    if not judged:
        print(f"\nIt ended before a call was seen. A library is found within {REBIND_SECONDS} s: give it more to do.")
    if process.returncode or not judged:
        print(f"The end of what it printed ({log}):", *last_lines(log), sep="\n  ")
    return expectations


def play_until_ended(stage: Stage, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        load = TAKING_TURNS if stage.gpu.min_hz > LOWEST_HZ else IDLE
        stage.play(REBIND_SECONDS, load, lambda: process.poll() is not None)


def describe_end(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"has ended with status {status}"


def last_lines(log: Path) -> list[str]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [printable(line) for line in lines[-LINES_OF_A_FAILURE:]]


def counts_by_launch(command: Sequence[str]) -> bool:
    """Would a process started with this command, and our environment, count?"""
    cmdline = b"".join(os.fsencode(word) + b"\0" for word in command)
    environ = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in os.environ.items())
    return judge_launch(cmdline, environ, Settings().moe_flags).counts
