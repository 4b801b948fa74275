"""When is the floor up? The whole rule, pure: events and the time come in, actions come out.

The rules, which the property tests hold against random sequences of events:

1. Only a process whose verdict counts can have a claim on the floor.
2. It has one from a call until `hold_ns` after the last moment it was seen in flight. In flight is: it entered a probed
   call, a graph or a section of one, or the thread that did so last was found at work. (A prefill can sit 14 s inside
   one call.) A call that is heard of only after its hold is taken for one half a hold ago: it may be such a long one.
3. The floor is up exactly while there is a claim. Claims are a set: two processes that overlap make one stretch.
4. A process that ends, or that turns into another program, loses its claim at once.
5. Time alone changes nothing. A timer asks whether the thread is at work; it is the answer that ends a claim. So the
   floor never falls between a call that the kernel has noted and the daemon's reading of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

# After a call, the first question waits for half a hold: while calls keep coming, the kernel's own wake-ups (one per
# half hold) are first, and nothing is asked. Then a few times per hold, so that the end of work is seen soon.
FIRST_QUESTION_OF_HOLD = 2
QUESTIONS_PER_HOLD = 4

# The first look at a thread has nothing to compare its CPU time with.
LOOKS_THAT_TELL = 2


class Process(NamedTuple):
    """One process for good: the kernel reuses a tgid, but never with the same start time."""

    tgid: int
    start_ticks: int  # clock ticks since boot, as in /proc/PID/stat


class Claim(NamedTuple):
    """Why the floor is up: this process was in flight until `last_in_flight_ns`."""

    last_in_flight_ns: int
    ask_at_ns: int
    looks: int = 0  # at the thread, since the last call: the first has nothing to compare with


# Never written to: each state has a mapping of its own.
NOBODY: Mapping[Process, Claim] = {}


class State(NamedTuple):
    """All that the rule remembers."""

    hold_ns: int
    counting: frozenset[Process] = frozenset()
    claims: Mapping[Process, Claim] = NOBODY
    stopped: bool = False

    @property
    def floor_up(self) -> bool:
        return bool(self.claims)

    @property
    def timer_ns(self) -> int | None:
        """When a Tick is to be sent; None: no timer is needed."""
        return min([claim.ask_at_ns for claim in self.claims.values()], default=None)


# Events.


@dataclass(frozen=True)
class Judged:
    """A verdict, new or changed: does this process count?"""

    process: Process
    counts: bool


@dataclass(frozen=True)
class CallSeen:
    """The process entered a probed call at `at_ns`, now or a little earlier."""

    process: Process
    at_ns: int


@dataclass(frozen=True)
class ThreadChecked:
    """The answer to AskWork: is the thread that entered last at work?"""

    process: Process
    at_work: bool


@dataclass(frozen=True)
class ProcessGone:
    """It ended, or execed another program."""

    process: Process


@dataclass(frozen=True)
class HoldChanged:
    hold_ns: int


@dataclass(frozen=True)
class Tick:
    """The time that State.timer_ns names has come."""


@dataclass(frozen=True)
class Stop:
    """The daemon leaves: give back, and raise nothing more."""


Event = Judged | CallSeen | ThreadChecked | ProcessGone | HoldChanged | Tick | Stop


# Actions.


@dataclass(frozen=True)
class Raise:
    """Raise the floor; `process` is the first to claim it."""

    process: Process


@dataclass(frozen=True)
class GiveBack:
    """Put back what was there before."""

    reason: str  # "idle" or "stop"


@dataclass(frozen=True)
class AskWork:
    """Was there a newer call, or else, is the thread at work? Answer with CallSeen or ThreadChecked."""

    process: Process


Action = Raise | GiveBack | AskWork


def step(state: State, event: Event, now_ns: int) -> tuple[State, list[Action]]:
    """Apply one event at `now_ns` (CLOCK_MONOTONIC) and return the new state and what is to be done, in order."""
    asked: list[Action] = []
    if isinstance(event, Tick):
        after = state
        due = [process for process, claim in state.claims.items() if claim.ask_at_ns <= now_ns]
        asked = [AskWork(process) for process in due]
        for process in due:
            # Ask again even if no answer comes, but not at once.
            after = _with_claim(after, process, _ask_later(state.claims[process], state.hold_ns, now_ns))
    else:
        after = _apply(state, event, now_ns)
    return after, [*_effects(state, after, "stop" if isinstance(event, Stop) else "idle"), *asked]


def _apply(state: State, event: Event, now_ns: int) -> State:
    if isinstance(event, Judged):
        if event.counts and not state.stopped:
            return state._replace(counting=state.counting | {event.process})
        return _without(state, event.process)
    if isinstance(event, ProcessGone):
        return _without(state, event.process)
    if isinstance(event, CallSeen):
        return _call_seen(state, event, now_ns)
    if isinstance(event, ThreadChecked):
        return _thread_checked(state, event, now_ns)
    if isinstance(event, HoldChanged):
        changed = state._replace(hold_ns=event.hold_ns)
        for process, claim in state.claims.items():
            changed = _with_claim(changed, process, _ask_later(claim, event.hold_ns, now_ns))
        return changed
    return State(hold_ns=state.hold_ns, stopped=True)


def _call_seen(state: State, event: CallSeen, now_ns: int) -> State:
    if event.process not in state.counting:
        return state
    in_flight_ns, first_question_ns = event.at_ns, state.hold_ns // FIRST_QUESTION_OF_HOLD
    if in_flight_ns + state.hold_ns <= now_ns:
        # Heard of after its hold, on a machine too busy to run us. It may be a long call: take it for half a hold old,
        # which leaves time for the two looks that tell.
        in_flight_ns = now_ns - first_question_ns
    claim = state.claims.get(event.process)
    if claim and claim.last_in_flight_ns >= in_flight_ns:
        return state
    return _with_claim(state, event.process, Claim(in_flight_ns, max(now_ns, in_flight_ns + first_question_ns)))


def _thread_checked(state: State, event: ThreadChecked, now_ns: int) -> State:
    claim = state.claims.get(event.process)
    if claim is None:
        return state
    claim = claim._replace(looks=claim.looks + 1)
    if event.at_work:
        claim = _ask_later(claim._replace(last_in_flight_ns=now_ns), state.hold_ns, now_ns)
    elif claim.looks >= LOOKS_THAT_TELL and claim.last_in_flight_ns + state.hold_ns <= now_ns:
        return state._replace(claims={p: c for p, c in state.claims.items() if p != event.process})
    return _with_claim(state, event.process, claim)


def _ask_later(claim: Claim, hold_ns: int, now_ns: int) -> Claim:
    """Plan the next question: a fraction of a hold away, but one falls on the very end of the hold."""
    end_ns = claim.last_in_flight_ns + hold_ns
    ask_at_ns = now_ns + hold_ns // QUESTIONS_PER_HOLD
    return claim._replace(ask_at_ns=min(ask_at_ns, end_ns) if now_ns < end_ns else ask_at_ns)


def _with_claim(state: State, process: Process, claim: Claim) -> State:
    return state._replace(claims={**state.claims, process: claim})


def _without(state: State, process: Process) -> State:
    return state._replace(
        counting=state.counting - {process},
        claims={p: c for p, c in state.claims.items() if p != process},
    )


def _effects(before: State, after: State, reason: str) -> list[Action]:
    """Derive the actions from the difference, so that no rule can forget one."""
    if after.floor_up and not before.floor_up:
        return [Raise(next(iter(after.claims)))]
    if before.floor_up and not after.floor_up:
        return [GiveBack(reason)]
    return []
