"""What is said to a running daemon, and whose answer is heard. This process plays the daemon."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_gpu_stabilizer import __version__, client
from moe_gpu_stabilizer.errors import ConfigError, StabilizerError
from moe_gpu_stabilizer.processes import identify
from moe_gpu_stabilizer.runtime import Runtime
from tests.support import PlainNode

# The daemon's readings of its settings, one after the other: the time is in seconds since --reload asked.
Readings = list[dict[str, Any]]


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    myself = identify(os.getpid())

    def save(**status: Any) -> None:
        about_us = {"version": __version__, "pid": myself.tgid, "start_ticks": myself.start_ticks}
        Runtime().save_status({**about_us, **status})

    return save


@pytest.fixture
def answer(publish: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[[Readings], list[int]]:
    """Make the daemon answer so, one reading at each look; returns the signals it gets."""
    signals: list[int] = []
    now = [1000.0]

    def prepare(readings: Readings) -> list[int]:
        publish(last_reload=None)
        waiting = iter(readings)

        def look_again(_seconds: float) -> None:
            now[0] += 1
            reading = next(waiting, None)
            if reading:
                publish(last_reload={**reading, "began_at_seconds": 1000.0 + reading["began_at_seconds"]})

        monkeypatch.setattr("moe_gpu_stabilizer.client.time.sleep", look_again)
        monkeypatch.setattr("moe_gpu_stabilizer.client.time.monotonic", lambda: now[0])
        monkeypatch.setattr("moe_gpu_stabilizer.client.os.kill", lambda _pid, number: signals.append(number))
        return signals

    return prepare


def test_the_answer_is_waited_for(answer: Callable[[Readings], list[int]]) -> None:
    signals = answer([{"began_at_seconds": 0.5, "error": "", "hint": ""}])
    assert client.reload() == 0
    assert signals == [signal.SIGHUP]


def test_a_mistake_in_the_settings_is_passed_on(answer: Callable[[Readings], list[int]]) -> None:
    answer([{"began_at_seconds": 0.5, "error": "line 3 is wrong", "hint": "allowed: a number"}])
    with pytest.raises(ConfigError, match="the old settings stay: line 3 is wrong; allowed: a number"):
        client.reload()


def test_a_reading_that_somebody_else_had_asked_for_is_no_answer(answer: Callable[[Readings], list[int]]) -> None:
    """It may have read the file before our edit."""
    answer(
        [
            {"began_at_seconds": -0.1, "error": "", "hint": ""},
            {"began_at_seconds": 0.2, "error": "line 3 is wrong", "hint": ""},
        ]
    )
    with pytest.raises(ConfigError, match="line 3 is wrong"):
        client.reload()


def test_a_daemon_that_does_not_answer_is_not_waited_for_without_end(answer: Callable[[Readings], list[int]]) -> None:
    answer([])
    with pytest.raises(StabilizerError, match="the daemon has not answered within 30 s"):
        client.reload()


@pytest.mark.parametrize("missing", [{}, {"last_reload": 3}, {"last_reload": {"count": 1}}])
def test_a_damaged_status_is_one_clear_line(publish: Callable[..., None], missing: dict[str, Any]) -> None:
    publish(**missing)
    with pytest.raises(StabilizerError, match="is damaged"):
        client.show_status(as_json=False)


def test_a_daemon_of_another_version_is_not_understood(publish: Callable[..., None]) -> None:
    publish(version="0.0.1")
    with pytest.raises(StabilizerError, match=r"the running daemon is version 0\.0\.1, this program .*; restart it"):
        client.show_status(as_json=False)


def test_the_clock_is_read_at_that_moment(tmp_path: Path) -> None:
    node = PlainNode(tmp_path / "17000000.gpu")
    node.write("cur_freq", 612_000_000)
    (node.directory / "max_freq").unlink()
    assert client.clock_of(str(node.directory)) == {"cur_freq": 612_000_000, "min_freq": 306_000_000}
    assert client.clock_of(None) == {}
