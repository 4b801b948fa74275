"""At every other moment the governor decides as if we were not there: its choices are the same, with and without."""

from __future__ import annotations

from tests.board.guest.board import NODE, Board, until
from tests.board.guest.registry import Checks
from tests.support import LADDER_HZ, LOWEST_HZ

CHECKS = Checks()

# Per mille, and where simple_ondemand ends up with it, coming from the one before.
LOADS = (0, 950, 0, 500, 700, 850, 950, 300, 600, 880, 0)


def transitions() -> dict[tuple[int, int], int]:
    """How often the clock went from one frequency to another, in Hz."""
    counts = {}
    for line in (NODE / "trans_stat").read_text().splitlines()[2:-1]:
        origin, _, rest = line.replace("*", " ").partition(":")
        for target_hz, count in zip(LADDER_HZ, rest.split(), strict=False):
            counts[int(origin), target_hz] = int(count)
    return counts


def polls() -> int:
    """How often devfreq has updated the time it spent at each frequency, in ms in all: it grows with each poll."""
    lines = (NODE / "trans_stat").read_text().splitlines()[2:-1]
    return sum(int(line.split()[-1]) for line in lines)


def choices(board: Board) -> list[object]:
    """What the governor makes of a script of loads: where it settles, and all the steps it took."""
    before = transitions()
    settled = []
    for load in LOADS:
        board.gpu.set(load_permille=load)
        settled.append(settle(board))
    after = transitions()
    return [settled, {step: after[step] - before[step] for step in after if after[step] != before[step]}]


def settle(board: Board) -> int:
    """Wait until the clock has stayed over many of the governor's polls, of 50 ms each, and return it in Hz."""
    last = [0, 0]

    def has_stayed() -> bool:
        total, now_ms = sum(transitions().values()), polls()
        if total != last[0]:
            last[:] = total, now_ms
        return now_ms - last[1] >= 500

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
    assert len(set(without[0])) > 2, f"the loads tell nothing apart: {without}"  # type: ignore[call-overload]
    assert with_service == without
    assert after_a_floor == without
