"""Refuse what cannot run: a workload that does not fit, formats without units, limits that a card
does not take.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wattcast import hardware
from wattcast.core import (
    BadInput,
    Dtype,
    bad_value,
    units,
)
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.workload.build_model import compute_footprint, find_largest_batch
from wattcast.workload.graph import Graph
from wattcast.workload.model_catalogue import ModelKind, ModelSpec
from wattcast.workload.model_options import (
    RUNNABLE_DTYPES,
    ModelOptions,
    count_positions,
)
from wattcast.workload.readers import load_workload

FORCE = "Predict it all the same: --force, force=True."
_ROUNDING = 1e-9  # relative, by which a limit may be beyond a published end
_TENSOR_PARALLEL_SIZES = (2, 4, 8, 16, 32, 64)  # that are tried where a workload does not fit


def check_power_limit(
    gpu: Gpu,
    at: OperatingPoint,
    otherwise: str = FORCE,
) -> None:
    """Raise an error where a power limit lies outside what the card takes; an unpublished end is
    not checked.

    Where no highest limit is published, it is the default limit.
    """
    if at.power_limit_w is None:
        return
    spec = gpu.power
    low_w = 0.0 if spec.min_limit_w is None else float(np.min(spec.min_limit_w))
    high_w = float(np.max(spec.limit_w if spec.max_limit_w is None else spec.max_limit_w))
    limit_w = np.asarray(at.power_limit_w)
    is_low = limit_w < low_w * (1 - _ROUNDING)
    is_high = limit_w > high_w * (1 + _ROUNDING)
    outside_w = limit_w[is_low | is_high]
    if outside_w.size:
        span = f"from {units.show(low_w, 'W')} to {units.show(high_w, 'W')}"
        expected = f"a limit that the {gpu.name} takes, {span}"
        first = units.show(float(outside_w.flat[0]), "W")
        raise bad_value("power limit", expected, first, otherwise)


def check_runs(
    graph: Graph,
    gpu: Gpu,
    workload: load_workload.Workload,
    options: ModelOptions,
) -> None:
    """Raise an error where a model was made for fewer tokens, or where a GPU has no units for a
    format of the workload, or too little memory for it.
    """
    _check_positions(graph, workload, options)
    check_formats(graph, gpu, FORCE)
    _check_memory(graph, gpu, workload, options)


def _check_memory(
    graph: Graph,
    gpu: Gpu,
    workload: load_workload.Workload,
    options: ModelOptions,
) -> None:
    capacity_byte = float(np.max(gpu.memory.capacity_byte))
    if graph.memory_byte is None or graph.memory_byte <= capacity_byte:
        return
    expected = f"at most the {units.show(capacity_byte, 'byte', 3)} of the {gpu.name}"
    if graph.gpu_count > 1:
        expected += " on each of its GPUs"
    ways = list_ways_to_fit(graph, gpu, load_workload.find_model(workload), options)
    advice = "It fits no GPU of the catalogue."
    if ways:
        advice = f"It fits {', or '.join(ways)}."
    needed = units.show(graph.memory_byte, "byte", 3)
    raise bad_value(f"{graph.name}: memory", expected, needed, f"{advice} {FORCE}")


def list_ways_to_fit(
    graph: Graph,
    gpu: Gpu,
    model: ModelSpec | None,
    options: ModelOptions,
) -> list[str]:
    """Return what would hold a workload: more of the same GPU, the smallest other GPU of its use, a
    smaller batch.
    """
    capacity_byte = float(np.max(gpu.memory.capacity_byte))
    ways = []
    if model is not None:
        factor = _find_tensor_parallel(model, options, capacity_byte)
        if factor is not None:
            count = graph.gpu_count * factor
            ways.append(f"on {count} x {gpu.name} (tp {options.tp * factor})")
    larger = _find_larger_gpu(gpu, graph.memory_byte or 0.0)
    if larger is not None:
        size = units.show(_capacity_byte(larger), "byte", 3)
        ways.append(f"on {graph.gpu_count} x {larger.name} of {size}")
    if model is not None and options.batch > 1:
        largest_batch = find_largest_batch(model, options, capacity_byte)
        if largest_batch:
            ways.append(f"with a batch of {largest_batch}")
    return ways


def _find_tensor_parallel(
    model: ModelSpec,
    options: ModelOptions,
    capacity_byte: float,
) -> int | None:
    """Find how many times as many tensor-parallel GPUs hold a model; None where none do."""
    for factor in _TENSOR_PARALLEL_SIZES:
        try:
            footprint = compute_footprint(model, replace(options, tp=options.tp * factor))
        except BadInput:  # the heads cannot be shared among so many
            continue
        if footprint.fits(capacity_byte):
            return factor
    return None


def _find_larger_gpu(gpu: Gpu, needed_byte: float) -> Gpu | None:
    """Find the smallest GPU of the same use that has enough memory.

    Of two as large it is the one with the faster memory.
    """
    enough = []
    for name in hardware.gpu_names():
        card = hardware.load_gpu(name)
        if card.use is gpu.use and _capacity_byte(card) >= needed_byte:
            enough.append(card)
    if not enough:
        return None
    return min(enough, key=lambda card: (_capacity_byte(card), -np.max(card.memory.byte_per_s)))


def _capacity_byte(gpu: Gpu) -> float:
    return float(np.max(gpu.memory.capacity_byte))


def _check_positions(
    graph: Graph,
    workload: load_workload.Workload,
    options: ModelOptions,
) -> None:
    """Raise an error where a workload has more tokens in a sequence than its model was made for."""
    if not graph.phase or options.seq is None:
        return
    model = load_workload.find_model(workload)
    if model is not None and model.kind is not ModelKind.VISION:
        check_context(model, options.seq + (options.tokens or 1) - 1, FORCE)


def check_context(
    model: ModelSpec,
    longest: int,
    do: str,
) -> None:
    """Raise an error where a sequence of ``longest`` tokens is more than a model was made for."""
    most = count_positions(model)
    if most is not None and longest > most:
        expected = f"at most the {most:,} tokens that it was made for"
        advice = "Ask for a shorter sequence, or a model with a longer context."
        raise bad_value(f"{model.name}: context", expected, f"{longest:,} tokens", f"{advice} {do}")


def check_formats(
    graph: Graph,
    gpu: Gpu,
    do: str,
) -> None:
    """Raise an error, with what to do, where a GPU has no units for a format that the workload
    multiplies in.
    """
    supported = {*gpu.pipes.tensor_flop_per_cycle, *gpu.pipes.cuda_flop_per_cycle}
    for op in graph.stack_forms():
        # cuDNN rounds fp32 to TF32 only where a card has it, unasked
        is_rounded = op.kind == "conv2d" and op.dtype == Dtype.TF32
        if not op.is_product or is_rounded or op.dtype in supported:
            continue
        runnable = sorted(str(dtype) for dtype in supported if dtype in RUNNABLE_DTYPES)
        expected = f"a format that the {gpu.name} has units for ({', '.join(runnable)})"
        if op.dtype in ("fp8", "fp4"):
            do = f"Keep the weights alone in it: --weights {op.dtype}. {do}"
        raise bad_value(f"{graph.name}: dtype", expected, str(op.dtype), do)
