"""All checks of the first boot, in the order in which they are run."""

from __future__ import annotations

from tests.board.guest import clock, governor, lifecycle, raising, rivals

CHECKS = [*raising.CHECKS, *clock.CHECKS, *rivals.CHECKS, *governor.CHECKS, *lifecycle.CHECKS]
