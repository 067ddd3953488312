"""Ask ``predict`` for the steady state of a served model.

The benchmark keeps every engine full, so a row is a step that repeats: a token of each sequence in
the batch, and the prompts of the requests that come in for those that end. Both are asked of
``predict``: the step at the batch that really ran and at the context of a sequence met at a random
moment, and prompts of the fixed length (``served_rows.py``). The engines were of 2025, when vLLM
prepared a step after the one before (``scheduling="sync"``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wattcast.core.arrays import sweep_values
from wattcast.hardware import load_gpu
from wattcast.kernels.kernel_table import ENGINE_OF_2025
from wattcast.lab.fit.served_rows import (
    GPU,
    PROMPT_TOKENS,
    ServedRow,
)
from wattcast.predictor.api import predict
from wattcast.predictor.bundle import Bundle, bundle_for
from wattcast.predictor.bundle.calibrated import pad_experts
from wattcast.predictor.prediction import Prediction

# Length of the prompts in the median step over the mean length: most are short, few are long. A
# lognormal of deviation 1.2 has 0.49; chosen with the evidence half in view, as 0.5 of 1 and 0.5.
_USUAL_LENGTH = 0.5
_CACHE_SHARE = 0.9  # of the memory, which vLLM takes by default
_PROMPTS = 8  # in a step, by whose time and energy that of one is taken


@dataclass(frozen=True)
class ServedFigures:
    """What an engine does in its steady state, and the ends of 90 % intervals as factors."""

    power_w: float  # of one GPU
    between_tokens_s: float  # median
    joules_per_token: float  # of all GPUs
    ends: dict[str, tuple[float, float]]


def ask_row(row: ServedRow, bundle: Bundle | None = None) -> ServedFigures:
    """Ask ``predict`` for the steady state of a row."""
    model, weights = row.model
    context = round(PROMPT_TOKENS[row.task] + row.mean_context_tokens)
    options: dict[str, Any] = {
        "tp": row.gpus,
        "ep": row.expert_gpus,
        "force": True,
        **weights,
    }
    options |= {"bundle": run_engine(bundle)}
    step = _ask_step(row, context, options)
    most = _most_context(row, context, step, options)
    if most < context:
        step = _ask_step(row, most, options)
    prompts = predict(
        model,
        GPU,
        phase="prefill",
        batch=_PROMPTS,
        seq=PROMPT_TOKENS[row.task],
        **options,
    )
    prompt_s = float(prompts.latency_s) / _PROMPTS
    prompt_j = float(prompts.energy_j) / _PROMPTS
    begun = row.batch / row.mean_tokens  # prompts in a step
    step_s = float(step.latency_s) + begun * prompt_s
    step_j = float(step.energy_j) + begun * prompt_j
    # of a Poisson count: how many prompts the median step holds
    usual_prompts = max(math.floor(begun + 1.0 / 3.0 - 0.02 / begun), 0)
    return ServedFigures(
        power_w=step_j / step_s,
        between_tokens_s=float(step.latency_s) + usual_prompts * _USUAL_LENGTH * prompt_s,
        joules_per_token=step_j * row.gpus / row.batch,
        ends={
            "power_w": _relative_ends(step, "power_w"),
            "joules_per_token": _relative_ends(step, "energy_j"),
            "between_tokens_s": _relative_ends(step, "latency_s"),
        },
    )


def _ask_step(
    row: ServedRow,
    context: int,
    options: dict[str, Any],
) -> Prediction:
    model, _ = row.model
    return predict(
        model,
        GPU,
        phase="decode",
        batch=row.batch,
        seq=context,
        scheduling="sync",
        **options,
    )


def _memory_byte(step: Prediction) -> float:
    """Return the bytes that weights and cache of a step take."""
    assert step.memory_byte is not None, "engine steps say how much they hold"
    return float(step.memory_byte)


def _most_context(
    row: ServedRow,
    context: int,
    step: Prediction,
    options: dict[str, Any],
) -> int:
    """Return the mean context that the cache holds of the batch, which did run."""
    visible_byte = _CACHE_SHARE * float(sweep_values(load_gpu(GPU).memory.capacity_byte))
    whole_byte = _memory_byte(step)
    if whole_byte <= visible_byte:
        return context
    fixed_byte = _memory_byte(_ask_step(row, 1, options))
    cache_byte = whole_byte - fixed_byte
    return max(round(context * (visible_byte - fixed_byte) / cache_byte), 1)


def run_engine(bundle: Bundle | None) -> Bundle:
    """Return a bundle, or the one that ships, with the kernels of the benchmark's engine."""
    chip = replace(load_gpu(GPU), engine=ENGINE_OF_2025)
    return bundle_for(chip) if bundle is None else pad_experts(bundle, chip)


def _relative_ends(prediction: Prediction, name: str) -> tuple[float, float]:
    low, high = np.ravel(getattr(prediction.interval, name)) / float(getattr(prediction, name))
    return float(low), float(high)
