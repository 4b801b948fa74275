"""Whose files are read when: no user's wait for all of another's, and a child does not read without a rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_gpu_stabilizer import reader
from moe_gpu_stabilizer.files import Place, Version
from moe_gpu_stabilizer.reader import MOST_READ_AT_ONCE, Reader

MALLORY, ALICE = 1000, 1001


@pytest.fixture
def files(tmp_path: Path) -> dict[Version, Place]:
    """A hundred programs of one user, then one of another."""
    seen = {}
    for number in range(101):
        path = tmp_path / f"program-{number}"
        path.write_text("no library")
        seen[Version.of(path.stat())] = Place(str(path), str(path), ALICE if number == 100 else MALLORY)
    return seen


@pytest.fixture
def new_reader() -> Iterator[Reader]:
    new = Reader()
    yield new
    new.close()


def owners_read(new: Reader, seen: dict[Version, Place]) -> list[tuple[int, int]]:
    """Read it all, and return for each child whose files it was given, and how many."""
    owners = []
    new.start(seen, (), in_haste=True)
    while new.reading:
        (owner,) = {place.owner_id for place in new.reading.files.values()}
        owners.append((owner, len(new.reading.files)))
        new.wait()
        new.start(seen, (), in_haste=True)
    return owners


def test_another_users_file_is_read_after_one_child_at_most(files: dict[Version, Place], new_reader: Reader) -> None:
    owners = owners_read(new_reader, files)
    assert (ALICE, 1) in owners[:2]
    assert sum(count for _, count in owners) == 101
    assert max(count for _, count in owners) == MOST_READ_AT_ONCE
    assert new_reader.is_done


def test_who_has_waited_longest_is_next(files: dict[Version, Place], new_reader: Reader, tmp_path: Path) -> None:
    """Also where another's new files never come to an end."""
    new_reader.start(files, (), in_haste=True)
    new_reader.wait()
    path = tmp_path / "late"
    path.write_text("another")
    late = {**files, Version.of(path.stat()): Place(str(path), str(path), ALICE + 1)}
    read = [owner for owner, _ in owners_read(new_reader, late)]
    assert read.index(ALICE + 1) <= 2


def test_a_reader_rests_when_it_has_read_for_long(
    files: dict[Version, Place], new_reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LONGEST_ROW_NS", 1)
    new_reader.start(files, (), in_haste=False)
    new_reader.wait()
    new_reader.start(files, (), in_haste=False)
    assert new_reader.reading is None
    assert not new_reader.is_done
    assert new_reader.rests_until_ns is not None
    new_reader.start(files, (), in_haste=True)
    assert new_reader.reading is not None


def test_what_is_no_longer_seen_is_forgotten(files: dict[Version, Place], new_reader: Reader) -> None:
    owners_read(new_reader, files)
    assert len(new_reader.offsets) == 101
    new_reader.keep({})
    assert len(new_reader.offsets) == 0
