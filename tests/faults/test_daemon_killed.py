"""The daemon is killed at random moments, under a random load: the clock comes back, and the next start works.

25 times; 200 times with STABILIZER_FAULTS=full ./install.sh --test tests/faults
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.faults.ledger import Ledger
from tests.faults.load import FULL, Load, seeded
from tests.kernel.conftest import Llama
from tests.support import HIGHEST_HZ, LOWEST_HZ, PlainNode, RunningDaemon, wait_until
from tests.workload import Workload

KILLS = 200 if FULL else 25
LONGEST_LIFE_SECONDS = 0.7


def test_killed_at_random_moments_under_load(
    start_daemon: Callable[..., RunningDaemon],
    llama: Llama,
    node: PlainNode,
    flag: str,
    ledger: Ledger,
    request: pytest.FixtureRequest,
) -> None:
    """Also in the middle of its start and of a stop. What follows is `--restore`, as under systemd, or a start."""
    chance = seeded(request)
    load = Load(chance, llama.program, llama.library, flag)
    daemon = start_daemon(libraries=llama.library, hold_seconds=0.3, rebind_seconds=0.3)
    try:
        for number in range(KILLS):
            dies_at = time.monotonic() + chance.uniform(0, LONGEST_LIFE_SECONDS)
            while time.monotonic() < dies_at:
                load.step()
            if chance.random() < 0.1:
                load.swap_library()
            if chance.random() < 0.1:
                daemon.send(signal.SIGTERM)
            daemon.stop(signal.SIGKILL)
            load.rest()
            if chance.random() < 0.5:
                assert daemon.command("--restore").returncode == 0
                assert node.min_hz == LOWEST_HZ, f"kill {number}: --restore gives back"
                assert daemon.command("--restore").stdout == "nothing to give back\n"
            if chance.random() < 0.2:  # the next one is killed on its way up
                killed_young(daemon, chance.uniform(0, 0.3))
            daemon.start()
            with Workload(llama.program, flag) as workload:
                workload.do("call 1")
                wait_until(lambda: node.min_hz == HIGHEST_HZ, f"kill {number}: the next start works\n{daemon.log}")
            ledger.kept("kill -9 at a random moment under load")
        load.rest()
        wait_until(lambda: node.min_hz == LOWEST_HZ, "the floor given back")
    finally:
        load.end()
    left = set(os.listdir(daemon.runtime))
    assert left - {"raised.json.new"} == {"lock", "status.json"}, "nothing is left to be given back"


def killed_young(daemon: RunningDaemon, seconds: float) -> None:
    """Start the daemon, and kill it before it can be ready."""
    daemon.spawn()
    born = time.monotonic()
    wait_until(lambda: time.monotonic() > born + seconds, "its time")
    daemon.stop(signal.SIGKILL)
