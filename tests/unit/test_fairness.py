"""Whose turn it is: a user who keeps the readers waiting waits behind all others."""

from __future__ import annotations

from moe_gpu_stabilizer.fairness import FairQueue

OWNER, STRANGER = 1000, 1001


def queue_of(*tgids: int) -> FairQueue:
    queue = FairQueue()
    for tgid in tgids:
        queue.add(tgid, tgid * 10)
    return queue


def user_of(tgid: int) -> int | None:
    """Of small numbers is the owner."""
    return OWNER if tgid < 100 else STRANGER


def test_first_come_first_served_and_the_time_of_the_call_is_kept() -> None:
    queue = queue_of(3, 101, 2)
    assert [queue.take(user_of, ()) for _ in range(4)] == [(3, 30), (101, 1010), (2, 20), None]


def test_a_process_waits_once_with_its_first_call() -> None:
    queue = queue_of(3)
    queue.add(3, 99)
    assert [queue.take(user_of, ()), queue.take(user_of, ())] == [(3, 30), None]


def test_who_has_ended_waits_no_longer() -> None:
    queue = queue_of(3, 101)
    queue.discard(3)
    queue.discard(4)
    assert queue.take(user_of, ()) == (101, 1010)


def test_a_slow_users_processes_come_last_and_one_at_a_time() -> None:
    queue = queue_of(101, 102, 3)
    queue.note_slow(STRANGER)
    assert queue.take(user_of, ()) == (3, 30)
    assert queue.take(user_of, {STRANGER}) is None, "one of them is being read"
    queue.add(4, 40)
    queue.add(101, 0)
    assert queue.take(user_of, {STRANGER}) == (4, 40)
    assert queue.take(user_of, {OWNER}) == (101, 1010)
    queue.discard(102)
    assert queue.take(user_of, ()) is None


def test_who_has_vanished_is_nobodys_and_gets_its_turn() -> None:
    queue = queue_of(101)
    queue.note_slow(STRANGER)
    assert queue.take(lambda _tgid: None, {STRANGER}) == (101, 1010)
