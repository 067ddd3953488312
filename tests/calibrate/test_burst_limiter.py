"""Bursts whose clocks a card's own limiter skips."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wattcast.calibrate.burst_limiter import added_by_limiter_s, time_burst_s
from wattcast.core import Dtype
from wattcast.hardware import load_gpu
from wattcast.kernels import RunCondition, build_kernels
from wattcast.predictor.bundle import forecast_bundle
from wattcast.predictor.pipeline import analyse_kernels
from wattcast.workload.operator_types import Linear

DENSE = Linear(4096, 8192, 8192, dtype=Dtype.BF16)
NARROW = Linear(1, 8192, 8192, dtype=Dtype.BF16)


def share_of_clocks(name: str, op: Linear = DENSE, limit: float = 1.0) -> float:
    """Return the share of clocks left, with a power limit so many times the card's own."""
    gpu = load_gpu(name)
    gpu = replace(gpu, power=replace(gpu.power, limit_w=limit * gpu.power.limit_w))
    bundle = forecast_bundle(gpu)
    kernels = build_kernels((op,), (RunCondition(),), gpu, bundle.reference, ())
    timeline = analyse_kernels(kernels, gpu, bundle)
    top_s = float(time_burst_s(timeline, float(gpu.clocks.max_hz), bundle)[0])
    return top_s / (top_s + float(added_by_limiter_s(timeline, gpu, bundle)[0]))


def test_a_dense_burst_of_an_l40s_skips_a_fifth_of_its_clocks() -> None:
    assert 0.7 < share_of_clocks("l40s") < 0.9


def test_no_clock_is_skipped_where_the_limit_is_far() -> None:
    assert share_of_clocks("l40s", limit=2.0) == pytest.approx(1.0)
    assert share_of_clocks("l40s", limit=0.8) < share_of_clocks("l40s")


def test_memory_holds_up_a_narrow_product_and_not_skipped_clocks() -> None:
    assert share_of_clocks("l40s", NARROW) == pytest.approx(1.0)


def test_modules_skip_no_clocks() -> None:
    assert share_of_clocks("b200") == 1.0
