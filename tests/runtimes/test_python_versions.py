"""Python 3.10, that of JetPack 6, is the oldest the program runs on: a tool says so, and so does such a Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.unit.test_architecture import PURE

HERE = Path(__file__).resolve().parent


def what_needs_more_than_oldest(*places: Path) -> str:
    """The uses of what Python has only since 3.11, one a line. Syntax is ruff's business, types are mypy's."""
    # pydantic evaluates the annotations that "from __future__ import annotations" leaves alone.
    options = ["--quiet", "--no-tips", "--violations", "--target=3.10-", "--eval-annotations"]
    vermin = Path(sys.executable).with_name("vermin")
    done = subprocess.run(
        [vermin, *options, *places], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert (done.returncode != 0) == bool(done.stdout.strip()), done
    return done.stdout


def test_nothing_needs_more() -> None:
    places = [REPOSITORY / name for name in ("moe_gpu_stabilizer", "tests", "benchmarks", "tools/compile-probe")]
    assert what_needs_more_than_oldest(*places) == ""


@pytest.mark.parametrize(
    ("code", "culprit"),
    [
        ("import tomllib", "tomllib"),
        ("import asyncio\nasyncio.timeout(1)", "asyncio.timeout"),
        ("from enum import StrEnum", "enum.StrEnum"),
        ("import os\nos.unshare(0)", "os.unshare"),
        ("from __future__ import annotations\nimport typing\nx: typing.Self", "typing.Self"),
    ],
)
def test_the_tool_finds_what_needs_more(tmp_path: Path, code: str, culprit: str) -> None:
    (tmp_path / "newer.py").write_text(code + "\n")
    assert culprit in what_needs_more_than_oldest(tmp_path / "newer.py")


def test_the_rules_hold_on_it() -> None:
    """It is compiled to WebAssembly and has neither processes nor sockets: it can run the pure modules."""
    home = subprocess.check_output([HERE / "fetch-python310.sh", sys.executable], text=True).strip()
    tests = [path for name in PURE for path in (REPOSITORY / "tests/unit").glob(f"test_{name}*.py")]
    # test_turns_rule.py compiles C for the processor of this machine, and tests of what is huge take the time.
    there = [f"tests/unit/{path.name}" for path in sorted(tests) if path.name != "test_turns_rule.py"]
    done = subprocess.run(
        ["node", HERE / "python310.js", home, REPOSITORY, "-c", "/dev/null", "--rootdir", "/repository",
         "-p", "no:cacheprovider", "-k", "not huge_launch and not giant", "--quiet", *there],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout, done.stdout
