"""Runs the checks on the board and writes what came of each to the share, where the host's tests look it up.

After those of the first boot it reboots; those of after_reboot.py come then, and then the board is switched off.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import traceback
from pathlib import Path

from tests.board.guest import after_reboot, checks
from tests.board.guest.board import Board, run
from tests.board.guest.registry import Check

SHARE = Path("/mnt/host")
BOOTED = Path("/var/lib/board-booted")


def perform(check: Check, board: Board) -> None:
    """Run one, from a neutral state, and note its outcome."""
    begun = time.monotonic()
    outcome, details = "passed", ""
    try:
        if check.from_neutral:
            board.neutral()
        check.function(board)
    except Exception:  # of whatever kind: it is shown on the host
        outcome = "failed"
        journal = "\n".join(board.service.journal("short-monotonic"))
        details = f"{traceback.format_exc()}\n--- the node: {board.gpu.state()}\n--- journal\n{journal}"
    seconds = round(time.monotonic() - begun, 1)
    print(f"{outcome}: {check.name} ({seconds} s)", flush=True)
    with (SHARE / "results.jsonl").open("a") as results:
        results.write(
            json.dumps({"name": check.name, "outcome": outcome, "seconds": seconds, "details": details}) + "\n"
        )


def main() -> None:
    board = Board()
    wanted = (SHARE / "wanted").read_text().split()
    is_first = not BOOTED.exists()
    BOOTED.touch()
    for check in checks.CHECKS if is_first else after_reboot.CHECKS:
        if check.name in wanted or check.always:
            perform(check, board)
    (SHARE / "journal").write_text(run("journalctl", "--no-pager", "--output=short-monotonic"))
    os.sync()
    if is_first and any(check.name in wanted for check in after_reboot.CHECKS):
        try:
            after_reboot.leave(board)
        finally:  # where that has failed, the check after the reboot tells
            subprocess.run(["systemctl", "reboot"], check=True)
    else:
        subprocess.run(["systemctl", "poweroff"], check=True)


if __name__ == "__main__":
    main()
