"""The models people know by name, and the architectures they are made of.

A catalogue model is a YAML file with the dimensions its makers published. An architecture is a
module in ``workload.models`` that many models share. It is imported when it is first needed, so
that a command that predicts one model imports one architecture."""

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
from wattcast.workload.picture_pipeline import PicturePipeline


class ModelKind(StrEnum):
    """What a model does with its input, which decides its phases and defaults."""

    LANGUAGE = "language"  # generates text token by token, with a cache
    ENCODER = "encoder"  # reads a text once
    VISION = "vision"  # reads or denoises pictures


@dataclass(frozen=True)
class ModelArchitecture:
    """A row of ``architectures.csv``: where the code of an architecture is, and what it can do."""

    kind: ModelKind
    module: str  # in ``workload.models``, with the two names below
    dims_name: str
    trace_name: str
    # Its trace knows the kernels of an inference engine; else they are fused as a compiler would
    engine: bool = False
    item: str = ""  # the word for one input of a batch, such as "picture"; empty: text
    # An encoder reads the prompt, and the decoder begins with a single start token
    encodes_prompt: bool = False

    @property
    def dims_class(self) -> Any:
        """The frozen dataclass that holds the dimensions of a model of this architecture."""
        return getattr(self._template, self.dims_name)

    @property
    def trace(self) -> Callable[..., Any]:
        """The function ``trace(dims, settings, program)``.

        It adds the sections of one pass under these ``PassSettings`` to a ``Program``.
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
    """The keys of a model's YAML file, which mean what they do in ``ModelSpec``."""

    title: str
    architecture: str
    source: str
    dims: dict[str, Any]
    note: str = ""
    quantization: str | None = None
    pipeline: PicturePipeline | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A model as its makers describe it."""

    name: str
    title: str  # as people write it, such as "Llama 3 8B"
    architecture: str  # a key of ``ARCHITECTURES``
    dims: Any  # its dimensions, of the architecture's ``dims_class``
    source: str  # paper or configuration that the dimensions are from
    note: str = ""  # what its dimensions leave out or add; predictions list it as an assumption
    # Recipe that its weights are published in, such as "mxfp4"; None: the format of computation
    quantization: str | None = None
    # Format of the cache that the checkpoint has scales for; None: that of activations
    kv_dtype: Dtype | None = None
    pipeline: PicturePipeline | None = None  # that makes whole pictures with a denoiser

    @property
    def template(self) -> ModelArchitecture:
        """Its architecture."""
        return ARCHITECTURES[self.architecture]

    @property
    def kind(self) -> ModelKind:
        """What it does with its input."""
        return self.template.kind


@cache
def list_models() -> tuple[str, ...]:
    """Return the names of all catalogue models, sorted."""
    names = (path.name for path in _CATALOGUE.iterdir() if path.name.endswith(".yaml"))
    return tuple(sorted(name.removesuffix(".yaml") for name in names))


def models() -> list[ModelSpec]:
    """Return all catalogue models, in the order of their names.

    >>> import wattcast
    >>> [model.title for model in wattcast.models() if model.name == "llama3-8b"]
    ['Llama 3 8B']
    """
    return [load_model(name) for name in list_models()]


@cache
def load_model(name: str) -> ModelSpec:
    """Read the catalogue model with a name or an alias.

    Case, ``-``, ``_``, ``.`` and blanks do not matter. Some aliases are checkpoints of a model that
    were made for more or fewer positions: they get theirs.
    """
    aliases = load_aliases()
    model_of_alias = {alias: row["name"] for alias, row in aliases.items()}
    full_name = resolve_name("model", name, list_models(), model_of_alias)
    file_name = f"{full_name}.yaml"
    model = parse_model((_CATALOGUE / file_name).read_bytes(), file_name, full_name)

    positions_of_alias = {fold_name(alias): row["max_positions"] for alias, row in aliases.items()}
    max_positions = positions_of_alias.get(fold_name(name))
    if not max_positions:
        return model
    return replace(model, dims=replace(model.dims, max_positions=int(max_positions)))


def parse_model(
    data: bytes,
    where: str,
    name: str,
) -> ModelSpec:
    """Parse the YAML of a model called ``name``; an error begins with ``where`` and the bad key."""
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
    return replace(spec, quantization=file.quantization, pipeline=file.pipeline)


def make_model(
    name: str,
    title: str,
    architecture: str,
    dims: dict[str, Any],
    source: str,
    note: str = "",
) -> ModelSpec:
    """Make a model from plain dimensions, each checked against those of the architecture.

    ``architecture`` is a key of ``ARCHITECTURES``, which the caller has checked.
    """
    dims_class = ARCHITECTURES[architecture].dims_class
    dimension_names = [item.name for item in fields(dims_class)]
    check_names(f"dimension of {name}", dims, dimension_names)
    model_dims: Any = convert_plain(dims, dims_class, name)
    check_dimensions(architecture, model_dims, name)
    return ModelSpec(
        name,
        title,
        architecture,
        model_dims,
        source,
        note,
    )


@cache
def load_aliases() -> dict[str, dict[str, str]]:
    """Return the rows of ``aliases.csv`` by alias: other names of models, such as the hub's.

    A row has the model's ``name``. Its ``max_positions`` is empty where the checkpoint takes as
    many positions as the model.
    """
    return {
        row["alias"]: row
        for row in read_shipped_table("wattcast.workload", "catalogue", "aliases.csv")
    }
