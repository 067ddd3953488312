"""GPUWattch and AccelWattch XML <-> Architecture. The file is a stranger's: no entities, bounded size and depth."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

from wattcast.errors import BadInput, MissingTool, bad_value, clip
from wattcast.files import read_bytes
from wattcast.power.component.architecture import Architecture, Value, from_texts, parameters

MAX_XML_BYTE = 4 << 20
MAX_XML_DEPTH = 32
MAX_XML_ELEMENTS = 20_000
_MAX_TEXT = 4096


def read_xml(path: Path) -> Architecture:
    """An architecture file of GPUWattch or AccelWattch; the dialect is found from its parameters."""
    return from_xml(read_bytes(path, MAX_XML_BYTE), path.name)


def from_xml(data: bytes, name: str) -> Architecture:
    """Like :func:`read_xml`, from bytes."""
    params: dict[str, dict[str, str]] = {}
    stats: dict[str, dict[str, str]] = {}
    titles: dict[str, str] = {}
    open_ids: list[str] = []
    for event, element in _elements(data, name):
        if element.tag == "component":
            if event == "start":
                open_ids.append(_attribute(element, "id", name))
                titles.setdefault(open_ids[-1], element.get("name", ""))
            else:
                open_ids.pop()
        elif event == "start":
            if element.tag not in ("param", "stat") or not open_ids:
                raise bad_value(name, "components with params and stats", f"<{clip(element.tag)}>")
            table = params if element.tag == "param" else stats
            key, value = _attribute(element, "name", name), _attribute(element, "value", name)
            inside = table.setdefault(open_ids[-1], {})
            if inside.setdefault(key, value) != value:
                raise bad_value(f"{name}: {open_ids[-1]}/{key}", "one value", f"{inside[key]} and {value}")
    if "system" not in params:
        raise bad_value(name, "a McPAT component tree with a component 'system'", ", ".join(titles) or "none")
    return from_texts(name, params, stats, titles)


def to_xml(architecture: Architecture) -> bytes:
    """The architecture as an XML file a simulator reads; nothing is lost but comments."""
    params = _texts(architecture)
    ids = list(dict.fromkeys(["root", "system", *architecture.titles, *params, *architecture.stats]))
    lines = ['<?xml version="1.0" ?>']
    _write(lines, "root", ids, params, architecture, 0)
    return ("\n".join(lines) + "\n").encode()


def show_value(value: Value) -> str:
    """A value as XML files write it."""
    return ",".join(str(v) for v in value) if isinstance(value, tuple) else f"{value:.17g}"


def _elements(data: bytes, name: str) -> Any:
    """Start and end events of a safe parser, counted."""
    try:
        etree = importlib.import_module("defusedxml.ElementTree")
        common = importlib.import_module("defusedxml.common")
    except ImportError:
        raise MissingTool("reading XML needs defusedxml. Install it: pip install defusedxml") from None
    # some files carry comments before the declaration, which XML does not allow
    head = re.match(rb"\s*(?:<!--(?:(?!-->).){0,65536}-->\s*)+(?=<\?xml)", data, re.DOTALL)
    stream = io.BytesIO(data[head.end() :] if head else data)
    depth = count = 0
    try:
        for event, element in etree.iterparse(stream, events=("start", "end"), forbid_dtd=True):
            depth += 1 if event == "start" else -1
            count += event == "start"
            if depth > MAX_XML_DEPTH or count > MAX_XML_ELEMENTS:
                wanted = f"at most {MAX_XML_DEPTH} levels and {MAX_XML_ELEMENTS} elements"
                raise bad_value(name, wanted, "more")
            yield event, element
    except common.DefusedXmlException as error:
        raise BadInput(f"{name}: entities and document types are not read ({type(error).__name__}).") from None
    except etree.ParseError as error:
        raise BadInput(f"{name}: not valid XML ({clip(str(error))}). Is the file complete?") from None
    except (LookupError, ValueError) as error:
        raise BadInput(f"{name}: not valid XML ({clip(str(error))}).") from None


def _attribute(element: Any, key: str, name: str) -> str:
    value = element.get(key)
    if value is None or len(value) > _MAX_TEXT:
        raise bad_value(name, f"<{clip(element.tag)}> with {key!r} of at most {_MAX_TEXT} characters", str(value))
    return str(value)


def _texts(architecture: Architecture) -> Mapping[str, Mapping[str, str]]:
    """Component -> parameter -> text, everything put back in its place."""
    known = parameters()
    texts: dict[str, dict[str, str]] = {"system": {}}
    for key, value in architecture.parameters.items():
        texts.setdefault(known[key].component, {})[key] = show_value(value)
    for key, number in {**architecture.scaling, **architecture.static}.items():
        texts["system"][key] = show_value(number)
    for component, inside in architecture.other.items():
        texts.setdefault(component, {}).update(inside)
    return texts


def _write(
    lines: list[str],
    component: str,
    ids: list[str],
    params: Mapping[str, Mapping[str, str]],
    architecture: Architecture,
    depth: int,
) -> None:
    pad = "\t" * depth
    title = architecture.titles.get(component) or component.rpartition(".")[2]
    lines.append(f"{pad}<component id={quoteattr(component)} name={quoteattr(title)}>")
    for tag, table in (("param", params), ("stat", architecture.stats)):
        for key, value in table.get(component, {}).items():
            lines.append(f"{pad}\t<{tag} name={quoteattr(key)} value={quoteattr(value)}/>")
    for child in ids:
        if _parent(child) == component and child != component:
            _write(lines, child, ids, params, architecture, depth + 1)
    lines.append(f"{pad}</component>")


def _parent(component: str) -> str:
    if component == "system":
        return "root"
    return component.rpartition(".")[0] if component != "root" else ""
