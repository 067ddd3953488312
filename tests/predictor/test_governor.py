"""The clock under a power limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

import wattcast
from wattcast.core.errors import BadInput, UnknownName
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.power.power_model import VoltageCurve
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.governor import run_governed
from wattcast.predictor.kernel_coefficients import MEMORY_KNEE
from wattcast.predictor.pipeline import (
    TimelineRunner,
    analyse_graph,
    detail_at_clock,
    total_at_clock,
)
from wattcast.predictor.timeline import compute_kernel_s, slow_memory_path
from wattcast.workload import ModelOptions, build_graph
from wattcast.workload.graph import Graph
from wattcast.workload.operator_types import Linear

HEAVY = Graph.from_operators("heavy", [Linear(8192, 8192, 8192, count=10)])


@pytest.fixture
def parts():
    gpu = load_gpu("h200")
    bundle = bundle_for(gpu)
    return analyse_graph(HEAVY, gpu, bundle), gpu, bundle


def test_a_capped_workload_draws_what_the_governor_makes_of_the_limit(parts) -> None:
    """An H200 at its cap settles at 99.3 % of the limit, not at the limit."""
    timeline, gpu, bundle = parts
    limits = np.array([300.0, 400.0, 500.0, 600.0])[:, None]
    settled = run_governed(timeline, gpu, OperatingPoint(power_limit_w=limits), bundle)[0]
    assert settled.capped.all()
    assert settled.met.all()
    assert_allclose(
        total_at_clock(timeline, settled.at, bundle).power_w,
        bundle.governor_share * limits[:, 0],
        rtol=1e-6,
    )


def test_an_uncapped_workload_runs_at_the_clock_asked_for(parts) -> None:
    timeline, gpu, bundle = parts
    settled = run_governed(
        timeline, gpu, OperatingPoint(clock_hz=1.2e9, power_limit_w=2000.0), bundle
    )[0]
    assert not settled.capped
    assert settled.clock_hz[..., 0] == 1.2e9


def test_a_locked_clock_is_lowered_too_when_the_limit_does_not_allow_it(parts) -> None:
    timeline, gpu, bundle = parts
    settled = run_governed(
        timeline, gpu, OperatingPoint(clock_hz=1.8e9, power_limit_w=400.0), bundle
    )[0]
    assert settled.capped
    assert settled.clock_hz[..., 0] < 1.8e9


def test_a_limit_nobody_can_meet_gives_the_lowest_clock_and_says_so(parts) -> None:
    timeline, gpu, bundle = parts
    settled = run_governed(timeline, gpu, OperatingPoint(power_limit_w=50.0), bundle)[0]
    assert not settled.met
    assert settled.clock_hz[..., 0] == gpu.clocks.min_hz


def test_the_limit_is_the_highest_clock_that_meets_it(parts) -> None:
    timeline, gpu, bundle = parts
    settled = run_governed(timeline, gpu, OperatingPoint(power_limit_w=500.0), bundle)[0]
    step_hz = 1e6
    above = OperatingPoint(clock_hz=settled.clock_hz + step_hz)
    assert total_at_clock(timeline, above, bundle).power_w > bundle.governor_share * 500.0


MODEL = build_graph("gpt2", ModelOptions(stack="eager", batch=8, seq=512))


@pytest.mark.parametrize("clock_hz", [1.2e9, np.array([[0.7e9], [1.2e9], [1.98e9]])])
def test_the_mean_power_is_that_of_the_parts_added_up(clock_hz) -> None:
    gpu = load_gpu("h200")
    bundle = bundle_for(gpu)
    timeline = analyse_graph(MODEL, gpu, bundle)
    at = OperatingPoint(clock_hz=clock_hz, temperature_c=60.0)
    totals, detail = total_at_clock(timeline, at, bundle), detail_at_clock(timeline, at, bundle)
    parts_j = (detail.kernel_j * timeline.calls).sum(axis=-1) + detail.gap_j
    assert_allclose(totals.energy_j, parts_j, rtol=1e-12)
    running = TimelineRunner(timeline, at, bundle)
    assert_allclose(running.run_at(np.asarray(clock_hz)).power_w, totals.power_w, rtol=1e-12)


def test_a_batch_of_one_workload_settles_as_it_does_alone() -> None:
    """One design takes a shorter way through the queues than a sweep does."""
    gpu = load_gpu("h200")
    bundle = bundle_for(gpu)
    timeline = analyse_graph(MODEL, gpu, bundle)
    limits = [250.0, 320.0, 500.0]
    batch = run_governed(
        timeline, gpu, OperatingPoint(power_limit_w=np.array(limits)[:, None]), bundle
    )[0]
    totals = total_at_clock(timeline, batch.at, bundle)
    for i, limit in enumerate(limits):
        alone = run_governed(timeline, gpu, OperatingPoint(power_limit_w=limit), bundle)[0]
        one = total_at_clock(timeline, alone.at, bundle)
        assert_allclose(alone.clock_hz[0], batch.clock_hz[i, 0], rtol=1e-10)
        assert_allclose(
            [one.latency_s, one.power_w], [totals.latency_s[i], totals.power_w[i]], rtol=1e-10
        )


@pytest.mark.parametrize("name", ["h200", "a100-sxm-80gb", "a100-pcie-40gb", "quadro-fx-5600"])
def test_the_limit_is_met_wherever_voltage_has_its_stairs(name: str) -> None:
    """A bracketing secant of eight steps once ended 0.07 % beside the limit of an A100, whose
    voltage has stairs.
    """
    gpu = load_gpu(name)
    bundle = bundle_for(gpu)
    timeline = analyse_graph(HEAVY, gpu, bundle)
    limits = gpu.power.limit_w * np.linspace(0.2, 1.0, 33)
    settled = run_governed(timeline, gpu, OperatingPoint(power_limit_w=limits[:, None]), bundle)[0]
    found = settled.capped & settled.met
    assert found.any()
    power_w = total_at_clock(timeline, settled.at, bundle).power_w
    assert_allclose(power_w[found], bundle.governor_share * limits[found], rtol=2e-8)
    assert (settled.clock_hz[~settled.met] == settled.clock_hz.min()).all()
    for limit, clock_hz, met in zip(limits, settled.clock_hz, settled.met, strict=True):
        alone = run_governed(timeline, gpu, OperatingPoint(power_limit_w=float(limit)), bundle)[0]
        assert_allclose(alone.clock_hz, clock_hz, rtol=1e-10)
        assert alone.met == met


def test_a_sweep_of_one_point_keeps_its_shape() -> None:
    """One clock in a sweep is no design without a sweep: it once took the short way of those, and
    lost its axis.
    """
    gpu = load_gpu("h200")
    bundle = bundle_for(gpu)
    timeline = analyse_graph(
        build_graph("gpt2", ModelOptions(stack="eager", batch=8, seq=128)), gpu, bundle
    )
    alone = run_governed(timeline, gpu, OperatingPoint(power_limit_w=300.0), bundle)[0]
    swept_one = run_governed(
        timeline, gpu, OperatingPoint(np.array([[1.98e9]]), np.array([[300.0]])), bundle
    )[0]
    assert swept_one.clock_hz.shape == (1, 1)
    assert_allclose(swept_one.clock_hz.ravel(), alone.clock_hz.ravel(), rtol=1e-12)
    totals = total_at_clock(timeline, swept_one.at, bundle)
    assert totals.power_w.shape == totals.latency_s.shape == (1,)


def test_a_voltage_curve_that_is_scaled_is_asked_itself() -> None:
    """A kind of voltage curve with a rule of its own is not replaced by the points it was made
    from.
    """

    class Lower(VoltageCurve):
        def level_at(self, clock_hz):
            return 0.9 * super().level_at(clock_hz)

    gpu = load_gpu("h200")
    bundle = bundle_for(gpu)
    timeline = analyse_graph(
        build_graph("gpt2", ModelOptions(stack="eager", batch=8, seq=128)), gpu, bundle
    )
    at = OperatingPoint(clock_hz=np.array([1.5e9]))
    curve = bundle.power.voltage
    lower = replace(
        bundle, power=replace(bundle.power, voltage=Lower(curve.clock_hz, curve.relative))
    )
    assert (
        total_at_clock(timeline, at, lower).power_w < total_at_clock(timeline, at, bundle).power_w
    )


def test_a_burst_runs_before_the_governor_answers() -> None:
    """In the first 90 ms no limit lowers the clock; longer work comes near to sustained work, from
    above.
    """
    options: dict[str, object] = {"batch": 8, "seq": 1024, "host_launch": 0.0}
    sustained, burst, second, hour = (
        wattcast.predict("llama3-8b", "h200", duration=duration, **options)
        for duration in ("sustained", "20ms", "1s", 3600.0)
    )
    assert [p.capped for p in (sustained, burst, second, hour)] == [True, False, True, True]
    assert burst.clock_hz == load_gpu("h200").clocks.max_hz
    assert burst.latency_s < second.latency_s < hour.latency_s
    assert burst.power_w > second.power_w > hour.power_w
    assert_allclose(hour.latency_s, sustained.latency_s, rtol=1e-3)
    assert burst.interval.power_w[1] > 1.02 * 700.0  # nothing holds it to the limit
    assert any("duration: sustained" in note for note in sustained.assumptions)
    assert any("duration: 20 ms" in note for note in burst.assumptions)
    alone = wattcast.predict("gpt2", "h200", phase="decode")
    assert (
        wattcast.predict("gpt2", "h200", phase="decode", duration="5ms").latency_s
        == alone.latency_s
    )  # not capped
    for wrong in ("0ms", "-1ms", [1.0, 2.0], "nan s"):
        with pytest.raises(BadInput, match="duration"):
            wattcast.predict("gpt2", "h200", duration=wrong)


@pytest.mark.parametrize(
    ("op", "changes"),
    [
        ({"op": "linear", "m": 16, "n": 4096, "k": 4096, "dtype": "bf16"}, 0.1),
        ({"op": "bmm", "b": 64, "m": 128, "n": 128, "k": 64, "dtype": "bf16"}, 0.05),
        ({"op": "add", "n": 1 << 21, "dtype": "bf16"}, 0.2),
        ({"op": "softmax", "rows": 4096, "dim": 1024, "dtype": "bf16"}, 0.2),
    ],
)
def test_operands_come_from_memory_or_from_l2(op: dict[str, object], changes: float) -> None:
    def predict(operands: str | None) -> wattcast.Prediction:
        return wattcast.predict(
            {"name": "one", "ops": [op]}, "h200", operands=operands, host_launch=0.0
        )

    cold, warm, usual = predict("cold"), predict("warm"), predict(None)
    assert cold.latency_s > (1.0 + changes) * warm.latency_s
    assert 0.999 * warm.latency_s <= usual.latency_s <= 1.001 * cold.latency_s
    assert all(
        any(note.startswith("operands: ") for note in p.assumptions) for p in (cold, warm, usual)
    )
    with pytest.raises(UnknownName, match="operands 'hot'"):
        predict("hot")
    with pytest.raises(BadInput, match="a list of operators"):
        wattcast.predict("gpt2", "h200", operands="warm")


def test_a_low_clock_says_what_it_risks() -> None:
    """Memory-bound work follows the clock below a knee that nobody measured on this card."""

    def risks(**options: object) -> list[str]:
        p = wattcast.predict("llama3-8b", "h200", host_launch=0.0, **options)
        return [note for note in p.assumptions if "GTX Titan X" in note]

    assert risks(phase="decode", clock="900MHz")
    assert not risks(phase="decode")
    assert not risks(phase="decode", clock="1.98GHz")
    assert not risks(phase="prefill", batch=16, clock="900MHz")


def test_the_slow_path_to_memory_is_a_bound(parts) -> None:
    timeline, gpu, _ = parts
    slow = slow_memory_path(timeline, gpu.clocks.max_hz)
    for share in (1.0, 0.86, 0.5, 0.2):
        clock_hz = np.array([share * gpu.clocks.max_hz])
        before_s, after_s = (compute_kernel_s(t.phases, clock_hz) for t in (timeline, slow))
        assert (after_s >= before_s).all()
        assert share < MEMORY_KNEE or (after_s == before_s).all()


@pytest.mark.parametrize(("duration_s", "is_lowered"), [(0.078, False), (0.097, True)])
def test_the_clock_of_an_h200_falls_80_to_95_ms_after_a_heavy_load_begins(
    duration_s: float, is_lowered: bool
) -> None:
    """Measured on the card (docs/method/serving.md)."""
    options = {"phase": "prefill", "batch": 8, "seq": 4096, "stack": "eager"}
    short = wattcast.predict("llama3-8b", "h200", **options, duration=f"{duration_s}s")
    top_hz = float(np.mean(wattcast.load_gpu("h200").clocks.max_hz))
    assert bool(short.clock_hz < 0.999 * top_hz) is is_lowered
