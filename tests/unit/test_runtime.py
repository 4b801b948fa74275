"""The run-time directory: the clock to give back, the status, the lock."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_gpu_stabilizer.errors import StabilizerError
from moe_gpu_stabilizer.processes import identify
from moe_gpu_stabilizer.runtime import DEFAULT_DIRECTORY, Raised, Runtime

RAISED = Raised("/sys/class/devfreq/17000000.gpu", 306_000_000, (612_000_000, 1_020_000_000))

# Locks, says so, and holds on until its standard input ends.
LOCKER = """
import sys
from pathlib import Path
from moe_gpu_stabilizer.runtime import Runtime
runtime = Runtime(Path(sys.argv[1]))
runtime.lock()
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    runtime = Runtime(tmp_path / "run/moe-gpu-stabilizer")
    runtime.create()
    return runtime


def test_systemd_names_the_directory_or_else_it_is_in_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    assert Runtime().directory == DEFAULT_DIRECTORY == Path("/run/moe-gpu-stabilizer")
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/elsewhere")
    assert Runtime().directory == Path("/run/elsewhere")


def test_the_directory_is_made_with_its_parents_and_readable_by_all(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path / "a/b/c")
    runtime.create()
    assert stat.S_IMODE(runtime.directory.stat().st_mode) & 0o055 == 0o055
    runtime.create()  # it may be there already


def test_a_file_in_the_directorys_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StabilizerError, match=r"cannot make .*/file: File exists"):
        Runtime(tmp_path / "file").create()
    with pytest.raises(StabilizerError, match=r"cannot make .*/file/run: Not a directory"):
        Runtime(tmp_path / "file/run").create()
    with pytest.raises(StabilizerError, match="cannot lock"):
        Runtime(tmp_path / "file").lock()


# The clock to give back.


def test_what_was_raised_comes_back(runtime: Runtime) -> None:
    assert runtime.load_raised() is None
    runtime.save_raised(RAISED)
    assert Runtime(runtime.directory).load_raised() == RAISED
    runtime.forget_raised()
    assert runtime.load_raised() is None
    runtime.forget_raised()  # nothing to forget


def test_a_file_is_replaced_in_one_step_and_nothing_else_is_left(runtime: Runtime) -> None:
    runtime.save_raised(RAISED)
    first = (runtime.directory / "raised.json").stat().st_ino
    with (runtime.directory / "raised.json").open() as old:
        runtime.save_raised(Raised("other", 1, (2,)))
        assert "17000000.gpu" in old.read(), "whoever was reading reads the old one whole"
    assert (runtime.directory / "raised.json").stat().st_ino != first
    assert [path.name for path in runtime.directory.iterdir()] == ["raised.json"]


def test_the_same_floor_again_needs_no_new_file(runtime: Runtime) -> None:
    """Making one takes longer than all else that a first call waits for."""
    saved = runtime.directory / "raised.json"
    runtime.save_raised(RAISED)
    first = saved.stat().st_ino
    for _ in range(3):
        runtime.forget_raised()
        assert not saved.exists()
        runtime.save_raised(RAISED)
        assert saved.stat().st_ino == first
        assert Runtime(runtime.directory).load_raised() == RAISED


def test_what_is_saved_is_never_what_the_spare_file_held_before(runtime: Runtime) -> None:
    other = Raised(RAISED.node, 408_000_000, RAISED.written_hz)
    runtime.save_raised(RAISED)
    runtime.forget_raised()
    runtime.save_raised(other)
    assert runtime.load_raised() == other
    runtime.forget_raised()
    for spare in runtime.directory.iterdir():
        spare.unlink()  # somebody has tidied up
    runtime.save_raised(other)
    assert runtime.load_raised() == other
    runtime.save_raised(RAISED)  # while that is up
    runtime.forget_raised()
    runtime.save_raised(other)
    assert runtime.load_raised() == other


def test_others_may_read_and_not_write(runtime: Runtime) -> None:
    runtime.save_raised(RAISED)
    runtime.save_status({})
    for path in runtime.directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{",
        "nonsense",
        "7",
        '"text"',
        "[]",
        "{}",
        '{"node": "x", "baseline_hz": 1}',
        '{"node": "x", "baseline_hz": "fast", "written_hz": [1]}',
        '{"node": "x", "baseline_hz": null, "written_hz": [1]}',
        '{"node": "x", "baseline_hz": 1, "written_hz": 1}',
        '{"node": "x", "baseline_hz": 1, "written_hz": ["x"]}',
        '{"node": "x", "baseline_hz": 1, "written_hz": []}',
        '{"node": "x", "baseline_hz": 1e999, "written_hz": [1]}',
        '{"node": "x", "baseline_hz": NaN, "written_hz": [1]}',
    ],
)
def test_a_damaged_file_is_an_error_and_never_a_crash(runtime: Runtime, damaged: str) -> None:
    (runtime.directory / "raised.json").write_text(damaged)
    with pytest.raises(StabilizerError, match=r"raised\.json"):
        runtime.load_raised()


def test_a_file_of_other_bytes_is_an_error(runtime: Runtime) -> None:
    (runtime.directory / "raised.json").write_bytes(b"\xff\x00\xff")
    with pytest.raises(StabilizerError, match="cannot read"):
        runtime.load_raised()


def test_where_nothing_can_be_written_saving_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StabilizerError, match=r"cannot write .*raised\.json: Not a directory"):
        Runtime(tmp_path / "file" / "run").save_raised(RAISED)


def test_a_directory_that_somebody_has_removed_is_made_again(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path / "run")
    runtime.save_raised(RAISED)
    assert runtime.load_raised() == RAISED


# The status.


@pytest.fixture
def status() -> dict[str, Any]:
    """A status as this very process would publish it."""
    this = identify(os.getpid())
    return {"pid": this.tgid, "start_ticks": this.start_ticks, "floor_hz": None, "processes": [{"name": "größe"}]}


def test_the_status_comes_back_while_its_writer_runs(runtime: Runtime, status: dict[str, Any]) -> None:
    assert runtime.load_status() is None
    runtime.save_status(status)
    assert Runtime(runtime.directory).load_status() == status
    runtime.forget_status()
    assert runtime.load_status() is None
    runtime.forget_status()  # nothing to forget


def test_the_status_of_a_killed_daemon_is_none(runtime: Runtime, status: dict[str, Any]) -> None:
    with subprocess.Popen(["sleep", "60"]) as daemon:
        of_daemon = {**status, "pid": daemon.pid, "start_ticks": identify(daemon.pid).start_ticks}
        runtime.save_status(of_daemon)
        assert runtime.load_status() == of_daemon
        daemon.kill()
    assert runtime.load_status() is None


def test_another_process_with_the_killed_daemons_pid_is_not_the_daemon(
    runtime: Runtime, status: dict[str, Any]
) -> None:
    runtime.save_status({**status, "start_ticks": status["start_ticks"] - 1})
    assert runtime.load_status() is None


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{",
        "7",
        "[1]",
        '"text"',
        '{"pid": 1}',
        '{"pid": "x", "start_ticks": 1}',
        '{"pid": null, "start_ticks": 1}',
        '{"pid": 1e999, "start_ticks": 1}',
        '{"pid": 1, "start_ticks": [1]}',
    ],
)
def test_a_damaged_status_is_an_error_and_never_a_crash(runtime: Runtime, damaged: str) -> None:
    (runtime.directory / "status.json").write_text(damaged)
    with pytest.raises(StabilizerError, match=r"status\.json"):
        runtime.load_status()


# The lock.


def test_a_second_daemon_is_refused_and_the_lock_ends_with_its_process(runtime: Runtime) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOCKER, str(runtime.directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"locked\n"
        assert not runtime.lock()
        daemon.kill()
    assert runtime.lock()


def test_only_the_owner_can_open_the_lock(runtime: Runtime) -> None:
    """Whoever may open it could hold it, and so keep the daemon from starting."""
    runtime.lock()
    assert stat.S_IMODE((runtime.directory / "lock").stat().st_mode) & 0o077 == 0


def test_the_lock_does_not_pass_to_programs_that_are_started(runtime: Runtime) -> None:
    runtime.lock()
    descriptors = [int(entry.name) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    held = [fd for fd in descriptors if os.readlink(f"/proc/self/fd/{fd}") == str(runtime.directory / "lock")]
    assert [os.get_inheritable(fd) for fd in held] == [False]
