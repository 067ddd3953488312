"""Stretches of simulated serving at several rates, from which a hall draws the power of replicas.

To simulate every replica of a hall for a day would take weeks. A replica is simulated at some rates
between the quietest and the busiest part of the day, for thousands of requests each. A replica of
the hall is then a sequence of blocks of five minutes, each a piece of a stretch at a random offset;
the rate of a stretch is one of the two next to what the day asks for, drawn so that the mean is
right. A block keeps what happens within minutes (prompts, queues, pauses), and replicas are
independent, as requests of many users are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Array
from wattcast.serving.serving_result import ServingResult
from wattcast.serving.simulate_serving import simulate
from wattcast.timeseries.engine_power import PowerSplit, trace_replica
from wattcast.timeseries.hall_file import ServingLoad
from wattcast.timeseries.power_curve import state_code

ReportProgress = Callable[[str], None]

DAY_S = 86400.0
_CLOSE_RATES = 0.01  # relative, up to which two rates are one


class HallCoefficients(Coefficients):
    """How a hall is put together from simulated stretches."""

    block_s: float
    warm_up_s: float
    stretch_requests: int
    least_stretch_s: float
    longest_stretch_s: float
    rates: int


HALL = load_coefficients("hall", HallCoefficients)


@dataclass(frozen=True)
class LibrarySize:
    """How much of a load is simulated; by default as much as the coefficients say now."""

    rates: int = field(default_factory=lambda: HALL.rates)
    requests: int = field(default_factory=lambda: HALL.stretch_requests)  # of a stretch
    least_s: float = field(default_factory=lambda: HALL.least_stretch_s)


@dataclass(frozen=True)
class LoadStretch:
    """A replica at one rate: joules of one of its GPUs, and the share of time at work."""

    rate_per_s: float  # of the arrivals in it
    bin_j: Array  # of each bin
    working: Array  # share of each second
    idle_w: float
    figures: dict[str, float]  # latencies and rates of the whole run

    @property
    def seconds(self) -> int:
        """Whole seconds of the stretch."""
        return len(self.working)


@dataclass(frozen=True)
class LoadLibrary:
    """Stretches of one load by rising rate."""

    stretches: tuple[LoadStretch, ...]
    gpus: int  # of a replica
    bin_s: float

    @property
    def rates_per_s(self) -> Array:
        """Rate of each stretch."""
        return np.array([stretch.rate_per_s for stretch in self.stretches])

    def average(
        self,
        name: str,
        rates_per_s: Array,
    ) -> Array:
        """Return a figure of the stretches at other rates, linear between them."""
        figures = [stretch.figures[name] for stretch in self.stretches]
        return np.interp(rates_per_s, self.rates_per_s, figures)


def build_library(
    load: ServingLoad,
    gpu: str,
    bin_s: float,
    seed: int,
    gpu_limit_w: float | None = None,
    progress: ReportProgress | None = None,
    size: LibrarySize | None = None,
) -> LoadLibrary:
    """Simulate a load at the rates of a day."""
    size = size or LibrarySize()
    rates = choose_rates(load.least_rate_per_s, load.most_rate_per_s, size.rates)
    stretches = []
    gpus = 1
    for place, rate_per_s in enumerate(rates):
        if progress is not None:
            limit = "" if gpu_limit_w is None else f" under {gpu_limit_w:g} W"
            progress(f"{load.model}{limit}: rate {place + 1} of {len(rates)}")
        result, seconds = _serve_at_rate(
            load,
            gpu,
            rate_per_s,
            seed + place,
            gpu_limit_w,
            size,
        )
        gpus = result.runs[0].gpu_count
        stretches.append(_cut_stretch(result, rate_per_s, seconds, bin_s))
    return LoadLibrary(tuple(_keep_rising(stretches)), gpus, bin_s)


def _keep_rising(stretches: list[LoadStretch]) -> list[LoadStretch]:
    """Return the stretches by rising rate: few arrivals of a low rate may be more than of a
    higher.
    """
    return sorted(stretches, key=lambda stretch: stretch.rate_per_s)


def choose_rates(
    least_per_s: float,
    most_per_s: float,
    count: int | None = None,
) -> list[float]:
    """Return the rates at which a load is simulated, rising; a quiet end is hardly any request.

    >>> choose_rates(2.0, 2.0)
    [2.0]
    """
    least_per_s = max(least_per_s, most_per_s / 100.0)
    if most_per_s - least_per_s < _CLOSE_RATES * most_per_s:
        return [most_per_s]
    rates: list[float] = np.linspace(least_per_s, most_per_s, count or HALL.rates).tolist()
    return rates


def _serve_at_rate(
    load: ServingLoad,
    gpu: str,
    rate_per_s: float,
    seed: int,
    gpu_limit_w: float | None,
    size: LibrarySize,
) -> tuple[ServingResult, int]:
    """Return a run at one rate, and the seconds of it that a stretch takes."""
    wanted_s = size.requests / rate_per_s
    stretch_s = min(max(wanted_s, size.least_s), HALL.longest_stretch_s)
    seconds = int(np.ceil(stretch_s))
    options = dict(load.options)
    if gpu_limit_w is not None:
        options["power_limit"] = gpu_limit_w
    result = simulate(
        load.model,
        gpu,
        rate=rate_per_s,
        prompt=load.prompt,
        output=load.output,
        tp=load.tp,
        seconds=seconds + HALL.warm_up_s,
        seed=seed,
        **options,
    )
    return result, seconds


def _cut_stretch(
    result: ServingResult,
    rate_per_s: float,
    seconds: int,
    bin_s: float,
) -> LoadStretch:
    """Return the stretch of a run behind its start, while requests still arrive."""
    run = result.runs[0]
    whole = np.ones(1)
    curve = trace_replica(run, PowerSplit(("gpu",), whole, whole, whole))
    bins = round(seconds / bin_s)
    edges_s = np.asarray(HALL.warm_up_s + np.arange(bins + 1.0) * bin_s)
    bin_j = np.diff(curve.energy_until(edges_s)[:, 0]) / run.gpu_count
    whole_s = HALL.warm_up_s + np.arange(seconds + 1.0)
    idle_s = np.diff(curve.state_until(whole_s)[:, state_code("idle")])
    figures = {
        "ttft_p50_s": float(np.percentile(result.ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(result.ttft_s, 99)),
        "tpot_p50_s": float(np.nanpercentile(result.tpot_s, 50)),
        "tpot_p99_s": float(np.nanpercentile(result.tpot_s, 99)),
        "served_per_s": _count_served(result, seconds) / seconds,
        "output_tokens_per_s": float(result.output_tokens) / result.length_s,
        "gpu_w": float(bin_j.sum()) / seconds,
    }
    # The rate that arrivals had in the stretch, which differs from the asked one by chance: power
    # belongs to it.
    end_s = HALL.warm_up_s + seconds
    arrived = (result.trace.arrival_s >= HALL.warm_up_s) & (result.trace.arrival_s < end_s)
    drawn_per_s = float(arrived.sum()) / seconds or rate_per_s
    return LoadStretch(
        drawn_per_s,
        bin_j,
        np.clip(1.0 - idle_s, 0.0, 1.0),
        run.idle_w,
        figures,
    )


def _count_served(result: ServingResult, seconds: int) -> int:
    """Count the requests that were answered inside the stretch."""
    last_s = np.fmax.reduce([run.last_token_s for run in result.runs])
    end_s = HALL.warm_up_s + seconds
    return int(((last_s >= HALL.warm_up_s) & (last_s < end_s)).sum())


@dataclass(frozen=True)
class BlockDraw:
    """Which pieces of which stretches one replica is made of, on the seconds of a day."""

    begin_s: npt.NDArray[np.int64]  # of each block, from before the day's start
    level: npt.NDArray[np.int64]
    offset: Array  # share of a stretch at which a block begins


def draw_blocks(
    library: LoadLibrary,
    load: ServingLoad,
    key: tuple[int, ...],
    last_s: int,
) -> BlockDraw:
    """Draw the blocks of one replica for a day; the same key gives the same ones."""
    random = np.random.default_rng(key)
    block_s = round(HALL.block_s)
    first_s = -int(random.integers(block_s))
    begin_s = np.arange(first_s, last_s, block_s)
    asked_per_s = rate_at(load, np.asarray(begin_s + 0.5 * block_s))
    rates_per_s = library.rates_per_s
    place = np.interp(asked_per_s, rates_per_s, np.arange(len(rates_per_s)))
    low = np.floor(place)
    level = low + (random.random(len(place)) < place - low)
    return BlockDraw(begin_s, level.astype(np.int64), random.random(len(place)))


def rate_at(load: ServingLoad, times_s: Array) -> Array:
    """Return the requests per second of a replica, linear between the middles of parts of a day."""
    parts = np.array(load.day)
    part_s = 86400.0 / len(parts)
    middles_s = (np.arange(-1, len(parts) + 1) + 0.5) * part_s
    around = np.concatenate([parts[-1:], parts, parts[:1]])
    inside_s = np.mod(times_s, DAY_S)
    return np.asarray(load.rate_per_s * np.interp(inside_s, middles_s, around))


def add_replica(
    library: LoadLibrary,
    draw: BlockDraw,
    begin_s: int,
    bin_j: Array,
    working: Array,
) -> None:
    """Add one GPU of a replica to joules by bin and to shares at work by second, in place.

    The arrays begin at second ``begin_s`` of the day. A stretch that ends within a block begins
    anew.
    """
    bins_per_s = round(1.0 / library.bin_s)
    seconds = len(working)
    block_s = round(HALL.block_s)
    inside = (draw.begin_s + block_s > begin_s) & (draw.begin_s < begin_s + seconds)
    for block in np.flatnonzero(inside).tolist():
        stretch = library.stretches[draw.level[block]]
        at = int(draw.begin_s[block]) - begin_s
        skipped = max(-at, 0)
        at = max(at, 0)
        place = int(draw.offset[block] * stretch.seconds) + skipped
        remaining = min(block_s - skipped, seconds - at)
        while remaining > 0:
            place %= stretch.seconds
            count = min(remaining, stretch.seconds - place)
            working[at : at + count] += stretch.working[place : place + count]
            into = slice(at * bins_per_s, (at + count) * bins_per_s)
            out_of = slice(place * bins_per_s, (place + count) * bins_per_s)
            bin_j[into] += stretch.bin_j[out_of]
            at += count
            place += count
            remaining -= count
