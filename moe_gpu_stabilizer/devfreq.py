"""A GPU's devfreq node: find it, read it, raise its min_freq and give it back. The only writer of sysfs."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
from pathlib import Path

from .errors import DevfreqError
from .settings import HZ_PER_MHZ

logger = logging.getLogger(__name__)

CLASS_DIRECTORY = Path("/sys/class/devfreq")

# Names of GPU nodes, the most specific first.
GPU_NODES = (
    "17000000.gpu",  # Orin, JetPack 6 and 7
    "17000000.ga10b",  # Orin, JetPack 5
    "17000000.gv11b",  # Xavier
    "17000000.gp10b",  # TX2
    "57000000.gpu",  # Nano
    "gpu-gpc-*",  # Thor; its gpu-nvd-0 is the video decoder
    "fb000000.gpu",  # Rockchip, Mali
    "ff9a0000.gpu",
    "fde60000.gpu",
    "3d00000.gpu",  # Adreno
    "*.qcom,kgsl-3d0",
    "*.gpu",
)

# Frequencies are 64-bit numbers.
MOST_DIGITS = 20
MOST_BYTES_OF_A_NUMBER = 64

LIMITS = ("min_freq", "max_freq")

# sysfs gives no more than a page.
MOST_BYTES = 65536

# devfreq keeps limits in kHz and may round a frequency to that.
ROUNDING_HZ = 1000


def mhz(frequency_hz: int) -> str:
    """A frequency for people: "1020 MHz", "114.75 MHz"; "7 Hz" for what is no clock of a GPU."""
    if frequency_hz < ROUNDING_HZ:
        return f"{frequency_hz} Hz"
    return f"{frequency_hz / HZ_PER_MHZ:.6g} MHz"


def same_frequency(one_hz: int, other_hz: int) -> bool:
    return abs(one_hz - other_hz) < ROUNDING_HZ


def is_frequency(text: bytes) -> bool:
    return text.isdigit() and len(text) <= MOST_DIGITS


class Node:
    """One devfreq directory. Every method raises DevfreqError where the file cannot be read or written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._highest_hz: int | None = None
        self._handle: int | None = None
        self._held: dict[str, int] = {}

    @property
    def name(self) -> str:
        return self.directory.name

    def __str__(self) -> str:
        return str(self.directory)

    def is_there(self) -> bool:
        return os.path.exists(self.directory / "min_freq")

    def hold(self) -> None:
        """Hold the directory and its limits open as they are now, until let_go(): the floor waits for their opening.

        What has gone is found out of itself; called at each tick for what was moved or replaced.
        """
        self.let_go()
        with contextlib.suppress(OSError):  # what cannot be held is opened each time
            self._handle = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            for limit in LIMITS:
                self._held[limit] = self._open(limit, os.O_RDONLY)

    def let_go(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _open(self, attribute: str, flags: int) -> int:
        """Not through pathlib and a text file, which takes five times as long: the floor waits for this."""
        flags |= os.O_CLOEXEC
        if self._handle is not None:
            try:
                return os.open(attribute, flags, dir_fd=self._handle)
            except FileNotFoundError:
                pass  # another one may be in its place
        return os.open(f"{self.directory}/{attribute}", flags)

    def read(self, attribute: str) -> str:
        return self._read(attribute, MOST_BYTES).decode("ascii", "replace")

    def _read(self, attribute: str, most_bytes: int) -> bytes:
        try:  # a suppress() would cost more than the reading
            return os.pread(self._held[attribute], most_bytes, 0).strip()
        except (KeyError, OSError):
            pass  # not held; or it has gone, and another one may be in its place
        try:
            descriptor = self._open(attribute, os.O_RDONLY)
            try:
                return os.read(descriptor, most_bytes).strip()
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DevfreqError(f"cannot read {self.directory}/{attribute}: {error.strerror}") from None

    def read_hz(self, attribute: str) -> int:
        text = self._read(attribute, MOST_BYTES_OF_A_NUMBER)
        if not is_frequency(text):
            said = text[:40].decode("ascii", "replace")
            raise DevfreqError(f"{self.directory / attribute} reads {said!r}, not a frequency")
        return int(text)

    @property
    def min_hz(self) -> int:
        return self.read_hz("min_freq")

    @property
    def max_hz(self) -> int:
        return self.read_hz("max_freq")

    def available_hz(self) -> list[int]:
        """The frequencies that the driver lists, ascending; empty where it lists none."""
        try:
            words = self._read("available_frequencies", MOST_BYTES).split()
        except DevfreqError:
            return []
        return sorted(int(word) for word in words if is_frequency(word))

    def floor_hz(self, wanted_hz: int | None) -> int:
        """The floor to set: `wanted_hz`, else the highest available frequency; never above max_freq."""
        max_hz = self.max_hz
        return min(wanted_hz or self._highest_available_hz(max_hz), max_hz)

    def _highest_available_hz(self, otherwise_hz: int) -> int:
        """The driver's table does not change: it is read once, for the floor waits for this."""
        if self._highest_hz is None:
            self._highest_hz = max(self.available_hz(), default=None)
        return self._highest_hz or otherwise_hz

    def write_min_hz(self, frequency_hz: int) -> None:
        """The one place that writes to sysfs, and min_freq is the one thing it writes."""
        try:
            descriptor = self._open("min_freq", os.O_WRONLY)
            try:
                # sysfs takes a value in one write(); it reports a refusal there.
                written_bytes = os.write(descriptor, b"%d\n" % frequency_hz)
                # A plain file, which must not be empty meanwhile, may have held more.
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, written_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            what = f"write {frequency_hz} to {self.directory}/min_freq"
            raise DevfreqError(f"cannot {what}: {error.strerror}") from None
        finally:  # the floor does not wait for that
            logger.debug("writing %d to %s/min_freq", frequency_hz, self.directory)


def find(configured: str = "", class_directory: Path = CLASS_DIRECTORY) -> Node | None:
    """Return the configured node, else the board's GPU; None where there is none (yet: some register at first use)."""
    if configured:
        node = Node(Path(configured))
        return node if node.is_there() else None
    return next((node for node in candidates(class_directory) if node.is_there()), None)


def candidates(class_directory: Path = CLASS_DIRECTORY) -> list[Node]:
    """Every GPU node of the board, the best known name first.

    A node is also known by its device's name in the device tree ("gpu"), where the kernel shows that.
    """
    try:
        directories = sorted(class_directory.iterdir())
    except OSError:  # no devfreq in this kernel
        return []
    ranked = [(rank, directory) for directory in directories if (rank := _rank(directory)) is not None]
    return [Node(directory) for _, directory in sorted(ranked)]


def _rank(directory: Path) -> int | None:
    for rank, pattern in enumerate(GPU_NODES):
        if fnmatch.fnmatchcase(directory.name, pattern):
            return rank
    try:
        of_name = (directory / "device/of_node/name").read_text(encoding="ascii", errors="replace").strip("\0\n")
    except OSError:  # no device tree here, or not for this device
        return None
    return len(GPU_NODES) if of_name in ("gpu", "mali") else None
