"""The models people know by name, and the architectures they are made of.

A catalogue model is a YAML file with the dimensions its makers published. An architecture is a
template in ``workload.models``, imported when it is first needed, so that a cold prediction pays
for one only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import (
    dataclass,
    fields,
    replace,
)
from enum import StrEnum
from functools import cache
from importlib import import_module
from typing import Any

import msgspec

from wattcast.core import (
    Dtype,
    check_names,
    files,
)
from wattcast.core.errors import fold_name, resolve_name
from wattcast.core.strict_files import (
    convert_plain,
    decode_yaml,
    read_shipped_table,
)
from wattcast.workload.dimension_limits import check_dimensions


class ModelKind(StrEnum):
    """The input of a model, which decides its phases and defaults."""

    LANGUAGE = "language"  # generates token by token, with a cache
    ENCODER = "encoder"  # reads a text once
    VISION = "vision"  # reads or denoises pictures


@dataclass(frozen=True)
class ModelArchitecture:
    """A template: its module in ``workload.models``, the names of its dimensions and of its trace
    function.
    """

    kind: ModelKind
    module: str
    dims_name: str
    trace_name: str
    engine: bool = False  # whether the template itself knows how an inference engine runs it
    item: str = ""  # what a batch is counted in where it is not text
    source: bool = False  # whether an encoder reads the prompt and a decoder begins with one token

    @property
    def dims(self) -> Any:
        """The frozen dataclass of its dimensions."""
        return getattr(self._template, self.dims_name)

    @property
    def trace(self) -> Callable[..., Any]:
        """The function ``trace(dims, settings, program)``, which adds the sections of one pass to a
        program.
        """
        trace: Callable[..., Any] = getattr(self._template, self.trace_name)
        return trace

    @property
    def _template(self) -> Any:
        return import_module(f"wattcast.workload.models.{self.module}")


_CATALOGUE = files("wattcast.workload").joinpath("catalogue")
ARCHITECTURES = {
    row["name"]: msgspec.convert(row, ModelArchitecture, strict=False)
    for row in read_shipped_table("wattcast.workload", "architectures.csv")
}


class _ModelFile(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    architecture: str
    source: str
    dims: dict[str, Any]
    note: str = ""
    quantization: str | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A model as its makers describe it."""

    name: str
    title: str
    architecture: str
    dims: Any  # the frozen dataclass of the architecture
    source: str
    note: str = ""
    quantization: str | None = (
        None  # recipe that its weights are published in; None: as wide as they are computed in
    )
    kv_dtype: Dtype | None = (
        None  # cache that it is published with scales for; None: as wide as activations
    )

    @property
    def template(self) -> ModelArchitecture:
        return ARCHITECTURES[self.architecture]

    @property
    def kind(self) -> ModelKind:
        return self.template.kind


@cache
def list_models() -> tuple[str, ...]:
    """Return the names of all catalogue models, sorted."""
    names = (path.name for path in _CATALOGUE.iterdir() if path.name.endswith(".yaml"))
    return tuple(sorted(name.removesuffix(".yaml") for name in names))


def models() -> list[ModelSpec]:
    """Return all catalogue models, by name.

    >>> import wattcast
    >>> [model.title for model in wattcast.models() if model.name == "llama3-8b"]
    ['Llama 3 8B']
    """
    return [load_model(name) for name in list_models()]


@cache
def load_model(name: str) -> ModelSpec:
    """Read the catalogue model called ``name`` (case, ``-``, ``_``, ``.`` and blanks do not
    matter).
    """
    aliases = load_aliases()
    full_name = resolve_name(
        "model", name, list_models(), {alias: row["name"] for alias, row in aliases.items()}
    )
    model = parse_model(
        (_CATALOGUE / f"{full_name}.yaml").read_bytes(), f"{full_name}.yaml", full_name
    )
    positions = {fold_name(alias): row["max_positions"] for alias, row in aliases.items()}.get(
        fold_name(name)
    )
    return (
        replace(model, dims=replace(model.dims, max_positions=int(positions)))
        if positions
        else model
    )


def parse_model(
    data: bytes,
    where: str,
    name: str,
) -> ModelSpec:
    """Parse a model's YAML; an error names the bad key."""
    file = decode_yaml(data, _ModelFile, where)
    check_names(f"architecture in {where}", file.architecture, ARCHITECTURES)
    spec = make_model(
        name,
        file.title,
        file.architecture,
        file.dims,
        file.source,
        file.note,
    )
    return replace(spec, quantization=file.quantization)


def make_model(
    name: str,
    title: str,
    architecture: str,
    dims: dict[str, Any],
    source: str,
    note: str = "",
) -> ModelSpec:
    """Make a model from plain dimensions, each checked against those of the architecture."""
    kind = ARCHITECTURES[architecture].dims
    dimensions = [item.name for item in fields(kind)]
    check_names(f"dimension of {name}", dims, dimensions)
    built: Any = convert_plain(dims, kind, name)
    check_dimensions(architecture, built, name)
    return ModelSpec(
        name,
        title,
        architecture,
        built,
        source,
        note,
    )


@cache
def load_aliases() -> dict[str, dict[str, str]]:
    """Read other names people use, such as those of the Hugging Face hub.

    Each means a model, under ``name``, and has ``max_positions`` where it was made for others than
    that."""
    return {
        row["alias"]: row
        for row in read_shipped_table("wattcast.workload", "catalogue", "aliases.csv")
    }
