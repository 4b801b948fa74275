"""Which files are worth probing: in tmp trees, in a /proc of our own, and in the real one with real processes."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from pathlib import Path

import pytest

from moe_gpu_stabilizer import visits
from moe_gpu_stabilizer.elf import CALLS, Reading
from moe_gpu_stabilizer.files import FileId, Place, Version
from moe_gpu_stabilizer.libraries import USUAL_PLACES, Finder, Library
from moe_gpu_stabilizer.mappings import files_used_by
from moe_gpu_stabilizer.mounts import Mounts
from moe_gpu_stabilizer.reader import MOST_READ_AT_ONCE
from moe_gpu_stabilizer.visits import (
    FIRST_REVISIT_NS,
    LAST_REVISIT_NS,
    LONGEST_WAIT_NS,
    MANY_WAITING,
    mapped_pages_of,
)  # fmt: skip
from tests.workload import Workload, build_library, build_program, build_static

SECOND_NS = 1_000_000_000


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libllama, compiled once; tests copy it to where they want it."""
    return build_library(tmp_path_factory.mktemp("compiled") / "libllama.so")


@pytest.fixture
def no_proc(tmp_path: Path) -> Path:
    """A /proc without processes, where only files that lie about are wanted."""
    proc = tmp_path / "no-proc"
    proc.mkdir()
    return proc


def copy(library: Path, to: Path) -> Path:
    to.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(library, to))


def file_of(path: Path) -> FileId:
    return FileId.of(path.stat())


def paths(found: dict[FileId, Library]) -> set[str]:
    return {library.place.path for library in found.values()}


# Files that lie about: configured, or in a usual place.


def test_a_configured_path_is_found(compiled: Path, tmp_path: Path, no_proc: Path) -> None:
    library = copy(compiled, tmp_path / "libllama.so")
    found = Finder([str(library)], (), no_proc).scan(0)
    assert list(found) == [file_of(library)]
    (one,) = found.values()
    assert (one.place.path, one.place.openable) == (str(library), str(library))
    assert set(one.offsets) == set(CALLS)
    assert one.version == Version.of(library.stat())


def test_configured_globs_are_found(compiled: Path, tmp_path: Path, no_proc: Path) -> None:
    libraries = {copy(compiled, tmp_path / f"build-{number}/bin/libllama.so") for number in range(3)}
    copy(compiled, tmp_path / "build-9/lib/libllama.so")
    found = Finder([f"{tmp_path}/build-*/bin/*.so"], (), no_proc).scan(0)
    assert paths(found) == set(map(str, libraries))


def test_the_usual_places_are_looked_through(compiled: Path, tmp_path: Path, no_proc: Path) -> None:
    root = tmp_path / "root"
    expected = {
        copy(compiled, root / where)
        for where in (
            "usr/lib/libllama.so",
            "usr/lib/aarch64-linux-gnu/libllama.so.0.5.0",
            "usr/local/lib/libllama.so.0",
            "opt/llama.cpp/build/bin/libllama.so",
            "opt/llama/lib/libllama.so",
            "home/somebody/llama.cpp/build/bin/libllama.v0.5.0.so",
        )
    }
    copy(compiled, root / "usr/lib/libother.so")
    places = [f"{root}{place}" for place in USUAL_PLACES]
    assert paths(Finder((), places, no_proc).scan(0)) == set(map(str, expected))


def test_links_to_one_file_are_one_library_under_its_own_name(compiled: Path, tmp_path: Path, no_proc: Path) -> None:
    """As `make install` leaves them: libllama.so -> libllama.so.0 -> libllama.so.0.5.0."""
    library = copy(compiled, tmp_path / "libllama.so.0.5.0")
    (tmp_path / "libllama.so.0").symlink_to("libllama.so.0.5.0")
    (tmp_path / "libllama.so").symlink_to("libllama.so.0")
    finder = Finder([f"{tmp_path}/libllama*.so*"], (), no_proc)
    assert paths(finder.scan(0)) == {str(library)}
    assert finder.without_functions() == {}


def test_two_copies_are_two_files(compiled: Path, tmp_path: Path, no_proc: Path) -> None:
    for name in ("a", "b"):
        copy(compiled, tmp_path / name / "libllama.so")
    os.link(tmp_path / "a/libllama.so", tmp_path / "a/libllama.so.0")
    assert len(Finder([f"{tmp_path}/*/*"], (), no_proc).scan(0)) == 2


def test_what_is_no_library_is_passed_over(compiled: Path, tmp_path: Path, no_proc: Path) -> None:
    library = copy(compiled, tmp_path / "libllama.so")
    (tmp_path / "libllama-text.so").write_text("INPUT(libllama.so.0)\n")
    (tmp_path / "libllama-empty.so").touch()
    (tmp_path / "libllama-cut.so").write_bytes(compiled.read_bytes()[:64])
    (tmp_path / "libllama-gone.so").symlink_to("nowhere")
    (tmp_path / "libllama-loop.so").symlink_to("libllama-loop.so")
    (tmp_path / "libllama-folder.so").mkdir()
    os.mkfifo(tmp_path / "libllama-fifo.so")
    finder = Finder([f"{tmp_path}/libllama*"], (), no_proc)
    assert paths(finder.scan(0)) == {str(library)}


def test_a_library_that_comes_later_is_found_at_the_next_scan(compiled: Path, tmp_path: Path, no_proc: Path) -> None:
    finder = Finder([f"{tmp_path}/*/libllama.so"], (), no_proc)
    assert finder.scan(0) == {}
    library = copy(compiled, tmp_path / "build/libllama.so")
    assert paths(finder.scan(SECOND_NS)) == {str(library)}
    library.unlink()
    assert finder.scan(2 * SECOND_NS) == {}


def test_a_library_replaced_by_another_file_is_another_library(compiled: Path, tmp_path: Path, no_proc: Path) -> None:
    library = copy(compiled, tmp_path / "libllama.so")
    finder = Finder([str(library)], (), no_proc)
    before = finder.scan(0)
    copy(compiled, tmp_path / "new").rename(library)
    after = finder.scan(SECOND_NS)
    assert list(after) == [file_of(library)] != list(before)


def test_a_library_rewritten_in_place_is_read_again(compiled: Path, tmp_path: Path, no_proc: Path) -> None:
    library = copy(compiled, tmp_path / "libllama.so")
    finder = Finder([str(library)], (), no_proc)
    (before,) = finder.scan(0).values()
    other = build_library(tmp_path / "other.so", "-DPADDING", "-O0")
    library.write_bytes(other.read_bytes())
    (after,) = finder.scan(SECOND_NS).values()
    assert after.version.file == before.version.file
    assert after.version != before.version
    assert after.offsets == next(iter(Finder([str(other)], (), no_proc).scan(0).values())).offsets
    library.write_text("no library any more")
    assert finder.scan(2 * SECOND_NS) == {}


def test_more_files_than_one_reading_takes_are_all_found(compiled: Path, tmp_path: Path, no_proc: Path) -> None:
    for number in range(MOST_READ_AT_ONCE + 3):
        copy(compiled, tmp_path / f"{number}/libllama.so")
    finder = Finder([f"{tmp_path}/*/libllama.so"], (), no_proc)
    assert len(finder.scan(0)) == MOST_READ_AT_ONCE + 3
    assert finder.without_functions() == {}


def test_a_file_that_makes_its_reader_fail_does_not_take_others_with_it(
    compiled: Path, tmp_path: Path, no_proc: Path
) -> None:
    good = {copy(compiled, tmp_path / name / "libllama.so") for name in ("a", "y", "z")}
    bad = tmp_path / "b/libllama.so"
    bad.parent.mkdir()
    bad.write_bytes(compiled.read_bytes()[:64])
    finder = Finder([f"{tmp_path}/*/libllama.so"], (), no_proc)
    assert paths(finder.scan(0)) == set(map(str, good))
    assert paths(finder.scan(SECOND_NS)) == set(map(str, good)), "and it is not read again"
    assert list(finder.without_functions()) == [str(bad)]


def test_a_look_does_not_wait_for_the_reading(compiled: Path, tmp_path: Path, no_proc: Path) -> None:
    library = copy(compiled, tmp_path / "libllama.so")
    finder = Finder([str(library)], (), no_proc)
    assert finder.look(0) == {}
    reading = finder.reader.reading
    assert reading is not None
    assert finder.look(0) == {}
    assert finder.reader.reading is reading, "one at a time"
    reading.child.receive_until(reading.deadline_ns)
    finder.reader.finish()
    assert paths(finder.look(0)) == {str(library)}
    assert finder.reader.reading is None


# What the owner should know is not watched.


def test_a_library_without_the_functions_is_told(compiled: Path, tmp_path: Path, no_proc: Path) -> None:
    copy(compiled, tmp_path / "libllama.so")
    useless = tmp_path / "libllama.so.0"
    useless.write_text("no library")
    (tmp_path / "libllama-common.so").write_text("no library, and none is wanted here")
    finder = Finder((), [f"{tmp_path}/libllama*.so*"], no_proc)
    finder.scan(0)
    assert list(finder.without_functions()) == [str(useless)]


@pytest.mark.parametrize("pattern", ["{}/missing.so", "{}/*.so.9", "{}/other.so", "{}/*er.so"])
def test_a_configured_pattern_in_vain_is_told(compiled: Path, tmp_path: Path, no_proc: Path, pattern: str) -> None:
    copy(compiled, tmp_path / "libllama.so")
    (tmp_path / "other.so").write_text("no library")
    finder = Finder([str(tmp_path / "libllama.so"), pattern.format(tmp_path)], (), no_proc)
    assert len(finder.scan(0)) == 1
    assert list(finder.without_functions()) == [pattern.format(tmp_path)]


# A /proc of our own: when is a process looked at, and what if it cannot be?


class Proc:
    """Processes as /proc shows them: a directory with exe, maps and map_files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def start(self, pid: int, executable: Path, user_id: int = 0) -> Path:
        process = self.directory / str(pid)
        (process / "map_files").mkdir(parents=True)
        (process / "exe").symlink_to(executable)
        (process / "maps").write_text("")
        (process / "status").write_text(f"Name:\tprogram\nUid:\t{user_id}\t0\t0\t0\n")
        return process

    def map(self, pid: int, library: Path, addresses: str = "7f00-7fff", permissions: str = "r-xp") -> None:
        """The process maps a library from now on."""
        process = self.directory / str(pid)
        with (process / "maps").open("a") as maps:
            maps.write(f"{addresses} {permissions} 00001000 fe:00 1234                      {library}\n")
        (process / "map_files" / addresses).symlink_to(library)

    def end(self, pid: int) -> None:
        shutil.rmtree(self.directory / str(pid))


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program"
    path.write_text("#!/bin/sh\n")
    return path


def test_a_mapped_library_is_found(compiled: Path, tmp_path: Path, proc: Proc, program: Path) -> None:
    library = copy(compiled, tmp_path / "libllama.so")
    proc.start(8, program)
    proc.map(8, library)
    (one,) = Finder((), (), proc.directory).scan(0).values()
    assert one.place.path == str(library)
    assert one.place.openable.startswith(str(proc.directory / "8"))


@pytest.mark.parametrize(
    "name",
    [
        "libllama.so",
        "libllama.so.0",
        "libllama.so.0.5.0",
        "libllama.v0.5.0.so",
        "libllama-my build.so",
        "libggml.so",
        "libggml.so.0",
        "libggml.v0.9.so",
        "libggml-base.so",
        "libggml-base.so.0.25.3",
        "libggml-cpu.so.0",
        "libggml-cpu-haswell.so",
    ],
)
def test_names_of_the_library(compiled: Path, tmp_path: Path, proc: Proc, program: Path, name: str) -> None:
    proc.start(8, program)
    proc.map(8, copy(compiled, tmp_path / "lib" / name))
    assert len(Finder((), (), proc.directory).scan(0)) == 1


@pytest.mark.parametrize(
    "name",
    [
        "libggml-cuda.so",
        "libggml-rpc.so.0",
        "libggmlx.so",
        "xlibggml.so",
        "libggml-base.a",
        "xlibllama.so",
        "libllama.a",
        "libllama.so/libother.so",
        "libllama",
    ],
)
def test_other_mapped_files_are_passed_over(
    compiled: Path, tmp_path: Path, proc: Proc, program: Path, name: str
) -> None:
    proc.start(8, program)
    proc.map(8, copy(compiled, tmp_path / "lib" / name))
    assert Finder((), (), proc.directory).scan(0) == {}


def test_a_library_that_is_only_mapped_as_data_is_passed_over(
    compiled: Path, tmp_path: Path, proc: Proc, program: Path
) -> None:
    """Somebody reads it (a backup, a debugger); nobody runs it."""
    proc.start(8, program)
    proc.map(8, copy(compiled, tmp_path / "libllama.so"), permissions="r--p")
    assert Finder((), (), proc.directory).scan(0) == {}


def test_where_map_files_is_closed_the_process_root_leads_to_the_library(
    compiled: Path, tmp_path: Path, proc: Proc, program: Path
) -> None:
    """Without root; also inside a container, whose paths are not ours."""
    root = tmp_path / "container"
    copy(compiled, root / "opt/libllama.so")
    process = proc.start(8, program)
    (process / "root").symlink_to(root)
    (process / "maps").write_text("7f00-7fff r-xp 00001000 fe:00 1234                      /opt/libllama.so\n")
    (one,) = Finder((), (), proc.directory).scan(0).values()
    assert (one.place.path, one.place.openable) == ("/opt/libllama.so", f"{process}/root/opt/libllama.so")


def test_a_library_loaded_late_is_found_when_the_process_is_visited_again(
    compiled: Path, tmp_path: Path, proc: Proc, program: Path
) -> None:
    """A Python program that imports a binding. It is looked at after a second, and whenever its age has doubled."""
    proc.start(64, program)
    finder = Finder((), (), proc.directory)
    assert finder.scan(0) == {}
    proc.map(64, copy(compiled, tmp_path / "libllama.so"))
    assert finder.scan(FIRST_REVISIT_NS - 1) == {}, "not yet"
    assert len(finder.scan(FIRST_REVISIT_NS)) == 1


def test_visits_become_rarer_with_age_up_to_one_in_half_a_minute(proc: Proc, program: Path) -> None:
    proc.start(64, program)
    finder = Finder((), (), proc.directory)
    visited_s = []
    for now_s in range(150):
        before_ns = finder.visits[64].next_ns if 64 in finder.visits else 0
        finder.scan(now_s * SECOND_NS)
        if finder.visits[64].next_ns != before_ns:
            visited_s.append(now_s)
    assert visited_s == [0, 1, 2, 4, 8, 16, 32, 62, 92, 122]


def test_processes_of_one_age_are_not_all_visited_at_once(proc: Proc, program: Path) -> None:
    for pid in range(64, 128):
        proc.start(pid, program)
    finder = Finder((), (), proc.directory)
    finder.scan(0)
    finder.scan(100 * SECOND_NS)
    due_ns = [visit.next_ns for visit in finder.visits.values()]
    assert len(set(due_ns)) == 64
    assert max(due_ns) == 100 * SECOND_NS + LAST_REVISIT_NS
    assert min(due_ns) > 100 * SECOND_NS + LAST_REVISIT_NS // 2


def write_size(proc: Proc, pid: int, mapped_pages: int, heap_pages: int = 100) -> None:
    pages = mapped_pages + heap_pages
    (proc.directory / str(pid) / "statm").write_text(f"{pages} 200 100 1 0 {heap_pages} 0\n")


def test_a_process_that_maps_as_much_as_before_is_passed_over_fifteen_times(
    compiled: Path, tmp_path: Path, proc: Proc, program: Path
) -> None:
    """As if it had mapped the library and let go of just as much. What it does to its heap is no matter."""
    proc.start(16, program)
    write_size(proc, 16, 1000)
    finder = Finder((), (), proc.directory)
    finder.scan(0)
    proc.map(16, copy(compiled, tmp_path / "libllama.so"))
    for turn in range(1, 16):
        write_size(proc, 16, 1000, heap_pages=100 + turn)
        assert finder.scan(turn * 100 * SECOND_NS) == {}
    assert finder.scan(1600 * SECOND_NS) == {}, "it waits for company"
    assert finder.scan(1600 * SECOND_NS + LONGEST_WAIT_NS - 1) == {}
    assert len(finder.scan(1600 * SECOND_NS + LONGEST_WAIT_NS)) == 1


def test_a_library_counts_as_mapped_and_the_heap_does_not(compiled: Path) -> None:
    """The kernel's own figures, of this process."""
    before = mapped_pages_of(Path("/proc/self"))
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE):
        assert mapped_pages_of(Path("/proc/self")) == before
    with compiled.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC):
        assert mapped_pages_of(Path("/proc/self")) > before
    assert mapped_pages_of(Path("/proc/2")) == 0, "a thread of the kernel's"


@pytest.mark.parametrize("company", ["nobody", "a new process", "many that wait"])
def test_looks_at_processes_that_are_no_longer_young_wait_for_company(
    compiled: Path, tmp_path: Path, proc: Proc, program: Path, company: str
) -> None:
    """Each round of looks hands over to another thread and back: two wake-ups."""
    waiting = range(64, 64 + 64 * (MANY_WAITING if company == "many that wait" else 1), 64)
    for pid in waiting:
        proc.start(pid, program)
        write_size(proc, pid, 1000)
    finder = Finder((), (), proc.directory)
    finder.scan(0)
    finder.scan(100 * SECOND_NS)
    proc.map(64, copy(compiled, tmp_path / "libllama.so"))
    for pid in waiting:
        write_size(proc, pid, 1001)
    if company == "a new process":
        proc.start(9, program)
    assert len(finder.scan(130 * SECOND_NS)) == (0 if company == "nobody" else 1)
    assert len(finder.scan(130 * SECOND_NS + LONGEST_WAIT_NS)) == 1


@pytest.mark.parametrize("happens", ["it is young, and grows", "it calls"])
def test_a_process_that_calls_or_is_young_and_has_grown_is_looked_at_now(
    compiled: Path, tmp_path: Path, proc: Proc, program: Path, happens: str
) -> None:
    proc.start(8, program)
    write_size(proc, 8, 1000)
    finder = Finder((), (), proc.directory)
    finder.scan(0)
    finder.scan(SECOND_NS if happens == "it is young, and grows" else 100 * SECOND_NS)
    proc.map(8, copy(compiled, tmp_path / "libllama.so"))
    if happens == "it is young, and grows":
        write_size(proc, 8, 1001)
    else:
        finder.visit_soon(8)
    assert len(finder.scan(3 * SECOND_NS if happens == "it is young, and grows" else 101 * SECOND_NS)) == 1


def test_a_new_process_with_an_old_pid_is_new(compiled: Path, tmp_path: Path, proc: Proc, program: Path) -> None:
    library = copy(compiled, tmp_path / "libllama.so")
    finder = Finder((), (), proc.directory)
    proc.start(8, program)
    finder.scan(0)
    finder.scan(100 * SECOND_NS)
    # Another inode, as the kernel gives each process's directory.
    (proc.directory / "8").rename(tmp_path / "old")
    proc.start(8, program)
    proc.map(8, library)
    assert len(finder.scan(101 * SECOND_NS)) == 1


def test_what_only_dead_processes_used_is_let_go(compiled: Path, tmp_path: Path, proc: Proc, program: Path) -> None:
    library = copy(compiled, tmp_path / "libllama.so")
    finder = Finder((), (), proc.directory)
    for pid in (8, 16):
        proc.start(pid, program)
        proc.map(pid, library)
    assert len(finder.scan(0)) == 1
    proc.end(16)
    assert len(finder.scan(SECOND_NS // 2)) == 1, "one of two still uses it"
    proc.end(8)
    assert finder.scan(SECOND_NS // 2) == {}
    assert finder.visits == {}


def test_a_rewritten_library_is_looked_at_again_at_once(
    compiled: Path, tmp_path: Path, proc: Proc, program: Path
) -> None:
    library = copy(compiled, tmp_path / "libllama.so")
    finder = Finder((), (), proc.directory)
    proc.start(8, program)
    proc.map(8, library)
    (before,) = finder.scan(0).values()
    library.write_bytes(compiled.read_bytes() + b"longer")
    finder.look_again(file_of(library))
    (after,) = finder.scan(1).values()
    assert after.version == Version.of(library.stat()) != before.version


def test_of_two_contents_of_one_file_the_later_is_real(
    compiled: Path, tmp_path: Path, proc: Proc, program: Path
) -> None:
    """One process was visited before the rewrite, the other after it."""
    library = copy(compiled, tmp_path / "libllama.so")
    finder = Finder((), (), proc.directory)
    proc.start(8, program)
    proc.map(8, library)
    finder.scan(0)
    library.write_bytes(compiled.read_bytes() + b"longer")
    proc.start(16, program)
    proc.map(16, library)
    (one,) = finder.scan(1).values()
    assert one.version == Version.of(library.stat())


def test_what_a_process_that_has_called_uses_is_marked(
    compiled: Path, tmp_path: Path, proc: Proc, program: Path
) -> None:
    """Also where it is heard of before it was ever looked at."""
    finder = Finder((), (), proc.directory)
    for pid in (8, 16):
        proc.start(pid, program)
        proc.map(pid, copy(compiled, tmp_path / f"{pid}/libllama.so"))
    finder.visit_soon(16)
    called = {library.place.path: library.called for library in finder.scan(0).values()}
    assert called == {f"{tmp_path}/8/libllama.so": False, f"{tmp_path}/16/libllama.so": True}
    proc.end(16)
    finder.scan(1)
    proc.start(16, program)
    proc.map(16, tmp_path / "16/libllama.so")
    assert not any(library.called for library in finder.scan(2).values()), "a new process with its pid"


def test_what_is_remembered_of_one_users_processes_is_bounded(
    compiled: Path, tmp_path: Path, proc: Proc, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes beyond that are not looked into; those of others are."""
    monkeypatch.setattr(visits, "MOST_USES_OF_A_USER", 6)
    for pid in range(8, 18):
        proc.start(pid, program, user_id=1000)
        proc.map(pid, copy(compiled, tmp_path / f"{pid}/libllama.so"))
    proc.start(18, program)
    proc.map(18, copy(compiled, tmp_path / "18/libllama.so"))
    found = paths(Finder((), (), proc.directory).scan(0))
    assert len(found) == 4
    assert f"{tmp_path}/18/libllama.so" in found


@pytest.mark.parametrize("pages", [0, 1000], ids=["a kernel thread", "it is just ending"])
def test_what_has_no_memory_is_asked_once(proc: Proc, pages: int) -> None:
    proc.start(2, Path("nowhere"))
    write_size(proc, 2, pages, heap_pages=0)
    (proc.directory / "2/exe").unlink()
    finder = Finder((), (), proc.directory)
    finder.scan(SECOND_NS)
    assert finder.visits[2].next_ns > 1000 * LAST_REVISIT_NS
    assert finder.visits[2].uses == {}
    assert finder.visits[2].readable


@pytest.mark.parametrize(("error", "times"), [(errno.EACCES, 1), (errno.EMFILE, 3)], ids=["closed to us", "a shortage"])
def test_what_cannot_be_looked_at_is_tried_again_where_there_is_hope(
    proc: Proc, program: Path, monkeypatch: pytest.MonkeyPatch, error: int, times: int
) -> None:
    tried: list[Path] = []

    def refuse(directory: Path, *_: object) -> None:
        tried.append(directory)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(visits, "files_used_by", refuse)
    proc.start(16, program)
    write_size(proc, 16, 1000)
    finder = Finder((), (), proc.directory)
    for second in range(1, 4):
        finder.scan(second * SECOND_NS)
    assert len(tried) == times
    assert not finder.visits[16].readable


def test_kernel_threads_wake_no_other_thread_for_a_look(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come and go all the time."""
    looked_at: list[int] = []
    monkeypatch.setattr(visits.Visits, "_visit", lambda self, pid, visit: looked_at.append(pid))
    finder = Finder((), (), proc.directory)
    proc.start(2, Path("nowhere"))
    write_size(proc, 2, 0, heap_pages=0)
    finder.scan(SECOND_NS)
    assert looked_at == []


def test_a_process_that_cannot_be_looked_at_does_not_hide_the_others(
    compiled: Path, tmp_path: Path, proc: Proc, program: Path
) -> None:
    """Its executable may lie on a mount whose server has died: stat() then fails, and not for want of rights."""
    process = proc.start(8, program)
    (process / "exe").unlink()
    (process / "exe").symlink_to("exe")
    proc.start(16, program)
    proc.map(16, copy(compiled, tmp_path / "libllama.so"))
    finder = Finder((), (), proc.directory)
    assert len(finder.scan(0)) == 1
    assert not finder.visits[8].readable


def test_a_file_that_could_not_be_opened_is_read_where_it_can_be(compiled: Path, tmp_path: Path, proc: Proc) -> None:
    """The process that led to it has ended meanwhile; another way leads to it, too."""
    library = copy(compiled, tmp_path / "libllama.so")
    finder = Finder((str(library),), (), proc.directory)
    assert finder.look(0) == {}
    assert finder.reader.reading is not None
    finder.reader.reading.child.receive_until(finder.reader.reading.deadline_ns)
    (version,) = finder.reader.reading.end()
    finder.reader.reading = Reading({version: Place(str(library), "/proc/0/exe")})
    assert [found.place.openable for found in finder.scan(0).values()] == [str(library)]


# The real /proc, with a real process.


@pytest.fixture
def llama(tmp_path: Path, compiled: Path) -> Path:
    """A program with its own libllama beside it."""
    library = copy(compiled, tmp_path / "llama/libllama.so")
    return build_program(tmp_path / "llama/llama-server", library)


def uses(pid: int) -> dict[str, FileId]:
    """The files of one real process that are worth probing, by the path that people know."""
    found = Finder((), ()).scan(0)
    versions = dict(files_used_by(Path(f"/proc/{pid}"), Mounts(), lambda _path, _kind: None))
    return {library.place.path: file for file, library in found.items() if library.version in versions}


def test_a_library_is_found_because_a_process_uses_it(llama: Path) -> None:
    library = llama.with_name("libllama.so")
    with Workload(llama) as process:
        assert uses(process.pid) == {str(library): file_of(library)}


def test_a_library_with_an_odd_name(tmp_path: Path, compiled: Path) -> None:
    library = build_library(tmp_path / "my llama (1)\nnew/libllama.v0.5.0.so")
    program = build_program(library.with_name("llama-server"), library)
    with Workload(program) as process:
        (file,) = uses(process.pid).values()
        assert file == file_of(library)


def test_a_static_program_carries_the_functions_itself(tmp_path: Path) -> None:
    program = build_static(tmp_path / "static/llama-server")
    with Workload(program) as process:
        assert uses(process.pid) == {str(program): file_of(program)}


def test_a_library_replaced_by_rename_is_used_in_both_versions(llama: Path, compiled: Path) -> None:
    """A rebuild: the process that runs keeps the old one, whatever its name leads to now."""
    library = llama.with_name("libllama.so")
    old = file_of(library)
    with Workload(llama) as first:
        copy(compiled, library.with_name("new")).rename(library)
        with Workload(llama) as second:
            assert set(uses(first.pid).values()) == {old}
            assert set(uses(second.pid).values()) == {file_of(library)} != {old}


def test_a_deleted_library_is_found_as_long_as_a_process_uses_it(llama: Path) -> None:
    library = llama.with_name("libllama.so")
    old = file_of(library)
    finder = Finder((), ())
    with Workload(llama) as process:
        library.unlink()
        found = finder.scan(0)
        assert found[old].place.path == f"{library} (deleted)"
        with open(found[old].place.openable, "rb") as file:
            assert FileId.of(os.fstat(file.fileno())) == old
        process.kill()
    assert old not in finder.scan(1)


def test_a_deleted_static_program_is_found_as_long_as_it_runs(tmp_path: Path) -> None:
    program = build_static(tmp_path / "static/llama-server")
    old = file_of(program)
    with Workload(program) as process:
        program.unlink()
        assert set(uses(process.pid).values()) == {old}


def test_whatever_runs_here_can_be_looked_at() -> None:
    """Kernel threads, processes that end meanwhile, other users' processes: looking at them raises nothing."""
    finder = Finder((), ())
    finder.scan(0)
    assert {1, os.getpid()} <= set(finder.visits)
    assert Version.of(os.stat("/proc/self/exe")) in finder.visits[os.getpid()].uses
