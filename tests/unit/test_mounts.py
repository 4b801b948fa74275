"""Which mounts answer: tables as kernels write them, and the real one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from moe_gpu_stabilizer.mounts import Mount, Mounts, MountTable, device_of, mount_id_of, mounts_in

TABLE = b"""\
21 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
22 21 0:5 / /proc rw,nosuid shared:2 - proc proc rw
23 21 0:23 / /tmp rw - tmpfs tmpfs rw,size=4k
24 21 0:35 /@home /home rw shared:3 - btrfs /dev/sda1 rw,subvol=/@home
30 21 0:50 / /mnt/nas rw,relatime shared:4 - nfs4 nas:/export rw,vers=4.2
31 21 0:51 / /home/me/cloud rw,nosuid,nodev - fuse.sshfs me@host: rw,user_id=1000
32 21 259:7 / /mnt/windows rw - fuseblk /dev/nvme0n1p7 rw,user_id=0
33 21 0:52 / /auto rw - autofs /etc/auto.misc rw,fd=7
34 21 0:53 / /mnt/new rw - newfs2030 server rw
35 21 0:54 / /var/lib/docker/overlay2/a/merged rw - overlay overlay \
rw,lowerdir=/var/lib/docker/overlay2/l/B:/var/lib/docker/overlay2/l/C,upperdir=/var/a/diff,workdir=/var/a/work
36 21 0:55 / /srv/over rw - overlay overlay rw,lowerdir=/usr:/mnt/nas/root,upperdir=/tmp/up,workdir=/tmp/work
37 21 0:56 / /srv/odd\\040name rw - overlay overlay rw,lowerdir+=/home/me/cloud/x,lowerdir+=/usr
38 21 0:57 / /srv/covered rw - tmpfs tmpfs rw
39 38 0:58 / /srv/covered rw - nfs nas:/ rw
40 21 0:59 / /srv/above rw - overlay overlay rw,lowerdir=/srv/covered/x:/usr
"""


def doubtful(mount_id: int, table: bytes = TABLE, trusted: bytes = b"259:2") -> str | None:
    mounts = MountTable(table)
    mount = mounts.mount(mount_id)
    assert mount is not None
    return mounts.doubtful(mount, trusted)


@pytest.mark.parametrize("mount_id", [21, 23, 24, 35])
def test_a_local_disk_answers(mount_id: int) -> None:
    assert doubtful(mount_id) is None


@pytest.mark.parametrize(
    ("mount_id", "kind"),
    [(22, "proc"), (30, "nfs4"), (31, "fuse.sshfs"), (32, "fuseblk"), (33, "autofs"), (34, "newfs2030")],
)
def test_what_is_not_known_to_be_local_may_not(mount_id: int, kind: str) -> None:
    """Not even a kind of disk that nobody has heard of; nor proc, where reading a file may do something."""
    assert doubtful(mount_id) == kind


@pytest.mark.parametrize(("mount_id", "kind"), [(36, "nfs4"), (37, "fuse.sshfs"), (40, "nfs")])
def test_an_overlay_is_what_it_lies_over(mount_id: int, kind: str) -> None:
    assert doubtful(mount_id) == f"overlay over {kind}"


def test_a_machine_that_runs_from_a_server_is_watched_all_the_same() -> None:
    """When that does not answer, nothing does."""
    diskless = b"21 1 0:20 / / rw - nfs boot:/root rw\n22 21 0:20 /opt /opt ro - nfs boot:/root rw\n" + TABLE[100:]
    assert doubtful(21, diskless, b"0:20") is None
    assert doubtful(22, diskless, b"0:20") is None
    assert doubtful(30, diskless, b"0:20") == "nfs4"


def test_names_are_as_people_write_them() -> None:
    assert [mount.point for mount in mounts_in(TABLE) if b"odd" in mount.point] == [b"/srv/odd name"]


def test_a_table_that_was_cut_off_has_what_is_whole() -> None:
    assert len(list(mounts_in(TABLE[:-20]))) == len(list(mounts_in(TABLE))) - 1


@pytest.mark.parametrize("kept_bytes", range(len(TABLE) - 300, len(TABLE)))
def test_wherever_a_table_was_cut_off_a_mount_is_whole_or_not_there(kept_bytes: int) -> None:
    """As that of a namespace whose last process ends while it is read."""
    whole, cut = MountTable(TABLE), MountTable(TABLE[:kept_bytes])
    for mount_id in (37, 38, 39, 40):
        assert cut.mount(mount_id) in (None, whole.mount(mount_id))


def test_a_carriage_return_in_a_name_is_no_end_of_a_line() -> None:
    table = MountTable(b"21 1 0:5 / /a\rb rw - ext4 /dev/sda rw\n")
    mount = table.mount(21)
    assert mount is not None
    assert (mount.point, mount.kind) == (b"/a\rb", "ext4")
    assert table.mount_of(b"0:5") == mount


def test_every_mount_of_this_machine_is_understood() -> None:
    table = Path("/proc/self/mountinfo").read_bytes()
    lines = subprocess.run(["findmnt", "-rno", "FSTYPE"], capture_output=True, text=True, check=True).stdout.split()
    assert sorted({mount.kind for mount in mounts_in(table)}) == sorted(set(lines))


def test_the_number_and_the_device_of_an_open_file_are_in_the_table(tmp_path: Path) -> None:
    with tmp_path.joinpath("file").open("wb") as file:
        mount = MountTable(Path("/proc/self/mountinfo").read_bytes()).mount(mount_id_of(file.fileno()))
        assert isinstance(mount, Mount)
        assert str(tmp_path).startswith(os.fsdecode(mount.point))
        assert mount.device == device_of(file.fileno())


def test_what_runs_from_memory_answers() -> None:
    """runc and others run a copy of themselves from a file in memory, which is on no mount that a table shows."""
    mounts = Mounts()
    descriptor = os.memfd_create("program")
    try:
        mounts.check(descriptor, "/proc/1/exe")
    finally:
        os.close(descriptor)
        mounts.close()
