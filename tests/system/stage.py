"""Build the container's file system, keep systemd-nspawn running on it, and remove all traces at SIGTERM.

Started in a mount namespace of its own: nothing that is mounted here is seen by the rest of the machine. A process of
its own, which also gets SIGTERM when the tests die, so that even killed tests leave nothing behind.

usage: stage.py NAME WORK_DIRECTORY [SOURCE_TREE]
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import traceback
import uuid
from pathlib import Path

# What a machine that never saw the project does not have: its own files, in all the places where files of that kind go.
LEFTOVERS = (
    *("etc", "etc/default", "etc/tmpfiles.d", "etc/sysctl.d", "opt", "usr/bin", "usr/sbin", "usr/share"),
    *("usr/lib", "usr/lib/systemd/system", "usr/local/bin", "usr/local/sbin", "usr/local/lib", "usr/local/share"),
    *("usr/local/lib/systemd/system", "usr/local/lib/python3*/dist-packages", "var/lib", "var/cache", "var/log"),
)

EMPTIED = (
    "etc/systemd/system",  # which services the machine itself runs: databases, timers that take apt's lock, our own
    "etc/rc?.d",  # the same for System V scripts
    "home",
    "root",
    "var/log/journal",  # the journal of the machine itself
)

# The network is the machine's own, so nothing in here may configure it; nor load modules, set the clock, read or rule
# the audit log. All else stays: what a capability is good for under the unit is what the tests are to see.
DROPPED_CAPABILITIES = (
    *("CAP_NET_ADMIN", "CAP_SYS_MODULE", "CAP_SYS_TIME", "CAP_SYS_RAWIO", "CAP_AUDIT_READ", "CAP_AUDIT_CONTROL"),
    *("CAP_MAC_ADMIN", "CAP_MAC_OVERRIDE"),
)

# The exit status of systemd-nspawn when the container asks for a reboot.
REBOOT = 133


def mount(kind: str, place: Path, options: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", kind, "-o", options, kind, place], check=True)


def copy_directories(machine: Path, place: Path, upper: Path) -> Path:
    """Make the directories that lead to a path of the machine, and return the path for the path itself."""
    for original in reversed(place.parents):
        copy = upper / original.relative_to("/")
        copy.mkdir(exist_ok=True)
        status = (machine / original.relative_to("/")).stat()
        os.chown(copy, status.st_uid, status.st_gid)
        copy.chmod(stat.S_IMODE(status.st_mode))
    return upper / place.relative_to("/")


def hide(machine: Path, upper: Path) -> None:
    """Prepare an overlay's upper layer so that what the machine has of its own does not show through."""
    for pattern in EMPTIED:
        for place in machine.glob(pattern):
            inside = Path("/") / place.relative_to(machine)
            os.setxattr(copy_directories(machine, inside / "x", upper).parent, "trusted.overlay.opaque", b"y")
    for directory in LEFTOVERS:
        for pattern in ("moe-gpu-stabilizer*", "moe_gpu_stabilizer*"):
            for place in machine.glob(f"{directory}/{pattern}"):
                # So overlayfs marks what has been removed.
                removed = copy_directories(machine, Path("/") / place.relative_to(machine), upper)
                os.mknod(removed, stat.S_IFCHR, os.makedev(0, 0))


def set_up_root(name: str, work: Path, machine: Path = Path("/")) -> Path:
    """The machine's own / below a layer in memory that takes all changes. Returns where it is mounted."""
    layers, root = work / "layers", work / "layers/root"
    upper = layers / "upper"
    mount("tmpfs", layers, "mode=755")
    (layers / "work").mkdir()
    upper.mkdir()
    hide(machine, upper)
    options = f"lowerdir={machine},upperdir={upper},workdir={layers}/work,redirect_dir=off,metacopy=off,index=off"
    mount("overlay", root, options)
    # What /etc/resolv.conf may point to is in the machine's own /run.
    resolver = (machine / "etc/resolv.conf").read_bytes()
    # An id of its own: without one, systemd takes this for a first boot, and presets enable units.
    settings = {"fstab": b"", "machine-id": f"{uuid.uuid4().hex}\n".encode(), "hostname": f"{name}\n".encode()}
    for file, content in {**settings, "resolv.conf": resolver}.items():
        (root / "etc" / file).unlink(missing_ok=True)
        (root / "etc" / file).write_bytes(content)
    (root / "mnt/src").mkdir(parents=True, exist_ok=True)
    return root


def set_up_sysfs(work: Path) -> list[str]:
    """The machine's own /sys, and the node in it. Returns options of systemd-nspawn."""
    options = []
    for place in ("class", "devices/platform"):
        added, merged = work / "sys" / place, work / "layers/sys" / place
        mount("overlay", merged, f"ro,lowerdir={added}:/sys/{place}")
        options.append(f"--bind-ro={merged}:/sys/{place}")
    return [*options, f"--bind={work}/gpu:/sys/devices/platform/17000000.gpu"]


def cgroups(name: str) -> list[Path]:
    """The container's own, in each hierarchy that systemd manages: the unified one, and an older systemd's."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [
        Path(place) / name
        for _, place, kind, options, *_ in mounts
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(","))
    ]


def run_container(name: str, work: Path, source: str | None) -> None:
    root = set_up_root(name, work)
    options = set_up_sysfs(work)
    if source:
        options.append(f"--bind-ro={source}:/mnt/src")
    # Here systemd-nspawn keeps files on its containers, also of those that were killed.
    mount("tmpfs", Path("/run"), "mode=755")
    for cgroup in cgroups(name):
        cgroup.mkdir(exist_ok=True)  # one hierarchy may be mounted twice

    def join_cgroups() -> None:
        for cgroup in cgroups(name):
            (cgroup / "cgroup.procs").write_text("0")

    command: list[str | Path] = [
        *("systemd-nspawn", "--quiet", "--boot", "--directory", root, f"--machine={name}", "--console=read-only"),
        *("--register=no", "--keep-unit", "--link-journal=no", "--resolv-conf=off", "--timezone=off"),
        *("--capability=all", f"--drop-capability={','.join(DROPPED_CAPABILITIES)}", *options),
        # So the console tells all, also of a boot that failed.
        *("--", "systemd.show_status=error", "systemd.journald.forward_to_console=yes"),
        "systemd.journald.max_level_console=debug",
    ]
    # systemd-nspawn's own filter refuses bpf(), which no machine does.
    environment = {**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1", "SYSTEMD_SECCOMP": "0"}
    while (status := subprocess.call(command, env=environment, preexec_fn=join_cgroups)) == REBOOT:
        print("--- reboot", flush=True)
    print(f"--- systemd-nspawn ended with {status}", flush=True)


def remove_traces(name: str, work: Path) -> None:
    """Kill all that runs in the container, and remove what the rest of the machine can see of it."""
    for cgroup in cgroups(name):
        if (cgroup / "cgroup.kill").exists():
            (cgroup / "cgroup.kill").write_text("1")
    for cgroup in cgroups(name):
        while not remove_cgroup(cgroup):
            time.sleep(0.01)
    layers = work / "layers"
    if layers.is_mount():
        subprocess.run(["umount", "--recursive", "--lazy", layers], check=True)
    shutil.rmtree(work)


def remove_cgroup(cgroup: Path) -> bool:
    """Remove it with all below, and say whether it is gone; it stays as long as a process is in it."""
    try:
        for directory, _, _ in os.walk(cgroup, topdown=False):
            os.rmdir(directory)
    except OSError:  # EBUSY
        return False
    return not cgroup.exists()


def main(name: str, work: Path, source: str | None = None) -> None:
    os.umask(0o022)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        try:
            run_container(name, work, source)
        except Exception:  # of any kind: shown on the console, which the tests read before they end us and it goes
            traceback.print_exc()
        (work / "ended").touch()
        signal.pause()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        remove_traces(name, work)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
