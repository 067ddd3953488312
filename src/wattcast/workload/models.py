"""Named models: published dimensions with their source, from ``catalogue/*.yaml``."""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import msgspec

from wattcast import naming
from wattcast.errors import bad_value, unknown_name
from wattcast.files import convert, from_yaml
from wattcast.workload.architectures import TABLE, Architecture, Kind


class _ModelFile(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    architecture: str
    source: str
    dims: dict[str, Any]
    note: str = ""


@dataclass(frozen=True)
class Model:
    """A model as its makers describe it."""

    name: str
    title: str
    architecture: str
    dims: Any  # the frozen dataclass of the architecture
    source: str
    note: str = ""

    @property
    def template(self) -> Architecture:
        return TABLE[self.architecture]

    @property
    def kind(self) -> Kind:
        return self.template.kind


def names() -> list[str]:
    """Catalogue models, by name."""
    return list(_names())


@cache
def _names() -> tuple[str, ...]:
    return tuple(
        sorted(path.name.removesuffix(".yaml") for path in _folder().iterdir() if path.name.endswith(".yaml"))
    )


@cache
def load(name: str) -> Model:
    """The catalogue model called ``name`` (case, ``-``, ``_``, ``.`` and blanks do not matter)."""
    known = naming.resolve("model", name, names(), aliases())
    return read_model((_folder() / f"{known}.yaml").read_bytes(), f"{known}.yaml", known)


def read_model(data: bytes, where: str, name: str) -> Model:
    """YAML -> Model; a bad key is named."""
    file = from_yaml(data, _ModelFile, where)
    if file.architecture not in TABLE:
        raise unknown_name(f"architecture in {where}", file.architecture, TABLE, f"Known: {', '.join(TABLE)}.")
    return make(name, file.title, file.architecture, file.dims, file.source, file.note)


def make(name: str, title: str, architecture: str, dims: dict[str, Any], source: str, note: str = "") -> Model:
    """A model from plain dimensions, each checked against what the architecture knows."""
    kind = TABLE[architecture].dims
    known = [item.name for item in fields(kind)]
    for key in dims:
        if key not in known:
            raise unknown_name(f"dimension of {name}", key, known, f"Known: {', '.join(known)}.")
    built: Any = convert(dims, kind, name)
    for item in fields(kind):
        value = getattr(built, item.name)
        if isinstance(value, int) and not isinstance(value, bool) and value < 0:
            raise bad_value(f"{name}: {item.name}", "zero or more", value)
    return Model(name, title, architecture, built, source, note)


@cache
def aliases() -> dict[str, str]:
    """Other names people use, such as those of the Hugging Face hub."""
    text = (_folder() / "aliases.csv").read_text(encoding="utf-8")
    return {row["alias"]: row["name"] for row in csv.DictReader(text.splitlines())}


def _folder() -> Traversable:
    return files("wattcast.workload").joinpath("catalogue")
