"""The shipped bundle and its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast.dtypes import Dtype
from wattcast.errors import WattcastError
from wattcast.fitted import bundle as bundles
from wattcast.fitted import fitted, provisional
from wattcast.hardware import OperatingPoint, load
from wattcast.prediction import predict
from wattcast.workload.graph import Attention, Elementwise, Graph, LayerNorm, Linear

WORK = Graph.of("mix", [Linear(4096, 4096, 4096), LayerNorm(4096, 4096), Attention(4, 32, 8, 1024, 1024, 128)])


def test_the_h200_is_fitted_and_inside_what_was_measured() -> None:
    gpu = load("h200")
    bundle = fitted("h200")
    assert bundle is not None
    assert bundle.status == "fitted"
    p = predict(WORK, gpu, OperatingPoint(), bundle)
    assert p.support.inside, p.support.reason
    assert all(bundle.residuals[family].rows > 100 for family in ("gemm", "attention", "softmax", "elementwise"))


def test_a_bundle_survives_being_written_and_read(tmp_path: Path) -> None:
    gpu, bundle = load("h200"), fitted("h200")
    bundles.write(bundle, tmp_path / "bundle.yaml")
    back = bundles.read(tmp_path / "bundle.yaml")
    one, two = (predict(WORK, gpu, OperatingPoint(), b) for b in (bundle, back))
    assert_allclose(two.latency_s, one.latency_s, rtol=1e-5)
    assert_allclose(two.power_w, one.power_w, rtol=1e-5)


def test_a_bundle_without_its_arrays_says_so(tmp_path: Path) -> None:
    bundles.write(fitted("h200"), tmp_path / "bundle.yaml")
    (tmp_path / bundles.ARRAYS_FILE).unlink()
    with pytest.raises(WattcastError, match=r"arrays\.npz"):
        bundles.read(tmp_path / "bundle.yaml")


def test_damaged_arrays_are_refused_without_a_traceback(tmp_path: Path) -> None:
    bundles.write(fitted("h200"), tmp_path / "bundle.yaml")
    (tmp_path / bundles.ARRAYS_FILE).write_bytes(b"not a zip file")
    with pytest.raises(WattcastError, match=r"arrays\.npz"):
        bundles.read(tmp_path / "bundle.yaml")


@pytest.mark.parametrize(
    ("op", "word"),
    [
        (Linear(1 << 20, 64, 1 << 17), "measured from"),
        (Elementwise("fill", 1024, dtype=Dtype.INT64), "int64"),
    ],
)
def test_what_was_not_measured_is_outside_and_wider(op, word: str) -> None:
    gpu, bundle = load("h200"), fitted("h200")
    p = predict(Graph.of("odd", [op]), gpu, OperatingPoint(), bundle)
    assert not p.support.inside
    assert word in p.support.reason
    family = {"linear": "gemm"}.get(op.kind, op.kind)
    low, high = bundle.residuals[family].latency
    got_low, got_high = p.interval.latency_s / p.latency_s
    assert got_low <= low
    assert got_high >= high


def test_a_kind_of_kernel_that_was_not_measured_is_outside() -> None:
    gpu, bundle = load("h200"), fitted("h200")
    graph = Graph.of("odd", [Attention(1, 8, 8, 64, 64, 64, backward=True)])
    seen = bundle.seen["attention"]
    fewer = replace(seen, groups=tuple(group for group in seen.groups if "backward" not in group))
    unaware = replace(bundle, seen={**bundle.seen, "attention": fewer})
    known, unknown = (predict(graph, gpu, OperatingPoint(), one) for one in (bundle, unaware))
    assert known.support.inside
    assert not unknown.support.inside
    assert "kind" in unknown.support.reason
    assert (unknown.interval.latency_s[1] > known.interval.latency_s[1]).all()


def test_zeros_draw_less_and_run_no_slower() -> None:
    gpu, bundle = load("h200"), fitted("h200")
    heavy = Graph.of("heavy", [Linear(8192, 8192, 8192, count=10)])
    on_random, on_zeros = (predict(heavy, gpu, OperatingPoint(), bundle.for_data(d)) for d in ("random", "zeros"))
    assert on_zeros.energy_j < 0.8 * on_random.energy_j
    assert on_zeros.latency_s <= on_random.latency_s
    assert on_random.capped
    assert not on_zeros.capped


def test_the_effective_clock_follows_the_load() -> None:
    """Measured: about 1600 MHz under full tensor load within a reported 1980, near 1980 without tensor work."""
    gpu, bundle = load("h200"), fitted("h200")
    at = OperatingPoint(clock_hz=1.98e9, power_limit_w=1e6)
    dense = predict(Graph.of("dense", [Linear(8192, 8192, 8192)]), gpu, at, bundle)
    plain = predict(Graph.of("plain", [Elementwise("add", 1 << 26)]), gpu, at, bundle)
    assert 1.45e9 < dense.effective_clock_hz < 1.75e9
    assert plain.effective_clock_hz > 1.93e9


def test_what_a_fit_starts_from_needs_no_bundle() -> None:
    """Where rows are silent a fit takes the provisional rule, which must not lean on what is being fitted."""
    gpu = load("a100-sxm-80gb")
    assert provisional(gpu).learned is None
    assert replace(provisional(gpu), seen={}).seen == {}
    assert np.isfinite(predict(WORK, gpu, OperatingPoint(), provisional(gpu)).latency_s)
