"""The yardstick's second half: reads what bpftrace prints, a line per hit, and raises a file while calls come.

    python -m benchmarks.reader LIBRARY MIN_FREQ_FILE HOLD_SECONDS FLAG

What one would write in an afternoon: entry and return probes with bpftrace, whose parent this is.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

FUNCTIONS = ("llama_decode", "llama_process", "llama_synchronize")
HIGHEST_HZ = 1_020_000_000
LOOKS_PER_HOLD_MS = 250  # four in each hold
CHUNK_BYTES = 65536


def script(library: str) -> str:
    """A "+" with process and thread for each entry, a "-" for each return."""
    entries = ", ".join(f"uprobe:{library}:{function}" for function in FUNCTIONS)
    returns = ", ".join(f"uretprobe:{library}:{function}" for function in FUNCTIONS)
    return f'{entries} {{ printf("+ %d %d\\n", pid, tid) }} {returns} {{ printf("- %d %d\\n", pid, tid) }}'


def counts(pid: str, flag: str, known: dict[str, bool]) -> bool:
    """Was it launched with the flag? Each process is asked once."""
    if pid not in known:
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                known[pid] = flag in file.read().split("\0")
        except OSError:
            known[pid] = False
    return known[pid]


class MinFreq:
    """The file that is raised, and what was there before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: str | None = None

    @property
    def raised(self) -> bool:
        return self._before is not None

    def raise_it(self) -> None:
        self._before = self._path.read_text()
        self._path.write_text(f"{HIGHEST_HZ}\n")

    def give_back(self) -> None:
        self._path.write_text(self._before or "")
        self._before = None


def follow(tracer: subprocess.Popen[bytes], min_freq: MinFreq, hold_seconds: float, flag: str) -> None:
    """Raise while a call of a process that counts is in progress, and for `hold_seconds` after; until it ends."""
    assert tracer.stdout is not None
    output = tracer.stdout.fileno()
    known: dict[str, bool] = {}
    in_flight: set[str] = set()
    last_call, rest = 0.0, b""
    poller = select.poll()
    poller.register(output, select.POLLIN)
    while True:
        if poller.poll(hold_seconds * LOOKS_PER_HOLD_MS if min_freq.raised else None):
            chunk = os.read(output, CHUNK_BYTES)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                words = line.decode().split()
                if len(words) != 3 or not counts(words[1], flag, known):
                    continue
                (in_flight.add if words[0] == "+" else in_flight.discard)(words[2])
                last_call = time.monotonic()
                if not min_freq.raised:
                    min_freq.raise_it()
        if min_freq.raised and not in_flight and time.monotonic() - last_call >= hold_seconds:
            min_freq.give_back()


def main() -> None:
    library, path, hold_seconds, flag = sys.argv[1:]
    command = ["bpftrace", "-e", script(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tracer:
        signal.signal(signal.SIGTERM, lambda *_: tracer.send_signal(signal.SIGINT))
        follow(tracer, MinFreq(Path(path)), float(hold_seconds), flag)


if __name__ == "__main__":
    main()
