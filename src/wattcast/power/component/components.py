"""Which components there are and which counters drive them: ``gpuwattch.yaml``, ``accelwattch.yaml``, your own.

A new component is an entry in a file, not code. A counter it names that the dialect does not know becomes one
of the ``custom_1`` ... ``custom_8`` events, in the order of their first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path

import msgspec

from wattcast import units
from wattcast.activity.simulated import CUSTOM, Dialect, counters
from wattcast.errors import bad_value
from wattcast.files import from_yaml, read_bytes

FORM = "components"
_MAX_BYTE = 1 << 20


class Rail(StrEnum):
    """Which supply a component hangs on."""

    CORE = "core"  # dynamic power of the core rail: V²
    STATIC = "static"  # leakage of the core rail: V
    OWN = "own"  # does not see the core voltage


@dataclass(frozen=True)
class Component:
    """One component: what drives it, and how it follows voltage and clock."""

    name: str
    title: str
    rail: Rail
    clocked: bool
    constant: str | float | None  # a named constant, or watts
    static: bool
    terms: Mapping[str, tuple[str, ...] | float]  # counter -> signed names of energies, or J per count


@dataclass(frozen=True)
class ComponentSet:
    """The components of a model, in order, and the counters beyond the dialect's that they need."""

    dialect: Dialect
    compat: bool
    components: tuple[Component, ...]
    steady_leaves_out: tuple[str, ...]
    no_comma: tuple[str, ...]
    custom: Mapping[str, str]  # counter -> custom_1 ...


class _Component(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    title: str = ""
    rail: Rail = Rail.CORE
    clocked: bool = False
    constant: str | None = None
    static: bool = False
    mode: str = ""
    terms: dict[str, list[str] | str] = {}
    compat_terms: dict[str, list[str] | str] = {}


class _File(msgspec.Struct, forbid_unknown_fields=True):
    components: list[_Component]
    steady_leaves_out: list[str] = []
    no_comma: list[str] = []
    wattcast: str = FORM


def component_set(dialect: Dialect, compat: bool = False, more: Sequence[Path] = ()) -> ComponentSet:
    """The components of a dialect, then those of further files."""
    own = files("wattcast.power.component").joinpath(f"{dialect}.yaml").read_bytes()
    read = [(f"{dialect}.yaml", from_yaml(own, _File, f"{dialect}.yaml"))]
    for path in more:
        file = from_yaml(read_bytes(path, _MAX_BYTE), _File, path.name)
        if file.wattcast != FORM:
            raise bad_value(f"{path.name}: wattcast", repr(FORM), file.wattcast)
        read.append((path.name, file))
    found: dict[str, Component] = {}
    for where, file in read:
        for entry in file.components:
            if entry.mode not in ("", "correct"):
                raise bad_value(f"{where}: {entry.name}.mode", "'correct' or nothing", entry.mode)
            if entry.name in found:
                raise bad_value(f"{where}: {entry.name}", "a name of its own", "a component that is there already")
            if not (compat and entry.mode == "correct"):
                found[entry.name] = _component(entry, compat, where)
    base = read[0][1]
    every = tuple(found.values())
    return ComponentSet(
        dialect, compat, every, tuple(base.steady_leaves_out), tuple(base.no_comma), _custom(dialect, found)
    )


def _component(entry: _Component, compat: bool, where: str) -> Component:
    chosen = entry.compat_terms if compat and entry.compat_terms else entry.terms
    terms = {
        counter: tuple(energy)
        if isinstance(energy, list)
        else units.parse(energy, "J", f"{where}: {entry.name}.terms.{counter}")
        for counter, energy in chosen.items()
    }
    constant: str | float | None = entry.constant
    if entry.constant is not None and entry.constant[:1].isdigit():
        constant = units.parse(entry.constant, "W", f"{where}: {entry.name}.constant")
    if not terms and constant is None and not entry.static:
        raise bad_value(f"{where}: {entry.name}", "terms, a constant or static", "a component nothing drives")
    return Component(entry.name, entry.title or entry.name, entry.rail, entry.clocked, constant, entry.static, terms)


def _custom(dialect: Dialect, found: Mapping[str, Component]) -> dict[str, str]:
    known = {c.column for c in counters(dialect)}
    strange = list(dict.fromkeys(t for c in found.values() for t in c.terms if t not in known))
    if len(strange) > len(CUSTOM):
        raise bad_value("components", f"at most {len(CUSTOM)} counters of your own", f"{len(strange)}")
    return dict(zip(strange, CUSTOM, strict=False))
