"""The names in a folder are remembered as long as nothing in it can have changed, and no longer."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
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
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let so many nanoseconds pass."""
    clock, passed = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: clock() + passed[0])

    def pass_ns(duration_ns: int) -> None:
        passed[0] += duration_ns

    return pass_ns


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


def look(listings: Listings, folder: Path, pattern: str = PATTERN) -> list[str]:
    """What one turn finds."""
    listings.begin_turn()
    handle = os.open(folder, os.O_PATH)
    try:
        return listings.names(handle, pattern)
    finally:
        os.close(handle)


def test_a_folder_that_stays_as_it_is_is_gone_through_once(
    folder: Path, later: Callable[[int], None], listed: list[str]
) -> None:
    listings = Listings()
    later(STEP_NS)
    for _ in range(3):
        assert look(listings, folder) == ["libllama.so"]
    assert listed == [PATTERN]


@pytest.mark.parametrize("change", ["a new name", "another name", "one less", "another owner"])
def test_a_change_is_seen_at_the_next_turn(folder: Path, later: Callable[[int], None], change: str) -> None:
    """Also where the folder's owner sets the time of its last change back."""
    listings = Listings()
    later(STEP_NS)
    assert look(listings, folder) == ["libllama.so"]
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
    assert look(listings, folder) == sorted(path.name for path in folder.glob(PATTERN))


def test_a_folder_that_has_just_changed_is_gone_through_again(
    folder: Path, later: Callable[[int], None], listed: list[str]
) -> None:
    """Its file system may give the next change the same time."""
    listings = Listings()
    look(listings, folder)
    look(listings, folder)
    assert len(listed) == 2
    later(STEP_NS)
    look(listings, folder)
    look(listings, folder)
    assert len(listed) == 3


def test_patterns_and_folders_are_told_apart(folder: Path, later: Callable[[int], None]) -> None:
    listings = Listings()
    later(STEP_NS)
    for _ in range(2):
        assert look(listings, folder) == ["libllama.so"]
        assert look(listings, folder, "*") == ["libllama.so", "libother.so"]
        assert look(listings, folder.parent, "*") == ["lib"]


def test_what_could_not_be_listed_is_tried_again(
    folder: Path, later: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    listings = Listings()
    later(STEP_NS)
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        assert look(listings, folder) == []
    assert look(listings, folder) == ["libllama.so"]


def test_what_is_no_folder_has_no_names(folder: Path) -> None:
    assert look(Listings(), folder / "libllama.so") == []


def test_little_is_remembered(folder: Path, later: Callable[[int], None], listed: list[str]) -> None:
    """No long lists, and no folders that nobody asks for any more."""
    for number in range(MOST_REMEMBERED):
        (folder / f"libllama.so.{number}").touch()
    listings = Listings()
    later(STEP_NS)
    assert len(look(listings, folder)) == MOST_REMEMBERED + 1
    look(listings, folder)
    assert len(listed) == 2
    look(listings, folder, "libo*")
    look(listings, folder.parent)
    look(listings, folder, "libo*")
    assert len(listed) == 5
