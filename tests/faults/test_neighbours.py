"""What an ordinary user's programs can do to the daemon: a raised clock at most.

Tried here: names, arguments, paths and environments made to confuse whoever reads them, the largest there are; a
process that changes its name all the time; one with hundreds of threads that call at once; arguments behind a page that
nobody ever fills (userfaultfd); an address space that is locked for good by a page fault on a FUSE file, where ps
hangs; and floods, of which test_processes.py has more.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_gpu_stabilizer.launch import UnreadableError, launch_of
from tests.faults.hostile import Hostile, build_hostile_alone
from tests.faults.ledger import Ledger
from tests.kernel.conftest import Llama
from tests.support import HIGHEST_HZ, LOWEST_HZ, PlainNode, RunningDaemon, wait_until
from tests.workload import Workload, build_static

Start = Callable[..., RunningDaemon]
Run = Callable[..., Workload]
StartHostile = Callable[..., Hostile]


def raised(node: PlainNode) -> bool:
    return node.min_hz == HIGHEST_HZ


def given_back(node: PlainNode) -> bool:
    return node.min_hz == LOWEST_HZ


def floor_comes_and_goes(workload: Workload, node: PlainNode) -> None:
    workload.do("call 1")
    wait_until(lambda: raised(node), "the floor up", 60)
    wait_until(lambda: given_back(node), "the floor given back", 60)


# Memory that keeps whoever reads it waiting.


@pytest.fixture
def unanswered(tmp_path: Path) -> Path:
    """A directory for a FUSE file system, in the mount namespace of whoever mounts it there."""
    directory = tmp_path / "unanswered"
    directory.mkdir()
    return directory


def test_a_process_whose_memory_is_locked_up_stops_nobody(
    start_daemon: Start, hostile: StartHostile, run: Run, llama: Llama, node: PlainNode, ledger: Ledger,
    unanswered: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """ps hangs at it. The daemon's reader is given up, and the daemon goes on.

    It must map nothing that anybody probes: to set or take out a probe the kernel waits for the memory of all who have
    mapped the file, and keeps every fork() on the machine waiting meanwhile. No program can help that.
    """
    program = build_hostile_alone(tmp_path / "bystander")
    daemon = start_daemon(libraries=llama.library, hold_seconds=1, rebind_seconds=0.3)
    with hostile("fuse", unanswered, program=program, prefix=["unshare", "--mount"]) as locked:
        locked.wait_until_ready()
        (victim,) = [pid for pid in locked.group if pid != locked.pid]
        with subprocess.Popen(["cat", f"/proc/{victim}/cmdline"], stdout=subprocess.DEVNULL) as reader:
            with pytest.raises(subprocess.TimeoutExpired):
                reader.wait(timeout=2)
            reader.kill()
        with pytest.raises(UnreadableError):
            launch_of(victim)
        assert [child.name() for child in psutil.Process().children() if child.name() == "cat"] == []
        with run() as workload:
            for _ in range(2):
                floor_comes_and_goes(workload, node)
    assert daemon.stop() == 0
    ledger.kept("an address space that is locked for good")


def test_arguments_behind_a_page_that_nobody_fills(
    start_daemon: Start, hostile: StartHostile, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """Linux refuses to wait for such a page on behalf of another process: what lies before it is all there is."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=1)
    hiding = hostile("uffd", "x" * 20_000, counts=False)
    hiding.wait_until_ready()
    daemon.wait_for_log(rf"^pid {hiding.pid} \(hostile\) is ignored", 30)
    with run() as workload:
        floor_comes_and_goes(workload, node)
    ledger.kept("arguments behind a missing page")


# Names.

ODD = {
    "a line of its own": "x\nfloor 1020 MHz (pid 1 inference)",
    "a terminal's escapes": "\x1b[2J\x1b]0;title\x07\r\t",
    "right to left": "\u202egpj.exe\u2066\u200f",
    "no UTF-8": "\udcff\udcc3(",
    "nothing to see": "\u200b\u00ad\ufeff\u0085\u2028",
    "JSON and markup": "\"}],{'\\%s%n$(id)`id`",
}


def is_harmless(text: str) -> bool:
    """Line breaks between lines apart, is there nothing that a terminal would act on, or a reader not see?"""
    return all(unicodedata.category(character)[0] != "C" and character not in "\u2028\u2029" for character in text)


def test_names_show_harmless_wherever_they_are_said(
    start_daemon: Start, node: PlainNode, ledger: Ledger, tmp_path: Path, flag: str
) -> None:
    """In a program's name and path, its arguments and environment: in the log, --status, --check, systemctl's line."""
    built = build_static(tmp_path / "static")
    with ExitStack() as stack:
        messages = stack.enter_context(notified(tmp_path / "notify"))
        daemon = start_daemon(hold_seconds=60, rebind_seconds=0.3)
        running = []
        for odd in ODD.values():
            directory = tmp_path / "x" / odd.replace("/", "")
            directory.mkdir(parents=True)
            program = Path(shutil.copy(built, directory / odd[:100]))
            arguments = [f"{flag}={odd}", odd, "y" * 100_000]
            environment = {"LLAMA_ARG_N_CPU_MOE": f"8{odd}", odd: odd}
            running.append(stack.enter_context(Workload(program, *arguments, env=environment)))
        for workload in running:
            known = rf"^pid {workload.pid} \("
            wait_until(partial(has_called, workload, daemon, known), "its first call seen", 60)
        wait_until(lambda: raised(node), "the floor up")
        wait_until(lambda: len(published(daemon)["processes"]) == len(ODD), "the status")
        as_text, as_json = daemon.command("--status"), daemon.command("--status", "--json")
        check = daemon.command("--check", "--config", str(daemon.config))
        check_json = daemon.command("--check", "--json", "--config", str(daemon.config))
        wait_until(lambda: b"floor 1020 MHz for" in messages(), "what systemd hears")
    for said in (daemon.log, as_text.stdout, check.stdout, messages().decode()):
        assert [line for line in said.split("\n") if not is_harmless(line)] == []
    for workload in running:
        assert f"pid {workload.pid} (" in as_text.stdout
        assert f"pid {workload.pid} " in check.stdout
        ledger.kept("odd names")
    says_floor = {line for line in daemon.log.split("\n") if line.startswith("floor")}
    ours = {f"floor 1020 MHz (pid {workload.pid} inference)" for workload in running}
    assert says_floor <= ours | {"floor 306 MHz (idle)"}, "no line but ours begins so"
    for text in (as_json.stdout, check_json.stdout):
        assert is_harmless(text.replace("\n", ""))
        json.loads(text)


def has_called(workload: Workload, daemon: RunningDaemon, line: str) -> bool:
    workload.do("call 1")
    return daemon.has_logged(line)


def published(daemon: RunningDaemon) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((daemon.runtime / "status.json").read_text())
    return status


@contextmanager
def notified(path: Path) -> Iterator[Callable[[], bytes]]:
    """What a service manager would hear, as one text."""
    heard = bytearray()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as manager,
        pytest.MonkeyPatch.context() as patched,
    ):
        manager.bind(str(path))
        patched.setenv("NOTIFY_SOCKET", str(path))

        def messages() -> bytes:
            with contextlib.suppress(BlockingIOError, OSError):
                while True:
                    heard.extend(manager.recv(65536) + b"\n")
            return bytes(heard)

        yield messages


@pytest.mark.parametrize("where", ["arguments", "environment"])
def test_the_largest_launch_that_the_kernel_takes(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger, flag: str, where: str
) -> None:
    """Nearly two megabytes, the flag at their very end."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=1)
    big = ["x" * 120_000] * 15
    if where == "arguments":
        workload = run(*big, flag, counts=False)
    else:
        workload = run(env={f"X{number}": text for number, text in enumerate(big)})
    with workload:
        floor_comes_and_goes(workload, node)
        daemon.wait_for_log(rf"^pid {workload.pid} \(llama-server\) counts: {flag}$")
    assert max(map(len, daemon.log.splitlines())) < 1000
    ledger.kept(f"the largest {where}")


def test_a_process_that_changes_its_name_all_the_time(
    start_daemon: Start, hostile: StartHostile, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=1)
    changing = hostile("renames", 200_000)
    wait_until(lambda: raised(node), "the floor up")
    changing.wait_until_ready()
    wait_until(lambda: given_back(node), "the floor given back")
    assert len([line for line in daemon.log.splitlines() if f"pid {changing.pid}" in line]) == 2, "said once"
    assert all(map(is_harmless, daemon.log.splitlines()))
    ledger.kept("a name that changes all the time")


def test_hundreds_of_threads_that_call_at_once(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=1)
    with run() as workload:
        for _ in range(3):
            workload.do("threads 500 50")
            wait_until(lambda: raised(node), "the floor up")
        wait_until(lambda: given_back(node), "the floor given back")
    assert daemon.log.count("counts:") == 1
    ledger.kept("500 threads at once")


def test_an_ordinary_user_may_signal_and_stop_nothing(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """Nor write where the daemon keeps what it has to give back."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=1)
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    attempts = (
        f"kill -9 {daemon.pid}",
        f"kill -HUP {daemon.pid}",
        f"echo x > {daemon.runtime}/raised.json",
        f"rm -f {daemon.runtime}/status.json",
        f"exec 9> {daemon.runtime}/lock",
        f"cat /proc/{daemon.pid}/environ",
    )
    for attempt in attempts:
        assert subprocess.run([*nobody, "sh", "-c", attempt], capture_output=True, check=False).returncode, attempt
    with run() as workload:
        floor_comes_and_goes(workload, node)
    ledger.kept("an ordinary user's kill, write and remove")
