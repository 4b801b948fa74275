"""--check: what it says of boards and machines of every kind, and the real command as root and as an ordinary user."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import moe_gpu_stabilizer
from moe_gpu_stabilizer import check, kernel_support, status
from moe_gpu_stabilizer.check import Report
from moe_gpu_stabilizer.check_llama import Llama, UsingProcess, WatchedLibrary
from moe_gpu_stabilizer.choice import MOST_PROBED_FILES
from moe_gpu_stabilizer.kernel_support import NOT_TRIED, OPTIONS, Attempt, Finding, KernelSupport
from moe_gpu_stabilizer.processes import identify
from moe_gpu_stabilizer.runtime import Raised, Runtime
from moe_gpu_stabilizer.settings import Settings
from tests.support import HIGHEST_HZ, LOWEST_HZ, PlainNode
from tests.workload import Workload, build_library, build_program

PACKAGE = Path(moe_gpu_stabilizer.__file__).parent
DEPENDENCIES = (
    "annotated_types", "elftools", "psutil", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection"
)  # fmt: skip

# The interpreter itself, behind the links of a virtual environment.
PYTHON = Path(sys.executable).resolve()

# Root may become anybody; an ordinary user stays who he is.
WHO = ("root", "nobody") if os.geteuid() == 0 else ("me",)
NOBODY: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}


def gather(tmp_path: Path, **settings: Any) -> Report:
    """Look at the nodes below this directory, as an ordinary user, and at no library."""
    runtime = Runtime(tmp_path / "run")
    return check.gather(Settings(**settings), None, False, tmp_path / "devfreq", (), tmp_path, runtime)


def about(report: Report, *topics: str) -> list[Finding]:
    """The findings about the GPU, or those of its topics."""
    found = [finding for finding in check.findings(report) if finding.section == "GPU"]
    return [finding for finding in found if not topics or finding.topic in topics]


def one(report: Report, topic: str) -> Finding:
    (finding,) = about(report, topic)
    return finding


@pytest.fixture
def node(tmp_path: Path) -> PlainNode:
    return PlainNode(tmp_path / "devfreq" / "17000000.gpu")


# The GPU's node.


def test_a_board_at_rest(tmp_path: Path, node: PlainNode) -> None:
    report = gather(tmp_path)
    assert [(finding.topic, finding.state, finding.text) for finding in about(report)] == [
        ("node", "ok", str(node.directory)),
        ("frequencies", "ok", "306, 408, 510, 612, 714, 816, 918, 1020 MHz"),
        ("now", "ok", "cur_freq 1020, min_freq 306, max_freq 1020 MHz; governor nvhost_podgov"),
        ("floor", "ok", "would raise min_freq from 306 to 1020 MHz"),
    ]
    assert report.gpu.node
    assert report.gpu.node.floor_hz == HIGHEST_HZ


def test_min_already_at_max_is_a_note(tmp_path: Path, node: PlainNode) -> None:
    node.write("min_freq", HIGHEST_HZ)
    floor = one(gather(tmp_path), "floor")
    assert (floor.state, floor.text[:39]) == ("note", "min_freq is already at max_freq (jetson")


def test_where_there_is_jetson_clocks_its_store_is_warned_of(
    tmp_path: Path, node: PlainNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it stores while the floor is up, it would restore for ever."""
    tool = tmp_path / "bin" / "jetson_clocks"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))
    said = one(gather(tmp_path), "jetson_clocks")
    assert (said.state, said.text.partition(",")[0]) == ("note", "jetson_clocks --store")


def test_a_floor_that_is_no_higher_than_min_changes_nothing(tmp_path: Path, node: PlainNode) -> None:
    node.write("min_freq", 612_000_000)
    floor = one(gather(tmp_path, floor_mhz=510), "floor")
    assert (floor.state, floor.text) == (
        "note", "min_freq 612 MHz is no lower than the floor, 510 MHz: there is nothing to raise",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("floor_mhz", "raised", "said"),
    [
        (2000, "1020 MHz", "STABILIZER_FLOOR_MHZ=2000 is above max_freq: capped to 1020 MHz"),
        (700, "700 MHz", "STABILIZER_FLOOR_MHZ=700 is not listed: the driver rounds it to 612 or 714 MHz"),
        (918, "918 MHz", ""),
    ],
)
def test_a_configured_floor(tmp_path: Path, node: PlainNode, floor_mhz: int, raised: str, said: str) -> None:
    first, *others = about(gather(tmp_path, floor_mhz=floor_mhz), "floor")
    assert first.text == f"would raise min_freq from 306 to {raised}"
    assert [finding.text for finding in others] == ([said] if said else [])


def test_a_driver_that_lists_no_frequencies(tmp_path: Path, node: PlainNode) -> None:
    (node.directory / "available_frequencies").unlink()
    report = gather(tmp_path, floor_mhz=700)
    assert one(report, "frequencies").state == "note"
    assert [finding.text for finding in about(report, "floor")] == ["would raise min_freq from 306 to 700 MHz"]


def test_a_floor_that_a_daemon_left_is_told_from_one_that_it_holds(tmp_path: Path, node: PlainNode) -> None:
    runtime = Runtime(tmp_path / "run")
    runtime.create()
    runtime.save_raised(Raised(str(node.directory), LOWEST_HZ, (HIGHEST_HZ,)))
    node.write("min_freq", HIGHEST_HZ)
    left = one(gather(tmp_path), "floor")
    assert left.state == "note"
    assert left.text == "a daemon that was killed left min_freq raised; it was 306 MHz"
    assert "--restore" in left.remedy
    publish(tmp_path, {"floor_hz": HIGHEST_HZ, "processes": [], "libraries": [], "troubles": []})
    held = one(gather(tmp_path), "floor")
    assert (held.state, held.text) == ("ok", "min_freq is raised to 1020 MHz now; 306 MHz comes back after inference")


@pytest.mark.parametrize("attribute", ["min_freq", "max_freq"])
@pytest.mark.parametrize("content", ["", "fast", "-1", "9" * 30, "9" * 5000, "\x1b[31m1", "\udcff"])
def test_what_is_no_frequency_is_missing(tmp_path: Path, node: PlainNode, attribute: str, content: str) -> None:
    (node.directory / attribute).write_bytes(content.encode("utf-8", "surrogateescape"))
    report = gather(tmp_path)
    (problem,) = [finding for finding in about(report, "node") if finding.state == "missing"]
    assert attribute in problem.text
    assert problem.remedy
    assert not about(report, "floor")
    assert "\x1b" not in check.render(report, list(check.findings(report)))


@pytest.mark.parametrize("attribute", ["cur_freq", "governor", "available_frequencies"])
@pytest.mark.parametrize("content", [None, b"", b"\xff\x00\x1b[31m", b"9" * 5000])
def test_the_other_files_may_hold_anything(
    tmp_path: Path, node: PlainNode, attribute: str, content: bytes | None
) -> None:
    (node.directory / attribute).unlink()
    if content is not None:
        (node.directory / attribute).write_bytes(content)
    report = gather(tmp_path)
    found = list(check.findings(report))
    assert not [finding for finding in found if finding.section == "GPU" and finding.state == "missing"]
    assert "\x1b" not in check.render(report, found)
    json.dumps(check.to_json(report, found))


def test_a_node_without_its_files(tmp_path: Path, node: PlainNode) -> None:
    (node.directory / "max_freq").unlink()
    (node.directory / "governor").unlink()
    (node.directory / "governor").mkdir()
    assert [finding.state for finding in about(gather(tmp_path), "node")] == ["ok", "missing"]


def test_of_several_gpu_nodes_it_says_which_is_taken(tmp_path: Path, node: PlainNode) -> None:
    PlainNode(tmp_path / "devfreq" / "gpu-gpc-0")
    PlainNode(tmp_path / "devfreq" / "31d0000.nvenc")
    report = gather(tmp_path)
    assert report.gpu.other_nodes == ("31d0000.nvenc",)
    others = one(report, "other nodes")
    assert (others.state, others.text) == ("note", "2 look like a GPU: 17000000.gpu, gpu-gpc-0; the first is taken")
    assert others.remedy == f"STABILIZER_DEVFREQ={tmp_path}/devfreq/gpu-gpc-0 takes another"
    chosen = one(gather(tmp_path, devfreq=str(tmp_path / "devfreq" / "gpu-gpc-0")), "other nodes")
    assert (chosen.state, chosen.text) == ("ok", "17000000.gpu, 31d0000.nvenc: left alone")


def test_without_a_gpu_node_the_others_are_shown(tmp_path: Path) -> None:
    PlainNode(tmp_path / "devfreq" / "soc\x1b[2Jdmc")
    absent, others = about(gather(tmp_path))
    assert (absent.state, absent.text) == ("missing", f"no GPU devfreq node under {tmp_path}/devfreq")
    assert "--demo" in absent.remedy
    assert (others.state, others.text) == ("note", "soc\\x1b[2Jdmc")
    assert "STABILIZER_DEVFREQ=" in others.remedy


def test_without_devfreq(tmp_path: Path) -> None:
    assert [finding.state for finding in about(gather(tmp_path))] == ["missing"]


def test_a_configured_node_that_is_not_there(tmp_path: Path, node: PlainNode) -> None:
    absent, others = about(gather(tmp_path, devfreq="/nowhere/gpu"))
    assert absent.text == "STABILIZER_DEVFREQ=/nowhere/gpu is not there, or is no devfreq directory"
    assert others.text == "17000000.gpu"


def test_a_configured_node_that_cannot_be_looked_at_is_unknown_but_to_root(tmp_path: Path) -> None:
    report = gather(tmp_path, devfreq="/" + "x" * 300)
    assert one(report, "node").state == "unknown"
    assert one(replace(report, as_root=True), "node").state == "missing"


def test_a_node_that_root_cannot_write_is_missing(tmp_path: Path, node: PlainNode) -> None:
    report = gather(tmp_path)
    assert report.gpu.node
    assert report.gpu.node.writable is None
    closed = replace(report, gpu=replace(report.gpu, node=replace(report.gpu.node, writable=False)))
    assert [finding.state for finding in about(closed, "node")] == ["ok", "missing"]


# The rest, judged.

NO_LLAMA = Llama(libraries=(), unwatched=(), untouched=(), left_out=0, processes=(), unseen_processes=0)
FINE_KERNEL = KernelSupport("5.15.0", "aarch64", dict.fromkeys(OPTIONS, True), "", "none", *[Attempt(True)] * 3)


@pytest.fixture
def report(tmp_path: Path, node: PlainNode) -> Report:
    """A board on which nothing is missing."""
    return replace(gather(tmp_path), kernel=FINE_KERNEL, llama=NO_LLAMA, as_root=True)


def concluded(report: Report) -> str:
    return check.conclusion(report, list(check.findings(report)))


def test_the_conclusion_counts_what_is_missing(report: Report) -> None:
    assert concluded(report) == "The daemon would work."
    unseen = replace(report, llama=replace(NO_LLAMA, unseen_processes=12), as_root=False)
    assert concluded(unseen) == "The daemon would work, as far as can be seen without root."
    old = replace(report, kernel=replace(FINE_KERNEL, release="4.9.0"))
    assert concluded(old) == "1 thing is missing, marked MISSING."
    unset = replace(old.kernel, options=dict.fromkeys(OPTIONS, False), program=NOT_TRIED)
    assert concluded(replace(old, kernel=unset)) == "4 things are missing, marked MISSING."


def test_processes_are_said_to_be_unseen_not_absent(report: Report) -> None:
    llama = replace(NO_LLAMA, libraries=(WatchedLibrary("/usr/lib/libllama.so", ("llama_decode",)),))
    texts = [finding.text for finding in check.findings(replace(report, llama=llama))]
    assert "none is running with these libraries" in texts
    for unseen, says in ((3, "3 processes of other users cannot"), (None, "processes of other users cannot")):
        not_seen = replace(llama, unseen_processes=unseen)
        found = list(check.findings(replace(report, as_root=False, llama=not_seen)))
        assert not [finding for finding in found if finding.text.startswith("none is running")]
        assert [finding for finding in found if finding.text.startswith(says)]


def test_a_process_whose_launch_cannot_be_read_is_unknown(report: Report) -> None:
    process = UsingProcess(42, "alice", "llama-server", None, "its environment cannot be read")
    found = list(check.findings(replace(report, llama=replace(NO_LLAMA, processes=(process,)))))
    (finding,) = [finding for finding in found if finding.topic == "process"]
    assert finding.state == "unknown"
    assert finding.text == "pid 42 llama-server (alice) unknown: its environment cannot be read"


def test_lines_keep_to_the_width(report: Report) -> None:
    process = UsingProcess(42, "alice", "llama-server", False, "word " * 40)
    report = replace(report, llama=replace(NO_LLAMA, processes=(process,)))
    lines = check.render(report, list(check.findings(report))).splitlines()
    # A path, here that of the node and of the settings, is never broken.
    assert not [line for line in lines if len(line) > check.WIDTH_CHARACTERS and " /" not in line]


@pytest.mark.parametrize("published", [{}, {"floor_hz": "x", "processes": 3}, {"floor_hz": 1, "processes": []}])
def test_a_running_daemon_may_have_published_anything(tmp_path: Path, published: dict[str, Any]) -> None:
    publish(tmp_path, published)
    (daemon,) = [finding for finding in check.findings(gather(tmp_path)) if finding.topic == "daemon"]
    assert daemon.text.startswith("is running")


def test_a_running_daemon_is_quoted(tmp_path: Path) -> None:
    processes = [{"name": "llama-server", "pid": 42, "holds_the_floor": True}]
    held = {"floor_hz": HIGHEST_HZ, "processes": processes, "holders": 1}
    published = {**held, "libraries": [], "troubles": ["no node"], **fresh()}
    publish(tmp_path, published)
    (daemon,) = [finding for finding in check.findings(gather(tmp_path)) if finding.topic == "daemon"]
    assert daemon.state == "note"
    assert daemon.remedy.endswith(" --status")
    assert daemon.text == f"is running, with troubles: {status.headline(published)}"


def test_a_running_daemon_without_troubles_works(tmp_path: Path) -> None:
    publish(tmp_path, {"floor_hz": None, "processes": [], "libraries": [], "troubles": [], **fresh()})
    assert check.conclusion(gather(tmp_path), []) == "The daemon works."


def test_a_daemon_that_does_not_get_to_run_is_no_good_news(tmp_path: Path) -> None:
    publish(tmp_path, {"floor_hz": None, "processes": [], "libraries": [], "troubles": [], **fresh(age_seconds=60)})
    (daemon,) = [finding for finding in check.findings(gather(tmp_path)) if finding.topic == "daemon"]
    assert (daemon.state, daemon.text) == ("note", "is running, with troubles: stopped or stuck")


def fresh(age_seconds: float = 0) -> dict[str, Any]:
    """What tells the age of a status."""
    return {"written_at_seconds": time.monotonic() - age_seconds, "settings": asdict(Settings())}


def test_what_a_killed_daemon_has_published_is_not_quoted(tmp_path: Path) -> None:
    publish(tmp_path, {"start_ticks": 1})
    (daemon,) = [finding for finding in check.findings(gather(tmp_path)) if finding.topic == "daemon"]
    assert daemon.text == "is not running"


def publish(directory: Path, published: dict[str, Any]) -> None:
    """Leave a status as a daemon does; this process plays the daemon."""
    runtime = Runtime(directory / "run")
    runtime.create()
    myself = identify(os.getpid())
    runtime.save_status({"pid": myself.tgid, "start_ticks": myself.start_ticks, **published})


# The real command.


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can read; pytest's own are closed to others."""
    directory = Path(tempfile.mkdtemp(prefix="moe-gpu-stabilizer-check-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(params=WHO)
def as_user(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Popen's arguments for one kind of user."""
    return NOBODY if request.param == "nobody" else {}


@pytest.fixture(scope="session")
def dependencies() -> Iterator[Path]:
    """Copies of what the package imports, for every user: the environment of these tests may lie in root's home."""
    directory = Path(tempfile.mkdtemp(prefix="moe-gpu-stabilizer-check-"))
    directory.chmod(0o755)
    for name in DEPENDENCIES:
        spec = importlib.util.find_spec(name)
        if spec is None and name == "typing_inspection":
            continue  # pydantic wants it from 2.11 on
        assert spec is not None
        assert spec.origin is not None
        module = Path(spec.origin)
        if module.name == "__init__.py":
            shutil.copytree(module.parent, directory / name)
        else:
            shutil.copy(module, directory)
    yield directory
    shutil.rmtree(directory)


class Command:
    """The real --check from a copy of the package that everybody can read."""

    def __init__(self, public: Path, dependencies: Path, as_user: dict[str, Any]) -> None:
        shutil.copytree(PACKAGE, public / "package" / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        self.as_user = as_user
        self.config = public / "settings"
        self.as_root = os.geteuid() == 0 and not as_user
        paths = f"{public / 'package'}:{dependencies}"
        own = {"PYTHONPATH": paths, "RUNTIME_DIRECTORY": str(public / "run")}
        # Output is buffered as it is for users.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        self.environment = {**inherited, **own}

    def __call__(self, *arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
        self.config.write_text("".join(f'STABILIZER_{key.upper()}="{value}"\n' for key, value in settings.items()))
        completed = subprocess.run(
            [PYTHON, "-m", "moe_gpu_stabilizer", "--check", "--config", self.config, *arguments],
            capture_output=True, encoding="utf-8", timeout=120, cwd="/", env=self.environment, **self.as_user,
        )  # fmt: skip
        assert "Traceback" not in completed.stderr + completed.stdout
        return completed


@pytest.fixture
def command(public: Path, dependencies: Path, as_user: dict[str, Any]) -> Command:
    return Command(public, dependencies, as_user)


def machine_is_fine(as_root: bool) -> bool:
    found = kernel_support.findings(kernel_support.look(as_root), "Machine")
    return not [finding for finding in found if finding.state == "missing"]


def test_with_a_node_the_service_would_work(public: Path, command: Command) -> None:
    PlainNode(public / "17000000.gpu")
    text = command(devfreq=public / "17000000.gpu")
    assert text.returncode == (0 if machine_is_fine(command.as_root) else 1), text.stdout
    assert "would raise min_freq from 306 to 1020 MHz" in text.stdout
    assert ("cannot be tried without root" in text.stdout) is not command.as_root
    as_json = command("--json", devfreq=public / "17000000.gpu")
    report = json.loads(as_json.stdout)
    assert as_json.returncode == text.returncode
    assert report["ok"] is (as_json.returncode == 0)
    assert report["gpu"]["node"]["min_hz"] == LOWEST_HZ
    assert text.stdout.rstrip().endswith(report["conclusion"])


def test_everything_in_the_text_is_in_the_json(public: Path, command: Command) -> None:
    PlainNode(public / "17000000.gpu")
    flat = " ".join(command(devfreq=public / "17000000.gpu", floor_mhz=700).stdout.split())
    report = json.loads(command("--json", devfreq=public / "17000000.gpu", floor_mhz=700).stdout)
    for finding in report["findings"]:
        if finding["topic"] not in ("process", "library"):  # others come and go between the two runs
            assert finding["text"] in flat
            assert finding["remedy"].replace(" --json", "") in flat


def test_without_a_node_something_is_missing(public: Path, command: Command) -> None:
    completed = command(devfreq=public / "nothing")
    assert completed.returncode == 1
    assert "MISSING" in completed.stdout
    assert "missing, marked MISSING." in completed.stdout


def test_a_bad_configuration_is_another_failure(command: Command) -> None:
    completed = command(floor_mhz="fast")
    assert (completed.returncode, completed.stdout) == (2, "")
    assert "STABILIZER_FLOOR_MHZ='fast' cannot be used" in completed.stderr


def test_libraries_and_processes(public: Path, command: Command) -> None:
    library = build_library(public / "libllama.so")
    build_library(public / "libllama\x1b[31m.so")
    program = build_program(public / "evil\x1b]0;x\x07\n\u00e9", library)
    (public / "libllama.so.9").write_text("no library")
    # Who runs the tests can read this one; nobody else can.
    closed = build_library(public / "closed" / "libllama.so")
    closed.parent.chmod(0o700)
    with (
        Workload(program, "--cpu-moe", **command.as_user) as counts,
        Workload(program, "-m", "dense.gguf", **command.as_user) as ignored,
        Workload(program, "-ncmoe", "4") as mine,
    ):
        patterns = ":".join([f"{public}/libllama*", str(closed)])
        text = command(libraries=patterns, devfreq=public / "nothing").stdout
        report = json.loads(command("--json", libraries=patterns, devfreq=public / "nothing").stdout)
    # Neither a terminal escape nor anything else that a terminal would obey.
    assert all(character.isprintable() or character == "\n" for character in text)
    flat = " ".join(text.split())
    user = "nobody" if command.as_user else subprocess.check_output(["id", "-un"], text=True).strip()
    assert f"pid {counts.pid} evil\\x1b]0;x\\x07\\n\u00e9 ({user}) counts: --cpu-moe" in flat
    assert f"pid {ignored.pid} evil\\x1b]0;x\\x07\\n\u00e9 ({user}) is ignored: no MoE flag" in flat
    assert (f"pid {mine.pid} " in flat) is not bool(command.as_user)
    paths = {one["path"]: one["functions"] for one in report["llama"]["libraries"]}
    assert paths[f"{public}/libllama\\x1b[31m.so"] == ["llama_decode", "llama_process", "llama_synchronize"]
    assert (str(closed) in paths) is not bool(command.as_user)
    assert f"{public}/libllama.so.9" in {one["path"] for one in report["llama"]["unwatched"]}
    verdicts = {one["pid"]: one["counts"] for one in report["llama"]["processes"]}
    assert (verdicts[counts.pid], verdicts[ignored.pid]) == (True, False)
    if command.as_user:
        assert report["llama"]["unseen_processes"] > 0
        assert f"STABILIZER_LIBRARIES has {closed}, which gives nothing to watch that this user can see" in flat


def test_a_terminal_without_the_letters_of_a_name(public: Path, command: Command) -> None:
    library = build_library(public / "\u00e9" / "libllama.so")
    command.environment |= {"PYTHONIOENCODING": "ascii"}
    completed = command(libraries=library, devfreq=public / "nothing")
    assert "\\xe9/libllama.so" in completed.stdout


def test_more_files_than_one_scan_reads(public: Path, command: Command) -> None:
    library = build_library(public / "first" / "libllama.so")
    for number in range(70):
        # Different files: a hard link would be the same one.
        copy = public / "many" / f"{number:02}" / "libllama.so"
        copy.parent.mkdir(parents=True)
        shutil.copy(library, copy)
    report = json.loads(command("--json", libraries=f"{public}/many/*/libllama.so", devfreq=public / "nothing").stdout)
    watched = [one for one in report["llama"]["libraries"] if one["path"].startswith(f"{public}/many/")]
    assert len(watched) == MOST_PROBED_FILES
    assert report["llama"]["left_out"] >= 70 - MOST_PROBED_FILES


def test_the_reader_may_leave_early(public: Path, command: Command) -> None:
    command.config.write_text("")
    program = f"'{PYTHON}' -m moe_gpu_stabilizer --check --config '{command.config}' | true"
    completed = subprocess.run(
        ["/bin/sh", "-c", program], capture_output=True, text=True, cwd="/", env=command.environment, **command.as_user
    )
    assert completed.stderr == ""
