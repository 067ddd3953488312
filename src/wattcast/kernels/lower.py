"""Graph -> Kernels: merge equal operators and choose the pipe each runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from wattcast.arrays import Array, Scalar, per_sweep
from wattcast.dtypes import Dtype
from wattcast.hardware import Gpu
from wattcast.kernels.attention import attentions
from wattcast.kernels.collective import link_work
from wattcast.kernels.convolution import asked as convolutions_asked
from wattcast.kernels.convolution import convolutions
from wattcast.kernels.elementwise import elementwise
from wattcast.kernels.merge import groups_of, merged
from wattcast.kernels.pointwise import row_reductions
from wattcast.kernels.products import asked as products_asked
from wattcast.kernels.products import is_point, products
from wattcast.kernels.table import Index, Kernels, Memo, Segment
from wattcast.kernels.work import (
    USUAL,
    Columns,
    Condition,
    Part,
    Reference,
    Told,
    Work,
    columns_of,
    resident,
)
from wattcast.workload.graph import Attention, Bmm, Collective, Conv2d, Graph, Linear, Operator

_MATMUL = (Linear, Bmm, Conv2d, Attention)
_FAMILY = {"linear": "gemm", "bmm": "gemm"}
TENSOR_EVENT = {
    Dtype.FP64: "tensor_fp64_flop",
    Dtype.TF32: "tensor_tf32_flop",
    Dtype.BF16: "tensor_fp16_flop",
    Dtype.FP16: "tensor_fp16_flop",
    Dtype.FP8: "tensor_fp8_flop",
    Dtype.INT8: "tensor_int8_op",
}
CUDA_EVENT = {
    Dtype.FP64: "cuda_fp64_flop",
    Dtype.FP32: "cuda_fp32_flop",
    Dtype.FP16: "cuda_fp16_flop",
    Dtype.BF16: "cuda_fp16_flop",
}
PIPE_EVENTS = tuple(dict.fromkeys([*TENSOR_EVENT.values(), *CUDA_EVENT.values()]))


def lower(graph: Graph, gpu: Gpu, reference: Reference) -> Kernels:
    """The kernels a graph becomes on ``gpu``, one a distinct operator, in issue order."""
    ops, segments = _issued(graph)
    return kernels_of(ops, (USUAL,) * len(ops), gpu, reference, segments)


_Part = tuple[Index, tuple[Operator, ...], tuple[Segment, ...]]


def lower_many(graphs: Sequence[Graph], gpu: Gpu, reference: Reference) -> tuple[Kernels, list[_Part]]:
    """The kernels of all graphs in one table; of each, its rows, its operators, and the order they are issued in."""
    row_of: dict[Operator, int] = {}
    places = []
    for graph in graphs:
        ops, segments = _issued(graph)
        places.append((np.array([row_of.setdefault(op, len(row_of)) for op in ops], np.int64), ops, segments))
    all_ops = tuple(row_of)
    return kernels_of(all_ops, (USUAL,) * len(all_ops), gpu, reference, ()), places


def _issued(graph: Graph) -> tuple[tuple[Operator, ...], tuple[Segment, ...]]:
    """The distinct operators of a graph and the order in which they are issued."""
    row_of: dict[Operator, int] = {}
    segments = []
    for block in graph.blocks:
        rows = np.array([row_of.setdefault(op, len(row_of)) for op in block.ops], np.int64)
        counts = np.array([op.count for op in block.ops], np.float64)
        segments.append(Segment(rows, counts, block.repeat))
    return tuple(row_of), tuple(segments)


def kernels_of(
    ops: tuple[Operator, ...],
    conditions: Sequence[Condition],
    gpu: Gpu,
    reference: Reference,
    segments: tuple[Segment, ...],
) -> Kernels:
    """Kernels of distinct operators, each run under its condition."""
    events, rates, notes = _pipes(ops, gpu)
    links = np.zeros((2, len(ops)))
    for i, op in enumerate(ops):
        if op.kind == "collective":
            assert isinstance(op, Collective)
            links[:, i] = link_work(op)
    memo = Memo(ops, tuple(conditions))
    flop, sfu_op = columns_of(list(map(_arithmetic, ops)))
    return Kernels(
        ops=ops,
        memo=memo,
        family=tuple([_FAMILY.get(op.kind, op.kind) for op in ops]),
        pipe_event=events,
        pipe_per_cycle=rates,
        flop=flop,
        sfu_op=sfu_op,
        work=_kept_work(memo, events, reference),
        link_byte=links[0],
        link_hops=links[1],
        segments=segments,
        conditions=memo.conditions,
        notes=notes,
    )


_arithmetic: Callable[[Operator], tuple[float, float]] = attrgetter("flop", "sfu_op")
_MOST_KEPT, _MOST_OPS = 256, 1024  # workloads kept, and distinct operators of one worth keeping


def _kept_work(memo: Memo, events: tuple[str, ...], reference: Reference) -> Work:
    """Work of the operators, from before where they were met."""
    if len(memo.ops) > _MOST_OPS:
        return work_of(memo.ops, memo.conditions, events, reference)
    key = memo, events
    work = reference.kept.get(key)
    if work is None:
        if len(reference.kept) >= _MOST_KEPT:
            reference.kept.pop(next(iter(reference.kept)), None)  # the oldest
        work = reference.kept[key] = work_of(memo.ops, memo.conditions, events, reference)
    return work


def work_of(
    ops: Sequence[Operator], conditions: Sequence[Condition], events: Sequence[str], reference: Reference
) -> Work:
    """Columns of every operator, family by family."""
    rates = np.array([reference.per_cycle[event] for event in events])
    told = Told.by(conditions)
    group = [op.kind for op in ops]
    parts = []
    for family, rows in _by_family(ops).items():
        at = np.array(rows)
        part: Part = family([ops[i] for i in rows], told.at(at), rates[at], reference)
        for i, name in zip(rows, part.group, strict=True):
            group[i] = name
        parts.append((at, part))
    columns, found, blends = merged(parts, len(ops))
    moved = [i for i, name in enumerate(group) if name == "collective"]
    columns["launches"][moved] = columns["slots"][moved] = 1.0
    if not told.usual:
        _as_counted(columns, ops, told, reference)
    columns["between_dram_byte"] = columns["between_byte"] * (
        1.0 - resident(columns["between_byte"], reference.l2_byte)
    )
    found |= _ideal(columns, rates, reference)
    found |= groups_of(group, {name: found[name] for name in blends})
    return Work(group=tuple(group), features=found, **columns)


def _by_family(ops: Sequence[Operator]) -> dict[Any, list[int]]:
    """Rows of each family that there is, in the order of the families."""
    rows: dict[Any, list[int]] = {family: [] for family in _FAMILY_OF.values()}
    for i, op in enumerate(ops):
        kind = op.kind
        if kind == "conv2d" and is_point(op):
            kind = "linear"  # a point convolution is a product
        family = _FAMILY_OF.get(kind)
        if family is not None:
            rows[family].append(i)
    return {family: found for family, found in rows.items() if found}


def _as_counted(columns: Columns, ops: Sequence[Operator], told: Told, reference: Reference) -> None:
    """Device memory as a profiler that replays kernels finds it: operands come from it, results stay in L2 as far as
    a third of it holds them (21 counted operators whose working set fits L2 read all operands and wrote nothing)."""
    rows = told.counted.nonzero()[0]
    if rows.size:
        read, write = np.array([(ops[i].read_byte, ops[i].write_byte) for i in rows.tolist()]).T
        columns["dram_read_byte"][rows] = np.maximum(columns["dram_read_byte"][rows], read)
        columns["dram_write_byte"][rows] = np.maximum(write - reference.l2_byte / 3.0, 0.0)


def choice_inputs(
    ops: Sequence[Operator], conditions: Sequence[Condition]
) -> tuple[list[str], tuple[Array, ...], Columns]:
    """What the kernel choice sees of each operator: its class (empty: nothing to choose), sizes and shape."""
    classes, told = [""] * len(ops), Told.by(conditions)
    sizes = tuple(np.ones(len(ops)) for _ in range(4))
    shape: Columns = {}
    point = [is_point(op) for op in ops]
    whole = [i for i, op in enumerate(ops) if point[i] or isinstance(op, (Linear, Bmm))]
    rest = [(i, op) for i, op in enumerate(ops) if isinstance(op, Conv2d) and not point[i]]
    parts = []
    if whole:
        parts.append((whole, products_asked([ops[i] for i in whole], told.at(np.array(whole)))))
    if rest:
        parts.append(([i for i, _ in rest], convolutions_asked([op for _, op in rest])))
    for rows, (names, of, columns) in parts:
        for i, name in zip(rows, names, strict=True):
            classes[i] = name
        for size, values in zip(sizes, of, strict=True):
            size[rows] = values
        for name, values in columns.items():
            shape.setdefault(name, np.zeros(len(ops)))[rows] = values
    return classes, sizes, shape


def _ideal(work: Columns, rate: Array, reference: Reference) -> Columns:
    """Features every family has: the scaffold's own ideal terms on the reference chip, in logs."""
    table = np.empty((6, len(rate)))
    table[0] = np.ceil(work["units"] / reference.sm_count) * work["unit_flop"] / rate
    table[1] = (work["l2_byte"] + work["store_byte"]) / reference.l2_byte_per_cycle
    table[2] = (work["dram_read_byte"] + work["dram_write_byte"]) / reference.dram_byte_per_cycle
    table[3] = work["between_byte"] / reference.l2_byte_per_cycle
    table[4] = work["steps"]
    table = np.maximum(table, 1.0, out=table)
    table[5] = table[0] / np.maximum(table[1], table[2])
    return dict(zip(_IDEAL, np.log2(table, out=table), strict=True))


_IDEAL = ("ideal_compute", "ideal_l2", "ideal_dram", "ideal_between", "steps", "ideal_bound")


_FAMILY_OF: dict[str, Any] = {
    "linear": products,
    "bmm": products,
    "conv2d": convolutions,
    "attention": attentions,
    "softmax": row_reductions,
    "layernorm": row_reductions,
    "rmsnorm": row_reductions,
    "elementwise": elementwise,
}


_Pipe = tuple[str, Scalar, str]


def _pipes(ops: Sequence[Operator], gpu: Gpu) -> tuple[tuple[str, ...], Scalar, tuple[str, ...]]:
    """Event, rate and note of each operator's pipe; those of a kind and format share one, depthwise convolutions
    apart."""
    place: dict[tuple[object, ...], int] = {}
    known: list[_Pipe] = []
    at = []
    for op in ops:
        key = (op.kind, op.dtype, op.kind == "conv2d" and _depthwise(op))
        i = place.get(key)
        if i is None:
            i = place[key] = len(known)
            known.append(_pipe(op, gpu))
        at.append(i)
    events, rates, notes = zip(*known, strict=True)
    return tuple([events[i] for i in at]), _stacked(rates).take(at, axis=-1), tuple([notes[i] for i in at])


def _depthwise(op: Operator) -> bool:
    return isinstance(op, Conv2d) and op.groups > 1 and op.c == op.groups


def _pipe(op: Operator, gpu: Gpu) -> _Pipe:
    """Event, rate per cycle and SM, and an assumption if the dtype has no unit of its own.

    Products run on tensor cores where the chip has them for the dtype, else on CUDA cores; depthwise
    convolutions have no product to speak of and run on CUDA cores; other
    operators compute in fp32 whatever they store, as PyTorch's do. A format without a unit runs at
    the fp32 rate.
    """
    cuda = gpu.pipes.cuda_flop_per_cycle
    if not isinstance(op, _MATMUL) or _depthwise(op):
        dtype = Dtype.FP64 if op.dtype is Dtype.FP64 and Dtype.FP64 in cuda else Dtype.FP32
        return CUDA_EVENT[dtype], cuda[dtype], ""
    if op.dtype in gpu.pipes.tensor_flop_per_cycle:
        return TENSOR_EVENT[op.dtype], gpu.pipes.tensor_flop_per_cycle[op.dtype], ""
    if op.dtype in cuda:
        return CUDA_EVENT[op.dtype], cuda[op.dtype], ""
    note = f"{gpu.name} has no {op.dtype} unit: products in {op.dtype} at the fp32 rate of its CUDA cores"
    return CUDA_EVENT[Dtype.FP32], cuda[Dtype.FP32], note


def _stacked(per_sm: Sequence[Scalar]) -> Array:
    """Rates of one SM, ``(*sweep, kernel)``; ``(kernel,)`` where no pipe is swept."""
    if all(isinstance(rate, float) for rate in per_sm):
        return np.array(per_sm)
    columns = np.broadcast_arrays(*per_sm)
    return np.asarray(np.stack([c[..., 0] if c.ndim else c for c in columns], axis=-1))


def reference_of(gpu: Gpu) -> Reference:
    """The chip itself as the reference; of a swept field, its first value.

    A format without a unit of its own runs at the fp32 rate, as in :func:`lower`; an L2 rate that
    nobody published is taken as twice the DRAM's, as on an H200.
    """
    clock_hz, dram = _first(gpu.clocks.max_hz), _first(gpu.memory.byte_per_s)
    cuda = {CUDA_EVENT[d]: _first(r) for d, r in gpu.pipes.cuda_flop_per_cycle.items()}
    tensor = {TENSOR_EVENT[d]: _first(r) for d, r in gpu.pipes.tensor_flop_per_cycle.items()}
    l2 = _first(gpu.l2.byte_per_cycle) if gpu.l2.byte_per_cycle is not None else 2.0 * dram / clock_hz
    capacity = _first(gpu.l2.capacity_byte) if gpu.l2.capacity_byte is not None else 0.0
    sfu = _first(gpu.pipes.sfu_op_per_cycle) if gpu.pipes.sfu_op_per_cycle is not None else 0.0
    sms = _first(gpu.sm_count)
    return Reference(sms, max(capacity, 1.0), l2, dram / clock_hz, clock_hz, sfu, cuda | tensor)


def _first(value: Scalar) -> float:
    array: Array = per_sweep(value)
    return float(array.flat[0])
