"""Fixtures of the fault suite: those of the kernel tests, on the committed bytecode alone.

It is the daemon that is put to the test here, not the program in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.hostile import Hostile, build_hostile
from tests.kernel.conftest import REPOSITORY, Llama, flag, llama, node, run, start_daemon

__all__ = ["flag", "llama", "node", "run", "start_daemon"]


@pytest.fixture(scope="session")
def package_root() -> Path:
    return REPOSITORY


@pytest.fixture
def hostile(llama: Llama, flag: str) -> Iterator[Callable[..., Hostile]]:
    """Start one of hostile.c's modes, with the flag that counts unless told otherwise."""
    usual = build_hostile(llama.program.with_name("hostile"), llama.library)
    with ExitStack() as stack:

        def start(*arguments: str | int, program: Path = usual, counts: bool = True, **options: object) -> Hostile:
            flags = (flag,) if counts else ()
            return stack.enter_context(Hostile(program, *arguments, *flags, **options))  # type: ignore[arg-type]

        yield start
