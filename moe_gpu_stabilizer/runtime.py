"""Files under /run/moe-gpu-stabilizer: the clock to give back, the daemon's status, a lock against a second daemon.

/run is empty after a boot, and so is min_freq's history: nothing here outlives what it speaks of.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import StabilizerError
from .invocation import again_as_root
from .policy import Process
from .processes import is_running

DEFAULT_DIRECTORY = Path("/run/moe-gpu-stabilizer")


# No GPU runs at a terahertz.
MOST_HZ = 10**12


def root_hint() -> str:
    return "" if os.geteuid() == 0 else f"it needs root: {again_as_root()}"


class TakenOverError(StabilizerError):
    """Another daemon holds the lock, which was ours."""


@dataclass(frozen=True)
class Raised:
    """What was done to a node's min_freq, in Hz: enough to undo it."""

    node: str  # its directory
    baseline_hz: int  # what was there before
    written_hz: tuple[int, ...]  # what we have written since, or were about to write when this was saved


class Runtime:
    """The run-time directory; systemd names it in RUNTIME_DIRECTORY (systemd.exec(5))."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or Path(os.environ.get("RUNTIME_DIRECTORY") or DEFAULT_DIRECTORY)
        self._raised = self.directory / "raised.json"
        # As text: the floor waits for the one to become the other.
        self._spare_name, self._raised_name = f"{self._raised}.new", str(self._raised)
        self._status = self.directory / "status.json"
        self._lock: int | None = None
        # What "raised.json" holds, and what its spare does, as far as this process wrote them.
        self._saved: Raised | None = None
        self._spare: Raised | None = None

    def create(self) -> None:
        """Make the directory, readable by all. Raises StabilizerError."""
        try:
            self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise StabilizerError(f"cannot make {self.directory}: {error.strerror}", root_hint()) from None

    def lock(self) -> bool:
        """Hold the lock until this process ends; False where another daemon holds it. Raises StabilizerError.

        The file is root's alone: whoever may open it could hold the lock, and so keep the daemon from starting.
        """
        path = self.directory / "lock"
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # Not flock(): a child that outlives a killed daemon would go on holding that.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StabilizerError(f"cannot lock {path}: {error.strerror}", root_hint()) from None
        return True

    def keep_lock(self) -> None:
        """Lock anew where somebody has tidied up /run.

        Raises TakenOverError where another daemon was faster, StabilizerError where it cannot be locked.
        """
        with contextlib.suppress(OSError):  # it has gone, or the way there: making it anew tells
            if self._lock is not None and os.path.samestat(os.fstat(self._lock), os.stat(self.directory / "lock")):
                return
        self.create()
        if not self.lock():
            raise TakenOverError("another moe-gpu-stabilizer has been started: this one ends")

    def save_raised(self, raised: Raised) -> bool:
        """Note what is to be undone, before it is done. Raises StabilizerError: then nothing may be raised.

        Returns whether that took time: a file had to be written.
        """
        if raised == self._spare and self._rename_spare():
            return False
        self._spare = None
        self._write(self._raised, vars(raised))
        self._saved = raised
        return True

    def _rename_spare(self) -> bool:
        """False where the spare file has gone, or is refused: then it is written anew."""
        try:
            os.rename(self._spare_name, self._raised_name)
        except OSError:
            return False
        self._saved, self._spare = self._spare, None
        return True

    def has_raised(self) -> bool:
        """Is what was saved still there? Somebody may have tidied up /run."""
        return self._raised.exists()

    def load_raised(self) -> Raised | None:
        """What an earlier daemon left to be undone. Raises StabilizerError for a file that is not ours to trust."""
        saved = self._read(self._raised)
        if saved is None:
            return None
        try:
            raised = Raised(str(saved["node"]), int(saved["baseline_hz"]), tuple(int(hz) for hz in saved["written_hz"]))
            # A baseline of 0 is no limit at all.
            if not raised.written_hz or not all(0 <= hz < MOST_HZ for hz in (raised.baseline_hz, *raised.written_hz)):
                raise ValueError("nothing that was ever written")
            return raised
        except (LookupError, TypeError, ValueError, OverflowError):
            raise StabilizerError(
                f"{self._raised} is damaged", f"set min_freq by hand and remove {self._raised}"
            ) from None

    def forget_raised(self) -> None:
        """Nothing is to be given back any more. Raises StabilizerError.

        The file is kept as a spare: the next floor is most likely raised from and to the same, and a first call would
        wait longer for a new file than for all else that is done here.
        """
        try:
            os.rename(self._raised_name, self._spare_name)
            self._spare, self._saved = self._saved, None
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StabilizerError(f"cannot remove {self._raised}: {error.strerror}") from None

    def save_status(self, status: dict[str, Any]) -> None:
        self._write(self._status, status)

    def load_status(self) -> dict[str, Any] | None:
        """What the running daemon has published; None where none runs, as far as this user can tell."""
        status = self._read(self._status)
        try:
            return status if status and is_running(Process(int(status["pid"]), int(status["start_ticks"]))) else None
        except (LookupError, TypeError, ValueError, OverflowError):
            raise StabilizerError(f"{self._status} is damaged", "restart the daemon") from None

    def forget_status(self) -> None:
        with contextlib.suppress(OSError):  # what stays is known to be stale by its process
            self._status.unlink()

    def _read(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise StabilizerError(f"cannot read {path}: {error}") from None

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        """Replace a file in one step: whoever reads it finds the old or the new one whole."""
        text = json.dumps(content).encode()
        temporary = f"{path}.new"
        try:
            descriptor = self._create(temporary)
            try:
                # The floor waits for this: no buffer, no text layer.
                if os.write(descriptor, text) != len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                # No fsync(): a power cut that takes what is not on the disk yet takes the raised clock, too.
            finally:
                os.close(descriptor)
            os.rename(temporary, path)
        except OSError as error:
            raise StabilizerError(f"cannot write {path}: {error.strerror}") from None

    def _create(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o644)
        except FileNotFoundError:  # somebody has tidied up /run
            self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            return os.open(path, flags, 0o644)
