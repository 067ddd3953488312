"""Published power models, each number with its source: ``presets/*.yaml`` -> a power model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import numpy as np

from wattcast import naming, units
from wattcast.activity import events
from wattcast.errors import bad_value, unknown_name
from wattcast.files import from_yaml
from wattcast.power.hybrid_rail import EventRail, HybridRail
from wattcast.power.rail import Clock, Rail, RailVoltage


class _Number(msgspec.Struct, forbid_unknown_fields=True):
    value: str
    source: str
    note: str = ""


class _Offset(_Number, forbid_unknown_fields=True, kw_only=True):
    clock: str


class _Curve(msgspec.Struct, forbid_unknown_fields=True):
    clock: list[str]
    value: list[str]
    source: str
    note: str = ""


class _Rail(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    clock: Clock
    voltage: _Curve
    events: dict[str, _Number]
    leakage: _Number | None = None
    clock_capacitance: _Number | None = None
    offsets: list[_Offset] = []


class _PresetFile(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    sources: dict[str, str]
    base: _Number
    rails: list[_Rail]
    errata: list[str] = []


@dataclass(frozen=True)
class Preset:
    """A published model, who published it, and what is wrong in print."""

    name: str
    title: str
    model: HybridRail
    sources: tuple[str, ...]
    errata: tuple[str, ...]


def names() -> list[str]:
    """Published models, by name."""
    return sorted(path.name.removesuffix(".yaml") for path in _folder().iterdir() if path.name.endswith(".yaml"))


def load(name: str) -> Preset:
    """The published model of that name (case, ``-``, ``_``, ``.`` and blanks do not matter)."""
    return _load(naming.resolve("preset", name, names(), {"tk1": "tegra-k1"}))


def parse(data: bytes, name: str, where: str) -> Preset:
    """The bytes of a preset file -> Preset."""
    file = from_yaml(data, _PresetFile, where)
    reader = _Reader(file, where)
    rails = tuple(reader.rail(rail, f"rails[{i}]") for i, rail in enumerate(file.rails))
    model = HybridRail(reader.number(file.base, "W", "base"), rails)
    return Preset(name, file.title, model, tuple(file.sources.values()), tuple(file.errata))


def _folder() -> Any:
    return files("wattcast.power").joinpath("presets")


@cache
def _load(name: str) -> Preset:
    return parse(_folder().joinpath(f"{name}.yaml").read_bytes(), name, f"{name}.yaml")


class _Reader:
    """Turns sourced numbers into SI and names the path of a bad one."""

    def __init__(self, file: _PresetFile, where: str) -> None:
        self.file, self.where = file, where

    def rail(self, rail: _Rail, path: str) -> EventRail:
        known = events()
        capacitance = {}
        for event, number in rail.events.items():
            if event not in known:
                raise unknown_name("event", event, known)
            unit = "F/s" if known[event].is_mean else "F"
            capacitance[event] = self.number(number, unit, f"{path}.events.{event}")
        return EventRail(
            Rail(
                rail.name,
                rail.clock,
                self.curve(rail.voltage, f"{path}.voltage"),
                self.number(rail.leakage, "A", f"{path}.leakage"),
                self.number(rail.clock_capacitance, "F", f"{path}.clock_capacitance"),
                tuple(
                    (
                        units.parse(offset.clock, "Hz", f"{self.where}: {path}.offsets[{i}].clock"),
                        self.number(offset, "W", f"{path}.offsets[{i}]"),
                    )
                    for i, offset in enumerate(rail.offsets)
                ),
            ),
            capacitance,
        )

    def number(self, leaf: _Number | None, unit: str, path: str) -> float:
        """SI value; a part that a rail does not have costs nothing."""
        if leaf is None:
            return 0.0
        self.cited(leaf.source, path)
        return units.parse(leaf.value, unit, f"{self.where}: {path}")

    def curve(self, leaf: _Curve, path: str) -> RailVoltage:
        self.cited(leaf.source, path)
        clock = [units.parse(c, "Hz", f"{self.where}: {path}.clock[{i}]") for i, c in enumerate(leaf.clock)]
        level = [units.parse(v, "V", f"{self.where}: {path}.value[{i}]") for i, v in enumerate(leaf.value)]
        return RailVoltage(np.array(clock), np.array(level))

    def cited(self, source: str, path: str) -> None:
        if source not in self.file.sources:
            raise bad_value(f"{self.where}: {path}.source", f"one of {', '.join(self.file.sources)}", source)
