"""What --check reads off a kernel, over trees that look like different kernels."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from moe_gpu_stabilizer import kernel_support
from moe_gpu_stabilizer.kernel_support import NOT_TRIED, OPTIONS, Attempt, KernelSupport, lockdown_of, options_of

RELEASE = "5.15.148-tegra"
FULL_CONFIG = "# Linux/arm64 5.15.148 Kernel Configuration\n" + "".join(f"{option}=y\n" for option in OPTIONS)
WITHOUT_UPROBES = FULL_CONFIG.replace("CONFIG_UPROBE_EVENTS=y", "# CONFIG_UPROBE_EVENTS is not set")

WORKS = Attempt(True)
REFUSED = Attempt(False, "the kernel refused", "run as root")
GOOD = KernelSupport(RELEASE, "aarch64", dict.fromkeys(OPTIONS, True), "/proc/config.gz", "none", WORKS, WORKS, WORKS)
UNSEEN = replace(GOOD, options=dict.fromkeys(OPTIONS), options_seen_in="the running kernel", lockdown=None)


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def states(kernel: KernelSupport) -> dict[str, list[str]]:
    """The findings, as topic to states."""
    found: dict[str, list[str]] = {}
    for finding in kernel_support.findings(kernel, "Machine"):
        found.setdefault(finding.topic, []).append(finding.state)
    return found


@pytest.mark.parametrize("name", ["proc/config.gz", f"boot/config-{RELEASE}", f"lib/modules/{RELEASE}/config"])
def test_reads_the_configuration_wherever_it_is(tmp_path: Path, name: str) -> None:
    text = WITHOUT_UPROBES.encode()
    write(tmp_path / name, gzip.compress(text) if name.endswith(".gz") else text)
    options, seen_in = options_of(tmp_path, RELEASE)
    assert options == {**dict.fromkeys(OPTIONS, True), "CONFIG_UPROBE_EVENTS": False}
    assert seen_in == str(tmp_path / name)


@pytest.mark.parametrize(
    "damaged",
    [b"", b"no gzip", gzip.compress(FULL_CONFIG.encode())[:60], gzip.compress(b"something else"), b"\x1f\x8b\x08" * 9],
)
def test_a_damaged_configuration_is_passed_over(tmp_path: Path, damaged: bytes) -> None:
    write(tmp_path / "proc/config.gz", damaged)
    write(tmp_path / f"boot/config-{RELEASE}", FULL_CONFIG.encode())
    options, seen_in = options_of(tmp_path, RELEASE)
    assert all(options.values())
    assert seen_in.endswith(f"config-{RELEASE}")


def test_an_option_is_not_confused_with_a_longer_or_a_module(tmp_path: Path) -> None:
    write(
        tmp_path / f"boot/config-{RELEASE}",
        b"CONFIG_BPF_SYSCALL_X=y\nMY_CONFIG_PERF_EVENTS=y\nCONFIG_UPROBE_EVENTS=n\n",
    )
    assert not any(options_of(tmp_path, RELEASE)[0].values())


def test_without_a_configuration_the_running_kernel_tells(tmp_path: Path) -> None:
    for name in ("ostype", "unprivileged_bpf_disabled", "perf_event_paranoid"):
        write(tmp_path / "proc/sys/kernel" / name, b"1\n")
    write(tmp_path / "sys/bus/event_source/devices/uprobe/type", b"9\n")
    assert options_of(tmp_path, RELEASE) == (dict.fromkeys(OPTIONS, True), "the running kernel")


def test_what_the_running_kernel_lacks_is_not_set(tmp_path: Path) -> None:
    for name in ("ostype", "unprivileged_bpf_disabled", "perf_event_paranoid"):
        write(tmp_path / "proc/sys/kernel" / name, b"1\n")
    (tmp_path / "sys/bus").mkdir(parents=True)
    options, _ = options_of(tmp_path, RELEASE)
    assert [option for option in OPTIONS if options[option] is False] == ["CONFIG_UPROBE_EVENTS", "CONFIG_BPF_EVENTS"]


def test_what_cannot_be_seen_is_not_guessed(tmp_path: Path) -> None:
    assert options_of(tmp_path, RELEASE) == (dict.fromkeys(OPTIONS, None), "the running kernel")
    assert lockdown_of(tmp_path) is None


@pytest.mark.parametrize("mode", ["none", "integrity", "confidentiality"])
def test_reads_the_lockdown_mode(tmp_path: Path, mode: str) -> None:
    text = "none integrity confidentiality\n".replace(mode, f"[{mode}]")
    write(tmp_path / "sys/kernel/security/lockdown", text.encode())
    assert lockdown_of(tmp_path) == mode


def test_a_kernel_without_lockdown_is_told_from_one_that_does_not_show_it(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel/security").mkdir(parents=True)
    assert lockdown_of(tmp_path) is None
    write(tmp_path / "sys/kernel/security/lsm", b"capability")
    assert lockdown_of(tmp_path) == "absent"


def test_a_good_machine_has_no_problem() -> None:
    assert {state for found in states(GOOD).values() for state in found} == {"ok"}


@pytest.mark.parametrize(
    ("release", "state"),
    [("5.8.0", "ok"), ("5.10.216-tegra", "ok"), ("6.1", "ok"), ("10.0-rc1", "ok"), ("5.7.19", "missing"),
     ("4.9.337-tegra", "missing"), ("tip", "unknown"), ("", "unknown")],
)  # fmt: skip
def test_the_version_must_have_the_ring_buffer(release: str, state: str) -> None:
    assert states(replace(GOOD, release=release))["Linux"] == [state]


def test_each_option_that_is_not_set_is_named_with_its_remedy() -> None:
    kernel = replace(GOOD, program=NOT_TRIED, options={**GOOD.options, "CONFIG_UPROBE_EVENTS": False})
    missing = [finding for finding in kernel_support.findings(kernel, "Machine") if finding.state == "missing"]
    assert [finding.text for finding in missing] == ["CONFIG_UPROBE_EVENTS is not set (/proc/config.gz)"]
    assert missing[0].remedy == "a kernel built with CONFIG_UPROBE_EVENTS=y is needed"


def test_what_is_unseen_is_unknown_until_the_program_was_loaded() -> None:
    before = states(replace(UNSEEN, program=NOT_TRIED))
    assert [before[topic] for topic in ("BPF, uprobes", "lockdown", "BPF program")] == [["unknown"]] * 3
    assert {state for found in states(UNSEEN).values() for state in found} == {"ok"}


def test_a_refusal_comes_with_its_remedy() -> None:
    (refusal,) = [
        finding
        for finding in kernel_support.findings(replace(GOOD, program=REFUSED), "Machine")
        if finding.state == "missing"
    ]
    assert (refusal.topic, refusal.text, refusal.remedy) == ("BPF program", "the kernel refused", "run as root")


def test_without_the_library_the_program_is_not_spoken_of() -> None:
    found = states(replace(GOOD, library=Attempt(False, "cannot load it", "install it"), program=NOT_TRIED))
    assert found["libbcc_bpf"] == ["missing"]
    assert "BPF program" not in found


def test_confidentiality_is_a_note_where_nothing_has_been_tried() -> None:
    locked = replace(GOOD, lockdown="confidentiality")
    assert states(replace(locked, program=NOT_TRIED))["lockdown"] == ["note"]
    assert states(locked)["lockdown"] == ["ok"]
