"""A simulated GPU node: a plain directory with the files of a devfreq node, and a governor that follows a load.

It behaves as the nvhost_podgov governor was seen to behave on an Orin Nano: at 36 % load, which is what a token looks
like whose experts are on the CPU, it stays at the lowest clock; kept busy, it climbs to the highest.
"""

from __future__ import annotations

from pathlib import Path

AVAILABLE_HZ = tuple(mhz * 1_000_000 for mhz in (306, 408, 510, 612, 714, 816, 918, 1020))

# The governor goes one step up above this load, one down below that.
UP_LOAD = 0.80
DOWN_LOAD = 0.50


class SimulatedGpu:
    """The node's directory, and its governor as far as poll() drives it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        self._write("governor", "nvhost_podgov")
        self._write("available_frequencies", " ".join(map(str, AVAILABLE_HZ)))
        for attribute, hz in (
            ("min_freq", AVAILABLE_HZ[0]),
            ("max_freq", AVAILABLE_HZ[-1]),
            ("cur_freq", AVAILABLE_HZ[0]),
        ):
            self._write(attribute, hz)
        self.min_hz = self.cur_hz = AVAILABLE_HZ[0]

    def poll(self, load: float) -> None:
        """Choose a frequency for this load (0 to 1) within the limits, as a governor does some times a second."""
        self.min_hz = self._read("min_freq", self.min_hz)
        max_hz = self._read("max_freq", AVAILABLE_HZ[-1])
        step = AVAILABLE_HZ.index(self.cur_hz)
        if load > UP_LOAD:
            step = min(step + 1, len(AVAILABLE_HZ) - 1)
        elif load < DOWN_LOAD:
            step = max(step - 1, 0)
        allowed_hz = [hz for hz in AVAILABLE_HZ if self.min_hz <= hz <= max_hz] or [max_hz]
        self._set_cur(min(max(AVAILABLE_HZ[step], allowed_hz[0]), allowed_hz[-1]))

    def _set_cur(self, hz: int) -> None:
        if hz != self.cur_hz:
            self.cur_hz = hz
            self._write("cur_freq", hz)

    def _read(self, attribute: str, otherwise: int) -> int:
        """A limit; the one before while its file is being rewritten (a plain file is empty for a moment then)."""
        text = (self.directory / attribute).read_text().strip()
        return int(text) if text.isdigit() else otherwise

    def _write(self, attribute: str, value: object) -> None:
        (self.directory / attribute).write_text(f"{value}\n")
