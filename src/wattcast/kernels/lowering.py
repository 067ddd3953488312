"""Graph -> Kernels: merge equal operators, let families count their work, choose pipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

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
from wattcast.kernels.families import (
    KernelMapping,
    kernel_mapping,
    load_families,
)
from wattcast.kernels.kernel_table import (
    USUAL_CONDITION,
    WORK,
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


def lower_graph(
    graph: Graph,
    gpu: Gpu,
    reference: ReferenceChip,
) -> Kernels:
    """Return the kernels a graph becomes on ``gpu``, a row per distinct operator, in issue
    order.
    """
    ops, segments = _distinct_operators(graph)
    ops = _replace_missing_tf32(ops, gpu)
    conditions = (_CONDITIONS[graph.operands],) * len(ops)
    return build_kernels(
        ops,
        conditions,
        gpu,
        reference,
        segments,
    )


def lower_graphs(
    graphs: Sequence[Graph],
    gpu: Gpu,
    reference: ReferenceChip,
) -> tuple[Kernels, list[GraphRows]]:
    """Return one table with the kernels of all graphs.

    With it come the rows, the operators and the order of issue of each graph.
    """
    row_of: dict[tuple[Operator, RunCondition], int] = {}
    graph_rows: list[GraphRows] = []
    for graph in graphs:
        ops, segments = _distinct_operators(graph)
        ops = _replace_missing_tf32(ops, gpu)
        condition = _CONDITIONS[graph.operands]
        rows = [row_of.setdefault((op, condition), len(row_of)) for op in ops]
        graph_rows.append((np.array(rows, np.int64), ops, segments))
    all_ops: tuple[Operator, ...] = ()
    conditions: tuple[RunCondition, ...] = ()
    if row_of:
        all_ops, conditions = zip(*row_of, strict=True)
    return build_kernels(
        all_ops,
        conditions,
        gpu,
        reference,
        (),
    ), graph_rows


_CONDITIONS = {
    "": USUAL_CONDITION,
    "cold": RunCondition(rotated="all"),
    "warm": RunCondition(rotated="none"),
}


def _replace_missing_tf32(ops: Sequence[Operator], gpu: Gpu) -> Sequence[Operator]:
    """Return operators with fp32 in place of TF32 on a card that has no TF32.

    TF32 is an allowance to round the operands of an fp32 product, not a format of its own.
    """
    if Dtype.TF32 in gpu.pipes.tensor_flop_per_cycle:
        return ops
    if Dtype.TF32 not in index_words(ops, attrgetter("dtype")).values:
        return ops
    return tuple(replace(op, dtype=Dtype.FP32) if op.dtype is Dtype.TF32 else op for op in ops)


def _distinct_operators(graph: Graph) -> tuple[Sequence[Operator], tuple[IssueSegment, ...]]:
    """Return the distinct operators of a graph, and the order of issue by their rows."""
    if sum(len(block.ops) for block in graph.blocks) >= MANY_OPS:
        return _distinct_columns(graph)
    row_of: dict[Operator, int] = {}
    segments = []
    for block in graph.blocks:
        rows = np.array([row_of.setdefault(op, len(row_of)) for op in block.ops], np.int64)
        counts = np.array([op.count for op in block.ops], np.float64)
        segments.append(
            IssueSegment(
                rows,
                counts,
                block.repeat,
                block.label,
                block.step,
            )
        )
    return tuple(row_of), tuple(segments)


def _distinct_columns(graph: Graph) -> tuple[Sequence[Operator], tuple[IssueSegment, ...]]:
    """Return what ``_distinct_operators`` does, of thousands of operators as columns."""
    if len(graph.blocks) == 1:
        all_ops: Sequence[Operator] = graph.blocks[0].ops
    else:
        all_ops = list(chain.from_iterable(block.ops for block in graph.blocks))
    columns = OperatorColumns.from_operators(all_ops)
    ops, place = columns.merge_equal()
    ends = np.cumsum([len(block.ops) for block in graph.blocks])[:-1]
    rows_of_block = np.split(place, ends)
    counts_of_block = np.split(columns.sizes[0], ends)
    segments = []
    for block, rows, counts in zip(graph.blocks, rows_of_block, counts_of_block, strict=True):
        segments.append(
            IssueSegment(
                rows,
                counts,
                block.repeat,
                block.label,
                block.step,
            )
        )
    return ops, tuple(segments)


def build_kernels(
    ops: Sequence[Operator],
    conditions: Sequence[RunCondition],
    gpu: Gpu,
    reference: ReferenceChip,
    segments: tuple[IssueSegment, ...],
) -> Kernels:
    """Return the kernels of distinct operators, each run under its condition."""
    ops = OperatorColumns.from_operators(ops) if len(ops) >= MANY_OPS else tuple(ops)
    conditions = tuple(conditions)
    pipes = _choose_pipes(ops, gpu)
    flop, sfu_op, read_byte, write_byte = count_columns(ops, _operator_work)
    check_size(ops[int(np.argmax(read_byte + write_byte))])
    return Kernels(
        ops=ops,
        family=index_words(ops, attrgetter("family")),
        pipe_event=pipes.events,
        pipe_per_cycle=pipes.per_cycle,
        flop=flop,
        sfu_op=sfu_op,
        work=_find_work(ops, conditions, pipes.events, reference),
        link_byte=_count_link_byte(ops),
        segments=segments,
        conditions=conditions,
        notes=pipes.notes,
    )


_operator_work: Callable[[Operator], tuple[Any, ...]] = attrgetter(
    "flop", "sfu_op", "read_byte", "write_byte"
)


def _count_link_byte(ops: Sequence[Operator]) -> Array:
    """Return the bytes that each operator sends to other GPUs."""
    link_byte = np.zeros(len(ops))
    for link_traffic, rows in _rows_by(index_words(ops, kernel_mapping), "link_traffic"):
        link_byte[rows] = [link_traffic(ops[row]) for row in rows.tolist()]
    return link_byte


# Workloads whose work is remembered, and distinct operators of one that is worth it
_MOST_WORKLOADS = 256
_MOST_OPS = 1024  # a million take seconds to hash


def _find_work(
    ops: Sequence[Operator],
    conditions: tuple[RunCondition, ...],
    events: CodedColumn[str],
    reference: ReferenceChip,
) -> KernelWork:
    """Return the work of operators, from memory where the same workload was counted before.

    A sweep over clocks or memory changes none of it.
    """
    if len(ops) > _MOST_OPS:
        return compute_work(ops, conditions, events, reference)
    known_work = reference.known_work
    key = (ops, conditions, tuple(events))
    work = known_work.get(key)
    if work is None:
        work = compute_work(ops, conditions, events, reference)
        if len(known_work) >= _MOST_WORKLOADS:
            oldest = next(iter(known_work))
            known_work.pop(oldest, None)
        known_work[key] = work
    return work


def compute_work(
    ops: Sequence[Operator],
    conditions: Sequence[RunCondition],
    events: CodedColumn[str],
    reference: ReferenceChip,
) -> KernelWork:
    """Return the work columns of all operators, counted family by family."""
    if len(ops) > _MOST_TOGETHER:
        parts = map_blocks(
            lambda block: compute_work(ops[block], conditions[block], events[block], reference),
            len(ops),
            _MOST_TOGETHER,
        )
        return join_work(parts)
    rates = map_distinct(reference.per_cycle.__getitem__, events)
    columns_of_rows = ConditionColumns.from_conditions(conditions)
    counted = []
    for count, rows in _rows_by(index_words(ops, kernel_mapping), "work"):
        some_ops = select_operators(ops, rows)
        part = count(some_ops, columns_of_rows.select_rows(rows), rates[rows], reference)
        counted.append((rows, part))
    kernel_family = CodedColumn.from_parts(
        ((rows, part.kernel_family) for rows, part in counted), len(ops)
    )
    columns, features, likelihoods = merge_families(counted, len(ops))
    # Units are a mean over likely kernels, which misses whole numbers by rounding: 264.0000001
    # blocks on 132 SMs would be three waves, not two.
    columns["units"] = columns["units"].round(6)
    _count_as_profiler(columns, ops, columns_of_rows, reference)
    between_byte = columns["between_byte"]
    evicted_share = 1.0 - resident_share(between_byte, reference.l2_byte)
    columns["between_dram_byte"] = between_byte * evicted_share
    features |= _ideal_features(columns, rates, reference)
    features |= family_likelihood(kernel_family, {name: features[name] for name in likelihoods})
    return KernelWork(
        kernel_family=kernel_family,
        features=features,
        **columns,
    )


def _count_as_profiler(
    columns: Columns,
    ops: Sequence[Operator],
    conditions: ConditionColumns,
    reference: ReferenceChip,
) -> None:
    """Put in the traffic of device memory of rows that a profiler counted.

    A profiler replays kernels: operands come from device memory, and results stay in L2 as far as a
    third of it holds them (21 counted operators whose working set fits L2 read all operands and
    wrote nothing).
    """
    rows = conditions.counted.nonzero()[0]
    if not rows.size:
        return
    operand_byte = np.array([ops[row].read_byte for row in rows.tolist()])
    result_byte = np.array([ops[row].write_byte for row in rows.tolist()])
    remaining_byte = result_byte - WORK.profiled_write_share * reference.l2_byte
    columns["dram_read_byte"][rows] = np.maximum(columns["dram_read_byte"][rows], operand_byte)
    columns["dram_write_byte"][rows] = np.maximum(remaining_byte, 0.0)


_MOST_TOGETHER = 16384  # operators whose columns stay in a cache


def _rows_by(mappings: CodedColumn[KernelMapping], name: str) -> list[tuple[Any, RowIndex]]:
    """Return the rows of each function that mappings have.

    The order of the functions does not depend on the rows.
    """
    functions, place = index_distinct(map(attrgetter(name), mappings.values))
    function_of_row = place.take(mappings.place)
    rows = []
    for which, function in enumerate(functions):
        if function is not None:
            rows.append((function, np.flatnonzero(function_of_row == which)))
    return sorted(rows, key=lambda item: f"{item[0].__module__}.{item[0].__qualname__}")


def _ideal_features(
    work: Columns,
    rate: Array,
    reference: ReferenceChip,
) -> Columns:
    """Return log2 of the ideal cycles of each phase on the reference chip.

    They are features in every family.
    """
    waves = np.ceil(work["units"] / reference.sm_count)
    l2_byte = work["l2_byte"] + work["store_byte"]
    dram_byte = work["dram_read_byte"] + work["dram_write_byte"]
    ideal = {
        "ideal_compute": waves * work["unit_flop"] / rate,
        "ideal_l2": l2_byte / reference.l2_byte_per_cycle,
        "ideal_dram": dram_byte / reference.dram_byte_per_cycle,
        "ideal_between": work["between_byte"] / reference.l2_byte_per_cycle,
        "steps": work["steps"],
    }
    cycles = np.maximum(list(ideal.values()), 1.0)
    bound = np.log2(cycles[0] / np.maximum(cycles[1], cycles[2]))
    return dict(zip(ideal, np.log2(cycles), strict=True)) | {"ideal_bound": bound}


def kernel_choice_inputs(
    ops: Sequence[Operator], conditions: Sequence[RunCondition]
) -> tuple[list[str], tuple[Array, ...], Columns]:
    """Return what the choice of kernels sees of each operator.

    That is its chooser, its sizes b, m, n and k, and its shape. The name of the chooser is empty
    where a library has nothing to choose.
    """
    choosers = np.full(len(ops), "", object)
    columns_of_rows = ConditionColumns.from_conditions(conditions)
    sizes = tuple(np.ones(len(ops)) for _ in range(4))
    shape: Columns = {}
    for read_inputs, rows in _rows_by(index_words(ops, kernel_mapping), "choice_inputs"):
        some_ops = select_operators(ops, rows)
        choosers[rows], some_sizes, columns = read_inputs(
            some_ops, columns_of_rows.select_rows(rows)
        )
        for size, values in zip(sizes, some_sizes, strict=True):
            size[rows] = values
        for name, values in columns.items():
            shape.setdefault(name, np.zeros(len(ops)))[rows] = values
    return choosers.tolist(), sizes, shape


class _Pipes(NamedTuple):
    """The pipe that each operator runs on."""

    events: CodedColumn[str]
    per_cycle: Array  # (*sweep, row) arithmetic of one SM
    notes: CodedColumn[str]


def _choose_pipes(ops: Sequence[Operator], gpu: Gpu) -> _Pipes:
    forms = index_words(ops, lambda op: (kernel_mapping(op).tensor_cores, op.math_dtype))
    events, rates, notes = zip(*(_choose_pipe(*form, gpu) for form in forms.values), strict=True)
    rate_of_form = np.stack([sweep_values(rate) for rate in np.broadcast_arrays(*rates)], axis=-1)
    return _Pipes(
        CodedColumn(events, forms.place),
        rate_of_form.take(forms.place, axis=-1),
        CodedColumn(notes, forms.place),
    )


def _choose_pipe(
    tensor_cores: bool,
    dtype: Dtype,
    gpu: Gpu,
) -> tuple[str, Sweepable, str]:
    """Return the event of a pipe, its rate per cycle and SM, and what had to be assumed.

    Products run on tensor cores where the chip has them for the format, else on CUDA cores. Other
    operators compute in fp32 whatever they store, as PyTorch's do. A format without a unit runs at
    the fp32 rate, which is an assumption.
    """
    cuda = gpu.pipes.cuda_flop_per_cycle
    if not tensor_cores:
        has_fp64 = dtype is Dtype.FP64 and Dtype.FP64 in cuda
        dtype = Dtype.FP64 if has_fp64 else Dtype.FP32
        return CUDA_EVENT[dtype], cuda[dtype], ""
    if dtype in gpu.pipes.tensor_flop_per_cycle:
        return TENSOR_EVENT[dtype], gpu.pipes.tensor_flop_per_cycle[dtype], ""
    if dtype in cuda:
        return CUDA_EVENT[dtype], cuda[dtype], ""
    if dtype is Dtype.FP4:
        raise bad_value(
            gpu.name,
            "a GPU whose tensor cores multiply fp4, such as b200",
            "none of them",
            "Keep weights alone in fp4 (--weights fp4), or choose another recipe.",
        )
    note = f"{gpu.name} has no {dtype} unit: products in {dtype} at the fp32 rate of its CUDA cores"
    return CUDA_EVENT[Dtype.FP32], cuda[Dtype.FP32], note


def reference_chip(gpu: Gpu) -> ReferenceChip:
    """Return the chip itself as the reference; of a swept field, its first value.

    A format without a unit of its own runs at the fp32 rate, as in ``lower_graph``. An L2 rate that
    nobody published is taken as 40 bytes a cycle and SM beside HBM (an A100 has 47, an H200 39),
    and as 4.5 times the rate of device memory beside GDDR, whose channels each have their own
    slices (products of an L40S ask for 4 to 5 times).
    """
    clock_hz = _take_first(gpu.clocks.max_hz)
    sm_count = _take_first(gpu.sm_count)
    dram_byte_per_s = _take_first(gpu.memory.byte_per_s)
    per_cycle = {}
    for dtype, rate in gpu.pipes.cuda_flop_per_cycle.items():
        per_cycle[CUDA_EVENT[dtype]] = _take_first(rate)
    for dtype, rate in gpu.pipes.tensor_flop_per_cycle.items():
        per_cycle[TENSOR_EVENT[dtype]] = _take_first(rate)
    assumed_l2_rate = WORK.l2_byte_per_cycle * sm_count
    if gpu.memory.kind.startswith("GDDR"):
        assumed_l2_rate = WORK.l2_over_gddr * dram_byte_per_s / clock_hz
    return ReferenceChip(
        sm_count=sm_count,
        l2_byte=max(_take_first(gpu.l2.capacity_byte), 1.0),
        l2_byte_per_cycle=_take_first(gpu.l2.byte_per_cycle, assumed_l2_rate),
        dram_byte_per_cycle=dram_byte_per_s / clock_hz,
        top_hz=clock_hz,
        sfu_per_cycle=_take_first(gpu.pipes.sfu_op_per_cycle),
        per_cycle=per_cycle,
        shared_byte=_take_first(gpu.sm.shared_byte_per_block),
    )


def _take_first(value: Sweepable | None, unknown: float = 0.0) -> float:
    """Return a field of a card, its first value where it is swept, or ``unknown``."""
    return unknown if value is None else float(sweep_values(value).flat[0])
