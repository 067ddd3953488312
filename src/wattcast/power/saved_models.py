"""Power models in files: published ones, each number with its source, and fitted ones that were saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wattcast.core import errors, units
from wattcast.core.errors import BadInput, bad_value, unknown_name
from wattcast.core.strict_files import Provenance, decode_yaml, read_bytes
from wattcast.core.whole_files import write_whole
from wattcast.power.activity import known_events
from wattcast.power.hybrid_rail import EventRail, HybridRail, RailClock, RailVoltage, SupplyRail
from wattcast.power.power_model import PowerModel, power_model_kind


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
    clock: RailClock
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
class PublishedModel:
    """A published model, who published it, and what is wrong in print."""

    name: str
    title: str
    model: HybridRail
    sources: tuple[str, ...]
    errata: tuple[str, ...]


_PRESETS = files("wattcast.power").joinpath("presets")
_FITTED = _PRESETS.joinpath("fitted")


def preset_names() -> list[str]:
    """Return the names of published models."""
    return sorted(path.name.removesuffix(".yaml") for path in _PRESETS.iterdir() if path.name.endswith(".yaml"))


@cache
def load_preset(name: str) -> PublishedModel:
    """Return the published model of that name (case, ``-``, ``_``, ``.`` and blanks do not matter)."""
    known = errors.resolve_name("preset", name, preset_names(), {"tk1": "tegra-k1"})
    return parse_preset(_PRESETS.joinpath(f"{known}.yaml").read_bytes(), known, f"{known}.yaml")


def parse_preset(data: bytes, name: str, where: str) -> PublishedModel:
    """Return the published model that the bytes of a preset file describe."""
    file = decode_yaml(data, _PresetFile, where)
    reader = _Reader(file, where)
    rails = tuple(reader.rail(rail, f"rails[{i}]") for i, rail in enumerate(file.rails))
    model = HybridRail(reader.number(file.base, "W", "base"), rails)
    return PublishedModel(name, file.title, model, tuple(file.sources.values()), tuple(file.errata))


class _Reader:
    """Turns sourced numbers into SI and names the path of a bad one."""

    def __init__(self, file: _PresetFile, where: str) -> None:
        self.file, self.where = file, where

    def rail(self, rail: _Rail, path: str) -> EventRail:
        known = known_events()
        capacitance = {}
        for event, number in rail.events.items():
            if event not in known:
                raise unknown_name("event", event, known)
            unit = "F/s" if known[event].is_mean else "F"
            capacitance[event] = self.number(number, unit, f"{path}.events.{event}")
        return EventRail(
            SupplyRail(
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


FORMAT = 1
MOST_FILE_BYTE = 1 << 22


@dataclass(frozen=True)
class SavedModel:
    """A power model with its provenance, its held-out errors in percent, and what was assumed."""

    name: str
    model: PowerModel
    provenance: Provenance
    error_percent: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    scaling: Mapping[str, float] = field(default_factory=dict)  # how activity was carried to other clocks


class _ModelFile(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    name: str
    kind: str
    provenance: Provenance
    model: dict[str, Any]
    error_percent: dict[str, float] = {}
    notes: list[str] = []
    scaling: dict[str, float] = {}


def save_model(saved: SavedModel, path: Path) -> None:
    """Write a model file, whole or not at all."""
    write_whole(path, encode_model(saved))


def encode_model(saved: SavedModel) -> bytes:
    """Return the text of a model file."""
    import yaml

    plain = {
        "format": FORMAT,
        "name": saved.name,
        "kind": saved.model.kind,
        "provenance": msgspec.to_builtins(saved.provenance),
        "error_percent": {key: round(value, 3) for key, value in saved.error_percent.items()},
        "notes": list(saved.notes),
        "scaling": dict(saved.scaling),
        "model": saved.model.to_plain(),
    }
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=118)
    return text.encode()


def load_saved_model(path: Path) -> SavedModel:
    """Read a model file, or a model that ships: one fitted here (``h200``) or one published (``tegra-k1``)."""
    if path.exists() or len(path.parts) > 1 or path.suffix in (".yaml", ".yml"):
        return parse_saved_model(read_bytes(path, MOST_FILE_BYTE), path.name)
    known = {errors.fold_name(name): name for name in (*shipped_models(), *preset_names())} | {"tk1": "tegra-k1"}
    name = known.get(errors.fold_name(path.name), "")
    if not name:
        wanted = f"a file, or {' or '.join(dict.fromkeys(known.values()))}, which ship"
        raise bad_value("power model", wanted, path.name)
    if name in shipped_models():
        return parse_saved_model(_FITTED.joinpath(f"{name}.yaml").read_bytes(), f"{name}.yaml")
    published = load_preset(name)
    source = Provenance("; ".join(published.sources), device=published.title)
    return SavedModel(name, published.model, source, notes=published.errata)


def shipped_models() -> list[str]:
    """Return the names of fitted models that ship."""
    return sorted(p.name.removesuffix(".yaml") for p in _FITTED.iterdir() if p.name.endswith(".yaml"))


def parse_saved_model(data: bytes, where: str) -> SavedModel:
    """Return the model that the bytes of a model file describe, or raise an error that names the bad key."""
    file = decode_yaml(data, _ModelFile, where)
    if file.format != FORMAT:
        raise bad_value(f"{where}: format", str(FORMAT), file.format, "Is it from another version of Wattcast?")
    kind = power_model_kind(file.kind)
    try:
        model = kind.from_plain(file.model)
    except BadInput as error:
        raise BadInput(f"{where}: model: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise bad_value(
            f"{where}: model", f"coefficients of kind {file.kind}", f"{type(error).__name__}: {error}"
        ) from None
    return SavedModel(file.name, model, file.provenance, file.error_percent, tuple(file.notes), file.scaling)
