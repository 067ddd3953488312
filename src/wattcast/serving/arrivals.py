"""Describe the requests that reach a server: when each arrives, and how many tokens it brings and
asks for.

A ``Trace`` is drawn from an arrival process and two length distributions, or read from a file
(``trace_files``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core import (
    bad_value,
    check_names,
    units,
)
from wattcast.core.arrays import Array, Mask
from wattcast.core.strict_files import read_bytes

Counts = npt.NDArray[np.int64]
NO_PREFIX = -1
MOST_TOKENS = 1 << 24
USUAL_SIGMA = 0.8  # of a lognormal distribution that names none
_USUAL_PEAK = 1.5  # of a day over its mean, where nobody says another
_LONGEST_S = 1e9
_GRID = 64  # points of a period, between which its arrivals are interpolated
_EVEN_VARIANCE = 12.0  # a square of a length over the variance of places drawn evenly on it
# Arrivals that are drawn at once for a time: no Poisson process passes eight deviations.
_SURE_DEVIATIONS, _SURE_MORE = 8, 16
MOST_REQUESTS = 20_000_000
LONGEST_TRACE_S = 1e8  # three years; the longest public trace is one of 213 days
ARRIVAL_PROCESSES = ("poisson", "gamma", "fixed", "diurnal")


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival.

    ``prefix_id`` groups prompts that begin alike; -1 stands for none. ``hash_ids`` names the blocks
    of ``hash_tokens`` tokens of each prompt: equal names begin alike up to the end of that block.
    ``session`` and ``turn`` number the conversations and their requests. With ``user`` and
    ``pause_s``, a user sends the first request when it arrives, and each later one so long after
    the answer to the one before.
    """

    arrival_s: Array
    prompt_tokens: Counts
    output_tokens: Counts
    prefix_id: Counts
    name: str = ""
    session: Counts | None = None
    turn: Counts | None = None
    user: Counts | None = None
    pause_s: Array | None = None
    hash_ids: tuple[tuple[int, ...], ...] | None = None
    hash_tokens: int = 512

    def __post_init__(self) -> None:
        where = self.name or "trace"
        if not len(self.arrival_s):
            raise bad_value(where, "at least one request", "none")
        is_finite = np.isfinite(self.arrival_s).all()
        falls = (np.diff(self.arrival_s) < 0).any()
        if not is_finite or falls or self.arrival_s[0] < 0:
            raise bad_value(where, "arrival times that are finite, positive and rise", "others")
        if self.arrival_s[-1] > LONGEST_TRACE_S:
            expected = f"arrival times of at most {LONGEST_TRACE_S:g} s"
            raise bad_value(where, expected, float(self.arrival_s[-1]))
        _check_tokens(self.prompt_tokens, f"{where}: prompt_tokens")
        _check_tokens(self.output_tokens, f"{where}: output_tokens")
        if self.pause_s is not None and not (self.pause_s >= 0.0).all():
            raise bad_value(f"{where}: pause_s", "seconds of at least 0", "others")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def context_spread(self) -> float:
        """Standard deviation of the contexts behind generated tokens, over their mean."""
        mean = self.prompt_tokens + 0.5 * self.output_tokens
        weight = self.output_tokens
        middle = float(np.average(mean, weights=weight))
        # within a request, contexts are spread evenly over the tokens that it generates
        variances = (mean - middle) ** 2 + self.output_tokens**2 / _EVEN_VARIANCE
        return math.sqrt(float(np.average(variances, weights=weight))) / middle

    def select(self, chosen: Mask) -> Trace:
        """Return some of the requests."""
        rows = np.flatnonzero(chosen)
        return self.reorder(rows, self.arrival_s[rows])

    def reorder(
        self,
        rows: Counts,
        arrival_s: Array,
    ) -> Trace:
        """Return the requests of these rows, which arrive at these moments."""
        hash_ids = self.hash_ids
        optional: dict[str, Any] = {}
        for name in ("session", "turn", "user", "pause_s"):
            values = getattr(self, name)
            optional[name] = None if values is None else values[rows]
        return replace(
            self,
            arrival_s=arrival_s,
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            prefix_id=self.prefix_id[rows],
            hash_ids=None if hash_ids is None else tuple(hash_ids[row] for row in rows.tolist()),
            **optional,
        )


def _check_tokens(tokens: Counts, where: str) -> None:
    least = int(tokens.min())
    most = int(tokens.max())
    if least < 1 or most >= MOST_TOKENS:
        worst = least if least < 1 else most
        raise bad_value(where, f"from 1 to {MOST_TOKENS - 1} tokens", worst)


def drop_long_requests(
    trace: Trace,
    model: str,
    most: int | None,
    force: bool,
    is_set: bool = False,
) -> tuple[Trace, str]:
    """Return the requests that an engine accepts, and a sentence about those that it rejects.

    An engine answers a request of more tokens, prompt and output together, than its model was made
    for with an error, or than it was set to (vLLM: ``max_model_len``; ``is_set``). Where it would
    reject all, so does this. ``force`` serves them.
    """
    if most is None:
        return trace, ""
    tokens = trace.prompt_tokens + trace.output_tokens
    is_long = tokens > most
    if not is_long.any():
        return trace, ""
    if force:
        longest = int(tokens.max())
        return trace, f"{longest} positions are more than the {most} this model was made for"
    if is_long.all():
        limit = "--max-model-len allows" if is_set else "it was made for"
        expected = f"at most the {most:,} tokens that {limit}, prompt and output together"
        do = (
            "Ask for shorter prompts or outputs, or a model with a longer context. "
            "Serve them all the same: --force, force=True."
        )
        raise bad_value(f"{model}: context", expected, f"{int(tokens.min()):,} tokens", do)
    reason = f"{model} was made for: the engine rejects them (--force serves them)"
    if is_set:
        reason = "--max-model-len allows: the engine rejects them"
    sentence = (
        f"{int(is_long.sum()):,} of {len(trace):,} requests have more than the {most:,} "
        "tokens that "
        f"{reason}"
    )
    return trace.select(~is_long), sentence


def make_trace(
    arrival_s: npt.ArrayLike,
    prompt_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
    prefix_id: npt.ArrayLike | None = None,
    name: str = "",
) -> Trace:
    """Build a trace from columns in any order of arrival.

    >>> make_trace([2.0, 1.0], [10, 20], [1, 2]).prompt_tokens.tolist()
    [20, 10]
    """
    time_s = np.asarray(arrival_s, dtype=np.float64)
    prompts = _as_counts(prompt_tokens)
    outputs = _as_counts(output_tokens)
    prefixes = _as_counts(np.full(len(time_s), NO_PREFIX) if prefix_id is None else prefix_id)
    lengths = [len(time_s), len(prompts), len(outputs), len(prefixes)]
    if len(set(lengths)) > 1:
        raise bad_value(name or "trace", "columns of one length", lengths)
    order = np.argsort(time_s, kind="stable")
    return Trace(
        time_s[order],
        prompts[order],
        outputs[order],
        prefixes[order],
        name,
    )


def _as_counts(values: npt.ArrayLike) -> Counts:
    """Return whole numbers; what is beyond all bounds stays so, without an overflow."""
    return np.asarray(np.clip(values, -(2**62), 2**62), dtype=np.int64)


def draw_trace(
    rate_per_s: float,
    prompt: str | int = 512,
    output: str | int = 128,
    arrivals: str = "poisson",
    seconds: float = 600.0,
    requests: int | None = None,
    seed: int = 1,
) -> Trace:
    """Draw a trace: arrivals at a mean of ``rate_per_s`` for ``seconds``, or exactly ``requests``.

    ``arrivals`` is ``poisson``, ``fixed``, ``gamma:cv=2`` (gaps with a coefficient of variation) or
    ``diurnal:peak=2,period=24h`` (a Poisson rate that swings as a sine between ``2 - peak`` and
    ``peak`` times the mean). ``prompt`` and ``output`` are tokens: a number,
    ``lognormal:median=512,sigma=0.8,least=16,most=4096``, or a file with one length a line, from
    which lengths are drawn.
    """
    if not (np.isfinite(rate_per_s) and rate_per_s > 0):
        raise bad_value("rate", "requests per second above zero", rate_per_s)
    if requests is None and not 0 < seconds < _LONGEST_S:
        raise bad_value("seconds", "a time above zero", seconds)
    if requests is None:
        arrival_s, random = _draw_for_a_time(arrivals, rate_per_s, seconds, seed)
    else:
        _check_count(requests)
        random = np.random.default_rng(seed)
        arrival_s = draw_arrivals(arrivals, random, requests, rate_per_s)
    if not len(arrival_s):
        absent = f"none within {seconds:g} s"
        raise bad_value("rate", "at least one arrival", absent, "Raise the rate or the time.")
    prompts = draw_lengths(prompt, "prompt", random, len(arrival_s))
    outputs = draw_lengths(output, "output", random, len(arrival_s))
    label = f"{arrivals} at {rate_per_s:g}/s, prompt {prompt}, output {output}, seed {seed}"
    return make_trace(arrival_s, prompts, outputs, name=label)


def _draw_for_a_time(
    arrivals: str,
    rate_per_s: float,
    seconds: float,
    seed: int,
) -> tuple[Array, np.random.Generator]:
    """Draw the arrivals of some seconds, and return the generator as they leave it."""
    expected = rate_per_s * seconds
    count = int(
        expected + _SURE_DEVIATIONS * expected**0.5 + _SURE_MORE
    )  # eight standard deviations more than the mean
    _check_count(count)
    while True:
        random = np.random.default_rng(seed)
        arrival_s = draw_arrivals(arrivals, random, count, rate_per_s)
        if arrival_s[-1] >= seconds or count > MOST_REQUESTS:
            return arrival_s[arrival_s < seconds], random
        count = 2 * count


def _check_count(count: int) -> None:
    if not 0 < count <= MOST_REQUESTS:
        raise bad_value("requests", f"from 1 to {MOST_REQUESTS}", count)


def draw_arrivals(
    spec: str,
    random: np.random.Generator,
    count: int,
    rate: float,
) -> Array:
    """Draw the times of arrivals by a process such as ``gamma:cv=2``."""
    process, values = _split_spec(spec)
    check_names("process of arrivals", process, ARRIVAL_PROCESSES)
    where = f"arrivals {process}"
    if process == "gamma":
        (cv,) = _parse_numbers(values, where, cv=2.0)
        shape = 1.0 / cv**2
        return np.cumsum(random.gamma(shape, 1.0 / (shape * rate), count))
    if process == "diurnal":
        period_s = units.parse(values.get("period", "24h"), "s", f"{where}: period")
        peak, _ = _parse_numbers({**values, "period": "1"}, where, peak=_USUAL_PEAK, period=1.0)
        if not 1.0 <= peak <= 2.0 or period_s <= 0:
            expected = "a peak from 1 to 2 times the mean and a period above zero"
            raise bad_value(where, expected, spec)
        return _draw_diurnal(
            random,
            count,
            rate,
            peak,
            period_s,
        )
    _parse_numbers(values, where)
    if process == "fixed":
        return np.arange(1.0, count + 1.0, dtype=np.float64) / rate
    return np.cumsum(random.standard_exponential(count)) / rate


def _draw_diurnal(
    random: np.random.Generator,
    count: int,
    rate: float,
    peak: float,
    period_s: float,
) -> Array:
    """Draw arrivals whose rate swings as a sine.

    λ(t) = r (1 - a cos ωt) starts at its lowest, so Λ(t) = r (t - a/ω sin ωt), whose inverse maps
    arrivals at a rate of one.
    """
    unit = np.cumsum(random.standard_exponential(count))
    omega = 2 * np.pi / period_s
    last_s = unit[-1] / rate + period_s
    grid_s = np.linspace(0.0, last_s, max(int(_GRID * last_s / period_s), _GRID) + 1)
    arrived = rate * (grid_s - (peak - 1.0) / omega * np.sin(omega * grid_s))
    return np.interp(unit, arrived, grid_s)


def draw_lengths(
    spec: str | int,
    where: str,
    random: np.random.Generator,
    count: int,
) -> Counts:
    """Draw token counts from ``512``, ``lognormal:...`` or a file of lengths."""
    text = str(spec).strip()
    if text.lstrip("+-").isdigit():
        tokens = int(text)
        if not 1 <= tokens < MOST_TOKENS:
            raise bad_value(where, f"from 1 to {MOST_TOKENS - 1} tokens", text)
        return np.full(count, tokens)
    name, values = _split_spec(text)
    if name == "lognormal":
        usual = {
            "median": None,
            "sigma": USUAL_SIGMA,
            "least": 1.0,
            "most": MOST_TOKENS - 1.0,
        }
        median, sigma, least, most = _parse_numbers(values, where, **usual)
        if not 1 <= least <= most < MOST_TOKENS:
            raise bad_value(where, "1 <= least <= most", text)
        lengths = median * np.exp(sigma * random.standard_normal(count))
        return np.clip(np.rint(lengths), least, most).astype(np.int64)
    path = Path(text)
    if not path.exists():
        form = "lognormal:median=512,sigma=0.8,least=16,most=4096"
        raise bad_value(where, f"tokens, {form}, or a file with one length a line", text)
    return random.choice(_read_lengths(path), count)


def draw_times(
    spec: str | float,
    where: str,
    random: np.random.Generator,
    count: int,
) -> Array:
    """Draw seconds from ``2s``, ``exponential:mean=2s`` or ``lognormal:median=2s,sigma=0.8``."""
    text = str(spec).strip()
    name, values = _split_spec(text)
    if name == "exponential":
        (mean_s,) = _parse_times(values, where, "mean")
        return mean_s * random.standard_exponential(count)
    if name == "lognormal":
        (median_s,) = _parse_times(values, where, "median")
        other_values = {key: value for key, value in values.items() if key != "median"}
        (sigma,) = _parse_numbers(other_values, where, sigma=USUAL_SIGMA)
        return np.asarray(median_s * np.exp(sigma * random.standard_normal(count)))
    with contextlib.suppress(ValueError):
        spec = float(text)
    return np.full(count, units.parse_amount(spec, "s", where))


def _parse_times(
    values: Mapping[str, str],
    where: str,
    name: str,
) -> list[float]:
    """Return the time that must stand under a name; a bare number is seconds."""
    if name not in values:
        raise bad_value(where, f"a value of {name}", "none")
    return [units.parse_seconds(values[name], f"{where}: {name}")]


def _read_lengths(path: Path) -> Counts:
    words = read_bytes(path).decode("utf-8", "replace").split()
    try:
        lengths = np.array(words, dtype=np.int64)
    except (ValueError, OverflowError):
        raise bad_value(path.name, "one whole number of tokens a line", "something else") from None
    if not len(lengths) or (lengths < 1).any() or (lengths >= MOST_TOKENS).any():
        raise bad_value(path.name, f"lengths from 1 to {MOST_TOKENS - 1}", "others or none")
    return lengths


def _split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Split ``gamma:cv=2`` into its name and its values."""
    name, _, pairs = str(spec).strip().partition(":")
    values: dict[str, str] = {}
    for pair in pairs.split(",") if pairs else ():
        key, equals, value = pair.partition("=")
        if not equals or not key.strip() or key.strip() in values:
            expected = "NAME=VALUE, each once, with commas between"
            raise bad_value(name or "distribution", expected, pairs)
        values[key.strip()] = value.strip()
    return name, values


def _parse_numbers(
    values: Mapping[str, str],
    where: str,
    **usual: float | None,
) -> list[float]:
    """Return the numbers of these names, or the usual ones; no other name may have a value."""
    check_names(f"value of {where}", values, usual, f"Known: {', '.join(usual) or 'none'}.")
    numbers = []
    for key, default in usual.items():
        text = values.get(key, default)
        if text is None:
            raise bad_value(where, f"a value of {key}", "none")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number > 0):
            raise bad_value(f"{where}: {key}", "a number above zero", text)
        numbers.append(number)
    return numbers
