"""Drivers that go, daemons that are killed, and the commands that a user gives."""

from __future__ import annotations

import signal
import subprocess

from tests.board.guest.board import NODE, PROGRAM, Board, until
from tests.board.guest.registry import Checks
from tests.support import HIGHEST_HZ, LOWEST_HZ

CHECKS = Checks()


@CHECKS()
def driver_that_goes_while_raised_and_comes_back(board: Board) -> None:
    with board.raised() as workload:
        board.gpu.unload()
        board.service.wait_for("the floor is gone with the GPU node")
        until(lambda: board.service.status()["node"] is None, "the status says so, too")
        board.gpu.load()
        board.service.wait_for(f"found the GPU node {NODE}")
        # The call that goes on is still in flight.
        board.wait_until_raised()
        workload.kill()
    board.wait_until_given_back()


@CHECKS()
def killed_while_raised(board: Board) -> None:
    """systemd gives back for it, and starts it again; a call that goes on is not seen, the next one is."""
    service = board.service
    pid = service.pid
    with board.llama("llama-server", "--cpu-moe") as workload:
        workload.begin("busy 3000")
        board.wait_until_raised()
        service.systemctl("kill", "--signal=KILL")
        service.wait_for("floor 306 MHz (restored)")
        service.wait_until_active(other_than=pid)
        workload.finish()
        board.wait_until_given_back()
        workload.begin("busy 600000")
        board.wait_until_raised()
        workload.kill()
    board.wait_until_given_back()


@CHECKS()
def stopped_while_raised(board: Board) -> None:
    with board.llama("llama-server", "--cpu-moe") as workload:
        workload.begin("busy 600000")
        board.wait_until_raised()
        board.service.systemctl("stop")
        assert board.gpu.min_hz == LOWEST_HZ
        assert board.service.has_said("floor 306 MHz (stop)")


@CHECKS()
def restore_by_hand(board: Board) -> None:
    """A daemon without systemd, killed: what it has left is given back by a command."""
    board.service.systemctl("stop")
    environment = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/opt/bcc"}
    with subprocess.Popen([PROGRAM], env=environment, stderr=subprocess.DEVNULL) as daemon:
        try:
            with board.llama("llama-server", "--cpu-moe") as workload:
                until(lambda: workload.do("call 1") and board.gpu.min_hz == HIGHEST_HZ, "the floor up")
                daemon.send_signal(signal.SIGKILL)
                daemon.wait()
        finally:
            daemon.kill()
    assert board.gpu.min_hz == HIGHEST_HZ, "nobody was there to give it back"
    assert board.service.command("--restore") == "floor 306 MHz (restored)\n"
    assert board.gpu.min_hz == LOWEST_HZ
    assert board.service.command("--restore") == "nothing to give back\n"


@CHECKS()
def status_says_who_holds_the_floor(board: Board) -> None:
    with board.raised() as workload:
        said = board.service.command("--status")
        assert f"floor 1020 MHz for llama-server (pid {workload.pid})" in said, said
        assert str(NODE) in said, said
        assert "cur_freq 1020 MHz, min_freq 1020 MHz, max_freq 1020 MHz" in said, said
        assert f"pid {workload.pid} (llama-server) counts" in said, said
        workload.kill()
    board.wait_until_given_back()
    said = board.service.command("--status")
    assert "idle, " in said, said
    assert f"min_freq {LOWEST_HZ // 10**6} MHz" in said, said
