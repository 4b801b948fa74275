"""Turns of a real llama.cpp: the CPU and a second device, ggml's RPC server, which stands in for the GPU.

What DESIGN calls CPU sections per graph is turns and one more.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from moe_gpu_stabilizer.elf import GRAPH, SECTION
from tests.support import HIGHEST_HZ, LOWEST_HZ, PlainNode, RunningDaemon, stays, wait_until

from .server import NOTHING_MORE, Device, Environment, LlamaProgram, LlamaServer, environment_for
from .test_real_server import PROMPT, SHORT_TOKENS

LAUNCHES = Path(__file__).resolve().parent.parent / "unit" / "launches.json"

ON_THE_DEVICE = ("-ngl", "99", "--parallel", "1", "--ctx-size", "16384", "--no-warmup")

# The tokenizer makes a token of each letter: three micro-batches of 512.
LONG_PROMPT = " the floor rises and falls" * 40

ANSWER_TOKENS = 400

Turns = dict[str, Any]


class Stage:
    """A daemon that watches, devices, and servers with their logs. What starts here is ended with the test."""

    def __init__(self, llama_bin: Path, directory: Path, stack: ExitStack) -> None:
        self.node = PlainNode(directory / "17000000.gpu")
        # It finds the libraries by itself, in the memory of the processes that use them. Flags count only where a test
        # wants them to: other programs on this machine may carry some.
        settings = {"devfreq": self.node.directory, "rebind_seconds": 0.2}
        self.daemon = RunningDaemon(directory / "daemon", None)
        self.daemon.configure(**settings, detect="behaviour")
        stack.enter_context(self.daemon)
        self._settings = settings
        self._bin, self._directory, self._stack = llama_bin, directory, stack
        self._started = 0

    def let_flags_count(self) -> None:
        self.daemon.configure(**self._settings, detect="both")
        self.daemon.send(signal.SIGHUP)
        self.daemon.wait_for_log("^settings read again")

    def device(self, library: Path | None = None, mib: int = 0) -> Device:
        return self._stack.enter_context(Device(self._bin, self._new_log("device"), library, mib))

    def serve(
        self,
        model: Path,
        device: Device,
        *arguments: str,
        environment: Environment = NOTHING_MORE,
        defaults: Sequence[str] = ON_THE_DEVICE,
    ) -> LlamaServer:
        more = ("--rpc", device.address, *arguments)
        log = self._new_log("llama-server")
        server = LlamaServer(self._bin, model, log, *more, environment=environment, defaults=defaults)
        self._stack.enter_context(server)
        for function in ("llama_process", GRAPH, SECTION):
            self.daemon.wait_for_log(rf"^attached .*\W{function}\W")
        return server

    def run(self, name: str, *arguments: str) -> LlamaProgram:
        program = LlamaProgram(self._bin, name, list(arguments), self._new_log(name))
        return self._stack.enter_context(program)

    def _new_log(self, name: str) -> Path:
        self._started += 1
        return self._directory / f"{name}-{self._started}.log"

    def seen(self, pid: int) -> dict[str, Any] | None:
        """What --status says of a process; None before its first call."""
        status = json.loads(self.daemon.command("--status", "--json").stdout)
        return next((one for one in status["processes"] if one["pid"] == pid), None)

    def turns(self, server: LlamaProgram, graphs: int) -> tuple[int, bool]:
        """How many turns per graph, and whether it counts by that, once so many graphs were seen."""

        def of_enough_graphs() -> Turns | None:
            seen = self.seen(server.pid)
            turns: Turns | None = seen["turns"] if seen else None
            return turns if turns and turns["graphs"] >= graphs else None

        wait_until(of_enough_graphs, f"{graphs} graphs of pid {server.pid}")
        turns = of_enough_graphs()
        assert turns is not None
        return turns["per_graph"], turns["turning"]

    def says(self, words: str) -> bool:
        return words in self.daemon.log


@pytest.fixture
def stage(llama_bin: Path, tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        stage = Stage(llama_bin, tmp_path, stack)
        yield stage
        print(f"--- the daemon's log\n{stage.daemon.log}")


TABLE = [
    ("all on the device", ["-ngl", "99"], 0),
    ("the flag that asks by hand", ["-ngl", "99", "--n-cpu-moe", "0"], 0),
    ("all experts on the CPU, by the flag", ["-ngl", "99", "--cpu-moe"], 4),
    ("all experts on the CPU, by a pattern", ["-ngl", "99", "-ot", "exps=CPU"], 4),
    ("the experts of two layers", ["-ngl", "99", "-ot", r"blk\.[01]\.ffn_.*_exps=CPU"], 2),
    ("the experts of one layer", ["-ngl", "99", "-ot", r"blk\.0\.ffn_.*_exps=CPU"], 1),
    ("attention on the CPU", ["-ngl", "99", "--no-kv-offload"], 4),
    ("two whole layers on the device", ["-ngl", "2"], 0),
    ("nothing on the device", ["-ngl", "0", "--cpu-moe"], 0),
]


@pytest.mark.parametrize(("why", "arguments", "turns"), TABLE, ids=[why for why, _, _ in TABLE])
def test_turns_of_a_model_with_four_layers(
    stage: Stage, model: Path, why: str, arguments: list[str], turns: int
) -> None:
    server = stage.serve(model, stage.device(), *arguments)
    assert server.complete(PROMPT, 20)[0] == 200
    assert stage.turns(server, 20) == (turns, turns >= 3)
    # A long prompt is many micro-batches, and a graph for each.
    assert server.complete(LONG_PROMPT, 1)[0] == 200
    assert stage.turns(server, 22) == (turns, turns >= 3)


def launches_that_tell() -> list[dict[str, Any]]:
    """The launch lines of which it is known whether CPU and GPU then take turns."""
    return [launch for launch in json.loads(LAUNCHES.read_text()) if launch["alternates"] is not None]


# "output" is a part of "attn_output", too: llama.cpp puts the end of each layer's attention on the CPU, and the output.
TAKES_TURNS_AFTER_ALL = ["-ot", "output=CPU"]


@pytest.mark.parametrize("launch", launches_that_tell(), ids=lambda launch: " ".join(launch["argv"][1:])[:80])
def test_launch_lines(stage: Stage, deep_models: dict[str, Path], launch: dict[str, Any]) -> None:
    device = stage.device()
    words = [
        word.replace("CUDA0", f"RPC0[{device.address}]").replace("CUDA1", f"RPC0[{device.address}]")
        for word in launch["argv"][1:]
        if word != "-fmoe"  # a fork's
    ]
    # The model is what the server is given anyway.
    model = words[words.index("-m") + 1]
    del words[words.index("-m") : words.index("-m") + 2]
    server = stage.serve(
        deep_models[model], device, *words, environment=launch.get("environ", {}), defaults=("--ctx-size", "4096")
    )
    assert server.complete(PROMPT, 20)[0] == 200
    turns, turning = stage.turns(server, 20)
    if launch["argv"][-2:] == TAKES_TURNS_AFTER_ALL:
        assert (turns, turning) == (27, True)
        return
    assert turning == launch["alternates"], f"{turns} turns per graph"
    assert turning == (turns >= 3)
    if not turning:
        assert turns == 0


def test_a_model_that_was_fitted_to_the_device_gets_its_floor_within_its_first_tokens(
    stage: Stage, deep_models: dict[str, Path], little_memory: Path
) -> None:
    """No flag anywhere: llama.cpp itself, by default, leaves 1 GiB free, and puts what does not fit on the CPU."""
    device = stage.device(little_memory, mib=1024 + 70)
    server = stage.serve(deep_models["large-moe.gguf"], device, defaults=())
    wait_until(lambda: stage.node.min_hz == LOWEST_HZ, "what loading may have raised given back")
    assert server.complete(PROMPT, SHORT_TOKENS)[0] == 200
    wait_until(lambda: stage.node.min_hz == HIGHEST_HZ, "a raised floor")
    stage.daemon.wait_for_log(rf"^pid {server.pid} \(llama-server\) counts: \d+ turns per graph$")
    turns, turning = stage.turns(server, SHORT_TOKENS)
    assert turning
    assert 3 <= turns < 26, "some layers' experts are on the CPU, not all"
    wait_until(lambda: stage.node.min_hz == LOWEST_HZ, "the floor given back", seconds=3)


def test_the_same_model_on_a_device_with_room_for_it_never_does(stage: Stage, deep_models: dict[str, Path]) -> None:
    server = stage.serve(deep_models["large-moe.gguf"], stage.device(), defaults=())
    check_that_it_is_left_alone(stage, server)


@pytest.mark.parametrize(
    ("why", "arguments"),
    [
        ("one slot, with a warm-up", ["--parallel", "1", "--ctx-size", "16384"]),
        (
            "small micro-batches",
            ["--parallel", "1", "--ctx-size", "16384", "--batch-size", "64", "--ubatch-size", "16"],
        ),
        ("four slots", ["--parallel", "4", "--ctx-size", "16384"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_dense_model_on_the_device_never_raises_the_floor(
    stage: Stage, deep_models: dict[str, Path], why: str, arguments: list[str]
) -> None:
    server = stage.serve(deep_models["dense.gguf"], stage.device(), *arguments, defaults=())
    check_that_it_is_left_alone(stage, server)


def check_that_it_is_left_alone(stage: Stage, server: LlamaServer) -> None:
    """A long answer, long prompts, and four requests at once, and the floor stays where it is."""
    with ThreadPoolExecutor() as background:
        requests = [background.submit(server.complete, PROMPT, ANSWER_TOKENS)]
        requests += [background.submit(server.complete, LONG_PROMPT, 100) for _ in range(3)]
        wait_until(
            lambda: all(request.done() for request in requests) or stage.node.min_hz != LOWEST_HZ,
            "the end of the requests",
            seconds=60,
        )
        assert stage.node.min_hz == LOWEST_HZ, "the floor rose"
        assert [request.result()[0] for request in requests] == [200] * 4
    assert stage.turns(server, ANSWER_TOKENS) == (0, False)
    assert stage.says(f"pid {server.pid} (llama-server) is ignored")
    assert not stage.says(f"pid {server.pid} (llama-server) counts")
    assert not stage.says("inference)")


def test_embeddings_on_the_device_never_raise_the_floor(stage: Stage, deep_models: dict[str, Path]) -> None:
    more = ("--embedding", "--pooling", "mean", "--ubatch-size", "2048")
    server = stage.serve(deep_models["dense.gguf"], stage.device(), *more)
    for _ in range(20):
        assert server.embed(PROMPT)[0] == 200
        assert server.embed(PROMPT * 30)[0] == 200
    assert stage.turns(server, 40) == (0, False)
    assert not stage.says("inference)")


def test_two_servers_are_judged_apart(stage: Stage, model: Path, deep_models: dict[str, Path]) -> None:
    dense = stage.serve(deep_models["dense.gguf"], stage.device())
    moe = stage.serve(model, stage.device(), "-ot", "exps=CPU")
    with ThreadPoolExecutor() as background:
        request = background.submit(dense.complete, PROMPT, ANSWER_TOKENS)
        assert moe.complete(PROMPT, SHORT_TOKENS)[0] == 200
        wait_until(lambda: stage.node.min_hz == HIGHEST_HZ, "a raised floor")
        assert request.result()[0] == 200
    assert stage.turns(moe, SHORT_TOKENS) == (4, True)
    assert stage.turns(dense, ANSWER_TOKENS) == (0, False)
    assert not stage.says(f"pid {dense.pid} inference")
    wait_until(lambda: stage.node.min_hz == LOWEST_HZ, "the floor given back")


@pytest.mark.parametrize(
    ("whose", "arguments", "turns"),
    [("the target's", ["-ot", "exps=CPU"], 4), ("the draft's", ["--cpu-moe-draft"], 26), ("nobody's", [], 0)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_experts_on_the_cpu_of_a_target_and_its_draft_in_one_process(
    stage: Stage, model: Path, deep_models: dict[str, Path], whose: str, arguments: list[str], turns: int
) -> None:
    draft = ("--model-draft", str(deep_models["moe.gguf"]), "-ngld", "99", "--spec-type", "draft-simple")
    server = stage.serve(model, stage.device(), *draft, *arguments)
    assert server.complete(PROMPT, 60)[0] == 200
    assert stage.turns(server, 60) == (turns, turns > 0), whose
    wait_until(lambda: stage.node.min_hz == (HIGHEST_HZ if turns else LOWEST_HZ), "the floor as it should be")
    assert stage.says(f"pid {server.pid} (llama-server) counts") == (turns > 0)


def test_llama_bench(stage: Stage, model: Path) -> None:
    device = stage.device()
    arguments = ("--model", str(model), "--rpc", device.address, "-ngl", "99", "--threads", "1", "-p", "0", "-n", "512")
    bench = stage.run("llama-bench", *arguments, "-r", "3", "-ot", "exps=CPU")
    wait_until(lambda: stage.node.min_hz == HIGHEST_HZ, "a raised floor", seconds=30)
    assert bench.alive, "it was raised for a run that was over"
    assert stage.turns(bench, 2) == (4, True)
    wait_until(lambda: not bench.alive, "the end of llama-bench", seconds=60)
    assert bench.process.returncode == 0, bench.log
    wait_until(lambda: stage.node.min_hz == LOWEST_HZ, "the floor given back", seconds=3)


def test_a_flag_without_turns_is_pointed_out(stage: Stage, model: Path) -> None:
    stage.let_flags_count()
    server = stage.serve(model, stage.device(), "-ngl", "0", "--cpu-moe")
    assert server.complete(PROMPT, 20)[0] == 200
    assert stage.turns(server, 20) == (0, False)
    pointed_out = f"pid {server.pid} (llama-server) counts: --cpu-moe, but shows no turns"
    assert pointed_out in stage.daemon.command("--status").stdout
    checked = " ".join(stage.daemon.command("--check", "--config", str(stage.daemon.config)).stdout.split())
    assert "counts: --cpu-moe, but shows no turns" in checked


USER_OF_THE_LIBRARY = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
library.llama_backend_init()
print("loaded", flush=True)
sys.stdin.read()
"""


def test_a_process_with_the_library_but_no_graphs(stage: Stage, llama_bin: Path, libllama: Path) -> None:
    command = [sys.executable, "-c", USER_OF_THE_LIBRARY, str(libllama)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment_for(llama_bin)
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loaded\n"
        stage.daemon.wait_for_log(r"^attached .*libggml-cpu.*ggml_graph_compute")
        stays(lambda: stage.node.min_hz == LOWEST_HZ, 1, "no floor")
        assert stage.seen(process.pid) is None
        assert process.stdin is not None
        process.stdin.close()


def test_a_long_prompt_keeps_the_floor_up_by_its_sections(stage: Stage, deep_models: dict[str, Path]) -> None:
    """A prompt of 6,000 tokens in micro-batches of 2,048, seconds each."""
    more = ("-ot", "exps=CPU", "--batch-size", "2048", "--ubatch-size", "2048")
    server = stage.serve(deep_models["moe.gguf"], stage.device(), *more)
    assert server.complete(PROMPT, SHORT_TOKENS)[0] == 200
    wait_until(lambda: stage.node.min_hz == HIGHEST_HZ, "a raised floor")
    with ThreadPoolExecutor() as background:
        request = background.submit(server.complete, LONG_PROMPT * 6, 1)
        wait_until(lambda: request.done() or stage.node.min_hz != HIGHEST_HZ, "the end of the prompt", seconds=120)
        assert request.done(), "the floor fell during the prompt"
        assert request.result()[0] == 200
    assert stage.daemon.log.count("inference)") == 1
