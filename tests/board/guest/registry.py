"""A list of checks, which the host's tests read, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.board.guest.board import Board


@dataclass(frozen=True)
class Check:
    name: str
    function: Callable[[Board], None]
    from_neutral: bool  # does the runner bring the board into its neutral state first?
    always: bool  # is it run also where only others are asked for?


class Checks(list[Check]):
    """In the order in which they are run. Used as a decorator."""

    def __call__(
        self, from_neutral: bool = True, always: bool = False
    ) -> Callable[[Callable[[Board], None]], Callable[[Board], None]]:
        def note(function: Callable[[Board], None]) -> Callable[[Board], None]:
            self.append(Check(function.__name__, function, from_neutral, always))
            return function

        return note
