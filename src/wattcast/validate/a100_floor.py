"""Trivial floors for whole models: five numbers, two utilisations, a constant, an efficiency and a launch cost.

    t = max(launch · operators, Σ max(F/π, Q/β) / efficiency),   P = c0 + c1·u_compute·V²f + c2·u_memory

*In-domain*: fitted to rows of the same GPU, leaving out one model family at a time. *Transferred*: fitted to the
H200's kernels and carried over by specification (rates, and watts by the power limit).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattcast import hardware
from wattcast.arrays import Array, per_sweep
from wattcast.dtypes import Dtype
from wattcast.fit import kernels_data
from wattcast.fit.calibrate_model import Measured
from wattcast.fit.kernels import random
from wattcast.hardware import Gpu
from wattcast.workload.graph import Graph, Operator


@dataclass(frozen=True)
class Work:
    """A row in the floor's terms: operators, roofline seconds, compute seconds and memory seconds."""

    ops: Array
    roof_s: Array
    compute_s: Array
    memory_s: Array
    clock: Array  # V²·f against the top clock's


def work_of(measured: Sequence[Measured], gpu: Gpu) -> Work:
    """Roofline terms of whole models."""
    top_hz = float(per_sweep(gpu.clocks.max_hz))
    columns = [_graph(m.graph, gpu, m.clock_hz or top_hz) for m in measured]
    ops, roof, compute, memory = (np.array(c) for c in zip(*columns, strict=True))
    clock_hz = np.array([m.clock_hz or top_hz for m in measured])
    volts = gpu.power.voltage_v
    squared = 1.0 if volts is None else (volts.at(clock_hz) / volts.value.max()) ** 2
    return Work(ops, roof, compute, memory, squared * clock_hz / top_hz)


def _graph(graph: Graph, gpu: Gpu, clock_hz: float) -> tuple[float, float, float, float]:
    count = roof = compute = memory = 0.0
    for block in graph.blocks:
        for op in block.ops:
            calls = block.repeat * op.count
            c, m = _operator(op, gpu, clock_hz)
            count, roof = count + calls, roof + calls * max(c, m)
            compute, memory = compute + calls * c, memory + calls * m
    return count, roof, compute, memory


def _operator(op: Operator, gpu: Gpu, clock_hz: float) -> tuple[float, float]:
    tensor, cuda = gpu.pipes.tensor_flop_per_cycle, gpu.pipes.cuda_flop_per_cycle
    product = op.kind in ("linear", "bmm", "conv2d", "attention")
    rate = tensor.get(op.dtype, cuda.get(op.dtype, cuda[Dtype.FP32])) if product else cuda[Dtype.FP32]
    flop_per_s = float(per_sweep(rate)) * float(per_sweep(gpu.sm_count)) * clock_hz
    return op.flop / flop_per_s, (op.read_byte + op.write_byte) / float(per_sweep(gpu.memory.byte_per_s))


def in_domain(measured: Sequence[Measured], family: Sequence[str], gpu: Gpu) -> tuple[Array, Array]:
    """Latency and power of every row from the rows of other model families."""
    work, names = work_of(measured, gpu), np.array(family)
    seconds, watts = (np.array([getattr(m, n) for m in measured], dtype=float) for n in ("latency_s", "power_w"))
    said_s, said_w = np.zeros(len(names)), np.zeros(len(names))
    for name in dict.fromkeys(family):
        mine = names == name
        launch_s, efficiency = _time(work, seconds, ~mine)
        time = np.maximum(launch_s * work.ops, work.roof_s / efficiency)
        said_s[mine] = time[mine]
        coefficients = _solve(_columns(work, seconds)[~mine], watts[~mine])
        said_w[mine] = (_columns(work, time) @ coefficients)[mine]
    return said_s, said_w


def transferred(measured: Sequence[Measured], gpu: Gpu) -> tuple[Array, Array]:
    """Latency and power of every row from the H200's kernels and the specification."""
    parent, rows = hardware.load("h200"), kernels_data.load("h200")
    kept = rows.where(random(rows) & (rows.repeat == 0))
    top_hz = float(per_sweep(parent.clocks.max_hz))
    both = np.array([_operator(op, parent, top_hz) for op in kept.ops])
    seconds = kept.of("latency_s")
    burst = kept.is_kind("burst") & (np.nan_to_num(seconds) > LONG_S)
    efficiency = float(np.exp(np.median(np.log(both.max(axis=1)[burst] / seconds[burst]))))
    steady = ~kept.is_kind("burst") & np.isfinite(kept.of("power_w")) & np.isfinite(seconds)
    rates = both[steady] / seconds[steady, np.newaxis]
    watts = kept.of("power_w")[steady]
    coefficients = _solve(np.column_stack([np.ones(len(watts)), rates]), watts)
    scale = float(per_sweep(gpu.power.limit_w)) / float(per_sweep(parent.power.limit_w))
    work = work_of(measured, gpu)
    time = np.maximum(LAUNCH_S * work.ops, work.roof_s / efficiency)
    return time, scale * (_columns(work, time) @ coefficients)


LAUNCH_S = 12e-6  # of the H200's bundle
LONG_S = 100e-6  # shorter kernels are mostly start and drain


def _time(work: Work, seconds: Array, use: Array) -> tuple[float, float]:
    """Launch cost and efficiency by a small search on relative error."""
    best = (np.inf, 0.0, 1.0)
    for launch_s in np.linspace(4e-6, 40e-6, 37):
        for efficiency in np.linspace(0.2, 1.0, 41):
            said = np.maximum(launch_s * work.ops, work.roof_s / efficiency)
            error = float(np.mean(np.abs(said / seconds - 1.0)[use]))
            best = min(best, (error, float(launch_s), float(efficiency)))
    return best[1], best[2]


def _columns(work: Work, seconds: Array) -> Array:
    return np.column_stack([np.ones(len(seconds)), work.compute_s / seconds * work.clock, work.memory_s / seconds])


def _solve(columns: Array, watts: Array) -> Array:
    """Least squares on relative error."""
    return np.asarray(np.linalg.lstsq(columns / watts[:, np.newaxis], np.ones(len(watts)), rcond=None)[0])
