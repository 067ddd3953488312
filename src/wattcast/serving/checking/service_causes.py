"""Find what would explain how a service differs from its plan.

A cause is a change of the replica: a slower card, a lower clock, a smaller batch, a slower host,
arrivals in bursts. Each is simulated at several strengths, with the draws of the traffic that the
plain replica was simulated with, so that chance cancels. With x the logarithms of measured over
simulated figures, r(p) those that a cause of strength p makes, and σ how far each figure may be off
for other reasons, the strength is the one of the least

    χ²(p) = Σ (x - r(p))² / (σ² + (ρ·r(p))²)

where ρ is how far a simulated effect may itself be off. A cause that lowers χ² explains what was
seen; the one that leaves least explains it best.
"""

from __future__ import annotations

import math
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import (
    dataclass,
    fields,
    replace,
)
from typing import Any

import numpy as np

from wattcast.core.arrays import Array
from wattcast.serving.checking.check_coefficients import CHECK
from wattcast.serving.checking.promised_replica import (
    EngineChange,
    Figures,
    PromisedReplica,
    ServedTraffic,
)
from wattcast.serving.request_plan import EngineSettings
from wattcast.serving.step_costs import StepCosts

STRENGTHS_BETWEEN = 8  # that are tried between two that are simulated
MOST_REQUESTS = 400  # of a run; all strengths have the same draw, so that few are enough
LEAST_GAIN = 4.0  # of χ², below which a cause explains nothing
_TABLES = ("tokens", "head", "decode", "prompt", "prompt_more", "prompt_slope")


@dataclass(frozen=True)
class KindOfCause:
    """A way in which a replica can differ, of several strengths."""

    name: str
    sentence: str  # with the strength as {0}
    strengths: tuple[float, ...]  # the first is none at all
    change: Callable[[PromisedReplica, float], EngineChange]
    arrivals: Callable[[float], str] | None = None


@dataclass(frozen=True)
class FoundCause:
    """A cause that explains what was seen, and how well."""

    name: str
    strength: float
    sentence: str
    left: float  # χ² that it leaves
    gain: float  # χ² that it takes away


def scale_costs(
    costs: StepCosts,
    time: float,
    energy: float,
) -> StepCosts:
    """Return step costs whose times and energies are multiplied."""
    changed: dict[str, Any] = {}
    for name in _TABLES:
        seconds, joules = np.split(getattr(costs, name), 2, axis=-1)
        changed[name] = np.concatenate([seconds * time, joules * energy], axis=-1)
    return replace(costs, **changed)


def slow_host(costs: StepCosts, factor: float) -> StepCosts:
    """Return step costs whose host takes longer for all it does."""
    host = costs.host
    times = {
        item.name: getattr(host, item.name) * factor
        for item in fields(host)
        if item.name.startswith(("schedule", "launch", "output", "admit"))
        and item.name.endswith("_s")
    }
    return replace(costs, host=replace(host, **times))


def limit_batch(settings: EngineSettings, share: float) -> EngineSettings:
    """Return settings of an engine whose steps hold fewer sequences, or more."""
    most = max(round(settings.max_seqs * share), 1)
    return replace(settings, max_seqs=min(most, settings.max_batched_tokens))


def _slow_card(replica: PromisedReplica, factor: float) -> EngineChange:
    # the same power for longer
    return EngineChange(lambda costs: scale_costs(costs, factor, factor))


def _thirsty_card(replica: PromisedReplica, factor: float) -> EngineChange:
    def change(costs: StepCosts) -> StepCosts:
        scaled = scale_costs(costs, 1.0, factor)
        waiting_w = costs.waiting_w * factor
        return replace(scaled, idle_w=costs.idle_w * factor, waiting_w=waiting_w)

    return EngineChange(change)


def _lower_clock(replica: PromisedReplica, share: float) -> EngineChange:
    clock_hz = share * float(replica.costs.clock_hz[0])
    return EngineChange(lambda costs: costs.cap_clock(clock_hz, replica.gpu))


def _lower_limit(replica: PromisedReplica, share: float) -> EngineChange:
    return EngineChange(lambda costs: replace(costs, limit_w=costs.limit_w * share))


def _slow_host(replica: PromisedReplica, factor: float) -> EngineChange:
    return EngineChange(lambda costs: slow_host(costs, factor))


def _other_batch(replica: PromisedReplica, share: float) -> EngineChange:
    return EngineChange(change_settings=lambda settings: limit_batch(settings, share))


def _no_change(replica: PromisedReplica, strength: float) -> EngineChange:
    return EngineChange()


CAUSES = (
    KindOfCause(
        "card",
        "the card takes {0:.0%} longer for each step",
        (1.0, 1.05, 1.12, 1.25, 1.6, 2.5),
        _slow_card,
    ),
    KindOfCause(
        "card", "the card takes {0:.0%} less time for each step", (1.0, 0.9, 0.75, 0.5), _slow_card
    ),
    KindOfCause(
        "clock",
        "the clock is {0:.0%} lower than planned",
        (1.0, 0.9, 0.8, 0.7, 0.55, 0.4),
        _lower_clock,
    ),
    KindOfCause(
        "power limit",
        "the power limit is {0:.0%} lower than planned",
        (1.0, 0.85, 0.7, 0.5),
        _lower_limit,
    ),
    KindOfCause(
        "power",
        "the card draws {0:.0%} more at the same speed",
        (1.0, 1.1, 1.3),
        _thirsty_card,
    ),
    KindOfCause(
        "power", "the card draws {0:.0%} less at the same speed", (1.0, 0.9, 0.7), _thirsty_card
    ),
    KindOfCause(
        "host", "the host takes {0:.0%} longer for each step", (1.0, 1.3, 2.0, 4.0), _slow_host
    ),
    KindOfCause(
        "host", "the host takes {0:.0%} less time for each step", (1.0, 0.7, 0.4), _slow_host
    ),
    KindOfCause(
        "batch",
        "steps hold {0:.0%} fewer sequences at most (--max-num-seqs)",
        (1.0, 0.5, 0.25, 0.1),
        _other_batch,
    ),
    KindOfCause(
        "arrivals",
        "requests come in bursts (gaps vary {0:.1f} times as much as in Poisson arrivals)",
        (1.0, 2.0, 4.0),
        _no_change,
        lambda variation: f"gamma:cv={variation:g}",
    ),
)


def find_causes(
    replica: PromisedReplica,
    traffic: ServedTraffic,
    logs: Mapping[str, float],
    sigmas: Mapping[str, float],
    seed: int,
) -> list[FoundCause]:
    """Return the causes that explain what was seen, best first.

    ``logs`` are the logarithms of measured over simulated figures, and ``sigmas`` how far each may
    be off.
    """
    traffic = replace(traffic, requests=min(traffic.requests, MOST_REQUESTS))
    names = list(logs)
    seen = np.array([logs[name] for name in names])
    sigma = np.array([sigmas[name] for name in names])
    plain = replica.simulate(traffic, seed)
    alone = float(((seen / sigma) ** 2).sum())
    causes = []
    for kind in CAUSES:
        effects = [np.zeros(len(names))]
        for strength in kind.strengths[1:]:
            changed = traffic
            if kind.arrivals is not None:
                changed = replace(traffic, arrivals=kind.arrivals(strength))
            figures = replica.simulate(changed, seed, kind.change(replica, strength))
            effects.append(compare_logs(figures, plain, names))
        strength, chi_squared = fit_strength(
            np.array(kind.strengths), np.array(effects), seen, sigma
        )
        if alone - chi_squared > LEAST_GAIN:
            amount = strength if kind.arrivals is not None else abs(strength - 1.0)
            causes.append(
                FoundCause(
                    kind.name,
                    strength,
                    kind.sentence.format(amount),
                    chi_squared,
                    alone - chi_squared,
                )
            )
    return sorted(causes, key=lambda cause: cause.left)


def compare_logs(
    figures: Figures,
    plain: Figures,
    names: Sequence[str],
) -> Array:
    """Return the logarithms of figures over plain ones."""
    return np.array([math.log(figures[name] / plain[name]) for name in names])


def fit_strength(
    strengths: Array,
    effects: Array,
    seen: Array,
    sigma: Array,
    is_switch: bool = False,
) -> tuple[float, float]:
    """Return the strength of a cause that leaves least, and the χ² that it leaves.

    ``effects`` is ``(strength, figure)``; between strengths, effects are linear. A switch has
    nothing between its strengths.

    >>> effects = np.array([[0.0, 0.0], [0.2, 0.1]])
    >>> fit_strength(np.array([1.0, 1.2]), effects, np.array([0.1, 0.05]), np.array([0.1, 0.1]))
    (1.1, 0.0)
    """
    between = 1 if is_switch else STRENGTHS_BETWEEN
    places = np.linspace(0.0, len(strengths) - 1.0, between * (len(strengths) - 1) + 1)
    possible = np.arange(len(strengths))
    tried = np.interp(places, possible, strengths)
    columns = [np.interp(places, possible, column) for column in effects.T]
    effect = np.stack(columns, axis=-1)
    variance = sigma**2 + (CHECK.response * effect) ** 2
    chi_squared = ((seen - effect) ** 2 / variance).sum(axis=-1)
    best = int(np.argmin(chi_squared))
    return round(float(tried[best]), 4), float(chi_squared[best])
