"""Read and check the settings: /etc/default/moe-gpu-stabilizer, or another file of its kind.

Imports pydantic. The daemon therefore reads its settings with load_in_child(), which leaves nothing of it in memory.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import os
import pwd
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .environment_file import Assignment, parse
from .errors import ConfigError
from .isolated import ChildError, call_in_child
from .settings import Settings

DEFAULT_PATH = Path("/etc/default/moe-gpu-stabilizer")
READ_SECONDS = 20


def _flags(text: str) -> tuple[str, ...]:
    flags = tuple(shlex.split(text))
    if "" in flags:
        raise ValueError("would match every empty argument")
    return flags


def _path(text: str) -> str:
    if not text.startswith("/") or not text.isprintable():
        raise ValueError("not absolute, or with a line break in it")
    return text


def _paths(text: str) -> tuple[str, ...]:
    return tuple(_path(path) for path in text.split(":") if path)


def _user_ids(text: str) -> tuple[int, ...]:
    return tuple(int(word) if word.isdigit() else pwd.getpwnam(word).pw_uid for word in text.replace(",", " ").split())


def _same(text: str) -> str:
    return text


class Key(NamedTuple):
    """How one key of the file becomes one field of Settings, and what an error says is allowed."""

    field: str
    allowed: str
    read: Callable[[str], Any] = _same


KEYS = {
    "STABILIZER_FLOOR_MHZ": Key(
        "floor_mhz", "a whole number of MHz from 1 to 100000, or empty for the highest available"
    ),
    "STABILIZER_HOLD_SECONDS": Key("hold_seconds", "a number of seconds from 0.2 to 60"),
    "STABILIZER_REBIND_SECONDS": Key("rebind_seconds", "a number of seconds from 0.2 to 3600"),
    "STABILIZER_LIBRARIES": Key("libraries", "absolute paths or globs, separated by colons", _paths),
    "STABILIZER_DETECT": Key("detect", "flags, behaviour or both", str.lower),
    "STABILIZER_MOE_FLAGS": Key("moe_flags", "command-line flags, separated by blanks", _flags),
    "STABILIZER_MIN_TURNS": Key("min_turns", "a whole number of turns per graph from 1 to 100000"),
    "STABILIZER_USERS": Key(
        "user_ids", "names of existing users or numbers, separated by blanks, or empty for everyone", _user_ids
    ),
    "STABILIZER_DEVFREQ": Key("devfreq", "the absolute path of a devfreq directory, or empty to find the GPU's", _path),
    "STABILIZER_LOG_LEVEL": Key("log_level", "debug, info, warning or error", str.lower),
}


def load(path: Path | None = None) -> Settings:
    """Read settings from `path`; without one from /etc/default, where a missing file means the defaults.

    Raises ConfigError, which names the line, the key, the value, what is allowed, and for an unknown key the nearest
    one.
    """
    name = path or DEFAULT_PATH
    try:
        text = read_regular_file(name).decode("utf-8")
    except FileNotFoundError:
        if path is None:
            return Settings()
        raise ConfigError(
            f"{path}: no such file", "name an existing file after --config, or leave --config away"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{name}: cannot be read: {error.strerror}", "it must be a text file that you may read"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text (byte {error.start})", "save it as UTF-8") from None
    if "\0" in text:
        raise ConfigError(f"{name}: not a text file: it contains a NUL", "write it anew with a text editor")
    return from_text(text, str(name))


def read_regular_file(path: Path) -> bytes:
    """Return a file's content. Raises OSError, also for what is no regular file: a FIFO might never end."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read()


def from_text(text: str, name: str) -> Settings:
    """Read settings from a file's text; `name` is how errors call it. Of two assignments the last wins."""
    fields: dict[str, Any] = {}
    for assignment in parse(text, name):
        key = KEYS.get(assignment.key)
        if key is None:
            raise _unknown(assignment, name)
        fields.pop(key.field, None)
        if assignment.value.strip():
            fields[key.field] = _checked(key, assignment, name)
    return Settings(**fields)


def _checked(key: Key, assignment: Assignment, name: str) -> Any:
    from pydantic import TypeAdapter, ValidationError

    try:
        value = key.read(assignment.value.strip())
        checked = TypeAdapter(Settings).validate_python({key.field: value})
    except (ValidationError, ValueError, KeyError):
        # ValueError: int(), shlex or a relative path; KeyError: getpwnam() knows no such user.
        raise ConfigError(
            f"{name}:{assignment.line}: {assignment.key}={assignment.value[:60]!r} cannot be used",
            f"allowed: {key.allowed}",
        ) from None
    return getattr(checked, key.field)


def _unknown(assignment: Assignment, name: str) -> ConfigError:
    near = difflib.get_close_matches(assignment.key.upper(), KEYS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "allowed: " + ", ".join(KEYS)
    return ConfigError(f"{name}:{assignment.line}: unknown key {assignment.key[:60]!r}", hint)


def load_in_child(path: Path | None = None) -> Settings:
    """load(), in a child process: see isolated.py. Raises ConfigError, also where the child fails."""
    try:
        fields: dict[str, Any] = call_in_child(lambda: dataclasses.asdict(load(path)), READ_SECONDS)
    except ChildError as error:
        raise ConfigError(f"{path or DEFAULT_PATH}: its reader {error}") from None
    for name, value in fields.items():
        fields[name] = tuple(value) if isinstance(value, list) else value
    return Settings(**fields)
