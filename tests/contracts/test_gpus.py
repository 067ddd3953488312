"""What a prediction must hold on every catalogue GPU."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast import hardware
from wattcast.core.arrays import as_sweep
from wattcast.core.units import Dtype
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.prediction import predict_graphs
from wattcast.workload.graph import Block, Graph
from wattcast.workload.operator_types import (
    Attention,
    Bmm,
    Conv2d,
    Elementwise,
    LayerNorm,
    Linear,
    RmsNorm,
    Softmax,
)

RTOL = 1e-9


@pytest.fixture(params=hardware.gpu_names())
def gpu(request: pytest.FixtureRequest) -> Gpu:
    return hardware.load_gpu(request.param)


def graph(dtype: Dtype) -> Graph:
    layer = (
        Linear(512, 1024, 1024, bias=True, dtype=dtype),
        Bmm(16, 128, 128, 64, dtype=dtype),
        Attention(2, 8, 2, 256, 256, 64, causal=True, dtype=dtype),
        Conv2d(4, 32, 64, 28, 28, 3, 3, padding=1, dtype=dtype),
        Softmax(512, 512, dtype=dtype),
        LayerNorm(512, 1024, dtype=dtype),
        RmsNorm(512, 1024, dtype=dtype),
        Elementwise("gelu", 1 << 20, dtype=dtype, count=3),
    )
    return Graph(
        f"contract in {dtype}",
        (Block(layer, 4), Block((Elementwise("copy", 1 << 24, dtype=dtype),))),
    )


WORK = [graph(Dtype(name)) for name in ("fp32", "fp16", "bf16")]


def locked(gpu: Gpu) -> OperatingPoint:
    return OperatingPoint(clock_hz=0.6 * gpu.clocks.max_hz, power_limit_w=1e6)


def test_numbers_are_finite_and_consistent_and_inherited_coefficients_say_so(gpu: Gpu) -> None:
    bundle = bundle_for(gpu)
    assert bundle.status in ("measured", "calibrated", "forecast")
    for p in predict_graphs(WORK, gpu, OperatingPoint(), bundle):
        for value in (p.latency_s, p.power_w, p.energy_j, p.clock_hz, p.effective_clock_hz):
            assert np.isfinite(value)
            assert value > 0
        assert_allclose(p.energy_j, p.power_w * p.latency_s, rtol=RTOL)
        assert_allclose(sum(m.power_w for m in p.modules), p.power_w, rtol=RTOL)
        assert p.effective_clock_hz <= p.clock_hz * (1 + RTOL)
        assert p.clock_hz <= gpu.clocks.max_hz * (1 + RTOL)
        assert p.power_w <= gpu.power.limit_w * 1.001 or "cannot be met" in " ".join(p.assumptions)
        in_ops = sum(o.energy_j for o in p.ops)
        idle_at_most = (p.latency_s - p.busy_s) * p.power_w * 2
        assert in_ops <= p.energy_j * (1 + RTOL)
        assert in_ops + idle_at_most >= p.energy_j * (1 - 1e-6)
        if bundle.status == "forecast":
            assert not p.support.inside
            assert any(f"no measurement of the {gpu.name}" in note for note in p.assumptions)


def test_a_batch_equals_its_members(gpu: Gpu) -> None:
    clocks = np.linspace(0.5, 1.0, 3) * gpu.clocks.max_hz
    limits = np.array([0.6, 1.0]) * gpu.power.limit_w
    clock_hz, limit_w = np.meshgrid(clocks, limits, indexing="ij")
    bundle = bundle_for(gpu)
    points = OperatingPoint(as_sweep(clock_hz), as_sweep(limit_w))
    batches = predict_graphs(WORK, gpu, points, bundle)
    for at in np.ndindex(3, 2):
        point = OperatingPoint(float(clock_hz[at]), float(limit_w[at]))
        for batch, one in zip(batches, predict_graphs(WORK, gpu, point, bundle), strict=True):
            for name in (
                "latency_s",
                "power_w",
                "energy_j",
                "clock_hz",
                "effective_clock_hz",
                "capped",
            ):
                assert_allclose(
                    getattr(batch, name)[at], getattr(one, name), rtol=1e-12, err_msg=name
                )


def test_at_a_locked_clock_more_bandwidth_never_slows(gpu: Gpu) -> None:
    wider = gpu.sweep(memory__byte_per_s=gpu.memory.byte_per_s * np.array([1.0, 1.1, 2.0, 16.0]))
    for found in predict_graphs(WORK, wider, locked(gpu), bundle_for(gpu)):
        assert (found.latency_s[1:] <= found.latency_s[0] * (1 + RTOL)).all(), found.name


def test_a_higher_locked_clock_never_slows_and_never_saves_power(gpu: Gpu) -> None:
    clocks = np.linspace(0.4, 1.0, 7) * gpu.clocks.max_hz
    point = OperatingPoint(clock_hz=clocks[:, None], power_limit_w=1e6)
    for p in predict_graphs(WORK, gpu, point, bundle_for(gpu)):
        assert (np.diff(p.latency_s) <= 1e-15).all()
        assert (np.diff(p.power_w) >= -1e-9).all()


def test_a_lower_power_limit_never_speeds_up(gpu: Gpu) -> None:
    limits = np.linspace(0.3, 1.0, 8) * gpu.power.limit_w
    point = OperatingPoint(power_limit_w=limits[:, None])
    for p in predict_graphs(WORK, gpu, point, bundle_for(gpu)):
        assert (np.diff(p.clock_hz) >= -1.0).all()
        assert (np.diff(p.latency_s) <= 1e-12).all()


def test_swept_fields_equal_replaced_ones(gpu: Gpu) -> None:
    bundle = bundle_for(gpu)
    counts = np.array([0.5, 1.0, 2.0]) * gpu.sm_count
    all_swept = predict_graphs(WORK, gpu.sweep(sm_count=counts), locked(gpu), bundle)
    for i, count in enumerate(counts):
        replaced = predict_graphs(WORK, gpu.sweep(sm_count=float(count)), locked(gpu), bundle)
        for swept, one in zip(all_swept, replaced, strict=True):
            assert_allclose(swept.latency_s[i], one.latency_s, rtol=1e-12, err_msg=one.name)
            assert_allclose(swept.power_w[i], one.power_w, rtol=1e-12, err_msg=one.name)
