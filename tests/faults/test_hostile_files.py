"""Library files that lie about what they are, that are no files at all, or are another at every look."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from moe_gpu_stabilizer.elf import PROBED_FUNCTIONS, READ_CPU_SECONDS, offsets_or_none
from moe_gpu_stabilizer.isolated import call_in_child
from tests.faults.hostile_elf import TERABYTE, Hostile, hostile_files, lie_in_symbols
from tests.faults.ledger import Ledger
from tests.faults.test_hostile_libraries import NOBODY, Run, Start, copies, mapped, watched_by
from tests.kernel.conftest import Llama
from tests.kernel.test_libraries import raises_the_floor
from tests.support import PlainNode, RunningDaemon, wait_until
from tests.workload import build_library, build_program

FILES, AT_ONCE, WORST = 3000, 100, 20
PATIENT_SECONDS = 300


def read_all(paths: list[str]) -> list[tuple[float, list[int]]]:
    """For each file the CPU time it took, and the offsets that were found; none where its reader would have failed."""
    told = []
    for path in paths:
        began = time.process_time()
        descriptor = os.open(path, os.O_RDONLY)
        size = os.fstat(descriptor).st_size
        offsets = offsets_or_none(descriptor)
        assert set(offsets) <= set(PROBED_FUNCTIONS)
        assert all(0 <= offset < size for offset in offsets.values())
        told.append((time.process_time() - began, list(offsets.values())))
    return told


class Corpus(NamedTuple):
    """Hostile files, with the CPU time that each took to read and the offsets that were found."""

    files: list[Hostile]
    seconds: list[float]
    offsets: list[list[int]]
    honest: list[int]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    directory = tmp_path_factory.mktemp("hostile")
    library = build_library(directory / "libllama.so")
    files = list(hostile_files(library.read_bytes(), FILES))
    told = []
    for start in range(0, FILES, AT_ONCE):
        paths = [str(file.write(directory / str(place))) for place, file in enumerate(files[start : start + AT_ONCE])]
        # A ChildError here is a reader that crashed, hung, or used more memory than it may.
        told += call_in_child(partial(read_all, paths), PATIENT_SECONDS)
    ((_, honest),) = read_all([str(library)])
    return Corpus(files, [seconds for seconds, _ in told], [offsets for _, offsets in told], honest)


def test_thousands_of_files_that_lie_are_read_in_time_and_without_harm(corpus: Corpus, ledger: Ledger) -> None:
    """Cut off, with headers, sections, segments, symbols that lie, tables that overlap, a hole of a terabyte."""
    assert len(corpus.seconds) == FILES
    assert max(corpus.seconds) < READ_CPU_SECONDS
    for _ in corpus.files:
        ledger.kept("a library file that lies, read")


def test_files_that_lie_beside_a_good_one(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, corpus: Corpus, ledger: Ledger
) -> None:
    """Those that take longest to read, and those whose functions are elsewhere: configured, and mapped by processes."""
    slow = sorted(range(FILES), key=lambda place: -corpus.seconds[place])[:WORST]
    lying = [place for place, found in enumerate(corpus.offsets) if found and found != corpus.honest][:WORST]
    holes = [place for place in range(FILES) if corpus.files[place].length_bytes == TERABYTE][:4]
    paths = [corpus.files[place].write(tmp_path / f"bad-{place}/libllama.so") for place in {*slow, *lying, *holes}]
    for path in paths:
        os.chown(path, NOBODY, NOBODY)
    mappable = [path for path in paths if 0 < path.stat().st_size < TERABYTE]
    assert len(lying) > WORST // 2, "there are some that the kernel is asked to probe"
    with mapped(mappable), run() as good:
        daemon = start_daemon(libraries=f"{llama.library}:{tmp_path}/bad-*/*", rebind_seconds=0.5, hold_seconds=0.3)
        daemon.wait_for_log(rf"^attached {llama.library} ", seconds=60)
        raises_the_floor(good, node)
        wait_until(lambda: psutil.Process(daemon.pid).children() == [], "all have been read", seconds=120)
        raises_the_floor(good, node)
        assert str(llama.library) in watched_by(daemon)
        assert daemon.stop() == 0
    for _ in paths:
        ledger.kept("a library file that lies, beside a good one")


def test_a_probe_in_the_middle_of_an_instruction_harms_only_who_runs_that_file(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    """A symbol may lie about where its function begins: the breakpoint is put there.

    It is in that one file, so in the programs of whoever made it or chose to run it, which its author could have ended
    more easily. A good library with the same content, under another inode, does not see it.
    """
    honest = read_all([str(llama.library)])[0][1]
    content = bytearray(llama.library.read_bytes())
    chance = random.Random(1)
    while True:
        changed = bytearray(content)
        lie_in_symbols(changed, chance)
        liar = Hostile(bytes(changed), len(changed)).write(tmp_path / "liar/libllama.so")
        found = read_all([str(liar)])[0][1]
        if found and set(found).isdisjoint(honest):
            break
    program = build_program(tmp_path / "liar/llama-server", llama.library)
    daemon = start_daemon(libraries=f"{liar}:{llama.library}", rebind_seconds=0.3, hold_seconds=0.3)
    daemon.wait_for_log(rf"^(attached {liar} |cannot attach to {liar}: )", seconds=60)
    daemon.wait_for_log(rf"^attached {llama.library} ", seconds=60)
    with run(program=program) as good:
        good.do("call 100")
        raises_the_floor(good, node)
    ledger.kept("a symbol that points into an instruction")


# Names that lead somewhere else at every look.


def test_names_that_change_all_the_time_lead_the_daemon_nowhere_else(
    start_daemon: Start, run: Run, llama: Llama, node: PlainNode, tmp_path: Path, ledger: Ledger
) -> None:
    """A good library, links to /etc/shadow, /dev/zero, /proc/kmsg, another user's library, a FIFO, a folder, nothing.

    They take each other's place as fast as a thread can rename them, below a configured path and a configured glob,
    and so does the folder that they are in. What the daemon has open is only ever a library.
    """
    spare, place = tmp_path / "spare", tmp_path / "place"
    (place / "folder").mkdir(parents=True)
    spare.mkdir()
    others = copies(llama.library, tmp_path / "others", 1, owner_id=1)[0]
    name = place / "folder" / "libllama.so"

    def make(kind: int, path: Path) -> None:
        targets = ("/etc/shadow", "/dev/zero", "/proc/kmsg", str(others), "/", str(path))
        if kind < len(targets):
            path.symlink_to(targets[kind])
        elif kind == len(targets):
            os.mkfifo(path)
        else:
            shutil.copy(llama.library, path)

    over = threading.Event()

    def swap() -> None:
        for turn in itertools.count():
            if over.is_set():
                return
            path = spare / str(turn)
            make(turn % 9, path)
            os.rename(path, name)
            if turn % 7 == 0:
                (place / "folder").rename(place / "away")
                (place / "folder").symlink_to("/etc")
                (place / "folder").unlink()
                (place / "away").rename(place / "folder")

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        daemon = start_daemon(libraries=f"{name}:{place}/*/*.so:{llama.library}", rebind_seconds=0.2, hold_seconds=0.3)
        opened: set[str] = set()
        began = daemon.times_woken
        with run() as good:
            for _ in range(5):
                for _ in range(100):
                    opened |= files_open_in(daemon)
                raises_the_floor(good, node)
        assert daemon.times_woken > began
    finally:
        over.set()
        swapper.join()
    status = json.loads(daemon.command("--status", "--json").stdout)
    assert str(llama.library) in {library["path"] for library in status["libraries"]}
    opened -= {f"{node.directory}/min_freq", f"{node.directory}/max_freq"}
    # Libraries, of other tests too, one of ours that had another name before, and folders that were looked through.
    strangers = {name for name in opened if not re.search(r"/lib[^/]*\.so[^/]*$|/spare/\d+$", name)}
    assert {name for name in strangers if not os.path.isdir(name)} == set()
    assert daemon.stop() == 0
    ledger.kept("names that change under the finder")


def files_open_in(daemon: RunningDaemon) -> set[str]:
    """What the daemon has open that is a file with a name, its own ones aside. Mere handles (O_PATH) open nothing."""
    found = set()
    own = (str(daemon.runtime), str(daemon.log_path), "/dev/null", "/sys/")
    for descriptor in os.listdir(f"/proc/{daemon.pid}/fd"):
        with contextlib.suppress(OSError):  # closed since
            name = os.readlink(f"/proc/{daemon.pid}/fd/{descriptor}")
            told = Path(f"/proc/{daemon.pid}/fdinfo/{descriptor}").read_text()
            flags = re.search(r"^flags:\s+(\d+)$", told, re.M)
            is_handle = flags is None or int(flags[1], 8) & os.O_PATH
            of_process = re.match(r"/proc/(\d|self)", name)
            if name.startswith("/") and not name.startswith(own) and not is_handle and not of_process:
                found.add(name.removesuffix(" (deleted)"))
    return found
