"""The components of the power model, and the counters that drive each of them.

Each dialect has a shipped YAML file, ``gpuwattch.yaml`` and ``accelwattch.yaml``; a user's own
files add components, whose counters become the events ``custom_1`` and so on."""

from __future__ import annotations

from collections.abc import (
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec

from wattcast.core import units
from wattcast.core.errors import bad_value
from wattcast.core.strict_files import (
    decode_yaml,
    read_bytes,
    read_shipped_yaml,
)
from wattcast.lab.gpuwattch.trace_reading import (
    CUSTOM_EVENTS,
    SimulatorDialect,
    dialect_counters,
)

_MAX_BYTE = 1 << 20
# What drives a component: counter -> signed names of energies, or J per count
ComponentTerms = Mapping[str, tuple[str, ...] | float]


class ComponentRail(StrEnum):
    """The supply that a component draws from, which sets its power of the core voltage."""

    CORE = "core"  # dynamic power of the core rail: V²
    STATIC = "static"  # leakage of the core rail: V
    OWN = "own"  # does not see the core voltage


@dataclass(frozen=True)
class ChipComponent:
    """One component: the counters that drive it, and how it follows voltage and clock."""

    name: str
    rail: ComponentRail
    clocked: bool
    constant: str | float | None  # a named constant, or watts
    static: bool
    terms: ComponentTerms


@dataclass(frozen=True)
class ComponentSet:
    """The components of a model in order, and the counters they need beyond those of the
    dialect.
    """

    dialect: SimulatorDialect
    compat: bool
    components: tuple[ChipComponent, ...]
    steady_leaves_out: tuple[str, ...]
    no_comma: tuple[str, ...]
    custom: Mapping[str, str]  # counter -> custom_1 ...


class _ComponentEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    title: str = ""
    rail: ComponentRail = ComponentRail.CORE
    clocked: bool = False
    constant: str | None = None
    static: bool = False
    mode: str = ""
    terms: dict[str, list[str] | str] = {}
    compat_terms: dict[str, list[str] | str] = {}


class _ComponentFile(msgspec.Struct, forbid_unknown_fields=True):
    components: list[_ComponentEntry]
    steady_leaves_out: tuple[str, ...] = ()
    no_comma: tuple[str, ...] = ()
    wattcast: Literal["components"] = "components"


def read_component_set(
    dialect: SimulatorDialect,
    compat: bool = False,
    more: Sequence[Path] = (),
) -> ComponentSet:
    """Read the components of a dialect, then those of further files.

    With ``compat``, components have the terms of the original programs, and those that correct the
    originals are left out."""
    base = read_shipped_yaml(_ComponentFile, "wattcast.lab.gpuwattch", f"{dialect}.yaml")
    named_files = [(f"{dialect}.yaml", base)]
    for path in dict.fromkeys(more):
        file = decode_yaml(read_bytes(path, _MAX_BYTE), _ComponentFile, path.name)
        named_files.append((path.name, file))
    components: dict[str, ChipComponent] = {}
    for file_name, file in named_files:
        for entry in file.components:
            where = f"{file_name}: {entry.name}"
            if entry.mode not in ("", "correct"):
                raise bad_value(f"{where}.mode", "'correct' or nothing", entry.mode)
            if entry.name in components:
                raise bad_value(where, "a name of its own", "a component that is there already")
            is_correction = entry.mode == "correct"
            if not (compat and is_correction):
                components[entry.name] = _read_component(entry, compat, where)
    return ComponentSet(
        dialect,
        compat,
        tuple(components.values()),
        base.steady_leaves_out,
        base.no_comma,
        _name_custom_events(dialect, components.values()),
    )


def _read_component(
    entry: _ComponentEntry,
    compat: bool,
    where: str,
) -> ChipComponent:
    terms: dict[str, tuple[str, ...] | float] = {}
    written_terms = entry.compat_terms if compat and entry.compat_terms else entry.terms
    for counter, energy in written_terms.items():
        if isinstance(energy, list):
            terms[counter] = tuple(energy)
        else:
            terms[counter] = units.parse(energy, "J", f"{where}.terms.{counter}")
    constant: str | float | None = entry.constant
    if entry.constant is not None and entry.constant[:1].isdigit():
        constant = units.parse(entry.constant, "W", f"{where}.constant")
    if not terms and constant is None and not entry.static:
        raise bad_value(where, "terms, a constant or static", "a component nothing drives")
    return ChipComponent(
        entry.name,
        entry.rail,
        entry.clocked,
        constant,
        entry.static,
        terms,
    )


def _name_custom_events(
    dialect: SimulatorDialect,
    components: Iterable[ChipComponent],
) -> dict[str, str]:
    """Return the custom event of each counter that the dialect does not have, in order."""
    columns = {counter.column for counter in dialect_counters(dialect)}
    own_counters: list[str] = []
    for component in components:
        for counter in component.terms:
            if counter not in columns and counter not in own_counters:
                own_counters.append(counter)
    if len(own_counters) > len(CUSTOM_EVENTS):
        expectation = f"at most {len(CUSTOM_EVENTS)} counters of your own"
        raise bad_value("components", expectation, f"{len(own_counters)}")
    return dict(zip(own_counters, CUSTOM_EVENTS, strict=False))
