"""Whose turn it is to be judged. Pure: first come, first served, but nobody waits for those who keep us waiting."""

from __future__ import annotations

from collections.abc import Callable, Collection


class FairQueue:
    """The processes that wait to be judged.

    A user whose process has kept a reader waiting is slow from then on. All slow users' processes together get one
    reader at a time: the others' turn comes as if they were not there.
    """

    def __init__(self) -> None:
        # When it called, by tgid; of the second it is known that their users are slow.
        self._waiting: dict[int, int | None] = {}
        self._behind: dict[int, int | None] = {}
        self._slow_users: set[int] = set()

    def add(self, tgid: int, called_ns: int | None) -> None:
        """Wait for one's turn, unless one waits already. `called_ns` is given back then."""
        if tgid not in self._behind:
            self._waiting.setdefault(tgid, called_ns)

    def discard(self, tgid: int) -> None:
        """Wait no longer."""
        self._waiting.pop(tgid, None)
        self._behind.pop(tgid, None)

    def note_slow(self, user_id: int) -> None:
        """A process of this user has kept a reader waiting."""
        self._slow_users.add(user_id)

    def take(self, user_of: Callable[[int], int | None], served: Collection[int]) -> tuple[int, int | None] | None:
        """Take out whose turn it is, and when it called; None where there is nobody.

        `user_of` a tgid is asked when its turn comes; `served` are the users whose processes are being read.
        """
        while self._waiting:
            tgid = next(iter(self._waiting))
            called_ns = self._waiting.pop(tgid)
            if user_of(tgid) not in self._slow_users:
                return tgid, called_ns
            self._behind[tgid] = called_ns
        if self._behind and self._slow_users.isdisjoint(served):
            tgid = next(iter(self._behind))
            return tgid, self._behind.pop(tgid)
        return None
