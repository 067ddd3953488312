"""Let the governor of a GPU slow the steps of an engine down to its power limit.

The governor holds the mean power over a time τ at the limit: with P̄ the mean before, a step of
length t may draw (L - P̄ e^(-t/τ)) / (1 - e^(-t/τ)), and runs at the highest clock that keeps to
it. After a pause this is more than the limit (a burst), under steady load it is the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from wattcast.core.arrays import Array
from wattcast.serving.step_costs import StepCosts


def govern_steps(
    costs: StepCosts,
    cost: Array,
    steps: int,
    floor_s: float,
    mean_w: float | None = None,
) -> tuple[float, float]:
    """Return time and energy of ``steps`` steps of a cost, a row of latencies and energies by
    clock.

    They run at the highest clock that the limit allows, as ``settle_clock`` finds it.
    """
    clocks = costs.clocks
    values: list[float] = cost.tolist()

    def cost_at(place: int) -> complex:
        return complex(values[place], values[clocks + place])

    return settle_clock(
        costs,
        cost_at,
        steps,
        floor_s,
        mean_w,
    )


def settle_clock(
    costs: StepCosts,
    cost_at: Callable[[int], complex],
    steps: int,
    floor_s: float,
    mean_w: float | None = None,
) -> tuple[float, float]:
    """Return time and energy of ``steps`` steps at the highest clock that the limit allows.

    ``cost_at`` gives seconds + i·joules of a step at a clock, counted from the top. ``mean_w`` is
    the mean power before; None stands for steady load. The steps take no less than ``floor_s``, the
    time of the host. Where even the lowest clock draws too much, that clock is taken.
    """
    limit_w = costs.limit_w
    faster_s = 0.0
    faster_w = 0.0
    for place in range(costs.clocks):
        cost = cost_at(place)
        span_s = cost.real * steps
        energy_j = cost.imag * steps
        if floor_s > span_s:
            energy_j += costs.waiting_w * (floor_s - span_s)
            span_s = floor_s
        power_w = energy_j / span_s
        earlier_share = 0.0 if mean_w is None else math.exp(-span_s / costs.host.governor_s)
        earlier_w = earlier_share * (mean_w or 0.0)
        if earlier_w + power_w * (1.0 - earlier_share) <= limit_w:
            if place == 0 or power_w >= faster_w:
                return span_s, energy_j
            # the clock lies between this one and the one before, at the power that is allowed
            allowed_w = (limit_w - earlier_w) / (1.0 - earlier_share)
            allowed_w = min(max(allowed_w, power_w), faster_w)
            slower_share = (faster_w - allowed_w) / (faster_w - power_w)
            span_s = faster_s + slower_share * (span_s - faster_s)
            return span_s, allowed_w * span_s
        faster_s = span_s
        faster_w = power_w
    return faster_s, faster_s * faster_w


def predict_steady_step(
    costs: StepCosts,
    decodes: int,
    context: float,
    chunks: Sequence[tuple[int, int]],
    admitted: float = 0.0,
) -> tuple[float, float]:
    """Return latency and energy of a step that is repeated until the governor has settled.

    ``chunks`` are prompt tokens and the tokens computed before them; ``admitted`` requests come in
    with each step.
    """
    prompts = len(chunks)
    tokens = decodes + sum(tokens for tokens, _ in chunks)
    host_s = costs.host.repeated_step_s(
        costs.launches,
        tokens,
        decodes,
        prompts,
        admitted,
    )
    cost = costs.mixed_cost(
        tokens,
        decodes,
        context,
        chunks,
        decodes + prompts,
    )
    return govern_steps(costs, cost, 1, host_s)
