"""Another program that sets a node's limits, as nvpmodel and jetson_clocks do."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType

# A line "FILE VALUE" is a write, answered when it is done. "fight" sets min_freq again whenever it is not the lowest.
SCRIPT = """#!/bin/sh
cd "$1" || exit 1
while read -r file value; do
    if [ "$file" = fight ]; then
        echo fighting
        while :; do
            [ "$(cat min_freq)" = "$value" ] || echo "$value" >min_freq
            sleep 0.02
        done
    fi
    echo "$value" >"$file"
    echo done
done
"""


class Rival:
    """A running program of that name which sets limits of the node in `directory` when told to."""

    def __init__(self, scripts: Path, directory: Path, name: str = "nvpmodel") -> None:
        scripts.mkdir(exist_ok=True)
        script = scripts / name
        script.write_text(SCRIPT)
        script.chmod(0o755)
        self.process = subprocess.Popen(
            [script, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def write(self, file: str, value: int) -> None:
        """Set a limit in Hz, and wait until it is set."""
        assert self._say(f"{file} {value}") == "done"

    def fight_for(self, value: int) -> None:
        """Set min_freq to this from now on, whatever others write."""
        assert self._say(f"fight {value}") == "fighting"

    def _say(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Rival:
        return self

    def __exit__(self, _k: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
