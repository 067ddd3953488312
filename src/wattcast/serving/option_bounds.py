"""Bound what an option of a plan can do, by its step costs.

No simulated replica serves more requests a second or takes fewer joules a request than these
bounds, so an option whose bound is behind the best plan need not be simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattcast.core import BadInput
from wattcast.core.arrays import Array
from wattcast.core.errors import WattcastError
from wattcast.hardware import Gpu
from wattcast.serving.plan_coefficients import PLAN
from wattcast.serving.plan_options import (
    MOST_SEQUENCES,
    PlanOption,
    StepTables,
)
from wattcast.serving.service_demand import ServiceDemand
from wattcast.serving.step_costs import StepCosts
from wattcast.serving.step_tabulation import StepRange, tabulate_step_costs

_PARTS = (4, 2, 1)  # of a full batch, whose time per token is compared
_ROUNDS = 4  # in which batch and rate come close to each other
# Weights of time against power, of which each gives a bound, ``(weight, part, clock)``.
_TIME_WEIGHTS = np.linspace(0.0, 1.0, 9)[:, np.newaxis, np.newaxis]


def tabulate_option(
    demand: ServiceDemand,
    option: PlanOption,
    tables: StepTables,
) -> PlanOption:
    """Return an option with its step costs and the bounds that follow.

    Raises a sentence that says why there are none.
    """
    costs = tabulate_setting(demand, option, tables)
    most_seqs = max(option.max_seqs // costs.stages, 1)
    per_s, joules = _bound_steps(demand, costs, most_seqs, option)
    return replace(
        option,
        costs=costs,
        most_per_s=per_s * costs.lanes,
        least_j=joules * costs.gpu_count,
        idle_w=costs.idle_w,
    )


def tabulate_setting(
    demand: ServiceDemand,
    option: PlanOption,
    tables: StepTables,
) -> StepCosts:
    """Return the step costs of an option's GPUs at its clock and power limit.

    Raises a sentence that says why there are none.
    """
    chip = option.gpu
    whole_key = (chip.name, option.shared)
    key = (*whole_key, option.clock_hz, option.power_limit_w)
    if key in tables.set_to:
        return tables.set_to[key]
    if whole_key not in tables.predicted:
        tables.predicted[whole_key] = _predict_table(demand, option)
    table = tables.predicted[whole_key]
    if isinstance(table, BadInput):
        raise table
    tables.set_to[key] = set_card(table, chip, option.clock_hz, option.power_limit_w)
    return tables.set_to[key]


def set_card(
    table: StepCosts,
    chip: Gpu,
    clock_hz: float,
    power_limit_w: float,
) -> StepCosts:
    """Return the step costs of a card that is set to a highest clock and a power limit.

    The governor holds the same share of any limit.
    """
    governor_share = table.limit_w / float(np.mean(chip.power.limit_w))
    return table.cap_clock(clock_hz, chip).limit_power(power_limit_w * governor_share)


def _predict_table(demand: ServiceDemand, option: PlanOption) -> StepCosts | BadInput:
    """Predict the step costs of an option at the card's own clock, or say why it cannot serve."""
    trace = demand.draw_requests()
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    try:
        steps = StepRange(
            longest_context=longest,
            context_spread=trace.context_spread,
            max_seqs=max(MOST_SEQUENCES[0] // option.shared.pp, 1),
        )
        if option.speculation is not None:
            most_verified = MOST_SEQUENCES[0] * (1 + option.speculation.tokens)
            steps = replace(
                steps,
                max_tokens=max(steps.max_tokens, most_verified),
                tokens_a_step=1 + option.speculation.tokens,
                draft=option.speculation.draft,
            )
        table = tabulate_step_costs(
            demand.model,
            option.gpu,
            option.shared,
            steps,
            machine=demand.machine,
        )
        if table.cache_tokens < table.groups.count_slots(longest):
            raise BadInput(f"the cache holds {table.cache_tokens} tokens, a request {longest}.")
    except WattcastError as error:
        return BadInput(f"{option.gpu.name}, {option.layout}: {str(error).rstrip('.')}.")
    return table


def _bound_steps(
    demand: ServiceDemand,
    costs: StepCosts,
    most_seqs: int,
    option: PlanOption,
) -> tuple[float, float]:
    """Return the most requests a second of a lane, or of pools, and a request's least joules.

    The joules are those of one of the lane's GPUs beyond idle power.

    Time per token bounds how many sequences decode at once: with λ requests a second of O tokens
    each, and T at most from token to token, N = λ·(O - 1)·T by Little's law. Fewer sequences share
    a step, so the rate falls with N and N with the rate; four rounds come close to where they meet.
    """
    prompt = demand.mean_lengths[0]
    most = max(
        min(most_seqs, int(costs.cache_tokens / max(costs.groups.count_slots(prompt), 1.0))), 1
    )
    work = _RequestWork(
        _bound_prompt(costs, prompt),
        _bound_shared_steps(demand, costs, most),
        _count_mixed_steps(prompt, most_seqs, option),
    )
    per_s = math.inf
    batch = float(most_seqs)
    later_tokens = max(demand.mean_lengths[1] - 1.0, 0.0)
    for _ in range(_ROUNDS):
        full = min(max(math.ceil(batch), 1), most)
        apart = _bound_decode_steps(demand, costs, full, work.mixed_steps)
        per_s, joules = _bound_batch(costs, work, apart, option.pools)
        per_engine_s = per_s / max(option.pools[1], 1)
        decoding = per_engine_s * later_tokens * demand.longest_token_s
        if decoding >= batch:
            break
        batch = decoding
    return per_s, joules


@dataclass(frozen=True)
class _RequestWork:
    """What the steps of one request cost at least, as rows of latencies and energies."""

    prompt: Array
    shared_steps: Array  # of all later tokens, if every step were as full as it can be
    mixed_steps: float  # that hold prompts of one request, at most


def _bound_prompt(costs: StepCosts, prompt: float) -> Array:
    """Bound the cost of a request's prompt: its tokens in the largest step, and its attention."""
    place = min(max(round(prompt), 1), len(costs.prompt) - 1)
    return np.asarray(costs.prompt[place] + costs.token_line[1] * prompt)


def _bound_batch(
    costs: StepCosts,
    work: _RequestWork,
    apart: Array,
    pools: tuple[int, int],
) -> tuple[float, float]:
    """Bound rate and joules where steps without prompts cost ``apart``, as ``_bound_steps`` does.

    A step over T tokens costs at least a + b·T. A request has P prompt tokens, which cost b·P and
    their own attention, and takes part in O - 1 decode steps, which two bounds hold for; the larger
    counts.
    """
    first = work.prompt
    shared = work.shared_steps

    # joules at the clocks that the power limit allows, and the rate
    seconds, joules = np.split(first + np.maximum(shared, apart), 2)
    governed = costs.count_governed_clocks()
    beyond_j = float((joules - costs.idle_w * seconds)[:governed].min())
    prefill, decode = pools
    if prefill:
        prompt_s = _bound_busy_s(costs, (first,))
        decode_s = max(_bound_busy_s(costs, (shared,)), _bound_busy_s(costs, (apart,)), 1e-12)
        per_s = min(max(prefill / prompt_s, 1e-9), decode / decode_s)
    else:
        both = (_bound_busy_s(costs, (first, shared)), _bound_busy_s(costs, (first, apart)))
        per_s = 1.0 / max(float(seconds.min()), *both)
    return per_s / PLAN.bound_slack, PLAN.bound_slack * max(beyond_j, 0.0)


def _bound_busy_s(costs: StepCosts, parts: Sequence[Array]) -> float:
    """Bound the seconds between two requests of an engine that never rests and keeps to its limit.

    A request's parts take s seconds and e joules beyond idle power, at clocks that may differ. With
    λ requests a second the engine is busy for λ Σs ≤ 1 and draws λ Σe ≤ L - I more than idle, for
    the limit L and idle power I. So for each weight w between 0 and 1

        1/λ ≥ Σ min over clocks of (w s + (1 - w) e / (L - I)).

    The governor holds no limit that a part of a step exceeds even at the lowest clock.
    """
    seconds, joules = np.split(np.stack(parts), 2, axis=-1)
    room_w = costs.limit_w - costs.idle_w
    if room_w <= 0.0 or math.isinf(room_w) or costs.part_power_w[-1] > costs.limit_w:
        return float(seconds.min(axis=-1).sum())
    beyond_s = (joules - costs.idle_w * seconds) / room_w
    weighed_s = _TIME_WEIGHTS * seconds + (1.0 - _TIME_WEIGHTS) * beyond_s
    return float(weighed_s.min(axis=-1).sum(axis=-1).max())


def _bound_shared_steps(
    demand: ServiceDemand,
    costs: StepCosts,
    most: int,
) -> Array:
    """Bound a request's decode steps by the ``most`` sequences that share each.

    They cost at least (O - 1)·(a/B + b) and the request's own attention.
    """
    prompt, output = demand.mean_lengths
    per_step, per_token = costs.token_line
    context = prompt + output / 2.0
    one = costs.decode_cost(1, 1, context) - costs.tokens[costs.padded[1]]
    all_of_them = costs.decode_cost(most, most, context) - costs.tokens[costs.padded[most]]
    attention = np.maximum(np.minimum(one, all_of_them / most), 0.0)
    return np.asarray((output - 1.0) * (per_token + per_step / most + attention))


def _bound_decode_steps(
    demand: ServiceDemand,
    costs: StepCosts,
    full: int,
    mixed_steps: float,
) -> Array:
    """Bound a request's decode steps that hold no prompt: a token costs d(B)/B at least in these.

    Of each request, prompts are in ``mixed_steps`` at most, of ``full`` sequences each.
    """
    prompt, output = demand.mean_lengths
    context = prompt + output / 2.0
    sizes = sorted({1, *(max(full // part, 1) for part in _PARTS)})
    per_token = np.min([costs.decode_cost(n, n, context) / n for n in sizes], axis=0)
    return np.asarray(max(output - 1.0 - mixed_steps * full, 0.0) * per_token)


def _count_mixed_steps(
    prompt: float,
    most_seqs: int,
    option: PlanOption,
) -> float:
    """Return the most steps in which prompts of one request are: 1 + P/(C - B) of C tokens.

    A step either ends a prompt or is full.
    """
    if option.pools[0]:
        return 0.0
    return 1.0 + prompt / max(option.max_tokens - most_seqs, 1)
