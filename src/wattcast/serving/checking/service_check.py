"""Compare what a service does with what its plan promised, load by load.

The promised replica is simulated under the traffic that came: its rate, its mean lengths, its share
of prompts found in the prefix cache. What is left is the card's, the host's or the engine's doing.
A figure is outside where the logarithm x of measured over simulated, less what it was when the
service was adopted, is beyond

    z·sqrt(serving² + model² + sampling²)          of a service that was not adopted
    z·sqrt(drift²·doublings² + floor² + sampling² + sampling_then²)      of one that was

with z such that one healthy service in twenty raises an alarm, over all figures and loads. Each
term is a standard deviation; half-widths that hold nine in ten are divided by 1.645. An adopted
service was seen to be healthy once: errors of the prediction cancel, but for what they drift where
load and lengths are others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from wattcast.core import units
from wattcast.hardware import Gpu
from wattcast.serving.checking.check_coefficients import CHECK
from wattcast.serving.checking.metrics_window import MetricsWindow, group_by_load
from wattcast.serving.checking.promised_replica import (
    LEAST_REQUESTS,
    MOST_REQUESTS,
    PromisedReplica,
    ServedTraffic,
)
from wattcast.serving.checking.service_causes import FoundCause, find_causes
from wattcast.serving.deployment.expected_service import (
    FIGURES,
    AdoptedFigure,
    AdoptedService,
    ExpectedService,
    find_level,
)
from wattcast.serving.serving_intervals import INTERVALS

WORDS = {
    "ttft_mean_s": "the mean time to first token",
    "tpot_mean_s": "the mean time per output token",
    "power_w": "the mean power of a replica",
}
SEEDS = 8
# Factors of powers of z, and the divisor, of each term of Student's t.
_STUDENT_SERIES: tuple[tuple[dict[int, float], float], ...] = (
    ({3: 1.0, 1: 1.0}, 4.0),
    ({5: 5.0, 3: 16.0, 1: 3.0}, 96.0),
)
_DEVIATIONS_OF_NINE_IN_TEN = 1.645
_SAMPLING = 3.0  # standard deviations that chance may move a mean length or a count of requests
_NOTABLE_HITS = 0.05  # share of prompts found in a prefix cache that no plan counted on


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of an engine beside what the promised replica does under the same traffic."""

    name: str
    measured: float
    simulated: float  # under the traffic that came
    low: float
    high: float
    sigma: float  # standard deviation of the logarithm of measured over simulated
    sampling: float  # of it, by the traffic that happened to come
    planned: float  # at the nearest load of the plan, under the planned traffic
    offset: float = 0.0  # logarithm of measured over simulated when the service was adopted

    @property
    def is_inside(self) -> bool:
        """Whether the figure is where a healthy service has it."""
        return self.low <= self.measured <= self.high

    @property
    def log_ratio(self) -> float:
        """The logarithm of measured over simulated, less what it was when adopted."""
        return math.log(self.measured / self.simulated) - self.offset


@dataclass(frozen=True)
class ServiceFinding:
    """A way in which the service differs from its plan."""

    kind: str  # lengths, load, clock, figure
    sentence: str


@dataclass(frozen=True)
class CheckedLoad:
    """One load of a service, compared."""

    window: MetricsWindow
    traffic: ServedTraffic
    figures: tuple[ComparedFigure, ...]
    findings: tuple[ServiceFinding, ...]
    causes: tuple[FoundCause, ...] = ()  # of the worst load alone

    @property
    def has_figure_outside(self) -> bool:
        """Whether a figure is not where a healthy service has it."""
        return any(finding.kind == "figure" for finding in self.findings)


@dataclass(frozen=True)
class CheckResult:
    """What a check found, load by load."""

    expected: ExpectedService
    loads: tuple[CheckedLoad, ...]
    is_adopted: bool

    @property
    def findings(self) -> list[ServiceFinding]:
        """All findings, each once."""
        every = [finding for load in self.loads for finding in load.findings]
        return list(dict.fromkeys(every))

    @property
    def has_alarm(self) -> bool:
        """Whether anything differs."""
        return bool(self.findings)

    def adopt(self) -> ExpectedService:
        """Return the plan with this service as the healthy one, at the load with most requests."""
        load = max(self.loads, key=lambda one: one.window.requests)
        figures = {}
        for figure in load.figures:
            log_ratio = math.log(figure.measured / figure.simulated)
            figures[figure.name] = AdoptedFigure(log_ratio, figure.sampling)
        window = load.window
        adopted = AdoptedService(
            window.rate_per_s, window.prompt_tokens, window.output_tokens, figures
        )
        return replace(self.expected, adopted=adopted)


def check_service(
    expected: ExpectedService,
    windows: Sequence[MetricsWindow],
    gpu: str | Path | Gpu | None = None,
    replica: PromisedReplica | None = None,
    tell: Callable[[str], None] | None = None,
) -> CheckResult:
    """Compare a service with its plan.

    ``replica`` is one that was made before of the same plan, so that its step costs need not be
    predicted again; ``gpu`` is a GPU other than the plan's name for it, such as a YAML file.
    ``tell`` is called with a line about each load before it is simulated.
    """
    promised = replica or PromisedReplica(expected, gpu)
    groups = [count_replicas(expected, window) for window in group_by_load(windows)]
    loads: list[CheckedLoad] = []
    for window in groups:
        if tell is not None:
            rate = f"{window.rate_per_s:.3g} requests/s a replica"
            tell(f"load {len(loads) + 1} of {len(groups)}: {rate}, {window.requests:,.0f} requests")
        loads.append(_check_load(expected, window, promised, len(groups)))
    to_explain = [load for load in loads if load.has_figure_outside]
    if to_explain:
        if tell is not None:
            tell("looking for what would explain it")
        worst = max(to_explain, key=lambda load: _measure_surprise(load.figures))
        causes = tuple(_explain_load(worst, promised))
        loads = [replace(load, causes=causes) if load is worst else load for load in loads]
    return CheckResult(expected, tuple(loads), expected.adopted is not None)


def count_replicas(expected: ExpectedService, window: MetricsWindow) -> MetricsWindow:
    """Return a window whose engines are replicas of the plan.

    Data-parallel engines report for themselves, and so do the engines of a replica that decode.
    Metrics of engines that only prefill must not be among the sources.
    """
    engines_a_replica = expected.replica.dp * expected.replica.decode_engines
    return replace(window, engines=max(round(window.engines / engines_a_replica), 1))


def _measure_surprise(figures: Sequence[ComparedFigure]) -> float:
    return sum((figure.log_ratio / figure.sigma) ** 2 for figure in figures)


def _explain_load(load: CheckedLoad, promised: PromisedReplica) -> list[FoundCause]:
    """Return the causes that would explain the figures of a load."""
    logs = {figure.name: figure.log_ratio for figure in load.figures}
    sigmas = {figure.name: figure.sigma for figure in load.figures}
    return find_causes(
        promised,
        load.traffic,
        logs,
        sigmas,
        seed=1,
    )


def _check_load(
    expected: ExpectedService,
    window: MetricsWindow,
    promised: PromisedReplica,
    loads: int,
) -> CheckedLoad:
    """Compare the figures, the lengths, the load and the clock of one window."""
    traffic = read_traffic(expected, window)
    figures = _compare_figures(
        expected,
        window,
        traffic,
        promised,
        loads,
    )
    findings = [
        *find_other_lengths(expected, window, promised),
        *find_overload(expected, window),
        *find_other_clock(expected, window, figures, promised),
    ]
    rate = f"{window.rate_per_s:.3g} requests/s"
    outside = [figure for figure in figures if not figure.is_inside]
    findings += [ServiceFinding("figure", describe_figure(figure, rate)) for figure in outside]
    return CheckedLoad(window, traffic, tuple(figures), tuple(findings))


def read_traffic(expected: ExpectedService, window: MetricsWindow) -> ServedTraffic:
    """Return the traffic of a window, as multiples of the planned lengths."""
    planned = expected.traffic
    requests = round(window.requests / window.engines)
    hits = window.prefix_hit_share or 0.0
    return ServedTraffic(
        rate_per_s=window.rate_per_s,
        prompt_scale=window.prompt_tokens / planned.mean_prompt_tokens,
        output_scale=window.output_tokens / planned.mean_output_tokens,
        arrivals=planned.arrivals,
        requests=min(max(requests, LEAST_REQUESTS), MOST_REQUESTS),
        prefix_hit_rate=hits if hits > _NOTABLE_HITS else 0.0,
    )


def _compare_figures(
    expected: ExpectedService,
    window: MetricsWindow,
    traffic: ServedTraffic,
    promised: PromisedReplica,
    loads: int,
) -> list[ComparedFigure]:
    """Simulate the traffic that came and compare what was measured of it."""
    measured = {"ttft_mean_s": window.ttft_s, "tpot_mean_s": window.tpot_s}
    if window.power_w is not None:
        measured["power_w"] = window.power_w * expected.replica.gpus
    measured = {
        name: value for name, value in measured.items() if math.isfinite(value) and value > 0
    }
    rows = [promised.simulate(traffic, seed) for seed in range(1, SEEDS + 1)]
    # deviations of the window's means over those of a simulated run's
    window_over_run = math.sqrt(traffic.requests * window.engines / max(window.requests, 1.0))
    deviations = count_deviations(len(measured) * loads)
    planned = find_level(expected.levels, window.rate_per_s).figures
    figures = []
    for name, value in measured.items():
        logs = np.log([row[name] for row in rows])
        simulated = math.exp(float(logs.mean()))
        # of this window, and of the mean of the simulated ones
        sampling = float(logs.std(ddof=1)) * math.hypot(window_over_run, 1.0 / math.sqrt(SEEDS))
        sampling *= widen_for_few(deviations, SEEDS - 1)
        offset, spread = _find_spread(expected, window, name, promised)
        sigma = math.hypot(spread, sampling)
        centre = math.log(simulated) + offset
        figures.append(
            ComparedFigure(
                name=name,
                measured=value,
                simulated=simulated,
                low=math.exp(centre - deviations * sigma),
                high=math.exp(centre + deviations * sigma),
                sigma=sigma,
                sampling=sampling,
                planned=planned[name].value,
                offset=offset,
            )
        )
    return figures


def count_deviations(compared: int) -> float:
    """Return how many standard deviations a figure may be off.

    One healthy service in twenty has any figure outside.

    >>> round(count_deviations(1), 2), round(count_deviations(3), 2)
    (1.96, 2.39)
    """
    return NormalDist().inv_cdf(1.0 - CHECK.false_alarms / (2.0 * compared))


def widen_for_few(deviations: float, freedom: int) -> float:
    """Return the factor on a standard deviation that was estimated from few draws.

    The quantile of Student's t over that of the normal distribution, z:

        t = z + (z³ + z) / (4ν) + (5z⁵ + 16z³ + 3z) / (96ν²)

    with ν degrees of freedom (Abramowitz and Stegun, 26.7.5).

    >>> round(1.96 * widen_for_few(1.96, 7), 2)  # the table has 2.365
    2.36
    """
    z = deviations
    t = z
    for power, (terms, divisor) in enumerate(_STUDENT_SERIES, start=1):
        numerator = sum(factor * z**exponent for exponent, factor in terms.items())
        t += numerator / (divisor * freedom**power)
    return t / z


def _find_spread(
    expected: ExpectedService,
    window: MetricsWindow,
    name: str,
    promised: PromisedReplica,
) -> tuple[float, float]:
    """Return the offset of an adopted figure, and its standard deviation without this window's
    sampling.
    """
    adopted = expected.adopted
    if adopted is None or name not in adopted.figures:
        serving, predicted = FIGURES[name]
        # (1, 1): no interval of the model goes into it
        low, high = promised.model_interval.get(predicted, (1.0, 1.0))
        model = 0.5 * math.log(high / low)
        return 0.0, math.hypot(getattr(INTERVALS, serving), model) / _DEVIATIONS_OF_NINE_IN_TEN
    figure = adopted.figures[name]
    drift = count_doublings(adopted, window) * _DRIFTS[name] / _DEVIATIONS_OF_NINE_IN_TEN
    floor = CHECK.floor / _DEVIATIONS_OF_NINE_IN_TEN
    return figure.log_ratio, math.hypot(drift, floor, figure.spread)


_DRIFTS = {
    "ttft_mean_s": CHECK.first_drift,
    "tpot_mean_s": CHECK.latency_drift,
    "power_w": CHECK.power_drift,
}


def count_doublings(adopted: AdoptedService, window: MetricsWindow) -> float:
    """Return how far load and lengths are from those of the adopted service, in doublings."""
    ratios = (
        window.rate_per_s / adopted.rate_per_s,
        window.prompt_tokens / adopted.prompt_tokens,
        window.output_tokens / adopted.output_tokens,
    )
    return math.hypot(*(math.log2(ratio) for ratio in ratios))


def find_other_lengths(
    expected: ExpectedService,
    window: MetricsWindow,
    promised: PromisedReplica,
) -> list[ServiceFinding]:
    """Return prompts and outputs whose mean is not the planned one."""
    findings = []
    for kind, plural in (("prompt", "prompts"), ("output", "outputs")):
        planned = getattr(expected.traffic, f"mean_{kind}_tokens")
        measured = getattr(window, f"{kind}_tokens")
        if not (math.isfinite(measured) and measured > 0.0):
            continue
        chance = _SAMPLING * promised.length_spread(kind) / math.sqrt(window.requests)
        if abs(math.log(measured / planned)) > math.log1p(CHECK.length_change) + chance:
            factor = measured / planned
            sentence = (
                f"{plural} are {factor:.2g} times as long as planned: "
                f"{measured:.0f} tokens in the mean, planned {planned:.0f}"
            )
            findings.append(ServiceFinding("lengths", sentence))
    return findings


def find_overload(expected: ExpectedService, window: MetricsWindow) -> list[ServiceFinding]:
    """Return that a replica gets more requests than it serves within all bounds."""
    most = expected.capacity_per_replica_per_s
    chance = 1.0 + _SAMPLING / math.sqrt(window.requests)
    if window.rate_per_s <= most * chance:
        return []
    rate = f"{window.rate_per_s:.3g} requests/s"
    sentence = f"a replica gets {rate}, more than the {most:.3g} that it serves within all bounds"
    return [ServiceFinding("load", sentence)]


def find_other_clock(
    expected: ExpectedService,
    window: MetricsWindow,
    figures: Sequence[ComparedFigure],
    promised: PromisedReplica,
) -> list[ServiceFinding]:
    """Return that the highest clock is not the planned one, where no power limit lowers it."""
    if window.clock_hz is None:
        return []
    planned_hz = float(promised.costs.clock_hz[0])
    power = next((figure for figure in figures if figure.name == "power_w"), None)
    limit_w = promised.costs.limit_w * expected.replica.gpus
    is_limited = power is not None and power.measured > CHECK.limit_share * limit_w
    change = window.clock_hz / planned_hz - 1.0
    if abs(change) <= CHECK.clock_change or (is_limited and change < 0.0):
        return []
    measured = units.show(window.clock_hz, "Hz")
    planned = units.show(planned_hz, "Hz")
    return [ServiceFinding("clock", f"the card runs at {measured} at most, planned {planned}")]


def describe_figure(figure: ComparedFigure, rate: str) -> str:
    """Say where a figure is and where it should be."""
    unit = "W" if figure.name == "power_w" else "s"
    side = "above" if figure.measured > figure.high else "below"
    low = units.show(figure.low, unit, 3)
    high = units.show(figure.high, unit, 3)
    measured = units.show(figure.measured, unit, 3)
    return f"{WORDS[figure.name]} is {measured}, {side} {low} to {high} at {rate}"
