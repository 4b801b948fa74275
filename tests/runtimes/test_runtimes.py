"""Tests run once more, with the BCC and the Python of other releases, each run in a process of its own (see run)."""

from __future__ import annotations

import os
import subprocess
import sys
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


# What BCC's library and Python themselves have a part in: loading, counting, waking; raising and giving back; turns;
# libraries that come and go, many, in containers; ways to end. The rest of tests/kernel passes, too: run does it.
ESSENTIAL = {
    "test_probe.py": [""],
    "test_turns.py": [
        "::test_turns_are_sections_but_one",
        "::test_the_second_graph_with_many_turns_is_told_of_and_no_other",
        "::test_a_change_that_found_no_room_is_told_with_the_next_graph",
        "::test_two_models_in_two_threads_are_counted_apart",
        "::test_exec_forgets_the_turns",
    ],
    "test_daemon.py": [
        "::test_a_call_raises_the_floor_and_a_second_later_it_is_given_back",
        "::test_an_ignored_process_does_not_wake_the_daemon",
        "::test_one_long_call_keeps_the_floor_up",
        "::test_a_process_killed_in_the_middle_of_a_call_loses_the_floor_at_once",
        "::test_a_process_is_judged_again_when_it_becomes_another_program",
        "::test_a_static_program_is_found_by_its_own_symbols",
        "::test_a_stop_gives_the_floor_back",
        "::test_restore_gives_a_killed_daemons_floor_back_once",
        "::test_an_edited_configuration_is_applied_at_once_and_a_bad_one_is_not",
        "::test_what_keeps_it_from_starting_is_one_clear_line",
    ],
    "test_libraries.py": [
        "::test_a_library_is_found_because_a_process_uses_it",
        "::test_a_library_replaced_by_rename_while_it_is_in_use",
        "::test_the_daemon_leaves_no_stale_probe",
        "::test_many_writers_at_once_do_not_keep_the_clock_up",
        "::test_a_process_in_a_container_is_seen",
        "::test_a_daemon_in_a_container_sees_its_own_processes",
    ],
    "test_behaviour.py": [
        "::test_turns_raise_the_floor_with_the_second_graph",
        "::test_a_model_on_the_device_neither_raises_the_floor_nor_wakes_the_daemon",
    ],
}


@pytest.mark.parametrize("suite", ["bullseye", "trixie"])
def test_the_daemon_works_with_another_bcc(suite: str) -> None:
    """The committed bytecode; tests/kernel/conftest.py sees to it that nothing but the wanted library is loaded."""
    chosen = [f"tests/kernel/{file}{name}" for file, names in ESSENTIAL.items() for name in names]
    said = said_by(HERE / "run", suite, "--quiet", "-k", "not fresh", *chosen)
    assert " passed" in said


@pytest.mark.parametrize(("suite", "version"), [("bullseye", "0.18.0"), ("trixie", "0.31.0")])
def test_which_bcc_that_is(suite: str, version: str) -> None:
    home = Path(said_by(HERE / "fetch-runtime.sh", suite).strip())
    assert (home / "libraries/libbcc_bpf.so.0").resolve().name == f"libbcc_bpf.so.{version}"


def test_unit_tests_pass_with_python_3_13() -> None:
    """But for those of another user, who cannot get at an interpreter in root's home."""
    home = Path(said_by(HERE / "fetch-runtime.sh", "trixie").strip())
    assert said_by(home / "usr/bin/python3", "--version").startswith("Python 3.13.")
    assert " passed" in said_by(HERE / "run", "trixie", "--quiet", "-k", "not (test_check and nobody)", "tests/unit")


def test_another_library_than_the_wanted_one_is_noticed(tmp_path: Path) -> None:
    """That is, this machine's own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--quiet", "tests/kernel/test_probe.py", "-k",
         "every_call and committed"],
        stdout=subprocess.PIPE, text=True, check=False, cwd=REPOSITORY,
        env={**os.environ, "STABILIZER_RUNTIME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "assert loaded_from_runtime(" in done.stdout
