"""The daemon and programs that no flag tells of: CPU and GPU are seen to take turns, or not."""

from __future__ import annotations

import json
import select
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.kernel.conftest import Llama
from tests.kernel.test_daemon import WAKES_OF_OTHERS, given_back, raise_the_floor, raised
from tests.support import PlainNode, RunningDaemon, alone_with_real_flags, stays, wait_until
from tests.workload import Workload, build_ggml, build_part, build_program, build_static

Start = Callable[..., RunningDaemon]
Run = Callable[..., Workload]

SOME_PRIME = 10_007

# A user who may not look into the processes of these tests.
WITHOUT_RIGHTS = ("setpriv", "--bounding-set", "-all", "--inh-caps", "-all")


@pytest.fixture(autouse=True)
def one_at_a_time() -> Iterator[None]:
    with alone_with_real_flags():
        yield


@pytest.fixture
def start_daemon(start_daemon: Start, package_root: Path) -> Start:
    """A daemon as it is by default: flags count, and turns do.

    pytest 8 (Debian 13) looks for parameters in this fixture, not in the one it takes the place of.
    """
    return partial(start_daemon, detect="both")


@pytest.fixture
def llama(llama: Llama) -> Llama:
    """libllama as ever, with ggml's two libraries beside it."""
    parts = build_ggml(llama.library.parent)
    return Llama(llama.library, build_program(llama.program, llama.library, *parts))


def all_of(llama: Llama) -> str:
    """All libraries, for daemons that are to see the very first graph."""
    return f"{llama.library.parent}/*.so"


def lines_about(daemon: RunningDaemon, workload: Workload) -> list[str]:
    about = f"pid {workload.pid} (llama-server) "
    return [line.removeprefix(about) for line in daemon.log.splitlines() if line.startswith(about)]


def turn_once(workload: Workload, node: PlainNode) -> None:
    """Two graphs with many turns, and the floor goes up and down again."""
    workload.do("graphs 2 41")
    wait_until(lambda: raised(node), "the floor up")
    wait_until(lambda: given_back(node), "the floor given back")


def test_turns_raise_the_floor_with_the_second_graph(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=all_of(llama))
    with run(counts=False) as workload:
        workload.do("tokens 1 41")
        daemon.wait_for_log(rf"^pid {workload.pid} \(llama-server\) is ignored")
        stays(lambda: given_back(node), 0.3, "one graph is no behaviour")
        workload.do("tokens 1 41")
        wait_until(lambda: raised(node), "the floor up")
        wait_until(lambda: given_back(node), "the floor given back")
        assert lines_about(daemon, workload) == [
            "is ignored: no MoE flag in its arguments or environment, fewer than 3 turns per graph seen",
            "counts: 40 turns per graph",
        ]
        assert daemon.log.count(f"floor 1020 MHz (pid {workload.pid} inference)") == 1


def test_an_engine_without_libllama_is_seen_by_its_graphs(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path
) -> None:
    program = build_program(tmp_path / "engine" / "runner", *build_ggml(tmp_path / "engine", ".so.0"))
    daemon = start_daemon(rebind_seconds=0.3, hold_seconds=0.5)
    with run(program=program, counts=False) as workload:
        daemon.wait_for_log(rf"^attached {tmp_path}/engine/libggml-base.so.0 ")
        daemon.wait_for_log(rf"^attached {tmp_path}/engine/libggml-cpu.so.0 \(ggml_graph_compute\)$")
        turn_once(workload, node)
    with run(program=program) as workload:
        workload.do("graphs 1 1")
        wait_until(lambda: raised(node), "the flag counts in such an engine, too")


@pytest.mark.parametrize("layout", ["one libggml", "a static program", "a CPU variant"])
def test_wherever_a_build_keeps_ggml(
    start_daemon: Start, run: Run, node: PlainNode, tmp_path: Path, layout: str
) -> None:
    directory = tmp_path / "layout"
    if layout == "one libggml":
        parts = [build_part(directory / "libggml.so", "-DPART_GGML_CPU", "-DPART_GGML_BASE")]
        program = build_program(directory / "program", *parts)
    elif layout == "a CPU variant":
        parts = [
            build_part(directory / "libggml-cpu-armv8.2_2.so", "-DPART_GGML_CPU"),
            build_part(directory / "libggml-base.v0.9.so", "-DPART_GGML_BASE"),
        ]
        program = build_program(directory / "program", *parts)
    else:
        program = build_static(directory / "program", "-DPART_GGML_CPU", "-DPART_GGML_BASE")
    daemon = start_daemon(rebind_seconds=0.3, hold_seconds=0.5)
    with run(program=program, counts=False) as workload:
        daemon.wait_for_log(rf"^attached {directory}/.*ggml_graph_compute")
        turn_once(workload, node)


def test_the_rest_of_a_processs_libraries_is_probed_at_its_first_call(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    """Only libllama is configured, and no tick is near."""
    daemon = start_daemon(libraries=llama.library, rebind_seconds=3600)
    with run(counts=False) as workload:
        workload.do("call 1")
        daemon.wait_for_log(rf"^attached {llama.library.parent}/libggml-cpu.so ")
        workload.do("graphs 2 41")
        wait_until(lambda: raised(node), "the floor up")


def test_a_model_on_the_device_neither_raises_the_floor_nor_wakes_the_daemon(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=all_of(llama))
    with run(counts=False) as workload:
        workload.do("tokens 1 1")
        daemon.wait_for_log(r"is ignored")
        daemon.wait_until_quiet()
        before = daemon.times_woken
        for sections in (1, 2, 3):  # up to two turns
            workload.do(f"tokens {SOME_PRIME} {sections}")
        assert daemon.times_woken <= before + WAKES_OF_OTHERS
        assert given_back(node)
        assert len(lines_about(daemon, workload)) == 1


def test_sections_keep_the_floor_up_while_the_thread_waits_for_the_gpu(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    """One graph of a long prompt, in which the thread itself does nothing that could be measured."""
    daemon = start_daemon(libraries=all_of(llama), hold_seconds=0.5)
    with run(counts=False) as workload:
        workload.do("graphs 1 12")
        workload.begin("slow 12 -250")
        wait_until(lambda: raised(node), "the floor up")
        stays(lambda: raised(node), 1.8, "sections come")
        workload.finish()
        wait_until(lambda: given_back(node), "the floor given back")
    assert daemon.log.count("inference)") == 1


def test_a_wait_for_the_gpu_longer_than_the_hold_is_in_flight_while_sections_are_to_come(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=all_of(llama), hold_seconds=0.3)
    with run(counts=False) as workload:
        workload.do("slow 12 -50")
        workload.begin("slow 12 -500")
        wait_until(lambda: raised(node), "the floor up")
        stays(lambda: raised(node), 3, "sections are to come")
        workload.finish()
        wait_until(lambda: given_back(node), "the floor given back")
    assert daemon.log.count("inference)") == 1


def test_a_section_longer_than_the_hold_is_still_in_flight(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=all_of(llama), hold_seconds=0.3)
    with run(counts=False) as workload:
        workload.do("graphs 1 5")
        workload.begin("slow 5 700")
        wait_until(lambda: raised(node), "the floor up")
        wait_until(lambda: not raised(node) or workload_is_done(workload), "the end of the graph")
        workload.finish()
    assert daemon.log.count("inference)") == 1


def workload_is_done(workload: Workload) -> bool:
    return bool(select.select([workload.process.stdout], [], [], 0)[0])


def test_what_the_thread_computes_after_its_graph_is_no_inference(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    """A Python program, say, that goes on with something else."""
    start_daemon(libraries=all_of(llama), hold_seconds=0.5)
    with run(counts=False) as workload:
        workload.do("graphs 3 41")
        workload.begin("compute 8000")
        wait_until(lambda: raised(node), "the floor up")
        wait_until(lambda: given_back(node), "the floor given back", seconds=5)
        assert not workload_is_done(workload), "the thread is still busy"


def test_the_same_without_graphs_has_to_be_taken_for_inference(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    start_daemon(libraries=all_of(llama), hold_seconds=0.5)
    with run() as workload:
        workload.do("call 1")
        workload.begin("compute 3000")
        wait_until(lambda: raised(node), "the floor up")
        stays(lambda: raised(node), 1.5, "the thread is busy")
        workload.finish()
        wait_until(lambda: given_back(node), "the floor given back")


def test_flags_alone(start_daemon: Start, run: Run, llama: Llama, node: PlainNode) -> None:
    """ggml is not even probed; and an edit of the settings makes it so."""
    daemon = start_daemon(libraries=all_of(llama), detect="flags", hold_seconds=0.5)
    assert daemon.has_logged(rf"^attached {llama.library} ")
    assert "ggml_graph_compute" not in daemon.log
    with run(counts=False) as workload, run() as flagged:
        workload.do("tokens 5 41")
        daemon.wait_for_log(rf"^pid {workload.pid} \(llama-server\) is ignored: no MoE flag")
        raise_the_floor(flagged, node)
        wait_until(lambda: given_back(node), "the floor given back")

        common = {"devfreq": node.directory, "libraries": all_of(llama), "moe_flags": daemon.flag, "hold_seconds": 0.5}
        daemon.configure(**common, detect="both")
        daemon.send(signal.SIGHUP)
        daemon.wait_for_log(r"^attached .*/libggml-cpu.so \(ggml_graph_compute\)$")
        daemon.wait_for_log(r"^settings read again")
        turn_once(workload, node)

        daemon.configure(**common, detect="flags")
        daemon.send(signal.SIGHUP)
        daemon.wait_for_log(r"^detached .*/libggml-cpu.so$")
        wait_until(lambda: "is ignored" in lines_about(daemon, workload)[-1], "ignored again")


def test_behaviour_alone(start_daemon: Start, run: Run, llama: Llama, node: PlainNode) -> None:
    daemon = start_daemon(libraries=all_of(llama), detect="behaviour", hold_seconds=0.5)
    with run() as workload:
        workload.do("tokens 1 1")
        daemon.wait_for_log(r"is ignored: fewer than 3 turns per graph seen$")
        workload.do("tokens 100 1")
        stays(lambda: given_back(node), 0.3, "the flag says nothing")
        turn_once(workload, node)


def test_other_peoples_turns_do_not_count(start_daemon: Start, run: Run, llama: Llama, node: PlainNode) -> None:
    daemon = start_daemon(libraries=all_of(llama), users="nobody")
    with run(counts=False) as workload:
        workload.do("tokens 5 41")
        daemon.wait_for_log(rf"^pid {workload.pid} \(llama-server\) is ignored: its user is not in STABILIZER_USERS$")
        workload.do("tokens 1000 41")
        stays(lambda: given_back(node), 0.5, "no floor")


def test_another_threshold_applies_at_once(start_daemon: Start, run: Run, llama: Llama, node: PlainNode) -> None:
    daemon = start_daemon(libraries=all_of(llama), hold_seconds=0.5)
    common = {"devfreq": node.directory, "libraries": all_of(llama), "moe_flags": daemon.flag, "hold_seconds": 0.5}
    with run(counts=False) as workload:
        turn_once(workload, node)
        daemon.configure(**common, min_turns=41)
        daemon.send(signal.SIGHUP)
        daemon.wait_for_log(rf"^pid {workload.pid} \(llama-server\) is ignored")
        daemon.wait_for_log(r"^settings read again")
        workload.do("graphs 100 41")
        stays(lambda: given_back(node), 0.5, "40 turns are not enough")
        daemon.configure(**common, min_turns=40)
        daemon.send(signal.SIGHUP)
        wait_until(lambda: daemon.log.count("settings read again") == 2, "the other settings")
        turn_once(workload, node)


def test_a_server_that_swaps_models_is_judged_again(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(libraries=all_of(llama), hold_seconds=0.5)
    with run(counts=False) as workload:
        turn_once(workload, node)
        wait_until(
            lambda: workload.do("tokens 10 1") and "is ignored" in lines_about(daemon, workload)[-1], "judged", 20
        )
        wait_until(lambda: given_back(node), "the floor given back")
        workload.do("tokens 1000 1")
        stays(lambda: given_back(node), 0.3, "no floor for the other model")
        turn_once(workload, node)
        # Before the first of these, "is ignored" where its first call was judged before its second graph.
        assert [line.split(":")[0] for line in lines_about(daemon, workload)][-3:] == ["counts", "is ignored", "counts"]


def test_status_and_check_show_the_turns(start_daemon: Start, run: Run, llama: Llama) -> None:
    daemon = start_daemon(libraries=all_of(llama), rebind_seconds=0.3, hold_seconds=30)
    with run() as flagged, run(counts=False) as turning, run(counts=False) as dense:
        flagged.do("tokens 5 1")
        turning.do("tokens 5 41")
        dense.do("tokens 1 2")
        daemon.wait_for_log(rf"^pid {dense.pid} \(llama-server\) is ignored")
        dense.do("tokens 4 2")
        expected = {
            flagged.pid: f"counts: {daemon.flag}, but shows no turns: has it any layer on the GPU?",
            turning.pid: "counts: 40 turns per graph",
            dense.pid: "is ignored: no MoE flag in its arguments or environment, fewer than 3 turns per graph seen"
            " (1 turn per graph)",
        }
        for pid, says in expected.items():
            wait_until(lambda: f"pid {pid} (llama-server) {says}\n" in daemon.command("--status").stdout, says)  # noqa: B023
        published = {one["pid"]: one for one in json.loads(daemon.command("--status", "--json").stdout)["processes"]}
        assert published[turning.pid]["turns"] == {"graphs": 5, "turning": True, "per_graph": 40}

        def checked(*prefix: str) -> dict[int, dict[str, object]]:
            said = daemon.command("--check", "--json", "--config", str(daemon.config), prefix=prefix).stdout
            return {one["pid"]: one for one in json.loads(said)["llama"]["processes"]}

        seen = checked()
        assert (seen[turning.pid]["counts"], seen[turning.pid]["reason"]) == (True, "40 turns per graph")
        assert seen[dense.pid]["counts"] is False
        seen = checked(*WITHOUT_RIGHTS)
        assert (seen[turning.pid]["counts"], seen[turning.pid]["reason"]) == (True, "40 turns per graph")
        assert (seen[flagged.pid]["counts"], seen[flagged.pid]["reason"]) == (True, daemon.flag), "the daemon's word"
        text = " ".join(daemon.command("--check", "--config", str(daemon.config)).stdout.split())
        assert f"note process pid {flagged.pid} llama-server (root) counts: {daemon.flag}, but shows no turns" in text
        assert f"pid {turning.pid} llama-server (root) counts: 40 turns per graph" in text
    daemon.stop()
    with run(counts=False) as turning:
        assert checked()[turning.pid]["counts"] is False, "nobody has counted"
