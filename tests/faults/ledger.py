"""The table at the end of a run: which faults were tried, how often, and what became of the three promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Tries:
    """How often one fault was tried, and how often each promise was kept."""

    tried: int = 0
    survived: int = 0
    given_back: int = 0
    target_alive: int = 0

    @property
    def all_kept(self) -> bool:
        return self.tried == self.survived == self.given_back == self.target_alive


@dataclass
class Ledger:
    """Counts tries by fault. A test notes each try, and asserts by itself what it has to."""

    tries: dict[str, Tries] = field(default_factory=dict)

    def note(self, fault: str, *, survived: bool, given_back: bool, target_alive: bool) -> None:
        """One try of `fault`.

        `survived`: the daemon ran on, or the next one started and worked. `given_back`: no clock stayed raised.
        `target_alive`: the traced program ran on unharmed (True where the fault is its end).
        """
        tries = self.tries.setdefault(fault, Tries())
        tries.tried += 1
        tries.survived += survived
        tries.given_back += given_back
        tries.target_alive += target_alive

    def kept(self, fault: str) -> None:
        """One try of `fault` after which a test has found all three promises kept."""
        self.note(fault, survived=True, given_back=True, target_alive=True)

    def lines(self) -> Iterator[str]:
        """The table, in plain text; a fault whose promise was broken is marked."""
        if not self.tries:
            return
        width = max(len("fault"), *map(len, self.tries))
        yield f"{'fault':<{width}}  tries  survived  given back  target alive"
        for fault, tries in self.tries.items():
            counts = f"{tries.tried:>5}  {tries.survived:>8}  {tries.given_back:>10}  {tries.target_alive:>12}"
            yield f"{fault:<{width}}  {counts}{'' if tries.all_kept else '  BROKEN'}"
