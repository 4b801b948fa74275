"""The running processes, and which files of llama.cpp each uses: looked at when new, and now and then after that."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .files import FileId, Place, Version
from .mappings import files_used_by
from .mounts import Mounts
from .patience import NOBODY, KeptWaitingError, Patience
from .processes import PROC, ProcessVanishedError, every_pid_and_inode, read_proc, user_id_of
from .shares import share_of

# A process may load the library long after its start (a Python program that imports a binding). It is asked how much
# it maps when it is new, again whenever the time it is known for has doubled, and at last every 15 to 30 seconds.
FIRST_REVISIT_NS = 1_000_000_000
LAST_REVISIT_NS = 30_000_000_000
NEVER_NS = 1 << 62

# One that maps as much as it did has mapped nothing since. To ask for that costs a tenth of a look at what it maps. It
# may also have let go of just as much, so every sixteenth time it is looked at all the same.
MOST_PASSED_OVER = 15

# Looks at processes that are no longer young wait for company, or until there are so many of them, but no longer than
# this: each round of looks hands over to another thread and back, which are two wake-ups.
MANY_WAITING = 16
LONGEST_WAIT_NS = 25_000_000_000

# What is remembered of one user's processes: a file of a process takes about 1 KB. A thousand llama-servers have five
# each. The files of processes beyond that are not looked at.
MOST_USES_OF_A_USER = 16_384


@dataclass
class Visit:
    """When to look at a running process next, and which files it uses."""

    inode: int  # of its directory in /proc, which is another one when the pid is used again
    known_since_ns: int
    next_ns: int
    uses: dict[Version, Place] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # files that may not be touched, with the kind of their place
    readable: bool = True
    share: int = 0
    mapped_pages: int | None = None  # before it was looked at; None: to be looked at in any case
    passed_over: int = 0  # times in a row


@dataclass
class Round:
    """Some visits, in a thread: those that have begun, the last of which may be kept waiting."""

    begun: list[int]
    is_over: bool = False


class Visits:
    """Looks at processes, and remembers what each uses while it runs."""

    def __init__(self, mounts: Mounts, proc: Path = PROC) -> None:
        self.by_pid: dict[int, Visit] = {}
        self._mounts = mounts
        self._proc = proc
        self._remembered: Counter[int] = Counter()
        self._callers: set[int] = set()
        self._waiting: dict[int, int] = {}  # since when those whose look waits for company do so
        self._patience = Patience()

    def update(self, now_ns: int) -> None:
        """Look at the processes that are new, and at those whose turn it is."""
        alive = every_pid_and_inode(self._proc)
        self.by_pid = {pid: visit for pid, visit in self.by_pid.items() if alive.get(pid) == visit.inode}
        self._callers &= alive.keys()
        self._remembered = Counter()
        for visit in self.by_pid.values():
            self._remembered[visit.share] += len(visit.uses) + len(visit.refused)
        due: list[int] = []
        for pid, inode in alive.items():
            visit = self.by_pid.setdefault(pid, Visit(inode, now_ns, now_ns))
            if visit.next_ns <= now_ns and self._is_due(pid, visit, now_ns):
                due.append(pid)
        due += self._end_waiting(now_ns, set(due))
        while due:
            due = self._round(due)

    def _is_due(self, pid: int, visit: Visit, now_ns: int) -> bool:
        """Is it to be looked at now? Plans when to ask again. Nothing that is asked here keeps us waiting."""
        asked_for = not visit.next_ns
        wait_ns = min(max(now_ns - visit.known_since_ns, FIRST_REVISIT_NS), LAST_REVISIT_NS)
        # Spread by pid, or all that was there at the start would be visited in the same tick for ever.
        visit.next_ns = now_ns + wait_ns - wait_ns // 2 * (pid % 64) // 64
        may_have_mapped = self._may_have_mapped(pid, visit)
        is_young = wait_ns < LAST_REVISIT_NS
        if may_have_mapped and not asked_for and not is_young:
            self._waiting.setdefault(pid, now_ns)
        return (asked_for or (may_have_mapped and is_young)) and self._may_look(pid, visit)

    def _end_waiting(self, now_ns: int, due: set[int]) -> list[int]:
        """Which looks that wait for company are now due, too?"""
        waiting = {pid: since_ns for pid, since_ns in self._waiting.items() if pid in self.by_pid and pid not in due}
        is_long = any(since_ns + LONGEST_WAIT_NS <= now_ns for since_ns in waiting.values())
        if not due and not is_long and len(waiting) < MANY_WAITING:
            self._waiting = waiting
            return []
        self._waiting = {}
        return [pid for pid in waiting if self._may_look(pid, self.by_pid[pid])]

    def _may_look(self, pid: int, visit: Visit) -> bool:
        """Not where its user has kept us waiting too often."""
        with contextlib.suppress(ProcessVanishedError, OSError):  # one that ends just now is no matter
            visit.share = share_of(user_id_of(pid, self._proc))
            if not self._patience.is_out(visit.share):
                return True
        visit.mapped_pages = None
        return False

    def _round(self, due: list[int]) -> list[int]:
        """Look at these, until one of them keeps us waiting; return those that are then left."""
        this_round = Round([])

        def culprit() -> int:
            return self.by_pid[this_round.begun[-1]].share if this_round.begun else NOBODY

        try:
            self._patience.call(
                lambda: self._visit_all(due, this_round), progress=lambda: len(this_round.begun), share=culprit
            )
        except KeptWaitingError:
            this_round.is_over = True
            left = due[len(this_round.begun) :]
            for pid in left:  # not to be passed over next time
                self.by_pid[pid].mapped_pages = None
            # Where none has begun, the machine is too busy to look at any.
            return [pid for pid in left if self.by_pid[pid].share != culprit()] if this_round.begun else []
        return []

    def _visit_all(self, due: list[int], this_round: Round) -> None:
        for pid in due:
            if this_round.is_over:
                return
            this_round.begun.append(pid)
            self._visit(pid, self.by_pid[pid])

    def soon(self, pid: int) -> None:
        """This process calls into a library: look at it at the next update. It may be new."""
        self._callers.add(pid)
        if pid in self.by_pid:
            self.by_pid[pid].next_ns = 0

    def of_file_soon(self, file: FileId) -> None:
        """The file's content may have changed: look at those who use it at the next update."""
        for visit in self.by_pid.values():
            if any(version.file == file for version in visit.uses):
                visit.next_ns = 0

    def used(self) -> dict[Version, Place]:
        """All files that are in use."""
        uses: dict[Version, Place] = {}
        for visit in self.by_pid.values():
            uses.update(visit.uses)
        return uses

    def called(self) -> set[FileId]:
        """The files whose processes have called."""
        return {version.file for pid in self._callers & self.by_pid.keys() for version in self.by_pid[pid].uses}

    def refused(self) -> dict[str, str]:
        """The files in use that may not be touched, with the kind of their place."""
        refused: dict[str, str] = {}
        for visit in self.by_pid.values():
            refused.update(visit.refused)
        return refused

    def _visit(self, pid: int, visit: Visit) -> None:
        try:
            self._look(self._proc / str(pid), visit)
        except FileNotFoundError:  # it is ending, and has let go of its memory
            visit.next_ns = NEVER_NS
        except ProcessVanishedError:
            visit.mapped_pages = None
        except PermissionError:  # another user's, without root; also tomorrow
            visit.readable = False
        except OSError:  # we are out of descriptors, say
            visit.mapped_pages = None
            visit.readable = False

    def _may_have_mapped(self, pid: int, visit: Visit) -> bool:
        """Does it map more or less than when it was looked at, or is it the sixteenth time that we ask?"""
        before = visit.mapped_pages
        try:
            visit.mapped_pages = mapped_pages_of(self._proc / str(pid))
        except (ProcessVanishedError, OSError, ValueError):
            return True
        if not visit.mapped_pages:  # a thread of the kernel's, or a process that has ended and is not waited for
            visit.next_ns = NEVER_NS
            return False
        if before is None:  # so that not all that are there at the start have their sixteenth time together
            visit.passed_over = pid % (MOST_PASSED_OVER + 1)
        elif visit.mapped_pages == before and visit.passed_over < MOST_PASSED_OVER:
            visit.passed_over += 1
            return False
        else:
            visit.passed_over = 0
        return True

    def _look(self, directory: Path, visit: Visit) -> None:
        before = len(visit.uses) + len(visit.refused)
        room = MOST_USES_OF_A_USER - self._remembered[visit.share] + before
        if room <= 0:
            visit.mapped_pages = None  # perhaps there is room next time
            return
        refused: dict[str, str] = {}
        uses = dict(files_used_by(directory, self._mounts, refused.__setitem__))
        self._remembered[visit.share] += len(uses) + len(refused) - before
        visit.uses, visit.refused = uses, refused


def mapped_pages_of(directory: Path) -> int:
    """How much a process maps, in pages, without what it may write to for itself, such as its heap and stacks.

    None of it: 0. Asks for no lock of the process. Raises ProcessVanishedError, OSError, and ValueError where it is
    just ending.
    """
    size, _resident, _shared, _text, _library, data, *_ = read_proc(directory / "statm").split()  # proc(5)
    return int(size) - int(data)
