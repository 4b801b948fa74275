"""Fixtures of the fault suite: those of the kernel tests, on the committed bytecode alone.

It is the daemon that is put to the test here, not the program in the kernel.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel.conftest import REPOSITORY, flag, llama, node, run, start_daemon

__all__ = ["flag", "llama", "node", "run", "start_daemon"]


@pytest.fixture(scope="session")
def package_root() -> Path:
    return REPOSITORY
