"""Boots each kind of board once, when the first test asks for it. It needs root, for the disk is made by it."""

from __future__ import annotations

import os
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


@pytest.fixture(scope="session", params=KINDS, ids=[kind.name for kind in KINDS])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A board on which all checks that were asked for have been run."""
    assert os.geteuid() == 0, "the board's disk is made by root"
    kind: Kind = request.param
    wanted = {
        str(item.callspec.params["check"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.callspec.params.get("machine") == kind
        if "check" in item.callspec.params
    }
    return Machine(tmp_path_factory.mktemp(kind.name), kind.release, kind.own_bcc, sorted(wanted))
