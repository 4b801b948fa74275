"""The names in a folder are remembered as long as nothing in it can have changed, and no longer."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_gpu_stabilizer import listings as module
from moe_gpu_stabilizer.listings import MOST_REMEMBERED, STEP_NS, Listings
from tests.support import wait_until

PATTERN = "libllama*.so*"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libllama.so").touch()
    (folder / "libother.so").touch()
    return folder


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each time that a folder is gone through."""
    patterns: list[str] = []
    go_through = module._names

    def go_through_and_note(folder: int, pattern: str, is_roots: bool) -> list[str]:
        patterns.append(pattern)
        return go_through(folder, pattern, is_roots)

    monkeypatch.setattr(module, "_names", go_through_and_note)
    return patterns


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_PATH)
    try:
        yield handle
    finally:
        os.close(handle)


def look(listings: Listings, folder: Path, now_ns: int = 0, pattern: str = PATTERN) -> list[str]:
    """What one turn finds."""
    listings.begin_turn(now_ns)
    with opened(folder) as handle:
        return listings.names(handle, pattern)


def test_a_folder_that_stays_as_it_is_is_not_gone_through_again(folder: Path, listed: list[str]) -> None:
    listings = Listings()
    for turn in range(4):
        assert look(listings, folder, turn * STEP_NS) == ["libllama.so"]
    assert len(listed) == 2, "once when it was new to us, and once when a change would have had another time"


def test_a_folder_that_may_just_have_changed_is_gone_through_again(folder: Path, listed: list[str]) -> None:
    """Its file system may give the next change the same time."""
    listings = Listings()
    for now_ns in (0, 1, STEP_NS - 1):
        look(listings, folder, now_ns)
    assert len(listed) == 3


@pytest.mark.parametrize("change", ["a new name", "another name", "one less", "another owner"])
def test_a_change_is_seen_at_the_next_turn(folder: Path, change: str) -> None:
    """Also where the folder's owner sets the time of its last change back."""
    listings = Listings()
    for now_ns in (0, STEP_NS):
        assert look(listings, folder, now_ns) == ["libllama.so"]
    before = folder.stat()
    clock = folder.parent / "clock"

    def ticks() -> bool:
        """Old kernels count changes in steps of some milliseconds, and four seconds have not really passed."""
        clock.write_text("")
        return clock.stat().st_ctime_ns > before.st_ctime_ns

    wait_until(ticks, "the file system's clock")
    if change == "a new name":
        (folder / "libllama.so.1").touch()
    elif change == "another name":
        (folder / "libother.so").rename(folder / "libllama.so.1")
    elif change == "one less":
        (folder / "libllama.so").unlink()
    else:
        os.chown(folder, 65534, 65534)
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert look(listings, folder, 2 * STEP_NS) == sorted(path.name for path in folder.glob(PATTERN))


def test_patterns_and_folders_are_told_apart(folder: Path) -> None:
    listings = Listings()
    for turn in range(3):
        listings.begin_turn(turn * STEP_NS)
        with opened(folder) as handle, opened(folder.parent) as above:
            assert listings.names(handle, PATTERN) == ["libllama.so"]
            assert listings.names(handle, "*") == ["libllama.so", "libother.so"]
            assert listings.names(above, "*") == ["lib"]


def test_what_could_not_be_listed_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    listings = Listings()
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        for turn in range(2):
            assert look(listings, folder, turn * STEP_NS) == []
    assert look(listings, folder, 2 * STEP_NS) == ["libllama.so"]


def test_what_is_no_folder_has_no_names(folder: Path) -> None:
    assert look(Listings(), folder / "libllama.so") == []


def test_long_lists_are_not_remembered(folder: Path, listed: list[str]) -> None:
    for number in range(MOST_REMEMBERED):
        (folder / f"libllama.so.{number}").touch()
    listings = Listings()
    for turn in range(4):
        assert len(look(listings, folder, turn * STEP_NS)) == MOST_REMEMBERED + 1
    assert len(listed) == 4


def test_folders_that_nobody_asks_for_any_more_are_forgotten(folder: Path, listed: list[str]) -> None:
    listings = Listings()
    for turn in range(3):
        look(listings, folder, turn * STEP_NS)
    assert len(listed) == 2
    look(listings, folder.parent, 3 * STEP_NS)
    look(listings, folder, 4 * STEP_NS)
    assert len(listed) == 4
