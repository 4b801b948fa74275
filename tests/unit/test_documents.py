"""The manual page, the shell's completion, the settings file and the README say what the program does."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from moe_gpu_stabilizer import __version__, errors
from moe_gpu_stabilizer.__main__ import USAGE, main, make_parser, parse
from moe_gpu_stabilizer.config import KEYS, from_text
from moe_gpu_stabilizer.libraries import USUAL_PLACES
from moe_gpu_stabilizer.runtime import Raised, Runtime
from moe_gpu_stabilizer.settings import Settings
from moe_gpu_stabilizer.signals import HEARD
from tests.support import REPOSITORY

NAME = "moe-gpu-stabilizer"
PAGE = REPOSITORY / f"man/{NAME}.8"
COMPLETION = REPOSITORY / f"completions/{NAME}"
SETTINGS_FILE = REPOSITORY / f"etc/default/{NAME}"
README = REPOSITORY / "README.md"
UNIT = REPOSITORY / f"systemd/{NAME}.service"
DOCUMENTS = (PAGE, SETTINGS_FILE, README, UNIT)

OPTIONS = {name for action in make_parser()._actions for name in action.option_strings}
# Of llama.cpp and journalctl; the page names them, too.
FOREIGN_OPTIONS = {"--store", *Settings().moe_flags, "--fit", "--output-fields"}


def format_page(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Format the page as man(1) does, with every warning that groff has."""
    command = ["groff", "-K", "utf8", "-mandoc", "-Tutf8", "-ww", *arguments, str(PAGE)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)


@pytest.fixture(scope="module")
def page() -> str:
    """The page as plain text, each paragraph in one line."""
    return format_page("-rLL=9999n", "-P-c", "-P-b", "-P-u", "-P-o").stdout


def section(page: str, title: str) -> str:
    found = re.search(rf"^{title}\n(.*?)(?=^\S)", page, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title}"
    return found[1]


def entries(page: str, title: str) -> list[str]:
    """The paragraphs of a section, each with what is indented below it."""
    return [entry.strip() for entry in re.split(r"^ {7}(?=\S)", section(page, title), flags=re.MULTILINE)[1:]]


# The page.


def test_the_page_is_formatted_without_a_warning() -> None:
    assert format_page("-z").stderr == ""


def test_its_head_says_what_it_is_about(page: str) -> None:
    assert section(page, "NAME").strip().startswith(f"{NAME} - "), "apropos(1) reads it so"
    assert f'"{NAME} {__version__}"' in PAGE.read_text().replace(r"\-", "-").splitlines()[1]


def test_it_shows_the_same_usage_as_the_program(page: str) -> None:
    lines = [line.strip() for line in section(page, "SYNOPSIS").splitlines() if line.strip()]
    assert lines == [line.strip() for line in USAGE.splitlines()]


def test_it_explains_every_option_and_no_other(page: str) -> None:
    heads = [re.match(r"(?:--?[a-z]+(?:, )?)+", entry) for entry in entries(page, "OPTIONS")]
    assert sorted(name for head in heads if head for name in head[0].split(", ")) == sorted(OPTIONS)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page)) <= OPTIONS | FOREIGN_OPTIONS


def test_it_explains_every_key_with_its_default_and_its_range(page: str) -> None:
    explained = {
        entry.partition("=")[0]: entry for entry in entries(page, "SETTINGS") if entry.startswith("STABILIZER_")
    }
    assert list(explained) == list(KEYS)
    assert [entry.splitlines()[0] for entry in explained.values()] == defaults_in_settings_file()
    for name, key in KEYS.items():
        for limits in re.findall(r"from \S+ to \d+", key.allowed):
            assert limits in explained[name]


def test_it_lists_every_exit_status(page: str) -> None:
    listed = [int(entry.split()[0]) for entry in entries(page, "EXIT STATUS")]
    returned = {int(status) for status in re.findall(r"return (\d+)", inspect.getsource(main))}
    raised = {error.exit_code for error in vars(errors).values() if hasattr(error, "exit_code")}
    assert listed == sorted({0} | returned | raised)


def test_it_lists_every_signal(page: str) -> None:
    heads = [re.match(r"(?:SIG[A-Z]+(?:, )?)+", entry) for entry in entries(page, "SIGNALS")]
    assert [name for head in heads if head for name in head[0].split(", ")] == [number.name for number in HEARD]


def test_it_lists_the_places_of_files(page: str, tmp_path: Path) -> None:
    files = section(page, "FILES")
    variables = '"$settings" "$run_directory" "$unit" "$command_link" "$home/uninstall"'
    script = f'. tools/uninstall; printf "%s\\n" {variables}; basename "$man_page"; basename "$completion"'
    answer = subprocess.run(
        ["bash", "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    *installed, man_page, completion = answer.stdout.splitlines()
    assert [path for path in installed if path not in files] == []
    assert (man_page, completion) == (PAGE.name, COMPLETION.name)
    assert [place for place in USUAL_PLACES if place not in files.split()] == []

    runtime = Runtime(tmp_path)
    runtime.lock()
    runtime.save_status({})
    runtime.save_raised(Raised("/node", 306_000_000, (1_020_000_000,)))
    assert [name for name in os.listdir(tmp_path) if f"({name})" not in files] == []


def test_it_lists_what_is_read_from_the_environment(page: str) -> None:
    code = "".join(module.read_text() for module in modules())
    names = set(re.findall(r'os\.environ(?:\.get\(|\[)"(\w+)"', code)) - {"PYTHONPATH"}
    assert "RUNTIME_DIRECTORY" in names
    assert names == set(re.findall(r"\b[A-Z]+_[A-Z]+\b", section(page, "ENVIRONMENT")))


# The log, as the code writes it and as the page explains it.


def modules() -> list[Path]:
    return sorted((REPOSITORY / "moe_gpu_stabilizer").glob("*.py"))


def calls() -> Iterator[tuple[ast.Call, ast.FunctionDef]]:
    """Every call in the package, with the function that it is in."""
    for module in modules():
        for function in ast.walk(ast.parse(module.read_text())):
            if isinstance(function, ast.FunctionDef):
                yield from ((node, function) for node in ast.walk(function) if isinstance(node, ast.Call))


def texts(expression: ast.expr, function: ast.FunctionDef) -> set[str]:
    """The strings that an expression may be: constants, one of two, or a name that the function gives to such."""
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        return {expression.value}
    if isinstance(expression, ast.IfExp):
        return texts(expression.body, function) | texts(expression.orelse, function)
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(expression, ast.Name):
            found |= {text for value in values_for(expression.id, node) for text in texts(value, function)}
    assert found, f"line {expression.lineno}: cannot tell what {ast.unparse(expression)} is"
    return found


def values_for(name: str, assignment: ast.Assign) -> Iterator[ast.expr]:
    """What an assignment gives to this name, alone or as one of several."""
    value = assignment.value
    for target in assignment.targets:
        if isinstance(target, ast.Name) and target.id == name:
            yield value
        elif isinstance(target, ast.Tuple):
            names = [element.id if isinstance(element, ast.Name) else "" for element in target.elts]
            for tuple_ in [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]:
                if name in names and isinstance(tuple_, ast.Tuple):
                    yield tuple_.elts[names.index(name)]


class Told(NamedTuple):
    """What one call in the code tells the log."""

    event: str
    fields: set[str]  # that it may have
    causes: set[str]  # a trouble's REASON; of troubles with libraries without the path that follows
    wordings: list[re.Pattern[str]]


def told_by_code() -> Iterator[Told]:
    for call, function in calls():
        fields = {keyword.arg for keyword in call.keywords if keyword.arg and keyword.arg.isupper()}
        name = ast.unparse(call.func)
        if name == "fields":
            for event in texts(call.args[0], function):
                yield Told(event, fields, set(), wordings_in(function))
        elif re.fullmatch(r".*troubles\.(begin|replace|end)|self\.begin", name):
            event = "trouble-over" if name.endswith("end") else "trouble"
            # What Troubles itself passes on has its cause from elsewhere.
            causes = set() if name == "self.begin" else texts(call.args[0], function)
            yield Told(event, fields, causes, wordings_in(function))


def wordings_in(function: ast.FunctionDef) -> list[re.Pattern[str]]:
    """Every text in a function that has some words in it: what is put into it may be anything."""
    patterns = []
    for node in ast.walk(function):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        constants = [part.value if isinstance(part, ast.Constant) else "%s" for part in parts]
        pieces = re.split("%[sd]", "".join(map(str, constants)))
        if len(re.findall("[a-z]", "".join(pieces))) >= 3:
            patterns.append(re.compile(".+".join(map(re.escape, pieces))))
    return patterns


@pytest.fixture
def explained_events(page: str) -> dict[str, str]:
    return {entry.split()[0]: entry for entry in entries(page, "LOG") if "Fields: " in entry}


def test_the_page_explains_every_event_with_its_fields(explained_events: dict[str, str]) -> None:
    fields: dict[str, set[str]] = {}
    for told in told_by_code():
        fields.setdefault(told.event, set()).update(told.fields)
    explained = {}
    for event, entry in explained_events.items():
        listed = re.search(r"Fields: ([A-Z_, ]+|none)\.", entry)
        assert listed, entry
        explained[event] = set(listed[1].split(", ")) - {"none"}
    assert explained == fields


def test_it_names_every_reason_of_a_trouble(explained_events: dict[str, str]) -> None:
    causes = {cause for told in told_by_code() for cause in told.causes}
    assert {"node", "attach"} <= causes
    assert [cause for cause in causes if not re.search(rf"\b{cause}\b", explained_events["trouble"])] == []


def test_its_examples_are_lines_that_the_program_writes(explained_events: dict[str, str]) -> None:
    for event, entry in explained_events.items():
        patterns = [pattern for told in told_by_code() if told.event == event for pattern in told.wordings]
        examples = [line.strip() for line in entry.partition("\n\n")[2].splitlines() if line.strip()]
        assert examples, event
        for example in examples:
            assert any(pattern.fullmatch(example) for pattern in patterns), f"nothing writes: {example}"


# The settings file, the README, and what all of them name.


def defaults_in_settings_file() -> list[str]:
    return re.findall(r"^#(STABILIZER_.*)$", SETTINGS_FILE.read_text(), re.MULTILINE)


def test_what_is_commented_out_in_the_settings_file_are_the_defaults() -> None:
    lines = defaults_in_settings_file()
    assert [line.partition("=")[0] for line in lines] == list(KEYS)
    assert from_text("\n".join(lines), "the defaults") == Settings()
    assert from_text(SETTINGS_FILE.read_text(), "the file") == Settings(), "nothing else is set in it"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_names_only_keys_and_options_that_there_are(document: Path) -> None:
    text = document.read_text().replace(r"\-", "-").replace(r"\(dq", '"')
    for_tests = {"STABILIZER_FAULTS"}
    assert set(re.findall(r"\bSTABILIZER_\w+", text)) <= set(KEYS) | for_tests
    named = {name for options in re.findall(rf"{NAME}((?: --\w[\w-]*)+)", text) for name in options.split()}
    assert named <= OPTIONS


@pytest.mark.parametrize("document", [PAGE, SETTINGS_FILE, README], ids=lambda path: path.name)
def test_a_document_names_the_flags_that_count(document: Path) -> None:
    words = re.findall(r"-[\w-]+", document.read_text().replace(r"\-", "-"))
    assert set(Settings().moe_flags) <= set(words)


# The completion, in a real bash.

BASH_COMPLETION = Path("/usr/share/bash-completion/bash_completion")
INSERT_ALL, NOTE_LINE, CLEAR_LINE = "\x1b*", "\x07", "\x15"

with_and_without_helpers = pytest.mark.parametrize("helpers", [False, True], ids=["bash alone", "bash-completion"])


class Shell:
    """bash, in whose line editor things are typed and all that is offered is then inserted."""

    def __init__(self, directory: Path, helpers: bool) -> None:
        """`helpers`: bash-completion is there, and finds the completion where install.sh puts it, by its name."""
        self.directory = directory / "here"
        self.directory.mkdir()
        self._home = directory
        self._noted = directory / "noted"
        self._setup = [f"source {COMPLETION}"]
        if helpers:
            completions = directory / "share/bash-completion/completions"
            completions.mkdir(parents=True)
            (completions / NAME).symlink_to(COMPLETION)
            self._setup = [f"source {BASH_COMPLETION}"]

    def complete(self, *lines: str) -> list[str]:
        """What these lines become."""
        note = f"""bind -x '"\\C-g": printf "%s\\n" "$READLINE_LINE" >>{self._noted}'"""
        typed = "".join(f"{line}{INSERT_ALL}{NOTE_LINE}{CLEAR_LINE}" for line in lines)
        environment = {
            "PATH": f"{self._home}:{os.environ['PATH']}", "HOME": str(self._home), "INPUTRC": "/dev/null",
            "TERM": "dumb", "LC_ALL": "C.UTF-8", "XDG_DATA_DIRS": str(self._home / "share"),
        }  # fmt: skip
        # In a session of its own: an interactive shell would take our terminal.
        shell = subprocess.run(
            ["bash", "--norc", "--noprofile", "-i"],
            input="\n".join([*self._setup, note, f"{typed}exit\n"]),
            env=environment, cwd=self.directory, capture_output=True, text=True, timeout=60, check=False,
            start_new_session=True,
        )  # fmt: skip
        noted = self._noted.read_text().splitlines() if self._noted.exists() else []
        assert len(noted) == len(lines), shell.stdout + shell.stderr
        assert "not found" not in shell.stderr, shell.stderr
        return [line.rstrip() for line in noted]


@pytest.fixture
def shell(tmp_path: Path, helpers: bool) -> Shell:
    if helpers:
        assert BASH_COMPLETION.exists(), "the tests need Debian's package bash-completion"
    return Shell(tmp_path, helpers)


def is_taken(arguments: Sequence[str]) -> bool:
    """Would the program take these arguments?"""
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            parse(arguments)
    except SystemExit:
        return False
    return True


def options_that_may_follow(arguments: Sequence[str]) -> set[str]:
    used = {argument.partition("=")[0] for argument in arguments}
    values = {"--config": ["FILE"]}
    return {name for name in OPTIONS - used if is_taken([*arguments, name, *values.get(name, [])])}


@with_and_without_helpers
def test_the_first_word_may_be_any_option(shell: Shell) -> None:
    (line,) = shell.complete(f"{NAME} ")
    assert set(line.split()[1:]) == options_that_may_follow([]) | {"--help", "--version"}


BEGINNINGS = (
    "--check", "--check --json", "--check --config FILE", "--check --json --config FILE", "--status", "--status --json",
    "--json", "--json --check", "--config FILE", "--config=FILE", "--config FILE --json", "--config=FILE --check",
    "--reload", "--restore", "--version", "--help", "-h",
)  # fmt: skip


@with_and_without_helpers
def test_offered_is_what_the_program_would_take(shell: Shell) -> None:
    lines = shell.complete(*(f"{NAME} {beginning} " for beginning in BEGINNINGS))
    for beginning, line in zip(BEGINNINGS, lines, strict=True):
        offered = line.removeprefix(f"{NAME} {beginning}").split()
        assert set(offered) == options_that_may_follow(beginning.split()), beginning


@with_and_without_helpers
def test_a_word_that_was_begun_is_completed(shell: Shell) -> None:
    assert shell.complete(f"{NAME} --st", f"{NAME} --check --c", f"/opt/venv/bin/{NAME} --res") == [
        f"{NAME} --status",
        f"{NAME} --check --config",
        f"/opt/venv/bin/{NAME} --restore",
    ]


@with_and_without_helpers
def test_config_is_followed_by_a_file(shell: Shell) -> None:
    (shell.directory / "my.conf").touch()
    (shell.directory / "two words.conf").touch()
    (shell.directory / "folder").mkdir()
    typed = (
        "--config m",
        "--config=m",
        "--check --json --config m",
        "--config tw",
        "--config f",
        "--status --config=x",
    )
    assert shell.complete(*(f"{NAME} {words}" for words in typed)) == [
        f"{NAME} --config my.conf",
        f"{NAME} --config=my.conf",
        f"{NAME} --check --json --config my.conf",
        rf"{NAME} --config two\ words.conf",
        f"{NAME} --config folder",
        f"{NAME} --status --config=x",
    ]


@with_and_without_helpers
def test_demo_is_followed_by_a_command_of_ones_own(shell: Shell) -> None:
    command = shell.directory.parent / "moe-test-llama-bench"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    (shell.directory / "model.gguf").touch()
    typed = (
        "--demo ",
        "--demo -- moe-test-l",
        f"--demo -- {command}",
        "--demo -- moe-test-llama-bench -m mo",
        "-- moe-test-l",
    )
    assert shell.complete(*(f"{NAME} {words}" for words in typed)) == [
        f"{NAME} --demo --",
        f"{NAME} --demo -- moe-test-llama-bench",
        f"{NAME} --demo -- {command}",
        f"{NAME} --demo -- moe-test-llama-bench -m model.gguf",
        f"{NAME} -- moe-test-l",
    ]
