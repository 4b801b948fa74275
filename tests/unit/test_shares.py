"""Who comes first where there are more files than can be served."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moe_gpu_stabilizer.shares import in_turns, share_of


def served(*items: tuple[str, int]) -> list[tuple[str, int]]:
    """Items of an owner, with a rank."""
    return in_turns(items, owner=lambda item: item[0], rank=lambda item: item[1])


def test_each_owner_has_a_turn_after_the_other() -> None:
    assert served(("a", 1), ("a", 2), ("a", 3), ("b", 9)) == [("a", 1), ("b", 9), ("a", 2), ("a", 3)]


def test_an_owners_own_are_served_by_rank() -> None:
    assert served(("a", 3), ("a", 1), ("a", 2)) == [("a", 1), ("a", 2), ("a", 3)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5))), st.integers(0, 50))
def test_nothing_is_lost_and_nobody_is_served_twice_before_others_once(
    items: list[tuple[str, int]], swarm: int
) -> None:
    order = served(*items, *[("swarm", 0)] * swarm)
    assert sorted(order) == sorted([*items, *[("swarm", 0)] * swarm])
    for owner in "abc":
        ordinals = [place for place, item in enumerate(order) if item[0] == owner]
        # Before its nth each of the four owners has had at most n.
        assert all(place <= 4 * (turn + 1) for turn, place in enumerate(ordinals))


def test_users_of_their_own_have_shares_of_their_own() -> None:
    assert len({share_of(user_id) for user_id in (0, 1, 1000, 1001, 65534)}) == 5


def test_a_users_subordinate_ids_are_two_users_at_most() -> None:
    """/etc/subuid gives 65,536 in one row, often 100000 to 165535: each with a share would crowd out everyone."""
    assert len({share_of(user_id) for user_id in range(100_000, 165_536)}) <= 2
