"""Which libraries are probed where there are more than may be."""

from __future__ import annotations

from moe_gpu_stabilizer.choice import MOST_PROBED_FILES, choose
from moe_gpu_stabilizer.files import FileId, Place, Version
from moe_gpu_stabilizer.libraries import Library
from moe_gpu_stabilizer.shares import Standing

MALLORY, ALICE, BOB = 1000, 1001, 1002


def library(inode: int, owner_id: int, standing: Standing = Standing.USED, called: bool = False) -> Library:
    place = Place(f"/{inode}", f"/{inode}", owner_id)
    return Library(Version(FileId(1, inode), 1, inode), place, {"llama_decode": 1}, standing, called)


def chosen(libraries: list[Library], probed: tuple[int, ...] = ()) -> list[int]:
    """The inodes that are chosen."""
    found = {library.version.file: library for library in libraries}
    return [file.inode for file in choose(found, {FileId(1, inode) for inode in probed})]


SWARM = [library(inode, MALLORY) for inode in range(1000, 11_000)]


def test_where_there_is_room_all_are_chosen() -> None:
    assert sorted(chosen([library(1, ALICE), library(2, BOB)])) == [1, 2]


def test_ten_thousand_copies_of_one_user_leave_the_others_theirs() -> None:
    others = [library(inode, owner) for inode, owner in enumerate([ALICE, ALICE, ALICE, BOB, 0])]
    of_all = chosen([*SWARM, *others])
    assert set(range(5)) < set(of_all)
    assert len(of_all) == MOST_PROBED_FILES


def test_what_is_configured_comes_first_then_what_root_has_put_in_a_usual_place() -> None:
    several = [library(inode, MALLORY + inode) for inode in range(100, 200)]
    usual, configured = library(1, 0, Standing.USUAL), library(2, MALLORY, Standing.CONFIGURED)
    assert chosen([*several, usual, configured])[:2] == [2, 1]


def test_more_configured_than_may_be_are_cut_off_too() -> None:
    """The clock of a killed daemon would wait for them as for any other."""
    assert len(chosen([library(inode, 0, Standing.CONFIGURED) for inode in range(100)])) == MOST_PROBED_FILES


def test_an_owners_busy_ones_come_before_probed_ones_and_those_before_new_ones() -> None:
    busy = library(11_001, MALLORY, called=True)
    assert chosen([*SWARM, busy], probed=(1500, 1501))[:3] == [11_001, 1500, 1501]


def test_what_is_probed_stays_so_that_a_crowd_does_not_make_probes_come_and_go() -> None:
    before = chosen(SWARM)
    assert chosen(list(reversed(SWARM)), probed=tuple(before)) != before
    assert set(chosen(list(reversed(SWARM)), probed=tuple(before))) == set(before)
