"""The installed service in a container, and llama.cpp's stand-in beside it, as the tests use them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import HIGHEST_HZ, LOWEST_HZ, wait_until
from tests.system.container import Container
from tests.workload import Workload

NAME = "moe-gpu-stabilizer"
HOME = f"/opt/{NAME}"
SETTINGS = f"/etc/default/{NAME}"
SOURCE = "/mnt/src"
INSTALL = f"{SOURCE}/install.sh"
UNINSTALL = f"{HOME}/uninstall"

# Probed functions of the stand-in for libllama: one uprobe each.
FUNCTIONS = 3


class Service:
    """The installed service. Its workloads carry a flag of their own: the machine's other daemons see them, too."""

    def __init__(self, container: Container) -> None:
        self.container = container
        self.flag = f"--cpu-moe-{uuid.uuid4().hex[:8]}"
        self._settings: dict[str, object] = {}

    def configure(self, **settings: object) -> None:
        """Add to the settings; the service reads them at its next start or reload."""
        self._settings = {**self._settings, **settings}
        lines = [f'STABILIZER_{key.upper()}="{value}"\n' for key, value in self._settings.items()]
        flags = f'STABILIZER_MOE_FLAGS="{self.flag}"\n'
        self.container.run("tee", SETTINGS, input="".join([flags, *lines]))

    def forget_settings(self) -> None:
        self._settings = {}
        self.configure()

    def systemctl(self, verb: str, check: bool = True) -> int:
        return self.container.run("systemctl", verb, NAME, check=check).returncode

    def show(self, name: str) -> str:
        return self.container.show(NAME, name)

    @property
    def pid(self) -> int:
        return int(self.show("MainPID"))

    def journal(self) -> str:
        return self.container.journal(NAME, "--output=cat")

    @property
    def raised(self) -> bool:
        return self.container.node.min_hz == HIGHEST_HZ

    def wait_until_raised(self) -> None:
        wait_until(lambda: self.raised, f"the floor up\n{self.container.console[-3000:]}")

    def wait_until_given_back(self, seconds: float = 15) -> None:
        given_back = "the floor given back"
        wait_until(lambda: self.container.node.min_hz == LOWEST_HZ, given_back, seconds)

    def wait_until_active(self, other_than: int = 0) -> None:
        """Wait until it has started (again: with another pid than this)."""
        self.container.wait_for(
            lambda: self.show("ActiveState") == "active" and self.pid not in (0, other_than), "an active service"
        )

    @contextmanager
    def llama_server(self, place: str = "/opt/llama.cpp/build/bin", flag: str | None = None) -> Iterator[Workload]:
        """A running llama-server, built in `place`."""
        with Workload(build(self.container, place), flag or self.flag, prefix=self.container.enter()) as workload:
            yield workload

    @contextmanager
    def held_up(self) -> Iterator[Workload]:
        """A llama-server that has called once, and the clock up for a minute after."""
        self.configure(hold_seconds=60)
        self.systemctl("reload")
        with self.llama_server() as server:
            server.do("call 1")
            self.wait_until_raised()
            yield server


def build(container: Container, place: str) -> Path:
    """Build llama.cpp's stand-in inside, where it is not there yet; return the path of its llama-server."""
    source, library, program = (
        f"{SOURCE}/moe_gpu_stabilizer/workload.c",
        f"{place}/libllama.so",
        f"{place}/llama-server",
    )
    if not container.path(program).exists():
        container.run("mkdir", "-p", place)
        container.run("cc", "-shared", "-fPIC", "-DPART_LIBRARY", "-Wl,-soname,libllama.so", "-o", library, source)
        container.run(
            "cc",
            "-DPART_PROGRAM",
            "-o",
            program,
            source,
            "-Wl,--no-as-needed",
            library,
            f"-Wl,-rpath,{place}",
            "-pthread",
        )
    return Path(program)
