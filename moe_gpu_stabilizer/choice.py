"""Which libraries are probed where there are more than may be."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .files import FileId
from .libraries import Library
from .shares import Standing, in_turns, share_of

# A daemon that is killed keeps its lock, and the clock, until the kernel has taken its probes out, one by one: about
# 100 ms for each of a file's one to five. A build of llama.cpp has three such files, so ten builds fit.
MOST_PROBED_FILES = 32


def choose(found: Mapping[FileId, Library], probed: Collection[FileId]) -> dict[FileId, Library]:
    """Return at most MOST_PROBED_FILES of them, the most important first.

    First what is configured, then what root has put in a usual place, then what is in use. Within each, every owner of
    files has a turn after the other; an owner's own in the order of: its process has called, it is probed already.
    """
    chosen: list[tuple[FileId, Library]] = []
    for standing in Standing:
        group = [item for item in found.items() if item[1].standing == standing]
        chosen += in_turns(
            group,
            owner=lambda item: share_of(item[1].place.owner_id),
            rank=lambda item: (not item[1].called, item[0] not in probed),
        )
    return dict(chosen[:MOST_PROBED_FILES])


def say_left_out(count: int) -> str:
    return (
        f"libraries that are not watched, as there are more than {MOST_PROBED_FILES}: {count}; "
        "name those that must be in STABILIZER_LIBRARIES"
    )
