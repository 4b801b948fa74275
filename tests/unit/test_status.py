"""The report of --status, from what a daemon has published."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from moe_gpu_stabilizer.settings import Settings
from moe_gpu_stabilizer.status import duration, for_systemctl, headline, is_stale, render

NOW_SECONDS = 100_000.0

SERVER = {
    "pid": 4242,
    "name": "llama-server",
    "counts": True,
    "reason": "--cpu-moe",
    "turns": {"graphs": 100, "turning": True, "per_graph": 40},
    "holds_the_floor": True,
}


def published(**changed: Any) -> dict[str, Any]:
    """What an idle daemon has published, with these changes."""
    idle = {
        "version": "0.1.0",
        "pid": 812,
        "start_ticks": 1,
        "written_at_seconds": NOW_SECONDS - 2,
        "node": "/sys/class/devfreq/17000000.gpu",
        "floor_hz": None,
        "state_since_seconds": NOW_SECONDS - 75,
        "raised_times": 3,
        "raised_seconds": 192.5,
        "processes": [],
        "processes_left_out": 0,
        "holders": 0,
        "libraries": [{"path": "/usr/lib/libllama.so", "functions": ["llama_decode", "llama_process"]}],
        "last_rival_write": None,
        "troubles": [],
        "last_trouble": None,
        "settings": asdict(Settings(libraries=("/a/libllama.so", "/b/libllama.so"))),
        "last_reload": None,
        "clock": {"cur_freq": 510_000_000, "min_freq": 306_000_000, "max_freq": 1_020_000_000},
    }
    return {**idle, **changed}


def row(status: dict[str, Any], label: str) -> str:
    """The text of the one row with this label."""
    (text,) = [line.split(label, 1)[1].strip() for line in render(status, NOW_SECONDS).splitlines()[1:]
               if line.strip().startswith(label)]  # fmt: skip
    return text


def test_idle_is_said_with_how_long() -> None:
    assert row(published(), "state").startswith("idle, 1 library watched, since ")
    assert row(published(), "state").endswith("(1 min 15 s ago)")


def test_the_clock_is_shown_with_its_limits() -> None:
    assert row(published(), "clock") == "cur_freq 510 MHz, min_freq 306 MHz, max_freq 1020 MHz"
    assert "clock" not in render(published(clock={}, node=None), NOW_SECONDS)


def test_a_floor_is_said_with_for_whom_and_why() -> None:
    other = {**SERVER, "pid": 5, "holds_the_floor": False}
    status = published(floor_hz=1_020_000_000, processes=[SERVER, other], holders=1)
    assert headline(status) == "floor 1020 MHz for llama-server (pid 4242)"
    assert "pid 4242 (llama-server) counts: --cpu-moe" in render(status, NOW_SECONDS)


def test_inference_without_a_floor_is_not_idle() -> None:
    """Another program wants it down, or min_freq is as high already."""
    status = published(processes=[SERVER], holders=1, troubles=["tweaker sets min_freq whenever it is raised"])
    assert headline(status) == "not raised for llama-server (pid 4242)"


def test_of_a_crowd_the_first_are_named_and_the_others_counted() -> None:
    crowd = [{**SERVER, "pid": pid} for pid in range(1, 51)]
    status = published(floor_hz=1_020_000_000, processes=crowd, processes_left_out=950, holders=200)
    assert headline(status) == (
        "floor 1020 MHz for llama-server (pid 1), llama-server (pid 2), llama-server (pid 3), 197 more"
    )
    assert "950 more have called" in render(status, NOW_SECONDS)


def test_how_often_and_how_long_counts_the_stretch_that_goes_on() -> None:
    assert row(published(), "raised") == "3 times, 3 min 12 s in all since the daemon started"
    up = published(floor_hz=1_020_000_000, raised_seconds=1.0, raised_times=1, processes=[SERVER])
    assert row(up, "raised") == "once, 3.0 s in all since the daemon started"
    assert row(published(raised_times=0, raised_seconds=0.0), "raised") == "never since the daemon started"


@pytest.mark.parametrize(
    ("pid", "name", "writer"),
    [
        (812, "nvpmodel", "nvpmodel (pid 812)"),
        (812, "?", "a program that has ended (pid 812)"),
        (0, "?", "a program in another pid namespace"),
        (None, "?", "another program"),
    ],
)
def test_a_rivals_write_is_told(pid: int | None, name: str, writer: str) -> None:
    write = {"attribute": "min_freq", "hz": 612_000_000, "pid": pid, "name": name, "at_seconds": NOW_SECONDS - 4}
    status = published(last_rival_write=write)
    assert row(status, "rival").startswith(f"min_freq set to 612 MHz by {writer} (at ")
    assert row(status, "rival").endswith("(4.0 s ago))")


def test_settings_are_shown_as_the_file_has_them() -> None:
    text = render(published(), NOW_SECONDS)
    for line in (
        "STABILIZER_FLOOR_MHZ=",
        "STABILIZER_HOLD_SECONDS=1",
        "STABILIZER_LIBRARIES=/a/libllama.so:/b/libllama.so",
        'STABILIZER_MOE_FLAGS="--cpu-moe -cmoe --n-cpu-moe -ncmoe"',
    ):
        assert f"  {line}\n" in text + "\n"


def test_an_error_that_is_over_is_still_told_and_a_lasting_one_once() -> None:
    over = {"message": "no GPU node yet", "at_seconds": NOW_SECONDS - 4000}
    assert row(published(last_trouble=over), "last trouble").startswith("no GPU node yet (over now; said ")
    lasting = render(published(troubles=["no GPU node yet"], last_trouble=over), NOW_SECONDS)
    assert lasting.count("no GPU node yet") == 1


def test_systemctl_shows_troubles_beside_the_state() -> None:
    assert for_systemctl(published()) == "idle, 1 library watched"
    troubled = published(troubles=["the old settings stay: /etc/default/x:3: bad"])
    assert for_systemctl(troubled) == "idle, 1 library watched; the old settings stay: /etc/default/x:3: bad"


@pytest.mark.parametrize(
    ("age_seconds", "rebind_seconds", "stale"), [(6, 5, False), (14.9, 5, False), (15.1, 5, True), (60, 3600, False)]
)
def test_a_file_is_stale_when_its_daemon_has_missed_ticks(
    age_seconds: float, rebind_seconds: float, stale: bool
) -> None:
    settings = asdict(Settings(rebind_seconds=rebind_seconds))
    status = published(written_at_seconds=NOW_SECONDS - age_seconds, settings=settings)
    assert is_stale(status, NOW_SECONDS) == stale
    assert ("STALE" in render(status, NOW_SECONDS)) == stale


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.9, "59.9 s"),
        (60, "1 min 0 s"),
        (3_661, "1 h 1 min"),
        (86_400 * 3 + 3_600, "3 d 1 h"),
    ],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
