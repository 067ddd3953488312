"""Say what a service did between two moments: from scrapes of its engines, or from Prometheus.

Names are those of vLLM 0.25.1 (``vllm/v1/metrics/loggers.py``), of NVIDIA's DCGM exporter and of
``wattcast export prometheus``.
"""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wattcast.core import (
    BadInput,
    MissingTool,
    bad_value,
)
from wattcast.core.strict_files import read_bytes
from wattcast.serving.checking.check_coefficients import CHECK
from wattcast.serving.checking.metrics_text import (
    MetricsText,
    parse_metrics_text,
    read_finite,
)

READ_TIMEOUT_S = 10.0
LARGEST_ANSWER = 16 << 20
LEAST_REQUESTS = 20  # of a window that is worth comparing

HISTOGRAMS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "prompt": "vllm:request_prompt_tokens",
    "output": "vllm:request_generation_tokens",
}
COUNTERS = {
    "hits": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits"),
    "queries": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
}
RUNNING = ("vllm:num_requests_running",)
WAITING = ("vllm:num_requests_waiting",)
# metric -> joules of its unit; a counter is better than the readings of a gauge
ENERGIES = {"wattcast_energy_joules_total": 1.0, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 1e-3}
POWERS = ("wattcast_power_watts", "DCGM_FI_DEV_POWER_USAGE")
CLOCKS = {"wattcast_clock_hertz": 1.0, "DCGM_FI_DEV_SM_CLOCK": 1e6}


@dataclass(frozen=True)
class MetricsWindow:
    """What the engines of a service did in a time, each on its own GPUs."""

    seconds: float
    engines: int
    requests: float  # that ended
    prompt_tokens: float  # mean of a request; NaN where none ended
    output_tokens: float
    ttft_s: float  # mean
    tpot_s: float  # mean; NaN where all answers have one token
    running: float  # mean requests in an engine's steps
    waiting: float
    power_w: float | None = None  # mean of a GPU
    clock_hz: float | None = None  # the highest that was seen
    prefix_hit_share: float | None = None
    preemptions: float = 0.0

    @property
    def rate_per_s(self) -> float:
        """Requests a second of one engine."""
        return self.requests / self.seconds / self.engines

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens a second of one engine."""
        return self.rate_per_s * self.output_tokens

    @property
    def has_lengths(self) -> bool:
        """Whether the mean lengths of its requests are known."""
        lengths = (self.prompt_tokens, self.output_tokens)
        return all(math.isfinite(tokens) and tokens > 0.0 for tokens in lengths)

    @property
    def has_figures(self) -> bool:
        """Whether there is a mean to compare with a simulated one."""
        figures = (self.ttft_s, self.tpot_s, self.power_w or 0.0)
        return any(math.isfinite(figure) and figure > 0.0 for figure in figures)


def compare_scrapes(
    before: MetricsText,
    after: MetricsText,
    seconds: float,
) -> MetricsWindow:
    """Return what happened between two scrapes; an engine that was started anew counts from
    zero.
    """
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    restarted = _has_restarted(before, after)
    earlier = MetricsText() if restarted else before
    for name, metric in HISTOGRAMS.items():
        counts[name] = _increase(earlier, after, (f"{metric}_count",)) or 0.0
        sums[name] = _increase(earlier, after, (f"{metric}_sum",)) or 0.0
    if not counts["ttft"]:
        form = f"requests in {HISTOGRAMS['ttft']} (vLLM's metrics)"
        raise bad_value("metrics", form, "none between the two readings")

    increases = {name: _increase(earlier, after, names) for name, names in COUNTERS.items()}
    scrapes = (after,) if restarted else (before, after)
    return MetricsWindow(
        seconds=seconds,
        engines=max(after.count_series(RUNNING), 1),
        requests=counts["output"] or counts["ttft"],
        prompt_tokens=_divide(sums["prompt"], counts["prompt"]),
        output_tokens=_divide(sums["output"], counts["output"]),
        ttft_s=_divide(sums["ttft"], counts["ttft"]),
        tpot_s=_divide(sums["tpot"], counts["tpot"]),
        running=_mean_of(scrapes, RUNNING) or 0.0,
        waiting=_mean_of(scrapes, WAITING) or 0.0,
        power_w=_find_power_w(earlier, after, seconds),
        clock_hz=_find_clock_hz(scrapes),
        prefix_hit_share=_find_share(increases["hits"], increases["queries"]),
        preemptions=increases["preemptions"] or 0.0,
    )


def _has_restarted(before: MetricsText, after: MetricsText) -> bool:
    """Tell whether the count of requests fell, which it does when an engine starts."""
    name = f"{HISTOGRAMS['ttft']}_count"
    return after.sums.get(name, 0.0) < before.sums.get(name, 0.0)


def _increase(
    before: MetricsText,
    after: MetricsText,
    names: Sequence[str],
) -> float | None:
    now = after.find_sum(names)
    if now is None:
        return None
    return now - (before.find_sum(names) or 0.0)


def _divide(total: float, count: float) -> float:
    return total / count if count > 0.0 else math.nan


def _find_share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _mean_of(scrapes: Iterable[MetricsText], names: Sequence[str]) -> float | None:
    values = [scrape.find_mean(names) for scrape in scrapes]
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _find_power_w(
    before: MetricsText,
    after: MetricsText,
    seconds: float,
) -> float | None:
    """Return the mean power of a GPU: from energy counters, or else the readings of the scrapes."""
    for name, joules in ENERGIES.items():
        if name in before.sums and name in after.sums:
            spent_j = (after.sums[name] - before.sums[name]) * joules
            return spent_j / seconds / after.series[name]
    return _mean_of((before, after), POWERS)


def _find_clock_hz(scrapes: Iterable[MetricsText]) -> float | None:
    """Return the highest core clock of the scrapes."""
    clocks_hz = []
    for scrape in scrapes:
        for name, hertz in CLOCKS.items():
            value = scrape.find_largest((name,))
            if value is not None:
                clocks_hz.append(value * hertz)
    return max(clocks_hz, default=None)


# Sources


def read_scrapes(
    sources: Sequence[str],
    seconds: float | None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[MetricsWindow]:
    """Read windows from files of scrapes in the order of time, or from an engine that is asked
    twice.

    The time between files is ``seconds``, or that between their dates of change. One file alone is
    all since the engine started.
    """
    if len(sources) == 1 and is_address(sources[0]):
        before = parse_metrics_text(fetch_text(sources[0]))
        start_s = time.monotonic()
        sleep(60.0 if seconds is None else seconds)
        after = parse_metrics_text(fetch_text(sources[0]))
        return [compare_scrapes(before, after, time.monotonic() - start_s)]
    scrapes = []
    dates_s = []
    for source in sources:
        path = Path(source)
        text = read_bytes(path, LARGEST_ANSWER).decode("utf-8", "replace")
        scrapes.append(parse_metrics_text(text))
        dates_s.append(path.stat().st_mtime)
    if len(scrapes) == 1:
        start_s = scrapes[0].sums.get("process_start_time_seconds", math.nan)
        lived_s = seconds if seconds is not None else dates_s[0] - start_s
        _check_seconds(lived_s)
        return [compare_scrapes(MetricsText(), scrapes[0], lived_s)]
    windows = []
    for place in range(1, len(scrapes)):
        between_s = seconds
        if between_s is None:
            between_s = dates_s[place] - dates_s[place - 1]
        _check_seconds(between_s)
        windows.append(compare_scrapes(scrapes[place - 1], scrapes[place], between_s))
    return windows


def _check_seconds(between_s: float) -> None:
    if not (math.isfinite(between_s) and between_s > 0.0):
        do = "Give --seconds, the time between two files."
        raise bad_value("metrics", "files that were written one after another", between_s, do)


def is_address(source: str) -> bool:
    """Tell whether a source is an address and not a file."""
    return source.startswith(("http://", "https://"))


def fetch_text(url: str) -> str:
    """Return the text at an address. ``MissingTool`` when nothing answers."""
    if not is_address(url):
        raise bad_value("address", "one such as http://localhost:8000/metrics", url)
    try:
        with urllib.request.urlopen(url, timeout=READ_TIMEOUT_S) as answer:  # noqa: S310
            data: bytes = answer.read(LARGEST_ANSWER)
            return data.decode("utf-8", "replace")
    except (urllib.error.URLError, OSError) as error:
        raise MissingTool(f"{url}: does not answer ({error}).") from None


def read_prometheus(
    url: str,
    window_s: float,
    slice_s: float,
    selector: str = "",
    now_s: float | None = None,
    fetch: Callable[[str], str] = fetch_text,
) -> list[MetricsWindow]:
    """Ask a Prometheus server for the last ``window_s``, in slices.

    ``selector`` is put between the braces of each metric of the engine, such as ``job="vllm"``.
    """
    end_s = time.time() if now_s is None else now_s
    count = max(round(window_s / slice_s), 1)
    client = PrometheusClient(
        url,
        slice_s,
        end_s - (count - 1) * slice_s,
        end_s,
        fetch,
    )
    increases = _ask_increases(client, selector)
    engines = client.ask(f"count(vllm:num_requests_running{{{selector}}})")
    gauges = {
        "running": client.ask(f"avg(avg_over_time({RUNNING[0]}{{{selector}}}[{client.span}]))"),
        "waiting": client.ask(f"avg(avg_over_time({WAITING[0]}{{{selector}}}[{client.span}]))"),
    }
    power = _ask_first(
        client,
        [
            *(
                f"avg(rate({name}[{client.span}])) * {joules:g}"
                for name, joules in ENERGIES.items()
            ),
            *(f"avg(avg_over_time({name}[{client.span}]))" for name in POWERS),
        ],
    )
    clock = _ask_first(
        client,
        [
            f"max(max_over_time({name}[{client.span}])) * {hertz:g}"
            for name, hertz in CLOCKS.items()
        ],
    )
    windows = []
    for moment in sorted(increases["ttft_count"]):
        at_moment = {name: values.get(moment, 0.0) for name, values in increases.items()}
        if at_moment["ttft_count"] < 1.0:
            continue
        window = _make_window(at_moment, slice_s, max(round(engines.get(moment, 1.0)), 1))
        windows.append(
            replace(
                window,
                running=gauges["running"].get(moment, 0.0),
                waiting=gauges["waiting"].get(moment, 0.0),
                power_w=power.get(moment),
                clock_hz=clock.get(moment),
            )
        )
    if not windows:
        do = "Is it scraped, and are the labels right (--selector)?"
        raise BadInput(f"{url}: has no requests of vLLM in the last {window_s:g} s. {do}")
    return windows


def _ask_increases(client: PrometheusClient, selector: str) -> dict[str, dict[float, float]]:
    """Return the increase of each histogram and counter in every slice, by moment."""
    increases = {}
    for name, metric in HISTOGRAMS.items():
        for end in ("count", "sum"):
            query = f"sum(increase({metric}_{end}{{{selector}}}[{client.span}]))"
            increases[f"{name}_{end}"] = client.ask(query)
    for name, names in COUNTERS.items():
        increases[name] = client.ask(f"sum(increase({names[0]}{{{selector}}}[{client.span}]))")
    return increases


def _ask_first(client: PrometheusClient, queries: Iterable[str]) -> dict[float, float]:
    """Return the values of the first query that has any."""
    for query in queries:
        values = client.ask(query)
        if values:
            return values
    return {}


def _make_window(
    increase: Mapping[str, float],
    seconds: float,
    engines: int,
) -> MetricsWindow:
    """Return a window from the increases of histograms and counters."""

    def mean(name: str) -> float:
        return _divide(increase[f"{name}_sum"], increase[f"{name}_count"])

    return MetricsWindow(
        seconds=seconds,
        engines=engines,
        requests=increase["output_count"] or increase["ttft_count"],
        prompt_tokens=mean("prompt"),
        output_tokens=mean("output"),
        ttft_s=mean("ttft"),
        tpot_s=mean("tpot"),
        running=0.0,
        waiting=0.0,
        prefix_hit_share=_find_share(increase["hits"], increase["queries"]),
        preemptions=increase["preemptions"],
    )


@dataclass(frozen=True)
class PrometheusClient:
    """Ask a Prometheus server for values at equal steps (``/api/v1/query_range``)."""

    url: str
    step_s: float
    start_s: float
    end_s: float
    fetch: Callable[[str], str] = fetch_text

    @property
    def span(self) -> str:
        """A step as PromQL writes it."""
        return f"{max(round(self.step_s), 1)}s"

    def ask(self, query: str) -> dict[float, float]:
        """Return the values of a query by moment; those that are no numbers are left out."""
        parameters = {
            "query": query,
            "start": self.start_s,
            "end": self.end_s,
            "step": self.step_s,
        }
        address = f"{self.url.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(parameters)}"
        series = self._read_series(self.fetch(address))
        values: dict[float, float] = {}
        for moment, text in series:
            number = read_finite(str(text))
            if number is not None:
                values[float(moment)] = number
        return values

    def _read_series(self, text: str) -> list[list[Any]]:
        """Return the pairs of moment and value of an answer's first series."""
        try:
            answer = json.loads(text)
            if answer["status"] != "success":
                raise BadInput(f"{self.url}: {answer.get('error', 'refused the question')}.")
            result = answer["data"]["result"]
            pairs: list[list[Any]] = result[0]["values"] if result else []
        except (ValueError, KeyError, TypeError, IndexError):
            raise BadInput(f"{self.url}: does not answer as Prometheus does.") from None
        return pairs


def merge_windows(windows: Sequence[MetricsWindow]) -> MetricsWindow:
    """Return several windows as one: sums of counts, means weighed by requests or by time.

    A window whose mean of a request is NaN does not count to that mean.
    """
    if len(windows) == 1:
        return windows[0]
    requests = sum(window.requests for window in windows)
    seconds = sum(window.seconds for window in windows)

    def by_request(name: str) -> float:
        counting = [one for one in windows if math.isfinite(getattr(one, name))]
        total = sum(getattr(one, name) * one.requests for one in counting)
        return _divide(total, sum(one.requests for one in counting))

    def by_time(name: str) -> float:
        return float(sum(getattr(one, name) * one.seconds for one in windows) / seconds)

    has_power = all(one.power_w is not None for one in windows)
    clocks_hz = [one.clock_hz for one in windows if one.clock_hz is not None]
    has_hits = all(one.prefix_hit_share is not None for one in windows)
    return MetricsWindow(
        seconds=seconds,
        engines=round(by_time("engines")),
        requests=requests,
        prompt_tokens=by_request("prompt_tokens"),
        output_tokens=by_request("output_tokens"),
        ttft_s=by_request("ttft_s"),
        tpot_s=by_request("tpot_s"),
        running=by_time("running"),
        waiting=by_time("waiting"),
        power_w=by_time("power_w") if has_power else None,
        clock_hz=max(clocks_hz, default=None),
        prefix_hit_share=by_request("prefix_hit_share") if has_hits else None,
        preemptions=sum(one.preemptions for one in windows),
    )


def group_by_load(windows: Sequence[MetricsWindow]) -> list[MetricsWindow]:
    """Merge windows of similar load: rates of a group are within a factor of ``alike_load``.

    Groups of too few requests, of requests of which none ended, or without any figure to compare
    are left out. An error where no other group is there.
    """
    groups: list[list[MetricsWindow]] = []
    for window in sorted(windows, key=lambda one: one.rate_per_s):
        if groups and window.rate_per_s <= CHECK.alike_load * groups[-1][0].rate_per_s:
            groups[-1].append(window)
        else:
            groups.append([window])
    merged = [merge_windows(group) for group in groups]
    enough = [window for window in merged if window.requests >= LEAST_REQUESTS]
    if not enough:
        most = max((window.requests for window in merged), default=0.0)
        raise bad_value("metrics", f"at least {LEAST_REQUESTS} requests", f"{most:.0f}")
    measured = [window for window in enough if window.has_lengths]
    if not measured:
        form = f"requests that ended (in {HISTOGRAMS['prompt']} and {HISTOGRAMS['output']})"
        raise bad_value("metrics", form, "none", "Look at a longer time.")
    comparable = [window for window in measured if window.has_figures]
    if not comparable:
        raise bad_value("metrics", "a mean time to first token, time per token or power", "none")
    return comparable
