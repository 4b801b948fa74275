"""The way to files, step by step, leads where the kernel's own would: compared with glob and realpath."""

from __future__ import annotations

import glob
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_gpu_stabilizer.listings import MOST_MATCHES_BUT_IN_ROOTS, Listings
from moe_gpu_stabilizer.mounts import Mounts
from moe_gpu_stabilizer.reach import expand, open_for_reading, reached


def never(path: str, kind: str) -> None:
    pytest.fail(f"{path} is on this machine's disk, not on {kind}")


@pytest.fixture
def mounts() -> Iterator[Mounts]:
    mounts = Mounts()
    yield mounts
    mounts.close()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files, folders and links of every kind."""
    for name in ("a/bin/lib.so", "b/bin/lib.so.0", "b/bin/other", "b/bin/.hidden.so", "c [1]/lib.so", "deep/er/lib.so"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    links = {
        "b/bin/lib.so": "lib.so.0",
        "relative": "deep/../a/./bin",
        "absolute": str(tmp_path / "deep"),
        "a/up.so": "../deep/er/lib.so",
        "a/far-up.so": "../" * 60 + str(tmp_path).lstrip("/") + "/a/bin/lib.so",
        "dangling.so": "nowhere/lib.so",
        "loop.so": "loop2.so",
        "loop2.so": "loop.so",
        "through-file": "a/bin/lib.so/deeper",
    }
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "fifo.so")
    (tmp_path / "folder.so").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "pattern",
    [
        "a/bin/lib.so", "a/*/lib.so", "*/bin/*", "*/*.so", "*/*/*.so", "**/*.so", "*.so", "relative/*", "absolute/er/*",
        "[ab]/bin/lib.so*", "b/bin/.*", "?/up.so", "a/far-up.so", "none/*", "*/none", "a/bin/lib.so/*", "through-file",
        "loop.so", "dangling.so", "fifo.so", "folder.so", "*", "./a//bin/*", "absolute/../a/bin/*",
    ],
)  # fmt: skip
def test_a_glob_leads_where_pythons_own_does(tree: Path, mounts: Mounts, pattern: str) -> None:
    found = {one.path: one.real for one in expand(f"{tree}/{pattern}", mounts, Listings(), never)}
    paths = [path for path in glob.glob(f"{tree}/{pattern}") if os.path.isfile(path)]
    assert {os.path.normpath(path): real for path, real in found.items()} == {
        os.path.normpath(path): os.path.realpath(path) for path in paths
    }
    assert all(one.status == os.stat(one.path) for one in expand(f"{tree}/{pattern}", mounts, Listings(), never))


def test_a_name_with_brackets_in_it_is_found_as_it_is(tree: Path, mounts: Mounts) -> None:
    assert [one.path for one in expand(f"{tree}/c [1]/lib.so", mounts, Listings(), never)] == [f"{tree}/c [1]/lib.so"]


def test_a_folder_that_somebody_has_filled_costs_a_bounded_time(tmp_path: Path, mounts: Mounts) -> None:
    full = tmp_path / "full"
    full.mkdir()
    os.chown(full, 65534, 65534)
    for number in range(2 * MOST_MATCHES_BUT_IN_ROOTS):
        (full / f"libllama.so.{number}").touch()
    assert len(list(expand(f"{full}/*", mounts, Listings(), never))) == MOST_MATCHES_BUT_IN_ROOTS
    os.chown(full, 0, 0)
    assert len(list(expand(f"{full}/*", mounts, Listings(), never))) == 2 * MOST_MATCHES_BUT_IN_ROOTS


def test_what_is_held_stays_the_same_whatever_becomes_of_its_name(tree: Path, mounts: Mounts) -> None:
    path = tree / "a/bin/lib.so"
    with reached(str(path), mounts) as handle:
        path.unlink()
        path.write_text("another")
        with open(open_for_reading(handle)) as file:
            assert file.read() == "a/bin/lib.so"


def test_links_of_proc_lead_past_all_names(tmp_path: Path, mounts: Mounts) -> None:
    program = tmp_path / "program"
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o755)
    with subprocess.Popen([program, "60"]) as process:
        try:
            file = program.stat()
            program.unlink()
            with reached(f"/proc/{process.pid}/exe", mounts) as handle:
                assert os.path.samestat(os.fstat(handle), file)
            with reached(f"/proc/{process.pid}/root/bin/sh", mounts) as handle:
                assert os.path.samestat(os.fstat(handle), os.stat("/bin/sh"))
        finally:
            process.kill()


def test_nothing_stays_open(tree: Path, mounts: Mounts) -> None:
    before = os.listdir("/proc/self/fd")
    for pattern in ("*/*/*", "*", "a/bin/lib.so", "loop.so", "through-file", "none"):
        list(expand(f"{tree}/{pattern}", mounts, Listings(), never))
    abandoned = expand(f"{tree}/*/*", mounts, Listings(), never)
    next(abandoned)
    del abandoned
    assert os.listdir("/proc/self/fd") == before
