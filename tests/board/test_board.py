"""On an arm64 board with the kernel's own devfreq, systemd and uprobes: emulated, as no real one is at hand.

The checks run on the board, all in one boot and the few after its reboot (guest/); each is a test here.
"""

from __future__ import annotations

import pytest

from tests.board.guest import after_reboot, checks
from tests.board.machine import Machine

# The first one makes the disk, too, and boots.
pytestmark = pytest.mark.timeout(2400)


@pytest.mark.parametrize("check", [check.name for check in (*checks.CHECKS, *after_reboot.CHECKS)])
def test_on_the_board(machine: Machine, check: str) -> None:
    result = machine.results.get(check)
    assert result is not None, f"the board has said nothing of {check}\n{machine.console}"
    assert result.outcome == "passed", f"{check}, on the board, after {result.seconds} s:\n{result.details}"
