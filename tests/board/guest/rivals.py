"""Other programs that set the limits, on a real sysfs: heard of, named, and what they wrote is what stays."""

from __future__ import annotations

from tests.board.guest.board import Board, until
from tests.board.guest.registry import Checks
from tests.faults.rival import Rival
from tests.support import HIGHEST_HZ, LOWEST_HZ

CHECKS = Checks()

LOW_HZ, MIDDLE_HZ = 408_000_000, 612_000_000


def change_power_mode(rival: Rival) -> None:
    """As nvpmodel does: the upper limit down and up again, then the lower one."""
    rival.write("max_freq", MIDDLE_HZ)
    rival.write("max_freq", HIGHEST_HZ)
    rival.write("min_freq", LOW_HZ)


@CHECKS()
def power_mode_changes_while_idle(board: Board) -> None:
    with board.rival("nvpmodel") as rival:
        change_power_mode(rival)
        board.service.wait_for(f"min_freq set to 408 MHz by nvpmodel (pid {rival.pid})")
    with board.raised() as workload:
        workload.kill()
    board.wait_until_given_back(LOW_HZ)


@CHECKS()
def power_mode_changes_while_raised(board: Board) -> None:
    with board.raised() as workload, board.rival("nvpmodel") as rival:
        change_power_mode(rival)
        board.service.wait_for(f"min_freq set to 408 MHz by nvpmodel (pid {rival.pid})")
        board.wait_until_raised()
        workload.kill()
        board.wait_until_given_back(LOW_HZ)


@CHECKS()
def lower_max_freq_while_raised(board: Board) -> None:
    """A smaller power mode, for good: the floor is as high as it allows, and is given back below it."""
    with board.raised() as workload, board.rival("nvpmodel") as rival:
        rival.write("max_freq", MIDDLE_HZ)
        board.service.wait_for(f"max_freq set to 612 MHz by nvpmodel (pid {rival.pid})")
        until(lambda: board.service.status()["floor_hz"] == MIDDLE_HZ, "the floor at the new limit")
        assert board.gpu.cur_hz == MIDDLE_HZ
        workload.kill()
        board.wait_until_given_back()
        rival.write("max_freq", HIGHEST_HZ)
        assert board.gpu.min_hz == LOWEST_HZ


@CHECKS()
def jetson_clocks_while_idle(board: Board) -> None:
    """min_freq at max_freq: there is nothing to raise, and nothing to give back."""
    with board.rival("jetson_clocks") as rival, board.llama("llama-server", "--cpu-moe") as workload:
        rival.write("min_freq", HIGHEST_HZ)
        board.service.wait_for(f"min_freq set to 1020 MHz by jetson_clocks (pid {rival.pid})")
        workload.do("call 1")
        board.service.wait_for("min_freq is already as high as the floor")
        workload.kill()
        until(lambda: not board.service.status()["holders"], "nobody holds anything")
        assert board.gpu.min_hz == HIGHEST_HZ
        assert not board.service.has_said("floor ")


@CHECKS()
def jetson_clocks_while_raised(board: Board) -> None:
    """It writes what is there already: only the kernel can tell that somebody did, and it stays theirs."""
    with board.raised() as workload, board.rival("jetson_clocks") as rival:
        rival.write("min_freq", HIGHEST_HZ)
        board.service.wait_for(f"min_freq set to 1020 MHz by jetson_clocks (pid {rival.pid})")
        workload.kill()
        until(lambda: not board.service.status()["holders"], "nobody holds anything")
        assert board.gpu.min_hz == HIGHEST_HZ
        assert not board.service.has_said("floor 306 MHz")
