"""An emulated arm64 board: its disk and kernels (built once), its boot, and what its checks have come to."""

from __future__ import annotations

import compileall
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import REPOSITORY
from tests.workload import SOURCE

HERE = Path(__file__).resolve().parent
COMPILER = "aarch64-linux-gnu-gcc"

# What the board gets of this tree.
PARTS = ("moe_gpu_stabilizer", "systemd", "tools", "tests")

# Many times what a boot with all its checks takes, and yet an end.
MOST_SECONDS = 1500

KERNEL_ARGUMENTS = (
    *("console=ttyAMA0", "quiet", "audit=0", "mitigations=off"),
    *("systemd.show_status=error", "systemd.condition-needs-update=no"),
)

CONSOLE_LINES = 60


@dataclass(frozen=True)
class Result:
    """Of one check."""

    name: str
    outcome: str  # "passed", "failed"
    seconds: float
    details: str


def build(script: str, argument: str) -> Path:
    """Run a builder, which does nothing where its result is in the cache, and return the path that it prints."""
    built = subprocess.run([HERE / script, argument], stdout=subprocess.PIPE, text=True, check=True)
    return Path(built.stdout.strip())


def build_llama(directory: Path) -> None:
    """llama.cpp's stand-in, for the board: one that needs a flag to count, and one with ggml, which takes turns."""
    directory.mkdir()

    def compile_part(name: str, *arguments: str) -> None:
        command = [COMPILER, "-O2", "-o", str(directory / name), str(SOURCE), "-Wl,--no-as-needed", *arguments]
        subprocess.run([*command, "-pthread"], check=True)

    def link(*names: str) -> list[str]:
        return ["-Wl,-rpath,$ORIGIN", *(str(directory / name) for name in names)]

    for part, name, needed in (
        ("LIBRARY", "libllama.so", []),
        ("GGML_CPU", "libggml-cpu.so", []),
        ("GGML_BASE", "libggml-base.so", link("libggml-cpu.so")),
    ):
        compile_part(name, "-shared", "-fPIC", f"-DPART_{part}", f"-Wl,-soname,{name}", *needed)
    compile_part("llama-server", "-DPART_PROGRAM", *link("libllama.so"))
    compile_part("llama-any", "-DPART_PROGRAM", *link("libllama.so", "libggml-base.so", "libggml-cpu.so"))


class Machine:
    """One that boots, runs its checks, reboots in between, and switches itself off."""

    def __init__(self, directory: Path, release: str, own_bcc: bool, wanted: Sequence[str]) -> None:
        """Switch it on. `release` is the Debian release whose kernel it has; `own_bcc`: and whose BCC.

        `wanted` are the checks to run.
        """
        self._share = directory / "share"
        self._console = directory / "console.log"
        kernel, disk = build("build-kernel.sh", release), build("build-image.sh", sys.executable) / "disk"
        self._share.mkdir()
        for part in PARTS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / part, self._share / "tree" / part, ignore=ignored)
        compileall.compile_dir(self._share / "tree", quiet=1)  # of use where both have the same version of Python
        shutil.copy(HERE / "guest/prepare.sh", self._share)
        build_llama(self._share / "llama.cpp")
        if own_bcc:
            shutil.copytree(kernel / "bcc", self._share / "bcc", symlinks=True)
        (self._share / "wanted").write_text("\n".join(wanted))
        self._begun = time.monotonic()
        self._process = self._boot(kernel, disk)
        self._end = ""

    def _boot(self, kernel: Path, disk: Path) -> subprocess.Popen[bytes]:
        command: list[str | Path] = [
            # Gone with the tests, even if those are killed.
            *("setpriv", "--pdeathsig=KILL", "qemu-system-aarch64", "-M", "virt", "-accel", "tcg,thread=multi"),
            # "max" is three times as slow.
            *("-cpu", "cortex-a72", "-smp", "2", "-m", "1024", "-nographic", "-nic", "none"),
            # All that is written is forgotten at the end, but not at a reboot.
            *("-drive", f"if=none,id=disk,file={disk},format=raw,snapshot=on,cache=unsafe"),
            *("-device", "virtio-blk-pci,drive=disk"),
            *("-fsdev", f"local,id=share,path={self._share},security_model=none"),
            *("-device", "virtio-9p-pci,fsdev=share,mount_tag=host"),
            *("-kernel", kernel / "vmlinuz", "-initrd", kernel / "initrd"),
            *("-append", " ".join(KERNEL_ARGUMENTS)),
        ]
        with self._console.open("wb") as console:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console)

    def wait(self) -> None:
        """Wait until it has switched itself off."""
        if self._end:
            return
        try:
            self._end = f"it ended with status {self._process.wait(MOST_SECONDS)}"
        except subprocess.TimeoutExpired:
            self._end = f"it was still running after {MOST_SECONDS} s"
        finally:
            self.kill()
        self._end += f", {time.monotonic() - self._begun:.0f} s after it was switched on"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def results(self) -> dict[str, Result]:
        file = self._share / "results.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return {result.name: result for result in (Result(**json.loads(line)) for line in lines)}

    @property
    def console(self) -> str:
        """How it ended, and the last lines on its console."""
        lines = self._console.read_text(errors="replace").replace("\r", "").splitlines()
        return "\n".join([*lines[-CONSOLE_LINES:], self._end])
