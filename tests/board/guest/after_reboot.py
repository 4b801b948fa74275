"""A reboot in the middle of inference, what is found after it, and taking the program off in the end."""

from __future__ import annotations

import os
from pathlib import Path

from tests.board.guest.board import LLAMA, NODE, Board, run
from tests.board.guest.registry import Checks
from tests.support import LOWEST_HZ

CHECKS = Checks()

UNINSTALL = "/opt/moe-gpu-stabilizer/uninstall"


def leave(board: Board) -> None:
    """Have the floor up when the board reboots, for a process that nobody waits for."""
    board.neutral()
    ready, tell = os.pipe()
    if os.fork() == 0:
        os.dup2(ready, 0)
        os.execv(LLAMA / "llama-server", ["llama-server", "--cpu-moe"])
    os.write(tell, b"busy 600000\n")
    board.wait_until_raised()


@CHECKS(from_neutral=False)
def reboot_while_raised(board: Board) -> None:
    service = board.service
    last = run("journalctl", "--quiet", "--boot=-1", "--unit=moe-gpu-stabilizer", "--output=cat").splitlines()
    # As idle, or as the service stops: systemd ends both at the same time.
    floors = [line for line in last if line.startswith("floor ")]
    assert floors[-2].startswith("floor 1020 MHz"), last[-10:]
    assert floors[-1].startswith("floor 306 MHz"), last[-10:]
    assert "stopped" in last, last[-10:]
    service.wait_until_active()
    assert not service.has_said("floor "), "there is nothing to give back after a boot"
    board.gpu.load()
    service.wait_for(f"found the GPU node {NODE}")
    assert board.gpu.min_hz == LOWEST_HZ
    with board.raised() as workload:
        workload.kill()
    board.wait_until_given_back()


@CHECKS()
def uninstall_leaves_nothing(board: Board) -> None:
    """In the middle of inference: the clock is given back, and no file, unit, probe or process stays."""
    with board.llama("llama-server", "--cpu-moe") as workload:
        workload.begin("busy 600000")
        board.wait_until_raised()
        run(UNINSTALL, "--purge")
        assert board.gpu.min_hz == LOWEST_HZ
    places = ("etc", "opt", "usr/bin", "usr/local", "usr/lib/systemd", "var/lib", "run")
    left = [path for place in places for path in Path("/", place).rglob("*moe?gpu?stabilizer*")]
    assert left == []
    assert board.service.show("LoadState") == "not-found"
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if b"moe-gpu-stabilizer" in command]
