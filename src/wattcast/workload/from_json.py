"""Workload JSON -> Graph and back, and the public EnergAIzer operator lists.

Our form is ``{"name": ..., "ops": [{"op": "linear", "m": ..., "count": 32}, ...]}``; an entry
``{"repeat": 32, "ops": [...]}`` is a block that runs as a whole, 32 times over. The EnergAIzer form
is a list of ``[query, kind]`` pairs. Both hold the same entry many times over, so each distinct
entry is decoded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from wattcast.dtypes import Dtype
from wattcast.errors import BadInput, bad_value, unknown_name
from wattcast.files import from_json, read_bytes, write_whole
from wattcast.workload.elementwise import functions
from wattcast.workload.graph import (
    Attention,
    Block,
    Bmm,
    Collective,
    Conv2d,
    Elementwise,
    Graph,
    LayerNorm,
    Linear,
    Operator,
    RmsNorm,
    Softmax,
)

MAX_OPS = 1_000_000
_KINDS: dict[str, type[Operator]] = {
    cls.kind: cls for cls in (Linear, Bmm, Conv2d, Attention, Softmax, LayerNorm, RmsNorm, Elementwise, Collective)
}
_NOT_IN_JSON = {"function"}  # the entry's "op" names an elementwise function
_RENAMED = {"collective": "kind"}


class _File(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    ops: list[msgspec.Raw]
    memory_byte: float | None = None
    assumptions: list[str] = []


class _Head(msgspec.Struct):
    op: str | None = None
    repeat: int | None = None


class _Block(msgspec.Struct, forbid_unknown_fields=True):
    repeat: int
    ops: list[msgspec.Raw]
    label: str = ""


def read(path: Path) -> Graph:
    """A workload file of either form; a list without a name takes the file's."""
    return parse(read_bytes(path), path.name)


def parse(data: bytes, where: str) -> Graph:
    """Workload JSON of either form -> Graph."""
    if data.lstrip()[:1] == b"[":
        return _energaizer(data, where)
    file = from_json(data, _File, where)
    if not file.ops:
        raise bad_value(where, "at least one operator", "none")
    blocks: list[Block] = []
    loose: list[Operator] = []
    for index, raw in enumerate(file.ops):
        at = f"{where}: ops[{index}]"
        entry = _entry(bytes(raw), at)
        if isinstance(entry, Operator):
            loose.append(entry)
            continue
        if loose:
            blocks.append(Block(tuple(loose)))
            loose = []
        ops = [_operator(bytes(inner), f"{at}.ops[{i}]") for i, inner in enumerate(entry.ops)]
        blocks.append(Block(tuple(ops), entry.repeat, entry.label))
    if loose:
        blocks.append(Block(tuple(loose)))
    if sum(len(block.ops) for block in blocks) > MAX_OPS:
        raise bad_value(where, f"at most {MAX_OPS} operators", "more")
    return Graph(file.name, tuple(blocks), file.memory_byte, tuple(file.assumptions))


def to_plain(graph: Graph) -> dict[str, Any]:
    """A graph as our workload JSON, ready for an encoder; :func:`parse` takes it back."""
    ops: list[dict[str, Any]] = []
    for block in graph.blocks:
        entries = [operator_to_plain(op) for op in block.ops]
        if block.repeat == 1 and not block.label:
            ops += entries
        else:
            ops.append({"repeat": block.repeat, "label": block.label, "ops": entries})
    plain: dict[str, Any] = {"name": graph.name, "ops": ops}
    if graph.memory_byte is not None:
        plain["memory_byte"] = graph.memory_byte
    if graph.assumptions:
        plain["assumptions"] = list(graph.assumptions)
    return plain


def write(graph: Graph, path: Path) -> None:
    """Save a graph as workload JSON, replacing the file only when the new one is whole."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(to_plain(graph)), indent=1) + b"\n")


def operator_to_plain(op: Operator) -> dict[str, Any]:
    """One entry of ``ops``; fields at their default are left out."""
    plain: dict[str, Any] = {"op": op.name if isinstance(op, Elementwise) else op.kind}
    for item in fields(op):
        value = getattr(op, item.name)
        keep = item.default is MISSING or value != item.default or item.name == "dtype"
        if item.name not in _NOT_IN_JSON and keep:
            plain[_RENAMED.get(item.name, item.name)] = value
    return plain


def _entry(raw: bytes, at: str) -> Operator | _Block:
    head = from_json(raw, _Head, at)
    if head.repeat is not None and head.op is None:
        return from_json(raw, _Block, at)
    return _operator(raw, at)


def _operator(raw: bytes, at: str) -> Operator:
    try:
        return _decoded(raw)
    except BadInput as error:
        raise type(error)(f"{at}: {error}") from None


@lru_cache(maxsize=65536)
def _decoded(raw: bytes) -> Operator:
    name = from_json(raw, _Head, "op").op
    if name is None:
        raise bad_value("op", "the operator's name", "none", f"Known: {', '.join(_KINDS)}, {', '.join(functions())}.")
    cls: Any
    given: dict[str, Any] = {}
    if name in functions():
        cls, given = Elementwise, {"function": name}
    elif name in _KINDS and name != "elementwise":
        cls = _KINDS[name]
    else:
        known = [*(kind for kind in _KINDS if kind != "elementwise"), *functions()]
        raise unknown_name("operator", name, known, f"Known: {', '.join(known)}.")
    entry = from_json(raw, _struct(cls), name)
    op: Operator = cls(
        **given, **{item.name: getattr(entry, item.name) for item in fields(cls) if item.name not in given}
    )
    return op


@lru_cache(maxsize=32)
def _struct(cls: type[Operator]) -> type[msgspec.Struct]:
    """A strict reader with the fields of an operator, made from its dataclass so the two cannot drift."""
    hints = get_type_hints(cls)
    wanted: list[Any] = [("op", str)]
    optional: list[Any] = []
    for item in fields(cls):
        if item.name in _NOT_IN_JSON:
            continue
        if item.default is MISSING:
            wanted.append((item.name, hints[item.name]))
        else:
            optional.append((item.name, hints[item.name], item.default))
    return msgspec.defstruct(cls.__name__, wanted + optional, forbid_unknown_fields=True, rename=_RENAMED)


def _energaizer(data: bytes, where: str) -> Graph:
    """A public EnergAIzer operator list; equal neighbours become one entry with a count."""
    entries = [bytes(raw) for raw in from_json(data, list[msgspec.Raw], where)]
    if not 1 <= len(entries) <= MAX_OPS:
        raise bad_value(where, f"from one to {MAX_OPS} operators", len(entries))
    ops = tuple(_counted(entries, where))
    note = (
        "EnergAIzer list: a product's longer role is not recorded, so for `gemm` with batch 1 dimN is read as "
        "tokens and dimM as out features; casts and copies it leaves out are not added"
    )
    return Graph(where.removesuffix(".json"), (Block(ops),), None, (note,))


def _counted(entries: list[bytes], where: str) -> Iterator[Operator]:
    index = 0
    for raw, group in groupby(entries):
        count = sum(1 for _ in group)
        try:
            yield _from_pair(raw, count)
        except BadInput as error:
            raise type(error)(f"{where}: [{index}]: {error}") from None
        index += count


class _Query(msgspec.Struct):
    """The fields the EnergAIzer kinds use; anything else in a query describes the measuring run."""

    batch: int = 1
    dimM: int = 0
    dimN: int = 0
    dimK: int = 0
    dim: int = 0
    precM: str = ""
    prec: str = ""
    op: str = ""
    useTensorCore: bool = True
    b: int = 0
    m: int = 0
    c: int = 0
    hw: int = 0
    rs: int = 0
    stride: int = 1
    padding: int = 0


@lru_cache(maxsize=65536)
def _from_pair(raw: bytes, count: int) -> Operator:
    query, kind = from_json(raw, tuple[_Query, list[str]], "entry")
    head = kind[0] if kind else ""
    if head == "gemm":
        dtype = _matmul_dtype(query)
        if query.batch == 1:
            return Linear(query.dimN, query.dimM, query.dimK, dtype=dtype, count=count)
        return Bmm(query.batch, query.dimM, query.dimN, query.dimK, dtype=dtype, count=count)
    if head == "conv2d":
        hw, rs = query.hw, query.rs
        conv = Conv2d(
            query.b, query.c, query.m, hw, hw, rs, rs, query.stride, query.padding, dtype=_matmul_dtype(query)
        )
        return replace(conv, count=count)
    if head in ("softmax", "layernorm"):
        cls = Softmax if head == "softmax" else LayerNorm
        return cls(query.batch, query.dim, dtype=Dtype.of(query.prec), count=count)
    if head == "elementwise":
        return _pointwise(query, count)
    raise unknown_name("EnergAIzer operator", head, ["gemm", "conv2d", "softmax", "layernorm", "elementwise"])


_POINTWISE: Mapping[str, tuple[str, int]] = {  # their name -> ours, tensors read
    "pointwise_add": ("add", 2),
    "pointwise_mul": ("mul", 2),
    "scalar_mul": ("scale", 1),
    "scalar_add": ("shift", 1),
    "unspecified_scalar": ("unspecified", 1),
    "unspecified_tensor": ("unspecified", 2),
}


def _pointwise(query: _Query, count: int) -> Operator:
    dtype = Dtype.of(query.prec)
    if query.op.startswith("typecast_to_"):
        return Elementwise(
            "cast", query.dim, Dtype.of(query.op.removeprefix("typecast_to_")), dtype=dtype, count=count
        )
    name, inputs = _POINTWISE.get(query.op, (query.op, 1))
    read = inputs * query.dim * dtype.byte
    return Elementwise(name, query.dim, read=read, dtype=dtype, count=count)


def _matmul_dtype(query: _Query) -> Dtype:
    dtype = Dtype.of(query.precM)
    return Dtype.TF32 if dtype is Dtype.FP32 and query.useTensorCore else dtype
