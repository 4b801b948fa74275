"""The settings file: every key, good and bad, and errors that say what to write instead."""

from __future__ import annotations

import dataclasses
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_gpu_stabilizer.config import KEYS, from_text, load, load_in_child
from moe_gpu_stabilizer.errors import ConfigError, StabilizerError
from moe_gpu_stabilizer.settings import Settings


def read(text: str) -> Settings:
    return from_text(text, "/etc/file")


def error_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_every_field_has_a_key_and_every_key_a_field() -> None:
    assert {key.field for key in KEYS.values()} == {field.name for field in dataclasses.fields(Settings)}
    assert all(key.allowed for key in KEYS.values())


def test_an_empty_file_means_the_defaults() -> None:
    assert read("") == Settings()
    assert read("# STABILIZER_HOLD_SECONDS=9\n") == Settings()


def test_the_defaults_are_what_is_promised() -> None:
    settings = Settings()
    assert settings.floor_hz is None, "the highest available"
    assert settings.hold_ns == 1_000_000_000
    assert settings.rebind_ns == 5_000_000_000
    assert settings.detect == "both"
    assert settings.min_turns == 3
    assert settings.moe_flags == ("--cpu-moe", "-cmoe", "--n-cpu-moe", "-ncmoe")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("empty", ["", "   ", '""', "'  '"])
def test_an_empty_value_means_the_default(key: str, empty: str) -> None:
    assert read(f"{key}={empty}\n") == Settings()


@pytest.mark.parametrize(
    ("assignment", "field", "value"),
    [
        ("FLOOR_MHZ=1020", "floor_mhz", 1020),
        ('FLOOR_MHZ=" 612 "', "floor_mhz", 612),
        ("FLOOR_MHZ=1", "floor_mhz", 1),
        ("FLOOR_MHZ=100000", "floor_mhz", 100_000),
        ("HOLD_SECONDS=2.5", "hold_seconds", 2.5),
        ("HOLD_SECONDS=0.2", "hold_seconds", 0.2),
        ("HOLD_SECONDS=60", "hold_seconds", 60.0),
        ("REBIND_SECONDS=0.2", "rebind_seconds", 0.2),
        ("REBIND_SECONDS=3600", "rebind_seconds", 3600.0),
        ("LIBRARIES=/opt/a/libllama.so", "libraries", ("/opt/a/libllama.so",)),
        (
            "LIBRARIES=/opt/*/lib*:/srv/my models/libllama.so:",
            "libraries",
            ("/opt/*/lib*", "/srv/my models/libllama.so"),
        ),
        ('MOE_FLAGS="--cpu-moe -x"', "moe_flags", ("--cpu-moe", "-x")),
        ("MOE_FLAGS=--cpu-moe  -x", "moe_flags", ("--cpu-moe", "-x")),
        ("MOE_FLAGS=\"--cpu-moe 'with blank'\"", "moe_flags", ("--cpu-moe", "with blank")),
        ("USERS=root", "user_ids", (0,)),
        ("USERS=0", "user_ids", (0,)),
        ("USERS=root 1000", "user_ids", (0, 1000)),
        ("USERS=root,1000 , 1001", "user_ids", (0, 1000, 1001)),
        ("DEVFREQ=/sys/class/devfreq/17000000.gpu", "devfreq", "/sys/class/devfreq/17000000.gpu"),
        ("DETECT=flags", "detect", "flags"),
        ("DETECT=Behaviour", "detect", "behaviour"),
        ("MIN_TURNS=1", "min_turns", 1),
        ("MIN_TURNS=40", "min_turns", 40),
        ("LOG_LEVEL=debug", "log_level", "debug"),
        ("LOG_LEVEL=Warning", "log_level", "warning"),
        ("LOG_LEVEL=ERROR", "log_level", "error"),
    ],
)
def test_good_values(assignment: str, field: str, value: Any) -> None:
    settings = read(f"STABILIZER_{assignment}\n")
    assert settings == dataclasses.replace(Settings(), **{field: value})
    assert type(getattr(settings, field)) is type(value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("FLOOR_MHZ", "0"),
        ("FLOOR_MHZ", "-306"),
        ("FLOOR_MHZ", "100001"),
        ("FLOOR_MHZ", "306.5"),
        ("FLOOR_MHZ", "306 MHz"),
        ("FLOOR_MHZ", "max"),
        ("FLOOR_MHZ", "0x132"),
        pytest.param("FLOOR_MHZ", "9" * 5000, id="a number of 5000 digits"),
        ("HOLD_SECONDS", "0"),
        ("HOLD_SECONDS", "0.19"),
        ("HOLD_SECONDS", "60.1"),
        ("HOLD_SECONDS", "1s"),
        ("HOLD_SECONDS", "1,5"),
        ("HOLD_SECONDS", "nan"),
        ("HOLD_SECONDS", "inf"),
        ("HOLD_SECONDS", "true"),
        ("REBIND_SECONDS", "0.1"),
        ("REBIND_SECONDS", "3601"),
        ("REBIND_SECONDS", "nan"),
        ("REBIND_SECONDS", "often"),
        ("LIBRARIES", "libllama.so"),
        ("LIBRARIES", "/opt/a.so:~/b.so"),
        ("LIBRARIES", "/opt/a.so /opt/b.so:c"),
        ("MOE_FLAGS", "--cpu-moe 'open"),
        ("USERS", "nobody-has-this-name"),
        ("USERS", "root nobody-has-this-name"),
        ("USERS", "-1"),
        ("USERS", "1.5"),
        ("DEVFREQ", "17000000.gpu"),
        ("DEVFREQ", "auto"),
        ("DETECT", "none"),
        ("DETECT", "flags behaviour"),
        ("MIN_TURNS", "0"),
        ("MIN_TURNS", "-1"),
        ("MIN_TURNS", "2.5"),
        ("MIN_TURNS", "100001"),
        ("MIN_TURNS", "few"),
        ("LOG_LEVEL", "loud"),
        ("LOG_LEVEL", "10"),
    ],
)
def test_a_bad_value_is_refused_with_its_place_itself_and_what_is_allowed(key: str, value: str) -> None:
    key = f"STABILIZER_{key}"
    written = value.replace("'", "\\'")
    message = error_of(f"# a comment\n\n{key}={written}\n")
    assert message.startswith(f"/etc/file:3: {key}=")
    assert value[:40] in message
    assert f"allowed: {KEYS[key].allowed}" in message


@pytest.mark.parametrize("key", ["DEVFREQ", "LIBRARIES"])
@pytest.mark.parametrize("control", ["\n", "\x1b[2J"])
def test_a_path_has_no_control_characters(key: str, control: str) -> None:
    """It ends up in the log and in what systemd is told."""
    message = error_of(f'STABILIZER_{key}="/sys/class{control}MAINPID=1"\n')
    assert message.startswith(f"/etc/file:1: STABILIZER_{key}='/sys/class")
    assert "cannot be used; allowed: " in message
    assert message.isprintable()


def test_a_node_whose_name_has_a_colon_can_be_configured() -> None:
    """The kernel names devices without an address so: soc:gpu."""
    node = "/sys/class/devfreq/soc:gpu"
    assert read(f"STABILIZER_DEVFREQ={node}\n").devfreq == node


def test_an_empty_flag_is_refused() -> None:
    """It would match every empty argument."""
    assert "allowed:" in error_of("STABILIZER_MOE_FLAGS=\"--cpu-moe ''\"\n")


def test_of_two_assignments_the_last_wins() -> None:
    assert read("STABILIZER_HOLD_SECONDS=2\nSTABILIZER_HOLD_SECONDS=3\n").hold_seconds == 3
    assert read("STABILIZER_HOLD_SECONDS=2\nSTABILIZER_HOLD_SECONDS=\n").hold_seconds == 1, "back to the default"


def test_an_overridden_bad_value_is_still_an_error() -> None:
    assert "/etc/file:1:" in error_of("STABILIZER_HOLD_SECONDS=x\nSTABILIZER_HOLD_SECONDS=3\n")


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("STABILIZER_FLOOR", "STABILIZER_FLOOR_MHZ"),
        ("FLOOR_MHZ", "STABILIZER_FLOOR_MHZ"),
        ("STABILIZER_HOLD_SECOND", "STABILIZER_HOLD_SECONDS"),
        ("STABILIZER_HOLD_MS", "STABILIZER_HOLD_SECONDS"),
        ("STABILISER_USERS", "STABILIZER_USERS"),
        ("stabilizer_log_level", "STABILIZER_LOG_LEVEL"),
        ("STABILIZER_LIBRARY", "STABILIZER_LIBRARIES"),
        ("export STABILIZER_DEVFREQ", "STABILIZER_DEVFREQ"),
    ],
)
def test_an_unknown_key_gets_the_nearest_one_suggested(written: str, nearest: str) -> None:
    assert error_of(f"\n{written}=1\n") == f"/etc/file:2: unknown key {written!r}; did you mean {nearest}?"


def test_a_key_unlike_any_other_gets_the_list() -> None:
    message = error_of("PATH=/usr/bin\n")
    assert "unknown key 'PATH'" in message
    assert all(key in message for key in KEYS)


def test_a_user_is_known_by_name_or_number() -> None:
    somebody = pwd.getpwall()[-1]
    assert read(f"STABILIZER_USERS={somebody.pw_name}\n").user_ids == (somebody.pw_uid,)
    assert read(f"STABILIZER_USERS={somebody.pw_uid}\n").user_ids == (somebody.pw_uid,)


# Files.


def test_a_file_is_read_and_named_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text("STABILIZER_FLOOR_MHZ=1020\n")
    assert load(file).floor_hz == 1_020_000_000
    file.write_text("\n\nSTABILIZER_FLOOR_MHZ=fast\n")
    with pytest.raises(ConfigError, match=f"^{file}:3: STABILIZER_FLOOR_MHZ='fast'"):
        load(file)


def test_lines_may_end_as_in_windows(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_bytes(b"STABILIZER_FLOOR_MHZ=1020\r\n# comment\r\nSTABILIZER_HOLD_SECONDS=2\r\n")
    assert load(file) == Settings(floor_mhz=1020, hold_seconds=2)


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; name an existing file after --config"):
        load(tmp_path / "missing")


@pytest.mark.parametrize("path", [".", "file/settings"])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be read: (Is a|Not a) directory"):
        load(tmp_path / path)


def test_a_file_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_bytes(b"STABILIZER_LOG_LEVEL=\xff\n")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 21\)"):
        load(file)


# In a child, so that pydantic does not stay in the daemon's memory.


def test_a_child_reads_the_same(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text(
        "STABILIZER_FLOOR_MHZ=918\nSTABILIZER_HOLD_SECONDS=0.5\nSTABILIZER_REBIND_SECONDS=2\n"
        "STABILIZER_LIBRARIES=/opt/größe/a.so:/opt/*/b.so\nSTABILIZER_MOE_FLAGS=--x -y\nSTABILIZER_USERS=root 7\n"
        "STABILIZER_DEVFREQ=/sys/class/devfreq/gpu\nSTABILIZER_LOG_LEVEL=debug\n"
    )
    settings = load_in_child(file)
    assert settings == load(file)
    assert hash(settings) == hash(load(file)), "the same types all through: tuples, not lists"


def test_the_childs_error_arrives_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text("STABILIZER_HOLD=1\n")
    with pytest.raises(StabilizerError) as in_child:
        load_in_child(file)
    with pytest.raises(ConfigError) as here:
        load(file)
    assert isinstance(in_child.value, ConfigError)
    assert str(in_child.value) == str(here.value)
    assert in_child.value.hint == here.value.hint


def test_a_child_leaves_no_pydantic_behind(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text("STABILIZER_FLOOR_MHZ=918\n")
    program = (
        "import sys, pathlib\n"
        "from moe_gpu_stabilizer.config import load_in_child\n"
        "assert load_in_child(pathlib.Path(sys.argv[1])).floor_mhz == 918\n"
        "print(*[name for name in sys.modules if name.startswith('pydantic')])\n"
    )
    # Fails here, and says so, where the package cannot be imported without pydantic.
    shown = subprocess.run(
        [sys.executable, "-c", program, str(file)], stdout=subprocess.PIPE, text=True, check=True, env=os.environ
    )
    assert shown.stdout.strip() == ""


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "settings")
    with pytest.raises(ConfigError, match=r"settings: cannot be read: not a regular file"):
        load(tmp_path / "settings")
