"""PURE: whose files come first where there are more than can be watched, read or remembered.

Any user may make ten thousand copies of a library. They cost that user's own share, nobody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from enum import IntEnum
from typing import Any, TypeVar

# Every user may own 65,536 other user ids (subuid(5)), in one row. They count as one user, or each would have a share.
FIRST_SUBORDINATE_ID = 65_536

T = TypeVar("T")


class Standing(IntEnum):
    """How a file came to be looked at; the lower comes first."""

    CONFIGURED = 0
    USUAL = 1  # root has put it in a usual place
    USED = 2


def share_of(user_id: int) -> int:
    """Return what stands for this user and for all the ids that belong to them; unequal for users of their own."""
    return user_id if user_id < FIRST_SUBORDINATE_ID else -(user_id // FIRST_SUBORDINATE_ID)


def in_turns(items: Iterable[T], owner: Callable[[T], Hashable], rank: Callable[[T], Any]) -> list[T]:
    """Return the items in the order in which they are served: each owner's first, then each owner's second, and so on.

    An owner's own are in the order of `rank`, the lower first, and so are those that have the same turn.
    """
    served: dict[Hashable, int] = {}
    turns: list[tuple[int, T]] = []
    for item in sorted(items, key=rank):
        turn = served[owner(item)] = served.get(owner(item), 0) + 1
        turns.append((turn, item))
    return [item for _, item in sorted(turns, key=lambda pair: pair[0])]
