"""A libllama of an older API, laid out in another way, as a language binding ships it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import HIGHEST_HZ, LOWEST_HZ, PlainNode, RunningDaemon, stays, wait_until

from .server import LlamaProgram, environment_for

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def older_libraries() -> Path:
    """Their folder. The first run fetches them; later runs find them."""
    fetched = subprocess.check_output([str(HERE / "fetch-older.sh")], text=True)
    return Path(fetched.strip())


@pytest.fixture(scope="session")
def driver(older_libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("older") / "older_driver"
    names = ("libllama.v*.so", "libggml.v*.so", "libggml-base.so")
    libraries = [str(next(older_libraries.glob(name))) for name in names]
    options = ["-O1", "-Wall", "-Wextra", "-Wl,--allow-shlib-undefined", f"-Wl,-rpath,{older_libraries}"]
    subprocess.run(["cc", "-o", program, HERE / "older_driver.c", *libraries, *options], check=True)
    return program


class Driver(LlamaProgram):
    """The program, with its model loaded."""

    def __init__(self, program: Path, libraries: Path, model: Path, log_path: Path, *arguments: str) -> None:
        super().__init__(program.parent, program.name, [str(libraries), str(model), *arguments], log_path)
        self.environment = environment_for(libraries)

    def __enter__(self) -> Driver:
        self.start()
        return self

    def start(self) -> None:
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self.environment
            )
        assert self._answer() == b"loaded\n", self.log

    def decode(self, tokens: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % tokens)
        self.process.stdin.flush()
        assert self._answer() == b"done\n", self.log

    def _answer(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture
def node(tmp_path: Path) -> PlainNode:
    return PlainNode(tmp_path / "17000000.gpu")


@pytest.fixture
def daemon(tmp_path: Path, node: PlainNode) -> Iterator[RunningDaemon]:
    with RunningDaemon(tmp_path / "daemon", node.directory, rebind_seconds=0.2) as daemon:
        yield daemon


def seen(daemon: RunningDaemon, pid: int) -> dict[str, Any] | None:
    status = json.loads(daemon.command("--status", "--json").stdout)
    return next((one for one in status["processes"] if one["pid"] == pid), None)


def wait_until_attached(daemon: RunningDaemon, libraries: Path) -> None:
    daemon.wait_for_log(rf"^attached {libraries}/libllama\.v.*\.so \(llama_decode, llama_synchronize\)$")
    daemon.wait_for_log(rf"^attached {libraries}/libggml-base\.so \(ggml_backend_sched_graph_compute_async\)$")
    daemon.wait_for_log(rf"^attached {libraries}/libggml-cpu-\w+\.so \(ggml_graph_compute\)$")


def test_its_graphs_are_counted_and_it_is_left_alone(
    daemon: RunningDaemon, node: PlainNode, driver: Path, older_libraries: Path, model: Path, tmp_path: Path
) -> None:
    with Driver(driver, older_libraries, model, tmp_path / "driver.log") as program:
        wait_until_attached(daemon, older_libraries)
        assert daemon.log.count("/libggml-cpu-") == 1, "the one that is in use"
        program.decode(100)
        wait_until(
            lambda: (one := seen(daemon, program.pid)) and one["turns"],
            "its turns",
        )
        one = seen(daemon, program.pid)
        assert one is not None
        assert one["turns"] == {"graphs": 100, "turning": False, "per_graph": 0}
        stays(lambda: node.min_hz == LOWEST_HZ, 0.5, "no floor")


def test_its_calls_raise_the_floor_where_the_flag_counts(
    daemon: RunningDaemon, node: PlainNode, driver: Path, older_libraries: Path, model: Path, tmp_path: Path
) -> None:
    with Driver(driver, older_libraries, model, tmp_path / "driver.log", "--cpu-moe") as program:
        wait_until_attached(daemon, older_libraries)
        program.decode(5)
        wait_until(lambda: node.min_hz == HIGHEST_HZ, "a raised floor")
        wait_until(lambda: node.min_hz == LOWEST_HZ, "the floor given back", seconds=3)
