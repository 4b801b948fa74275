"""--check: what was found, what would match, what is missing. It changes nothing and needs no root.

gather() looks and returns plain data, findings() judges the data, render() lays the findings out. What cannot be seen
without root is said to be unknown.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from . import __version__, config, devfreq, kernel_support, status
from .check_gpu import Gpu, gpu_findings, look_at_gpu
from .check_llama import Llama, llama_findings, look_at_llama
from .errors import StabilizerError
from .invocation import program, start_command
from .kernel_support import Finding, KernelSupport
from .libraries import USUAL_PLACES
from .processes import printable
from .runtime import Runtime
from .settings import Settings

WIDTH_CHARACTERS = 100
MARKS = {"ok": "ok", "note": "note", "unknown": "unknown", "missing": "MISSING"}

daemon_finding = partial(Finding, "Daemon")


@dataclass(frozen=True)
class Report:
    """Everything that was seen. Names and paths are printable."""

    version: str
    user: str
    as_root: bool
    settings_file: str | None  # None: there is none, the defaults apply
    settings: Settings
    kernel: KernelSupport
    gpu: Gpu
    llama: Llama
    daemon: str | None  # what it is doing; None: it is not running
    daemon_has_troubles: bool


def main(config_path: Path | None, as_json: bool) -> int:
    """Print the report; return 0 where the daemon would work, 1 where something is missing. Raises ConfigError."""
    settings = config.load(config_path)
    settings_file = config_path or (config.DEFAULT_PATH if config.DEFAULT_PATH.exists() else None)
    report = gather(settings, settings_file, as_root=os.geteuid() == 0)
    found = list(findings(report))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name may have letters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    text = json.dumps(to_json(report, found), indent=2) if as_json else render(report, found)
    # Flushed here: that a reader has left is then noticed while it can be handled, not at exit.
    print(text, flush=True)
    return 0 if would_work(found) else 1


def gather(
    settings: Settings,
    settings_file: Path | None,
    as_root: bool,
    class_directory: Path = devfreq.CLASS_DIRECTORY,
    places: Sequence[str] = USUAL_PLACES,
    root: Path = Path("/"),
    runtime: Runtime | None = None,
) -> Report:
    """Look at the machine; `root` is where the kernel's own files are looked for (kernel_support.look())."""
    runtime = runtime or Runtime()
    daemon, daemon_has_troubles = look_at_daemon(runtime)
    return Report(
        version=__version__,
        user=printable(psutil.Process().username()),
        as_root=as_root,
        settings_file=None if settings_file is None else printable(str(settings_file)),
        settings=settings,
        kernel=kernel_support.look(as_root, root),
        gpu=look_at_gpu(settings, class_directory, runtime, as_root),
        llama=look_at_llama(settings, places, runtime),
        daemon=daemon,
        daemon_has_troubles=daemon_has_troubles,
    )


def look_at_daemon(runtime: Runtime) -> tuple[str | None, bool]:
    """Return what a running daemon is doing (None: none is running), and whether it has troubles to tell of."""
    try:
        published = runtime.load_status()
        if published is None:
            return None, False
        stale = status.is_stale(published, time.monotonic())
        headline = "stopped or stuck" if stale else printable(status.headline(published))
        return headline, stale or bool(published["troubles"])
    except (StabilizerError, LookupError, TypeError):  # another version's, or not for this user
        return "its status cannot be read", False


def findings(report: Report) -> Iterator[Finding]:
    """Judge what was seen, in the order of the report. Pure, as all below."""
    yield from kernel_support.findings(report.kernel, "Machine")
    yield from gpu_findings(report.gpu, report.settings, report.as_root, daemon_runs=report.daemon is not None)
    yield from llama_findings(report.llama, report.as_root)
    yield from daemon_findings(report)


def daemon_findings(report: Report) -> Iterator[Finding]:
    defaults = f"the defaults: there is no {config.DEFAULT_PATH}"
    yield daemon_finding("settings", "ok", report.settings_file or defaults)
    if report.daemon is None:
        yield daemon_finding("daemon", "note", "is not running", f"start it: {start_command()}")
    elif report.daemon_has_troubles:
        text = f"is running, with troubles: {report.daemon}"
        yield daemon_finding("daemon", "note", text, shlex.join([*program(), "--status"]))
    else:
        yield daemon_finding("daemon", "ok", f"is running: {report.daemon}")


def would_work(found: Sequence[Finding]) -> bool:
    return not any(finding.state == "missing" for finding in found)


def conclusion(report: Report, found: Sequence[Finding]) -> str:
    missing = sum(finding.state == "missing" for finding in found)
    if missing:
        return f"{status.counted(missing, 'thing is', 'things are')} missing, marked MISSING."
    if report.daemon is not None:
        return "The daemon runs, with troubles." if report.daemon_has_troubles else "The daemon works."
    if any(finding.state == "unknown" for finding in found):
        return f"The daemon would work, as far as can be seen{'' if report.as_root else ' without root'}."
    return "The daemon would work."


def to_json(report: Report, found: Sequence[Finding]) -> dict[str, Any]:
    """Everything that the text says, and the data it comes from."""
    return {
        "ok": would_work(found),
        "conclusion": conclusion(report, found),
        **dataclasses.asdict(report),
        "findings": [dataclasses.asdict(finding) for finding in found],
    }


def render(report: Report, found: Sequence[Finding]) -> str:
    """The report for people."""
    root = "" if report.as_root else ", without root"
    lines = [f"moe-gpu-stabilizer {report.version} on {report.kernel.machine}, checked as {report.user}{root}"]
    topic_characters = max(len(finding.topic) for finding in found)
    section = ""
    for finding in found:
        if finding.section != section:
            section = finding.section
            lines += ["", section]
        lines += rows(finding, topic_characters)
    return "\n".join([*lines, "", conclusion(report, found)])


def rows(finding: Finding, topic_characters: int) -> Iterator[str]:
    """One finding's lines: mark, topic, text, and below the text its remedy."""
    head = f"  {MARKS[finding.state]:<7}  {finding.topic:<{topic_characters}}  "
    yield from wrapped(finding.text, head, " " * len(head))
    if finding.remedy:
        yield from wrapped(finding.remedy, " " * len(head) + "-> ", " " * (len(head) + 3))


def wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH_CHARACTERS,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
