"""Fixtures of the tests on the real kernel. They need root and BPF; without them they fail, they do not skip."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from moe_gpu_stabilizer.libbcc import LIBRARY, load_library
from tests.support import PlainNode, RunningDaemon
from tests.workload import Workload, build_library, build_program

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session", params=["committed", "fresh"])
def package_root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package under test lies: as committed, and with a program that BCC has compiled just now.

    So the committed bytecode and its source cannot drift apart.
    """
    if request.param == "committed":
        return REPOSITORY
    root = tmp_path_factory.mktemp("fresh")
    shutil.copytree(REPOSITORY / "moe_gpu_stabilizer", root / "moe_gpu_stabilizer")
    subprocess.run([REPOSITORY / "tools/kernel-headers"], check=True)
    compiled = root / "moe_gpu_stabilizer" / "probe.json"
    compiled.unlink()
    # Debian's python3-bpfcc is for Debian's interpreter.
    subprocess.run(["/usr/bin/python3", REPOSITORY / "tools/compile-probe", "--output", compiled], check=True)
    return root


def loaded_from_runtime(pid: int) -> bool:
    """Has this process BCC's library, and Python if it is there, from the folder in STABILIZER_RUNTIME?

    tests/runtimes/run sets it. Without it anything will do.
    """
    wanted = os.environ.get("STABILIZER_RUNTIME")
    if wanted is None:
        return True
    paths = [mapping.path for mapping in psutil.Process(pid).memory_maps()]
    libraries = [path for path in paths if LIBRARY in path]
    programs = [path for path in paths if "/bin/python" in path]
    if (Path(wanted) / "usr/bin/python3").exists():
        libraries += programs
    return bool(libraries) and all(path.startswith(f"{wanted}/") for path in libraries)


@pytest.fixture(scope="session", autouse=True)
def probes_from_runtime() -> None:
    """Tests that set probes themselves use the wanted library, too."""
    load_library()
    assert loaded_from_runtime(os.getpid())


class Llama(NamedTuple):
    """A built stand-in for llama.cpp."""

    library: Path
    program: Path


@pytest.fixture
def llama(tmp_path: Path) -> Llama:
    library = build_library(tmp_path / "llama" / "libllama.so")
    return Llama(library, build_program(tmp_path / "llama" / "llama-server", library))


@pytest.fixture
def flag() -> str:
    """A flag of this test alone: other tests, and other copies of this one, run beside it on the same kernel."""
    return f"--cpu-moe-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def node(tmp_path: Path) -> PlainNode:
    return PlainNode(tmp_path / "17000000.gpu")


@pytest.fixture
def start_daemon(
    tmp_path: Path, package_root: Path, node: PlainNode, flag: str
) -> Iterator[Callable[..., RunningDaemon]]:
    """Start the real daemon; keyword arguments are settings. It rebinds rarely unless told otherwise.

    Only this test's flag counts: turns of programs that other tests run beside it must not.
    """
    daemons: list[RunningDaemon] = []
    with ExitStack() as stack:

        def start(prefix: tuple[str, ...] = (), **settings: object) -> RunningDaemon:
            wanted = {"moe_flags": flag, "detect": "flags", "rebind_seconds": 3600, **settings}
            daemons.append(RunningDaemon(tmp_path, node.directory, package_root, prefix, **wanted))
            daemon = stack.enter_context(daemons[-1])
            assert loaded_from_runtime(daemon.pid)
            return daemon

        yield start
    for daemon in daemons:  # pytest shows this where the test failed
        print(f"--- the daemon's log ({daemon.log_path})\n{daemon.log}")


@pytest.fixture
def run(llama: Llama, flag: str) -> Iterator[Callable[..., Workload]]:
    """Start the stand-in, with the flag that counts unless told otherwise."""
    with ExitStack() as stack:

        def start(*arguments: str, program: Path = llama.program, counts: bool = True, **options: object) -> Workload:
            flags = (flag,) if counts else ()
            return stack.enter_context(Workload(program, *flags, *arguments, **options))  # type: ignore[arg-type]

        yield start
