"""The settings, as the program uses them. config.py reads and checks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

NANOSECONDS = 1_000_000_000
HZ_PER_MHZ = 1_000_000


@dataclass(frozen=True)
class Settings:
    """One field per key of /etc/default/moe-gpu-stabilizer; the values here are the defaults.

    A standard dataclass, so that the daemon can hold it without pydantic, which only checks it: pydantic alone would
    take a third of the memory budget.
    """

    floor_mhz: Annotated[int, Interval(ge=1, le=100_000)] | None = None
    hold_seconds: Annotated[float, Interval(ge=0.2, le=60)] = 1.0
    rebind_seconds: Annotated[float, Interval(ge=0.2, le=3600)] = 5.0
    libraries: tuple[str, ...] = ()
    detect: Literal["both", "flags", "behaviour"] = "both"
    moe_flags: tuple[str, ...] = ("--cpu-moe", "-cmoe", "--n-cpu-moe", "-ncmoe")
    # Experts of a layer or two on the CPU are one or two turns: see etc/default.
    min_turns: Annotated[int, Interval(ge=1, le=100_000)] = 3
    user_ids: tuple[int, ...] = ()
    devfreq: str = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def hold_ns(self) -> int:
        return round(self.hold_seconds * NANOSECONDS)

    @property
    def rebind_ns(self) -> int:
        return round(self.rebind_seconds * NANOSECONDS)

    @property
    def floor_hz(self) -> int | None:
        """The wanted floor; None: the highest available frequency."""
        return None if self.floor_mhz is None else self.floor_mhz * HZ_PER_MHZ
