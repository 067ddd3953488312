"""The forecast rule as data: ``forecast.yaml``, read strictly."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from wattcast.errors import bad_value
from wattcast.files import from_yaml
from wattcast.hardware import Gpu
from wattcast.kernels import Style


class Process(msgspec.Struct, forbid_unknown_fields=True):
    """Energy of logic on a process against the parent's, at the top voltage ``nominal`` where it is known."""

    name: str
    logic: float
    source: str
    nominal: str = ""


class MemoryKind(msgspec.Struct, forbid_unknown_fields=True):
    """Energy per byte against the parent's memory."""

    factor: float
    source: str
    interface: float = 1.0


class StyleRule(msgspec.Struct, forbid_unknown_fields=True):
    """What changes with the way kernels feed the tensor cores."""

    tensor_delivery: float
    sharing: float
    native: dict[str, str]
    native_cycles: str  # the group whose cycles native products take; empty: their own
    mma_on_parent: float
    old_groups: list[str]
    renamed: dict[str, str]


class Architecture(msgspec.Struct, forbid_unknown_fields=True):
    """How much an architecture inherits."""

    style: Style
    whole: bool = False
    clock_law: bool = False


class Idle(msgspec.Struct, forbid_unknown_fields=True):
    """Idle power where none is published: shares of the limit, and the shape of the rise between them."""

    lowest: float
    top: float
    clock_share: list[float]
    rise: list[float]


class Voltage(msgspec.Struct, forbid_unknown_fields=True):
    """Relative voltage where none is published."""

    clock_share: list[float]
    relative: list[float]


class Spread(msgspec.Struct, forbid_unknown_fields=True):
    """Factors by which the carrying may be off, one side."""

    latency: float
    power: float


class Rule(msgspec.Struct, forbid_unknown_fields=True):
    """The whole rule."""

    source: str
    date: str
    parent: str
    processes: list[Process]
    classes: dict[str, float]
    sm_alike: float
    memory_rail_j_per_byte: float
    memory: dict[str, MemoryKind]
    formats: dict[str, Any]
    link_energy_j_per_byte: float
    styles: dict[str, StyleRule]
    architectures: dict[str, Architecture]
    same_programs: list[str]
    fp32_instructions: float
    streaming: str
    integer_groups: list[str]
    issue_bound: list[str]
    issue_free: float
    fixed_clock_share: float
    host: dict[str, str]
    host_weights: dict[str, float]
    idle: Idle
    voltage: Voltage
    spread: dict[str, Spread]
    missing: dict[str, str]

    def architecture(self, name: str) -> Architecture:
        """What an architecture inherits; one the rule does not name gets the default."""
        return self.architectures.get(name, self.architectures["default"])

    def process(self, gpu: Gpu) -> Process:
        """The process of a chip: the longest name that its catalogue entry contains."""
        found = [p for p in self.processes if p.name.lower() in gpu.process.lower()]
        if not found:
            known = ", ".join(p.name for p in self.processes)
            raise bad_value(f"{gpu.name}: process", f"one the forecast knows ({known})", gpu.process)
        return max(found, key=lambda p: len(p.name))


@cache
def rule() -> Rule:
    """The shipped rule."""
    return from_yaml(files("wattcast.fitted").joinpath("forecast.yaml").read_bytes(), Rule, "forecast.yaml")
