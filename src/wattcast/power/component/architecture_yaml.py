"""Our short YAML form of an architecture file <-> Architecture, with units beside the numbers.

Only ``parameters`` and ``scaling`` (and ``static`` for AccelWattch) matter to the model; ``other``, ``stats``
and ``titles`` keep what else an XML file held, so that a conversion there and back loses nothing.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from wattcast import units
from wattcast.activity.simulated import Dialect
from wattcast.errors import bad_value
from wattcast.files import from_yaml, read_bytes, write_whole
from wattcast.power.component.architecture import Architecture, Parameter, Value, from_texts, parameters
from wattcast.power.component.architecture_xml import MAX_XML_BYTE, read_xml, show_value, to_xml

FORM = "architecture"
_ZERO_C_IN_K = 273.15
# unit in the XML file -> unit in the YAML file and its size
_UNITS = {"nm": ("m", 1e-9), "MHz": ("Hz", 1e6), "K": ("C", 1.0), "W": ("W", 1.0), "J": ("J", 1.0), "V": ("V", 1.0)}


class _File(msgspec.Struct, forbid_unknown_fields=True):
    wattcast: str
    name: str
    dialect: Dialect
    parameters: dict[str, str | float | int | list[int]]
    scaling: dict[str, float | int]
    static: dict[str, str] = {}
    other: dict[str, dict[str, str]] = {}
    stats: dict[str, dict[str, str]] = {}
    titles: dict[str, str] = {}


def read_architecture(path: Path) -> Architecture:
    """An architecture file, XML or YAML, by its suffix."""
    if path.suffix.lower() in (".yaml", ".yml"):
        return read_yaml(path)
    return read_xml(path)


def write_architecture(architecture: Architecture, path: Path) -> None:
    """Write XML or YAML, by the suffix."""
    write_whole(path, to_yaml(architecture) if path.suffix.lower() in (".yaml", ".yml") else to_xml(architecture))


def read_yaml(path: Path) -> Architecture:
    """Our YAML form; a bad key is named with its path."""
    where = path.name
    file = from_yaml(read_bytes(path, MAX_XML_BYTE), _File, where)
    if file.wattcast != FORM:
        raise bad_value(f"{where}: wattcast", repr(FORM), file.wattcast)
    known = parameters()
    spelled = {p.manual: p.name for p in known.values() if p.manual}  # the manual's own spellings will do
    params: dict[str, dict[str, str]] = {"system": {}}
    for written, value in file.parameters.items():
        name = spelled.get(written, written)
        if name not in known:
            raise bad_value(f"{where}: parameters.{name}", f"one of {len(known)} known parameters", name)
        read = _read(known[name], value, f"{where}: parameters.{name}")
        params.setdefault(known[name].component, {})[name] = show_value(read)
    params["system"] |= {name: f"{value!r}" for name, value in file.scaling.items()}
    for name, text in file.static.items():
        params["system"][name] = repr(units.parse(text, "W", f"{where}: static.{name}"))
    for component, inside in file.other.items():
        params.setdefault(component, {}).update(inside)
    found = from_texts(file.name, params, file.stats, file.titles)
    if found.dialect != file.dialect:
        raise bad_value(f"{where}: dialect", f"{found.dialect}, as its powers say", file.dialect.value)
    return found


def to_yaml(architecture: Architecture) -> bytes:
    """The architecture in our YAML form."""
    import yaml

    known = parameters()
    plain = {
        "wattcast": FORM,
        "name": architecture.name,
        "dialect": architecture.dialect.value,
        "parameters": {name: _show(known[name], value) for name, value in architecture.parameters.items()},
        "scaling": dict(architecture.scaling),
        "static": {name: f"{value!r} W" for name, value in architecture.static.items()},
        "other": {component: dict(inside) for component, inside in architecture.other.items()},
        "stats": {component: dict(inside) for component, inside in architecture.stats.items()},
        "titles": dict(architecture.titles),
    }
    kept = {key: value for key, value in plain.items() if value}
    text = yaml.safe_dump(kept, sort_keys=False, default_flow_style=None, width=118, allow_unicode=True)
    return text.encode()


def _read(parameter: Parameter, value: str | float | int | list[int], where: str) -> Value:
    if isinstance(value, list):
        return tuple(value)
    if parameter.unit:
        unit, size = _UNITS[parameter.unit]
        number = units.parse(value, unit, where)
        number = number + _ZERO_C_IN_K if parameter.unit == "K" else number / size
        return float(f"{number:.12g}")  # 1e-9 and 273.15 are not exact in binary
    if isinstance(value, str):
        raise bad_value(where, "a number", value)
    return float(value)


def _show(parameter: Parameter, value: Value) -> str | float | int | list[int]:
    if isinstance(value, tuple):
        return list(value)
    if not parameter.unit:
        return int(value) if value == int(value) else value
    if parameter.unit == "nm":
        return f"{value:.12g} nm"
    unit, size = _UNITS[parameter.unit]
    return units.show(value - _ZERO_C_IN_K if parameter.unit == "K" else value * size, unit, digits=12)
