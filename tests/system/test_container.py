"""The container that the other tests install in: is it what it says, and does it go without a trace?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import HIGHEST_HZ, LOWEST_HZ, REPOSITORY, wait_until
from tests.system.container import BootError, Container
from tests.system.service import FUNCTIONS
from tests.system.stage import cgroups
from tests.workload import Workload

NODE = "/sys/class/devfreq/17000000.gpu"


def test_systemd_runs_and_no_unit_failed(container: Container) -> None:
    assert container.run("cat", "/proc/1/comm").stdout == "systemd\n"
    assert container.run("systemctl", "is-system-running").stdout == "running\n"
    assert container.run("systemctl", "--failed", "--no-legend", "--plain").stdout == ""
    assert container.run("hostname").stdout.strip() == container.name


def test_the_node_is_where_the_kernel_has_it(container: Container) -> None:
    assert container.run("readlink", NODE).stdout.strip() == "../../devices/platform/17000000.gpu/devfreq/17000000.gpu"
    assert container.run("cat", f"{NODE}/device/of_node/name").stdout == "gpu\0"
    assert container.run("realpath", f"{NODE}/subsystem").stdout.strip() == "/sys/class/devfreq"


def test_both_sides_see_what_is_written_to_the_node(container: Container) -> None:
    container.run("tee", f"{NODE}/min_freq", input="612000000\n")
    assert container.node.min_hz == 612_000_000
    container.node.write("min_freq", LOWEST_HZ)
    assert container.run("cat", f"{NODE}/min_freq").stdout == f"{LOWEST_HZ}\n"


@pytest.mark.parametrize("place", ["/sys/class", "/sys/class/net", "/sys/devices/platform"])
def test_the_rest_of_sysfs_is_the_machine_s_own(container: Container, place: str) -> None:
    assert set(os.listdir(place)) <= set(container.run("ls", "-A", place).stdout.split())


def test_the_source_tree_is_clean_and_read_only(container: Container) -> None:
    assert not container.path("/mnt/src/.venv").exists()
    assert container.path("/mnt/src/install.sh").read_bytes() == (REPOSITORY / "install.sh").read_bytes()
    assert container.run("touch", "/mnt/src/x", check=False).stderr.endswith("Read-only file system\n")


def test_a_command_gets_a_clean_environment_and_its_input(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_TESTS", "1")
    assert "OF_THE_TESTS" not in container.run("env").stdout
    assert container.run("cat", input="said\n").stdout == "said\n"
    assert container.run("sh", "-c", "echo $HOME $(id -un) $(id -gn)").stdout == "/root root root\n"
    as_nobody = container.run("sh", "-c", "echo $HOME $(id -un) $(id -gn)", as_user="nobody")
    assert as_nobody.stdout == "/nonexistent nobody nogroup\n"


def test_a_command_that_fails_shows_what_it_said(container: Container) -> None:
    with pytest.raises(AssertionError, match=r"(?s)exit 3: sh .*out\nerr\n"):
        container.run("sh", "-c", "echo out; echo err >&2; exit 3")
    assert container.run("sh", "-c", "exit 3", check=False).returncode == 3


def test_a_command_that_hangs_is_ended_with_its_children(container: Container) -> None:
    with pytest.raises(AssertionError, match="not within 1 s: sh"):
        container.run("sh", "-c", "sleep 12345; true", seconds=1)
    running = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
    container.wait_for(lambda: "sleep 12345" not in container.run("sh", "-c", running).stdout, "no sleep")


def test_the_journal_as_text_and_with_its_fields(container: Container) -> None:
    container.run("systemd-run", "--unit=says", "echo", "said by a unit")
    container.wait_for_journal("says", "^said by a unit$")
    assert "said by a unit" in container.journal("says")
    (entry,) = container.journal_entries("says", "_TRANSPORT=stdout")
    assert (entry["MESSAGE"], entry["SYSLOG_IDENTIFIER"]) == ("said by a unit", "echo")


def test_a_snapshot_shows_each_change_and_only_changes(container: Container) -> None:
    before = container.snapshot()
    change = """
        echo new >/etc/new; ln -s new /etc/link; chmod 600 /etc/issue; rm /etc/debian_version
        cp -a /etc/skel /etc/kept; rm -r /etc/skel; mkdir /etc/skel; cp -a /etc/kept/. /etc/skel; rm -r /etc/kept
        touch -d yesterday /etc/passwd; chmod 600 /etc/group; chmod 644 /etc/group
    """
    mode = container.path("/etc/issue").stat().st_mode & 0o777
    version = container.path("/etc/debian_version").read_text()
    container.run("sh", "-ec", change)
    after = container.snapshot()
    changed = {path: after[path].kind for path in after if after[path] != before.get(path)}
    assert {path: kind for path, kind in changed.items() if not path.startswith("/etc/skel/")} == {
        "/etc/new": "file",
        "/etc/link": "symlink",
        "/etc/issue": "file",
        "/etc/debian_version": "removed",
        "/etc/skel": "emptied directory",
    }
    container.run(
        "sh", "-ec", f"rm /etc/new /etc/link; chmod {mode:o} /etc/issue; cat >/etc/debian_version", input=version
    )
    undone = container.snapshot()
    assert {path for path in undone if undone[path] != before.get(path)} == {
        path for path in changed if path.startswith("/etc/skel")
    }


def test_what_was_installed_on_the_machine_itself_is_not_there(tmp_path: Path) -> None:
    machine, work = tmp_path / "machine", tmp_path / "work"
    there = ("etc/passwd", "etc/default/other", "opt/other/file", "usr/lib/systemd/system/other.service")
    hidden = (
        *("etc/default/moe-gpu-stabilizer", "opt/moe-gpu-stabilizer/bin/python", "home/me/file", "root/.profile"),
        *(
            "etc/systemd/system/moe-gpu-stabilizer.service",
            "etc/systemd/system/x.wants/y",
            "usr/bin/moe-gpu-stabilizer",
        ),
        *("usr/local/lib/python3.11/dist-packages/moe_gpu_stabilizer/a.py", "etc/rc2.d/S01x", "var/log/journal/a/b"),
    )
    for file in (*there, *hidden, "etc/resolv.conf"):
        (machine / file).parent.mkdir(parents=True, exist_ok=True)
        (machine / file).write_text(file)
    look = """if True:
        import json, sys
        from pathlib import Path
        from tests.system.stage import set_up_root
        root = set_up_root("name", Path(sys.argv[1]), Path(sys.argv[2]))
        print(json.dumps([str(path.relative_to(root)) for path in root.rglob("*")]))
    """
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", look, str(work), str(machine)]
    found = set(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=REPOSITORY).stdout))
    assert set(there) <= found
    assert found & set(hidden) == set()
    assert {"etc/systemd/system", "home", "root", "etc/default", "opt"} <= found
    assert not [path for path in found if "stabilizer" in path]


def test_pip_and_apt_reach_the_network(container: Container) -> None:
    container.run("python3", "-m", "venv", "/tmp/venv")
    container.run("/tmp/venv/bin/pip", "download", "--no-deps", "--dest", "/tmp/wheels", "pydantic")
    assert [name for name in os.listdir(container.path("/tmp/wheels")) if name.startswith("pydantic-")]
    container.run("apt-get", "update", "--error-on=any")


@pytest.fixture(scope="module")
def python(container: Container) -> str:
    """An interpreter inside that has the package and what it needs."""
    container.run("/usr/bin/python3", "-m", "venv", "--system-site-packages", "/opt/by-hand")
    container.run("cp", "-r", "/mnt/src", "/opt/by-hand/src")  # setuptools writes beside what it builds
    container.run("/opt/by-hand/bin/pip", "install", "--quiet", "/opt/by-hand/src")
    return "/opt/by-hand/bin/python"


@pytest.fixture
def program(container: Container) -> Iterator[str]:
    """The stand-in for llama.cpp, built inside."""
    source, place = "/mnt/src/moe_gpu_stabilizer/workload.c", f"/opt/llama-{uuid.uuid4().hex[:8]}"
    container.run("mkdir", place)
    library, built = f"{place}/libllama.so", f"{place}/llama-server"
    container.run("cc", "-shared", "-fPIC", "-DPART_LIBRARY", "-Wl,-soname,libllama.so", "-o", library, source)
    container.run(
        "cc", "-DPART_PROGRAM", "-o", built, source, "-Wl,--no-as-needed", library, f"-Wl,-rpath,{place}", "-pthread"
    )
    yield built
    container.run("rm", "-r", place)


def test_the_package_finds_the_node(container: Container, python: str) -> None:
    find = "from moe_gpu_stabilizer import devfreq; print(devfreq.find())"
    assert container.run(python, "-c", find).stdout.strip() == NODE


def test_uprobes_work_inside(container: Container, python: str, program: str) -> None:
    flag = f"--cpu-moe-{uuid.uuid4().hex[:8]}"  # daemons of the machine itself see all processes
    container.run("tee", "/opt/by-hand/conf", input=f'STABILIZER_MOE_FLAGS="{flag}"\nSTABILIZER_REBIND_SECONDS=0.2\n')
    daemon = (python, "-m", "moe_gpu_stabilizer", "--config", "/opt/by-hand/conf")
    container.run(
        "systemd-run", "--unit=by-hand", "--property=RuntimeDirectory=by-hand", "--property=Type=notify", *daemon
    )
    pid = container.show("by-hand", "MainPID")
    with Workload(Path(program), flag, prefix=container.enter()) as workload:
        container.wait_for(lambda: container.uprobes(pid) == FUNCTIONS, "uprobes")
        assert container.node.min_hz == LOWEST_HZ
        workload.do("call 1")
        wait_until(lambda: container.node.min_hz == HIGHEST_HZ, "the floor is up")
        container.wait_for_journal("by-hand", rf"^floor 1020 MHz \(pid {workload.own_pid} inference\)$")
        wait_until(lambda: container.node.min_hz == LOWEST_HZ, "the floor is given back")
    container.run("systemctl", "stop", "by-hand")


def test_a_reboot_keeps_the_file_tree_and_the_node(fresh_container: Container) -> None:
    first = fresh_container.leader
    fresh_container.run("touch", "/opt/stays", "/run/goes")
    fresh_container.node.write("min_freq", HIGHEST_HZ)
    fresh_container.reboot()
    assert fresh_container.leader != first
    assert fresh_container.path("/opt/stays").exists()
    assert not fresh_container.path("/run/goes").exists()
    assert fresh_container.run("cat", f"{NODE}/min_freq").stdout == f"{HIGHEST_HZ}\n"


def test_a_shutdown_stops_services_and_leaves_the_node_to_read(fresh_container: Container) -> None:
    give_back = f"--property=ExecStop=sh -c 'echo 408000000 >{NODE}/min_freq'"
    fresh_container.run("systemd-run", "--unit=holds", give_back, "sleep", "infinity")
    fresh_container.power_off()
    assert fresh_container.node.min_hz == 408_000_000
    assert "Stopped holds.service" in fresh_container.console


def test_a_boot_with_a_failed_unit_says_which(fresh_container: Container) -> None:
    unit = "[Service]\nType=oneshot\nExecStart=sh -c 'echo the reason; exit 1'\n[Install]\nWantedBy=multi-user.target\n"
    fresh_container.run("tee", "/etc/systemd/system/breaks.service", input=unit)
    fresh_container.run("systemctl", "enable", "breaks")
    with pytest.raises(BootError, match=r"(?s)degraded instead of running.*the reason.*breaks\.service.*failed"):
        fresh_container.reboot()


def traces(name: str) -> list[str]:
    """What the rest of the machine sees of a container."""
    folders = [str(path) for path in Path(tempfile.gettempdir()).glob(f"{name}*")]
    groups = [str(path) for path in cgroups(name) if path.exists()]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if name in line]
    kept = [str(path) for path in Path("/run/systemd").rglob(f"*{name}*")]
    commands = [path.read_bytes().replace(b"\0", b" ").decode() for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [*folders, *groups, *mounts, *kept, *(command for command in commands if name in command)]


def test_a_closed_container_leaves_nothing_behind(source_tree: Path) -> None:
    with Container(source_tree) as container:
        container.run("systemd-run", "--unit=works", "sleep", "infinity")
        inside = subprocess.Popen(container.enter("sleep", "infinity"))
        assert traces(container.name)
    assert traces(container.name) == []
    assert inside.wait(10) != 0
    container.close()


def test_a_failed_boot_shows_the_console_and_leaves_nothing_behind(tmp_path: Path) -> None:
    container = Container(tmp_path / "missing")
    with pytest.raises(BootError, match=r"(?s)not started instead of running.*console of .*missing"):
        container.boot()
    assert traces(container.name) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_tests_that_are_ended_leave_nothing_behind(number: int) -> None:
    program = """if True:
        from tests.system.container import Container
        with Container() as container:
            print(container.name, flush=True)
            container.run("sleep", "infinity")
    """
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=REPOSITORY
    ) as tests:
        assert tests.stdout is not None
        name = tests.stdout.readline().strip()
        assert traces(name)
        tests.send_signal(number)
    wait_until(lambda: traces(name) == [], "no traces")
