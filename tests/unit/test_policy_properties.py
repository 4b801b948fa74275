"""The rules of policy.py against random histories.

A World plays everything around the policy: processes with calls and threads at work, the kernel that notes every call
and wakes the daemon for some, the daemon that reads late, ticks late, and answers questions. It knows the truth, so it
can tell when the floor must be up and when it must be down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_gpu_stabilizer.policy import (
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
HOLD_NS = 1000 * MS

# As daemon.py sets it up: a process that counts wakes the daemon at most this often per hold.
WAKES_PER_HOLD = 2

# One question is at most this part of a hold behind the one before.
QUESTION_OF_HOLD = 4


class Reference:
    """The rules again, in the plainest words: since when is each process known to have been in flight?"""

    def __init__(self, hold_ns: int) -> None:
        self.hold_ns = hold_ns
        self.counting: set[Process] = set()
        self.last_in_flight_ns: dict[Process, int] = {}
        self.looks: dict[Process, int] = {}  # since the last call that was told
        self.stopped = False

    @property
    def floor_up(self) -> bool:
        return bool(self.last_in_flight_ns)

    def tell(self, event: Event, now_ns: int) -> None:
        if isinstance(event, Judged) and event.counts and not self.stopped:
            self.counting.add(event.process)
        elif isinstance(event, (Judged, ProcessGone)):
            self.counting.discard(event.process)
            self.last_in_flight_ns.pop(event.process, None)
        elif isinstance(event, CallSeen) and event.process in self.counting:
            heard_in_time = now_ns < event.at_ns + self.hold_ns
            at_ns = event.at_ns if heard_in_time else now_ns - self.hold_ns // 2
            if at_ns > self.last_in_flight_ns.get(event.process, at_ns - 1):
                self.last_in_flight_ns[event.process] = at_ns
                self.looks[event.process] = 0
        elif isinstance(event, ThreadChecked) and event.process in self.last_in_flight_ns:
            self.looks[event.process] += 1
            if event.at_work:
                self.last_in_flight_ns[event.process] = now_ns
            elif self.looks[event.process] > 1 and self.last_in_flight_ns[event.process] + self.hold_ns <= now_ns:
                del self.last_in_flight_ns[event.process]
        elif isinstance(event, HoldChanged):
            self.hold_ns = event.hold_ns
        elif isinstance(event, Stop):
            self.stopped = True
            self.counting.clear()
            self.last_in_flight_ns.clear()


@dataclass
class Truth:
    """What one process really does, and what the kernel and the meter have noted of it."""

    counts: bool
    computes: list[tuple[int, int]] = field(default_factory=list)  # from, to
    last_call_ns: int = -1
    last_wake_ns: int | None = None
    looked_ns: int = -1

    def computed_within(self, start_ns: int, end_ns: int) -> bool:
        return any(begin < end_ns and start_ns < end for begin, end in self.computes)

    def last_work_ns(self, now_ns: int) -> int:
        """The last moment, up to now, of a call or of computing in one; -1 if there was none."""
        return max([self.last_call_ns] + [min(end, now_ns) for begin, end in self.computes if begin <= now_ns])


class World:
    """Plays the daemon. Every step of the policy is compared with the reference."""

    def __init__(self, late_ns: int = 0) -> None:
        self.now_ns = 0
        self.state = State(HOLD_NS)
        self.reference = Reference(HOLD_NS)
        self.truth: dict[Process, Truth] = {}
        self.floor_changes: list[Raise | GiveBack] = []
        self.hold_changed_ns = 0
        # How late a tick may come; each one is as late as that.
        self.late_ns = late_ns
        self.latest_ns = late_ns
        self._pids = 0

    # What happens.

    def launch(self, counts: bool) -> Process:
        self._pids += 1
        process = Process(self._pids, self._pids)
        self.truth[process] = Truth(counts)
        self.feed(Judged(process, counts))
        return process

    def call(self, process: Process, compute_ns: int, read_late_ns: int = 0) -> None:
        """The process enters a probed call and computes in it for a while, or for no time at all."""
        truth = self.truth[process]
        called_ns = self.now_ns
        truth.last_call_ns = called_ns
        if compute_ns:
            truth.computes.append((called_ns, called_ns + compute_ns))
        interval_ns = self.state.hold_ns // WAKES_PER_HOLD
        if truth.counts and (truth.last_wake_ns is None or called_ns - truth.last_wake_ns >= interval_ns):
            truth.last_wake_ns = called_ns
            self.latest_ns = max(self.latest_ns, read_late_ns)
            self.advance(read_late_ns)
            self.feed(CallSeen(process, called_ns))

    def end(self, process: Process) -> None:
        del self.truth[process]
        self.feed(ProcessGone(process))

    def judge_again(self, process: Process, counts: bool) -> None:
        self.truth[process].counts = counts
        self.feed(Judged(process, counts))

    def change_hold(self, hold_ns: int) -> None:
        self.hold_changed_ns = self.now_ns
        self.feed(HoldChanged(hold_ns))

    def advance(self, passed_ns: int) -> None:
        """Let time pass; ticks that come due on the way are sent, late."""
        end_ns = self.now_ns + passed_ns
        ticks_in_one_moment = 0
        while (armed_ns := self.state.timer_ns) is not None and max(self.now_ns, armed_ns + self.late_ns) <= end_ns:
            tick_ns = max(self.now_ns, armed_ns + self.late_ns)
            ticks_in_one_moment = ticks_in_one_moment + 1 if tick_ns == self.now_ns else 0
            assert ticks_in_one_moment < 10, "the timer spins"
            self.now_ns = tick_ns
            self.feed(Tick())
        self.now_ns = end_ns
        self.check_idle()

    # What the daemon does.

    def feed(self, event: Event) -> None:
        before = self.state
        self.state, actions = step(self.state, event, self.now_ns)
        self.reference.tell(event, self.now_ns)
        for action in actions:
            if isinstance(action, (Raise, GiveBack)):
                self.floor_changes.append(action)
        if isinstance(event, Tick):
            assert before.floor_up == self.state.floor_up, "a tick asks; it does not decide"
        self.check()
        for action in actions:
            if isinstance(action, AskWork):
                self._answer(action.process)

    def _answer(self, process: Process) -> None:
        """As daemon.py answers: a newer call, or else what the thread's CPU time says since the last look."""
        truth = self.truth[process]
        if truth.last_call_ns > self.state.claims[process].last_in_flight_ns:
            self.feed(CallSeen(process, truth.last_call_ns))
            return
        comparable = truth.looked_ns > truth.last_call_ns  # a look in the call's very nanosecond came before it
        at_work = comparable and truth.computed_within(truth.looked_ns, self.now_ns)
        truth.looked_ns = self.now_ns
        self.feed(ThreadChecked(process, at_work))

    # What must be true after every event.

    def check(self) -> None:
        up = self.state.floor_up
        assert up == self.reference.floor_up
        claims = {process: claim.last_in_flight_ns for process, claim in self.state.claims.items()}
        assert claims == self.reference.last_in_flight_ns

        assert (self.state.timer_ns is not None) == up, "a timer without a floor, or a floor without a timer"

        kinds = [type(change) for change in self.floor_changes]
        assert kinds == [Raise, GiveBack] * (len(kinds) // 2) + [Raise] * (len(kinds) % 2)
        assert up == (len(kinds) % 2 == 1), "the floor is where the actions left it"

        for process in self.state.claims:
            assert process in self.truth, "a dead process holds the floor"
            assert self.truth[process].counts, "a process that does not count holds the floor"
        if self.reference.stopped:
            assert not up

    def check_idle(self) -> None:
        """An idle process loses the floor soon: a hold, and a question, after its last work."""
        last_work_ns = max((t.last_work_ns(self.now_ns) for t in self.truth.values() if t.counts), default=-1)
        since_ns = max(last_work_ns, self.hold_changed_ns)
        soon_ns = self.state.hold_ns + self.state.hold_ns // QUESTION_OF_HOLD + 2 * self.latest_ns
        if self.now_ns > since_ns + soon_ns:
            assert not self.state.floor_up, f"still up, {(self.now_ns - since_ns) / MS:g} ms after the last work"


# Short and long against the hold, and the hold's own fractions, where rules meet.
TIMES_NS = st.one_of(
    st.integers(0, 3 * HOLD_NS),
    st.sampled_from([0, 1, HOLD_NS // 8, HOLD_NS // 4, HOLD_NS // 2, HOLD_NS - 1, HOLD_NS, HOLD_NS + 1, 14 * HOLD_NS]),
)


class Calls(NamedTuple):
    """A process calls several times: (pause before it, computing in it) each."""

    process: int
    times_ns: list[tuple[int, int]]
    read_late_ns: int = 0


class Wait(NamedTuple):
    passed_ns: int


class Judge(NamedTuple):
    process: int
    counts: bool


class End(NamedTuple):
    """A process ends, and another one starts in its place."""

    process: int


class Hold(NamedTuple):
    hold_ns: int


class Leave(NamedTuple):
    """The daemon stops. The rest of the history happens all the same."""


Happening = Calls | Wait | Judge | End | Hold | Leave

PROCESSES = st.integers(0, 2)
HISTORIES = st.lists(
    st.one_of(
        st.builds(
            Calls,
            PROCESSES,
            st.lists(st.tuples(TIMES_NS, TIMES_NS), min_size=1, max_size=4),
            st.sampled_from([0, 0, 1, 300 * MS, 2000 * MS]),
        ),
        st.builds(Wait, TIMES_NS),
        st.builds(Judge, PROCESSES, st.booleans()),
        st.builds(End, PROCESSES),
        st.builds(Hold, st.sampled_from([200 * MS, 1000 * MS, 5000 * MS])),
        st.builds(Leave),
    ),
    max_size=12,
)


@given(history=HISTORIES, late_ns=st.sampled_from([0, 10 * MS, 400 * MS, 3000 * MS]))
@settings(max_examples=600)
def test_the_rules_hold_in_any_history(history: list[Happening], late_ns: int) -> None:
    """Anything may happen, in any order, and the daemon may be late by seconds. In the end the floor is down."""
    world = World(late_ns)
    processes = [world.launch(counts=True), world.launch(counts=True), world.launch(counts=False)]
    for happening in history:
        if isinstance(happening, Calls):
            for pause_ns, compute_ns in happening.times_ns:
                world.advance(pause_ns)
                world.call(processes[happening.process], compute_ns, happening.read_late_ns)
        elif isinstance(happening, Wait):
            world.advance(happening.passed_ns)
        elif isinstance(happening, Judge):
            world.judge_again(processes[happening.process], happening.counts)
        elif isinstance(happening, End):
            world.end(processes[happening.process])
            processes[happening.process] = world.launch(counts=True)
        elif isinstance(happening, Hold):
            world.change_hold(happening.hold_ns)
        else:
            world.feed(Stop())
        time_alone_decides_nothing(world)
    world.advance(40 * HOLD_NS)
    assert not world.state.floor_up, "all work is done"


def time_alone_decides_nothing(world: World) -> None:
    """However late it is: a tick, and whatever concerns only a stranger, leave the floor as it is."""
    stranger = Process(999_999, 1)
    state = world.state
    for later_ns in (0, 1, HOLD_NS, 1000 * HOLD_NS):
        now_ns = world.now_ns + later_ns
        for event in (
            Tick(),
            Judged(stranger, True),
            Judged(stranger, False),
            CallSeen(stranger, now_ns),
            ThreadChecked(stranger, at_work=True),
            ThreadChecked(stranger, at_work=False),
            ProcessGone(stranger),
        ):
            after, actions = step(state, event, now_ns)
            assert set(after.claims) == set(state.claims)
            assert not [action for action in actions if isinstance(action, (Raise, GiveBack))]


@given(
    calls=st.lists(st.tuples(TIMES_NS, TIMES_NS), min_size=1, max_size=12),
    late_ns=st.one_of(st.just(0), st.integers(0, HOLD_NS), st.integers(0, 10 * HOLD_NS)),
)
@settings(max_examples=200)
def test_the_floor_has_no_gap_while_calls_and_their_work_go_on(calls: list[tuple[int, int]], late_ns: int) -> None:
    """From a call on, through all of its work, and until a hold after the call, the floor is up at every moment.

    However late the ticks are: on a machine that swaps, the daemon waits for its turn like everyone else.
    """
    world = World(late_ns)
    process = world.launch(counts=True)
    up_until_ns = -1
    for compute_ns, pause_ns in calls:
        raises_before = len(world.floor_changes)
        began_ns = world.now_ns
        was_up = world.state.floor_up
        world.call(process, compute_ns)
        assert world.state.floor_up, "a call raises the floor at once"
        up_until_ns = max(up_until_ns, began_ns + HOLD_NS, began_ns + compute_ns)
        world.advance(max(0, up_until_ns - 1 - world.now_ns))
        changes = world.floor_changes[raises_before:]
        assert changes == ([] if was_up else [Raise(process)]), "the floor flickered"
        assert world.state.floor_up
        world.advance(pause_ns)


@given(
    calls=st.lists(st.tuples(st.integers(0, 1), TIMES_NS, st.integers(0, 3 * HOLD_NS)), min_size=1, max_size=5),
    other_hold_ns=st.sampled_from([None, None, 200 * MS, 5000 * MS]),
)
@settings(max_examples=200)
def test_when_all_work_is_over_the_floor_falls_within_a_hold_and_a_quarter(
    calls: list[tuple[int, int, int]], other_hold_ns: int | None
) -> None:
    world = World()
    processes = [world.launch(counts=True), world.launch(counts=True)]
    for which, pause_ns, compute_ns in calls:
        world.advance(pause_ns)
        world.call(processes[which], compute_ns)
    over_ns = max(truth.last_work_ns(1000 * HOLD_NS) for truth in world.truth.values())
    world.advance(over_ns - world.now_ns)
    if other_hold_ns:
        world.change_hold(other_hold_ns)
    world.advance(world.state.hold_ns + world.state.hold_ns // QUESTION_OF_HOLD)
    assert not world.state.floor_up


@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, HOLD_NS - 1)), min_size=2, max_size=20))
@settings(max_examples=100)
def test_processes_that_overlap_cause_no_flicker(steps: list[tuple[int, int]]) -> None:
    """As long as any of three processes calls within each hold, the floor is raised once and stays."""
    world = World()
    processes = [world.launch(counts=True) for _ in range(3)]
    for which, pause_ns in steps:
        world.call(processes[which], compute_ns=0)
        world.advance(pause_ns)
        assert len(world.floor_changes) == 1
    world.advance(2 * HOLD_NS)
    assert world.floor_changes[1:] == [GiveBack("idle")]


@given(compute_ns=TIMES_NS, late_ns=st.sampled_from([0, 10 * MS, 100 * MS]), end_ns=TIMES_NS)
@settings(max_examples=100)
def test_a_process_that_dies_in_the_middle_of_a_call_holds_nothing(compute_ns: int, late_ns: int, end_ns: int) -> None:
    world = World(late_ns)
    process = world.launch(counts=True)
    world.call(process, compute_ns)
    world.advance(end_ns)
    world.end(process)
    assert not world.state.floor_up
    assert world.floor_changes == [Raise(process), GiveBack("idle")]
