"""Rehearse ``QueueKeeper`` on a trace of requests, beside an oracle that knows the future.

The plant is the engine simulator, with step costs that differ from the policy's forecast
(``perturb_costs``): all steps together, each kind of step, and how each follows the clock. The
policy reads what an engine's metrics tell once a second, and its decision has an effect 0.1 s
later.

The oracle may change the clock every second, at once. It knows the plant's own costs, every request
to come and the work that is in the engine. It is a dynamic programme over seconds and outstanding
output tokens R (``TrafficOracle``), followed in closed loop on the plant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.control.queue_keeper import (
    SEQUENCES,
    QueueKeeper,
    forecast_work,
)
from wattcast.control.rehearsal_coefficients import REHEARSAL
from wattcast.control.serving_control import ServingLimits
from wattcast.control.serving_rehearsal import ServingPlant
from wattcast.core.arrays import Array
from wattcast.hardware import Gpu
from wattcast.serving.arrivals import Trace
from wattcast.serving.governed_steps import predict_steady_step
from wattcast.serving.step_costs import StepCosts

LOOK_S = 1.0  # between two decisions
KINDS_OF_STEP = {  # tables of ``StepCosts`` that belong together
    "products": ("tokens",),
    "head": ("head",),
    "decode": ("decode",),
    "prompt": ("prompt", "prompt_more", "prompt_slope"),
}
BACKLOGS = 96  # points of the oracle's grid of outstanding tokens
BACKLOG_ROOM = 1.2  # of that grid, beyond the largest step that is forecast
LEAST_FREE = 0.05  # share of a second that is left by prompts, however many there are
PROMPT_KNOTS = 24  # lengths at which the work of a prompt is computed
SHORTEST_PROMPT = 16  # tokens, of which the longest prompt is twice as many at least
# Shares of the limits that the oracle's schedule may take; the most frugal that keeps counts.
FINE_J, LATE_J = 1e4, 1e3  # for a second that is late by its limit, and for any that is late
ORACLE_GOALS = (0.5, 0.8, 1.1)
MINUTE_S = 60.0

Decide = Callable[[float, ServingPlant], int]


def perturb_costs(
    costs: StepCosts,
    seed: int,
    most: float = REHEARSAL.cost_error,
) -> StepCosts:
    """Return step costs that differ from these by up to ``most``.

    Times and energies get a factor each for all steps and for each kind of step, which together
    stay within ``most``. How time and energy follow the clock differs by kind, too: a ratio r to
    the top clock becomes r^(1 ± most)."""
    random = np.random.default_rng(seed)
    common = REHEARSAL.shared_error * random.uniform(-most, most, 2)
    clocks = costs.clocks
    tables: dict[str, Any] = {}
    for names in KINDS_OF_STEP.values():
        single = REHEARSAL.shared_error * random.uniform(-most, most, 2)
        factor = 1.0 + np.clip(common + single, -most, most)
        exponent = 1.0 + random.uniform(-most, most, 2)
        for name in names:
            halves = []
            for half, by, power in zip(
                np.split(getattr(costs, name), 2, axis=-1), factor, exponent, strict=True
            ):
                top = half[..., :1]
                ratio = np.divide(half, top, out=np.ones_like(half), where=top > 0)
                halves.append(by * top * np.maximum(ratio, 0.0) ** power)
            assert halves[0].shape[-1] == clocks
            tables[name] = np.concatenate(halves, axis=-1)
    return replace(costs, **tables)


def perturb_levels(
    by_level: Sequence[StepCosts],
    gpu: Gpu,
    seed: int,
    most: float = REHEARSAL.cost_error,
) -> list[StepCosts]:
    """Return the clock levels of an engine whose step costs differ from these by up to ``most``."""
    plant = perturb_costs(by_level[-1], seed, most)
    return [plant.cap_clock(float(costs.clock_hz[0]), gpu) for costs in by_level]


@dataclass(frozen=True)
class ClockedTrace:
    """Hold what a way of choosing clocks made of a trace."""

    energy_j: float
    kept: npt.NDArray[np.bool_]  # by minute: whether both percentiles kept their limits
    levels: list[int]  # by interval
    worst: tuple[float, float]  # 99th percentiles of the worst minute, as shares of their limits


def serve_traffic(
    by_level: Sequence[StepCosts],
    trace: Trace,
    limits: ServingLimits,
    decide: Decide | int,
    delay_s: float = REHEARSAL.actuation_s,
    begin_s: float = 0.0,
    interval_s: float = LOOK_S,
) -> ClockedTrace:
    """Serve a trace to its end; ``decide`` is asked for the level of the next interval.

    What comes before ``begin_s`` is served, and not counted."""
    plant = ServingPlant(by_level, trace)
    earlier_j = 0.0
    end_s = float(trace.arrival_s[-1])
    level = decide if isinstance(decide, int) else len(by_level) - 1
    levels = [level]
    now_s = 0.0
    while now_s < end_s:
        now_s += interval_s
        plant.advance(now_s, level)
        if now_s <= begin_s:
            earlier_j = plant.engine.spent_j
        if isinstance(decide, int):
            continue
        earlier = level
        level = decide(now_s, plant)
        levels.append(level)
        if delay_s > 0.0:
            plant.advance(now_s + min(delay_s, interval_s), earlier)
    run = plant.engine.finish()
    first_s = run.first_token_s - trace.arrival_s
    token_s = (run.last_token_s - run.first_token_s) / np.maximum(trace.output_tokens - 1, 1)
    minute = (trace.arrival_s // MINUTE_S).astype(int)
    shares = []
    for number in np.unique(minute[trace.arrival_s >= begin_s]):
        those = minute == number
        first_share = np.percentile(first_s[those], 99) / limits.ttft_s
        token_share = np.percentile(token_s[those], 99) / limits.tpot_s
        shares.append((first_share, token_share))
    kept = np.max(shares, axis=1) <= 1.0
    worst = tuple(np.max(shares, axis=0).tolist())
    return ClockedTrace(plant.engine.spent_j - earlier_j, kept, levels, worst)


def follow_keeper(keeper: QueueKeeper) -> Decide:
    """Return the decisions of a policy, which sees what an engine's metrics tell."""

    def decide(now_s: float, plant: ServingPlant) -> int:
        return keeper.decide(now_s, plant.read(), plant.engine.spent_j)

    return decide


class TrafficOracle:
    """Choose the clock of every second by dynamic programming, with the future known.

    With R tokens outstanding, N = R / r sequences decode, where r is the mean of what a request
    that decodes still has to come: E[L²] / 2E[L]. In a second at level l, prompts that arrive take
    the share ρ of its time, and (1 - ρ) / d_l(N) steps are made. A level whose time per token
    d_l(N) / (1 - ρ), or time to a first token ρ + d_l(N), passes ``goal`` times its limit costs a
    fine that grows with the excess, so that the top clock is taken where nothing fits. The cost to
    go is that energy plus the cost to go of the tokens that remain."""

    def __init__(
        self,
        by_level: Sequence[StepCosts],
        trace: Trace,
        limits: ServingLimits,
    ) -> None:
        self._limits = limits
        output = trace.output_tokens.astype(float)
        self.residual = float((output**2).mean() / (2.0 * output.mean()))
        prompt = float(trace.prompt_tokens.mean())
        self._seconds = math.ceil(float(trace.arrival_s[-1])) + 1
        second = trace.arrival_s.astype(int)
        self._tokens = np.bincount(second, output, self._seconds)
        self._work = forecast_work(by_level, prompt, float(output.mean()))
        # prompts by their own lengths: (level, second) seconds and joules
        share = _weigh_prompts(by_level[-1], trace)
        weight = np.bincount(second, share, self._seconds)
        self._prompt_s = np.outer(self._work.prompt_s, weight)
        self._prompt_j = np.outer(self._work.prompt_j, weight)
        most = BACKLOG_ROOM * float(SEQUENCES[-1]) * self.residual
        self._grid = np.concatenate([[0.0], np.geomspace(self.residual, most, BACKLOGS - 1)])
        self._to_go: list[Array] = []

    def plan(self, goal: float) -> None:
        """Compute the cost to go of every second, from the last one back."""
        self._goal = goal
        to_go = np.zeros(len(self._grid))
        self._to_go = [to_go]
        for second in range(self._seconds - 1, -1, -1):
            cost, rest = self._try_levels(second, self._grid)
            total = cost + np.interp(rest, self._grid, to_go)
            to_go = total.min(axis=0)
            self._to_go.append(to_go)
        self._to_go.reverse()

    def decide(
        self,
        now_s: float,
        plant: ServingPlant,
    ) -> int:
        """Return the level of the next second for the work that is in the engine."""
        second = min(round(now_s), self._seconds - 1)
        engine = plant.engine
        waiting = engine.waiting * float(self._tokens.sum() / max(len(engine.plan.arrival_s), 1))
        backlog = np.array([engine.remaining_tokens + waiting])
        cost, rest = self._try_levels(second, backlog)
        total = cost + np.interp(rest, self._grid, self._to_go[second + 1])
        return int(np.argmin(total[:, 0]))

    def _try_levels(
        self,
        second: int,
        backlog: Array,
    ) -> tuple[Array, Array]:
        """Return the cost of a second and the tokens that remain, ``(level, backlog)``."""
        work = self._work
        prompt_s = self._prompt_s[:, second, np.newaxis]
        free = np.maximum(1.0 - prompt_s, LEAST_FREE)
        tokens = backlog + self._tokens[second]
        sequences = np.maximum(tokens / self.residual, 1.0)
        step_s = _interpolate_columns(work.sequences, work.decode_s, sequences)
        step_j = _interpolate_columns(work.sequences, work.decode_j, sequences)
        steps = np.minimum(free / step_s, tokens / sequences)
        rest = tokens - steps * sequences
        idle_s = np.maximum(free - steps * step_s, 0.0)
        energy_j = self._prompt_j[:, second, np.newaxis] + steps * step_j
        energy_j = energy_j + idle_s * work.idle_w[:, np.newaxis]
        late = np.maximum(step_s / free / (self._goal * self._limits.tpot_s) - 1.0, 0.0)
        late = late + np.maximum(
            (prompt_s + step_s) / (self._goal * self._limits.ttft_s) - 1.0, 0.0
        )
        fine_j = FINE_J * late + LATE_J * (late > 0)
        return energy_j + fine_j, rest


def _interpolate_columns(
    knots: Array,
    rows: Array,
    at: Array,
) -> Array:
    """Return all rows at the same values, ``(row, value)``; the last piece goes on."""
    place = np.clip(np.searchsorted(knots, at), 1, len(knots) - 1)
    share = (at - knots[place - 1]) / (knots[place] - knots[place - 1])
    return np.asarray((1.0 - share) * rows[:, place - 1] + share * rows[:, place])


def _weigh_prompts(costs: StepCosts, trace: Trace) -> Array:
    """Return what the prompt of each request takes, over what one of the mean length takes."""
    most = len(costs.prompt) - 1
    longest = max(int(trace.prompt_tokens.max()), 2 * SHORTEST_PROMPT)
    knots = np.unique(np.geomspace(SHORTEST_PROMPT, longest, PROMPT_KNOTS).astype(int))
    seconds = []
    for prompt in (*knots.tolist(), int(trace.prompt_tokens.mean())):
        chunk = min(prompt, most)
        earlier = round(0.5 * (prompt - chunk))
        step_s, _ = predict_steady_step(costs, 0, 0.0, [(chunk, earlier)])
        seconds.append(step_s * prompt / chunk)
    return np.asarray(np.interp(trace.prompt_tokens, knots, seconds[:-1]) / seconds[-1])


def rehearse_traffic(
    by_level: Sequence[StepCosts],
    plant_costs: Sequence[StepCosts],
    trace: Trace,
    limits: ServingLimits,
    begin_s: float = 0.0,
) -> dict[str, Any]:
    """Serve a trace at the top clock, under the policy and by the oracle, and say what each saved.

    What comes before ``begin_s``, while the policy learns, is counted for nobody.

    The oracle's saving is the largest of those that keep at least the minutes asked of the policy:
    its schedules, the best fixed clock, and the policy's own schedule if that keeps them."""
    highest = len(plant_costs) - 1
    serve = partial(
        serve_traffic,
        plant_costs,
        trace,
        limits,
        begin_s=begin_s,
    )
    top = serve(highest)
    keeper = make_queue_keeper(by_level, limits)
    ours = serve(follow_keeper(keeper))

    def keeps(run: ClockedTrace) -> bool:
        return count_kept_of_top(run, top) >= REHEARSAL.oracle_kept

    candidates = {"top": top}
    oracle = TrafficOracle(plant_costs, trace, limits)
    for goal in ORACLE_GOALS:
        oracle.plan(goal)
        run = serve(oracle.decide, delay_s=0.0)
        if not keeps(run):
            break
        candidates[f"every second, {goal:g} of the limits"] = run
    low, at = 0, highest
    while low < at:  # the lowest fixed clock that keeps the limits
        level = (low + at) // 2
        run = serve(level)
        if keeps(run):
            candidates[f"level {level}"] = run
            at = level
        else:
            low = level + 1
    if keeps(ours):
        candidates["policy"] = ours
    best = min(candidates, key=lambda name: candidates[name].energy_j)
    possible = 1.0 - candidates[best].energy_j / top.energy_j
    saving = 1.0 - ours.energy_j / top.energy_j
    return {
        "requests": len(trace),
        "minutes": len(top.kept),
        "minutes_kept_at_top": int(top.kept.sum()),
        "minutes_kept_of_top": int((ours.kept & top.kept).sum()),
        "saving": saving,
        "oracle_saving": possible,
        "oracle": best,
        "share_of_oracle": saving / possible if possible > 0 else 1.0,
        "mean_level": float(np.mean(ours.levels)),
    }


def count_kept_of_top(run: ClockedTrace, top: ClockedTrace) -> float:
    """Return the share of the minutes that the top clock keeps, in which a run kept the limits."""
    return float(run.kept[top.kept].mean()) if top.kept.any() else 1.0


def make_queue_keeper(
    by_level: Sequence[StepCosts],
    limits: ServingLimits,
    clocks_hz: Sequence[float] | None = None,
) -> QueueKeeper:
    """Return a policy that forecasts the work of an engine at each clock, or at those a card
    has."""
    known_hz = [float(costs.clock_hz[0]) for costs in by_level]

    def forecast(prompt: float, output: float) -> Any:
        work = forecast_work(by_level, prompt, output)
        return work if clocks_hz is None else work.interpolate(known_hz, clocks_hz)

    return QueueKeeper(clocks_hz or known_hz, limits, forecast)
