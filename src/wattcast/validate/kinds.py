"""What kind of work time goes into: products, reductions, elementwise work (paper 003, figure 1).

A kernel is told by its name (``kernel_families.csv``, the first pattern found in it), an operator by what it is.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from wattcast.prediction import Prediction
from wattcast.workload.graph import Elementwise, Operator

KINDS = ("GEMM-like", "reduction", "elementwise")
_PRODUCTS, _ROWS = ("linear", "bmm", "conv2d", "attention"), ("softmax", "layernorm", "rmsnorm")
_REDUCING = ("sum", "mean", "max", "topk", "pool", "cumsum", "batch_norm", "norm")


@dataclass(frozen=True)
class Shares:
    """Shares of the time in kernels by kind, of one workload."""

    name: str
    measured: bool
    share: Mapping[str, float]


def family_of(kernel: str) -> str:
    """The family of a kernel by its name."""
    return _row_of(kernel)["family"]


def kind_of(kernel: str) -> str:
    """GEMM-like, reduction or elementwise."""
    return _row_of(kernel)["kind"]


@cache
def _row_of(kernel: str) -> dict[str, str]:
    return next(row for pattern, row in _patterns() if pattern.search(kernel))


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], dict[str, str]], ...]:
    text = files("wattcast.validate").joinpath("kernel_families.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return tuple((re.compile(row["pattern"], re.IGNORECASE), row) for row in rows)


def of_operator(op: Operator) -> str:
    """The kind of an operator."""
    if op.kind in _PRODUCTS:
        return "GEMM-like"
    reducing = op.kind in _ROWS or (isinstance(op, Elementwise) and op.function in _REDUCING)
    return "reduction" if reducing else "elementwise"


def of_prediction(p: Prediction) -> Shares:
    """Shares of the predicted time in kernels."""
    return Shares(p.name, False, _shared((of_operator(o.op), float(o.latency_s)) for o in p.ops))


def of_profile(name: str, profile: Mapping[str, Any]) -> Shares:
    """Shares of the time in kernels that the profiler saw."""
    pairs = zip(profile["order"], profile["kernel_s"], strict=True)
    return Shares(name, True, _shared((kind_of(profile["names"][i]), s) for i, s in pairs))


def _shared(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    found = dict.fromkeys(KINDS, 0.0)
    for kind, seconds in times:
        found[kind] += seconds
    total = sum(found.values()) or 1.0
    return {kind: seconds / total for kind, seconds in found.items()}
