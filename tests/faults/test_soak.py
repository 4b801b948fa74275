"""Everything at once for a minute, at the end of which all is as it was; for ten minutes with STABILIZER_FAULTS=full.

Random load, processes that are killed, libraries replaced by rename and rewritten in place, settings read again, the
daemon restarted; and another program that sets min_freq and max_freq, whose last value is what stays in the end.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.ledger import Ledger
from tests.faults.load import FULL, QUIET_THREADS, Load, seeded
from tests.kernel.conftest import Llama
from tests.support import HIGHEST_HZ, LOWEST_HZ, PlainNode, RunningDaemon, wait_until
from tests.workload import Workload

SOAK_SECONDS = 600 if FULL else 60
RIVAL_HZ = (306_000_000, 408_000_000, 510_000_000)
EVENTS = Path("/sys/kernel/tracing/uprobe_events")

# Fragments of the heap and of the files' names that it has seen.
MORE_MEMORY_KB = 3000


class Holdings:
    """What a daemon holds: in the kernel all of it hangs on its descriptors."""

    def __init__(self, pid: int) -> None:
        links = []
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            try:
                links.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
            except FileNotFoundError:
                continue
        self.descriptors = len(links)
        self.probes = links.count("anon_inode:[perf_event]")
        self.maps = links.count("anon_inode:bpf-map")
        self.programs = links.count("anon_inode:bpf-prog")
        self.threads = len(os.listdir(f"/proc/{pid}/task"))
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        self.pss_kb = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))

    @property
    def counts(self) -> tuple[int, ...]:
        return self.descriptors, self.probes, self.maps, self.programs, self.threads


def uprobe_events() -> str:
    return EVENTS.read_text() if EVENTS.exists() else ""


def test_soak(
    start_daemon: Callable[..., RunningDaemon],
    llama: Llama,
    node: PlainNode,
    flag: str,
    ledger: Ledger,
    request: pytest.FixtureRequest,
) -> None:
    chance = seeded(request)
    settings = {"libraries": llama.library, "hold_seconds": 0.3, "rebind_seconds": 0.5}
    events = uprobe_events()
    daemon = start_daemon(**settings)
    warm_up(llama, node, flag)
    wait_until(lambda: Holdings(daemon.pid).threads == QUIET_THREADS, "quiet", 60)
    at_first = Holdings(daemon.pid)
    last_rival_hz = LOWEST_HZ
    load = Load(chance, llama.program, llama.library, flag)
    ends_at = time.monotonic() + SOAK_SECONDS
    try:
        while time.monotonic() < ends_at:
            for _ in range(chance.randrange(5, 60)):
                load.step()
            happening = chance.choice(("swap", "rewrite", "reload", "stop", "kill", "rival", "end"))
            if happening == "swap":
                load.swap_library()
            elif happening == "rewrite":
                load.end()  # whoever has mapped a file that is rewritten would run into the new code
                content = llama.library.read_bytes()
                llama.library.write_bytes(content)
            elif happening == "reload":
                daemon.send(signal.SIGHUP)
            elif happening in ("stop", "kill"):
                if happening == "stop":
                    daemon.stop()
                else:
                    daemon.stop(signal.SIGKILL)
                load.rest()
                daemon.start()
            elif happening == "rival":
                if chance.random() < 0.5:
                    load.end()  # else whatever the floor is just then
                last_rival_hz = chance.choice(RIVAL_HZ)
                node.write("max_freq", chance.choice((816_000_000, HIGHEST_HZ)))
                node.write("min_freq", last_rival_hz)
                node.write("max_freq", HIGHEST_HZ)
            else:
                load.end()
        load.rest()
    finally:
        load.end()
    wait_until(lambda: node.min_hz == last_rival_hz, f"{last_rival_hz}, which the last rival has set")
    warm_up(llama, node, flag)
    assert node.min_hz == last_rival_hz
    wait_until(lambda: Holdings(daemon.pid).counts == at_first.counts, f"all as it was: {at_first.counts}", 60)
    assert Holdings(daemon.pid).pss_kb < at_first.pss_kb + MORE_MEMORY_KB
    assert uprobe_events() == events
    assert (node.directory / "max_freq").read_text() == f"{HIGHEST_HZ}\n"
    assert daemon.stop() == 0
    ledger.kept(f"a soak of {SOAK_SECONDS} s")


def warm_up(llama: Llama, node: PlainNode, flag: str) -> None:
    """One floor up and down again, so that all is loaded that a run needs."""
    with Workload(llama.program, flag) as workload:
        # A minute later where the rivals have happened to win.
        wait_until(lambda: workload.do("call 1") and node.min_hz == HIGHEST_HZ, "the floor up", 90)
        wait_until(lambda: node.min_hz != HIGHEST_HZ, "the floor given back", 30)
