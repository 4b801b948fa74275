"""Other programs that set the node's limits: what they write is theirs, whenever they write it.

Tried here, each with another process that writes: a value of its own while the floor is down and while it is up; the
very value of the floor, as jetson_clocks does; max_freq lowered and raised under the floor; a change of power mode in
nvpmodel's order; a program that never stops setting its value; random values at random moments; a kernel that tells
nothing (fanotify refused); min_freq at max_freq before us.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults import deny
from tests.faults.ledger import Ledger
from tests.faults.load import FULL, seeded
from tests.faults.rival import Rival
from tests.kernel.conftest import Llama
from tests.support import HIGHEST_HZ, LADDER_HZ, LOWEST_HZ, PlainNode, RunningDaemon, stays, wait_until
from tests.workload import Workload

Start = Callable[..., RunningDaemon]
Run = Callable[..., Workload]

# Of the random test.
ROUNDS = 200 if FULL else 15

LOW_HZ, MIDDLE_HZ, HIGH_HZ = 408_000_000, 612_000_000, 816_000_000


@pytest.fixture
def rival(tmp_path: Path, node: PlainNode) -> Iterator[Rival]:
    with Rival(tmp_path / "scripts", node.directory) as rival:
        yield rival


def is_up(node: PlainNode, hz: int = HIGHEST_HZ) -> bool:
    return node.min_hz == hz


def call_until_up(workload: Workload, node: PlainNode) -> None:
    """The first calls may fall into the second in which a rival's value is left."""
    wait_until(lambda: workload.do("call 1") and is_up(node), "the floor up")


def one_stretch(workload: Workload, node: PlainNode, baseline_hz: int) -> None:
    """A call; the floor goes up, and what was there is given back."""
    workload.do("call 1")
    wait_until(lambda: is_up(node), "the floor up")
    wait_until(lambda: node.min_hz == baseline_hz, f"{baseline_hz} given back")


def test_what_a_rival_sets_while_the_floor_is_down_is_given_back(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, rival: Rival, ledger: Ledger
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.3)
    rival.write("min_freq", MIDDLE_HZ)
    daemon.wait_for_log(rf"^min_freq set to 612 MHz by nvpmodel \(pid {rival.pid}\)$")
    with run() as workload:
        one_stretch(workload, node, baseline_hz=MIDDLE_HZ)
        one_stretch(workload, node, baseline_hz=MIDDLE_HZ)
    assert daemon.log.count("set to") == 1, "our own writes are nobody else's"
    ledger.kept("rival sets min_freq while it is down")


def test_what_a_rival_sets_while_the_floor_is_up_stays_for_a_moment_and_is_given_back(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, rival: Rival, ledger: Ledger
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.5)
    with run() as workload:
        workload.begin("busy 4000")
        wait_until(lambda: is_up(node), "the floor up")
        rival.write("min_freq", LOW_HZ)
        stays(lambda: is_up(node, LOW_HZ), 0.7, "what they wrote, so that they can read it back")
        daemon.wait_for_log(rf"^min_freq set to 408 MHz by nvpmodel \(pid {rival.pid}\)$")
        wait_until(lambda: is_up(node), "the floor up again, for the call goes on")
        workload.finish()
        wait_until(lambda: is_up(node, LOW_HZ), "their value given back")
        one_stretch(workload, node, baseline_hz=LOW_HZ)
    daemon.wait_for_log(r"^floor 408 MHz \(idle\)$")
    ledger.kept("rival sets min_freq while it is up")


def test_the_floors_own_value_set_by_a_rival_stays(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    """jetson_clocks while we are up: it sets min_freq to the highest frequency, where it is already."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.3, rebind_seconds=0.3)
    with run() as workload, Rival(tmp_path / "scripts", node.directory, "jetson_clocks") as rival:
        workload.begin("busy 2500")
        wait_until(lambda: is_up(node), "the floor up")
        rival.write("min_freq", HIGHEST_HZ)
        daemon.wait_for_log(rf"^min_freq set to 1020 MHz by jetson_clocks \(pid {rival.pid}\)$")
        daemon.wait_for_log(r"^min_freq is already as high as the floor")
        workload.finish()
        stays(lambda: is_up(node), 1.0, "it is theirs")
        assert "(idle)" not in daemon.log

        # Nor does a kill, or a stop, take it from them.
        daemon.stop(9)
        assert daemon.command("--restore").stdout == "nothing to give back\n"
        assert is_up(node)

        # When they put it back, the floor works as ever.
        daemon.start()
        rival.write("min_freq", LOWEST_HZ)
        one_stretch(workload, node, baseline_hz=LOWEST_HZ)
    ledger.kept("rival sets min_freq to the floor's own value")


def test_the_floor_follows_a_max_freq_that_a_rival_lowers_and_raises(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, rival: Rival, ledger: Ledger
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.5)
    with run() as workload:
        workload.begin("busy 3000")
        wait_until(lambda: is_up(node), "the floor up")
        rival.write("max_freq", MIDDLE_HZ)
        wait_until(lambda: is_up(node, MIDDLE_HZ), "never above max_freq")
        rival.write("max_freq", HIGH_HZ)
        wait_until(lambda: is_up(node, HIGH_HZ), "as high as max_freq allows")
        rival.write("max_freq", 204_000_000)
        wait_until(lambda: is_up(node, LOWEST_HZ), "what was there, where max_freq leaves nothing to raise")
        rival.write("max_freq", HIGHEST_HZ)
        workload.finish()
        wait_until(lambda: is_up(node, LOWEST_HZ), "what was there before given back")
        one_stretch(workload, node, baseline_hz=LOWEST_HZ)
    daemon.wait_for_log(rf"^max_freq set to 612 MHz by nvpmodel \(pid {rival.pid}\)$")
    daemon.wait_for_log(r"^floor 612 MHz \(max_freq has changed\)$")
    ledger.kept("rival sets max_freq while the floor is up")


def test_a_change_of_power_mode_leaves_what_it_has_set(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, rival: Rival, ledger: Ledger
) -> None:
    start_daemon(libraries=llama.library, hold_seconds=0.5)
    with run() as workload:
        workload.begin("busy 3000")
        wait_until(lambda: is_up(node), "the floor up")
        rival.write("min_freq", 0)
        rival.write("max_freq", HIGH_HZ)
        rival.write("min_freq", LOW_HZ)
        wait_until(lambda: is_up(node, HIGH_HZ), "the floor up again, at the new max_freq")
        workload.finish()
        wait_until(lambda: is_up(node, LOW_HZ), "the new mode's min_freq")
    assert (node.directory / "max_freq").read_text() == f"{HIGH_HZ}\n"
    ledger.kept("rival changes the power mode while the floor is up")


def test_a_rival_that_never_stops_is_yielded_to(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.5, rebind_seconds=0.3)
    with run() as workload, Rival(tmp_path / "scripts", node.directory, "stubborn") as rival:
        rival.fight_for(LOW_HZ)
        wait_until(lambda: is_up(node, LOW_HZ), "its value")
        workload.begin("busy 8000")
        daemon.wait_for_log(r"^stubborn sets min_freq whenever it is raised")
        stays(lambda: is_up(node, LOW_HZ), 2.5, "its value, although a call is in flight")
        assert daemon.log.count("inference)") == 3, "three rounds"
        assert daemon.log.count("min_freq set to 408 MHz") in (3, 4), "each that undoes a raise, but not the others"
        says = "sets min_freq whenever it is raised"
        wait_until(lambda: says in daemon.command("--status").stdout, "it to be published")
        workload.finish()
    ledger.kept("rival sets min_freq in a loop")


def test_whatever_a_rival_sets_and_when_its_last_value_stays(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, rival: Rival, ledger: Ledger,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Random values, the floor's own among them, at random moments of a workload that calls and rests."""
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.2, rebind_seconds=3600)
    choose = seeded(request)
    with run() as workload:
        for _ in range(ROUNDS):
            if node.min_hz < HIGHEST_HZ:  # undisturbed, so that it is no fight
                call_until_up(workload, node)
                wait_until(lambda: not is_up(node), "given back")
            workload.begin(choose.choice(["call 3", "busy 50", "sleep 50"]))
            for _ in range(choose.randrange(1, 4)):
                value_hz = choose.choice(LADDER_HZ)
                rival.write("min_freq", value_hz)
            workload.finish()
            daemon.wait_until_quiet()
            assert node.min_hz == value_hz, "the last value, when all is quiet"
            ledger.kept("rival sets min_freq at a random moment")


def test_where_the_kernel_tells_nothing_a_rival_is_found_at_the_next_tick(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, rival: Rival, ledger: Ledger
) -> None:
    refused = (sys.executable, deny.__file__, "fanotify_init")
    daemon = start_daemon(prefix=refused, libraries=llama.library, hold_seconds=0.5, rebind_seconds=0.3)
    daemon.wait_for_log(r"^cannot hear of other programs' writes to min_freq: .*Operation not permitted; it is read")
    with run() as workload:
        workload.begin("busy 4000")
        wait_until(lambda: is_up(node), "the floor up")
        rival.write("min_freq", LOW_HZ)
        daemon.wait_for_log(r"^min_freq set to 408 MHz by another program$")
        wait_until(lambda: is_up(node), "the floor up again")
        workload.finish()
        wait_until(lambda: is_up(node, LOW_HZ), "their value given back")
    assert daemon.log.count("cannot hear of other") == 1, "said once"
    ledger.kept("fanotify refused, rival found by reading back")


def test_where_min_freq_is_at_max_freq_nothing_is_written(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """jetson_clocks is on."""
    node.write("min_freq", HIGHEST_HZ)
    written = (node.directory / "min_freq").stat().st_mtime_ns
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.3, rebind_seconds=0.3)
    with run() as workload:
        workload.do("call 1")
        daemon.wait_for_log(r"^min_freq is already as high as the floor: nothing to raise$")
        workload.do("busy 700")
    daemon.stop()
    assert (node.directory / "min_freq").stat().st_mtime_ns == written
    ledger.kept("min_freq at max_freq before us")
