"""Graph -> Kernels: merge equal operators, let each family count its work, and choose the pipe each
runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from wattcast.core import Dtype, bad_value
from wattcast.core.arrays import (
    Array,
    CodedColumn,
    Sweepable,
    index_distinct,
    map_blocks,
    map_distinct,
    sweep_values,
)
from wattcast.hardware import Gpu
from wattcast.kernels.families import KernelMapping, kernel_mapping, load_families
from wattcast.kernels.kernel_table import (
    USUAL_CONDITION,
    Columns,
    ConditionColumns,
    IssueSegment,
    Kernels,
    KernelWork,
    ReferenceChip,
    RowIndex,
    RunCondition,
    count_columns,
    family_likelihood,
    join_work,
    merge_families,
    resident_share,
)
from wattcast.workload.graph import Graph
from wattcast.workload.operator_base import (
    MANY_OPS,
    Operator,
    OperatorColumns,
    check_size,
    index_words,
    select_operators,
)

load_families()

TENSOR_EVENT = {
    Dtype.FP64: "tensor_fp64_flop",
    Dtype.TF32: "tensor_tf32_flop",
    Dtype.BF16: "tensor_fp16_flop",
    Dtype.FP16: "tensor_fp16_flop",
    Dtype.FP8: "tensor_fp8_flop",
    Dtype.FP4: "tensor_fp4_flop",
    Dtype.INT8: "tensor_int8_op",
}
CUDA_EVENT = {
    Dtype.FP64: "cuda_fp64_flop",
    Dtype.FP32: "cuda_fp32_flop",
    Dtype.FP16: "cuda_fp16_flop",
    Dtype.BF16: "cuda_fp16_flop",
}
PIPE_EVENTS = tuple(dict.fromkeys([*TENSOR_EVENT.values(), *CUDA_EVENT.values()]))
GraphRows = tuple[RowIndex, Sequence[Operator], tuple[IssueSegment, ...]]


def lower_graph(graph: Graph, gpu: Gpu, reference: ReferenceChip) -> Kernels:
    """Return the kernels a graph becomes on ``gpu``, one row per distinct operator, with the order
    of issue.
    """
    ops, segments = _distinct_operators(graph)
    ops = _round_where_possible(ops, gpu)
    return build_kernels(ops, (_CONDITIONS[graph.operands],) * len(ops), gpu, reference, segments)


def lower_graphs(
    graphs: Sequence[Graph], gpu: Gpu, reference: ReferenceChip
) -> tuple[Kernels, list[GraphRows]]:
    """Return one table with the kernels of all graphs, and of each graph its rows, operators and
    order of issue.
    """
    row_of: dict[tuple[Operator, RunCondition], int] = {}
    places = []
    for graph in graphs:
        ops, segments = _distinct_operators(graph)
        ops = _round_where_possible(ops, gpu)
        told = _CONDITIONS[graph.operands]
        places.append(
            (
                np.array([row_of.setdefault((op, told), len(row_of)) for op in ops], np.int64),
                ops,
                segments,
            )
        )
    all_ops, conditions = zip(*row_of, strict=True) if row_of else ((), ())
    return build_kernels(all_ops, conditions, gpu, reference, ()), places


_CONDITIONS = {
    "": USUAL_CONDITION,
    "cold": RunCondition(rotated="all"),
    "warm": RunCondition(rotated="none"),
}


def _round_where_possible(ops: Sequence[Operator], gpu: Gpu) -> Sequence[Operator]:
    """Return operators as a library runs them on ``gpu``: TF32 is an allowance, and cards without
    it keep fp32.
    """
    if Dtype.TF32 in gpu.pipes.tensor_flop_per_cycle:
        return ops
    if Dtype.TF32 not in index_words(ops, attrgetter("dtype")).values:
        return ops
    return tuple(replace(op, dtype=Dtype.FP32) if op.dtype is Dtype.TF32 else op for op in ops)


def _distinct_operators(graph: Graph) -> tuple[Sequence[Operator], tuple[IssueSegment, ...]]:
    lengths = [len(block.ops) for block in graph.blocks]
    if sum(lengths) >= MANY_OPS:
        everything = (
            graph.blocks[0].ops
            if len(lengths) == 1
            else list(chain(*(block.ops for block in graph.blocks)))
        )
        columns = OperatorColumns.from_operators(everything)
        ops, place = columns.merge_equal()
        ends = np.cumsum(lengths)[:-1]
        cut = zip(
            np.split(place, ends), np.split(columns.sizes[0], ends), graph.blocks, strict=True
        )
        segments = [
            IssueSegment(rows, counts, block.repeat, block.label, block.step)
            for rows, counts, block in cut
        ]
        return ops, tuple(segments)
    row_of: dict[Operator, int] = {}
    segments = []
    for block in graph.blocks:
        rows = np.array([row_of.setdefault(op, len(row_of)) for op in block.ops], np.int64)
        counts = np.array([op.count for op in block.ops], np.float64)
        segments.append(IssueSegment(rows, counts, block.repeat, block.label, block.step))
    return tuple(row_of), tuple(segments)


def build_kernels(
    ops: Sequence[Operator],
    conditions: Sequence[RunCondition],
    gpu: Gpu,
    reference: ReferenceChip,
    segments: tuple[IssueSegment, ...],
) -> Kernels:
    """Return the kernels of distinct operators, each run under its condition."""
    ops = OperatorColumns.from_operators(ops) if len(ops) >= MANY_OPS else tuple(ops)
    mappings = index_words(ops, kernel_mapping)
    link_byte = np.zeros(len(ops))
    for link_traffic, rows in _rows_by(mappings, "link_traffic"):
        link_byte[rows] = [link_traffic(ops[i]) for i in rows.tolist()]
    asked = index_words(ops, lambda op: (kernel_mapping(op).tensor_cores, op.math_dtype))
    event_names, rates, said = zip(
        *(_choose_pipe(*pipe, gpu) for pipe in asked.values), strict=True
    )
    events = CodedColumn(event_names, asked.place)
    notes = CodedColumn(said, asked.place)
    rate_of = np.stack(
        [sweep_values(rate) for rate in np.broadcast_arrays(*rates)], axis=-1
    )  # (*sweep, pipe)
    conditions = tuple(conditions)
    flop, sfu_op, read, written = count_columns(ops, _operator_work)
    check_size(ops[int(np.argmax(read + written))])
    key = (
        (ops, conditions, tuple(events)) if len(ops) <= _MOST_OPS else None
    )  # a million take seconds to hash
    work = (
        None if key is None else reference.kept.get(key)
    )  # of a workload met before: no sweep changes it
    if work is None:
        work = compute_work(ops, conditions, events, reference)
        if key is not None:
            if len(reference.kept) >= _MOST_KEPT:
                reference.kept.pop(next(iter(reference.kept)), None)  # the oldest
            reference.kept[key] = work
    return Kernels(
        ops=ops,
        family=index_words(ops, attrgetter("family")),
        pipe_event=events,
        pipe_per_cycle=rate_of.take(asked.place, axis=-1),
        flop=flop,
        sfu_op=sfu_op,
        work=work,
        link_byte=link_byte,
        segments=segments,
        conditions=conditions,
        notes=notes,
    )


_operator_work: Callable[[Operator], tuple[Any, ...]] = attrgetter(
    "flop", "sfu_op", "read_byte", "write_byte"
)
# workloads kept, and distinct operators of one worth keeping
_MOST_KEPT = 256
_MOST_OPS = 1024


def compute_work(
    ops: Sequence[Operator],
    conditions: Sequence[RunCondition],
    events: CodedColumn[str],
    reference: ReferenceChip,
) -> KernelWork:
    """Return the work columns of all operators, counted family by family."""
    if len(ops) > _MOST_TOGETHER:
        parts = map_blocks(
            lambda at: compute_work(ops[at], conditions[at], events[at], reference),
            len(ops),
            _MOST_TOGETHER,
        )
        return join_work(parts)
    rates = map_distinct(reference.per_cycle.__getitem__, events)
    told = ConditionColumns.from_conditions(conditions)
    counted = [
        (rows, work(select_operators(ops, rows), told.select_rows(rows), rates[rows], reference))
        for work, rows in _rows_by(index_words(ops, kernel_mapping), "work")
    ]
    kernel_family = CodedColumn.from_parts(
        ((rows, part.kernel_family) for rows, part in counted), len(ops)
    )
    columns, features, likelihoods = merge_families(counted, len(ops))
    columns["units"] = columns["units"].round(
        6
    )  # a mean over likely kernels: 264 blocks are two waves, not three
    if (rows := told.counted.nonzero()[0]).size:
        # A profiler replays kernels: operands come from device memory, and results stay in L2 as
        # far as a third of it holds them (21 counted operators whose working set fits L2 read all
        # operands and wrote
        # nothing)
        read, write = np.array([(ops[i].read_byte, ops[i].write_byte) for i in rows.tolist()]).T
        columns["dram_read_byte"][rows] = np.maximum(columns["dram_read_byte"][rows], read)
        columns["dram_write_byte"][rows] = np.maximum(write - reference.l2_byte / 3.0, 0.0)
    between = columns["between_byte"]
    columns["between_dram_byte"] = between * (1.0 - resident_share(between, reference.l2_byte))
    features |= _ideal_features(columns, rates, reference)
    features |= family_likelihood(kernel_family, {name: features[name] for name in likelihoods})
    return KernelWork(kernel_family=kernel_family, features=features, **columns)


_MOST_TOGETHER = 16384  # operators whose columns stay in a cache


def _rows_by(mappings: CodedColumn[KernelMapping], name: str) -> list[tuple[Any, RowIndex]]:
    """Return the rows of each function that mappings have, functions in an order that does not
    depend on the rows.
    """
    functions, place = index_distinct(map(attrgetter(name), mappings.values))
    of_row = place.take(mappings.place)
    rows = [(of, np.flatnonzero(of_row == i)) for i, of in enumerate(functions) if of is not None]
    return sorted(rows, key=lambda item: f"{item[0].__module__}.{item[0].__qualname__}")


def _ideal_features(work: Columns, rate: Array, reference: ReferenceChip) -> Columns:
    """Return log2 of the ideal cycles of each phase on the reference chip, which are features in
    every family.
    """
    ideal = {
        "ideal_compute": np.ceil(work["units"] / reference.sm_count) * work["unit_flop"] / rate,
        "ideal_l2": (work["l2_byte"] + work["store_byte"]) / reference.l2_byte_per_cycle,
        "ideal_dram": (work["dram_read_byte"] + work["dram_write_byte"])
        / reference.dram_byte_per_cycle,
        "ideal_between": work["between_byte"] / reference.l2_byte_per_cycle,
        "steps": work["steps"],
    }
    cycles = np.maximum(list(ideal.values()), 1.0)
    bound = np.log2(cycles[0] / np.maximum(cycles[1], cycles[2]))
    return dict(zip(ideal, np.log2(cycles), strict=True)) | {"ideal_bound": bound}


def kernel_choice_inputs(
    ops: Sequence[Operator], conditions: Sequence[RunCondition]
) -> tuple[list[str], tuple[Array, ...], Columns]:
    """Return what the choice of kernels sees of each operator: its chooser, its sizes b, m, n and
    k, and its shape.

    The name of the chooser is empty where a library has nothing to choose.
    """
    choosers = np.full(len(ops), "", object)
    told = ConditionColumns.from_conditions(conditions)
    sizes = tuple(np.ones(len(ops)) for _ in range(4))
    shape: Columns = {}
    for ask, rows in _rows_by(index_words(ops, kernel_mapping), "choice_inputs"):
        choosers[rows], some_sizes, columns = ask(
            select_operators(ops, rows), told.select_rows(rows)
        )
        for size, values in zip(sizes, some_sizes, strict=True):
            size[rows] = values
        for name, values in columns.items():
            shape.setdefault(name, np.zeros(len(ops)))[rows] = values
    return choosers.tolist(), sizes, shape


def _choose_pipe(tensor_cores: bool, dtype: Dtype, gpu: Gpu) -> tuple[str, Sweepable, str]:
    """Return the event of a pipe, its rate per cycle and SM, and an assumption if the format has no
    unit of its own.

    Products run on tensor cores where the chip has them for the format, else on CUDA cores. Other
    operators compute in fp32 whatever they store, as PyTorch's do. A format without a unit runs at
    the fp32 rate."""
    cuda = gpu.pipes.cuda_flop_per_cycle
    if not tensor_cores:
        dtype = Dtype.FP64 if dtype is Dtype.FP64 and Dtype.FP64 in cuda else Dtype.FP32
        return CUDA_EVENT[dtype], cuda[dtype], ""
    if dtype in gpu.pipes.tensor_flop_per_cycle:
        return TENSOR_EVENT[dtype], gpu.pipes.tensor_flop_per_cycle[dtype], ""
    if dtype in cuda:
        return CUDA_EVENT[dtype], cuda[dtype], ""
    if dtype is Dtype.FP4:
        raise bad_value(
            gpu.name, "a GPU whose tensor cores multiply fp4, such as b200", "none of them",
            "Keep weights alone in fp4 (--weights fp4), or choose another recipe.",
        )  # fmt: skip
    note = f"{gpu.name} has no {dtype} unit: products in {dtype} at the fp32 rate of its CUDA cores"
    return CUDA_EVENT[Dtype.FP32], cuda[Dtype.FP32], note


def reference_chip(gpu: Gpu) -> ReferenceChip:
    """Return the chip itself as the reference; of a swept field, its first value.

    A format without a unit of its own runs at the fp32 rate, as in ``lower_graph``. An L2 rate that
    nobody published is taken as 40 bytes a cycle and SM beside HBM (an A100 has 47, an H200 39),
    and as 4.5 times the rate of device memory beside GDDR, whose channels each have their own
    slices (products of an L40S ask for 4 to 5 times)."""
    clock_hz, dram, sms = map(_take_first, (gpu.clocks.max_hz, gpu.memory.byte_per_s, gpu.sm_count))
    cuda = {CUDA_EVENT[d]: _take_first(r) for d, r in gpu.pipes.cuda_flop_per_cycle.items()}
    tensor = {TENSOR_EVENT[d]: _take_first(r) for d, r in gpu.pipes.tensor_flop_per_cycle.items()}
    stand_in = 4.5 * dram / clock_hz if gpu.memory.kind.startswith("GDDR") else 40.0 * sms
    return ReferenceChip(
        sm_count=sms,
        l2_byte=max(_take_first(gpu.l2.capacity_byte), 1.0),
        l2_byte_per_cycle=_take_first(gpu.l2.byte_per_cycle, stand_in),
        dram_byte_per_cycle=dram / clock_hz,
        top_hz=clock_hz,
        sfu_per_cycle=_take_first(gpu.pipes.sfu_op_per_cycle),
        per_cycle=cuda | tensor,
        shared_byte=_take_first(gpu.sm.shared_byte_per_block),
    )


def _take_first(value: Sweepable | None, unknown: float = 0.0) -> float:
    return unknown if value is None else float(sweep_values(value).flat[0])
