"""How far a prediction is from what was measured, in words and in the width of its interval."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

import wattcast
from wattcast.predictor.bundle.support_widening import learned_distances
from wattcast.predictor.prediction import Prediction
from wattcast.predictor.uncertainty import kernel_log_ends


def predicted(**more: object) -> Prediction:
    given: dict[str, object] = {"batch": 4, "seq": 512, "phase": "prefill"} | more
    return wattcast.predict("llama3-8b", "h200", **given)  # type: ignore[arg-type]


def width(p: Prediction) -> float:
    low, high = np.log(p.interval.latency_s)
    return float(high - low)


def words(p: Prediction) -> dict[str, str]:
    return {d.dimension: str(d.word) for d in p.support.distances}


def test_a_usual_prediction_is_measured() -> None:
    p = predicted()
    assert (p.support.word, p.support.inside) == ("measured", True)
    assert "kernels like those measured" in p.support.reason


@pytest.mark.parametrize(
    ("given", "dimension", "said"),
    [
        ({"clock": "345 MHz"}, "clock", "gemm was measured from 1.14 GHz to 1.98 GHz"),
        ({"power_limit": "200 W"}, "power limit", "all was measured under 700 W"),
        ({"temperature": 95.0}, "temperature", "measured from 33 to 69 C"),
        ({"quantization": "w8a8"}, "number format", "not in int8"),
    ],
)
def test_what_is_far_says_so_and_is_wider(given: dict[str, object], dimension: str, said: str) -> None:
    """Clocks and limits that nobody measured used to say "inside what was measured", with the same interval."""
    p, usual = predicted(**given), predicted()
    assert words(p)[dimension] == "far"
    assert (p.support.word, p.support.inside) == ("far", False)
    assert said in p.support.reason
    if dimension != "temperature":
        assert width(p) > 1.3 * width(usual)
    assert p.to_dict()["support"]["word"] == "far"


def test_a_limit_that_does_not_bind_changes_nothing() -> None:
    """Decoding draws less than 600 W, so a limit of 600 W is not felt."""
    free, limited = (predicted(phase="decode", power_limit=limit) for limit in ("700 W", "690 W"))
    assert limited.support.word == free.support.word
    assert_allclose(limited.interval.latency_s, free.interval.latency_s)


def test_distance_counts_where_it_begins() -> None:
    """A little below the measured clocks is near, far below is far, and the interval widens all the way."""
    clocks = np.array([1.6e9, 1.0e9, 0.7e9, 0.345e9])
    p = predicted(clock=clocks)
    assert list(p.support.words[[0, -1]]) == ["measured", "far"]
    low, high = np.log(p.interval.latency_s).T
    assert (np.diff(high - low)[1:] > 0.0).all()
    assert p.to_dict()["support"] == list(p.support.words)


def test_small_shares_do_not_make_a_prediction_far() -> None:
    """An engine's ``rotary`` and ``silu_mul`` of 1 % of the time used to say "outside"."""
    for model in ("llama3-8b", "qwen2.5-7b", "mistral-7b"):
        for phase in ("prefill", "decode"):
            p = wattcast.predict(model, "h200", batch=8, seq=1024, phase=phase, stack="engine")
            assert p.support.inside, p.support.reason


def test_several_gpus_are_near() -> None:
    p = predicted(tp=2)
    assert words(p)["parallelism"] == "near"
    assert p.support.inside


def test_the_host_is_uncertain_unless_it_was_measured() -> None:
    """An eager run that waits for the host may take as much longer as hosts differ, and draws less then."""
    default = predicted(batch=1, seq=16, stack="eager")
    own = predicted(batch=1, seq=16, stack="eager", host_launch=default.basis.bundle.launch.host_s_per_operator)
    assert words(default)["host"] == "near"
    assert "host" not in words(own)
    assert_allclose(default.latency_s, own.latency_s)
    spread = learned_distances().host
    assert default.interval.latency_s[1] / default.latency_s >= 0.9 * spread.high
    assert width(own) < width(default)


def test_learned_distances_name_their_source() -> None:
    known = learned_distances()
    assert {"clock", "power limit", "temperature", "size", "stack"} == set(known.conditions)
    assert all(c.source for c in known.conditions.values())
    assert 0.0 <= known.together.latency <= 1.0
    assert all(ends.latency[0] <= 1.0 <= ends.latency[1] for ends in known.forecast.values())


def test_steps_of_the_measured_engine_are_known_better_than_its_kernels() -> None:
    """A decode step took the ends of its kernels, -11 to +58 %, where measured steps lie within -7 to +8 %."""
    step = wattcast.predict("llama3-8b", gpu="h200", stack="engine", phase="decode", batch=32, seq=1024)
    scale = learned_distances().steps
    own = kernel_log_ends(step.basis.timeline, step.basis.bundle, step.basis.reasons, engines={})
    scaled = kernel_log_ends(step.basis.timeline, step.basis.bundle, step.basis.reasons, steps=scale)
    assert_allclose(scaled[:, 2:], scale.power * own[:, 2:])
    low, high = step.interval.latency_s / step.latency_s
    assert 0.8 < low < 0.95
    assert 1.05 < high < 1.25
