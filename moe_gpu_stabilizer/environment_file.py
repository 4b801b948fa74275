"""Read KEY=VALUE files as systemd's EnvironmentFile= does (systemd.exec(5)). Pure.

What systemd skips in silence is an error here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .errors import ConfigError

COMMENT_MARKS = "#;"
# Inside double quotes a backslash escapes these; before anything else it stands for itself.
ESCAPABLE = '"\\`$'


class Assignment(NamedTuple):
    line: int  # counted from 1
    key: str
    value: str


def parse(text: str, name: str) -> Iterator[Assignment]:
    """Yield the assignments of a file's text; `name` is how errors call the file.

    A comment is a line that starts with # or ;, never the end of a line. A value may be quoted, in whole or in parts;
    unquoted it ends with the line, less its trailing blanks. A backslash before the end of a line continues it.

    Raises ConfigError for a line that is no assignment and for a quote that is never closed.
    """
    position, line = 0, 1
    while position < len(text):
        end = text.find("\n", position)
        end = len(text) if end < 0 else end
        raw = text[position:end].strip()
        if not raw or raw[0] in COMMENT_MARKS:
            position, line = end + 1, line + 1
            continue
        key, equals, _ = text[position:end].partition("=")
        if not equals:
            raise ConfigError(
                f"{name}:{line}: {raw[:60]!r} is not an assignment", "write KEY=VALUE, or # before a comment"
            )
        value, after = _value(text, position + len(key) + 1, f"{name}:{line}")
        yield Assignment(line, key.strip(), value)
        line += text.count("\n", position, after)
        position = after


def _value(text: str, position: int, where: str) -> tuple[str, int]:
    """Read a value from `position`; return it and the position behind its line."""
    value: list[str] = []
    keep = 0  # characters that trailing blanks must not be cut from: what was quoted or escaped
    started = False  # inside an unquoted part, where a quote is an ordinary character
    while position < len(text):
        character = text[position]
        position += 1
        if character == "\n":
            break
        if character == "\\":
            if position < len(text) and text[position] != "\n":
                value.append(text[position])
                keep = len(value)
            position += 1
            started = True
        elif character in "'\"" and not started:
            quoted, position = _quoted(text, position, character, where)
            value = value[:keep] + list(quoted)
            keep = len(value)
        elif started or not character.isspace():
            value.append(character)
            started = True
    unquoted = "".join(value[keep:]).rstrip()
    return "".join(value[:keep]) + unquoted, position


def _quoted(text: str, position: int, quote: str, where: str) -> tuple[str, int]:
    """Read up to the closing quote; return what was inside and the position behind it."""
    inside: list[str] = []
    while position < len(text):
        character = text[position]
        position += 1
        if character == quote:
            return "".join(inside), position
        if character == "\\" and quote == '"' and position < len(text):
            escaped = text[position]
            position += 1
            if escaped == "\n":
                continue
            inside.append(escaped if escaped in ESCAPABLE else "\\" + escaped)
        else:
            inside.append(character)
    raise ConfigError(f"{where}: the quote {quote} is never closed", f"put a {quote} at the end of the value")
