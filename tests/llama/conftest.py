"""What the tests with a real llama.cpp share: its programs, built once, a tiny model, a library that makes it throw."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import alone_with_real_flags

from .tiny_model import write_model

HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def one_at_a_time() -> Iterator[None]:
    """For each test anew, so that two copies of these tests go on by turns."""
    with alone_with_real_flags():
        yield


@pytest.fixture(scope="session")
def llama_bin() -> Path:
    """The folder of llama.cpp's programs and libraries. The first build takes minutes; later runs find it."""
    built = subprocess.check_output([str(HERE / "build-llama.sh"), sys.executable], text=True)
    return Path(built.strip())


@pytest.fixture(scope="session")
def libllama(llama_bin: Path) -> Path:
    return (llama_bin / "libllama.so").resolve()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny-moe.gguf"
    write_model(path)
    return path


@pytest.fixture(scope="session")
def deep_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of 26 layers, by the names that launch lines call them. The large one has 80 MB of experts."""
    directory = tmp_path_factory.mktemp("models")
    paths = {name: directory / name for name in ("moe.gguf", "dense.gguf", "large-moe.gguf")}
    write_model(paths["moe.gguf"], layers=26)
    write_model(paths["dense.gguf"], layers=26, dense=True)
    write_model(paths["large-moe.gguf"], layers=26, expert_width=512)
    return paths


@pytest.fixture(scope="session")
def little_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("memory") / "little_memory.so"
    source = HERE / "little_memory.c"
    subprocess.run(["cc", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture(scope="session")
def throwing_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("throwing") / "throwing.so"
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared"]
    subprocess.run(["g++", *options, "-o", str(library), str(HERE / "throwing.cpp"), "-ldl"], check=True)
    return library
