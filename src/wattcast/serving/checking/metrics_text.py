"""Read metrics in Prometheus' text format: one scrape of an engine, and of a card's exporter."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_EDGE = re.compile(r'(?:^|,)\s*le="([^"]+)"')


@dataclass(frozen=True)
class MetricsText:
    """The samples of a scrape; series of several engines, models or cards are added up."""

    sums: dict[str, float] = field(default_factory=dict)
    series: dict[str, int] = field(default_factory=dict)  # how many were added up
    largest: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)  # by upper edge

    def find_sum(self, names: Sequence[str]) -> float | None:
        """Return the sum of the first of these names that there is."""
        return next((self.sums[name] for name in names if name in self.sums), None)

    def find_mean(self, names: Sequence[str]) -> float | None:
        """Return the mean over the series of the first of these names that there is."""
        for name in names:
            if name in self.sums:
                return self.sums[name] / self.series[name]
        return None

    def find_largest(self, names: Sequence[str]) -> float | None:
        """Return the largest value of the first of these names that there is."""
        return next((self.largest[name] for name in names if name in self.largest), None)

    def count_series(self, names: Sequence[str]) -> int:
        """Count the series of the first of these names that there is."""
        return next((self.series[name] for name in names if name in self.series), 0)


def parse_metrics_text(text: str) -> MetricsText:
    """Read a scrape. Lines that are no samples, and values that are no finite numbers, are left
    out.
    """
    metrics = MetricsText()
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        number = read_finite(value)
        if number is None:
            continue
        edge = _EDGE.search(labels or "")
        if name.endswith("_bucket") and edge is not None:
            _add_bucket(metrics.buckets, name.removesuffix("_bucket"), edge[1], number)
            continue
        metrics.sums[name] = metrics.sums.get(name, 0.0) + number
        metrics.series[name] = metrics.series.get(name, 0) + 1
        metrics.largest[name] = max(metrics.largest.get(name, -math.inf), number)
    return metrics


def _add_bucket(
    buckets: dict[str, dict[float, float]],
    name: str,
    edge: str,
    number: float,
) -> None:
    edge_s = read_edge(edge)
    series = buckets.setdefault(name, {})
    series[edge_s] = series.get(edge_s, 0.0) + number


def read_edge(text: str) -> float:
    """Return the upper edge of a bucket."""
    return float(text.replace("+Inf", "inf"))


def read_finite(text: str) -> float | None:
    """Return a finite number; None for anything else."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def subtract_buckets(
    now: Mapping[float, float], before: Mapping[float, float]
) -> dict[float, float]:
    """Return the counts of a histogram between two scrapes."""
    return {edge: count - before.get(edge, 0.0) for edge, count in now.items()}
