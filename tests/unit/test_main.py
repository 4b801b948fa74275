"""The one error handler."""

from __future__ import annotations

import pytest

from moe_gpu_stabilizer import __main__ as program


def test_a_fault_of_ours_is_one_line_that_says_where(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No traceback reaches a user; the line is what a report needs."""

    def fail(_options: object) -> int:
        raise ValueError("odd\nvalue")

    monkeypatch.setattr(program, "run", fail)
    assert program.main(["--check"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("moe-gpu-stabilizer: internal error at test_main.py:")
    assert line.endswith(r"please report it: ValueError('odd\nvalue')")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(_options: object) -> int:
        raise ModuleNotFoundError("No module named 'pydantic'", name="pydantic")

    monkeypatch.setattr(program, "run", fail)
    assert program.main(["--check"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "the Python package pydantic is missing here; run the installation again" in line


def test_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(_options: object) -> int:
        raise MemoryError

    monkeypatch.setattr(program, "run", fail)
    assert program.main(["--check"]) == 1
    assert capfd.readouterr().err == "moe-gpu-stabilizer: out of memory\n"
