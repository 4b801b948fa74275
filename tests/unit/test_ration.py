"""A flood of lines of one kind: the first are said, the others are counted, and hide no line of another kind."""

from __future__ import annotations

import logging

import pytest

from moe_gpu_stabilizer.journal import PatientHandler, fields, say_left_out
from moe_gpu_stabilizer.ration import ALWAYS_SAID, LINES, PERIOD_SECONDS, LeftOut, Ration, kind_of

JOURNALD_LINES, JOURNALD_SECONDS = 10_000, 30


def test_the_first_are_said_and_the_others_counted_once_the_time_is_over() -> None:
    ration = Ration()
    said = [ration.admits("ignored", logging.INFO, now) for now in range(5) for _ in range(LINES)]
    assert said == [True] * LINES + [False] * 4 * LINES
    assert list(ration.left_out(PERIOD_SECONDS - 1)) == []
    (left_out,) = ration.left_out(PERIOD_SECONDS)
    assert left_out == LeftOut("ignored", 4 * LINES, PERIOD_SECONDS, logging.INFO)
    assert str(left_out) == "(200 more lines about 'ignored' left out in 10 s)"
    assert list(ration.left_out(PERIOD_SECONDS)) == [], "said once"
    assert ration.admits("ignored", logging.INFO, PERIOD_SECONDS), "a new time begins"


def test_where_nothing_was_left_out_nothing_is_said() -> None:
    ration = Ration()
    assert ration.admits("ignored", logging.INFO, 0)
    assert list(ration.left_out(PERIOD_SECONDS)) == []


def test_kinds_do_not_hide_each_other() -> None:
    ration = Ration()
    for _ in range(2 * LINES):
        ration.admits("ignored", logging.INFO, 0)
    assert ration.admits("counts", logging.INFO, 0)


def test_the_highest_level_that_was_left_out_is_that_of_the_line() -> None:
    ration = Ration()
    for level in [logging.INFO] * LINES + [logging.WARNING, logging.INFO]:
        ration.admits("trouble attach", level, 0)
    (left_out,) = ration.left_out(1, to_the_end=True)
    assert (left_out.lines, left_out.level) == (2, logging.WARNING)
    assert str(LeftOut("attach", 1, 3.2, logging.INFO)) == "(1 more line about 'attach' left out in 3 s)"


@pytest.mark.parametrize(
    ("event", "reason", "kind"),
    [
        ("ignored", "no MoE flag", "ignored"),
        ("trouble", "attach /home/user/libllama.so", "trouble attach"),
        ("trouble", "floor", "trouble floor"),
        ("trouble-over", "floor", "trouble-over floor"),
        ("trouble", "", "trouble"),
    ],
)
def test_troubles_are_counted_by_their_cause(event: str, reason: str, kind: str) -> None:
    assert kind_of(event, reason) == kind


def test_all_kinds_together_stay_below_what_journald_drops() -> None:
    kinds = 40  # twice of what there are
    assert kinds * LINES * JOURNALD_SECONDS / PERIOD_SECONDS < JOURNALD_LINES


class Listener(PatientHandler):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def has_room(self) -> bool:
        return True

    def write(self, line: str, _level: int, _told: object) -> None:
        self.lines.append(line)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("moe_gpu_stabilizer.journal.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def log() -> tuple[logging.Logger, Listener]:
    logger, listener = logging.Logger("test"), Listener()
    logger.addHandler(listener)
    return logger, listener


def flood(logger: logging.Logger) -> None:
    for pid in range(3 * LINES):
        logger.info("pid %d is ignored", pid, extra=fields("ignored", TARGET_PID=pid, REASON="no MoE flag"))


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("event", sorted(ALWAYS_SAID - {"stop"}))
def test_a_flood_hides_no_line_that_matters(log: tuple[logging.Logger, Listener], event: str) -> None:
    logger, listener = log
    flood(logger)
    for number in range(2 * LINES):
        logger.info("%s %d", event, number, extra=fields(event))
        logger.error("cannot give back %d", number, extra=fields("trouble", REASON="give back"))
    assert len(listener.lines) == LINES + 4 * LINES


def test_what_was_left_out_is_said_with_the_next_line(log: tuple[logging.Logger, Listener], clock: list[float]) -> None:
    logger, listener = log
    flood(logger)
    assert len(listener.lines) == LINES
    clock[0] += PERIOD_SECONDS
    logger.info("floor 306 MHz (idle)", extra=fields("give-back"))
    assert listener.lines[LINES:] == ["(100 more lines about 'ignored' left out in 10 s)", "floor 306 MHz (idle)"]


@pytest.mark.usefixtures("clock")
def test_a_stop_leaves_nothing_unsaid(log: tuple[logging.Logger, Listener]) -> None:
    logger, listener = log
    flood(logger)
    logger.info("stopped", extra=fields("stop"))
    assert listener.lines[LINES:] == ["(100 more lines about 'ignored' left out in 0 s)", "stopped"]


def test_where_no_line_follows_a_tick_says_it(clock: list[float]) -> None:
    package, listener = logging.getLogger("moe_gpu_stabilizer"), Listener()
    package.addHandler(listener)
    level = package.level
    package.setLevel(logging.INFO)
    try:
        flood(package)
        clock[0] += PERIOD_SECONDS
        say_left_out()
    finally:
        package.removeHandler(listener)
        package.setLevel(level)
    assert listener.lines[LINES:] == ["(100 more lines about 'ignored' left out in 10 s)"]
