"""From the boot to the first floors: the node that comes late, the machine's own libraries, flags and behaviour."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from tests.board.guest.board import BCC, LLAMA, NODE, PROGRAM, Board, run, until
from tests.board.guest.registry import Checks
from tests.support import HIGHEST_HZ, LADDER_HZ, LOWEST_HZ

CHECKS = Checks()

NOBODY = 65534
# That are probed: of libllama, at once; and of ggml, as soon as a process uses it.
FUNCTIONS = 3
GGML_FUNCTIONS = 2


@CHECKS(from_neutral=False, always=True)
def service_starts_before_the_driver_and_picks_the_node_up(board: Board) -> None:
    service = board.service
    service.wait_until_active()
    assert not NODE.exists(), "the driver was loaded too early to tell"
    assert service.has_said("no GPU node yet"), service.journal()
    assert service.status()["node"] is None
    assert "MISSING  node" in service.command("--check", check=False)
    board.gpu.load()
    service.wait_for(f"found the GPU node {NODE}")
    until(lambda: service.status()["node"] == str(NODE), "the status says so, too")


@CHECKS()
def check_finds_the_node_without_root(board: Board) -> None:
    as_nobody = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    # Without root it cannot tell all; the exit status speaks of that.
    report = json.loads(run(*as_nobody, PROGRAM, "--check", "--json", check=False))
    node = report["gpu"]["node"]
    assert node["name"] == NODE.name
    assert node["available_hz"] == list(LADDER_HZ)
    assert (node["min_hz"], node["max_hz"], node["floor_hz"]) == (LOWEST_HZ, HIGHEST_HZ, HIGHEST_HZ)
    assert node["governor"] == "simple_ondemand"


@CHECKS()
def check_finds_nothing_missing(board: Board) -> None:
    said = board.service.command("--check")
    assert "MISSING" not in said, said
    assert str(LLAMA / "libllama.so") in said, said


@CHECKS()
def probes_are_in_place(board: Board) -> None:
    """With the BCC that this boot is to try, and the system calls of this machine."""
    pid = board.service.pid
    board.wait_for_probes(FUNCTIONS)
    with board.llama("llama-any"):
        board.wait_for_probes(FUNCTIONS + GGML_FUNCTIONS)
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    leases = {int(words[5].rpartition(":")[2]) for words in locks if words[1] == "LEASE" and words[4] == str(pid)}
    files = {os.stat(file).st_ino for file in LLAMA.glob("lib*.so")}
    assert leases == files, "each probed file is held with a read lease"
    (library,) = set(re.findall(r"/\S+/libbcc_bpf\.so\S*", Path(f"/proc/{pid}/maps").read_text()))
    assert Path(library).parent == (BCC if BCC.exists() else Path("/usr/lib/aarch64-linux-gnu")), library


@CHECKS()
def flag_raises_and_the_clock_follows_at_once(board: Board) -> None:
    with board.llama("llama-server", "--cpu-moe") as workload:
        board.gpu.set(load_permille=100)
        workload.begin("busy 4000")
        board.wait_until_raised()
        # No governor is asked: devfreq changes the clock inside of the write.
        assert board.gpu.cur_hz == HIGHEST_HZ
        board.service.wait_for(f"floor 1020 MHz (pid {workload.pid} inference)")
        assert board.service.status()["holders"] == 1
        workload.finish()
        board.service.wait_for("floor 306 MHz (idle)")
        assert board.gpu.min_hz == LOWEST_HZ
        until(lambda: board.gpu.cur_hz == LOWEST_HZ, "the governor's own choice again")


@CHECKS()
def turns_raise_without_a_flag(board: Board) -> None:
    with board.llama("llama-any") as workload:
        board.wait_for_probes(FUNCTIONS + GGML_FUNCTIONS)
        workload.do("tokens 20 5")
        board.service.wait_for(f"pid {workload.pid} (llama-any) counts: 4 turns per graph")
        board.service.wait_for(f"floor 1020 MHz (pid {workload.pid} inference)")
        board.wait_until_given_back()


@CHECKS()
def model_without_turns_raises_nothing(board: Board) -> None:
    with board.llama("llama-any") as workload:
        board.wait_for_probes(FUNCTIONS + GGML_FUNCTIONS)
        workload.do("tokens 50 1")
        until(lambda: any(one["pid"] == workload.pid for one in board.service.status()["processes"]), "it is judged")
        assert not board.service.has_said("floor 1020")
        assert board.gpu.min_hz == LOWEST_HZ


@CHECKS(from_neutral=False)
def journal_is_free_of_complaints(board: Board) -> None:
    """Ring buffer, fanotify, pidfds, leases, seccomp: whatever this kernel refuses is said as a warning."""
    board.service.forget_journal()
    said = run("journalctl", "--quiet", "--boot", "--unit=moe-gpu-stabilizer", "--output=cat", "--priority=warning")
    assert [line for line in said.splitlines() if not line.startswith("no GPU node yet")] == []
    assert board.service.status()["troubles"] == []
    assert "seccomp" not in run("journalctl", "--quiet", "--boot", "--dmesg", "--output=cat"), "a refused system call"


@CHECKS()
def library_that_is_rewritten_in_place_is_let_go_of(board: Board) -> None:
    """The lease holds the writer up until the probes are out; then the new content is probed."""
    library = LLAMA / "libllama.so"
    content = library.read_bytes()
    board.wait_for_probes(FUNCTIONS)
    with library.open("r+b") as file:
        assert board.probes_of(board.service.pid) == 0, "the probes are out by now"
        file.write(content)
    board.wait_for_probes(FUNCTIONS)
    with board.raised() as workload:
        workload.kill()
