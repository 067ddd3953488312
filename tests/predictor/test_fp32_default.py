"""What fp32 means: PyTorch's defaults, and products on CUDA cores of cards with 64 and 128 lanes an
SM.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

import wattcast
from wattcast.core import Dtype
from wattcast.core.errors import WattcastError
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.predictor.bundle import forecast_bundle
from wattcast.predictor.prediction import predict_graph
from wattcast.workload.build_model import build_graph
from wattcast.workload.graph import Graph
from wattcast.workload.model_options import ModelOptions
from wattcast.workload.operator_types import Conv2d, Linear

LONG = OperatingPoint(clock_hz=900e6)


def _formats(model: str, dtype: str) -> dict[str, set[Dtype]]:
    graph = build_graph(model, ModelOptions(dtype=Dtype.parse(dtype)))
    found: dict[str, set[Dtype]] = {}
    for op, _ in graph.calls():
        if op.is_product:
            depthwise = isinstance(op, Conv2d) and op.groups > 1
            found.setdefault("depthwise" if depthwise else op.kind, set()).add(op.dtype)
    return found


def test_fp32_convolutions_run_in_tf32_as_pytorch_allows_it() -> None:
    """ResNet-101 in fp32 on an A100 was predicted at three times its time, on CUDA cores.

    PyTorch lets cuDNN round to TF32 by default (torch.backends.cudnn.allow_tf32), and cuBLAS not.
    """
    assert _formats("resnet50", "fp32") == {"conv2d": {Dtype.TF32}, "linear": {Dtype.FP32}}
    assert _formats("resnet50", "tf32") == {"conv2d": {Dtype.TF32}, "linear": {Dtype.TF32}}
    mixed = _formats("mobilevit-s", "fp32")
    assert mixed["depthwise"] == mixed["linear"] == {Dtype.FP32}
    assert mixed["conv2d"] == {Dtype.TF32}


@pytest.mark.parametrize(
    ("dtype", "words"), [("fp32", "convolutions in TF32"), ("tf32", "round fp32 to TF32")]
)
def test_a_prediction_says_what_fp32_means(dtype: str, words: str) -> None:
    prediction = wattcast.predict("resnet50", "a100-pcie-40gb", dtype=dtype, batch=8)
    assert any(words in note for note in prediction.assumptions)


def test_a_card_without_tf32_keeps_fp32_where_nobody_asked_for_tf32() -> None:
    prediction = wattcast.predict("resnet50", "v100-sxm", dtype="fp32", batch=8)
    kernels = prediction.basis.timeline.kernels
    assert Dtype.TF32 not in {op.dtype for op in kernels.ops}
    assert set(kernels.pipe_event) == {"cuda_fp32_flop"}
    with pytest.raises(WattcastError, match="tf32"):
        wattcast.predict("resnet50", "v100-sxm", dtype="tf32", batch=8)


def _rate_of_peak(gpu: str, m: int, n: int, k: int) -> float:
    chip = load_gpu(gpu)
    op = Linear(m, n, k, dtype=Dtype.FP32)
    found = predict_graph(Graph.from_operators("x", [op]), chip, LONG, forecast_bundle(chip))
    peak = float(chip.pipes.cuda_flop_per_cycle[Dtype.FP32]) * float(chip.sm_count) * 900e6
    return op.flop / float(found.latency_s) / peak


@pytest.mark.parametrize("gpu", ["a100-pcie-40gb", "v100-sxm"])
def test_tiles_on_cuda_cores_fill_the_chip(gpu: str) -> None:
    """Tiles of 256 x 128, which cuBLAS prefers on tensor cores, left two fifths of an A100 idle in
    2048 x 2048.

    OPT-1.3B in fp32 came out 50 % slow. Its products reach 0.9 of the peak whatever their rows.
    """
    rates = [_rate_of_peak(gpu, rows, 2048, 2048) for rows in (1024, 2048, 4096, 8192)]
    assert min(rates) > 0.8
    assert max(rates) < 1.0


def test_small_tiles_are_slow_only_where_multiply_adds_take_every_slot() -> None:
    """SMs of 128 lanes have no slots left for loads, so that 192 rows, in small tiles, fall further
    behind there.
    """
    wide, narrow = (
        _rate_of_peak(gpu, 192, 4096, 4096) / _rate_of_peak(gpu, 8192, 4096, 4096)
        for gpu in ("a10", "a100-pcie-40gb")
    )
    assert wide < 0.75
    assert narrow > 0.78


def test_only_tensor_kernels_of_long_runs_lose_cycles_before_hopper() -> None:
    """Long fp32 runs came out 11 % slow: a tenth of all cycles was taken from every kernel, tensor
    cores or not.
    """
    chip = load_gpu("a100-pcie-40gb")
    bundle = forecast_bundle(chip)
    products = [Linear(8192, 8192, 8192, dtype=dtype) for dtype in (Dtype.FP32, Dtype.BF16)]
    shares = []
    for op in products:
        graph = Graph.from_operators("x", [op])
        long = predict_graph(graph, chip, LONG, bundle)
        burst = predict_graph(graph, chip, LONG, bundle.for_bursts())
        shares.append(float(burst.latency_s) / float(long.latency_s))
    assert_allclose(shares[0], 1.0, rtol=1e-12)
    parent = forecast_bundle(load_gpu("h100-sxm")).clock_law
    assert parent is not None
    assert_allclose(shares[1], np.max(parent.ratio), rtol=0.01)


@pytest.mark.parametrize(
    ("gpu", "dtype"), [("v100-sxm", Dtype.FP32), ("a100-pcie-40gb", Dtype.TF32)]
)
def test_the_gradient_of_a_small_filter_fills_the_chip(gpu: str, dtype: Dtype) -> None:
    """A filter of 64 x 64 channels is few tiles, and its gradient sums over all pixels.

    Forecasts gave all of a sum to one block, so that ResNet-50 trained at 0.6 of its speed on a
    V100, with 44 % of the time in gradients of filters. Libraries share the sum among blocks.
    """
    chip = load_gpu(gpu)
    bundle = forecast_bundle(chip)
    seconds = []
    for direction in ("forward", "wgrad"):
        op = Conv2d(128, 64, 64, 56, 56, 3, 3, padding=1, direction=direction, dtype=dtype)
        found = predict_graph(Graph.from_operators("x", [op]), chip, LONG, bundle)
        seconds.append(float(found.latency_s))
    assert seconds[1] < 1.6 * seconds[0]
