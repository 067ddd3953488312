"""Describe the requests that reach a server: when each arrives, and how many tokens it brings and
asks for.

A ``Trace`` is drawn from an arrival process and two length distributions, or read from a file.
Files are CSV or JSON Lines with ``arrival_s, prompt_tokens, output_tokens`` and optionally
``prefix_id``; the public traces of Azure (``TIMESTAMP, ContextTokens, GeneratedTokens``) and
BurstGPT (``Timestamp, Model, Request tokens, Response tokens``) are recognised by their header."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from wattcast.core import BadInput, bad_value, check_names, clip_text, units
from wattcast.core.arrays import Array
from wattcast.core.strict_files import read_bytes, read_number

Counts = npt.NDArray[np.int64]
NO_PREFIX = -1
MOST_TOKENS = 1 << 24
MOST_REQUESTS = 20_000_000
MOST_TRACE_BYTE = 2**30
LONGEST_TRACE_S = 1e8  # three years; the longest public trace is one of 213 days
ARRIVAL_PROCESSES = ("poisson", "gamma", "fixed", "diurnal")


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival; ``prefix_id`` groups prompts that begin alike, -1 stands for
    none.
    """

    arrival_s: Array
    prompt_tokens: Counts
    output_tokens: Counts
    prefix_id: Counts
    name: str = ""

    def __post_init__(self) -> None:
        if not len(self.arrival_s):
            raise bad_value(self.name or "trace", "at least one request", "none")
        if (
            not np.isfinite(self.arrival_s).all()
            or (np.diff(self.arrival_s) < 0).any()
            or self.arrival_s[0] < 0
        ):
            raise bad_value(
                self.name or "trace", "arrival times that are finite, positive and rise", "others"
            )
        if self.arrival_s[-1] > LONGEST_TRACE_S:
            wanted = f"arrival times of at most {LONGEST_TRACE_S:g} s"
            raise bad_value(self.name or "trace", wanted, float(self.arrival_s[-1]))
        for label, column in (
            ("prompt_tokens", self.prompt_tokens),
            ("output_tokens", self.output_tokens),
        ):
            if (column < 1).any() or (column >= MOST_TOKENS).any():
                worst = int(column.min() if (column < 1).any() else column.max())
                raise bad_value(
                    f"{self.name or 'trace'}: {label}", f"from 1 to {MOST_TOKENS - 1} tokens", worst
                )

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def context_spread(self) -> float:
        """Standard deviation of the contexts behind generated tokens, over their mean."""
        mean = self.prompt_tokens + 0.5 * self.output_tokens
        weight = self.output_tokens
        middle = float(np.average(mean, weights=weight))
        square = float(
            np.average((mean - middle) ** 2 + self.output_tokens**2 / 12.0, weights=weight)
        )
        return math.sqrt(square) / middle


def drop_long_requests(
    trace: Trace, model: str, most: int | None, force: bool
) -> tuple[Trace, str]:
    """Return the requests that an engine accepts, and a sentence about those that it rejects.

    An engine answers a request of more tokens, prompt and output together, than its model was made
    for with an error (vLLM: ``max_model_len``). Where it would reject all, so does this. ``force``
    serves them.
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
        wanted = f"at most the {most:,} tokens that it was made for, prompt and output together"
        do = (
            "Ask for shorter prompts or outputs, or a model with a longer context. "
            "Serve them all the same: --force, force=True."
        )
        raise bad_value(f"{model}: context", wanted, f"{int(tokens.min()):,} tokens", do)
    served = ~is_long
    kept = Trace(
        trace.arrival_s[served],
        trace.prompt_tokens[served],
        trace.output_tokens[served],
        trace.prefix_id[served],
        trace.name,
    )
    said = (
        f"{int(is_long.sum()):,} of {len(trace):,} requests have more than the {most:,} tokens that "
        f"{model} was made for: the engine rejects them (--force serves them)"
    )
    return kept, said


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
    order = np.argsort(time_s, kind="stable")
    prefix = np.full(len(time_s), NO_PREFIX) if prefix_id is None else prefix_id
    given = (np.clip(one, -(2**62), 2**62) for one in (prompt_tokens, output_tokens, prefix))
    counts: list[Counts] = [np.asarray(one, dtype=np.int64) for one in given]
    if {len(column) for column in counts} != {len(time_s)}:
        raise bad_value(name or "trace", "columns of one length", [len(time_s), *map(len, counts)])
    prompt, output, group = (column[order] for column in counts)
    return Trace(time_s[order], prompt, output, group, name)


def draw_trace(
    rate_per_s: float,
    prompt: str | int = 512,
    output: str | int = 128,
    arrivals: str = "poisson",
    seconds: float = 600.0,
    requests: int | None = None,
    seed: int = 1,
) -> Trace:
    """Draw a trace: arrivals at a mean of ``rate_per_s`` for ``seconds``, or exactly ``requests``
    of them.

    ``arrivals`` is ``poisson``, ``fixed``, ``gamma:cv=2`` (gaps with a coefficient of variation) or
    ``diurnal:peak=2,period=24h`` (a Poisson rate that swings as a sine between ``2 - peak`` and
    ``peak`` times the mean). ``prompt`` and ``output`` are tokens: a number,
    ``lognormal:median=512,sigma=0.8,least=16,most=4096``, or a file with one length a line, from
    which lengths are drawn."""
    if not (np.isfinite(rate_per_s) and rate_per_s > 0):
        raise bad_value("rate", "requests per second above zero", rate_per_s)
    if requests is None and not 0 < seconds < 1e9:
        raise bad_value("seconds", "a time above zero", seconds)
    count = (
        requests
        if requests is not None
        else int(rate_per_s * seconds + 8 * (rate_per_s * seconds) ** 0.5 + 16)
    )
    if not 0 < count <= MOST_REQUESTS:
        raise bad_value("requests", f"from 1 to {MOST_REQUESTS}", count)
    random = np.random.default_rng(seed)
    while True:
        arrival_s = draw_arrivals(arrivals, random, count, rate_per_s)
        if requests is not None or arrival_s[-1] >= seconds or count > MOST_REQUESTS:
            break
        random = np.random.default_rng(seed)
        count = 2 * count
    if requests is None:
        arrival_s = arrival_s[arrival_s < seconds]
    if not len(arrival_s):
        raise bad_value(
            "rate",
            "at least one arrival",
            f"none within {seconds:g} s",
            "Raise the rate or the time.",
        )
    prompts = draw_lengths(prompt, "prompt", random, len(arrival_s))
    outputs = draw_lengths(output, "output", random, len(arrival_s))
    label = f"{arrivals} at {rate_per_s:g}/s, prompt {prompt}, output {output}, seed {seed}"
    return make_trace(arrival_s, prompts, outputs, name=label)


def draw_arrivals(spec: str, random: np.random.Generator, count: int, rate: float) -> Array:
    """Draw the times of arrivals by a process such as ``gamma:cv=2``."""
    process, given = _split_spec(spec)
    check_names("process of arrivals", process, ARRIVAL_PROCESSES)
    where = f"arrivals {process}"
    if process == "gamma":
        (cv,) = _take_numbers(given, where, cv=2.0)
        shape = 1.0 / cv**2
        return np.cumsum(random.gamma(shape, 1.0 / (shape * rate), count))
    if process == "diurnal":
        period_s = units.parse(given.get("period", "24h"), "s", f"{where}: period")
        peak, _ = _take_numbers({**given, "period": "1"}, where, peak=1.5, period=1.0)
        if not 1.0 <= peak <= 2.0 or period_s <= 0:
            raise bad_value(
                where, "a peak from 1 to 2 times the mean and a period above zero", spec
            )
        # λ(t) = r (1 - a cos ωt) starts at its lowest, so Λ(t) = r (t - a/ω sin ωt), whose inverse
        # maps unit arrivals
        unit = np.cumsum(random.standard_exponential(count))
        omega = 2 * np.pi / period_s
        last_s = unit[-1] / rate + period_s
        grid_s = np.linspace(0.0, last_s, max(int(64 * last_s / period_s), 64) + 1)
        return np.interp(
            unit, rate * (grid_s - (peak - 1.0) / omega * np.sin(omega * grid_s)), grid_s
        )
    _take_numbers(given, where)
    if process == "fixed":
        return np.arange(1.0, count + 1.0, dtype=np.float64) / rate
    return np.cumsum(random.standard_exponential(count)) / rate


def draw_lengths(spec: str | int, where: str, random: np.random.Generator, count: int) -> Counts:
    """Draw token counts from ``512``, ``lognormal:...`` or a file of lengths."""
    text = str(spec).strip()
    if text.lstrip("+-").isdigit():
        tokens = int(text)
        if not 1 <= tokens < MOST_TOKENS:
            raise bad_value(where, f"from 1 to {MOST_TOKENS - 1} tokens", text)
        return np.full(count, tokens)
    name, given = _split_spec(text)
    if name == "lognormal":
        usual = {"median": None, "sigma": 0.8, "least": 1.0, "most": MOST_TOKENS - 1.0}
        median, sigma, least, most = _take_numbers(given, where, **usual)
        if not 1 <= least <= most < MOST_TOKENS:
            raise bad_value(where, "1 <= least <= most", text)
        drawn = median * np.exp(sigma * random.standard_normal(count))
        return np.clip(np.rint(drawn), least, most).astype(np.int64)
    path = Path(text)
    if not path.exists():
        wanted = "tokens, lognormal:median=512,sigma=0.8,least=16,most=4096, or a file with one length a line"
        raise bad_value(where, wanted, text)
    try:
        known = np.array(read_bytes(path).decode("utf-8", "replace").split(), dtype=np.int64)
    except (ValueError, OverflowError):
        raise bad_value(path.name, "one whole number of tokens a line", "something else") from None
    if not len(known) or (known < 1).any() or (known >= MOST_TOKENS).any():
        raise bad_value(path.name, f"lengths from 1 to {MOST_TOKENS - 1}", "others or none")
    return random.choice(known, count)


def read_trace(path: str | Path) -> Trace:
    """Read a trace file: CSV or JSON Lines of ours, or the public CSV of Azure or BurstGPT."""
    path = Path(path)
    return parse_trace(read_bytes(path, MOST_TRACE_BYTE), path.name)


def parse_trace(data: bytes, name: str) -> Trace:
    """Read a trace from the bytes of a file called ``name``."""
    if name.endswith((".jsonl", ".ndjson")):
        return _read_json_lines(data, name)
    text = data.decode("utf-8-sig", "replace")
    try:
        rows = list(csv.reader(io.StringIO(text, newline=None)))
    except csv.Error:  # a field without an end
        raise bad_value(name, "a table with a header and commas", clip_text(text)) from None
    header = [column.strip() for column in rows.pop(0)] if rows else []
    for form, columns in _FORMS.items():
        if set(columns) <= set(header):
            grouped = ["prefix_id"] if form == "wattcast" and "prefix_id" in header else []
            return _read_table(
                rows, [header.index(column) for column in (*columns, *grouped)], name, form
            )
    known = "; ".join(f"{form}: {', '.join(columns)}" for form, columns in _FORMS.items())
    raise bad_value(name, f"a header of a known form ({known})", clip_text(",".join(header)))


_FORMS = {  # arrival, prompt, output
    "wattcast": ("arrival_s", "prompt_tokens", "output_tokens"),
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}


def _read_table(rows: Iterable[Sequence[str]], places: list[int], where: str, form: str) -> Trace:
    kept = [row for row in rows if row]
    for number, row in enumerate(kept, start=2):
        if len(row) <= max(places):
            raise bad_value(f"{where}: line {number}", "as many fields as the header", len(row))
    if not kept:
        raise bad_value(where, "at least one request", "none")
    texts = [[row[place].strip() for row in kept] for place in places]
    arrival_s = (
        _read_timestamps(texts[0], where)
        if form == "azure"
        else _read_numbers(texts[0], where, "arrival")
    )
    prompts, outputs = (
        _read_numbers(texts[i], where, name) for i, name in ((1, "prompt"), (2, "output"))
    )
    if (
        form != "wattcast"
    ):  # public traces hold failed requests with no answer, and start at any hour
        answered = (prompts >= 1) & (outputs >= 1)
        if not answered.any():
            raise bad_value(where, "at least one request with an answer", "none")
        arrival_s = arrival_s[answered]
        prompts = prompts[answered]
        outputs = outputs[answered]
        arrival_s = arrival_s - arrival_s.min()
    return make_trace(
        arrival_s, prompts, outputs, _number_prefixes(texts[3]) if len(texts) > 3 else None, where
    )


def _read_numbers(texts: Sequence[str], where: str, column: str) -> Array:
    try:
        values = np.array(texts, dtype=np.float64)
    except ValueError:
        values = np.array([np.nan])
    if not np.isfinite(values).all():  # look for the first that is wrong
        for number, text in enumerate(texts, start=2):
            read_number(text, f"{where}: line {number}: {column}")
    return values


def _read_timestamps(texts: Sequence[str], where: str) -> Array:
    """Return seconds since the first day of the trace; a zone at the end is dropped, since all rows
    share it.
    """
    try:
        times = np.array(
            [text.strip().replace("Z", "").partition("+")[0] for text in texts],
            dtype="datetime64[ns]",
        )
    except ValueError:
        raise bad_value(
            where, "times such as 2023-11-16 18:15:46.680590", clip_text(texts[0])
        ) from None
    if np.isnat(times).any():
        raise bad_value(where, "a time in every row", "an empty one")
    return np.asarray((times - times.min()) / np.timedelta64(1, "ns") * 1e-9)


def _number_prefixes(names: Sequence[str | int | None]) -> Counts:
    known: dict[str, int] = {}
    texts = ("" if name is None else str(name) for name in names)
    return np.array(
        [NO_PREFIX if text in ("", "-1") else known.setdefault(text, len(known)) for text in texts]
    )


class _TraceLine(msgspec.Struct):
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_id: str | int | None = None


def _read_json_lines(data: bytes, where: str) -> Trace:
    decoder = msgspec.json.Decoder(_TraceLine)
    lines = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            lines.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"{where}: line {number}: {clip_text(str(error), 200)}.") from None
    if not lines:
        raise bad_value(where, "at least one request", "none")
    arrival_s, prompts, outputs, prefixes = zip(*map(msgspec.structs.astuple, lines), strict=True)
    return make_trace(arrival_s, prompts, outputs, _number_prefixes(prefixes), where)


def _split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Split ``gamma:cv=2`` into its name and its values."""
    name, _, rest = str(spec).strip().partition(":")
    given: dict[str, str] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or key.strip() in given:
            raise bad_value(
                name or "distribution", "NAME=VALUE, each once, with commas between", rest
            )
        given[key.strip()] = value.strip()
    return name, given


def _take_numbers(given: Mapping[str, str], where: str, **usual: float | None) -> list[float]:
    """Return the numbers of these names, the usual ones where they are not given; no other name may
    be.
    """
    check_names(f"value of {where}", given, usual, f"Known: {', '.join(usual) or 'none'}.")
    found = []
    for key, default in usual.items():
        text = given.get(key, default)
        if text is None:
            raise bad_value(where, f"a value of {key}", "none")
        try:
            found.append(float(text))
        except ValueError:
            found.append(math.nan)
        if not (math.isfinite(found[-1]) and found[-1] > 0):
            raise bad_value(f"{where}: {key}", "a number above zero", text)
    return found
