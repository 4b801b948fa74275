"""What the kernel has for a GPU with devfreq, as plain files."""

from __future__ import annotations

from pathlib import Path

from tests.support import PlainNode

NAME = "17000000.gpu"


def make_node(work: Path) -> PlainNode:
    """Lay out what the kernel has for a GPU with devfreq; stage.py mounts the parts where they belong."""
    device = work / "gpu"
    node = PlainNode(device / "devfreq" / NAME)
    (node.directory / "device").symlink_to(f"../../../{NAME}")
    (node.directory / "subsystem").symlink_to("../../../../../class/devfreq")
    (device / "of_node").mkdir()
    (device / "of_node/name").write_bytes(b"gpu\0")
    (work / "sys/devices/platform" / NAME).mkdir(parents=True)
    devfreq = work / "sys/class/devfreq"
    devfreq.mkdir(parents=True)
    (devfreq / NAME).symlink_to(f"../../devices/platform/{NAME}/devfreq/{NAME}")
    return node
