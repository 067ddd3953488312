"""The shipped bundle and its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from numpy.testing import assert_allclose

from wattcast.core.errors import WattcastError
from wattcast.core.units import Dtype
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.predictor.bundle import bundle_file as bundles
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.predictor.prediction import predict_graph
from wattcast.workload.graph import Graph
from wattcast.workload.operator_types import Attention, Elementwise, LayerNorm, Linear

WORK = Graph.from_operators(
    "mix", [Linear(4096, 4096, 4096), LayerNorm(4096, 4096), Attention(4, 32, 8, 1024, 1024, 128)]
)


def test_the_h200_is_fitted_and_inside_what_was_measured() -> None:
    gpu = load_gpu("h200")
    bundle = shipped_bundle("h200")
    assert bundle is not None
    assert bundle.status == "measured"
    p = predict_graph(WORK, gpu, OperatingPoint(), bundle)
    assert p.support.inside, p.support.reason
    assert all(
        bundle.residuals[family].rows > 100
        for family in ("gemm", "attention", "softmax", "elementwise")
    )


def test_a_bundle_survives_being_written_and_read(tmp_path: Path) -> None:
    gpu, bundle = load_gpu("h200"), shipped_bundle("h200")
    bundles.write_bundle(bundle, tmp_path / "bundle.json")
    back = bundles.read_bundle(tmp_path / "bundle.json")
    one, two = (predict_graph(WORK, gpu, OperatingPoint(), b) for b in (bundle, back))
    assert_allclose(two.latency_s, one.latency_s, rtol=1e-5)
    assert_allclose(two.power_w, one.power_w, rtol=1e-5)


def test_a_bundle_without_its_arrays_says_so(tmp_path: Path) -> None:
    bundles.write_bundle(shipped_bundle("h200"), tmp_path / "bundle.json")
    (tmp_path / bundles.ARRAYS_FILE).unlink()
    with pytest.raises(WattcastError, match=r"arrays\.npz"):
        bundles.read_bundle(tmp_path / "bundle.json")


def test_damaged_arrays_are_refused_without_a_traceback(tmp_path: Path) -> None:
    bundles.write_bundle(shipped_bundle("h200"), tmp_path / "bundle.json")
    (tmp_path / bundles.ARRAYS_FILE).write_bytes(b"not a zip file")
    with pytest.raises(WattcastError, match=r"arrays\.npz"):
        bundles.read_bundle(tmp_path / "bundle.json")


@pytest.mark.parametrize(
    ("op", "word"),
    [
        (Linear(1 << 20, 64, 1 << 17), "measured from"),
        (Elementwise("fill", 1024, dtype=Dtype.INT64), "int64"),
    ],
)
def test_what_was_not_measured_is_outside_and_wider(op, word: str) -> None:
    gpu, bundle = load_gpu("h200"), shipped_bundle("h200")
    p = predict_graph(Graph.from_operators("odd", [op]), gpu, OperatingPoint(), bundle)
    assert p.support.word != "measured"
    assert word in p.support.reason
    family = {"linear": "gemm"}.get(op.kind, op.kind)
    low, high = bundle.residuals[family].latency
    got_low, got_high = p.interval.latency_s / p.latency_s
    assert got_low <= low
    assert got_high >= high


def test_a_kind_of_kernel_that_was_not_measured_is_outside() -> None:
    gpu, bundle = load_gpu("h200"), shipped_bundle("h200")
    graph = Graph.from_operators("odd", [Attention(1, 8, 8, 64, 64, 64, backward=True)])
    seen = bundle.seen["attention"]
    fewer = replace(seen, groups=tuple(group for group in seen.groups if "backward" not in group))
    unaware = replace(bundle, seen={**bundle.seen, "attention": fewer})
    known, unknown = (predict_graph(graph, gpu, OperatingPoint(), one) for one in (bundle, unaware))
    assert known.support.inside
    assert not unknown.support.inside
    assert "kind" in unknown.support.reason
    assert (unknown.interval.latency_s[1] > known.interval.latency_s[1]).all()


def test_zeros_draw_less_and_run_no_slower() -> None:
    gpu, bundle = load_gpu("h200"), shipped_bundle("h200")
    heavy = Graph.from_operators("heavy", [Linear(8192, 8192, 8192, count=10)])
    on_random, on_zeros = (
        predict_graph(heavy, gpu, OperatingPoint(), bundle.for_data(d)) for d in ("random", "zeros")
    )
    assert on_zeros.energy_j < 0.8 * on_random.energy_j
    assert on_zeros.latency_s <= on_random.latency_s
    assert on_random.capped
    assert not on_zeros.capped


def test_the_effective_clock_follows_the_load() -> None:
    """Measured: about 1600 MHz under full tensor load within a reported 1980, near 1980 without
    tensor work.
    """
    gpu, bundle = load_gpu("h200"), shipped_bundle("h200")
    at = OperatingPoint(clock_hz=1.98e9, power_limit_w=1e6)
    dense = predict_graph(
        Graph.from_operators("dense", [Linear(8192, 8192, 8192)]), gpu, at, bundle
    )
    plain = predict_graph(
        Graph.from_operators("plain", [Elementwise("add", 1 << 26)]), gpu, at, bundle
    )
    assert 1.45e9 < dense.effective_clock_hz < 1.75e9
    assert plain.effective_clock_hz > 1.93e9
