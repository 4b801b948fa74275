"""At every other moment the governor decides as if we were not there: its choices are the same, with and without."""

from __future__ import annotations

from tests.board.guest.board import NODE, Board, until
from tests.board.guest.registry import Checks
from tests.support import LADDER_HZ, LOWEST_HZ

CHECKS = Checks()

# Work that would keep the GPU busy all of the time at so many MHz; simple_ondemand finds a clock for each.
DEMANDS_MHZ = (1, 330, 600, 420, 800, 950, 500, 700, 1)

# Ten of the governor's polls.
SETTLED_MS = 500


def transitions() -> dict[tuple[int, int], int]:
    """How often the clock went from one frequency to another, in Hz."""
    counts = {}
    for line in (NODE / "trans_stat").read_text().splitlines()[2:-1]:
        origin, _, rest = line.replace("*", " ").partition(":")
        for target_hz, count in zip(LADDER_HZ, rest.split(), strict=False):
            counts[int(origin), target_hz] = int(count)
    return counts


def accounted_ms() -> int:
    """How much time devfreq has accounted for: it does so at each of the governor's polls."""
    lines = (NODE / "trans_stat").read_text().splitlines()[2:-1]
    return sum(int(line.split()[-1]) for line in lines)


def choices(board: Board) -> tuple[list[int], dict[tuple[int, int], int]]:
    """What the governor makes of a script of demands: where it settles, and all the steps it took."""
    before = transitions()
    settled = []
    for demand_mhz in DEMANDS_MHZ:
        board.gpu.set(demand_mhz=demand_mhz)
        settled.append(settle(board))
    after = transitions()
    return settled, {step: after[step] - before[step] for step in after if after[step] != before[step]}


def settle(board: Board) -> int:
    """Wait until the clock has stayed over many of the governor's polls and return it in Hz."""
    last = [0, 0]

    def has_stayed() -> bool:
        total, now_ms = sum(transitions().values()), accounted_ms()
        if total != last[0]:
            last[:] = total, now_ms
        return now_ms - last[1] >= SETTLED_MS

    until(has_stayed, "a clock that stays")
    return board.gpu.cur_hz


@CHECKS()
def governor_chooses_as_if_the_service_were_not_there(board: Board) -> None:
    with board.llama("llama-any") as workload:  # a model that sits on the GPU: it is watched, and nothing is done
        workload.begin("busy 600000")
        until(lambda: any(one["pid"] == workload.pid for one in board.service.status()["processes"]), "it is watched")
        with_service = choices(board)
    with board.raised():
        pass
    board.wait_until_given_back()
    until(lambda: board.gpu.cur_hz == LOWEST_HZ, "the clock at rest")
    after_a_floor = choices(board)
    board.service.systemctl("stop")
    without = choices(board)
    assert len(set(without[0])) > len(LADDER_HZ) // 2, f"the demands tell little apart: {without}"
    assert with_service == without
    assert after_a_floor == without
