"""Leakage: watts the chip loses whatever it does, which no report of the originals shows.

P_leak = V · (P_cores · (1 − g·idle/N) + P_rest), with V relative to the voltage the figures hold at, and g = 1
when idle SMs are power-gated. The figures hold at one temperature; no dependence on it is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.files import read_bytes

_MAX_BYTE = 4 << 20


@dataclass(frozen=True)
class Leakage:
    """Leakage of all SMs together and of the rest of the chip, in watts at the reference voltage."""

    cores_w: float
    rest_w: float
    sm_count: float
    gated: bool = False  # idle SMs are cut off from power

    def __post_init__(self) -> None:
        for name, value in (("cores", self.cores_w), ("rest", self.rest_w)):
            if not (np.isfinite(value) and value >= 0):
                raise bad_value(f"leakage of {name}", "watts, zero or more", value)
        if not self.sm_count > 0:
            raise bad_value("leakage: SMs", "a number above zero", self.sm_count)

    def at(self, idle_sm: Array, relative_voltage: Array) -> Array:
        """Watts in each interval."""
        idle = np.clip(idle_sm, 0.0, self.sm_count) / self.sm_count
        awake = 1.0 - idle if self.gated else np.ones_like(idle)
        return np.asarray(relative_voltage * (self.cores_w * awake + self.rest_w))

    def to_plain(self) -> dict[str, Any]:
        """For YAML."""
        return {"cores_w": self.cores_w, "rest_w": self.rest_w, "sm_count": self.sm_count, "gated": self.gated}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Leakage:
        """From YAML."""
        return cls(float(plain["cores_w"]), float(plain["rest_w"]), float(plain["sm_count"]), bool(plain["gated"]))


def read_mcpat(path: Path, sm_count: float | None = None, gated: bool = False) -> Leakage:
    """Leakage from the area and power listing McPAT prints at the start of a run.

    Subthreshold and gate leakage of ``Total Cores`` and of everything else under ``Processor``. ``sm_count``
    overrides McPAT's number of cores, which is the architecture file's and not always the simulator's.
    """
    text = read_bytes(path, _MAX_BYTE).decode("utf-8", "replace")
    whole = _leakage(text, r"Processor:", path.name)
    cores = _leakage(text, r"Total Cores:\s*(\d+)\s*cores", path.name)
    count = re.search(r"Total Cores:\s*(\d+)\s*cores", text)
    assert count is not None
    return Leakage(cores, whole - cores, float(sm_count or count[1]), gated)


def _leakage(text: str, heading: str, name: str) -> float:
    start = re.search(heading, text)
    block = text[start.end() : start.end() + 2000].split("\n\n")[0] if start else ""
    found = [re.search(rf"{kind} Leakage = ([\d.eE+-]+) W", block) for kind in ("Subthreshold", "Gate")]
    if not all(found):
        raise bad_value(name, "McPAT's listing with Subthreshold and Gate Leakage", f"none under {heading!r}")
    return sum(float(match[1]) for match in found if match)
