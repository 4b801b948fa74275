"""Tests run once more, with the BCC and the Python of other releases, each run in a process of its own (see run)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import REPOSITORY

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.timeout(600)


def said_by(*command: str | Path) -> str:
    """What it prints; it must succeed."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
