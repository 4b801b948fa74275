"""A real llama-server as a child process that is always ended, and any other program of llama.cpp."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support import wait_until

REQUEST_SECONDS = 60

Environment = Mapping[str, str]
NOTHING_MORE: Environment = {}

ON_THE_CPU = ("--gpu-layers", "0", "--parallel", "1", "--ctx-size", "16384", "--no-warmup")

# A proxy in the environment must not see what is meant for the loopback interface.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def environment_for(bin_directory: Path) -> dict[str, str]:
    """LD_LIBRARY_PATH: llama.cpp was moved after it was built. GGML_NO_BACKTRACE: or it starts a debugger to abort.

    Nothing in the environment of the tests may decide how it runs.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "GGML_"))}
    return {**inherited, "LD_LIBRARY_PATH": str(bin_directory), "GGML_NO_BACKTRACE": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class LlamaProgram:
    """A program of llama.cpp, with its output in a log. Ended on leaving; its log is shown when a test fails."""

    def __init__(
        self,
        bin_directory: Path,
        name: str,
        arguments: list[str],
        log_path: Path,
        environment: Environment = NOTHING_MORE,
    ) -> None:
        self.command = [str(bin_directory / name), *arguments]
        self.environment = {**environment_for(bin_directory), **environment}
        self.log_path = log_path

    def __enter__(self) -> LlamaProgram:
        self.start()
        return self

    def start(self) -> None:
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self.alive:
            self.process.kill()
        self.process.wait()
        if kind is not None:
            print(f"--- {self.command}\n{self.log}")

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


class Device(LlamaProgram):
    """ggml's RPC server: for llama.cpp a second device, as a GPU is one. Entered when it listens.

    `library`: little_memory.c, for a device that says it has no more than `mib` of memory.
    """

    def __init__(self, bin_directory: Path, log_path: Path, library: Path | None = None, mib: int = 0) -> None:
        self.port = free_port()
        pretended = {"LD_PRELOAD": str(library), "PRETENDED_MIB": str(mib)} if library else NOTHING_MORE
        super().__init__(bin_directory, "ggml-rpc-server", ["--port", str(self.port)], log_path, pretended)

    def __enter__(self) -> Device:
        self.start()
        try:
            wait_until(lambda: not self.alive or self._listens(), f"{self.command} listening")
            assert self.alive, f"the RPC server ended:\n{self.log}"
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _listens(self) -> bool:
        """Asked of the kernel: the server would wait for a client that connects to say something."""
        listening = f":{self.port:04X} 00000000:0000 0A"
        return listening in Path("/proc/net/tcp").read_text()


class LlamaServer(LlamaProgram):
    """llama-server on the loopback interface, entered when it is healthy."""

    def __init__(
        self,
        bin_directory: Path,
        model: Path,
        log_path: Path,
        *extra: str,
        environment: Environment = NOTHING_MORE,
        defaults: Sequence[str] = ON_THE_CPU,
    ) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        arguments = [
            "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--offline", "--no-ui",
            "--threads", "1",  # two cores are shared by everything that is under test
        ]  # fmt: skip
        super().__init__(bin_directory, "llama-server", [*arguments, *defaults, *extra], log_path, environment)

    def __enter__(self) -> LlamaServer:
        self.start()
        try:
            wait_until(lambda: not self.alive or self._healthy(), f"a healthy {self.command}", seconds=60)
            assert self.alive, f"llama-server ended while it loaded:\n{self.log}"
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def complete(self, prompt: str, tokens: int) -> tuple[int, dict[str, Any]]:
        """Have exactly `tokens` tokens made. Return the HTTP status and what it says, decoded from JSON.

        Raises ConnectionError when the server dies before it has answered.
        """
        wanted = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
        return self._request("/completion", json.dumps(wanted).encode())

    def embed(self, text: str) -> tuple[int, Any]:
        """Have the text embedded. Return the HTTP status and what it says, decoded from JSON."""
        return self._request("/embedding", json.dumps({"content": text}).encode())

    def _healthy(self) -> bool:
        try:
            return self._request("/health", None)[0] == 200
        except OSError:  # it does not listen yet
            return False

    def _request(self, path: str, body: bytes | None) -> tuple[int, Any]:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            with DIRECT.open(request, timeout=REQUEST_SECONDS) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, json.load(refusal)
