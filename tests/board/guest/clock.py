"""What a driver and a thermal zone do to the clock: caps that come and go, changes that fail or are slow."""

from __future__ import annotations

from tests.board.guest.board import NODE, Board, until
from tests.board.guest.registry import Checks
from tests.support import HIGHEST_HZ, LOWEST_HZ

CHECKS = Checks()

CAP_MHZ, CAP_HZ = 612, 612_000_000
LOW_CAP_MHZ, LOW_CAP_HZ = 408, 408_000_000
EIO = 5
MICROSECONDS_PER_SECOND = 1_000_000


def transitions() -> int:
    """How often the clock has changed since the driver was loaded."""
    last = (NODE / "trans_stat").read_text().splitlines()[-1]
    return int(last.partition(":")[2])


@CHECKS()
def cap_that_comes_and_goes_while_raised(board: Board) -> None:
    gpu = board.gpu
    with board.raised() as workload:
        gpu.set(cap_mhz=CAP_MHZ)
        until(lambda: gpu.cur_hz == CAP_HZ, "the clock under the cap")
        gpu.set(cap_mhz=0)
        # What was asked for is remembered by the kernel, so nobody needs to notice.
        assert gpu.min_hz == HIGHEST_HZ
        until(lambda: gpu.cur_hz == HIGHEST_HZ, "the clock up again")
        gpu.set(cap_mhz=CAP_MHZ)
        until(lambda: gpu.cur_hz == CAP_HZ, "the clock under the cap")
        workload.kill()
        board.wait_until_given_back()
    gpu.set(cap_mhz=0)
    assert gpu.min_hz == LOWEST_HZ
    until(lambda: gpu.cur_hz == LOWEST_HZ, "the clock at rest")
    assert not board.service.has_said("min_freq set to"), "a cap is nobody's write"


@CHECKS()
def cap_that_was_there_before(board: Board) -> None:
    """The floor goes as far as the cap allows, and further when that goes."""
    gpu = board.gpu
    gpu.set(cap_mhz=CAP_MHZ)
    with board.llama("llama-server", "--cpu-moe") as workload:
        workload.begin("busy 600000")
        board.wait_until_raised(CAP_HZ)
        gpu.set(cap_mhz=0)
        board.wait_until_raised()
        board.service.wait_for("floor 1020 MHz (max_freq has changed)")
        workload.kill()
    board.wait_until_given_back()


@CHECKS()
def cap_below_what_is_given_back(board: Board) -> None:
    """The user's own min_freq comes back whole, though it was given back under a lower cap."""
    gpu = board.gpu
    (NODE / "min_freq").write_text(f"{CAP_HZ}\n")
    with board.raised() as workload:
        gpu.set(cap_mhz=LOW_CAP_MHZ)
        until(lambda: gpu.cur_hz == LOW_CAP_HZ, "the clock under the cap")
        workload.kill()
        board.wait_until_given_back(LOW_CAP_HZ)
    gpu.set(cap_mhz=0)
    assert gpu.min_hz == CAP_HZ


@CHECKS()
def cap_around_one_short_call(board: Board) -> None:
    """Under a cap below the user's own min_freq there is nothing to raise, and nothing of it is forgotten."""
    gpu = board.gpu
    (NODE / "min_freq").write_text(f"{CAP_HZ}\n")
    gpu.set(cap_mhz=LOW_CAP_MHZ)
    with board.llama("llama-server", "--cpu-moe") as workload:
        workload.do("call 1")
        board.service.wait_for("min_freq is already as high as the floor")
    gpu.set(cap_mhz=0)
    assert gpu.min_hz == CAP_HZ


@CHECKS()
def clock_change_that_fails(board: Board) -> None:
    """The write to min_freq succeeds all the same; the daemon sees that cur_freq stays, says so, and carries on."""
    gpu = board.gpu
    gpu.set(fail=EIO)
    with board.raised() as workload:
        assert gpu.cur_hz == LOWEST_HZ
        stayed = "the clock stayed at 306 MHz when min_freq was raised to 1020 MHz"
        board.service.wait_for(stayed)
        until(lambda: board.service.is_troubled_by(stayed), "the status says so, too")
        gpu.set(fail=0)
        until(lambda: gpu.cur_hz == HIGHEST_HZ, "the clock follows")
        board.service.wait_for("the clock follows min_freq again")
        workload.kill()
    board.wait_until_given_back()
    assert not any(line.startswith("cannot") for line in board.service.journal())


@CHECKS()
def slow_changes_hold_nothing_up(board: Board) -> None:
    """Each write takes as long as the change: so there is one for a stretch of inference, however many calls it has."""
    gpu = board.gpu
    gpu.set(delay_us=20_000)
    before = transitions()
    with board.llama("llama-server", "--cpu-moe") as one, board.llama("llama-server", "--cpu-moe") as other:
        one.begin("busy 600000")
        board.wait_until_raised()
        other.do("call 1000")
        other.begin("busy 600000")
        until(lambda: board.service.status()["holders"] == 2, "the second one is heard of")
        other.kill()
        until(lambda: board.service.status()["holders"] == 1, "its end is heard of")
        one.kill()
    board.wait_until_given_back()
    until(lambda: gpu.cur_hz == LOWEST_HZ, "the clock at rest")
    assert transitions() - before == 2, "up once, and down once"


@CHECKS()
def change_that_takes_seconds_is_lived_with(board: Board) -> None:
    gpu = board.gpu
    pid = board.service.pid
    gpu.set(delay_us=2 * MICROSECONDS_PER_SECOND)
    with board.llama("llama-server", "--cpu-moe") as workload:
        workload.do("call 1")
        until(lambda: gpu.cur_hz == HIGHEST_HZ, "the clock up")
        board.service.wait_for("floor 306 MHz (idle)")
    gpu.set(delay_us=0)
    assert board.service.pid == pid
    until(lambda: gpu.min_hz == LOWEST_HZ, "given back")


@CHECKS()
def floor_that_the_driver_does_not_list(board: Board) -> None:
    """The clock is the next one that it lists; min_freq reads what was written."""
    board.configure(floor_mhz=700)
    with board.llama("llama-server", "--cpu-moe") as workload:
        workload.begin("busy 600000")
        board.wait_until_raised(700_000_000)
        assert board.gpu.cur_hz == 714_000_000
        workload.kill()
    board.wait_until_given_back()
    assert not board.service.has_said("the clock stayed")


@CHECKS()
def floor_above_what_the_driver_lists(board: Board) -> None:
    board.configure(floor_mhz=5000)
    with board.raised() as workload:
        workload.kill()
    board.wait_until_given_back()


@CHECKS()
def floor_below_what_the_driver_lists(board: Board) -> None:
    board.configure(floor_mhz=100)
    with board.llama("llama-server", "--cpu-moe") as workload:
        workload.do("call 1")
        board.service.wait_for("min_freq is already as high as the floor")
    assert board.gpu.min_hz == LOWEST_HZ


@CHECKS()
def values_between_kilohertz(board: Board) -> None:
    """devfreq keeps kHz: 612000001 reads 612000000, and is no rival's write for that."""
    (NODE / "min_freq").write_text("612000001\n")
    assert board.gpu.min_hz == CAP_HZ
    with board.raised() as workload:
        workload.kill()
    board.wait_until_given_back(CAP_HZ)
    board.service.wait_for("floor 612 MHz (idle)")
