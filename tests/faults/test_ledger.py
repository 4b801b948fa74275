"""The table itself: it must not hide a broken promise."""

from __future__ import annotations

from tests.faults.ledger import Ledger


def test_tries_are_counted_by_fault_and_a_broken_promise_is_marked() -> None:
    ledger = Ledger()
    ledger.kept("killed")
    ledger.kept("killed")
    ledger.note("frozen", survived=True, given_back=False, target_alive=True)
    head, killed, frozen = ledger.lines()
    assert head.split() == ["fault", "tries", "survived", "given", "back", "target", "alive"]
    assert killed.split() == ["killed", "2", "2", "2", "2"]
    assert frozen.split() == ["frozen", "1", "1", "0", "1", "BROKEN"]


def test_a_run_that_tried_nothing_has_no_table() -> None:
    assert list(Ledger().lines()) == []
