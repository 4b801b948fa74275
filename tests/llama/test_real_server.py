"""What the daemon is for, told by a real llama-server and llama-bench with a tiny model; only the GPU is a directory.

llama-server calls llama_process once while it loads, even without a warm-up, to see what its context can do. So a
daemon that already watches its library raises the floor for the load: a test that wants no floor but its own starts
the server first.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moe_gpu_stabilizer.elf import function_offsets
from tests.support import HIGHEST_HZ, LOWEST_HZ, PlainNode, RunningDaemon, stays, wait_until

from .return_probe import return_probe
from .server import NOTHING_MORE, Environment, LlamaProgram, LlamaServer

PROMPT = "the floor rises and falls"

# Seconds of work for the tiny model, whose speed falls as its context fills: about 3 here.
LONG_TOKENS = 2000
SHORT_TOKENS = 5

IDLE_SECONDS = 4.0

ATTACHED = r"^attached .*libllama\.so"

ServerFactory = Callable[..., LlamaServer]


@pytest.fixture
def node(tmp_path: Path) -> PlainNode:
    return PlainNode(tmp_path / "17000000.gpu")


@pytest.fixture
def daemon(tmp_path: Path, node: PlainNode) -> RunningDaemon:
    """Not started. It finds the library by itself, in the memory of the process that uses it."""
    return RunningDaemon(tmp_path / "daemon", node.directory, rebind_seconds=0.2)


@pytest.fixture
def llama_server(llama_bin: Path, model: Path, tmp_path: Path) -> ServerFactory:
    """Make a server with more arguments: `with llama_server("--cpu-moe") as server`."""

    def make(*extra: str, environment: Environment = NOTHING_MORE) -> LlamaServer:
        return LlamaServer(llama_bin, model, tmp_path / "llama-server.log", *extra, environment=environment)

    return make


def floor_lines(daemon: RunningDaemon) -> list[str]:
    return re.findall(r"^floor .*$", daemon.log, re.MULTILINE)


def test_the_floor_is_up_while_a_request_runs_and_given_back_a_second_later(
    llama_server: ServerFactory, daemon: RunningDaemon, node: PlainNode
) -> None:
    with llama_server("--cpu-moe") as server, daemon, ThreadPoolExecutor() as background:
        daemon.wait_for_log(ATTACHED)
        request = background.submit(server.complete, PROMPT, LONG_TOKENS)
        wait_until(lambda: node.min_hz == HIGHEST_HZ, "a raised floor")
        assert not request.done(), "it was raised for a request that was over"

        wait_until(lambda: request.done() or node.min_hz != HIGHEST_HZ, "the end of the request", seconds=60)
        assert request.done(), "the floor fell during the request"
        status, body = request.result()
        assert (status, body["tokens_predicted"]) == (200, LONG_TOKENS)

        stays(lambda: node.min_hz == HIGHEST_HZ, 0.7, "raised, for most of the hold")
        wait_until(lambda: node.min_hz == LOWEST_HZ, "the floor given back after a hold of 1 s", seconds=3)
        wait_until(lambda: len(floor_lines(daemon)) == 2, f"two lines about the floor\n{daemon.log}")
        assert floor_lines(daemon) == [f"floor 1020 MHz (pid {server.pid} inference)", "floor 306 MHz (idle)"]


def test_a_loaded_server_without_a_request_gets_no_floor(
    llama_server: ServerFactory, daemon: RunningDaemon, node: PlainNode
) -> None:
    with daemon, llama_server("--cpu-moe") as server:
        daemon.wait_for_log(ATTACHED)
        wait_until(lambda: node.min_hz == LOWEST_HZ, "what loading may have raised given back")
        stays(lambda: node.min_hz == LOWEST_HZ, IDLE_SECONDS, "no floor for an idle server")

        # It was watched all the time: a request is seen at once.
        assert server.complete(PROMPT, SHORT_TOKENS)[0] == 200
        wait_until(lambda: node.min_hz == HIGHEST_HZ, "a raised floor")


def test_a_server_without_the_flag_never_raises_the_floor(
    llama_server: ServerFactory, daemon: RunningDaemon, node: PlainNode
) -> None:
    with llama_server() as server, daemon, ThreadPoolExecutor() as background:
        daemon.wait_for_log(ATTACHED)
        request = background.submit(server.complete, PROMPT, LONG_TOKENS)
        wait_until(lambda: request.done() or node.min_hz != LOWEST_HZ, "the end of the request", seconds=60)
        assert node.min_hz == LOWEST_HZ, "the floor rose"
        assert request.result()[0] == 200
        daemon.wait_for_log(rf"^pid {server.pid} \(llama-server\) is ignored")
        stays(lambda: node.min_hz == LOWEST_HZ, 1, "no floor for a server without the flag")
        assert floor_lines(daemon) == []


def test_llama_bench_raises_the_floor_and_it_is_given_back(
    llama_bin: Path, libllama: Path, model: Path, tmp_path: Path, node: PlainNode
) -> None:
    # It calls at once and leaves soon, so its library is named to the daemon beforehand.
    arguments = [
        "--model", str(model), "-ngl", "0", "-ncmoe", "4", "--threads", "1",
        "-p", "0", "-n", "512", "-r", "8", "--no-warmup",
    ]  # fmt: skip
    bench = LlamaProgram(llama_bin, "llama-bench", arguments, tmp_path / "llama-bench.log")
    with RunningDaemon(tmp_path / "daemon", node.directory, libraries=libllama) as daemon, bench:
        wait_until(lambda: node.min_hz == HIGHEST_HZ, "a raised floor")
        assert bench.alive, "it was raised for a run that was over"
        wait_until(lambda: not bench.alive, "the end of llama-bench", seconds=60)
        assert bench.process.returncode == 0
        wait_until(lambda: node.min_hz == LOWEST_HZ, "the floor given back", seconds=3)
        wait_until(lambda: len(floor_lines(daemon)) == 2, f"two lines about the floor\n{daemon.log}")
        assert floor_lines(daemon) == [f"floor 1020 MHz (pid {bench.pid} inference)", "floor 306 MHz (idle)"]


# llama-server catches what is thrown while it decodes, and goes on. A probe on the *return* of llama_process replaces
# the return address on its stack, so the exception cannot be unwound through it: this is why the daemon has probes on
# the entry only.


class Exceptions:
    """Makes llama-server's decoding throw, from outside of it."""

    def __init__(self, library: Path, trigger: Path) -> None:
        self.trigger = trigger
        self.environment = {"LD_PRELOAD": str(library), "THROW_WHILE_EXISTS": str(trigger)}

    def check_that_the_server_lives_on(self, server: LlamaServer) -> None:
        """Have one request fail in llama_process, and expect the next one to be answered.

        Raises ConnectionError if the server dies instead.
        """
        self.trigger.touch()
        status, body = server.complete(PROMPT, SHORT_TOKENS)
        assert (status, body["error"]["message"]) == (500, "decode() failed: thrown by a test")
        self.trigger.unlink()
        assert server.complete(PROMPT, SHORT_TOKENS)[0] == 200


@pytest.fixture
def exceptions(throwing_library: Path, tmp_path: Path) -> Exceptions:
    return Exceptions(throwing_library, tmp_path / "throw")


def test_a_server_whose_decoding_throws_lives_on_under_the_daemons_probes(
    llama_server: ServerFactory, exceptions: Exceptions, daemon: RunningDaemon, node: PlainNode
) -> None:
    with llama_server("--cpu-moe", environment=exceptions.environment) as server, daemon:
        raise_the_floor(server, daemon, node)
        exceptions.check_that_the_server_lives_on(server)
        assert node.min_hz == HIGHEST_HZ
        assert server.alive


def test_the_same_server_dies_under_a_return_probe(
    llama_server: ServerFactory, exceptions: Exceptions, daemon: RunningDaemon, node: PlainNode, libllama: Path
) -> None:
    with llama_server("--cpu-moe", environment=exceptions.environment) as server, daemon:
        raise_the_floor(server, daemon, node)
        with return_probe(server.pid, libllama, offset_of(libllama, "llama_process")):
            assert server.complete(PROMPT, SHORT_TOKENS)[0] == 200, "the probe alone does no harm"
            with pytest.raises(ConnectionError):
                exceptions.check_that_the_server_lives_on(server)
            assert server.process.wait(timeout=30) == -signal.SIGABRT
            assert "terminate called after throwing an instance of 'std::runtime_error'" in server.log


def raise_the_floor(server: LlamaServer, daemon: RunningDaemon, node: PlainNode) -> None:
    daemon.wait_for_log(ATTACHED)
    assert server.complete(PROMPT, SHORT_TOKENS)[0] == 200
    wait_until(lambda: node.min_hz == HIGHEST_HZ, "a raised floor")


def offset_of(library: Path, function: str) -> int:
    descriptor = os.open(library, os.O_RDONLY)
    try:
        return function_offsets(descriptor)[function]
    finally:
        os.close(descriptor)
