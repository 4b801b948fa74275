"""Fixtures of the tests under a real systemd. They need root and some packages; without them they fail, not skip."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.system.container import Container

# Commands of the machine that are needed, and their Debian packages.
NEEDED = {"systemd-nspawn": "systemd-container", "/sbin/init": "systemd-sysv", "dbus-daemon": "dbus", "git": "git"}

JOURNAL_LINES = 300

running: list[Container] = []


def check_packages() -> None:
    missing = sorted(package for command, package in NEEDED.items() if shutil.which(command) is None)
    assert not missing, f"missing Debian packages: apt-get install {' '.join(missing)}"
    assert os.geteuid() == 0, "a container needs root"
    apart = [place for place in ("/etc", "/opt", "/usr", "/var") if os.path.ismount(place)]
    assert not apart, f"file systems of their own, so not in a copy of /: {' '.join(apart)}"


@contextmanager
def booted(source: Path) -> Iterator[Container]:
    """A container that is up, and whose journal is shown when a test fails meanwhile."""
    with Container(source) as container:
        running.append(container)
        try:
            yield container
        finally:
            running.remove(container)


@pytest.fixture(scope="session")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone of the repository would hold after a commit of everything: no .venv, nothing that git ignores."""
    check_packages()
    tree = tmp_path_factory.mktemp("source")
    tree.chmod(0o755)
    git = ["git", "-c", f"safe.directory={REPOSITORY}", "-C", str(REPOSITORY)]
    listing = [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, check=True, stdout=subprocess.PIPE, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).is_file():  # one that is deleted and not committed is listed too
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, tree / name, follow_symlinks=False)
    return tree


@pytest.fixture(scope="module")
def container(source_tree: Path) -> Iterator[Container]:
    """One for all tests of a module."""
    with booted(source_tree) as one:
        yield one


@pytest.fixture
def fresh_container(source_tree: Path) -> Iterator[Container]:
    """One for a single test."""
    with booted(source_tree) as one:
        yield one


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for one in running:
            lines = one.console.splitlines()[-JOURNAL_LINES:]
            report.sections.append((f"journal of container {one.name}", "\n".join(lines)))
    return report
