"""How far a prediction is from what was measured, in words and in the width of its interval."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

import wattcast
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.predictor.bundle import forecast_bundle
from wattcast.predictor.bundle.support_widening import NORMAL_P90, OutsideReason, learned_distances
from wattcast.predictor.prediction import Prediction, predict_graph
from wattcast.predictor.prediction_interval import (
    combine_log_ends,
    compute_interval,
    find_wide_share,
    kernel_log_ends,
)
from wattcast.predictor.unmeasured_kernels import UnmeasuredKernel
from wattcast.workload.engine_operators import FusedExperts
from wattcast.workload.graph import Graph
from wattcast.workload.operator_types import Linear


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
def test_what_is_far_says_so_and_is_wider(
    given: dict[str, object], dimension: str, said: str
) -> None:
    """Clocks and limits that nobody measured used to say "inside what was measured", with the same
    interval.
    """
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
    """A little below the measured clocks is near, far below is far, and the interval widens all the
    way.
    """
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
    """An eager run that waits for the host may take as much longer as hosts differ, and draws less
    then. One's own host still differs from model to model: runs lay outside when it did not.
    """
    default = predicted(batch=1, seq=16, stack="eager")
    own = predicted(
        batch=1, seq=16, stack="eager", host_launch=default.basis.bundle.launch.host_s_per_operator
    )
    assert words(default)["host"] == "near"
    assert_allclose(default.latency_s, own.latency_s)
    spread = learned_distances().host
    assert default.interval.latency_s[1] / default.latency_s >= 0.9 * spread.high
    assert width(own) < width(default)


def test_errors_of_kernels_hide_behind_the_host() -> None:
    """Where the host takes twice as long as the kernels, these may take a fifth longer and nobody
    sees it.
    """
    kernels = predicted(batch=1, seq=16, stack="eager", host_launch=0.0)
    held_up = predicted(batch=1, seq=16, stack="eager", host_launch=30e-6)
    assert held_up.latency_s > 2.0 * kernels.latency_s
    own_host = learned_distances().own_host
    assert width(held_up) <= 1.05 * (own_host.high - own_host.low)  # of which kernels have no part
    both = predicted(batch=1, seq=16, stack="eager", host_launch=np.array([0.0, 30e-6]))
    assert_allclose(
        both.interval.latency_s, [kernels.interval.latency_s, held_up.interval.latency_s], rtol=1e-9
    )
    clocks = np.array([1.5e9, 1.98e9])
    at_once, each = (
        predicted(batch=1, seq=256, stack="eager", clock=clocks),
        [predicted(batch=1, seq=256, stack="eager", clock=clock) for clock in clocks],
    )
    assert_allclose(at_once.interval.latency_s, [p.interval.latency_s for p in each], rtol=1e-9)


def test_a_kind_with_ends_of_its_own_is_not_widened_for_being_unmeasured() -> None:
    """No H200 ran experts with int4 weights. How far forecasts of them are off, tables of other
    chips tell.
    """
    gpu = load_gpu("l40s")
    op = FusedExperts(64, 128, 8, 2048, 768, weights="int4", scales="group")
    p = predict_graph(Graph.from_operators("x", [op]), gpu, OperatingPoint(), forecast_bundle(gpu))
    assert [outside.reason for outside in p.basis.reasons.values()] == [OutsideReason.KIND]
    ends = kernel_log_ends(p.basis.timeline, p.basis.bundle, p.basis.reasons)
    assert_allclose(
        ends[0, :2], np.log(p.basis.bundle.residuals["gemm.engine.experts.narrow"].latency)
    )


def test_learned_distances_name_their_source() -> None:
    known = learned_distances()
    assert {"clock", "power limit", "temperature", "size", "stack"} == set(known.conditions)
    assert all(c.source for c in known.conditions.values())
    assert 0.0 <= known.together.latency <= 1.0
    assert all(ends.latency[0] <= 1.0 <= ends.latency[1] for ends in known.forecast.values())


def test_steps_of_the_measured_engine_are_known_better_than_its_kernels() -> None:
    """A decode step took the ends of its kernels, -11 to +58 %, where measured steps lie within -7
    to +8 %.

    Scaled ends of kernels were still -11 to +30 %, for the sake of steps that the host held up.
    """
    step = wattcast.predict(
        "llama3-8b", gpu="h200", stack="engine", phase="decode", batch=32, seq=1024
    )
    basis, steps = step.basis, learned_distances().steps["dense"]
    assert not kernel_log_ends(basis.timeline, basis.bundle, basis.reasons, is_step=True).any()
    half = np.hypot(steps.latency, NORMAL_P90 * basis.bundle.cards.latency)
    assert_allclose(step.interval.latency_s / step.latency_s, np.exp([-half, half]))
    assert half < 0.1
    unseen = dict.fromkeys(
        range(len(basis.timeline.calls)), UnmeasuredKernel(OutsideReason.KIND, "")
    )
    assert (kernel_log_ends(basis.timeline, basis.bundle, unseen, is_step=True)[:, 1] > 0.2).all()


def test_models_in_fp32_on_a_forecast_are_as_sure_as_networks_were() -> None:
    """Products on fp32 lanes took the ends of products on tensor cores, of which there are tables:
    98.8 % of an A100's models lay inside, 67 % of an A10's.
    """
    options = {"seq": 512, "batch": 8, "stack": "eager"}
    spreads = learned_distances().wide
    for gpu, name in (("a10", "a10"), ("a100-pcie-40gb", "a100-pcie-40gb"), ("v100-sxm", "other")):
        p = wattcast.predict("bert-large", gpu=gpu, dtype="fp32", **options)
        half = np.hypot(spreads[name].latency, NORMAL_P90 * p.basis.bundle.cards.latency)
        assert find_wide_share(p.basis) == pytest.approx(1.0)
        assert_allclose(p.interval.latency_s / p.latency_s, np.exp([-half, half]), rtol=0.01)
    half_precision = wattcast.predict("bert-large", gpu="a10", dtype="fp16", **options)
    assert find_wide_share(half_precision.basis) == 0.0


def test_a_step_with_experts_is_less_sure_than_a_dense_one() -> None:
    asked = {"gpu": "h200", "stack": "engine", "phase": "decode", "batch": 32, "seq": 1024}
    dense, experts = (wattcast.predict(name, **asked) for name in ("llama3-8b", "mixtral-8x7b"))
    widths = [float(p.interval.latency_s[1] / p.latency_s) for p in (dense, experts)]
    assert widths[0] < widths[1]


def test_power_of_a_step_is_surer_where_the_board_is_told() -> None:
    asked = {"stack": "engine", "phase": "decode", "batch": 8, "seq": 1024}
    mean, told = (wattcast.predict("llama3-8b", gpu, **asked) for gpu in ("h200", "h200-000"))
    widths = [np.log(p.interval.power_w[1] / p.interval.power_w[0]) for p in (mean, told)]
    assert widths[1] < 0.7 * widths[0]
    assert_allclose(told.interval.latency_s, mean.interval.latency_s)


def test_kernels_under_the_limit_have_narrower_ends_of_latency() -> None:
    """By ``LearnedDistances.capped``, on a GPU that was measured; the spread of cards beside them
    stays as it is.
    """
    workload = Graph.from_operators("product", [Linear(8192, 8192, 8192)])
    for gpu, factor in (("h200", learned_distances().capped.latency), ("h100-sxm", 1.0)):
        held, burst = (
            wattcast.predict(workload, gpu, duration=d, host_launch=0.0) for d in (None, "5ms")
        )
        assert held.capped
        cards = NORMAL_P90 * held.basis.bundle.cards.latency
        ends = [np.log(p.interval.latency_s / p.latency_s) for p in (held, burst)]
        kernel = [np.sqrt(np.square(e) - cards**2) for e in ends]
        assert_allclose(kernel[0], factor * kernel[1], rtol=1e-3)


def test_power_held_at_the_limit_errs_only_below_the_power_asked_for() -> None:
    """A prompt that would draw 900 W was given 630 to 714 W under a limit of 700 W, where boards
    draw 686 to 703.
    """
    prompt = wattcast.predict("llama3-8b", gpu="h200", phase="prefill", seq=4096)
    asked_w = float(prompt.basis.asked_w)
    assert asked_w > 1.15 * prompt.power_w
    assert_allclose(prompt.interval.power_w, [0.98 * 700.0, 1.02 * 700.0])
    slow = wattcast.predict("llama3-8b", gpu="h200", phase="prefill", seq=4096, clock="1.3GHz")
    assert float(slow.basis.asked_w) == slow.power_w
    assert slow.interval.power_w[0] < 0.97 * slow.power_w


def test_energy_adds_latency_and_power_in_quadrature() -> None:
    p = wattcast.predict("llama3-8b", gpu="h200", phase="decode")
    latency, power, energy = (
        np.abs(np.log(ends / middle))
        for ends, middle in (
            (p.interval.latency_s, p.latency_s),
            (p.interval.power_w, p.power_w),
            (p.interval.energy_j, p.energy_j),
        )
    )
    assert_allclose(energy, np.hypot(latency, power))


def test_kernels_do_not_err_in_the_energy_of_an_idle_gpu() -> None:
    """Power of a run that its host holds up was as uncertain as that of its kernels alone."""
    p = wattcast.predict("gpt2", "a100-pcie-40gb", stack="eager", batch=1, seq=128)
    ends = kernel_log_ends(p.basis.timeline, p.basis.bundle, p.basis.reasons)[:, 2:]
    idle_share = 1.0 - float(p.basis.working_share)
    assert 0.2 < idle_share < 0.9
    alone = combine_log_ends(p.basis.energy_shares, ends, learned_distances().together.power)
    quiet = compute_interval(p.basis, ())
    shown = np.log(quiet.power_w / p.power_w)
    assert np.all(np.abs(shown) < np.abs(alone))
    busy = wattcast.predict("llama3-8b", "h200", stack="eager", batch=8, seq=2048)
    assert float(busy.basis.working_share) > 0.999


def test_a_step_that_the_host_may_hold_up_reaches_to_the_hosts_time() -> None:
    """A decode step of qwen2.5-1.5b takes 2.33 ms, its kernels 1.88: the host needs 2.38 for one
    sequence.
    """
    short, long = (
        wattcast.predict(model, gpu="h200", stack="engine", phase="decode", batch=1, seq=1361)
        for model in ("qwen2-1.5b", "llama3-8b")
    )
    assert "GPU waits for the host" in short.support.reason
    assert short.interval.latency_s[1] > 2.38e-3 > short.latency_s
    assert short.interval.power_w[0] < 0.85 * short.power_w
    assert "host" not in words(long)
    given = wattcast.predict(
        "qwen2-1.5b", gpu="h200", stack="engine", phase="decode", batch=1, seq=1361, host_launch=0.0
    )
    assert given.interval.latency_s[1] < 2.38e-3
