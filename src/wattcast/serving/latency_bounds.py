"""Bound the latencies of a service, such as a time to first token (TTFT) of 500 ms at the 99th
percentile, or a time per output token (TPOT).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from wattcast.core import bad_value, units
from wattcast.core.arrays import Array


class ServedLatencies(Protocol):
    """What is asked of a simulated run: the latencies of each request."""

    @property
    def ttft_s(self) -> Array: ...

    @property
    def tpot_s(self) -> Array: ...


@dataclass(frozen=True)
class LatencyBound:
    """A percentile of a latency that must not be longer, such as TTFT p99 within 500 ms."""

    quantity: str  # "ttft" or "tpot"
    percentile: float | None  # None: the bound is for each request
    seconds: float

    def __str__(self) -> str:
        return f"{self.quantity.upper()} p{self.percentile:g}"

    def measure(self, result: ServedLatencies) -> float:
        """Return the percentile of a simulated run."""
        values_s = getattr(result, f"{self.quantity}_s")
        finite_s = values_s[np.isfinite(values_s)]
        if not finite_s.size:
            return 0.0
        return float(np.percentile(finite_s, self.percentile or 50.0))


def parse_latency_bounds(
    quantity: str,
    text: str | float | None,
    percentile: float | None = None,
) -> tuple[LatencyBound, ...]:
    """Read ``p99:500ms`` or ``500ms``, which is of ``percentile``; several with commas.

    >>> parse_latency_bounds("ttft", "p99:500ms,p50:100ms")[0].percentile
    99.0
    """
    if text is None:
        return ()
    if not isinstance(text, str):
        return (LatencyBound(quantity, percentile, _parse_bound_s(quantity, text)),)
    bounds = []
    for part in text.split(","):
        rank, colon, amount = part.strip().partition(":")
        if colon:
            named = _parse_percentile(quantity, rank, part)
            bounds.append(LatencyBound(quantity, named, _parse_bound_s(quantity, amount.strip())))
        else:
            bounds.append(LatencyBound(quantity, percentile, _parse_bound_s(quantity, part)))
    return tuple(bounds)


def _parse_percentile(
    quantity: str,
    rank: str,
    part: str,
) -> float:
    number = rank.strip().removeprefix("p")
    percentile = float(number) if number.replace(".", "", 1).isdigit() else 0.0
    if not 0 < percentile < 100:
        raise bad_value(quantity, "a percentile and a time, such as p99:500ms", part)
    return percentile


def _parse_bound_s(quantity: str, amount: str | float) -> float:
    return units.parse_amount(amount, "s", quantity, inclusive=False)


def parse_both_bounds(
    ttft: str | float | None,
    tpot: str | float | None,
    percentile: float | None = None,
) -> tuple[LatencyBound, ...]:
    """Read the bounds of the time to the first token and of the time per output token."""
    return (
        *parse_latency_bounds("ttft", ttft, percentile),
        *parse_latency_bounds("tpot", tpot, percentile),
    )
