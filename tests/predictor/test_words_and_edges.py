"""Where a prediction changes its word: measured, near, far, good, fair, rough, digits, notes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import wattcast
from wattcast.core.strict_files import FitStatus
from wattcast.hardware import OperatingPoint
from wattcast.predictor.answer_lines import count_digits, judge_confidence
from wattcast.predictor.bundle.support_widening import OutsideReason
from wattcast.predictor.pipeline import total_at_clock
from wattcast.predictor.prediction import Prediction, predict_timeline
from wattcast.predictor.support_distances import SupportDistance
from wattcast.predictor.timeline import compute_kernel_s, slow_memory_path
from wattcast.predictor.unmeasured_kernels import find_unmeasured


def _confidence(half_width: float, waiting: float = 0.0) -> str:
    ends = np.array([1.0 - half_width, 1.0 + half_width])
    made_up = SimpleNamespace(
        latency_s=1.0,
        power_w=1.0,
        busy_s=1.0 - waiting,
        gpu="h200",
        status=FitStatus.MEASURED,
        support=SimpleNamespace(inside=True),
        interval=SimpleNamespace(level=0.9, latency_s=ends, power_w=ends),
    )
    return judge_confidence(made_up).value  # type: ignore[arg-type]


def test_a_sixth_either_way_is_fair_and_more_than_a_third_is_rough() -> None:
    assert [_confidence(width) for width in (0.12, 0.18)] == ["good", "fair"]
    assert [_confidence(width) for width in (0.30, 0.40)] == ["fair", "rough"]


def test_an_eighth_of_the_time_waiting_for_the_host_is_rough() -> None:
    assert [_confidence(0.05, waiting) for waiting in (0.08, 0.12)] == ["good", "rough"]


def test_digits_are_as_many_as_the_interval_deserves() -> None:
    widths = (0.06, 0.04, 0.006, 0.004)
    assert [count_digits(1.0, 1.0 - width, 1.0 + width) for width in widths] == [2, 3, 3, 4]


def _word(beyond: float, far: float) -> str:
    distance = SupportDistance("clock", np.array(beyond), np.array(far), "", np.zeros(4))
    return str(distance.word)


def test_a_twentieth_beyond_is_near_and_a_tenth_far_beyond_is_far() -> None:
    assert [_word(beyond, 0.0) for beyond in (0.04, 0.06)] == ["measured", "near"]
    assert [_word(0.2, far) for far in (0.08, 0.12)] == ["near", "far"]


@pytest.fixture(scope="module")
def product() -> Prediction:
    """A product of 1,024 rows, which database/h200 has rows all around of."""
    ops = {"name": "product", "ops": [{"op": "linear", "m": 1024, "n": 4096, "k": 4096}]}
    return wattcast.predict(ops, "h200")


def _predict_elsewhere(p: Prediction, octaves: float) -> Prediction:
    """Predict at a clock so many octaves below the lowest that was measured."""
    bundle = p.basis.bundle
    seen = {name: replace(row, clock_hz=(1.5e9, 1.98e9)) for name, row in bundle.seen.items()}
    at = OperatingPoint(clock_hz=1.5e9 * 2.0**-octaves)
    basis = p.basis
    return predict_timeline(basis.timeline, basis.graph, basis.gpu, at, replace(bundle, seen=seen))


def test_a_clock_a_third_of_an_octave_below_is_not_measured(product: Prediction) -> None:
    differs = []
    for octaves in (0.25, 0.35):
        distances = _predict_elsewhere(product, octaves).support.distances
        differs.append("clock" in [distance.dimension for distance in distances])
    assert differs == [False, True]


def test_a_size_half_an_octave_beyond_is_not_measured(product: Prediction) -> None:
    timeline = product.basis.timeline
    bundle = product.basis.bundle
    size = float(timeline.kernels.work.features["log_m"][0])
    reasons = []
    for octaves in (0.4, 0.6):
        sizes = {"log_m": (size + octaves, size + 4.0)}
        seen = {**bundle.seen, "gemm": replace(bundle.seen["gemm"], sizes=sizes)}
        outside = find_unmeasured(timeline, replace(bundle, seen=seen))
        reasons.append([kernel.reason for kernel in outside.values()])
    assert reasons == [[], [OutsideReason.SIZE]]


def test_eight_functions_of_a_kernel_speak_for_a_ninth() -> None:
    """Where many functions ran as one kernel, as plain functions of an element do, another is much
    like them.
    """
    p = wattcast.predict({"name": "relu", "ops": [{"op": "relu", "n": 1 << 22}]}, "h200")
    timeline = p.basis.timeline
    bundle = p.basis.bundle
    group = timeline.kernels.work.kernel_family[0]
    reasons = []
    for count in (6, 9):
        forms = {group: tuple(f"function {number}" for number in range(count))}
        seen = {**bundle.seen, "elementwise": replace(bundle.seen["elementwise"], forms=forms)}
        outside = find_unmeasured(timeline, replace(bundle, seen=seen))
        reasons.append(outside[0].reason)
    assert reasons == [OutsideReason.KIND, OutsideReason.FORM]


def test_a_limit_holds_power_within_two_percent() -> None:
    """Boards of H200s that their limit holds back average 0.98 to 1.02 of it over a second."""
    p = wattcast.predict("llama3-8b", "h200", phase="prefill", batch=8, seq=4096, card="this")
    assert p.capped
    low_w, high_w = p.interval.power_w
    assert 0.97 * 700.0 < low_w < 0.99 * 700.0
    assert 1.01 * 700.0 < high_w < 1.03 * 700.0


def test_a_limit_binds_where_it_holds_the_power() -> None:
    """A limit of 600 W binds a run of 600 W and none of 550 W, and no row ran under such a limit."""
    p = wattcast.predict("llama3-8b", "h200", phase="prefill", batch=8, seq=4096)
    basis = p.basis
    bundle = replace(basis.bundle, power_limit_w=(900.0, 900.0))
    words = []
    for clock_hz in (None, 1.0e9):
        at = OperatingPoint(clock_hz=clock_hz, power_limit_w=600.0)
        held = predict_timeline(basis.timeline, basis.graph, basis.gpu, at, bundle)
        words.append("power limit" in [d.dimension for d in held.support.distances])
    assert words == [True, False]


def test_a_note_says_what_a_slow_path_to_memory_would_cost() -> None:
    """Where it would be more than a twentieth of the time."""
    noted = []
    expected = []
    for clock_hz in np.linspace(0.9e9, 1.9e9, 21):
        p = wattcast.predict("llama3-8b", "h200", phase="decode", batch=8, seq=512, clock=clock_hz)
        basis = p.basis
        slow = slow_memory_path(basis.timeline, basis.gpu.clocks.max_hz)
        slow_s = total_at_clock(slow, basis.at, basis.bundle).latency_s
        slowdown = float(slow_s) / p.latency_s - 1.0
        expected.append(slowdown > 0.05)
        noted.append(any("keeps up until L2" in note for note in p.assumptions))
    assert noted == expected
    assert {True, False} == set(noted)


@pytest.mark.parametrize(("share", "slower"), [(0.90, 1.0), (0.80, 1.075), (0.60, 1.433)])
def test_memory_of_a_titan_x_follows_its_clock_below_a_seventh_under_the_top(
    share: float, slower: float
) -> None:
    """16 microbenchmarks bound by the device memory of a GTX Titan X took as long at 0.86 of its top
    clock as at the top, and longer in proportion below [Guerreiro2018].
    """
    copy = {"name": "copy", "ops": [{"op": "copy", "n": 1 << 30}]}
    p = wattcast.predict(copy, "h200")
    top_hz = float(p.basis.gpu.clocks.max_hz)
    slow = slow_memory_path(p.basis.timeline, top_hz)
    at_top_s = compute_kernel_s(slow.phases, np.array(top_hz))
    below_s = compute_kernel_s(slow.phases, np.array(share * top_hz))
    assert float(below_s[0] / at_top_s[0]) == pytest.approx(slower, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "dtype", "measured_s"),
    [
        ({"c": 2560, "k": 1280, "h": 8, "w": 8, "n": 1}, "bf16", 181.6e-6),
        ({"c": 1280, "k": 1280, "h": 8, "w": 8, "n": 1}, "bf16", 98.9e-6),
    ],
)
def test_convolutions_take_as_long_as_turning_their_layouts(
    shape: dict[str, int], dtype: str, measured_s: float
) -> None:
    """Turning the weights of these convolutions takes four fifths of their time on an H200
    (database/h200, bursts at the top clock).
    """
    op = {"op": "conv2d", **shape, "r": 3, "s": 3, "stride": 1, "padding": 1, "dtype": dtype}
    p = wattcast.predict({"name": "convolution", "ops": [op]}, "h200", host_launch=0.0)
    assert p.latency_s == pytest.approx(measured_s, rel=0.12)
