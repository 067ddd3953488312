"""YAML -> NodeSystem: what stands around the GPUs of a server, and who says so.

Vendors publish counts, ratings and the largest power of a system. What each part draws, nobody
publishes: ``timeseries.node_power`` takes an interval from the coefficients.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wattcast.core import (
    bad_value,
    errors,
    files,
    units,
)
from wattcast.core.arrays import Array
from wattcast.core.strict_files import (
    PublishedClaim,
    decode_yaml,
    read_bytes,
)
from wattcast.hardware.card_coefficients import CARDS

MAX_SYSTEM_FILE_BYTE = 1 << 16
MOST_DEVICES = 100_000
COOLINGS = ("air", "liquid")


class _SystemLeaf(msgspec.Struct, forbid_unknown_fields=True):
    """One value with its source, or ``{unknown: why}``; ``disputed``: who says otherwise."""

    value: str | float | int | None = None
    source: str = ""
    note: str = ""
    unknown: str = ""
    disputed: list[dict[str, str]] = []


class _SystemFile(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    node: str
    gpus: list[str]
    sources: dict[str, str]
    gpu_count: _SystemLeaf
    wall_limit: _SystemLeaf
    cpu_count: _SystemLeaf
    cpu_limit: _SystemLeaf
    dimm_count: _SystemLeaf
    nic_count: _SystemLeaf
    dpu_count: _SystemLeaf
    drive_count: _SystemLeaf
    supply_count: _SystemLeaf
    supply_rating: _SystemLeaf
    supply_class: _SystemLeaf
    inlet_limit: _SystemLeaf
    cooling: _SystemLeaf


# What is taken where a system's file says "unknown", as the reasons in the files say.
_TAKEN: dict[str, float] = {
    "inlet_limit": CARDS.inlet_limit_c,
    "dpu_count": 1,
    "drive_count": CARDS.node_drives,
}
_TAKEN_OF_RACK = {
    "dpu_count": CARDS.rack_dpus,
    "drive_count": CARDS.rack_drives,
    "supply_count": CARDS.rack_supplies,
    "supply_rating": CARDS.rack_supply_w,
}


_RACK_GPUS = 32  # a system of more GPUs is a rack


@dataclass(frozen=True)
class NodeSystem:
    """A server as it is bought: its GPUs and what stands around them."""

    name: str
    title: str
    node: str  # how its GPUs are joined: a name of the catalogue of nodes
    gpus: tuple[str, ...]  # catalogue names of the GPUs it is built with
    gpu_count: int
    wall_limit_w: float | None  # largest power at the plug, as published
    cpu_count: int
    cpu_limit_w: float  # thermal design power of each processor
    dimm_count: int
    nic_count: int
    dpu_count: int
    drive_count: int
    supply_count: int
    supply_rating_w: float
    supply_classes: tuple[str, str]  # of which losses are largest, and least
    inlet_limit_c: float
    is_liquid: bool
    claims: dict[str, PublishedClaim] = field(
        default_factory=dict,
        repr=False,
        compare=False,
    )
    unknown: dict[str, str] = field(
        default_factory=dict,
        repr=False,
        compare=False,
    )

    @property
    def supplies_w(self) -> float:
        """What all power supplies together are rated for."""
        return self.supply_count * self.supply_rating_w


@dataclass(frozen=True)
class SupplyClass:
    """Least efficiency of power supplies over their load, as their certificate asks."""

    loads: Array  # of the rating, rising
    efficiencies: Array


@cache
def load_supply_classes() -> dict[str, SupplyClass]:
    """Return the classes of power supplies by name."""
    text = files("wattcast.hardware").joinpath("supply_classes.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    classes = {}
    for name in dict.fromkeys(row["class"] for row in rows):
        points = [row for row in rows if row["class"] == name]
        loads = np.array([float(row["load"]) for row in points])
        efficiencies = np.array([float(row["efficiency"]) for row in points])
        classes[name] = SupplyClass(loads, efficiencies)
    return classes


def system_names() -> list[str]:
    """Return the names of the systems in the catalogue."""
    folder = files("wattcast.hardware").joinpath("systems")
    return sorted(path.name.removesuffix(".yaml") for path in folder.iterdir())


@cache
def load_system(name: str) -> NodeSystem:
    """Return the catalogue system of that name (case, ``-``, ``_`` and blanks do not matter).

    >>> load_system("DGX H100").gpu_count
    8
    """
    full_name = errors.resolve_name("node system", name, system_names(), {})
    path = files("wattcast.hardware").joinpath("systems", f"{full_name}.yaml")
    return parse_system(path.read_bytes(), full_name, path.name)


def find_system(name: str, folder: Path) -> NodeSystem:
    """Return a system by its catalogue name, or from a YAML file like the catalogue's."""
    if name.endswith((".yaml", ".yml")):
        path = folder / name
        return parse_system(read_bytes(path, MAX_SYSTEM_FILE_BYTE), path.stem, path.name)
    return load_system(name)


def parse_system(
    data: bytes,
    name: str,
    where: str,
) -> NodeSystem:
    """Return the system that the bytes of a file describe; each value stands with its source."""
    file = decode_yaml(data, _SystemFile, where)
    reader = _SystemReader(file, where)
    gpu_count = reader.read_count("gpu_count", least=1)
    if gpu_count >= _RACK_GPUS:
        reader.taken = {**_TAKEN, **_TAKEN_OF_RACK}
    cooling = reader.read("cooling")
    if cooling not in COOLINGS:
        raise bad_value(f"{where}: cooling", f"one of {', '.join(COOLINGS)}", str(cooling))
    is_liquid = cooling == "liquid"
    return NodeSystem(
        name=name,
        title=file.title,
        node=file.node,
        gpus=tuple(file.gpus),
        gpu_count=gpu_count,
        wall_limit_w=reader.read_quantity("wall_limit", "W", is_optional=True),
        cpu_count=reader.read_count("cpu_count"),
        cpu_limit_w=reader.read_known_quantity("cpu_limit", "W"),
        dimm_count=reader.read_count("dimm_count"),
        nic_count=reader.read_count("nic_count"),
        dpu_count=reader.read_count("dpu_count"),
        drive_count=reader.read_count("drive_count"),
        supply_count=reader.read_count("supply_count", least=1),
        supply_rating_w=reader.read_known_quantity("supply_rating", "W"),
        supply_classes=reader.read_classes(is_liquid),
        inlet_limit_c=reader.read_known_quantity("inlet_limit", "C"),
        is_liquid=is_liquid,
        claims=reader.claims,
        unknown=reader.unknown,
    )


class _SystemReader:
    """Walks one file and remembers who published each value, and why others are unknown."""

    def __init__(
        self,
        file: _SystemFile,
        where: str,
    ) -> None:
        self.file = file
        self.where = where
        self.taken = _TAKEN
        self.claims: dict[str, PublishedClaim] = {}
        self.unknown: dict[str, str] = {}

    def read(self, key: str) -> Any:
        """Return a value, or None where its file says why it is unknown."""
        leaf: _SystemLeaf = getattr(self.file, key)
        where = f"{self.where}: {key}"
        if bool(leaf.unknown) == (leaf.value is not None):
            problem = "both" if leaf.unknown else "neither"
            raise bad_value(where, "either a value or `unknown: why`", problem)
        if leaf.unknown:
            self.unknown[key] = leaf.unknown
            return None
        if leaf.source not in self.file.sources:
            raise bad_value(
                f"{where}.source", f"one of {', '.join(self.file.sources)}", leaf.source
            )
        statements = tuple(
            (str(disputed.get("value", "")), self.file.sources.get(disputed.get("source", ""), ""))
            for disputed in leaf.disputed
        )
        self.claims[key] = PublishedClaim(self.file.sources[leaf.source], leaf.note, statements)
        return leaf.value

    def read_count(
        self,
        key: str,
        least: int = 0,
    ) -> int:
        """Return a whole number of devices."""
        value = self.read(key)
        if value is None:
            value = self.take(key)
        if type(value) is not int or not least <= value <= MOST_DEVICES:
            expected = f"a whole number, {least} to {MOST_DEVICES}"
            raise bad_value(f"{self.where}: {key}", expected, value)
        return value

    def read_quantity(
        self,
        key: str,
        unit: str,
        is_optional: bool = False,
    ) -> float | None:
        """Return a quantity above zero."""
        text = self.read(key)
        if text is None:
            return None if is_optional else float(self.take(key))
        value = units.parse(text, unit, f"{self.where}: {key}")
        if value <= 0:
            raise bad_value(f"{self.where}: {key}", "a number above zero", text)
        return value

    def read_known_quantity(
        self,
        key: str,
        unit: str,
    ) -> float:
        """Return a quantity that a system cannot do without."""
        value = self.read_quantity(key, unit)
        assert value is not None, "a value is taken where it is unknown"
        return value

    def read_classes(self, is_liquid: bool) -> tuple[str, str]:
        """Return the classes of the supplies: of the largest and of the least losses."""
        name = self.read("supply_class")
        if name is None:
            return ("titanium", "shelf") if is_liquid else ("platinum", "titanium")
        errors.check_names("class of power supplies", str(name), load_supply_classes())
        return str(name), str(name)

    def take(self, key: str) -> Any:
        """Return what is taken in place of an unknown value."""
        if key not in self.taken:
            hint = "Without it the power of the node cannot be said."
            raise bad_value(f"{self.where}: {key}", "a value", "unknown", hint)
        return self.taken[key]
