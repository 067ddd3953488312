"""What the simulated HD 7970 rests on: the strict reader of ``data/hd7970.yaml`` and ``data/hd7970_kernels.yaml``."""

from __future__ import annotations

from importlib.resources import files
from typing import TypeVar

import msgspec

from wattcast.files import from_yaml

T = TypeVar("T")


class _Number(msgspec.Struct, forbid_unknown_fields=True):
    value: float
    because: str = msgspec.field(name="from")


class _Power(msgspec.Struct, forbid_unknown_fields=True):
    value: str | float
    because: str = msgspec.field(name="from")


class Levels(msgspec.Struct, forbid_unknown_fields=True):
    value: list[str | float]
    because: str = msgspec.field(name="from")


class _Overlap(msgspec.Struct, forbid_unknown_fields=True):
    base: float
    per_occupancy: float
    because: str = msgspec.field(name="from")


class CardFile(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    gpu: str
    units: Levels
    core_clock: Levels
    memory_clock: Levels
    default: Levels
    memory: dict[str, _Number]
    overlap: _Overlap
    power: dict[str, _Power]


class Phase(msgspec.Struct, forbid_unknown_fields=True):
    """How one of a kernel's recurring iterations differs from its mean."""

    work: float
    valu: float = 1.0
    dram: float = 1.0


class KernelData(msgspec.Struct, forbid_unknown_fields=True):
    """One kernel of ``hd7970_kernels.yaml``."""

    name: str
    time: str
    valu: float
    dram: float
    fetch: float
    fixed: float
    occupancy: float
    divergence: float
    vgpr: float
    sgpr: float
    iterations: int = 60
    serial: float = 0.0
    write_stall: float = 0.0
    thrash: float = 0.0
    fits: float = 32.0
    phases: list[Phase] = []
    because: dict[str, str] = msgspec.field(name="from", default={})


class _KernelFile(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    assumed: dict[str, str]
    kernels: list[KernelData]


def card_data() -> CardFile:
    """The card as written."""
    return _read("hd7970.yaml", CardFile)


def kernel_data() -> tuple[KernelData, ...]:
    """The 25 kernels as written, with their sentences."""
    return tuple(_read("hd7970_kernels.yaml", _KernelFile).kernels)


def assumed() -> dict[str, str]:
    """What the numbers without a sentence of their own rest on."""
    return _read("hd7970_kernels.yaml", _KernelFile).assumed


def _read(name: str, kind: type[T]) -> T:
    data = files("wattcast.manage").joinpath("data", name).read_bytes()
    return from_yaml(data, kind, name)
