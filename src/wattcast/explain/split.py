"""Splitting a difference of products exactly: the logarithmic mean.

A quantity x = Π x_i that goes from a to b changes by

    b - a = L(a, b)·Σ ln(b_i / a_i),   L(a, b) = (b - a) / ln(b / a),   L(a, a) = a

so each factor gets L·ln(b_i/a_i), and nothing is left over (the additive logarithmic-mean Divisia index
[Ang2005]). It is symmetric: swapping the sides turns every sign. Sums split term by term. What exists on
one side only has no ratio and is a term of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def log_mean(a: float, b: float) -> float:
    """L(a, b) of two positive numbers.

    >>> round(log_mean(1.0, math.e), 6), log_mean(2.0, 2.0)
    (1.718282, 2.0)
    """
    ratio = math.log(b / a)
    # near one the quotient loses digits; the series does not
    return a * (1.0 + ratio / 2.0 + ratio * ratio / 6.0) if abs(ratio) < 1e-5 else (b - a) / ratio


def split(a: float, b: float, ratios: Mapping[str, float]) -> dict[str, float]:
    """Contribution of each factor to ``b - a``; ``ratios`` are b_i/a_i and multiply to b/a.

    The product is taken to be exact: what rounding leaves over goes to the largest contribution.
    """
    weight = log_mean(a, b)
    found = {name: weight * math.log(ratio) for name, ratio in ratios.items()}
    largest = max(found, key=lambda name: abs(found[name]))
    found[largest] += (b - a) - sum(found.values())
    return found
