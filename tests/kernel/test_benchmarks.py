"""The benchmarks run and say what they measured. What they measure is for people to judge: machines differ."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import sections
from tests.support import alone_with_real_flags


def test_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, few in {"SECTIONS": 100, "ROUNDS": 2, "SECONDS": 1}.items():
        monkeypatch.setattr(sections, name, few)
    with alone_with_real_flags():
        sections.measure_sections(tmp_path)
        sections.measure_daemon(tmp_path)
    said = capsys.readouterr().out
    for row in ("unprobed", "bare entry probe", "ignored process", "process that counts"):
        assert re.search(rf"^  {row} +\d+ ns +[+-]\d+ ns", said, re.MULTILINE)
    for row in ("no inference", "3000 graphs/s"):
        assert re.search(rf"^  {row} +\d+\.\d+ % of a core, \d+ wake-ups$", said, re.MULTILINE)
