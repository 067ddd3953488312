"""Hold what a simulation of serving found: latencies of requests, throughput, power, energy, cost
and carbon.

Every request and every run of equal steps is kept; percentiles, power over time and sums are worked
out when asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from wattcast.core import bad_value, units
from wattcast.core.arrays import Array, table_rows
from wattcast.core.row_tables import write_table
from wattcast.predictor.answer_lines import AnswerLine, round_number
from wattcast.predictor.prediction_json import take_fields
from wattcast.predictor.prices import Prices
from wattcast.report.figure_style import SERIES_COLOURS, Figure, add_caption, new_figure
from wattcast.report.text_tables import new_table, print_answers, print_notes
from wattcast.serving.arrivals import Trace
from wattcast.serving.engine_simulator import ReplicaRun
from wattcast.serving.steady_state_window import SteadyState, find_steady_state

QUANTILES = (50, 90, 99)
PEAK_INTERVAL_S = 0.02  # about what a board's power sensor averages over
POWER_INTERVAL_S = 0.1
_MOST_INTERVALS = 1_000_000


@dataclass(frozen=True)
class LatencyBound:
    """A percentile of a latency that must not be longer, such as TTFT p99 within 500 ms."""

    quantity: str  # "ttft" or "tpot"
    percentile: float | None  # None: each request by itself
    seconds: float

    def __str__(self) -> str:
        return f"{self.quantity.upper()} p{self.percentile:g}"

    def measure(self, result: ServingResult) -> float:
        """Return the percentile of a simulated run."""
        values = getattr(result, f"{self.quantity}_s")
        known = values[np.isfinite(values)]
        return float(np.percentile(known, self.percentile or 50.0)) if known.size else 0.0


def parse_latency_bounds(
    quantity: str, text: str | float | None, percentile: float | None = None
) -> tuple[LatencyBound, ...]:
    """Read ``p99:500ms`` or ``500ms``, which is of ``percentile``; several with commas.

    >>> parse_latency_bounds("ttft", "p99:500ms,p50:100ms")[0].percentile
    99.0
    """
    if text is None:
        return ()
    bounds = []
    for part in text.split(",") if isinstance(text, str) else [text]:
        words, colon, amount = (
            part.strip().partition(":") if isinstance(part, str) else ("", "", "")
        )
        at = percentile
        if colon:
            number = words.strip().removeprefix("p")
            at = float(number) if number.replace(".", "", 1).isdigit() else 0.0
            if not 0 < at < 100:
                raise bad_value(quantity, "a percentile and a time, such as p99:500ms", part)
        seconds = units.parse_amount(
            amount.strip() if colon else part, "s", quantity, inclusive=False
        )
        bounds.append(LatencyBound(quantity, at, seconds))
    return tuple(bounds)


def parse_both_bounds(
    ttft: str | float | None, tpot: str | float | None, percentile: float | None = None
) -> tuple[LatencyBound, ...]:
    """Read the bounds of the time to the first token and of the time per output token."""
    return (
        *parse_latency_bounds("ttft", ttft, percentile),
        *parse_latency_bounds("tpot", tpot, percentile),
    )


@dataclass(frozen=True)
class ServingResult:
    """A trace served by replicas of one model on one kind of GPU."""

    model: str
    gpu: str
    trace: Trace
    first_token_s: Array  # (request,)
    last_token_s: Array  # (request,)
    runs: tuple[ReplicaRun, ...]
    bounds: tuple[LatencyBound, ...] = ()
    prices: Prices = field(default_factory=Prices)
    assumptions: tuple[str, ...] = ()
    seed_spread: Mapping[str, tuple[float, float]] = field(
        default_factory=dict
    )  # lowest and highest over seeds
    model_interval: Mapping[str, tuple[float, float]] = field(
        default_factory=dict
    )  # factors on the value
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
        """Requests thrown out of a full cache, each time counted."""
        return sum(run.preemptions for run in self.runs)

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
        return np.asarray(
            np.divide(spent_s, later, out=np.full(len(later), np.nan), where=later > 0)
        )

    @cached_property
    def output_tokens(self) -> int:
        """Tokens made."""
        return int(self.trace.output_tokens.sum())

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens over the whole time."""
        return self.output_tokens / self.length_s

    @cached_property
    def energy_j(self) -> float:
        """Energy of all GPUs, from the start of the trace to the last token, idle time included."""
        return float(self.energy_until(np.array([self.length_s]))[0])

    def energy_until(self, moments_s: Array) -> Array:
        """Return the energy of all GPUs from the start of the trace up to each moment."""
        return np.asarray(sum(self._energy_until(run, moments_s) for run in self.runs))

    @property
    def power_w(self) -> float:
        """Mean power of all GPUs from the start of the trace to the last token."""
        return self.energy_j / self.length_s

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
        """Rates and power while traffic lasts, apart from start and drain; None where it is too short."""
        return find_steady_state(self)

    @property
    def energy_j_per_token(self) -> float:
        """Energy per output token."""
        return self.energy_j / self.output_tokens

    @cached_property
    def peak_power_w(self) -> float:
        """The most all GPUs draw together, averaged over what a power sensor averages over."""
        return float(self.power_over_time(PEAK_INTERVAL_S)[1].max())

    @cached_property
    def p95_power_w(self) -> float:
        """Power that is not exceeded in 95 % of the time, over intervals of 0.1 s."""
        return float(np.percentile(self.power_over_time(POWER_INTERVAL_S)[1], 95))

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

    def mean_over_time(self, column: str, start_s: Array) -> Array:
        """Return the mean of a column of the steps over all replicas, in intervals that begin at
        ``start_s``.

        ``waiting`` is requests in the queue, ``decodes`` requests in a step, ``cache_use`` a share.
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

    def _energy_until(self, run: ReplicaRun, moments_s: Array) -> Array:
        """Return the energy of one replica up to each moment; outside its segments it idles."""
        ends_s = run.segments["device_end_s"]
        spent_j = np.cumsum(run.segments["energy_j"])
        if not len(ends_s):
            return run.gpu_count * run.idle_w * moments_s
        begin_s = float(run.segments["device_begin_s"][0])
        times = np.concatenate([[0.0, begin_s], ends_s])
        sums = np.concatenate([[0.0, run.idle_w * begin_s], run.idle_w * begin_s + spent_j])
        after_s = np.maximum(moments_s - ends_s[-1], 0.0)
        return np.asarray(
            run.gpu_count * (np.interp(moments_s, times, sums) + run.idle_w * after_s)
        )

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
            inside = np.divide(
                last_s - first_s, steps - 1, out=np.zeros(len(steps)), where=steps > 1
            )
            gaps += [inside, first_s[1:] - last_s[:-1]]
            weights += [(steps - 1) * decodes, decodes[:-1]]
        gap_s = np.concatenate(gaps)
        weight = np.concatenate(weights)
        return gap_s[weight > 0], weight[weight > 0]

    @property
    def headline(self) -> dict[str, float]:
        """The figures that runs are compared by."""
        latencies = {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s}
        at = {
            f"{name}.{key}": percentiles(times)[key]
            for name, times in latencies.items()
            for key in ("p50", "p99")
        }
        names = ("output_tokens_per_s", "power_w", "energy_j_per_token")
        return at | {name: float(getattr(self, name)) for name in names}

    def summarise(self) -> dict[str, Any]:
        """Return the names and numbers of ``simulate --json``."""
        gap_s, weight = self.token_gaps
        joules = self.energy_j
        hours = self.gpu_count * self.length_s
        cost = self.prices.cost(self.gpu, joules, hours)
        carbon_g = self.prices.carbon_g(joules)
        total_tokens = self.output_tokens + int(self.trace.prompt_tokens.sum())
        return {
            **take_fields(self, "model", "gpu", "gpu_count"),
            "replicas": len(self.runs) // self.lanes,
            **take_fields(self, "requests", "rejected", "length_s"),
            "prompt_tokens": int(self.trace.prompt_tokens.sum()),
            "output_tokens": self.output_tokens,
            "ttft_s": percentiles(self.ttft_s),
            "tpot_s": percentiles(self.tpot_s),
            "inter_token_s": percentiles(gap_s, weight),
            "latency_s": percentiles(self.latency_s),
            "requests_per_s": self.requests / self.length_s,
            "offered_per_s": self.offered_per_s if math.isfinite(self.offered_per_s) else None,
            "drain_s": self.drain_s,
            "steady": self._summarise_steady(),
            **take_fields(self, "output_tokens_per_s", "goodput_per_s", "good_share"),
            "bounds": [
                {"bound": str(bound), "most_s": bound.seconds, "found_s": bound.measure(self)}
                for bound in self.bounds
                if bound.percentile is not None
            ],
            **take_fields(self, "power_w", "p95_power_w", "peak_power_w"),
            "held_power_w": sum(run.gpu_count * run.limit_w for run in self.runs),
            "energy_j": joules,
            "energy_j_per_request": joules / self.requests,
            "energy_j_per_token": self.energy_j_per_token,
            "energy_j_per_total_token": joules / total_tokens,
            "preemptions": self.preemptions,
            "queue": self._time_mean("waiting"),
            "batch": self._time_mean("decodes"),
            "cache_use": self._time_mean("cache_use"),
            "busy_share": min(
                self._sum_spans(lambda run: run.segments["steps"] > 0)
                / (len(self.runs) * self.length_s),
                1.0,
            ),
            "cost": cost,
            "cost_per_million_tokens": None if cost is None else cost / self.output_tokens * 1e6,
            "carbon_g": carbon_g,
            "interval": {
                "seeds": {name: list(ends) for name, ends in self.seed_spread.items()},
                "predictor": {name: list(ends) for name, ends in self.model_interval.items()},
            },
            "assumptions": list(self.assumptions),
        }

    def _summarise_steady(self) -> dict[str, Any] | None:
        """Return the steady state as JSON has it; null where the run is too short for one."""
        steady = self.steady
        if steady is None:
            return None
        rates = ("arrivals_per_s", "requests_per_s", "output_tokens_per_s")
        names = ("begin_s", "end_s", *rates, "power_w", "energy_j_per_token", "queue_grows")
        return take_fields(steady, *names) | {"in_engine": list(steady.in_engine)}

    def _time_mean(self, column: str) -> dict[str, float]:
        """Return the mean over time and the most of a column, per replica."""
        mean = self._sum_spans(lambda run: run.segments[column]) / (len(self.runs) * self.length_s)
        most = max(
            (float(run.segments[column].max()) for run in self.runs if len(run.segments[column])),
            default=0.0,
        )
        return {"mean": mean, "max": most}

    def _sum_spans(self, weigh: Callable[[ReplicaRun], npt.NDArray[Any]]) -> float:
        """Return the time that all replicas spend in steps, each weighed."""
        return sum(
            float(weigh(run) @ (run.segments["device_end_s"] - run.segments["device_begin_s"]))
            for run in self.runs
        )

    def write_requests_and_steps(self, path: Path) -> list[Path]:
        """Write every request to ``path`` and every run of steps beside it (``NAME-steps``), as
        Parquet.
        """
        if path.suffix != ".parquet":
            raise bad_value("--out", "a .parquet file", path.name)
        columns = take_fields(self.trace, "arrival_s", "prompt_tokens", "output_tokens")
        columns |= take_fields(self, "first_token_s", "last_token_s", "ttft_s", "tpot_s")
        steps_path = path.with_name(f"{path.stem}-steps.parquet")
        parts = [
            {"replica": np.full(len(r.segments["steps"]), i), **r.segments}
            for i, r in enumerate(self.runs)
        ]
        steps = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        write_table(path, table_rows(columns))
        write_table(steps_path, table_rows(steps))
        return [path, steps_path]


def percentiles(values: npt.ArrayLike, weights: Array | None = None) -> dict[str, float]:
    """Return mean, median, 90th and 99th percentile of what is known; zeros where nothing is.

    A value may stand for ``weights`` equal ones.

    >>> percentiles([1.0, 2.0, 3.0])["p50"], percentiles([1.0, 5.0], np.array([9.0, 1.0]))["p50"]
    (2.0, 1.0)
    """
    known = np.asarray(values, dtype=np.float64)
    mean = 0.0
    found = np.zeros(len(QUANTILES))
    if weights is None:
        known = known[np.isfinite(known)]
    if len(known) and weights is None:
        mean = float(known.mean())
        found = np.percentile(known, QUANTILES)
    elif len(known) and weights is not None:
        order = np.argsort(known)
        sums = np.cumsum(weights[order])
        places = np.searchsorted(sums, np.array(QUANTILES) / 100 * sums[-1])
        mean = float(known @ weights / weights.sum())
        found = known[order][np.minimum(places, len(known) - 1)]
    return {"mean": mean, **{f"p{q}": float(v) for q, v in zip(QUANTILES, found, strict=True)}}


_MOST_POINTS = 4000


def print_serving(console: Console, result: ServingResult) -> None:
    """Print throughput, energy, power and money, then latencies and what was assumed, on one
    screen.
    """
    found = result.summarise()
    gpus = f"{found['gpu_count']} x {found['gpu']}" if found["gpu_count"] > 1 else found["gpu"]
    title = f"{found['model']} on {gpus}: {found['requests']:,} requests in {units.show(found['length_s'], 's', 3)}"
    if found["rejected"]:
        title += f"; {found['rejected']:,} rejected as too long"
    print_answers(console, title, _list_answers(found, result))
    names = {"ttft_s": "time to first token", "tpot_s": "time per output token"}
    names |= {"inter_token_s": "between two tokens", "latency_s": "whole request"}
    keys = ("p50", "p90", "p99", "mean")
    rows = [
        (label, *(units.show(found[name][key], "s", 3) for key in keys))
        for name, label in names.items()
    ]
    console.print(new_table("latency", *keys, rows=rows))
    print_notes(console, found["assumptions"])


def _list_answers(found: dict[str, Any], result: ServingResult) -> list[AnswerLine]:
    def show(name: str) -> str:
        return units.show(found[name], "W" if name.endswith("_w") else "J", 3)

    peak = f"{show('peak_power_w')} peak over {units.show(PEAK_INTERVAL_S, 's')}"
    if found["peak_power_w"] > found["held_power_w"]:
        peak += f": until the governor reacts, then {show('held_power_w')} at most"
    spent = f"{show('energy_j_per_request')} a request, {show('energy_j')} in all"
    batch = found["batch"]
    queue = found["queue"]
    cache = found["cache_use"]
    lines = [
        *_list_rates(found),
        AnswerLine("energy", f"{show('energy_j_per_token')}/output token", spent),
        AnswerLine("total power", f"{show('power_w')} mean", f"{show('p95_power_w')} p95; {peak}"),
        AnswerLine(
            "engine",
            f"{found['busy_share']:.1%} busy",
            f"batch {batch['mean']:.3g} mean, {batch['max']:.0f} most; queue {queue['mean']:.2g} mean, "
            f"{queue['max']:.0f} most; cache {cache['mean']:.0%} mean, {cache['max']:.0%} most; "
            f"{found['preemptions']} preemptions",
        ),
    ]
    if result.bounds:
        good = f"{found['goodput_per_s']:.3g} requests/s"
        lines.append(AnswerLine("goodput", good, f"{found['good_share']:.1%} of all in time"))
    for row in found["bounds"]:
        kept = "within" if row["found_s"] <= row["most_s"] else "NOT within"
        shown = [units.show(row[name], "s", 3) for name in ("found_s", "most_s")]
        lines.append(AnswerLine(row["bound"], shown[0], f"{kept} {shown[1]}"))
    if found["cost"] is not None:
        each = f"{found['cost_per_million_tokens']:.3g} {result.prices.currency} a million output tokens"
        lines.append(AnswerLine("cost", f"{found['cost']:.3g} {result.prices.currency}", each))
    if found["carbon_g"] is not None:
        lines.append(AnswerLine("carbon", f"{found['carbon_g']:.3g} g CO2e"))
    for name, kind in (("seeds", "over seeds"), ("predictor", "factor of the predictor")):
        ends = found["interval"][name]
        if ends:
            shown = [f"{key} {low:.3g} to {high:.3g}" for key, (low, high) in ends.items()]
            lines.append(AnswerLine("spread", kind, ", ".join(shown)))
    return lines


def _list_rates(found: dict[str, Any]) -> list[AnswerLine]:
    """Return the throughput while traffic lasts, and that over the whole time with start and drain."""
    drain = units.show(found["drain_s"], "s", 2)
    whole = (
        f"{round_number(found['output_tokens_per_s'], 3)} output tokens/s, "
        f"{found['requests_per_s']:.3g} requests/s with start and drain "
        f"({drain} after the last arrival)"
    )
    steady = found["steady"]
    if steady is None:
        tokens, _, rest = whole.partition(", ")
        why = f"{rest}; too short for a steady state: few requests end before the last arrives"
        return [AnswerLine("throughput", tokens, why)]
    tokens = f"{round_number(steady['output_tokens_per_s'], 3)} output tokens/s"
    rate = f"{steady['requests_per_s']:.3g} requests/s in the steady state; {whole}"
    before, after = steady["in_engine"]
    arriving = f"{steady['arrivals_per_s']:.3g} requests/s arrive"
    queue = AnswerLine("queue", "steady", f"{arriving}; {before} to {after} requests in the engine")
    if steady["queue_grows"]:
        more = f"{arriving}, more than are served; {before} to {after} requests in the engine"
        queue = AnswerLine("queue", "GROWS", more)
    return [AnswerLine("throughput", tokens, rate), queue]


def draw_serving(result: ServingResult) -> Figure:
    """Draw latencies as distributions, and power and requests over time."""
    figure = new_figure(10.0, 7.0)
    (top_left, top_right), (bottom_left, bottom_right) = figure.subplots(2, 2)
    share = np.linspace(0.0, 100.0, 501)
    for axes, curves, label in (
        (
            top_left,
            (("to first token", result.ttft_s), ("whole request", result.latency_s)),
            "Latency (s)",
        ),
        (top_right, (("per output token", result.tpot_s),), "Time per output token (s)"),
    ):
        for (name, values), colour in zip(curves, SERIES_COLOURS, strict=False):
            known = values[np.isfinite(values)]
            if len(known):
                axes.plot(np.percentile(known, share), share, color=colour, label=name)
        axes.set(xlabel=label, ylabel="Requests (%)")
        axes.legend(frameon=False)
    time_s, power_w = result.power_over_time(max(POWER_INTERVAL_S, result.length_s / _MOST_POINTS))
    bottom_left.step(time_s, power_w, where="post", color=SERIES_COLOURS[0], lw=0.8)
    bottom_left.axhline(result.power_w, color=SERIES_COLOURS[1], lw=1.0, label="mean")
    bottom_left.set(xlabel="Time (s)", ylabel="Power (W)", ylim=(0.0, None))
    bottom_left.legend(frameon=False)
    busiest = max(result.runs, key=lambda run: len(run.segments["steps"]))
    stride = max(len(busiest.segments["steps"]) // _MOST_POINTS, 1)
    for place, (name, column) in enumerate((("decoding", "decodes"), ("waiting", "waiting"))):
        times = busiest.segments["begin_s"][::stride]
        counts = busiest.segments[column][::stride]
        bottom_right.step(
            times, counts, where="post", color=SERIES_COLOURS[place], lw=0.8, label=name
        )
    bottom_right.set(xlabel="Time (s)", ylabel="Requests of one replica")
    bottom_right.legend(frameon=False)
    figure.suptitle(
        f"{result.model} on {result.gpu_count} x {result.gpu}: {result.requests} requests"
    )
    return add_caption(figure, "; ".join([f"simulated: {result.trace.name}", *result.assumptions]))
