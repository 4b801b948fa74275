"""For --check: does this machine have what the BPF program needs? Kernel, libbcc_bpf, and the right to use them.

What can be tried is tried. What can only be read off the machine is read, and what cannot be seen is None, not a guess.
"""

from __future__ import annotations

import gzip
import importlib
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import libbcc, uprobes
from .errors import ProbeError
from .invocation import again_as_root
from .settings import NANOSECONDS

NEEDED_VERSION = (5, 8)  # the BPF ring buffer

# CONFIG_BPF_EVENTS has no prompt: kernel/trace/Kconfig derives it from the other three.
DERIVED_OPTION = "CONFIG_BPF_EVENTS"
OPTIONS = ("CONFIG_BPF_SYSCALL", "CONFIG_PERF_EVENTS", "CONFIG_UPROBE_EVENTS", DERIVED_OPTION)

# Where a kernel says how it was built, below the root directory. A configuration has some 300 kB.
CONFIG_FILES = ("proc/config.gz", "boot/config-{release}", "lib/modules/{release}/config")
MOST_CONFIG_BYTES = 4 << 20

# Each of these files comes with one option, and the first of each pair shows that the place itself can be seen.
EVIDENCE = {
    "CONFIG_BPF_SYSCALL": ("proc/sys/kernel/ostype", "proc/sys/kernel/unprivileged_bpf_disabled"),
    "CONFIG_PERF_EVENTS": ("proc/sys/kernel/ostype", "proc/sys/kernel/perf_event_paranoid"),  # perf_event_open(2)
    "CONFIG_UPROBE_EVENTS": ("sys/bus", "sys/bus/event_source/devices/uprobe/type"),
}

LOCKDOWN_FILE = "sys/kernel/security/lockdown"

State = Literal["ok", "note", "unknown", "missing"]


@dataclass(frozen=True)
class Finding:
    """One line of the report: how one thing stands, and what to do about it. Only "missing" fails the check."""

    section: str
    topic: str
    state: State
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Attempt:
    """Something that was tried. `works` is None where it could not be."""

    works: bool | None
    problem: str = ""
    remedy: str = ""


NOT_TRIED = Attempt(None)


@dataclass(frozen=True)
class KernelSupport:
    """What the machine says of itself. An option is None where it cannot be seen whether it is set."""

    release: str
    machine: str
    options: Mapping[str, bool | None]
    options_seen_in: str  # a file, or "the running kernel"
    lockdown: str | None  # "none", "integrity", "confidentiality", "absent"; None where it cannot be seen
    library: Attempt
    program: Attempt
    journal: Attempt


def look(as_root: bool, root: Path = Path("/")) -> KernelSupport:
    """Gather it. As root the program is really loaded, and taken out again; `root` is where /proc, /sys, /boot are."""
    release = os.uname().release
    options, seen_in = options_of(root, release)
    library = try_library()
    program = try_program() if as_root and library.works else NOT_TRIED
    lockdown = lockdown_of(root)
    return KernelSupport(release, os.uname().machine, options, seen_in, lockdown, library, program, try_journal())


def options_of(root: Path, release: str) -> tuple[dict[str, bool | None], str]:
    """Return which of OPTIONS the kernel was built with, and where that was seen."""
    for name in CONFIG_FILES:
        path = root / name.format(release=release)
        text = _read_config(path)
        if text:
            return {option: f"\n{option}=y\n".encode() in text for option in OPTIONS}, str(path)
    seen: dict[str, bool | None] = {
        option: os.path.exists(root / present) or (False if os.path.exists(root / place) else None)
        for option, (place, present) in EVIDENCE.items()
    }
    seen[DERIVED_OPTION] = False if False in seen.values() else None if None in seen.values() else True
    return seen, "the running kernel"


def _read_config(path: Path) -> bytes:
    """Return a kernel configuration, or nothing where there is none that can be read."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            text = b"\n" + file.read(MOST_CONFIG_BYTES)
    except (OSError, EOFError, zlib.error):  # not there, not for us, or no gzip file
        return b""
    return text if b"\nCONFIG_" in text else b""


def lockdown_of(root: Path) -> str | None:
    """Return the lockdown mode (kernel_lockdown(7)), "absent" where the kernel has none, None where it is not shown."""
    try:
        mode = re.search(r"\[(\w+)\]", (root / LOCKDOWN_FILE).read_text(encoding="ascii", errors="replace"))
        return mode[1] if mode else None
    except OSError:
        # "lsm" is there whenever securityfs is mounted.
        return "absent" if os.path.exists((root / LOCKDOWN_FILE).with_name("lsm")) else None


def try_library() -> Attempt:
    try:
        libbcc.load_library()
    except ProbeError as error:
        return Attempt(False, error.message, error.hint)
    return Attempt(True)


def try_program() -> Attempt:
    """Load the program and attach one uprobe, to a file that nothing executes; then take both out again."""
    try:
        probe = uprobes.Probe(NANOSECONDS)
        try:
            probe.attach(str(uprobes.BYTECODE), 0).close()
        finally:
            probe.close()
    except ProbeError as error:
        return Attempt(False, error.message, error.hint)
    return Attempt(True)


def try_journal() -> Attempt:
    """Under systemd the daemon writes to the journal through python3-systemd."""
    try:
        importlib.import_module("systemd.journal")
    except ImportError:
        return Attempt(False, "cannot import systemd.journal", "install it: apt-get install python3-systemd")
    return Attempt(True)


def findings(kernel: KernelSupport, section: str) -> Iterator[Finding]:
    """Judge what was seen. Pure."""

    def finding(topic: str, state: State, text: str, remedy: str = "") -> Finding:
        return Finding(section, topic, state, text, remedy)

    yield finding("Linux", *_version(kernel.release))
    for state, text, remedy in _options(kernel):
        yield finding("BPF, uprobes", state, text, remedy)
    yield finding("lockdown", *_lockdown(kernel))
    yield finding("libbcc_bpf", *_tried(kernel.library, f"{libbcc.LIBRARY} can be loaded"))
    yield finding("systemd", *_tried(kernel.journal, "python3-systemd can be imported"))
    if kernel.library.works:
        loaded = "loads, and a uprobe can be attached: both were tried and undone"
        yield finding("BPF program", *_tried(kernel.program, loaded))


def _tried(attempt: Attempt, success: str) -> tuple[State, str, str]:
    if attempt.works is None:
        return "unknown", "loading it cannot be tried without root", again_as_root()
    return ("ok", success, "") if attempt.works else ("missing", attempt.problem, attempt.remedy)


def _version(release: str) -> tuple[State, str, str]:
    needed = ".".join(map(str, NEEDED_VERSION))
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers is None:
        return "unknown", f"{release}; {needed} or newer is needed", ""
    if (int(numbers[1]), int(numbers[2])) < NEEDED_VERSION:
        return "missing", f"{release} has no BPF ring buffer", f"Linux {needed} or newer is needed (JetPack 5 or newer)"
    return "ok", f"{release} ({needed} or newer is needed)", ""


def _options(kernel: KernelSupport) -> Iterator[tuple[State, str, str]]:
    """One line per kind of answer. A program that was loaded answers for every option."""
    answers = {option: kernel.program.works or kernel.options[option] for option in OPTIONS}
    yes, no, unseen = (
        [option for option, answer in answers.items() if answer is wanted] for wanted in (True, False, None)
    )
    if yes:
        yield "ok", f"{_without_prefix(yes)} ({kernel.options_seen_in})", ""
    for option in [option for option in no if option != DERIVED_OPTION] or no:
        yield "missing", f"{option} is not set ({kernel.options_seen_in})", f"a kernel built with {option}=y is needed"
    if unseen:
        may_try = kernel.library.works and kernel.program.works is None
        remedy = f"{again_as_root()} tries it" if may_try else ""
        yield "unknown", f"{_without_prefix(unseen)}: cannot be seen, no configuration is readable", remedy


def _without_prefix(options: list[str]) -> str:
    return ", ".join(option.removeprefix("CONFIG_") for option in options)


def _lockdown(kernel: KernelSupport) -> tuple[State, str]:
    if kernel.lockdown == "confidentiality" and not kernel.program.works:
        # It refuses BPF programs that read kernel memory, kprobes, tracefs and perf's register samples.
        return "note", "confidentiality: refuses much to BPF and perf; nothing of it is used, but this is untested"
    if kernel.lockdown is not None:
        return "ok", "none in this kernel" if kernel.lockdown == "absent" else f"{kernel.lockdown}: not in the way"
    if kernel.program.works:
        return "ok", "not in the way: the program loads"
    return "unknown", "cannot be seen: securityfs is not mounted or not readable"
