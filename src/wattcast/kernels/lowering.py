"""Lower a workload to kernels: a ``Graph`` of operators becomes a table, ``Kernels``.

Equal operators become one row. The family of each operator counts its work (``kernels.families``),
and each row gets a pipe: the tensor cores or CUDA cores, at one number format, that compute it. Two
chips take part. ``gpu`` is the card that runs the kernels. ``reference`` is the chip whose library
chose them, so that their work stays the same when a sweep changes the card.
"""

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
from wattcast.kernels.engine_fusions import fuse_operators
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

# The events that count the arithmetic of a pipe, by format; bf16 and fp16 share one
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
# Of one graph among several: its rows of the shared table, its distinct operators, and its order of
# issue, whose segments count these operators from 0
GraphRows = tuple[RowIndex, Sequence[Operator], tuple[IssueSegment, ...]]
# By ``Graph.operands``, which says where operands are when an operator starts
_CONDITIONS = {
    "": USUAL_CONDITION,
    "cold": RunCondition(rotated="all"),
    "warm": RunCondition(rotated="none"),
}
# The work of small workloads is cached on the reference chip: at most so many workloads, and so
# many distinct operators of each, since a million take seconds to hash
_MOST_CACHED_WORKLOADS = 256
_MOST_CACHED_OPS = 1024
_BLOCK_OPS = 16384  # operators counted at a time, so that their columns stay in a CPU cache


def lower_graph(
    graph: Graph,
    gpu: Gpu,
    reference: ReferenceChip,
) -> Kernels:
    """Return the kernels of a graph on ``gpu``, and the order in which the host issues them.

    Rows stand in the order of first issue. Each is an operator that differs from all others, but
    an fp32 product may stand twice on a card without TF32.
    """
    ops, segments = _distinct_operators(fuse_operators(graph, reference.engine))
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
    """Return one table with the kernels of all graphs, and which rows of it are whose.

    Graphs that share an operator, run under the same condition, share its row. The table has no
    order of issue: ``Kernels.select_rows`` makes the kernels of a graph from its ``GraphRows``.
    """
    row_of: dict[tuple[Operator, RunCondition], int] = {}
    graph_rows: list[GraphRows] = []
    for graph in graphs:
        ops, segments = _distinct_operators(fuse_operators(graph, reference.engine))
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


def _replace_missing_tf32(ops: Sequence[Operator], gpu: Gpu) -> Sequence[Operator]:
    """Return the operators with fp32 in place of TF32 on a card that has no TF32.

    TF32 permits a card to round the operands of an fp32 product; one that cannot computes in fp32.
    """
    if Dtype.TF32 in gpu.pipes.tensor_flop_per_cycle:
        return ops
    if Dtype.TF32 not in index_words(ops, attrgetter("dtype")).values:
        return ops
    return tuple(replace(op, dtype=Dtype.FP32) if op.dtype is Dtype.TF32 else op for op in ops)


def _distinct_operators(graph: Graph) -> tuple[Sequence[Operator], tuple[IssueSegment, ...]]:
    """Return the distinct operators of a graph, and its order of issue as positions among them.

    Operators that differ in count and label only are equal.
    """
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
    """Do what ``_distinct_operators`` does faster, for at least ``MANY_OPS`` operators."""
    if len(graph.blocks) == 1:
        all_ops: Sequence[Operator] = graph.blocks[0].ops
    else:
        all_ops = list(chain.from_iterable(block.ops for block in graph.blocks))
    columns = OperatorColumns.from_operators(all_ops)
    ops, place = columns.merge_equal()
    ends = np.cumsum([len(block.ops) for block in graph.blocks])[:-1]
    rows_of_block = np.split(place, ends)
    # The first size of every operator is its count
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
    """Return the kernels of distinct operators, of which there is at least one.

    Each runs under its condition. An operator whose bytes are beyond all reason is refused.
    """
    ops = OperatorColumns.from_operators(ops) if len(ops) >= MANY_OPS else tuple(ops)
    conditions = tuple(conditions)
    pipes = _choose_pipes(ops, gpu)
    flop, sfu_op, read_byte, write_byte = count_columns(ops, _operator_work)
    # Of the operator that moves the most bytes alone: the counts of others are not checked
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
    """Return the bytes that a call of each operator sends to other GPUs."""
    link_byte = np.zeros(len(ops))
    for link_traffic, rows in _group_rows(index_words(ops, kernel_mapping), "link_traffic"):
        link_byte[rows] = [link_traffic(ops[row]) for row in rows.tolist()]
    return link_byte


def _find_work(
    ops: Sequence[Operator],
    conditions: tuple[RunCondition, ...],
    events: CodedColumn[str],
    reference: ReferenceChip,
) -> KernelWork:
    """Return the work of operators, from the cache where the same workload was counted before.

    Of the hardware, only the reference chip decides it: a sweep over clocks or memory reuses it.
    """
    if len(ops) > _MOST_CACHED_OPS:
        return compute_work(ops, conditions, events, reference)
    known_work = reference.known_work
    key = (ops, conditions, tuple(events))
    work = known_work.get(key)
    if work is None:
        work = compute_work(ops, conditions, events, reference)
        if len(known_work) >= _MOST_CACHED_WORKLOADS:
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
    """Return the work of each operator's kernels on the reference chip, before any clock is known.

    ``events`` are the pipes of the operators. Every family counts its own operators together.
    """
    if len(ops) > _BLOCK_OPS:
        parts = map_blocks(
            lambda block: compute_work(ops[block], conditions[block], events[block], reference),
            len(ops),
            _BLOCK_OPS,
        )
        return join_work(parts)
    # Operations per cycle and SM
    rates = map_distinct(reference.per_cycle.__getitem__, events)
    columns_of_rows = ConditionColumns.from_conditions(conditions)
    counted = []
    for count, rows in _group_rows(index_words(ops, kernel_mapping), "work"):
        some_ops = select_operators(ops, rows)
        part = count(some_ops, columns_of_rows.select_rows(rows), rates[rows], reference)
        counted.append((rows, part))
    kernel_family = CodedColumn.from_parts(
        ((rows, part.kernel_family) for rows, part in counted), len(ops)
    )
    columns, features, likelihood_names = merge_families(counted, len(ops))
    # Units (blocks, or tiles of a product) are a mean over likely kernels, which misses whole
    # numbers by rounding: 264.0000001 blocks on 132 SMs would be three waves, not two.
    columns["units"] = columns["units"].round(6)
    _set_profiled_traffic(columns, ops, columns_of_rows, reference)
    # What the kernels of one operator hand on goes to device memory where L2 cannot hold it
    between_byte = columns["between_byte"]
    evicted_share = 1.0 - resident_share(between_byte, reference.l2_byte)
    columns["between_dram_byte"] = between_byte * evicted_share
    features |= _ideal_features(columns, rates, reference)
    likelihoods = {name: features[name] for name in likelihood_names}
    features |= family_likelihood(kernel_family, likelihoods)
    return KernelWork(
        kernel_family=kernel_family,
        features=features,
        **columns,
    )


def _set_profiled_traffic(
    columns: Columns,
    ops: Sequence[Operator],
    conditions: ConditionColumns,
    reference: ReferenceChip,
) -> None:
    """Overwrite the bytes of device memory in rows that a profiler measured.

    A profiler replays each kernel. All operands then come from device memory, and results stay in
    L2 up to ``profiled_write_share`` of it: 21 measured operators whose working set fits L2 read
    all operands and wrote nothing.
    """
    rows = conditions.counted.nonzero()[0]
    if not rows.size:
        return
    operand_byte = np.array([ops[row].read_byte for row in rows.tolist()])
    result_byte = np.array([ops[row].write_byte for row in rows.tolist()])
    remaining_byte = result_byte - WORK.profiled_write_share * reference.l2_byte
    columns["dram_read_byte"][rows] = np.maximum(columns["dram_read_byte"][rows], operand_byte)
    columns["dram_write_byte"][rows] = np.maximum(remaining_byte, 0.0)


def _group_rows(mappings: CodedColumn[KernelMapping], name: str) -> list[tuple[Any, RowIndex]]:
    """Return each function that mappings have under a field's ``name``, with its rows.

    Rows whose mapping has none are left out. Functions stand in the order of their names, whatever
    the order of the rows.
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
    rates: Array,
    reference: ReferenceChip,
) -> Columns:
    """Return features that all families have: log2 of ideal cycles on the reference chip.

    The cycles are those of compute (units in waves, one unit at a time on an SM at ``rates``
    operations per cycle), of L2, of device memory, and of the traffic between the kernels of an
    operator. Two more features are log2 of the steps of a unit, and of compute cycles over those of
    the slower memory (``ideal_bound``). Cycles and steps below 1 count as 1.
    """
    waves = np.ceil(work["units"] / reference.sm_count)
    l2_byte = work["l2_byte"] + work["store_byte"]
    dram_byte = work["dram_read_byte"] + work["dram_write_byte"]
    ideal = {
        "ideal_compute": waves * work["unit_flop"] / rates,
        "ideal_l2": l2_byte / reference.l2_byte_per_cycle,
        "ideal_dram": dram_byte / reference.dram_byte_per_cycle,
        "ideal_between": work["between_byte"] / reference.l2_byte_per_cycle,
        "steps": work["steps"],
    }
    values = np.maximum(list(ideal.values()), 1.0)
    compute, l2, dram, *_ = values
    bound = np.log2(compute / np.maximum(l2, dram))
    return dict(zip(ideal, np.log2(values), strict=True)) | {"ideal_bound": bound}


def kernel_choice_inputs(
    ops: Sequence[Operator], conditions: Sequence[RunCondition]
) -> tuple[list[str], tuple[Array, ...], Columns]:
    """Return what decides which kernel a library chooses for each operator.

    First comes the name of the operator's chooser, empty where the library has one kernel for it.
    Then come four columns of the product's sizes: batch, m, n and k, 1 without a chooser. The last
    are columns of its shape, 0 where a chooser does not know them.
    """
    choosers = np.full(len(ops), "", object)
    columns_of_rows = ConditionColumns.from_conditions(conditions)
    sizes = tuple(np.ones(len(ops)) for _ in range(4))
    shape: Columns = {}
    for read_inputs, rows in _group_rows(index_words(ops, kernel_mapping), "choice_inputs"):
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

    events: CodedColumn[str]  # that count the pipe's arithmetic
    per_cycle: Array  # (*sweep, row) operations of one SM per cycle
    notes: CodedColumn[str]  # what had to be assumed; empty: nothing


def _choose_pipes(ops: Sequence[Operator], gpu: Gpu) -> _Pipes:
    """Choose the pipe of each operator, once for all that compute in the same way."""
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
    """Return the event of a pipe, its operations per cycle and SM, and what had to be assumed.

    Products (``tensor_cores``) run on tensor cores where the chip has them for the format, else on
    CUDA cores. Where those do not have the format either, products run at the fp32 rate, which is
    an assumption; in fp4 they are refused. Other operators compute in fp32 whatever they store, as
    PyTorch's do, but those of fp64 in fp64 where the chip has it.
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
    """Return a card as the chip whose library chose the kernels; of a swept field, its first value.

    An L2 rate that nobody published is assumed. Beside HBM it follows the number of SMs: 40 bytes
    per cycle and SM, between the 47 of an A100 and the 39 of an H200. Beside GDDR, where each
    memory channel has its own slices of L2, it follows the rate of device memory: 4.5 times, where
    published rates are 4.9 to 6 times.
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
        l2_byte=max(_take_first(gpu.l2.capacity_byte), 1.0),  # shares of it are taken
        l2_byte_per_cycle=_take_first(gpu.l2.byte_per_cycle, assumed_l2_rate),
        dram_byte_per_cycle=dram_byte_per_s / clock_hz,
        top_hz=clock_hz,
        sfu_per_cycle=_take_first(gpu.pipes.sfu_op_per_cycle),
        per_cycle=per_cycle,
        shared_byte=_take_first(gpu.sm.shared_byte_per_block),
    )


def _take_first(value: Sweepable | None, unknown: float = 0.0) -> float:
    """Return a field of a card, or the first value of a swept one; ``unknown`` stands for None."""
    return unknown if value is None else float(sweep_values(value).flat[0])
