"""Workload JSON -> Graph and back, and the public EnergAIzer operator lists.

Our form is ``{"name": ..., "ops": [{"op": "linear", "m": ..., "count": 32}, ...]}``; an entry
``{"repeat": 32, "ops": [...]}`` is a block that runs 32 times as a whole. The EnergAIzer form is a
list of ``[query, kind]`` pairs. Files hold the same entry many times, so each distinct entry is
decoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import (
    MISSING,
    fields,
    replace,
)
from functools import (
    cache,
    lru_cache,
    reduce,
)
from itertools import groupby
from operator import or_
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np

from wattcast.core import (
    BadInput,
    Dtype,
    bad_value,
    check_names,
    unknown_name,
)
from wattcast.core.arrays import index_distinct, split_rows
from wattcast.core.strict_files import decode_json
from wattcast.workload import adapter_operators, engine_row_operators  # noqa: F401  (register)
from wattcast.workload.engine_schedule import EngineStep
from wattcast.workload.graph import Block, Graph
from wattcast.workload.model_catalogue import (
    ARCHITECTURES,
    ModelSpec,
    make_model,
)
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
from wattcast.workload.operator_types import (
    Bmm,
    Conv2d,
    Elementwise,
    LayerNorm,
    Linear,
    Softmax,
)

MAX_OPS = 1_000_000
MOST_COUNTED = 10**15  # tokens, pictures or GPUs of one run
_LARGE = 2**20
# Fields of a graph that a file may state.
_STATED = [item for item in fields(Graph) if item.name not in ("name", "blocks", "operands")]


@cache
def _file_struct() -> Any:
    hints = get_type_hints(Graph)
    stated = [(item.name, hints[item.name], item.default) for item in _STATED]
    return msgspec.defstruct(
        "WorkloadFile",
        [("name", str), ("ops", list[msgspec.Raw]), *stated],
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

    blocks = _parse_blocks(file.ops, where)
    for block in blocks:
        _check_calls(block, where)
    if sum(len(block.ops) for block in blocks) > MAX_OPS:
        raise bad_value(where, f"at most {MAX_OPS} operators", "more")

    for name in ("tokens", "items", "gpu_count"):
        count = getattr(file, name)
        if count is not None and not 1 <= count <= MOST_COUNTED:
            raise bad_value(f"{where}: {name}", f"a whole number from 1 to {MOST_COUNTED:,}", count)
    if file.memory_byte is not None and not 0.0 <= file.memory_byte <= MOST_BYTE:
        raise bad_value(f"{where}: memory_byte", f"from 0 to {MOST_BYTE:g} bytes", file.memory_byte)
    stated = {item.name: getattr(file, item.name) for item in _STATED}
    return Graph(file.name, tuple(blocks), **stated)


def _parse_blocks(raws: Sequence[msgspec.Raw], where: str) -> list[Block]:
    """Return the blocks of a file; operators between blocks become a block."""
    entries = _parse_entries(raws, f"{where}: ops")
    if isinstance(entries, OperatorColumns):
        return [Block(entries)]
    blocks: list[Block] = []
    loose: list[Operator] = []  # operators since the last block
    for index, op in enumerate(entries):
        if op is not None:
            loose.append(op)
            continue
        if loose:
            blocks.append(Block(tuple(loose)))
            loose = []
        blocks.append(_parse_block(bytes(raws[index]), f"{where}: ops[{index}]"))
    if loose:
        blocks.append(Block(tuple(loose)))
    return blocks


def _parse_block(raw: bytes, where: str) -> Block:
    entry = decode_json(raw, _BlockEntry, where)
    ops = _parse_entries(entry.ops, f"{where}.ops")
    if not isinstance(ops, OperatorColumns) and None in ops:
        inner = f"{where}.ops[{ops.index(None)}]"
        raise bad_value(inner, "an operator", "a block", "Blocks hold operators alone.")
    return Block(ops, entry.repeat, entry.label, entry.step)


def _check_calls(block: Block, where: str) -> None:
    """Refuse a block whose repeats and counts together are beyond all reason."""
    forms = block.ops.stack_forms() if isinstance(block.ops, OperatorColumns) else block.ops
    most = max((int(np.max(op.count)) for op in forms), default=1)
    if most * block.repeat > MOST_CALLS:
        expected = f"at most {MOST_CALLS:,} calls of an operator"
        raise bad_value(where, expected, f"{most} x {block.repeat}")


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
    return make_model(
        name,
        name,
        file.architecture,
        file.dims,
        path.name,
    )


def graph_to_plain(graph: Graph) -> dict[str, Any]:
    """Return a graph as plain data for a JSON encoder; ``parse_workload`` reads it back."""
    ops: list[dict[str, Any]] = []
    for block in graph.blocks:
        entries = [operator_to_plain(op) for op in block.ops]
        if block.repeat == 1 and not block.label and block.step is None:
            ops += entries
            continue
        plain_block = {
            "repeat": block.repeat,
            "label": block.label,
            "ops": entries,
        }
        if block.step is not None:
            plain_block["step"] = msgspec.to_builtins(block.step)
        ops.append(plain_block)
    plain: dict[str, Any] = {"name": graph.name, "ops": ops}
    for item in _STATED:
        value = getattr(graph, item.name)
        if value != item.default:
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


def _parse_entries(
    entries: Sequence[Any],
    where: str,
    first: int = 0,
) -> Sequence[Any]:
    """Return the operator of each entry, or None for a block; many operators in columns."""
    raws, place = index_distinct(map(bytes, entries))
    if len(entries) >= MANY_OPS:
        try:
            columns = _stack_entries(raws)
            return columns if len(raws) == len(entries) else columns.select_rows(place)
        except (BadInput, OverflowError):  # a block, a wrong entry, or a size that no float holds
            half = len(entries) // 2
            lower = _parse_entries(entries[:half], where, first)
            upper = _parse_entries(entries[half:], where, first + half)
            return (*lower, *upper)
    ops: list[Operator | None] = []
    for raw in raws:
        try:
            ops.append(_parse_entry(raw))
        except BadInput as error:
            index = first + np.argmax(place == len(ops))
            raise type(error)(f"{where}[{index}]: {error}") from None
    return tuple(map(ops.__getitem__, place.tolist()))


def _parse_entry(raw: bytes) -> Operator | None:
    """Return the operator of an entry, or None where it is a block."""
    head = decode_json(raw, _EntryHead, "op")
    if head.op is None and head.repeat is not None:
        return None
    cls = _find_class(head.op)
    return _make_operator(cls, decode_json(raw, operator_struct(cls), str(head.op)))


def _stack_entries(raws: Sequence[bytes]) -> OperatorColumns:
    """Return many operators in columns.

    All are decoded at once, each by the name that stands in it.
    """
    classes = {}
    for name in _operator_names():
        cls = _find_class(name)
        classes[operator_struct(cls, name)] = cls
    any_of: Any = reduce(or_, classes)
    records = decode_json(b"[" + b",".join(raws) + b"]", list[any_of], "ops")

    kinds, place = index_distinct(map(type, records))
    parts = []
    for kind, rows in zip(kinds, split_rows(place, len(kinds)), strict=True):
        parts.append((rows, classes[kind], [records[i] for i in rows.tolist()]))
    columns = OperatorColumns.from_records(parts, _make_operator)
    for op in columns.stack_forms():
        op.__post_init__()
        check_size(op)
    return columns


def _operator_names() -> list[str]:
    kinds = [kind for kind in registered_operators() if kind != Elementwise.kind]
    return [*kinds, *load_functions()]


def _find_class(name: str | None) -> Any:
    """Return the class of an operator by its name in workload JSON."""
    cls: Any = Elementwise if name in load_functions() else registered_operators().get(name or "")
    if cls is not None and name != Elementwise.kind:
        return cls
    names = _operator_names()
    advice = f"Known: {', '.join(names)}."
    if name is None:
        raise bad_value("op", "the operator's name", "none", advice)
    raise unknown_name("operator", name, names, advice)


def _make_operator(cls: type[Operator], record: msgspec.Struct) -> Operator:
    """Return an operator with the fields of its ``operator_struct``.

    They are checked as its class checks them.
    """
    op = object.__new__(cls)
    op.__dict__.update((item.name, getattr(record, item.name)) for item in fields(cls))
    op.__post_init__()
    # All operators are checked when their kernels are counted; here the error has the place in
    # the file.
    if any(type(size) is int and size >= _LARGE for size in op.__dict__.values()):
        check_size(op)
    return op


@cache
def operator_struct(cls: type[Operator], name: str = "") -> type[msgspec.Struct]:
    """Return a strict reader made from an operator's dataclass.

    With a name, it reads operators of that name alone.
    """
    # The field of an elementwise function has the key "op"
    named = {item: name for item, key in cls.json_names.items() if key == "op"}
    hints = get_type_hints(cls)
    required: list[Any] = []
    optional: list[Any] = []
    for item in fields(cls):
        if name and item.name in named:
            continue
        if item.default is MISSING:
            required.append((item.name, hints[item.name]))
        else:
            optional.append((item.name, hints[item.name], item.default))
    if not name and not named:
        required.insert(0, ("op", str))
    tag: dict[str, Any] = {}
    if name:
        tag = {
            "tag_field": "op",
            "tag": name,
            "namespace": named,
        }
    return msgspec.defstruct(
        cls.__name__,
        [*required, *optional],
        forbid_unknown_fields=True,
        rename=cls.json_names,
        **tag,
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
        "EnergAIzer list: a product's longer role is not recorded, so for `gemm` with batch 1 dimN "
        "is read as tokens and dimM as out features; casts and copies it leaves out are not added"
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


_ENERGAIZER_KINDS = ["gemm", "conv2d", "softmax", "layernorm", "elementwise"]


@lru_cache(maxsize=65536)
def _decode_energaizer(raw: bytes) -> Operator:
    query, words = decode_json(raw, tuple[_Query, list[str]], "entry")
    kind = words[0] if words else ""
    if kind in ("gemm", "conv2d"):
        return _decode_product(query, kind)
    if kind not in _ENERGAIZER_KINDS:
        raise unknown_name("EnergAIzer operator", kind, _ENERGAIZER_KINDS)
    dtype = Dtype.parse(query.prec)
    if kind == "softmax":
        return Softmax(query.batch, query.dim, dtype=dtype)
    if kind == "layernorm":
        return LayerNorm(query.batch, query.dim, dtype=dtype)
    if query.op.startswith("typecast_to_"):
        result = Dtype.parse(query.op.removeprefix("typecast_to_"))
        return Elementwise("cast", query.dim, result, dtype=dtype)
    name, inputs = _ENERGAIZER_FUNCTIONS.get(query.op, (query.op, 1))
    return Elementwise(name, query.dim, read=inputs * query.dim * dtype.byte, dtype=dtype)


def _decode_product(query: _Query, kind: str) -> Operator:
    """Decode a matrix product or a convolution of square pictures by square filters."""
    dtype = Dtype.parse(query.precM)
    if dtype is Dtype.FP32 and query.useTensorCore:
        dtype = Dtype.TF32
    if kind == "conv2d":
        return Conv2d(
            n=query.b,
            c=query.c,
            k=query.m,
            h=query.hw,
            w=query.hw,
            r=query.rs,
            s=query.rs,
            stride=query.stride,
            padding=query.padding,
            dtype=dtype,
        )
    if query.batch == 1:
        return Linear(
            m=query.dimN,
            n=query.dimM,
            k=query.dimK,
            dtype=dtype,
        )
    return Bmm(
        b=query.batch,
        m=query.dimM,
        n=query.dimN,
        k=query.dimK,
        dtype=dtype,
    )
