"""How this program was started, so that what it tells the user to run can be run as it is told."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

NAME = "moe-gpu-stabilizer"


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
    """A command line of this program, for root: with sudo in front where that is needed and there."""
    line = shlex.join([*program(), *options])
    if os.geteuid() == 0:
        return line
    return f"sudo {line}" if shutil.which("sudo") else f"{line} (as root)"


def again_as_root() -> str:
    """The command that is running now, for root."""
    return command(*sys.argv[1:])
