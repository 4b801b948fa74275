"""Boots each kind of board once, all at the same time. It needs root, for the disk is made by it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.board.machine import Machine


@dataclass(frozen=True)
class Kind:
    """Of board."""

    name: str
    release: str
    own_bcc: bool


KINDS = (
    Kind("linux-6.1-bcc-0.26", "bookworm", own_bcc=False),
    Kind("linux-5.10-bcc-0.18", "bullseye", own_bcc=True),
)


def wanted_checks(session: pytest.Session, kind: Kind) -> list[str]:
    """What the selected tests of this kind of board look up there."""
    tests = [item for item in session.items if isinstance(item, pytest.Function) and "machine" in item.fixturenames]
    return [str(test.callspec.params["check"]) for test in tests if test.callspec.params["machine"] == kind]


@pytest.fixture(scope="session")
def machines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Kind, Machine]]:
    """The boards that were asked for. Each keeps one processor busy, and a second one now and then."""
    assert os.geteuid() == 0, "the board's disk is made by root"
    booted: dict[Kind, Machine] = {}
    try:
        for kind in KINDS:
            if wanted := wanted_checks(request.session, kind):
                directory = tmp_path_factory.mktemp(kind.name)
                booted[kind] = Machine(directory, kind.release, kind.own_bcc, wanted)
        yield booted
    finally:
        for machine in booted.values():
            machine.kill()


@pytest.fixture(scope="session", params=KINDS, ids=[kind.name for kind in KINDS])
def machine(request: pytest.FixtureRequest, machines: dict[Kind, Machine]) -> Machine:
    """A board on which all checks that were asked for have been run."""
    one = machines[request.param]
    one.wait()
    return one
