"""Trivial models to compare with: five fitted numbers, and a regression on FLOPs and bytes.

The five numbers of a whole-model floor: an efficiency e and a launch cost l make time
t = max(F/π, Q/β)/e + l·operators; a constant c and two utilisations a, b make power
P = min(c + a·F/(π·t) + b·Q/(β·t), cap). Fitted to relative error on the rows of all other model families.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.fit.models_data import Case
from wattcast.hardware import Gpu
from wattcast.kernels import lower, reference_of


def five_numbers(cases: list[Case], gpu: Gpu) -> tuple[Array, Array]:
    """Floor of latency and power of each case, from a fit that never saw its model family."""
    compute_s, memory_s, operators = (np.array(c) for c in zip(*(_terms(case, gpu) for case in cases), strict=True))
    latency = np.array([float(case.row.latency_s or np.nan) for case in cases])
    power = np.array([float(case.row.power_w or np.nan) for case in cases])
    family = np.array([family_of(case.row.model) for case in cases])
    limit_w = float(np.mean(gpu.power.limit_w))
    time = np.column_stack([np.maximum(compute_s, memory_s), operators])
    found_s, found_w = np.full(len(cases), np.nan), np.full(len(cases), np.nan)
    for name in dict.fromkeys(family.tolist()):
        here, others = family == name, family != name
        if not others.any():
            continue
        seconds = np.maximum(time @ _relative(time[others], latency[others]), 1e-9)
        busy = np.column_stack([np.ones(len(cases)), compute_s / latency, memory_s / latency])
        watts = _relative(busy[others], power[others])
        asked = np.column_stack([np.ones(len(cases)), compute_s / seconds, memory_s / seconds]) @ watts
        found_s[here], found_w[here] = seconds[here], np.minimum(asked, limit_w)[here]
    return found_s, found_w


def family_of(model: str) -> str:
    """The family of a catalogue model: its name up to the first size."""
    return next(
        (name for name in ("gpt2", "bert", "qwen", "llama", "vit", "resnet") if model.startswith(name)), model
    )


def regression(flop: Array, byte: Array, latency_s: Array, fold: npt.NDArray[np.int64]) -> Array:
    """Latency by non-negative least squares on FLOPs, bytes and a constant, out of fold, in relative error."""
    terms = np.column_stack([np.ones(len(flop)), flop / flop.max(), byte / byte.max()])
    found = np.full(len(flop), np.nan)
    for k in np.unique(fold):
        others = fold != k
        found[~others] = terms[~others] @ _relative(terms[others], latency_s[others])
    return found


def _relative(terms: Array, target: Array) -> Array:
    """Non-negative least squares of terms/target against one."""
    from scipy.optimize import nnls

    return np.asarray(nnls(terms / target[:, None], np.ones(len(target)))[0])


def _terms(case: Case, gpu: Gpu) -> tuple[float, float, float]:
    """Seconds of all arithmetic at peak, of all bytes at peak, and operators."""
    kernels = lower(case.graph, gpu, reference_of(gpu))
    rate = np.asarray(kernels.pipe_per_cycle) * float(np.mean(gpu.sm_count)) * float(np.mean(gpu.clocks.max_hz))
    compute_s = float((kernels.flop / rate) @ kernels.calls)
    return compute_s, case.graph.byte / float(np.mean(gpu.memory.byte_per_s)), float(case.operators)
