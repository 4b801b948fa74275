"""How this program was started, so that what it tells the user to run can be run as it is told."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

NAME = "moe-gpu-stabilizer"
UNIT = f"{NAME}.service"
UNIT_PLACES = [Path(place) for place in ("/etc/systemd/system", "/usr/local/lib/systemd/system", "/lib/systemd/system")]


def program() -> list[str]:
    """The words that start this program: its plain name only where the shell would find this very file by it."""
    started_as = sys.argv[0]
    if os.path.basename(started_as) != NAME:
        return [sys.executable, "-m", __package__]
    found = shutil.which(NAME)
    return (
        [NAME] if found and os.path.realpath(found) == os.path.realpath(started_as) else [os.path.abspath(started_as)]
    )


def command(*options: str) -> str:
    """A command line of this program, for root."""
    return as_root([*program(), *options])


def as_root(words: Sequence[str]) -> str:
    """A command line for root: with sudo in front where that is needed and there."""
    line = shlex.join(words)
    if os.geteuid() == 0:
        return line
    return f"sudo {line}" if shutil.which("sudo") else f"{line} (as root)"


def service_is_installed() -> bool:
    """Is the program a service here, under a systemd that runs (sd_booted(3))?"""
    return Path("/run/systemd/system").is_dir() and any((place / UNIT).exists() for place in UNIT_PLACES)


def start_command(verb: str = "start") -> str:
    """How root starts the daemon, or restarts it: as a service where it is one."""
    return as_root(["systemctl", verb, NAME]) if service_is_installed() else command()


def again_as_root() -> str:
    """The command that is running now, for root."""
    return command(*sys.argv[1:])
