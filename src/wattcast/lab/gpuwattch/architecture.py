"""Architecture files of the component model.

An architecture file is GPUWattch's or AccelWattch's XML: McPAT-style parameters, scaling factors of
counters and static powers. ``parameters.csv`` lists the parameters of the GPUWattch manual (section
4.2, numbers 1 to 36) and the few more this model uses, each with its place in the file, its kind,
its range and its unit. Files come from strangers: XML entities are refused, size and depth are
bounded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import msgspec

from wattcast.core.errors import (
    BadInput,
    bad_value,
    clip_text,
    import_extra,
    nearest_names,
)
from wattcast.core.strict_files import read_bytes, read_shipped_table
from wattcast.core.whole_files import write_whole
from wattcast.lab.gpuwattch.bottom_up.technology import read_feature_nm
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, dialect_counters
from wattcast.power.component_power import STATIC_NAMES

ParameterValue = float | tuple[int, ...]
# component -> parameter -> text, as the XML file holds them
ComponentTexts = Mapping[str, Mapping[str, str]]

MAX_XML_BYTE = 4 << 20
MAX_XML_DEPTH = 32
MAX_XML_ELEMENTS = 20_000
_MAX_TEXT = 4096
_MOST_COMPLAINTS = 8
_MOST_FACTOR = 1e9  # of a counter; calibrated ones lie below 1e4
_TECHNOLOGY_NODE = "core_tech_node"
# Comments before the declaration, which some files carry and XML does not allow
_LEADING_COMMENTS = re.compile(
    rb"\s*(?:<!--(?:(?!-->).){0,65536}-->\s*)+(?=<\?xml)",
    re.DOTALL,
)


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
    meaning: str

    def read(self, text: str) -> ParameterValue:
        """Return the value written as ``text``, or raise BadInput that says what is wrong with it.

        A technology node may also be the name of a process, such as ``TSMC 12 nm FFN``."""
        if self.name == _TECHNOLOGY_NODE and parse_number(text) is None:
            return read_feature_nm(text, self.where)
        is_list = self.kind.startswith("integers")
        pieces = text.split(",") if is_list else [text]
        numbers = self._parse_numbers(pieces)
        count = int(self.kind.partition(":")[2]) if is_list else 1
        if len(numbers) != len(pieces) or len(numbers) != count:
            raise bad_value(self.where, self._expected_kind(count), text)
        if not all(self.minimum <= number <= self.maximum for number in numbers):
            unit = f" {self.unit}" if self.unit else ""
            raise bad_value(self.where, f"{self.minimum:g} to {self.maximum:g}{unit}", text)
        if is_list:
            return tuple(int(number) for number in numbers)
        return numbers[0]

    def _parse_numbers(self, pieces: list[str]) -> list[float]:
        """Return the numbers of the pieces that are numbers of this kind."""
        numbers = []
        for piece in pieces:
            number = parse_number(piece)
            if number is None:
                continue
            if self.kind == "number" or number == int(number):
                numbers.append(number)
        return numbers

    def _expected_kind(self, count: int) -> str:
        if self.kind.startswith("integers"):
            return f"{count} whole numbers"
        return "a number" if self.kind == "number" else "a whole number"

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
    other: ComponentTexts = field(default_factory=dict)  # parameters that are kept as they are
    stats: ComponentTexts = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)  # component id -> name, in file order
    # parameter -> comment to write into the XML; the one of "" stands at the head of the file
    comments: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        complaints = [
            *self._list_missing(),
            *self._list_wild_factors(),
            *self._list_impossible_caches(),
        ]
        if not complaints:
            return
        shown = " ".join(complaints[:_MOST_COMPLAINTS])
        more = len(complaints) - _MOST_COMPLAINTS
        if more > 0:
            shown += f" And {more} more."
        raise BadInput(f"{self.name}: {shown}")

    def _list_missing(self) -> Iterator[str]:
        """Name the parameters, scaling factors and static powers that the dialect needs."""
        for parameter in known_parameters().values():
            is_needed = parameter.needed in ("both", self.dialect.value)
            if is_needed and parameter.name not in self.parameters:
                yield f"{parameter.where} is missing."
        if self.dialect is SimulatorDialect.GPUWATTCH:
            for name in scaling_names(self.dialect):
                if name not in self.scaling:
                    yield f"scaling factor {name} is missing."
        elif not self.static:
            yield "the static_* powers of AccelWattch are missing."
        else:
            for name in STATIC_NAMES:
                if name not in self.static:
                    yield f"{name} is missing."

    def _list_wild_factors(self) -> Iterator[str]:
        for name, factor in self.scaling.items():
            if not 0 <= factor < _MOST_FACTOR:
                yield f"scaling factor {name} must be zero or more, got {factor:g}."

    def _list_impossible_caches(self) -> Iterator[str]:
        """Name caches that are empty, or whose capacity is no whole number of sets."""
        for name, value in self.parameters.items():
            if not name.endswith("_config") or not isinstance(value, tuple):
                continue
            if name == "L2_config" and self.parameters.get("number_of_L2s") == 0:
                continue
            capacity, block, ways, banks = value[:4]
            if capacity == 0 or block == 0 or banks == 0:
                yield f"{name}: capacity, block and banks must be above zero, got {value}."
            elif capacity % block or capacity < block * max(ways, 1):
                sets = f"whole sets of {ways} blocks of {block} bytes"
                yield f"{name}: {capacity} bytes do not hold {sets}."

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
    return tuple(counter.scaling for counter in dialect_counters(dialect))


def read_architecture(path: Path) -> ChipArchitecture:
    """Read an architecture file; its parameters tell which simulator it is for."""
    return parse_xml_architecture(read_bytes(path, MAX_XML_BYTE), path.name)


def write_architecture(architecture: ChipArchitecture, path: Path) -> None:
    """Write an architecture as the XML file that its simulator reads."""
    if path.suffix.lower() != ".xml":
        raise bad_value("architecture file", "a name that ends in .xml", path.name)
    write_whole(path, format_xml_architecture(architecture))


def make_architecture(
    name: str,
    params: ComponentTexts,
    stats: ComponentTexts | None = None,
    titles: Mapping[str, str] | None = None,
) -> ChipArchitecture:
    """Check the texts of a file and return them as an architecture."""
    sorted_texts = _SortedTexts(name)
    for component, texts in params.items():
        for key, text in texts.items():
            sorted_texts.add(component, key, text)
    is_accelwattch = any(key.startswith("static_") for key in params.get("system", {}))
    return ChipArchitecture(
        name=name,
        dialect=SimulatorDialect.ACCELWATTCH if is_accelwattch else SimulatorDialect.GPUWATTCH,
        parameters=sorted_texts.parameters,
        scaling=sorted_texts.scaling,
        static=sorted_texts.static,
        other=sorted_texts.other,
        stats=stats or {},
        titles=titles or {},
    )


@dataclass
class _SortedTexts:
    """The parameters of a file, read and sorted by what they are."""

    name: str
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    scaling: dict[str, float] = field(default_factory=dict)
    static: dict[str, float] = field(default_factory=dict)
    other: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(
        self,
        component: str,
        key: str,
        text: str,
    ) -> None:
        """Read one parameter of a component; what the model does not know stays a text."""
        parameter = known_parameters().get(key)
        if parameter is not None and parameter.component == component:
            try:
                self.parameters[key] = parameter.read(text)
            except BadInput as error:
                raise BadInput(f"{self.name}: {error}") from None
        elif component == "system" and key.startswith("static_"):
            self.static[key] = self._read_static(key, text)
        elif component == "system" and key in _all_scaling_names():
            self.scaling[key] = self._read_number(key, text)
        else:
            self.other.setdefault(component, {})[key] = text

    def _read_static(
        self,
        key: str,
        text: str,
    ) -> float:
        if key not in STATIC_NAMES:
            expectation = "one of AccelWattch's static powers"
            close = nearest_names(key, STATIC_NAMES)
            if close:
                expectation += f", such as {close[0]}"
            raise bad_value(f"{self.name}: system/{key}", expectation, key)
        return self._read_number(key, text)

    def _read_number(
        self,
        key: str,
        text: str,
    ) -> float:
        number = parse_number(text)
        if number is None:
            raise bad_value(f"{self.name}: system/{key}", "a number", clip_text(text))
        return number


@cache
def _all_scaling_names() -> frozenset[str]:
    """Return the scaling factors of both dialects."""
    names: set[str] = set()
    for dialect in SimulatorDialect:
        names.update(scaling_names(dialect))
    return frozenset(names)


def parse_number(text: str) -> float | None:
    """Return a number as C reads it: ``3.8475e-8f`` is one; ``nan``, ``1_000`` and ``1e400`` are
    not.
    """
    match = re.fullmatch(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)[fF]?\s*", text[:64])
    number = float(match[1]) if match else math.inf
    return number if math.isfinite(number) else None


def parse_xml_architecture(data: bytes, name: str) -> ChipArchitecture:
    """Read an architecture from the bytes of a GPUWattch or AccelWattch XML file."""
    tree = _ComponentTree(name)
    tree.visit(_parse_xml(data, name))
    if "system" not in tree.params:
        raise bad_value(
            name,
            "a McPAT component tree with a component 'system'",
            ", ".join(tree.titles) or "none",
        )
    return make_architecture(name, tree.params, tree.stats, tree.titles)


def _parse_xml(data: bytes, name: str) -> Any:
    """Return the root element of an XML file; entities and document types are refused."""
    reason = "reading XML needs defusedxml"
    etree = import_extra("defusedxml.ElementTree", reason, "component")
    common = import_extra("defusedxml.common", reason, "component")
    comments = _LEADING_COMMENTS.match(data)
    if comments:
        data = data[comments.end() :]
    try:
        return etree.fromstring(data, forbid_dtd=True)
    except common.DefusedXmlException as error:
        raise BadInput(
            f"{name}: entities and document types are not read ({type(error).__name__})."
        ) from None
    except (etree.ParseError, LookupError, ValueError) as error:
        raise BadInput(
            f"{name}: not valid XML ({clip_text(str(error))}). Is the file complete?"
        ) from None


@dataclass
class _ComponentTree:
    """The components of an XML file, gathered element by element."""

    name: str
    params: dict[str, dict[str, str]] = field(default_factory=dict)
    stats: dict[str, dict[str, str]] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    element_count: int = 0

    def visit(
        self,
        element: Any,
        component: str = "",
        depth: int = 1,
    ) -> None:
        """Gather an element of ``component`` and all elements below it."""
        self.element_count += 1
        if depth > MAX_XML_DEPTH or self.element_count > MAX_XML_ELEMENTS:
            limits = f"at most {MAX_XML_DEPTH} levels and {MAX_XML_ELEMENTS} elements"
            raise bad_value(self.name, limits, "more")
        if element.tag == "component":
            component = self._read_attribute(element, "id")
            self.titles.setdefault(component, element.get("name", ""))
        elif element.tag == "param" and component:
            self._add_text(self.params, component, element)
        elif element.tag == "stat" and component:
            self._add_text(self.stats, component, element)
        else:
            expectation = "components with params and stats"
            raise bad_value(self.name, expectation, f"<{clip_text(element.tag)}>")
        for child in element:
            self.visit(child, component, depth + 1)

    def _add_text(
        self,
        table: dict[str, dict[str, str]],
        component: str,
        element: Any,
    ) -> None:
        key = self._read_attribute(element, "name")
        value = self._read_attribute(element, "value")
        previous = table.setdefault(component, {}).setdefault(key, value)
        if previous != value:
            where = f"{self.name}: {component}/{key}"
            raise bad_value(where, "one value", f"{previous} and {value}")

    def _read_attribute(
        self,
        element: Any,
        key: str,
    ) -> str:
        value = element.get(key)
        if value is None or len(value) > _MAX_TEXT:
            tag = clip_text(element.tag)
            expectation = f"<{tag}> with {key!r} of at most {_MAX_TEXT} characters"
            raise bad_value(self.name, expectation, str(value))
        return str(value)


def architecture_texts(architecture: ChipArchitecture) -> dict[str, dict[str, str]]:
    """Return every parameter as text by component, as ``make_architecture`` takes them."""
    parameters = known_parameters()
    params: dict[str, dict[str, str]] = {"system": {}}
    for key, value in architecture.parameters.items():
        params.setdefault(parameters[key].component, {})[key] = _format_parameter(value)
    for key, number in {**architecture.scaling, **architecture.static}.items():
        params["system"][key] = _format_parameter(number)
    for component, texts in architecture.other.items():
        params.setdefault(component, {}).update(texts)
    return params


def format_xml_architecture(architecture: ChipArchitecture) -> bytes:
    """Return the architecture as an XML file that a simulator reads.

    The comments of a file that was read are not kept; those in ``architecture.comments`` are
    written."""
    lines = ['<?xml version="1.0" ?>']
    if "" in architecture.comments:
        lines.append(f"<!-- {architecture.comments[''].replace('--', '-')} -->")
    params = architecture_texts(architecture)
    lines += _format_component(architecture, params, _find_parents(architecture, params), "root")
    return ("\n".join(lines) + "\n").encode()


def _find_parents(
    architecture: ChipArchitecture,
    params: ComponentTexts,
) -> dict[str, str]:
    """Return the parent of each component: ``system`` of ``system.core0``; the root has none."""
    parents: dict[str, str] = {"root": "", "system": "root"}
    for component in (*architecture.titles, *params, *architecture.stats):
        parents.setdefault(component, component.rpartition(".")[0])
    return parents


def _format_component(
    architecture: ChipArchitecture,
    params: ComponentTexts,
    parents: Mapping[str, str],
    component: str,
    pad: str = "",
) -> Iterator[str]:
    """Yield the lines of a component and, indented, of its children."""
    title = architecture.titles.get(component) or component.rpartition(".")[2]
    yield f"{pad}<component id={quoteattr(component)} name={quoteattr(title)}>"
    for key, value in params.get(component, {}).items():
        comment = architecture.comments.get(key)
        note = f" <!-- {comment} -->" if comment is not None else ""
        yield f"{pad}\t<param name={quoteattr(key)} value={quoteattr(value)}/>{note}"
    for key, value in architecture.stats.get(component, {}).items():
        yield f"{pad}\t<stat name={quoteattr(key)} value={quoteattr(value)}/>"
    for child, parent in parents.items():
        if parent == component and child != component:
            yield from _format_component(
                architecture,
                params,
                parents,
                child,
                pad + "\t",
            )
    yield f"{pad}</component>"


def _format_parameter(value: ParameterValue) -> str:
    if isinstance(value, tuple):
        return ",".join(str(number) for number in value)
    return f"{value:.17g}"
