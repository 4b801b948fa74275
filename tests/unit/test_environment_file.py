"""KEY=VALUE files as systemd.exec(5) describes them under EnvironmentFile=, and as systemd's env-file.c reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_gpu_stabilizer.environment_file import Assignment, parse
from moe_gpu_stabilizer.errors import ConfigError


def read(text: str) -> list[tuple[str, str]]:
    return [(assignment.key, assignment.value) for assignment in parse(text, "file")]


def value_of(written: str) -> str:
    """What `KEY=` with this behind it is read as."""
    ((key, value),) = read(f"KEY={written}\n")
    assert key == "KEY"
    return value


def test_an_empty_file_says_nothing() -> None:
    assert read("") == []
    assert read("\n \n\t\n") == []


def test_one_assignment_per_line_in_order() -> None:
    assert read("A=1\nB=2\nA=3") == [("A", "1"), ("B", "2"), ("A", "3")]


def test_each_assignment_knows_its_line() -> None:
    text = '# a comment\n\nA=1\nB="two\nlines"\nC=conti\\\nnued\nD=4'
    assert list(parse(text, "file")) == [
        Assignment(3, "A", "1"),
        Assignment(4, "B", "two\nlines"),
        Assignment(6, "C", "continued"),
        Assignment(8, "D", "4"),
    ]


@pytest.mark.parametrize("line", ["# a comment", "; another", "  # indented", "\t;", "#A=1", "#", "# it's \"open"])
def test_a_line_that_begins_with_a_mark_is_a_comment(line: str) -> None:
    assert read(f"{line}\nB=2\n") == [("B", "2")]


def test_a_comment_does_not_continue_on_the_next_line() -> None:
    """As in systemd since 254."""
    assert read("# a comment \\\nB=2\n") == [("B", "2")]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("", ""),
        ("   ", ""),
        ("plain", "plain"),
        ("  plain  ", "plain"),
        ("two words", "two words"),
        ("tab\tinside\t", "tab\tinside"),
        ("a=b=c", "a=b=c"),
        ("value # not a comment", "value # not a comment"),
        ("value ; nor this", "value ; nor this"),
        ("#306", "#306"),
        ("$HOME `id` *", "$HOME `id` *"),
        ("it's", "it's"),
        ('6" of snow', '6" of snow'),
        ("größe", "größe"),
    ],
)
def test_an_unquoted_value_ends_with_its_line(written: str, value: str) -> None:
    assert value_of(written) == value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r"a\b", "ab"),
        (r"a\\b", r"a\b"),
        (r"\"a\"", '"a"'),
        (r"\'a", "'a"),
        (r"\ a", " a"),
        ("a\\ ", "a "),
        ("a\\  ", "a "),
        (r"\#a", "#a"),
        ("con\\\ntinued", "continued"),
        ("con\\\n  tinued", "con  tinued"),
        ("\\\n", ""),
        ("\\\nnext", "next"),
        ("a\\\n\\\nb", "ab"),
    ],
)
def test_a_backslash_outside_quotes_takes_the_next_character_as_it_is(written: str, value: str) -> None:
    assert value_of(written) == value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('""', ""),
        ('"a"', "a"),
        ('  "a"  ', "a"),
        ('" a "', " a "),
        ('"# no comment"', "# no comment"),
        ('"it\'s"', "it's"),
        (r'"a \" b"', 'a " b'),
        (r'"a\\b"', r"a\b"),
        (r'"\$HOME \`id\`"', "$HOME `id`"),
        (r'"a\b\n"', r"a\b\n"),
        ('"two\nlines"', "two\nlines"),
        ('"con\\\ntinued"', "continued"),
    ],
)
def test_double_quotes_keep_all_but_what_a_backslash_escapes(written: str, value: str) -> None:
    assert value_of(written) == value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("''", ""),
        ("'a'", "a"),
        ("' a '", " a "),
        (r"'a\b\\'", r"a\b\\"),
        ("'a\\\nb'", "a\\\nb"),
        ("'say \"a\"'", 'say "a"'),
        ("'two\nlines'", "two\nlines"),
    ],
)
def test_single_quotes_keep_everything(written: str, value: str) -> None:
    assert value_of(written) == value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("\"a\"'b'c", "abc"),
        ("\"a\" 'b'  c", "abc"),
        ('"a"b c', "ab c"),
        ('"a " b ', "a b"),
        ("'' a", "a"),
        ('a"b"', 'a"b"'),
        ('"a" b "c"', 'ab "c"'),
        ("\"a\"\\\n'b'", "a'b'"),
    ],
)
def test_parts_are_joined_and_a_quote_behind_plain_text_is_plain(written: str, value: str) -> None:
    assert value_of(written) == value


def test_blanks_around_the_key_do_not_belong_to_it() -> None:
    assert read("  A = 1\n\tB\t=2\n") == [("A", "1"), ("B", "2")]


def test_a_last_line_may_lack_its_end() -> None:
    assert read("A=1") == [("A", "1")]
    assert read("A=") == [("A", "")]
    assert read("A=1\\") == [("A", "1")]
    assert read("A='1'") == [("A", "1")]


# What systemd skips in silence.


@pytest.mark.parametrize(("text", "line"), [("nonsense", 1), ("A=1\n\nexport B\n", 3), ("A='1\n2'\nSTABILIZER\n", 3)])
def test_a_line_without_an_assignment_is_an_error(text: str, line: int) -> None:
    with pytest.raises(ConfigError, match=rf"^/etc/file:{line}: .* is not an assignment; write KEY=VALUE"):
        list(parse(text, "/etc/file"))


@pytest.mark.parametrize(
    ("text", "line", "quote"),
    [('A="1', 1, '"'), ("A=1\nB='2\nC=3\n", 2, "'"), ('A="1\\"\n', 1, '"'), ('A="1\\', 1, '"'), ("A='a'\"b", 1, '"')],
)
def test_a_quote_that_is_never_closed_is_an_error_where_it_was_opened(text: str, line: int, quote: str) -> None:
    with pytest.raises(ConfigError, match=rf"^file:{line}: the quote {quote} is never closed"):
        list(parse(text, "file"))


def test_a_long_line_does_not_make_a_long_error() -> None:
    with pytest.raises(ConfigError) as caught:
        list(parse("x" * 100_000, "file"))
    assert len(str(caught.value)) < 200


# What others write is read as they meant it.

TEXTS = st.text(st.characters(exclude_characters="\0\r", codec="utf-8"))


@given(TEXTS)
def test_whatever_is_in_double_quotes_comes_back(value: str) -> None:
    escaped = "".join("\\" + character if character in '"\\`$' else character for character in value)
    assert value_of(f'"{escaped}"') == value


@given(TEXTS)
def test_whatever_is_in_single_quotes_comes_back(value: str) -> None:
    unquoted = value.replace("'", "")
    assert value_of(f"'{unquoted}'") == unquoted


@given(st.text(st.sampled_from("AB=\\\"'# ;\n\t$")))
def test_any_text_is_read_or_refused_and_lines_are_counted(text: str) -> None:
    try:
        assignments = list(parse(text, "file"))
    except ConfigError:
        return
    lines = [assignment.line for assignment in assignments]
    assert lines == sorted(set(lines))
    assert all(1 <= line <= text.count("\n") + 1 for line in lines)
