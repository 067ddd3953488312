"""Predict the least that a token and a request cost, for bounds that no plan can beat.

Both take one or two predictions, where a table of step costs takes some hundred. The stages of a
pipeline are all taken to be as long as the largest, as in the simulator: it is of its results that
no plan can be better than these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from wattcast.core.arrays import Array
from wattcast.hardware import Gpu
from wattcast.serving.cache_size import measure_cache
from wattcast.serving.step_costs import cap_columns
from wattcast.serving.step_tabulation import (
    list_clocks,
    predict_rows,
    remove_attention,
)
from wattcast.workload.build_model import build_graph
from wattcast.workload.engine_schedule import STEP_TOKENS
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import (
    ModelOptions,
    OutputHead,
    WorkloadPhase,
)


@dataclass(frozen=True)
class TokenCost:
    """Cost of a token in the largest step without attention, by clock."""

    clock_hz: Array  # (clock,), falling
    row: Array  # (2 · clock,) latencies, then energies

    def least_cost(self, clock_hz: float) -> tuple[float, float]:
        """Return the least seconds and the least joules at clocks of ``clock_hz`` at most.

        The two may be at different clocks.
        """
        seconds, joules = np.split(cap_columns(self.row, self.clock_hz, clock_hz), 2)
        return float(seconds.min()), float(joules.min())


def predict_token_cost(
    model: ModelSpec,
    gpu: Gpu,
    options: ModelOptions,
    max_tokens: int = STEP_TOKENS,
    power_factor: float = 1.0,
) -> TokenCost:
    """Predict the cost of a token on one GPU of each pipeline stage, summed over the stages.

    ``power_factor`` is on the joules, of a card that draws more or less than the usual one.
    Raises an error where the model leaves no memory for a cache.
    """
    measure_cache(model, gpu, options, max_tokens)  # raises where no cache fits
    largest = replace(
        options,
        phase=WorkloadPhase.PREFILL,
        batch=1,
        seq=max_tokens,
        head=OutputHead.NONE,
    )
    step = remove_attention(build_graph(model, largest))
    clocks_hz = list_clocks(gpu)
    (row,) = predict_rows(gpu, clocks_hz, step=[step])["step"]
    row[len(clocks_hz) :] *= power_factor
    return TokenCost(clocks_hz, options.pp * row / max_tokens)


@dataclass(frozen=True)
class LoneRequest:
    """Time of a request that is alone in its engine, by clock: no simulated plan does better."""

    clock_hz: Array  # (clock,), falling
    first_token_s: Array  # (clock,) kernels of the prompt
    next_token_s: Array  # (clock,) kernels of a decode step

    def least_s(self, clock_hz: float) -> tuple[float, float]:
        """Return the least seconds of the first and of a further token at ``clock_hz`` at most."""
        times_s = np.stack([self.first_token_s, self.next_token_s])
        doubled = np.concatenate([times_s, times_s], axis=-1)  # ``cap_columns`` takes two halves
        capped_s = cap_columns(doubled, self.clock_hz, clock_hz)
        first_s, later_s = np.split(capped_s, 2, axis=-1)[0]
        return float(first_s.min()), float(later_s.min())


def predict_lone_request(
    model: ModelSpec,
    gpu: Gpu,
    options: ModelOptions,
    prompt: int,
    context: int,
) -> LoneRequest:
    """Predict a prompt of so many tokens, and a decode step of one sequence behind a context.

    Only kernels are counted, without the head, the host and the sampling of a token. The stages
    of a pipeline work one after the other on a request that is alone.
    """
    alone = replace(options, batch=1, head=OutputHead.NONE)
    first = build_graph(model, replace(alone, phase=WorkloadPhase.PREFILL, seq=prompt))
    later = build_graph(model, replace(alone, phase=WorkloadPhase.DECODE, seq=context))
    clocks_hz = list_clocks(gpu)
    rows = predict_rows(gpu, clocks_hz, steps=[first, later])["steps"]
    first_s, later_s = options.pp * rows[:, : len(clocks_hz)]
    return LoneRequest(clocks_hz, first_s, later_s)
