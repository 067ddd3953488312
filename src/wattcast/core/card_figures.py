"""What was measured of a card by itself: written by ``measure``, compared by ``calibrate``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Operator = Mapping[str, Any]  # as workload JSON writes it


@dataclass(frozen=True)
class LoadFigures:
    """A load as the card ran it."""

    name: str
    operator: Operator
    latency_s: float
    power_w: float
    clock_hz: float
    temperature_c: float | None
    is_capped: bool  # the power limit held the clock down
    flags: tuple[str, ...]
    memory_w: float | None = None  # of the memory alone; None where the card does not tell


@dataclass(frozen=True)
class HostPass:
    """A pass of a small model whose operators the host issues one by one."""

    seconds: float | None  # None: not measured
    tokens: int
    words: str  # how it was measured, or why not


@dataclass(frozen=True)
class CardFigures:
    """What was measured of a card and its host."""

    name: str  # as the driver prints it
    uuid: str
    board: str  # part number; empty where the driver does not tell
    idle_w: float
    idle_clock_hz: float
    idle_temperature_c: float | None
    loads: tuple[LoadFigures, ...]
    host: HostPass
