"""Libraries as they come and go under a running daemon: replaced, rewritten, renamed, deleted, in containers."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from moe_gpu_stabilizer.uprobes import Probe
from tests.faults.ledger import Ledger
from tests.kernel.conftest import Llama
from tests.kernel.test_probe import offsets_of
from tests.support import HIGHEST_HZ, LOWEST_HZ, PlainNode, RunningDaemon, only_child, stays, wait_until
from tests.workload import Workload, build_library, build_program, copy_with_libraries

Start = Callable[..., RunningDaemon]
Run = Callable[..., Workload]

# Makes other code of the same source, with the functions at other places.
OTHER_CODE = ("-O0", "-fno-omit-frame-pointer", "-falign-functions=64", "-fstack-protector-all")


ALL_FUNCTIONS = "llama_decode, llama_process, llama_synchronize"


def raises_the_floor(workload: Workload, node: PlainNode) -> None:
    """One call of this process, and the floor goes up and down again."""
    workload.do("call 1")
    wait_until(lambda: node.min_hz == 1_020_000_000, "the floor up")
    wait_until(lambda: node.min_hz == 306_000_000, "the floor given back")


def rewrite_in_place(library: Path, content: bytes) -> None:
    """As `cp new old` does it: the same inode, truncated and written."""
    with library.open("r+b") as file:
        file.truncate(0)
        file.write(content)


def test_a_library_is_found_because_a_process_uses_it(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    daemon = start_daemon(rebind_seconds=0.3, hold_seconds=0.3)
    with run() as workload:
        daemon.wait_for_log(rf"^attached {llama.library} ")
        raises_the_floor(workload, node)
    daemon.wait_for_log(rf"^detached {llama.library}$")


@pytest.mark.parametrize("name", ["libllama.so.0", "libllama.so.0.5.0", "libllama.v0.5.0.so", "libllama-mine.so"])
def test_any_name_of_the_library_will_do(
    start_daemon: Start, run: Run, node: PlainNode, tmp_path: Path, name: str
) -> None:
    library = build_library(tmp_path / "odd place" / name)
    program = build_program(tmp_path / "odd place" / "server", library)
    daemon = start_daemon(rebind_seconds=0.3, hold_seconds=0.3)
    with run(program=program) as workload:
        daemon.wait_for_log(rf"^attached {library} ")
        raises_the_floor(workload, node)


def test_a_library_replaced_by_rename_while_it_is_in_use(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    daemon = start_daemon(libraries=llama.library, rebind_seconds=0.3, hold_seconds=0.3)
    with run() as old:
        raises_the_floor(old, node)
        # Now the old file lives on in the old process alone.
        wait_until(lambda: "llama-server" in daemon.command("--status").stdout, "the old process known")
        os.rename(build_library(tmp_path / "new" / "libllama.so", *OTHER_CODE), llama.library)
        wait_until(lambda: daemon.log.count(f"attached {llama.library} ") == 2, "attached to the new one")
        with run() as new:
            raises_the_floor(new, node)
            raises_the_floor(old, node)
        assert f"detached {llama.library}" not in daemon.log, "the old one is still in use"
    wait_until(lambda: daemon.log.count(f"detached {llama.library}") == 1, "let go of the old one, with its process")
    ledger.kept("a library replaced by rename")


def test_a_rebuild_while_it_is_in_use(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    """The linker removes the old file and makes a new one under the same name."""
    daemon = start_daemon(libraries=llama.library, rebind_seconds=0.3, hold_seconds=0.3)
    with run() as old:
        raises_the_floor(old, node)
        build_library(llama.library, *OTHER_CODE)
        wait_until(lambda: daemon.log.count(f"attached {llama.library} ") == 2, "attached to the new one")
        with run() as new:
            raises_the_floor(new, node)
        raises_the_floor(old, node)
    ledger.kept("a library rebuilt by a linker")


def test_a_deleted_library_is_probed_as_long_as_a_process_uses_it(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, ledger: Ledger
) -> None:
    with run() as workload:
        llama.library.unlink()
        daemon = start_daemon(rebind_seconds=0.3, hold_seconds=0.3)
        daemon.wait_for_log(rf"^attached {llama.library} \(deleted\) ")
        raises_the_floor(workload, node)
    daemon.wait_for_log(rf"^detached {llama.library} \(deleted\)$")
    ledger.kept("a library deleted while mapped")


def test_a_library_rewritten_in_place_is_let_go_of_before_anyone_runs_it(
    start_daemon: Start, run: Run, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    # A name that only a configured path finds: another daemon, beside these tests, lets go in its own time.
    library = build_library(tmp_path / "old" / "libconfigured.so")
    program = build_program(tmp_path / "old" / "program", library)
    other = build_library(tmp_path / "new" / "libconfigured.so", *OTHER_CODE).read_bytes()
    original = library.read_bytes()
    daemon = start_daemon(libraries=library, rebind_seconds=3600, hold_seconds=0.3)
    let_go, attached = f"detached {library}: it is being rewritten", f"attached {library} ({ALL_FUNCTIONS})"
    for content in (other, original, other):
        lines_before = len(daemon.log.splitlines())
        rewrite_in_place(library, content)
        # No tick is due: the write makes it let go, and the end of the write makes it look again.
        wait_until(lambda: {let_go, attached} <= set(daemon.log.splitlines()[lines_before:]), "attached again")  # noqa: B023
        with run(program=program) as workload:
            workload.do("call 1009")
            raises_the_floor(workload, node)
    ledger.kept("a library rewritten in place")


ANSWERING_LIBRARY = "int llama_process(void) { return ANSWER; }"
ASKING_PROGRAM = """
#include <stdio.h>
int llama_process(void);
int main(void) {
    while (getchar() != EOF) { printf("%d\\n", llama_process()); fflush(stdout); }
    return 0;
}
"""


def compile_source(source: str, output: Path, *arguments: str) -> Path:
    # Without control-flow protection the constant is in the function's very first instruction, where a probe goes.
    plain = ("-fcf-protection=none",) if platform.machine() == "x86_64" else ()
    command = ["cc", "-O2", *plain, "-xc", "-", "-o", str(output), "-xnone", *arguments]
    subprocess.run(command, input=source, text=True, check=True)
    return output


def ask(program: Path) -> subprocess.Popen[bytes]:
    """Start the program and make it call once; it goes on until it is killed."""
    return subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)


def answer_of(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"\n")
    return process.stdout.readline().strip()


class Answering(NamedTuple):
    """A library whose function answers 2, a program that asks it, and the bytes of one that answers 3."""

    library: Path
    program: Path
    other: bytes


@pytest.fixture
def answering(tmp_path: Path) -> Answering:
    library = compile_source(ANSWERING_LIBRARY, tmp_path / "libconfigured.so", "-shared", "-fPIC", "-DANSWER=2")
    other = compile_source(ANSWERING_LIBRARY, tmp_path / "other.so", "-shared", "-fPIC", "-DANSWER=3")
    program = compile_source(ASKING_PROGRAM, tmp_path / "program", str(library), f"-Wl,-rpath,{tmp_path}")
    return Answering(library, program, other.read_bytes())


def test_a_stale_probe_makes_rewritten_code_run_old_instructions(answering: Answering, package_root: Path) -> None:
    """Why the daemon lets go at once. Here nobody does, and a new program gets the old library's answer."""
    probe = Probe(1, package_root / "moe_gpu_stabilizer" / "probe.json")
    try:
        with killed_at_the_end(ask(answering.program)) as old:
            uprobe = probe.attach(str(answering.library), offsets_of(answering.library)["llama_process"])
            assert answer_of(old) == b"2"
            rewrite_in_place(answering.library, answering.other)
            with killed_at_the_end(ask(answering.program)) as new:
                assert answer_of(new) == b"2", "the kernel runs its copy of the instruction that was there"
            uprobe.close()
            with killed_at_the_end(ask(answering.program)) as new:
                assert answer_of(new) == b"3"
    finally:
        probe.close()


def test_the_daemon_leaves_no_stale_probe(start_daemon: Start, answering: Answering, ledger: Ledger) -> None:
    """A writer waits until the daemon has let go, so that a program that starts right after it gets the new code."""
    original = answering.library.read_bytes()
    daemon = start_daemon(libraries=answering.library, rebind_seconds=3600)
    with killed_at_the_end(ask(answering.program)) as old:
        assert answer_of(old) == b"2"
        for rounds, (content, answer) in enumerate([(answering.other, b"3"), (original, b"2")] * 3, start=1):
            rewrite_in_place(answering.library, content)
            with killed_at_the_end(ask(answering.program)) as new:
                assert answer_of(new) == answer
            wait_until(lambda: daemon.log.count(f"attached {answering.library} ") > rounds, "attached again")  # noqa: B023
            with killed_at_the_end(ask(answering.program)) as new:
                assert answer_of(new) == answer
    ledger.kept("a library rewritten in place, and run at once")


def test_a_rewrite_that_size_and_times_do_not_show(start_daemon: Start, answering: Answering, ledger: Ledger) -> None:
    """As rsync --inplace --times does it, or a build with normalised times."""
    os.utime(answering.library, (1, 1))
    daemon = start_daemon(libraries=answering.library, rebind_seconds=3600)
    with killed_at_the_end(ask(answering.program)) as old:
        assert answer_of(old) == b"2"
        assert len(answering.other) == answering.library.stat().st_size
        with answering.library.open("r+b") as file:
            file.write(answering.other)
            os.utime(answering.library, (1, 1))
        wait_until(lambda: daemon.log.count(f"attached {answering.library} ") > 1, "attached again")
        with killed_at_the_end(ask(answering.program)) as new:
            assert answer_of(new) == b"3"
    ledger.kept("a library rewritten, with its old size and times")


def test_a_library_that_somebody_has_open_for_writing_waits(
    start_daemon: Start, answering: Answering, ledger: Ledger
) -> None:
    with answering.library.open("r+b"):
        daemon = start_daemon(libraries=answering.library, rebind_seconds=0.3)
        daemon.wait_for_log(rf"^cannot attach to {answering.library}: somebody has it open for writing$")
    daemon.wait_for_log(rf"^attached {answering.library} ")
    ledger.kept("a library that stays open for writing")


@contextmanager
def killed_at_the_end(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    with process:
        yield process
        process.kill()


def test_libraries_that_stay_open_for_writing_are_said_once_each_and_cost_nothing(
    start_daemon: Start, tmp_path: Path, ledger: Ledger
) -> None:
    libraries = [build_library(tmp_path / f"kept-{number}" / "libllama.so") for number in range(5)]
    daemon = start_daemon(libraries=f"{tmp_path}/kept-*/libllama.so", rebind_seconds=0.5)
    with ExitStack() as stack:
        for library in libraries:
            stack.enter_context(library.open("ab"))
            daemon.wait_for_log(rf"^detached {library}")
        for library in libraries:
            daemon.wait_for_log(rf"^cannot attach to {library}: somebody has it open for writing")
        said, woken = daemon.log.count("open for writing"), daemon.times_woken
        stays(lambda: daemon.log.count("open for writing") == said == len(libraries), 3, "nothing is said twice")
        # Some for each of six ticks, and what other tests give it to do; a loop without a pause makes many thousands.
        assert daemon.times_woken - woken < 2000
    wait_until(lambda: all(daemon.log.count(f"attached {path}") == 2 for path in libraries), "attached again")
    ledger.kept("libraries that stay open for writing")


def test_many_writers_at_once_do_not_keep_the_clock_up(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    """The kernel takes about 100 ms for each of their probes; the daemon must not wait for all that."""
    copies = [tmp_path / f"copy-{number}" / "libllama.so" for number in range(15)]
    for copy in copies:
        copy.parent.mkdir()
        shutil.copy(llama.library, copy)
    daemon = start_daemon(libraries=f"{llama.library}:{tmp_path}/copy-*/libllama.so", hold_seconds=0.5)
    with run() as workload, ExitStack() as stack:
        workload.do("call 1")
        wait_until(lambda: node.min_hz == HIGHEST_HZ, "the floor up")
        writers = [stack.enter_context(subprocess.Popen(["sh", "-c", f": >>{copy}"])) for copy in copies]
        wait_until(lambda: node.min_hz == LOWEST_HZ, "the floor given back", seconds=2.5)
        assert [writer.wait(30) for writer in writers] == [0] * len(writers)
    daemon.wait_for_log(rf"^detached {copies[-1]}: it is being rewritten$")
    ledger.kept("many writers at once")


def test_a_process_in_a_container_is_seen(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    """Another pid namespace and another root, where the library has a path that means nothing outside."""
    root = tmp_path / "container"
    copy_with_libraries(llama.program, root)
    inside = root / llama.library.relative_to("/")
    assert inside.exists()
    daemon = start_daemon(rebind_seconds=0.3, hold_seconds=0.3)
    container = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "chroot", str(root))
    with run(prefix=container) as workload:
        assert workload.own_pid == 1, "it is in a pid namespace of its own"
        daemon.wait_for_log(rf"^attached .*{llama.library} ")
        raises_the_floor(workload, node)
        assert daemon.has_logged(rf"^floor 1020 MHz \(pid {only_child(workload.pid)} inference\)$")
    ledger.kept("a library in a container")


def test_a_daemon_in_a_container_sees_its_own_processes(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode
) -> None:
    namespace = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    daemon = start_daemon(prefix=namespace, libraries=llama.library, hold_seconds=0.3)
    enter = ("nsenter", "--target", str(daemon.pid), "--pid", "--mount")
    with run(prefix=enter) as workload:
        raises_the_floor(workload, node)
        assert daemon.has_logged(rf"^floor 1020 MHz \(pid {workload.own_pid} inference\)$")
    with run() as outside:
        outside.do("call 1")
        assert not daemon.has_logged(rf"pid {outside.pid} "), "its namespace does not show this one"


def test_a_library_without_the_functions_is_reported_once(start_daemon: Start, tmp_path: Path, ledger: Ledger) -> None:
    empty = tmp_path / "empty" / "libllama.so"
    empty.parent.mkdir()
    shutil.copy("/bin/true", empty)
    daemon = start_daemon(libraries=empty, rebind_seconds=0.3)
    daemon.wait_for_log(rf"^nothing to watch in {empty}: ")
    wait_until(lambda: daemon.times_woken > 5, "some more ticks")
    assert daemon.log.count(f"nothing to watch in {empty}") == 1
    ledger.kept("a library without the functions")
