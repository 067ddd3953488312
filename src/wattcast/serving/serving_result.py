"""Hold what a simulation of serving found: latencies of requests, throughput, power, energy, cost
and carbon.

Every request and every run of equal steps is kept; percentiles, power over time and sums are worked
out when they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core import bad_value
from wattcast.core.arrays import Array, table_rows
from wattcast.core.row_tables import write_table
from wattcast.core.units import show, show_plain
from wattcast.core.user_results import UserResult
from wattcast.predictor.prediction_json import take_fields
from wattcast.predictor.prices import Prices
from wattcast.serving.arrivals import Trace
from wattcast.serving.engine_simulator import ReplicaRun
from wattcast.serving.latency_bounds import LatencyBound
from wattcast.serving.steady_state_window import SteadyState, find_steady_state

QUANTILES = (50, 90, 99)
PEAK_INTERVAL_S = 0.02  # about what a board's power sensor averages over
POWER_INTERVAL_S = 0.1
_MOST_INTERVALS = 1_000_000

Span = tuple[float, float]  # the lowest and the highest value


@dataclass(frozen=True, repr=False)
class ServingResult(UserResult):
    """A trace served by replicas of one model on one kind of GPU."""

    drawn_by = "wattcast.serving.serving_report:draw_serving"

    model: str
    gpu: str
    trace: Trace
    first_token_s: Array  # (request,)
    last_token_s: Array  # (request,)
    runs: tuple[ReplicaRun, ...]
    bounds: tuple[LatencyBound, ...] = ()
    prices: Prices = field(default_factory=Prices)
    assumptions: tuple[str, ...] = ()
    seed_spread: Mapping[str, Span] = field(default_factory=dict)  # over seeds
    # factors on the value, of nine in ten measured runs
    model_interval: Mapping[str, Span] = field(default_factory=dict)
    lanes: int = 1  # runs of one replica
    rejected: int = 0  # requests of more tokens than the model was made for, which are not served

    @property
    def requests(self) -> int:
        """Number of requests, all of which ended."""
        return len(self.trace)

    @property
    def length_s(self) -> float:
        """Time from the start of the trace to the last token."""
        return float(self.last_token_s.max())

    @property
    def gpu_count(self) -> int:
        """GPUs of all replicas."""
        return sum(run.gpu_count for run in self.runs)

    @property
    def preemptions(self) -> int:
        """How often a request was evicted from a full cache."""
        return sum(run.preemptions for run in self.runs)

    @property
    def prefix_hit_share(self) -> float | None:
        """Share of the prompts' tokens that the prefix cache held; None where it is off."""
        asked_tokens = sum(run.asked_tokens for run in self.runs)
        return sum(run.found_tokens for run in self.runs) / asked_tokens if asked_tokens else None

    # Latencies and tokens

    @cached_property
    def ttft_s(self) -> Array:
        """Time from arrival to the first token, of each request."""
        return self.first_token_s - self.trace.arrival_s

    @cached_property
    def latency_s(self) -> Array:
        """Time from arrival to the last token, of each request."""
        return self.last_token_s - self.trace.arrival_s

    @cached_property
    def tpot_s(self) -> Array:
        """Mean time per output token after the first; NaN for requests of one token."""
        later = self.trace.output_tokens - 1
        spent_s = self.last_token_s - self.first_token_s
        undefined = np.full(len(later), np.nan)
        return np.asarray(np.divide(spent_s, later, out=undefined, where=later > 0))

    @cached_property
    def token_gaps(self) -> tuple[Array, Array]:
        """Pauses between tokens of a request, and how many tokens had each: (seconds, weight)."""
        gaps = [np.empty(0)]
        weights = [np.empty(0)]
        for run in self.runs:
            columns = run.segments
            first_s = columns["first_output_s"]
            last_s = columns["last_output_s"]
            steps = columns["steps"]
            decodes = columns["decodes"]
            no_gap = np.zeros(len(steps))
            inside = np.divide(last_s - first_s, steps - 1, out=no_gap, where=steps > 1)
            gaps += [inside, first_s[1:] - last_s[:-1]]
            weights += [(steps - 1) * decodes, decodes[:-1]]
        gap_s = np.concatenate(gaps)
        weight = np.concatenate(weights)
        return gap_s[weight > 0], weight[weight > 0]

    @cached_property
    def output_tokens(self) -> int:
        """Output tokens of all requests."""
        return int(self.trace.output_tokens.sum())

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens over the whole time."""
        return self.output_tokens / self.length_s

    @cached_property
    def good_share(self) -> float:
        """Share of requests that kept the latency bounds, whichever percentile they are of."""
        good = np.ones(self.requests, dtype=bool)
        for bound in self.bounds:
            good &= np.nan_to_num(getattr(self, f"{bound.quantity}_s"), nan=0.0) <= bound.seconds
        return float(good.mean())

    @property
    def goodput_per_s(self) -> float:
        """Requests per second that kept the latency bounds."""
        return self.good_share * self.requests / self.length_s

    # Load

    @property
    def offered_per_s(self) -> float:
        """Requests per second that arrive, from the start of the trace to the last of them."""
        last_s = float(self.trace.arrival_s[-1])
        return self.requests / last_s if last_s > 0.0 else math.inf

    @property
    def drain_s(self) -> float:
        """Time from the last arrival to the last token."""
        return self.length_s - float(self.trace.arrival_s[-1])

    @cached_property
    def steady(self) -> SteadyState | None:
        """Rates and power while traffic lasts, without start and drain; None if it is too short."""
        return find_steady_state(self)

    # Power and energy

    @cached_property
    def energy_j(self) -> float:
        """Energy of all GPUs, from the start of the trace to the last token, idle time included."""
        return float(self.energy_until(np.array([self.length_s]))[0])

    @property
    def energy_j_per_token(self) -> float:
        """Energy per output token."""
        return self.energy_j / self.output_tokens

    @property
    def power_w(self) -> float:
        """Mean power of all GPUs from the start of the trace to the last token."""
        return self.energy_j / self.length_s

    @cached_property
    def peak_power_w(self) -> float:
        """The most all GPUs draw together, averaged over what a power sensor averages over."""
        return float(self.power_over_time(PEAK_INTERVAL_S)[1].max())

    @cached_property
    def p95_power_w(self) -> float:
        """Power that is not exceeded in 95 % of the time, over intervals of 0.1 s."""
        return float(np.percentile(self.power_over_time(POWER_INTERVAL_S)[1], 95))

    def energy_until(self, moments_s: Array) -> Array:
        """Return the energy of all GPUs from the start of the trace up to each moment."""
        return np.asarray(sum(_replica_energy_until(run, moments_s) for run in self.runs))

    def power_over_time(self, interval_s: float) -> tuple[Array, Array]:
        """Return the start of each interval and the mean power of all GPUs in it.

        Intervals are lengthened where there would be more than a million of them.
        """
        interval_s = max(interval_s, self.length_s / _MOST_INTERVALS)
        edges = np.append(np.arange(0.0, self.length_s, interval_s), self.length_s)
        if len(edges) > 2 and edges[-1] - edges[-2] < 0.5 * interval_s:
            edges = np.delete(edges, -2)
        spent_j = self.energy_until(edges)
        return edges[:-1], np.diff(spent_j) / np.diff(edges)

    def mean_over_time(
        self,
        column: str,
        start_s: Array,
    ) -> Array:
        """Return the mean of a column of the steps over all replicas, in intervals of time.

        The intervals begin at ``start_s``. ``waiting`` is requests in the queue, ``decodes``
        requests in a step, ``cache_use`` a share.
        """
        edges = np.append(start_s, self.length_s)
        total = np.zeros(len(start_s))
        for run in self.runs:
            begin_s = run.segments["device_begin_s"]
            end_s = run.segments["device_end_s"]
            if not len(end_s):
                continue
            area = np.concatenate([[0.0], np.cumsum((end_s - begin_s) * run.segments[column])])
            moments = np.concatenate([begin_s[:1], end_s])
            total += np.diff(np.interp(edges, moments, area)) / np.diff(edges)
        return total / len(self.runs)

    # Summaries

    @property
    def headline(self) -> dict[str, float]:
        """The figures that runs are compared by."""
        figures = {}
        for name, times_s in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            ranks = percentiles(times_s)
            figures[f"{name}.p50"] = ranks["p50"]
            figures[f"{name}.p99"] = ranks["p99"]
        for name in ("output_tokens_per_s", "power_w", "energy_j_per_token"):
            figures[name] = float(getattr(self, name))
        return figures

    @property
    def summary_line(self) -> str:
        """The answer in a line."""
        ttft = show(percentiles(self.ttft_s)["p50"], "s", 2)
        return (
            f"{self.model} on {self.gpu_count} x {self.gpu}: {self.requests} requests, "
            f"{self.output_tokens_per_s:,.0f} output tokens/s, "
            f"{show_plain(self.energy_j_per_token, 3)} J/token, "
            f"{show(self.power_w, 'W', 3)}, TTFT p50 {ttft}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the names and numbers of ``simulate --json``."""
        return self.summarise()

    def table_rows(self) -> list[dict[str, Any]]:
        """Return a row for each request."""
        return [dict(row) for row in table_rows(self._request_columns())]

    def summarise(self) -> dict[str, Any]:
        """Return the names and numbers of ``simulate --json``."""
        prompt_tokens = int(self.trace.prompt_tokens.sum())
        return {
            **take_fields(self, "model", "gpu", "gpu_count"),
            "replicas": len(self.runs) // self.lanes,
            **take_fields(self, "requests", "rejected", "length_s"),
            "prompt_tokens": prompt_tokens,
            "output_tokens": self.output_tokens,
            "ttft_s": percentiles(self.ttft_s),
            "tpot_s": percentiles(self.tpot_s),
            "inter_token_s": percentiles(*self.token_gaps),
            "latency_s": percentiles(self.latency_s),
            "requests_per_s": self.requests / self.length_s,
            "offered_per_s": self.offered_per_s if math.isfinite(self.offered_per_s) else None,
            "drain_s": self.drain_s,
            "steady": self._summarise_steady(),
            **take_fields(self, "output_tokens_per_s", "goodput_per_s", "good_share"),
            "bounds": self._summarise_bounds(),
            **take_fields(self, "power_w", "p95_power_w", "peak_power_w"),
            "held_power_w": sum(run.gpu_count * run.limit_w for run in self.runs),
            "energy_j": self.energy_j,
            "energy_j_per_request": self.energy_j / self.requests,
            "energy_j_per_token": self.energy_j_per_token,
            "energy_j_per_total_token": self.energy_j / (self.output_tokens + prompt_tokens),
            "preemptions": self.preemptions,
            "prefix_hit_share": self.prefix_hit_share,
            "queue": self._time_mean("waiting"),
            "batch": self._time_mean("decodes"),
            "cache_use": self._time_mean("cache_use"),
            "busy_share": self._busy_share(),
            **self._summarise_costs(),
            "interval": {
                "seeds": {name: list(ends) for name, ends in self.seed_spread.items()},
                "predictor": {name: list(ends) for name, ends in self.model_interval.items()},
            },
            "assumptions": list(self.assumptions),
        }

    def _summarise_bounds(self) -> list[dict[str, Any]]:
        """Return the bounds of a percentile, with what the run had."""
        rows = []
        for bound in self.bounds:
            if bound.percentile is not None:
                measured_s = bound.measure(self)
                rows.append(
                    {
                        "bound": str(bound),
                        "most_s": bound.seconds,
                        "found_s": measured_s,
                    }
                )
        return rows

    def _summarise_costs(self) -> dict[str, float | None]:
        """Return money and carbon; null where no price was given."""
        cost = self.prices.cost(self.gpu, self.energy_j, self.gpu_count * self.length_s)
        return {
            "cost": cost,
            "cost_per_million_tokens": None if cost is None else cost / self.output_tokens * 1e6,
            "carbon_g": self.prices.carbon_g(self.energy_j),
        }

    def _summarise_steady(self) -> dict[str, Any] | None:
        """Return the steady state as JSON has it; null where the run is too short for one."""
        steady = self.steady
        if steady is None:
            return None
        rates = ("arrivals_per_s", "requests_per_s", "output_tokens_per_s")
        names = ("begin_s", "end_s", *rates, "power_w", "energy_j_per_token", "queue_grows")
        return take_fields(steady, *names) | {"in_engine": list(steady.in_engine)}

    def _busy_share(self) -> float:
        """Return the share of the time in which replicas compute a step."""
        busy_s = self._sum_spans(lambda run: run.segments["steps"] > 0)
        return min(busy_s / (len(self.runs) * self.length_s), 1.0)

    def _time_mean(self, column: str) -> dict[str, float]:
        """Return the mean over time and the largest value of a column, per replica."""
        mean = self._sum_spans(lambda run: run.segments[column]) / (len(self.runs) * self.length_s)
        columns = [run.segments[column] for run in self.runs]
        largest = max((float(values.max()) for values in columns if len(values)), default=0.0)
        return {"mean": mean, "max": largest}

    def _sum_spans(self, weigh: Callable[[ReplicaRun], npt.NDArray[Any]]) -> float:
        """Return the time that all replicas spend in steps, each step weighed."""
        total_s = 0.0
        for run in self.runs:
            span_s = run.segments["device_end_s"] - run.segments["device_begin_s"]
            total_s += float(weigh(run) @ span_s)
        return total_s

    def write_requests_and_steps(self, path: Path) -> list[Path]:
        """Write every request to ``path`` and every run of steps beside it, as Parquet.

        The file of the steps is called ``NAME-steps.parquet``.
        """
        if path.suffix != ".parquet":
            raise bad_value("--out", "a .parquet file", path.name)
        columns = self._request_columns()
        parts = []
        for replica, run in enumerate(self.runs):
            number = np.full(len(run.segments["steps"]), replica)
            parts.append({"replica": number, **run.segments})
        steps = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        steps_path = path.with_name(f"{path.stem}-steps.parquet")
        write_table(path, table_rows(columns))
        write_table(steps_path, table_rows(steps))
        return [path, steps_path]

    def _request_columns(self) -> dict[str, Any]:
        """Return what is known of each request, by column."""
        columns = take_fields(self.trace, "arrival_s", "prompt_tokens", "output_tokens")
        if self.trace.session is not None:
            columns |= take_fields(self.trace, "session", "turn")
        return columns | take_fields(
            self,
            "first_token_s",
            "last_token_s",
            "ttft_s",
            "tpot_s",
        )


def _replica_energy_until(run: ReplicaRun, moments_s: Array) -> Array:
    """Return the energy of one replica up to each moment; outside its segments it idles."""
    ends_s = run.segments["device_end_s"]
    if not len(ends_s):
        return run.gpu_count * run.idle_w * moments_s
    begin_s = float(run.segments["device_begin_s"][0])
    idle_j = run.idle_w * begin_s
    times = np.concatenate([[0.0, begin_s], ends_s])
    sums = np.concatenate([[0.0, idle_j], idle_j + np.cumsum(run.segments["energy_j"])])
    after_s = np.maximum(moments_s - ends_s[-1], 0.0)
    spent_j = np.interp(moments_s, times, sums) + run.idle_w * after_s
    return np.asarray(run.gpu_count * spent_j)


def percentiles(values: npt.ArrayLike, weights: Array | None = None) -> dict[str, float]:
    """Return mean, median, 90th and 99th percentile of the finite values; zeros if there are none.

    A value may stand for ``weights`` equal ones.

    >>> percentiles([1.0, 2.0, 3.0])["p50"], percentiles([1.0, 5.0], np.array([9.0, 1.0]))["p50"]
    (2.0, 1.0)
    """
    finite = np.asarray(values, dtype=np.float64)
    mean = 0.0
    ranks = np.zeros(len(QUANTILES))
    if weights is None:
        finite = finite[np.isfinite(finite)]
    if len(finite) and weights is None:
        mean = float(finite.mean())
        ranks = np.percentile(finite, QUANTILES)
    elif len(finite) and weights is not None:
        order = np.argsort(finite)
        sums = np.cumsum(weights[order])
        places = np.searchsorted(sums, np.array(QUANTILES) / 100 * sums[-1])
        mean = float(finite @ weights / weights.sum())
        ranks = finite[order][np.minimum(places, len(finite) - 1)]
    names = [f"p{quantile}" for quantile in QUANTILES]
    return {"mean": mean, **dict(zip(names, ranks.tolist(), strict=True))}
