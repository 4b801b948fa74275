"""The rules of policy.py, one story each. Times are milliseconds here; the hold is 1000."""

from __future__ import annotations

from moe_gpu_stabilizer.policy import (
    Action,
    AskWork,
    CallSeen,
    Event,
    GiveBack,
    HoldChanged,
    Judged,
    Process,
    ProcessGone,
    Raise,
    State,
    Stop,
    ThreadChecked,
    Tick,
    step,
)

MS = 1_000_000
HOLD_MS = 1000

SERVER = Process(4242, 1111)
BENCH = Process(4343, 2222)


class Story:
    """Feeds events to the policy and keeps its state, as the daemon does."""

    def __init__(self) -> None:
        self.state = State(HOLD_MS * MS)

    def at(self, now_ms: int, event: Event) -> list[Action]:
        """One event; returns what the policy wants."""
        self.state, actions = step(self.state, event, now_ms * MS)
        return actions

    def call(self, at_ms: int, process: Process = SERVER) -> list[Action]:
        """A call that the daemon hears of in the same moment."""
        return self.at(at_ms, CallSeen(process, at_ms * MS))

    def ask(self, now_ms: int, process: Process = SERVER, at_work: bool = False) -> list[Action]:
        """The timer expires, and the thread is looked at; returns what the answer leads to."""
        assert AskWork(process) in self.at(now_ms, Tick())
        return self.at(now_ms, ThreadChecked(process, at_work))

    @property
    def timer_ms(self) -> float | None:
        return None if self.state.timer_ns is None else self.state.timer_ns / MS


def counting(*processes: Process) -> Story:
    story = Story()
    for process in processes:
        assert story.at(0, Judged(process, True)) == [], "a verdict alone raises nothing"
    return story


# Rule 1: only a process whose verdict counts can have a claim on the floor.


def test_the_first_call_of_a_process_that_counts_raises_the_floor() -> None:
    story = counting(SERVER)
    assert story.call(10) == [Raise(SERVER)]
    assert story.state.floor_up


def test_a_process_that_is_ignored_or_not_judged_raises_nothing() -> None:
    story = Story()
    assert story.call(10) == []
    story.at(20, Judged(SERVER, False))
    assert story.call(30) == []
    assert not story.state.floor_up


def test_the_end_of_a_verdict_is_the_end_of_the_claim() -> None:
    story = counting(SERVER)
    story.call(10)
    assert story.at(20, Judged(SERVER, False)) == [GiveBack("idle")]
    assert story.call(30) == []


def test_a_verdict_that_changes_to_counting_counts_from_the_next_call() -> None:
    story = Story()
    story.at(0, Judged(SERVER, False))
    assert story.at(10, Judged(SERVER, True)) == []
    assert story.call(20) == [Raise(SERVER)]


def test_the_same_verdict_again_changes_nothing() -> None:
    story = counting(SERVER)
    story.call(10)
    before = story.state
    assert story.at(20, Judged(SERVER, True)) == []
    assert story.state == before


# Rule 2: from a call until one hold after the last moment it was seen in flight.


def test_further_calls_raise_nothing_again() -> None:
    story = counting(SERVER)
    story.call(10)
    assert story.call(20) == []
    assert story.call(900) == []


def test_one_call_and_the_floor_falls_one_hold_later_to_the_millisecond() -> None:
    story = counting(SERVER)
    story.call(0)
    # The kernel's own news of further calls, at most two per hold, come before the first question.
    for now_ms in (500, 750, 1000):
        assert story.timer_ms == now_ms
        assert story.ask(now_ms) == ([GiveBack("idle")] if now_ms == HOLD_MS else [])
    assert story.timer_ms is None


def test_a_thread_at_work_keeps_the_floor_for_another_hold() -> None:
    story = counting(SERVER)
    story.call(0)
    assert story.ask(500, at_work=True) == []
    assert story.ask(1400) == [], "500 + 1000 is not over yet"
    assert story.timer_ms == 1500, "one question falls on the very end of the hold"
    assert story.ask(1500) == [GiveBack("idle")]


def test_a_newer_call_is_as_good_an_answer_as_a_thread_at_work() -> None:
    story = counting(SERVER)
    story.call(0)
    assert story.at(500, Tick()) == [AskWork(SERVER)]
    assert story.at(500, CallSeen(SERVER, 480 * MS)) == []
    assert story.timer_ms == 980, "half a hold after that call"
    assert story.ask(980) == []
    assert story.ask(1480) == [GiveBack("idle")]


def test_a_call_that_is_read_late_counts_from_when_it_was_made() -> None:
    story = counting(SERVER)
    assert story.at(900, CallSeen(SERVER, 0)) == [Raise(SERVER)]
    assert story.timer_ms == 900, "its first question is overdue"
    assert story.ask(900) == []
    assert story.ask(1000) == [GiveBack("idle")]


def test_a_call_that_is_read_after_its_hold_may_be_a_long_one() -> None:
    """Two looks at the thread tell, and half a hold is time enough for them."""
    story = counting(SERVER)
    assert story.at(5000, CallSeen(SERVER, 0)) == [Raise(SERVER)]
    assert story.ask(5000) == [], "the first look has nothing to compare with"
    assert story.timer_ms == 5250
    assert story.ask(5250, at_work=True) == []
    assert story.ask(6000) == []


def test_a_call_that_is_read_after_its_hold_and_is_over_raises_for_half_a_hold_at_most() -> None:
    story = counting(SERVER)
    story.at(5000, CallSeen(SERVER, 0))
    while story.timer_ms is not None:
        assert story.timer_ms <= 5500
        story.ask(int(story.timer_ms))
    assert not story.state.floor_up


def test_calls_that_are_read_in_the_wrong_order_do_not_shorten_the_claim() -> None:
    story = counting(SERVER)
    story.call(500)
    story.at(510, CallSeen(SERVER, 100 * MS))
    assert story.ask(1000) == []
    assert story.ask(1250) == []
    assert story.ask(1500) == [GiveBack("idle")]


def test_a_stale_newer_call_does_not_keep_the_floor_for_ever() -> None:
    """The daemon did not run for longer than a hold (it was stopped, or the machine swapped).

    The kernel has noted a call behind the last one that it woke the daemon for. Both are history by now.
    """
    story = counting(SERVER)
    story.call(0)
    noted_ns = 400 * MS
    now_ms = 5000
    for _ in range(10):
        if not story.state.floor_up:
            break
        assert story.state.timer_ns is not None
        now_ms = max(now_ms, story.state.timer_ns // MS)
        assert story.at(now_ms, Tick()) == [AskWork(SERVER)]
        if noted_ns > story.state.claims[SERVER].last_in_flight_ns:
            story.at(now_ms, CallSeen(SERVER, noted_ns))
        else:
            story.at(now_ms, ThreadChecked(SERVER, at_work=False))
    assert not story.state.floor_up, "an idle process keeps the floor"
    assert now_ms <= 5000 + HOLD_MS // 2


def test_a_prefill_of_14_seconds_in_one_call_keeps_the_floor_without_a_gap() -> None:
    story = counting(SERVER)
    story.call(0)
    assert story.ask(500) == [], "the first look only notes the thread's CPU time"
    for now_ms in range(750, 14_001, 250):
        assert story.timer_ms == now_ms
        assert story.ask(now_ms, at_work=True) == []
    for now_ms in (14_250, 14_500, 14_750):
        assert story.ask(now_ms) == []
    assert story.ask(15_000) == [GiveBack("idle")]


def test_a_long_call_keeps_the_floor_also_where_the_first_question_comes_late() -> None:
    """The machine was too busy to run us for longer than the hold, as when a model streams through little memory.

    The first look has nothing to compare with, so it cannot tell that the call is over: the second one can.
    """
    story = counting(SERVER)
    story.call(0)
    assert story.ask(3000) == []
    assert story.ask(3250, at_work=True) == []
    assert story.state.floor_up


def test_a_short_call_whose_first_question_comes_late_loses_the_floor_at_the_second() -> None:
    story = counting(SERVER)
    story.call(0)
    assert story.ask(3000) == []
    assert story.timer_ms == 3250
    assert story.ask(3250) == [GiveBack("idle")]


def test_an_answer_about_a_process_without_a_claim_is_nobodys() -> None:
    story = counting(SERVER)
    assert story.at(10, ThreadChecked(SERVER, at_work=True)) == []
    assert not story.state.floor_up


# Rule 3: the floor is up exactly while there is a claim. Claims are a set.


def test_two_processes_that_overlap_make_one_stretch() -> None:
    story = counting(SERVER, BENCH)
    assert story.call(0, SERVER) == [Raise(SERVER)]
    assert story.call(900, BENCH) == []
    assert story.ask(500, SERVER) == []
    assert story.ask(1000, SERVER) == []
    assert story.ask(1400, BENCH) == []
    assert story.ask(1900, BENCH) == [GiveBack("idle")]


def test_only_the_processes_whose_question_is_due_are_asked_about() -> None:
    story = counting(SERVER, BENCH)
    story.call(0, SERVER)
    story.call(400, BENCH)
    assert story.at(500, Tick()) == [AskWork(SERVER)]
    story.at(750, Tick())
    assert story.at(1000, Tick()) == [AskWork(SERVER), AskWork(BENCH)]


def test_after_the_floor_fell_the_next_call_raises_it_again() -> None:
    story = counting(SERVER)
    story.call(0)
    story.ask(500)
    story.ask(1000)
    assert story.call(1001) == [Raise(SERVER)]


# Rule 4: a process that ends, or turns into another program, loses its claim at once.


def test_a_process_that_ends_loses_the_floor_at_once() -> None:
    story = counting(SERVER)
    story.call(0)
    assert story.at(1, ProcessGone(SERVER)) == [GiveBack("idle")]


def test_a_process_that_ends_does_not_take_the_floor_from_another() -> None:
    story = counting(SERVER, BENCH)
    story.call(0, SERVER)
    story.call(0, BENCH)
    assert story.at(1, ProcessGone(SERVER)) == []
    assert story.at(2, ProcessGone(BENCH)) == [GiveBack("idle")]


def test_what_is_still_heard_of_a_process_that_ended_raises_nothing() -> None:
    story = counting(SERVER)
    story.at(1, ProcessGone(SERVER))
    assert story.at(2, CallSeen(SERVER, 0)) == []


def test_another_process_with_the_same_pid_is_another_process() -> None:
    story = counting(SERVER)
    story.call(0)
    assert story.call(1, Process(SERVER.tgid, SERVER.start_ticks + 1)) == []
    story.at(2, ProcessGone(SERVER))
    assert story.call(3, Process(SERVER.tgid, SERVER.start_ticks + 1)) == [], "it has not been judged"


# Rule 5: time alone changes nothing; the answer to a question does.


def test_a_question_without_an_answer_is_asked_again_and_the_floor_stays() -> None:
    story = counting(SERVER)
    story.call(0)
    for now_ms in (500, 750, 1000, 1250, 1500):
        assert story.timer_ms == now_ms
        assert story.at(now_ms, Tick()) == [AskWork(SERVER)]
        assert story.state.floor_up


def test_the_floor_stays_however_late_the_daemon_is() -> None:
    """Between the kernel's note of a call and the daemon's reading of it the floor must not fall."""
    story = counting(SERVER)
    story.call(0)
    assert story.at(60_000, Tick()) == [AskWork(SERVER)]
    assert story.at(60_000, CallSeen(SERVER, 59_990 * MS)) == []
    assert story.state.floor_up


def test_a_tick_before_it_is_due_asks_nothing() -> None:
    story = counting(SERVER)
    story.call(0)
    before = story.state
    assert story.at(499, Tick()) == []
    assert story.state == before


# The timer.


def test_the_timer_is_armed_with_the_first_claim_and_disarmed_with_the_last() -> None:
    state, _ = step(State(HOLD_MS * MS), Judged(SERVER, True), 0)
    assert state.timer_ns is None
    state, actions = step(state, CallSeen(SERVER, 0), 0)
    assert actions == [Raise(SERVER)]
    assert state.timer_ns == 500 * MS
    state, actions = step(state, ProcessGone(SERVER), 100 * MS)
    assert actions == [GiveBack("idle")]
    assert state.timer_ns is None


def test_the_timer_follows_the_earliest_question() -> None:
    story = counting(SERVER, BENCH)
    story.call(0, SERVER)
    story.call(400, BENCH)
    assert story.timer_ms == 500
    story.call(450, SERVER)
    assert story.timer_ms == 900, "the question about the other one comes first now"


# Settings and the end.


def test_a_shorter_hold_applies_to_a_floor_that_is_up() -> None:
    story = counting(SERVER)
    story.call(0)
    assert story.at(300, HoldChanged(200 * MS)) == [], "not by itself: the process may have called meanwhile"
    assert story.timer_ms == 350
    while story.timer_ms is not None:
        assert story.timer_ms <= 400
        story.ask(int(story.timer_ms))
    assert not story.state.floor_up


def test_a_longer_hold_applies_to_a_floor_that_is_up() -> None:
    story = counting(SERVER)
    story.call(0)
    story.at(300, HoldChanged(3000 * MS))
    assert story.ask(1500) == []
    assert story.ask(2999) == []
    assert story.ask(3000) == [GiveBack("idle")]


def test_stop_gives_the_floor_back() -> None:
    story = counting(SERVER)
    story.call(0)
    assert story.at(1, Stop()) == [GiveBack("stop")]
    assert story.timer_ms is None


def test_stop_with_the_floor_down_has_nothing_to_give_back() -> None:
    assert counting(SERVER).at(1, Stop()) == []


def test_nothing_raises_the_floor_after_stop() -> None:
    story = counting(SERVER)
    story.at(1, Stop())
    assert story.call(2) == []
    assert story.at(3, Judged(SERVER, True)) == []
    assert story.call(4) == []
    assert story.at(5, HoldChanged(2000 * MS)) == []
    assert story.at(6, Judged(BENCH, True)) == []
    assert story.call(7, BENCH) == []
    assert not story.state.floor_up
