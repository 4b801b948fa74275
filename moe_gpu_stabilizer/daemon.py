"""The running daemon: one thread, one epoll. Wiring only; the rules are in policy.py and matching.py."""

from __future__ import annotations

import gc
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable

from . import in_flight, policy
from .control import FloorControl
from .errors import StabilizerError
from .journal import Troubles, fields, say_left_out, set_log_level
from .judging import Judging
from .notify import ServiceManager
from .publisher import Publisher, Reload
from .rebind import Rebinder
from .runtime import Runtime
from .settings import NANOSECONDS, Settings
from .signals import Terminal, listen_for_signals
from .tracker import Known
from .uprobes import Probe

logger = logging.getLogger(__name__)

SIGNALS_AT_ONCE = 65536

# A process that counts wakes us at most twice per hold: the floor is up by then, and the map has the time of its last
# call.
WAKES_PER_HOLD = 2

# There is room for 2,048 records (probe.c).
MANY_WAKES = 1024

# Ticks for the sake of new processes are at least this far apart.
CROWD_NS = NANOSECONDS


class Daemon:
    """Everything that lives while the daemon runs. Make one, then run() it."""

    def __init__(self, settings: Settings, runtime: Runtime, read_settings: Callable[[], Settings]) -> None:
        """`read_settings` is called again at SIGHUP. Raises StabilizerError where something essential is missing."""
        self._settings = settings
        self._read_settings = read_settings
        self._runtime = runtime
        self._troubles = Troubles()
        self._last_reload: Reload | None = None
        self._reload_began_at_seconds: float | None = None
        self._manager = ServiceManager()
        self._selector = selectors.DefaultSelector()
        told = self._note_change, self._settle
        self._control = FloorControl(settings, runtime, self._troubles, self._selector, *told)
        self._probe = Probe(settings.hold_ns // WAKES_PER_HOLD, min_turns=settings.min_turns)
        self._rebinder = Rebinder(self._probe, settings, self._troubles, self._selector, self._note_change)
        self._judging = Judging(
            self._probe, settings, self._troubles, self._selector, self._feed,
            changed=self._note_change, appeared=self._on_appearance,
        )  # fmt: skip
        self._tracker = self._judging.tracker
        self._publisher = Publisher(
            runtime, self._troubles, self._manager, self._control, self._rebinder, self._tracker
        )
        self._state = policy.State(settings.hold_ns)
        self._next_tick_ns = self._ticked_ns = 0
        self._leaving = False
        self._terminal = Terminal()

    def run(self) -> None:
        """Watch until SIGTERM or SIGINT, and leave the clock as it was found."""
        signals = listen_for_signals()
        self._selector.register(signals, selectors.EVENT_READ, lambda: self._on_signals(signals))
        self._selector.register(self._probe.fileno(), selectors.EVENT_READ, self._on_wakes)
        try:
            self._control.begin()
            self._rebinder.rebind_and_wait()
            self._tick()
            told = fields("ready", NODE=self._control.node)
            logger.info("ready: %s", self._publisher.describe(self._settings), extra=told)
            self._manager.ready()
            gc.freeze()  # what is there now stays
            while not self._leaving:
                self._wait()
        finally:
            self._leave()

    def _wait(self) -> None:
        """Handle what happens until the next deadline, then what is due."""
        parts = (self._judging, self._control, self._rebinder, self._manager)
        waited_for = (self._state.timer_ns, self._publisher.deadline_ns, *(part.deadline_ns for part in parts))
        deadline_ns = min((self._next_tick_ns, *(at_ns for at_ns in waited_for if at_ns is not None)))
        for key, _ in self._selector.select(max(0, deadline_ns - time.monotonic_ns()) / NANOSECONDS):
            key.data()
        if is_due(self._state.timer_ns):
            self._feed(policy.Tick())
        for part in parts:
            if is_due(part.deadline_ns):
                part.on_deadline()
        if is_due(self._next_tick_ns):
            self._tick()
        self._end_reload()
        if is_due(self._publisher.deadline_ns):
            self._publish()

    def _leave(self) -> None:
        self._manager.stopping()
        self._feed(policy.Stop())
        self._control.give_back("stop")  # the last chance where the node refused when the claim went
        self._judging.close()
        self._rebinder.close()
        self._probe.close()
        self._runtime.forget_status()
        logger.info("stopped", extra=fields("stop"))

    # What the kernel says.

    def _on_wakes(self) -> None:
        wakes = self._probe.read_wakes()
        for wake in wakes:
            self._judging.on_wake(wake)
        if len(wakes) >= MANY_WAKES:
            self._look_for_the_unheard()

    def _look_for_the_unheard(self) -> None:
        """The buffer of records may have been full, and a long call makes no second one: the notes have them all."""
        for tgid in self._probe.active():
            activity = self._probe.activity(tgid)
            if activity:
                self._judging.on_call(tgid, activity.last_call_ns)

    def _on_appearance(self, tgid: int) -> None:
        """A process calls for the first time: probe the rest of its libraries soon, but not for each of a crowd."""
        self._rebinder.seen_calling(tgid)
        self._next_tick_ns = min(self._next_tick_ns, self._ticked_ns + CROWD_NS)

    def _on_signals(self, signals: int) -> None:
        heard = set(os.read(signals, SIGNALS_AT_ONCE))
        if signal.SIGIO in heard:
            self._rebinder.release_wanted()
        if heard & {signal.SIGTERM, signal.SIGINT} or (signal.SIGHUP in heard and self._terminal.has_hung_up()):
            self._leaving = True
        elif signal.SIGHUP in heard:
            self._reload()

    # What the policy wants.

    def _feed(self, event: policy.Event) -> None:
        self._state, actions = policy.step(self._state, event, time.monotonic_ns())
        for action in actions:
            if isinstance(action, policy.Raise):
                self._control.raise_for(self._tracker.known[action.process.tgid])
                self._note_change()
            elif isinstance(action, policy.GiveBack):
                self._control.give_back(action.reason)
                self._note_change()
            elif isinstance(action, policy.AskWork):
                self._answer(action.process)

    def _answer(self, process: policy.Process) -> None:
        """Was there a newer call, which the kernel had no need to wake us for? Else: is its thread at work?"""
        known, claim = self._tracker.known.get(process.tgid), self._state.claims.get(process)
        if known is None or claim is None:
            self._feed(policy.ProcessGone(process))
        else:
            now_ns = time.monotonic_ns()
            self._feed(in_flight.look(self._probe, process, known.meter, claim, self._settings, now_ns))

    # What the clock and the owner want.

    def _tick(self) -> None:
        """Every few seconds: is the node there, which libraries are there, is anything left to be done?"""
        self._ticked_ns = time.monotonic_ns()
        self._next_tick_ns = self._ticked_ns + self._settings.rebind_ns
        self._control.look_for_node()
        self._rebinder.rebind()
        self._judging.try_again()
        self._settle()
        self._publish()
        say_left_out()
        self._manager.on_deadline()
        gc.collect()  # here, where no floor waits for it

    def _settle(self) -> None:
        """Raise, or give back, what could not be when it was due: the node refused, or another program had set it."""
        claimant = self._claimant()
        if claimant is not None and not self._control.raised_hz:
            self._control.raise_for(claimant)
        elif self._control.raised_hz and (claimant is None or self._control.is_up_elsewhere):
            self._control.give_back("idle" if claimant is None else "another GPU node")
            if claimant is not None and not self._control.raised_hz:
                self._control.raise_for(claimant)

    def _claimant(self) -> Known | None:
        """The process on whose behalf the floor is up."""
        return next((self._tracker.known[process.tgid] for process in self._state.claims), None)

    def _reload(self) -> None:
        """Apply an edited configuration; a bad one changes nothing."""
        began_at_seconds = time.monotonic()
        try:
            settings = self._read_settings()
        except StabilizerError as error:
            self._last_reload = Reload(began_at_seconds, error.message, error.hint)
            self._troubles.begin("settings", f"the old settings stay: {error}", logging.ERROR)
            self._note_change()
            return
        self._troubles.end("settings", "the settings are right again")
        self._settings = settings
        set_log_level(settings.log_level)
        self._probe.configure(settings.hold_ns // WAKES_PER_HOLD, settings.min_turns)
        self._feed(policy.HoldChanged(settings.hold_ns))
        self._judging.use(settings)
        self._control.apply(settings, self._claimant())
        self._rebinder.use(settings)
        self._reload_began_at_seconds = began_at_seconds
        self._end_reload()

    def _end_reload(self) -> None:
        """The settings are in force when all that was known is judged by them."""
        if self._reload_began_at_seconds is None or self._judging.is_reviewing:
            return
        self._last_reload = Reload(self._reload_began_at_seconds)
        self._reload_began_at_seconds = None
        self._tick()
        told = fields("reload", NODE=self._control.node)
        logger.info("settings read again: %s", self._publisher.describe(self._settings), extra=told)

    def _note_change(self) -> None:
        self._publisher.note_change()

    def _publish(self) -> None:
        self._publisher.publish(self._settings, self._state.claims, self._last_reload)


def is_due(deadline_ns: int | None) -> bool:
    return deadline_ns is not None and deadline_ns <= time.monotonic_ns()
