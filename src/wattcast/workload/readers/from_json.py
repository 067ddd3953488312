"""Workload JSON -> Graph and back, and the public EnergAIzer operator lists.

Our form is ``{"name": ..., "ops": [{"op": "linear", "m": ..., "count": 32}, ...]}``; an entry
``{"repeat": 32, "ops": [...]}`` is a block that runs 32 times as a whole. The EnergAIzer form is a
list of ``[query, kind]`` pairs. Files hold the same entry many times, so each distinct entry is
decoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import cache, lru_cache, reduce
from itertools import chain, groupby
from operator import or_
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np

from wattcast.core import BadInput, Dtype, bad_value, check_names, unknown_name
from wattcast.core.arrays import index_distinct, split_rows
from wattcast.core.strict_files import decode_json
from wattcast.workload.engine_schedule import EngineStep
from wattcast.workload.graph import Block, Graph
from wattcast.workload.model_catalogue import ARCHITECTURES, ModelSpec, make_model
from wattcast.workload.operator_base import (
    MANY_OPS,
    MOST_BYTE,
    MOST_CALLS,
    Operator,
    OperatorColumns,
    check_size,
    load_functions,
    registered_operators,
)
from wattcast.workload.operator_types import Bmm, Conv2d, Elementwise, LayerNorm, Linear, Softmax

MAX_OPS = 1_000_000
MOST_COUNTED = 10**15  # tokens, pictures or GPUs of one run
_LARGE = 2**20
_TOLD = [
    item for item in fields(Graph) if item.name not in ("name", "blocks", "operands")
]  # that a file may tell


@cache
def _file_struct() -> Any:
    hints = get_type_hints(Graph)
    told = [(item.name, hints[item.name], item.default) for item in _TOLD]
    return msgspec.defstruct(
        "WorkloadFile",
        [("name", str), ("ops", list[msgspec.Raw]), *told],
        forbid_unknown_fields=True,
    )


class _EntryHead(msgspec.Struct):
    op: str | None = None
    repeat: int | None = None


class _BlockEntry(msgspec.Struct, forbid_unknown_fields=True):
    repeat: int
    ops: list[msgspec.Raw]
    label: str = ""
    step: EngineStep | None = None  # of an inference engine


def parse_workload(data: bytes, where: str) -> Graph:
    """Parse workload JSON of either form."""
    if data.lstrip()[:1] == b"[":
        return _parse_energaizer(data, where)
    file = decode_json(data, _file_struct(), where)
    if not file.ops:
        raise bad_value(where, "at least one operator", "none")
    blocks: list[Block] = []
    entries = _parse_entries(file.ops, f"{where}: ops")
    if isinstance(entries, OperatorColumns):
        blocks = [Block(entries)]
        entries = ()
    for is_block, some in groupby(enumerate(entries), key=lambda one: one[1] is None):
        if not is_block:  # operators between blocks become a block of their own
            blocks.append(Block(tuple(op for _, op in some)))
            continue
        for index, _ in some:
            at = f"{where}: ops[{index}]"
            entry = decode_json(bytes(file.ops[index]), _BlockEntry, at)
            ops = _parse_entries(entry.ops, f"{at}.ops")
            if not isinstance(ops, OperatorColumns) and None in ops:
                inner = f"{at}.ops[{ops.index(None)}]"
                raise bad_value(inner, "an operator", "a block", "Blocks hold operators alone.")
            blocks.append(Block(ops, entry.repeat, entry.label, entry.step))
    for block in blocks:
        _check_calls(block, where)
    if sum(len(block.ops) for block in blocks) > MAX_OPS:
        raise bad_value(where, f"at most {MAX_OPS} operators", "more")
    for name in ("tokens", "items", "gpu_count"):
        value = getattr(file, name)
        if value is not None and not 1 <= value <= MOST_COUNTED:
            raise bad_value(f"{where}: {name}", f"a whole number from 1 to {MOST_COUNTED:,}", value)
    if file.memory_byte is not None and not 0.0 <= file.memory_byte <= MOST_BYTE:
        raise bad_value(f"{where}: memory_byte", f"from 0 to {MOST_BYTE:g} bytes", file.memory_byte)
    return Graph(
        file.name, tuple(blocks), **{item.name: getattr(file, item.name) for item in _TOLD}
    )


def _check_calls(block: Block, where: str) -> None:
    """Refuse a block whose repeats and counts together are beyond all reason."""
    forms = block.ops.stack_forms() if isinstance(block.ops, OperatorColumns) else block.ops
    most = max((int(np.max(op.count)) for op in forms), default=1)
    if most * block.repeat > MOST_CALLS:
        raise bad_value(
            where, f"at most {MOST_CALLS:,} calls of an operator", f"{most} x {block.repeat}"
        )


class _SizesFile(msgspec.Struct, forbid_unknown_fields=True):
    architecture: str
    dims: dict[str, Any]
    name: str = ""


def parse_sizes(data: bytes, path: Path) -> ModelSpec:
    """Parse a model of one of our architectures by its sizes, as `models show --json` prints them.

    ``{"name": "mine", "architecture": "decoder", "dims": {"layers": 32, "hidden": 4096, ...}}``
    """
    file = decode_json(data, _SizesFile, path.name)
    check_names(f"architecture in {path.name}", file.architecture, ARCHITECTURES)
    name = file.name or path.stem
    return make_model(name, name, file.architecture, file.dims, path.name)


def graph_to_plain(graph: Graph) -> dict[str, Any]:
    """Return a graph as plain data for a JSON encoder; ``parse_workload`` reads it back."""
    ops: list[dict[str, Any]] = []
    for block in graph.blocks:
        entries = [operator_to_plain(op) for op in block.ops]
        if block.repeat == 1 and not block.label and block.step is None:
            ops += entries
            continue
        plain_block = {"repeat": block.repeat, "label": block.label, "ops": entries}
        if block.step is not None:
            plain_block["step"] = msgspec.to_builtins(block.step)
        ops.append(plain_block)
    plain: dict[str, Any] = {"name": graph.name, "ops": ops}
    for item in _TOLD:
        if (value := getattr(graph, item.name)) != item.default:
            plain[item.name] = list(value) if isinstance(value, tuple) else value
    return plain


def operator_to_plain(op: Operator) -> dict[str, Any]:
    """Return one entry of ``ops``; fields at their default are left out."""
    plain: dict[str, Any] = {"op": op.kind}
    for item in fields(op):
        value = getattr(op, item.name)
        if item.default is MISSING or value != item.default or item.name == "dtype":
            plain[op.json_names.get(item.name, item.name)] = value
    return plain


def _parse_entries(entries: Sequence[Any], where: str, first: int = 0) -> Sequence[Any]:
    """Return the operator of each entry, or None for a block; many operators in columns."""
    raws, place = index_distinct(map(bytes, entries))
    if len(entries) >= MANY_OPS:
        try:
            columns = _stack_entries(raws)
            return columns if len(raws) == len(entries) else columns.select_rows(place)
        except (BadInput, OverflowError):  # a block, a wrong entry, or a size that no float holds
            half = len(entries) // 2
            halves = (entries[:half], first), (entries[half:], first + half)
            return tuple(
                chain.from_iterable([_parse_entries(some, where, at) for some, at in halves])
            )
    ops = []
    for raw in raws:
        try:
            head = decode_json(raw, _EntryHead, "op")
            cls = None if head.op is None and head.repeat is not None else _find_class(head.op)
            ops.append(
                cls and _make_operator(cls, decode_json(raw, operator_struct(cls), str(head.op)))
            )
        except BadInput as error:
            raise type(error)(f"{where}[{first + np.argmax(place == len(ops))}]: {error}") from None
    return tuple(map(ops.__getitem__, place.tolist()))


def _stack_entries(raws: Sequence[bytes]) -> OperatorColumns:
    """Return many operators in columns; all are decoded at once, each by the name that stands in
    it.
    """
    classes = {
        operator_struct(cls, name): cls for name in _operator_names() for cls in [_find_class(name)]
    }
    any_of: Any = reduce(or_, classes)
    records = decode_json(b"[" + b",".join(raws) + b"]", list[any_of], "ops")
    kinds, at = index_distinct(map(type, records))
    rows_of = zip(kinds, split_rows(at, len(kinds)), strict=True)
    parts = [(rows, classes[kind], [records[i] for i in rows.tolist()]) for kind, rows in rows_of]
    columns = OperatorColumns.from_records(parts, _make_operator)
    for op in columns.stack_forms():
        op.__post_init__()
        check_size(op)
    return columns


def _operator_names() -> list[str]:
    return [
        *(kind for kind in registered_operators() if kind != Elementwise.kind),
        *load_functions(),
    ]


def _find_class(name: str | None) -> Any:
    """Return the class of an operator by its name in workload JSON."""
    cls: Any = Elementwise if name in load_functions() else registered_operators().get(name or "")
    if cls is None or name == Elementwise.kind:
        known = _operator_names()
        if name is None:
            raise bad_value("op", "the operator's name", "none", f"Known: {', '.join(known)}.")
        raise unknown_name("operator", name, known, f"Known: {', '.join(known)}.")
    return cls


def _make_operator(cls: type[Operator], given: msgspec.Struct) -> Operator:
    """Return an operator with the fields of its ``operator_struct``, checked as its class checks
    them.
    """
    op = object.__new__(cls)
    op.__dict__.update((item.name, getattr(given, item.name)) for item in fields(cls))
    op.__post_init__()
    if any(type(size) is int and size >= _LARGE for size in op.__dict__.values()):
        check_size(
            op
        )  # so that the place in the file is said; all are checked when their kernels are counted
    return op


@cache
def operator_struct(cls: type[Operator], name: str = "") -> type[msgspec.Struct]:
    """Return a strict reader made from an operator's dataclass; with a name, it reads those of that
    name alone.
    """
    hints = get_type_hints(cls)
    named = {
        item: name for item, word in cls.json_names.items() if word == "op"
    }  # an elementwise function
    listed: list[Any] = [(item.name, hints[item.name], item.default) for item in fields(cls)]
    listed = [
        one[:2] if one[2] is MISSING else one for one in listed if not name or one[0] not in named
    ]
    told: list[Any] = [] if name or named else [("op", str)]
    tag: dict[str, Any] = {"tag_field": "op", "tag": name, "namespace": named} if name else {}
    told += sorted(listed, key=len)  # those without a default first
    return msgspec.defstruct(
        cls.__name__, told, forbid_unknown_fields=True, rename=cls.json_names, **tag
    )


def _parse_energaizer(data: bytes, where: str) -> Graph:
    """Parse a public EnergAIzer operator list; equal neighbours become one entry with a count."""
    entries = [bytes(raw) for raw in decode_json(data, list[msgspec.Raw], where)]
    if not 1 <= len(entries) <= MAX_OPS:
        raise bad_value(where, f"from one to {MAX_OPS} operators", len(entries))
    ops: list[Operator] = []
    index = 0
    for raw, group in groupby(entries):
        count = len(list(group))
        try:
            ops.append(replace(_decode_energaizer(raw), count=count))
        except BadInput as error:
            raise type(error)(f"{where}: [{index}]: {error}") from None
        index += count
    note = (
        "EnergAIzer list: a product's longer role is not recorded, so for `gemm` with batch 1 dimN is read as "
        "tokens and dimM as out features; casts and copies it leaves out are not added"
    )
    return Graph(where.removesuffix(".json"), (Block(tuple(ops)),), None, (note,))


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


_ENERGAIZER_FUNCTIONS: Mapping[str, tuple[str, int]] = {  # their name -> ours, tensors read
    "pointwise_add": ("add", 2),
    "pointwise_mul": ("mul", 2),
    "scalar_mul": ("scale", 1),
    "scalar_add": ("shift", 1),
    "unspecified_scalar": ("unspecified", 1),
    "unspecified_tensor": ("unspecified", 2),
}


@lru_cache(maxsize=65536)
def _decode_energaizer(raw: bytes) -> Operator:
    query, kind = decode_json(raw, tuple[_Query, list[str]], "entry")
    head = kind[0] if kind else ""
    if head in ("gemm", "conv2d"):
        dtype = Dtype.parse(query.precM)
        dtype = Dtype.TF32 if dtype is Dtype.FP32 and query.useTensorCore else dtype
        if head == "conv2d":
            hw = query.hw
            rs = query.rs
            return Conv2d(
                query.b, query.c, query.m, hw, hw, rs, rs, query.stride, query.padding, dtype=dtype
            )
        if query.batch == 1:
            return Linear(query.dimN, query.dimM, query.dimK, dtype=dtype)
        return Bmm(query.batch, query.dimM, query.dimN, query.dimK, dtype=dtype)
    if head not in ("softmax", "layernorm", "elementwise"):
        raise unknown_name(
            "EnergAIzer operator", head, ["gemm", "conv2d", "softmax", "layernorm", "elementwise"]
        )
    dtype = Dtype.parse(query.prec)
    if head != "elementwise":
        return (Softmax if head == "softmax" else LayerNorm)(query.batch, query.dim, dtype=dtype)
    if query.op.startswith("typecast_to_"):
        result = Dtype.parse(query.op.removeprefix("typecast_to_"))
        return Elementwise("cast", query.dim, result, dtype=dtype)
    name, inputs = _ENERGAIZER_FUNCTIONS.get(query.op, (query.op, 1))
    return Elementwise(name, query.dim, read=inputs * query.dim * dtype.byte, dtype=dtype)
