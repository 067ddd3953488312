"""Architecture files of the component model and the simulator's configuration.

An architecture file holds McPAT-style parameters, scaling factors of counters and static powers: as
GPUWattch or AccelWattch XML, or in our YAML form. ``parameters.csv`` lists the parameters of the
GPUWattch manual (section 4.2, numbers 1 to 36) and the few more this model uses, each with its
place in the XML file, its kind and its range. Values keep the unit of the XML file, which the table
names. Files come from strangers: XML entities are refused, size and depth are bounded."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import (
    dataclass,
    field,
    fields,
)
from functools import cache
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import quoteattr

import msgspec

from wattcast.core import units
from wattcast.core.errors import (
    BadInput,
    bad_value,
    clip_text,
    import_extra,
    nearest_names,
)
from wattcast.core.strict_files import (
    decode_text,
    decode_yaml,
    read_bytes,
    read_shipped_table,
)
from wattcast.core.whole_files import write_whole
from wattcast.lab.gpuwattch.bottom_up.technology import read_feature_nm
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, dialect_counters
from wattcast.power.component_power import STATIC_NAMES

ParameterValue = float | tuple[int, ...]

MAX_XML_BYTE = 4 << 20
MAX_XML_DEPTH = 32
MAX_XML_ELEMENTS = 20_000
MAX_SIMULATOR_CONFIG_BYTE = 1 << 20
_MAX_TEXT = 4096
_MOST_COMPLAINTS = 8
_ZERO_C_IN_K = 273.15
# unit in the XML file -> unit in the YAML file and its size
_UNITS = {
    "nm": ("m", 1e-9),
    "MHz": ("Hz", 1e6),
    "K": ("C", 1.0),
    "W": ("W", 1.0),
    "J": ("J", 1.0),
    "V": ("V", 1.0),
}
_TECHNOLOGY_NODE = "core_tech_node"
_WRITE_BACK_STAGE = 10  # EX_WB in -gpgpu_pipeline_widths
_SAMPLE_OPTIONS = (
    "gpu_stat_sample_frequency",
    "gpu_stat_sample_freq",
    "gpgpu_runtime_stat",
)  # the last is today's


@dataclass(frozen=True)
class ArchitectureParameter:
    """One row of ``parameters.csv``."""

    index: int | None  # in the manual's table
    name: str
    component: str
    kind: str  # integer, number, integers:N
    minimum: float
    maximum: float
    needed: str  # by both, gpuwattch, or nobody
    unit: str
    manual: str  # the manual's spelling, where it is another
    meaning: str

    def read(self, text: str) -> ParameterValue:
        """Return the value written as ``text``, or raise BadInput that says what is wrong with it.

        A technology node may also be the name of a process, such as ``TSMC 12 nm FFN``."""
        if self.name == _TECHNOLOGY_NODE and _parse_number(text) is None:
            return read_feature_nm(text, self.where)
        many = self.kind.startswith("integers")
        is_whole = self.kind != "number"
        count = int(self.kind.partition(":")[2]) if many else 1
        numbers = [_parse_number(piece) for piece in (text.split(",") if many else [text])]
        parsed = [n for n in numbers if n is not None and (not is_whole or n == int(n))]
        if not len(parsed) == len(numbers) == count:
            expectation = (
                f"{count} whole numbers" if many else "a whole number" if is_whole else "a number"
            )
            raise bad_value(self.where, expectation, text)
        if not all(self.minimum <= n <= self.maximum for n in parsed):
            unit = f" {self.unit}" if self.unit else ""
            raise bad_value(self.where, f"{self.minimum:g} to {self.maximum:g}{unit}", text)
        return tuple(int(n) for n in parsed) if many else parsed[0]

    @property
    def where(self) -> str:
        """Place and meaning, such as ``system.core0/warp_size (threads of a warp)``."""
        return f"{self.component}/{self.name} ({self.meaning.split(';')[0]})"


@cache
def known_parameters() -> dict[str, ArchitectureParameter]:
    """Return every known parameter by its name."""
    rows: list[dict[str, Any]] = [*read_shipped_table("wattcast.lab.gpuwattch", "parameters.csv")]
    rows = [row | {"index": row["index"] or None} for row in rows]
    return {row["name"]: msgspec.convert(row, ArchitectureParameter, strict=False) for row in rows}


@dataclass(frozen=True)
class ChipArchitecture:
    """The checked contents of an architecture file."""

    name: str
    dialect: SimulatorDialect
    parameters: Mapping[str, ParameterValue]
    scaling: Mapping[str, float]  # by name in the file; absent ones are 1 in AccelWattch
    static: Mapping[str, float] = field(default_factory=dict)  # AccelWattch's static_* watts
    other: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict
    )  # component -> param -> text, kept as is
    stats: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)  # component id -> name, in file order
    comments: Mapping[str, str] = field(
        default_factory=dict
    )  # parameter ("": the file) -> comment to write into XML

    def __post_init__(self) -> None:
        needed = [
            p for p in known_parameters().values() if p.needed in ("both", self.dialect.value)
        ]
        complaints = [f"{p.where} is missing." for p in needed if p.name not in self.parameters]
        if self.dialect is SimulatorDialect.GPUWATTCH:
            complaints += [
                f"scaling factor {s} is missing."
                for s in scaling_names(self.dialect)
                if s not in self.scaling
            ]
        elif not self.static:
            complaints.append("the static_* powers of AccelWattch are missing.")
        else:
            complaints += [f"{s} is missing." for s in STATIC_NAMES if s not in self.static]
        wild = {name: factor for name, factor in self.scaling.items() if not 0 <= factor < 1e9}
        complaints += [
            f"scaling factor {name} must be zero or more, got {factor:g}."
            for name, factor in wild.items()
        ]
        for name, value in self.parameters.items():
            unused = name == "L2_config" and self.parameters.get("number_of_L2s") == 0
            if name.endswith("_config") and isinstance(value, tuple) and not unused:
                capacity, block, ways, banks = value[:4]
                if capacity == 0 or block == 0 or banks == 0:
                    complaints.append(
                        f"{name}: capacity, block and banks must be above zero, got {value}."
                    )
                elif capacity % block or capacity < block * max(ways, 1):
                    sets = f"whole sets of {ways} blocks of {block} bytes"
                    complaints.append(f"{name}: {capacity} bytes do not hold {sets}.")
        if complaints:
            more = len(complaints) - _MOST_COMPLAINTS
            shown = " ".join(complaints[:_MOST_COMPLAINTS]) + (
                f" And {more} more." if more > 0 else ""
            )
            raise BadInput(f"{self.name}: {shown}")

    def number(self, name: str) -> float:
        """Return a scalar parameter that is in the file."""
        value = self.parameters[name]
        assert isinstance(value, (int, float))
        return float(value)

    def scaling_of(self, name: str) -> float:
        """Return a counter's scaling factor, 1 where the file leaves it out."""
        return self.scaling.get(name, 1.0)

    def all_scaling(self) -> dict[str, float]:
        """Return the scaling factor of every counter of the dialect."""
        return {name: self.scaling_of(name) for name in scaling_names(self.dialect)}


def scaling_names(dialect: SimulatorDialect) -> tuple[str, ...]:
    """Return the scaling factors of a dialect's counters in their order."""
    return tuple(c.scaling for c in dialect_counters(dialect))


def read_architecture(path: Path) -> ChipArchitecture:
    """Read an architecture file, YAML or XML by its suffix; an XML file's dialect is found from its
    parameters.
    """
    data = read_bytes(path, MAX_XML_BYTE)
    if path.suffix.lower() in (".yaml", ".yml"):
        return _parse_yaml(data, path.name)
    return parse_xml_architecture(data, path.name)


def write_architecture(architecture: ChipArchitecture, path: Path) -> None:
    """Write an architecture as XML or YAML, by the suffix."""
    if path.suffix.lower() not in (".yaml", ".yml"):
        write_whole(path, format_xml_architecture(architecture))
        return
    import yaml

    def text(
        parameter: ArchitectureParameter, value: ParameterValue
    ) -> str | float | int | list[int]:
        if isinstance(value, tuple):
            return list(value)
        if not parameter.unit:
            return int(value) if value == int(value) else value
        if parameter.unit == "nm":
            return f"{value:.12g} nm"
        unit, size = _UNITS[parameter.unit]
        return units.show(
            value - _ZERO_C_IN_K if parameter.unit == "K" else value * size, unit, digits=12
        )

    parameters = known_parameters()
    plain = {
        "wattcast": "architecture",
        "name": architecture.name,
        "dialect": architecture.dialect.value,
        "parameters": {
            name: text(parameters[name], value) for name, value in architecture.parameters.items()
        },
        "scaling": dict(architecture.scaling),
        "static": {name: f"{value!r} W" for name, value in architecture.static.items()},
        "other": msgspec.to_builtins(architecture.other),
        "stats": msgspec.to_builtins(architecture.stats),
        "titles": dict(architecture.titles),
    }
    filled = {key: value for key, value in plain.items() if value}
    dumped = yaml.safe_dump(
        filled,
        sort_keys=False,
        default_flow_style=None,
        width=118,
        allow_unicode=True,
    )
    write_whole(path, str(dumped).encode())


def make_architecture(
    name: str,
    params: Mapping[str, Mapping[str, str]],
    stats: Mapping[str, Mapping[str, str]] | None = None,
    titles: Mapping[str, str] | None = None,
) -> ChipArchitecture:
    """Check the texts of a file (component id -> parameter -> text) and return them as an
    architecture.
    """
    parameters = known_parameters()
    factors = {name for dialect in SimulatorDialect for name in scaling_names(dialect)}
    values: dict[str, ParameterValue] = {}
    scaling: dict[str, float] = {}
    static: dict[str, float] = {}
    other_texts: dict[str, dict[str, str]] = {}
    for component, key, text in (
        (c, key, text) for c, texts in params.items() for key, text in texts.items()
    ):
        where = f"{name}: {component}/{key}"
        is_static = key.startswith("static_")
        if key in parameters and parameters[key].component == component:
            try:
                values[key] = parameters[key].read(text)
            except BadInput as error:
                raise BadInput(f"{name}: {error}") from None
        elif component == "system" and (key in factors or is_static):
            if is_static and key not in STATIC_NAMES:
                close = [f", such as {near}" for near in nearest_names(key, STATIC_NAMES)]
                raise bad_value(
                    where, f"one of AccelWattch's static powers{''.join(close[:1])}", key
                )
            number = _parse_number(text)
            if number is None:
                raise bad_value(where, "a number", clip_text(text))
            (static if is_static else scaling)[key] = number
        else:
            other_texts.setdefault(component, {})[key] = text
    is_accelwattch = any(key.startswith("static_") for key in params.get("system", {}))
    dialect = SimulatorDialect.ACCELWATTCH if is_accelwattch else SimulatorDialect.GPUWATTCH
    return ChipArchitecture(
        name, dialect, values, scaling, static, other_texts, stats or {}, titles or {}
    )


def _parse_number(text: str) -> float | None:
    """Return a number as C reads it: ``3.8475e-8f`` is one; ``nan``, ``1_000`` and ``1e400`` are
    not.
    """
    match = re.fullmatch(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)[fF]?\s*", text[:64])
    number = float(match[1]) if match else math.inf
    return number if math.isfinite(number) else None


def parse_xml_architecture(data: bytes, name: str) -> ChipArchitecture:
    """Read an architecture from the bytes of a GPUWattch or AccelWattch XML file; entities are
    refused.
    """
    why = "reading XML needs defusedxml", "component"
    etree = import_extra("defusedxml.ElementTree", *why)
    common = import_extra("defusedxml.common", *why)
    # some files carry comments before the declaration, which XML does not allow
    head = re.match(rb"\s*(?:<!--(?:(?!-->).){0,65536}-->\s*)+(?=<\?xml)", data, re.DOTALL)
    try:
        root = etree.fromstring(data[head.end() :] if head else data, forbid_dtd=True)
    except common.DefusedXmlException as error:
        raise BadInput(
            f"{name}: entities and document types are not read ({type(error).__name__})."
        ) from None
    except (etree.ParseError, LookupError, ValueError) as error:
        raise BadInput(
            f"{name}: not valid XML ({clip_text(str(error))}). Is the file complete?"
        ) from None
    tables: dict[str, dict[str, dict[str, str]]] = {"param": {}, "stat": {}}
    titles: dict[str, str] = {}
    count = itertools.count(1)

    def read_attribute(element: Any, key: str) -> str:
        value = element.get(key)
        if value is None or len(value) > _MAX_TEXT:
            expectation = (
                f"<{clip_text(element.tag)}> with {key!r} of at most {_MAX_TEXT} characters"
            )
            raise bad_value(name, expectation, str(value))
        return str(value)

    def visit(
        element: Any,
        component: str,
        depth: int,
    ) -> None:
        if depth > MAX_XML_DEPTH or next(count) > MAX_XML_ELEMENTS:
            raise bad_value(
                name, f"at most {MAX_XML_DEPTH} levels and {MAX_XML_ELEMENTS} elements", "more"
            )
        if element.tag == "component":
            component = read_attribute(element, "id")
            titles.setdefault(component, element.get("name", ""))
        elif element.tag in tables and component:
            key = read_attribute(element, "name")
            value = read_attribute(element, "value")
            previous = tables[element.tag].setdefault(component, {}).setdefault(key, value)
            if previous != value:
                raise bad_value(
                    f"{name}: {component}/{key}", "one value", f"{previous} and {value}"
                )
        else:
            raise bad_value(name, "components with params and stats", f"<{clip_text(element.tag)}>")
        for child in element:
            visit(child, component, depth + 1)

    visit(root, "", 1)
    if "system" not in tables["param"]:
        raise bad_value(
            name, "a McPAT component tree with a component 'system'", ", ".join(titles) or "none"
        )
    return make_architecture(name, tables["param"], tables["stat"], titles)


def architecture_texts(architecture: ChipArchitecture) -> dict[str, dict[str, str]]:
    """Return every parameter as text by component, as ``make_architecture`` takes them."""
    parameters = known_parameters()
    params: dict[str, dict[str, str]] = {"system": {}}
    for key, value in architecture.parameters.items():
        params.setdefault(parameters[key].component, {})[key] = _format_parameter(value)
    for key, number in {**architecture.scaling, **architecture.static}.items():
        params["system"][key] = _format_parameter(number)
    for component, inside in architecture.other.items():
        params.setdefault(component, {}).update(inside)
    return params


def format_xml_architecture(architecture: ChipArchitecture) -> bytes:
    """Return the architecture as an XML file that a simulator reads; comments of a file that was
    read are lost.
    """
    params = architecture_texts(architecture)
    comments = architecture.comments
    ids = list(
        dict.fromkeys(["root", "system", *architecture.titles, *params, *architecture.stats])
    )
    parents = {component: component.rpartition(".")[0] for component in ids} | {
        "root": "",
        "system": "root",
    }
    lines = [
        '<?xml version="1.0" ?>',
        *(f"<!-- {comments[key].replace('--', '-')} -->" for key in ("",) if key in comments),
    ]

    def write(component: str, pad: str) -> None:
        title = architecture.titles.get(component) or component.rpartition(".")[2]
        lines.append(f"{pad}<component id={quoteattr(component)} name={quoteattr(title)}>")
        for tag, table in (("param", params), ("stat", architecture.stats)):
            for key, value in table.get(component, {}).items():
                note = f" <!-- {comments[key]} -->" if key in comments and tag == "param" else ""
                lines.append(
                    f"{pad}\t<{tag} name={quoteattr(key)} value={quoteattr(value)}/>{note}"
                )
        for child in ids:
            if parents[child] == component and child != component:
                write(child, pad + "\t")
        lines.append(f"{pad}</component>")

    write("root", "")
    return ("\n".join(lines) + "\n").encode()


def _format_parameter(value: ParameterValue) -> str:
    return ",".join(str(v) for v in value) if isinstance(value, tuple) else f"{value:.17g}"


class _ArchitectureFile(msgspec.Struct, forbid_unknown_fields=True):
    wattcast: Literal["architecture"]
    name: str
    dialect: SimulatorDialect
    parameters: dict[str, str | float | int | list[int]]
    scaling: dict[str, float | int]
    static: dict[str, str] = {}
    other: dict[str, dict[str, str]] = {}
    stats: dict[str, dict[str, str]] = {}
    titles: dict[str, str] = {}


def _parse_yaml(data: bytes, where: str) -> ChipArchitecture:
    """Read our YAML form; parameters may have the manual's own spelling."""
    file = decode_yaml(data, _ArchitectureFile, where)

    parameters = known_parameters()
    spelled = {p.manual: p.name for p in parameters.values() if p.manual}
    params: dict[str, dict[str, str]] = {"system": {}}
    for written, value in file.parameters.items():
        name = spelled.get(written, written)
        if name not in parameters:
            raise bad_value(
                f"{where}: parameters.{name}", f"one of {len(parameters)} known parameters", name
            )
        here = f"{where}: parameters.{name}"
        of = parameters[name].unit
        if isinstance(value, list):
            read: ParameterValue = tuple(value)
        elif of:
            unit, size = _UNITS[of]
            if name == _TECHNOLOGY_NODE and isinstance(value, str):
                number = 1e-9 * read_feature_nm(value, here)
            else:
                number = units.parse(value, unit, here)
            number = number + _ZERO_C_IN_K if of == "K" else number / size
            read = float(f"{number:.12g}")  # 1e-9 and 273.15 are not exact in binary
        elif isinstance(value, str):
            raise bad_value(here, "a number", value)
        else:
            read = float(value)
        params.setdefault(parameters[name].component, {})[name] = _format_parameter(read)
    params["system"] |= {name: f"{value!r}" for name, value in file.scaling.items()}
    for name, text in file.static.items():
        params["system"][name] = repr(units.parse(text, "W", f"{where}: static.{name}"))
    for component, inside in file.other.items():
        params.setdefault(component, {}).update(inside)
    architecture = make_architecture(file.name, params, file.stats, file.titles)
    if architecture.dialect != file.dialect:
        raise bad_value(
            f"{where}: dialect", f"{architecture.dialect}, as its powers say", file.dialect.value
        )
    return architecture


@dataclass(frozen=True)
class SteadyStateDefinition:
    """A region is steady while each sample is nearer than ``deviation_w`` to the region's mean so
    far.
    """

    deviation_w: float = 8.0
    minimum_sample: int = 4  # a region needs more than this many

    @classmethod
    def read(
        cls,
        text: str,
        where: str = "steady_state_definition",
    ) -> SteadyStateDefinition:
        """Read ``"8:4"``: the allowed deviation in watts and the least number of samples."""
        deviation, colon, least = text.partition(":")
        try:
            definition = cls(float(deviation), int(least))
        except ValueError:
            raise bad_value(where, "deviation:samples, such as '8:4'", text) from None
        if not (
            colon
            and 0 < definition.deviation_w < 1e6
            and 0 <= definition.minimum_sample < 1_000_000_000
        ):
            raise bad_value(where, "a deviation above zero and a number of samples", text)
        return definition


@dataclass(frozen=True)
class SimulatorConfig:
    """The options of a simulator's configuration that the power model needs."""

    clock_hz: float | None = None  # core
    sm_count: int | None = None
    sample_cycle: int = 500
    power_simulation_enabled: bool = True
    power_trace_enabled: bool = True
    power_per_cycle_dump: bool = False
    steady_power_levels_enabled: bool = True
    steady: SteadyStateDefinition = SteadyStateDefinition()
    # warps that an SM can write back in a cycle, where only active lanes count
    commit_width: int | None = None
    schedulers: int | None = None  # of an SM


def read_simulator_config(path: Path) -> SimulatorConfig:
    """Read ``gpgpusim.config``; options that have nothing to do with power pass unread."""
    where = path.name
    try:
        words = shlex.split(
            decode_text(read_bytes(path, MAX_SIMULATOR_CONFIG_BYTE), where), comments=True
        )
    except ValueError as error:
        raise BadInput(f"{where}: a quote is left open ({error}).") from None
    options: dict[str, str] = {}  # the last of an option given twice counts, as in the simulator
    key = None
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():
            key = word.lstrip("-")
            options[key] = ""
        elif key is None:
            raise bad_value(where, "options such as '-power_simulation_enabled 1'", clip_text(word))
        elif not options[key]:
            options[key] = word

    def switch(option: str) -> bool:
        text = options.get(option, "0")
        if text not in ("0", "1"):
            raise bad_value(f"{where}: -{option}", "0 or 1", text)
        return text == "1"

    def whole(option: str, default: int) -> int:
        text = options.get(option, str(default))
        text = text.partition(":")[0] if option in _SAMPLE_OPTIONS else text  # {<freq>:<flag>}
        if not text.isdigit() or not 0 < int(text) <= 1_000_000_000:
            raise bad_value(f"{where}: -{option}", "a whole number above zero", text)
        return int(text)

    clock_hz = None
    sm_count = None
    if (domains := options.get("gpgpu_clock_domains")) is not None:
        mhz = _parse_number(domains.partition(":")[0])
        if mhz is None or not 0 < mhz <= 1e5:
            raise bad_value(
                f"{where}: -gpgpu_clock_domains", "core:interconnect:L2:DRAM in MHz", domains
            )
        clock_hz = mhz * 1e6
    if "gpgpu_n_clusters" in options:
        sm_count = whole("gpgpu_n_clusters", 1) * whole("gpgpu_n_cores_per_cluster", 1)
    schedulers = None
    if "gpgpu_num_sched_per_core" in options:
        schedulers = whole("gpgpu_num_sched_per_core", 1)
    widths = options.get("gpgpu_pipeline_widths", "").split(",")
    gated = options.get("gpgpu_clock_gated_lanes") == "1" and len(widths) > _WRITE_BACK_STAGE
    commit = widths[_WRITE_BACK_STAGE].strip() if gated else ""
    sample_cycle = next(
        (whole(option, 500) for option in _SAMPLE_OPTIONS if option in options), 500
    )
    switches = {
        item.name: switch(item.name) for item in fields(SimulatorConfig) if item.type == "bool"
    }
    definition = options.get("steady_state_definition") or "8:4"
    steady = SteadyStateDefinition.read(definition, f"{where}: -steady_state_definition")
    commit_width = int(commit) if commit.isdigit() and int(commit) else None
    return SimulatorConfig(
        clock_hz,
        sm_count,
        sample_cycle,
        steady=steady,
        commit_width=commit_width,
        schedulers=schedulers,
        **switches,
    )
