"""What must stay true of the package as a whole, so that it stays readable, small and harmless."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import moe_gpu_stabilizer

PACKAGE = Path(moe_gpu_stabilizer.__file__).parent
MODULES = sorted(PACKAGE.glob("*.py"))

# Everything comes in as arguments and goes out as values. What they may import can neither read nor write nor wait.
PURE = ("policy", "matching", "turns", "fairness", "ration", "shares", "environment_file", "errors", "settings")
HARMLESS = {
    "__future__", "annotated_types", "collections", "collections.abc", "dataclasses", "enum", "functools", "itertools",
    "re", "typing",
}  # fmt: skip

MOST_LINES = 250

# A return probe makes a C++ exception that crosses the probed function end the program: see uprobes.py.
RETURN_PROBE_WORDS = ("uretprobe", "ret_probe", "retprobe", "probe_return", "config_retprobe", "kretprobe")


def name_of(path: Path) -> str:
    return path.name


def imports_of(path: Path) -> set[str]:
    """Every module that is imported anywhere in it; one of the package with a dot before its name."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            imported.update([f".{node.module}"] if node.module else [f".{alias.name}" for alias in node.names])
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module)
    return imported


def without_comments(path: Path) -> str:
    """The code alone: of Python without comments and docstrings, of C without comments."""
    text = path.read_text()
    if path.suffix != ".py":
        while "/*" in text:
            before, _, rest = text.partition("/*")
            text = before + rest.partition("*/")[2]
        return "\n".join(line.partition("//")[0] for line in text.splitlines())
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    layout = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENCODING)
    kept = []
    begins_statement = True
    for token in tokens:
        if token.type != tokenize.COMMENT and not (token.type == tokenize.STRING and begins_statement):
            kept.append(token.string)
        begins_statement = token.type in layout
    return " ".join(kept)


@pytest.mark.parametrize("name", PURE)
def test_the_rules_import_nothing_that_can_act(name: str) -> None:
    allowed = HARMLESS | {f".{pure}" for pure in PURE}
    assert imports_of(PACKAGE / f"{name}.py") - allowed == set()


@pytest.mark.parametrize("name", PURE)
def test_the_rules_use_no_builtin_that_can_act(name: str) -> None:
    calls = [
        node.func for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text())) if isinstance(node, ast.Call)
    ]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    assert called & {"open", "print", "input", "exec", "eval", "compile", "__import__"} == set()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", [*MODULES, *sorted(PACKAGE.glob("*.[ch]"))], ids=name_of)
def test_no_code_names_a_return_probe(path: Path) -> None:
    code = without_comments(path).lower()
    assert code.strip() or path.name == "__init__.py"
    assert [word for word in RETURN_PROBE_WORDS if word in code] == []


def test_the_check_for_return_probes_sees_code_and_only_code(tmp_path: Path) -> None:
    python, c = tmp_path / "a.py", tmp_path / "a.c"
    python.write_text('"""No uretprobe."""\n\n# no uretprobe\nx = 1\n\n\ndef f():\n    """No uretprobe."""\n')
    assert "uretprobe" not in without_comments(python)
    python.write_text('x = "uretprobe"\n')
    assert "uretprobe" in without_comments(python)
    c.write_text("/* no uretprobe */ int x; // no uretprobe\n")
    assert "uretprobe" not in without_comments(c)
    c.write_text("int uretprobe; /* x */\n")
    assert "uretprobe" in without_comments(c)


def test_the_committed_bytecode_was_compiled_from_the_committed_source() -> None:
    compiled = json.loads((PACKAGE / "probe.json").read_text())
    assert set(compiled["sources_sha256"]) == {"probe.c", *(path.name for path in PACKAGE.glob("*.h"))}
    for name, digest in compiled["sources_sha256"].items():
        assert digest == hashlib.sha256((PACKAGE / name).read_bytes()).hexdigest(), name


def test_the_daemon_starts_without_what_is_large() -> None:
    """pydantic and pyelftools are for child processes that end, psutil is for --check."""
    program = "import sys, moe_gpu_stabilizer.daemon, moe_gpu_stabilizer.config; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    loaded = {name.partition(".")[0] for name in shown.split()}
    assert "moe_gpu_stabilizer" in loaded
    assert (
        loaded & {"pydantic", "pydantic_core", "elftools", "psutil", "systemd", "asyncio", "multiprocessing"} == set()
    )


def test_every_import_is_of_the_package_the_standard_library_or_a_dependency() -> None:
    dependencies = {"annotated_types", "elftools", "psutil", "pydantic", "systemd"}
    for path in MODULES:
        for name in imports_of(path):
            first = name.partition(".")[0]
            assert name.startswith(".") or first in dependencies or first in sys.stdlib_module_names, path.name
