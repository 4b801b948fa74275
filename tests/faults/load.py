"""A random load on a daemon, the same for the same seed: processes that start, call, compute, and are killed."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.workload import Workload, build_library

# A daemon at rest has its own, one that looks at processes, and one that sets probes (patience.py).
QUIET_THREADS = 3

FULL = os.environ.get("STABILIZER_FAULTS") == "full"


def seeded(request: pytest.FixtureRequest) -> random.Random:
    """A source of chance whose seed is printed, and can be given in STABILIZER_SEED."""
    seed = int(os.environ.get("STABILIZER_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"STABILIZER_SEED={seed} for {request.node.name}")
    return random.Random(seed)


class Load:
    """A few processes, of which each step starts, drives or kills one. Those it has not killed itself must be alive."""

    def __init__(self, chance: random.Random, program: Path, library: Path, flag: str, most: int = 4) -> None:
        self._chance = chance
        self._program = program
        self._library = library
        self._flag = flag
        self._most = most
        self._running: list[Workload] = []
        self._busy: set[int] = set()

    def step(self) -> None:
        """Do one thing. Waits for nothing but the start of a process."""
        if len(self._running) < self._most and self._chance.random() < 0.5:
            flags = [self._flag] if self._chance.random() < 0.7 else []
            self._running.append(Workload(self._program, *flags))
            return
        if not self._running:
            return
        workload = self._chance.choice(self._running)
        assert workload.process.poll() is None, "a traced program ended"
        if self._chance.random() < 0.15:
            self._running.remove(workload)
            workload.__exit__(None, None, None)
            return
        command = self._chance.choice(("call 1", "call 500", "busy 200", "sleep 100", "threads 4 20", "decode 10"))
        if workload.pid in self._busy:
            assert workload.finish() == "done"
        workload.begin(command)
        self._busy.add(workload.pid)

    def swap_library(self) -> None:
        """Replace the library, as a linker does: by another file under its name."""
        build_library(self._library)

    def rest(self) -> None:
        """Wait until all have done what they were told to, and see that they are alive."""
        for workload in self._running:
            if workload.pid in self._busy:
                assert workload.finish() == "done"
                self._busy.discard(workload.pid)
            assert workload.process.poll() is None, "a traced program ended"

    def end(self) -> None:
        for workload in self._running:
            workload.__exit__(None, None, None)
        self._running.clear()
        self._busy.clear()
