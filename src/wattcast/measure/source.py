"""Where energy and power readings come from: one small protocol, one implementation per vendor.

A source reads; it never sets anything. What it cannot read is NaN. ``NVIDIA`` goes through NVML,
``AMD`` through amdsmi, the CPU package through RAPL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from wattcast.errors import MissingTool, unknown_name


@dataclass(frozen=True)
class Slow:
    """Readings that change slowly or cost more; NaN where the device has none."""

    memory_clock_hz: float = math.nan
    instant_w: float = math.nan
    average_w: float = math.nan
    memory_w: float = math.nan
    temperature_c: float = math.nan
    throttle: float = math.nan

    @property
    def values(self) -> tuple[float, ...]:
        """In the order of the ring's columns."""
        board = self.memory_clock_hz, self.instant_w, self.average_w, self.memory_w
        return *board, self.temperature_c, self.throttle


@dataclass(frozen=True)
class Identity:
    """Which device, and with which driver."""

    name: str
    uuid: str = ""
    serial: str = ""
    driver: str = ""
    library: str = ""
    power_limit_w: float | None = None
    top_clock_hz: float | None = None
    notes: tuple[str, ...] = field(default=())


class ReadError(Exception):
    """A reading failed. ``lost`` says the device itself is gone."""

    def __init__(self, message: str, code: int = 0, lost: bool = False) -> None:
        super().__init__(message)
        self.code, self.lost = code, lost


class EnergySource(Protocol):
    """A device whose energy, power and clocks can be read."""

    energy_range_j: float | None  # where its energy counter wraps, if it does

    def open(self) -> Identity:
        """Connect; raises :class:`~wattcast.errors.MissingTool` when there is nothing to read."""
        ...

    def energy_j(self) -> float:
        """The energy counter, or NaN when there is none."""
        ...

    def sm_clock_hz(self) -> float:
        """The core clock as the driver reports it."""
        ...

    def slow(self) -> Slow:
        """Everything else."""
        ...

    def close(self) -> None:
        """Disconnect."""
        ...


def open_source(name: str = "auto", index: int = 0) -> tuple[EnergySource, Identity]:
    """The source called ``name`` (``nvml``, ``amd``, ``rapl``), or with ``auto`` the first that answers."""
    from wattcast.measure.amd import AmdSource
    from wattcast.measure.nvml import NvmlSource
    from wattcast.measure.rapl import RaplSource

    makers: dict[str, Callable[[int], EnergySource]] = {"nvml": NvmlSource, "amd": AmdSource, "rapl": RaplSource}
    if name != "auto" and name not in makers:
        raise unknown_name("energy source", name, makers, f"Known: auto, {', '.join(makers)}.")
    said: list[str] = []
    for label in makers if name == "auto" else (name,):
        source = makers[label](index)
        try:
            return source, source.open()
        except MissingTool as error:
            said.append(f"{label}: {error}")
    raise MissingTool(
        "no energy source on this machine: measuring needs an NVIDIA GPU with its driver and nvidia-ml-py, an AMD "
        f"GPU with amdsmi, or a CPU whose RAPL counters may be read. Tried {' '.join(said)}"
    )
