"""Files that somebody writes to stay watched, but not thousands of them."""

from __future__ import annotations

from pathlib import Path

from moe_gpu_stabilizer.bindings import MOST_LEFT_WATCHED, Bindings
from moe_gpu_stabilizer.files import FileId, Place, Version
from moe_gpu_stabilizer.libraries import Library
from moe_gpu_stabilizer.mounts import Mounts


class Probe:
    def close(self) -> None:
        pass


class Attacher:
    def attach(self, _path: str, _offset: int, _function: str) -> Probe:
        return Probe()


class Watcher:
    """Counts what is watched."""

    def __init__(self) -> None:
        self.watched: set[FileId] = set()

    def add(self, path: str) -> None:
        self.watched.add(FileId.of(Path(path).stat()))

    def remove(self, path: str) -> None:
        self.watched.discard(FileId.of(Path(path).stat()))

    def clear(self) -> None:
        self.watched.clear()


def make_library(path: Path) -> Library:
    path.write_bytes(b"code")
    return Library(Version.of(path.stat()), Place(str(path), str(path)), {"llama_decode": 0})


def test_files_that_were_written_to_are_watched_no_longer_once_they_are_many(tmp_path: Path) -> None:
    watcher = Watcher()
    bindings = Bindings(Attacher(), watcher, Mounts(), most_files=4)
    kept = make_library(tmp_path / "kept.so")
    for number in range(MOST_LEFT_WATCHED + 2):
        other = make_library(tmp_path / f"{number}.so")
        change = bindings.update({library.version.file: library for library in (kept, other)}, ())
        assert not change.failed
        bindings.written(other.version.file)
    bindings.update({kept.version.file: kept}, ())
    assert kept.version.file in watcher.watched
    assert len(watcher.watched) <= 2
    bindings.close()
