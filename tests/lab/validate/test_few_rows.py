"""The bundle of a chip that is known by its catalogue entry alone."""

from __future__ import annotations

import numpy as np

from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.lab.validate.long_checks.few_rows import starting_bundle
from wattcast.predictor.prediction import predict_graph
from wattcast.workload.graph import Graph
from wattcast.workload.operator_types import Attention, LayerNorm, Linear


def test_a_bundle_from_a_catalogue_entry_predicts() -> None:
    work = Graph.from_operators(
        "mix",
        [Linear(4096, 4096, 4096), LayerNorm(4096, 4096), Attention(4, 32, 8, 1024, 1024, 128)],
    )
    for name in ("a100-sxm-80gb", "h200", "l40s"):
        gpu = load_gpu(name)
        found = predict_graph(work, gpu, OperatingPoint(), starting_bundle(gpu))
        assert np.isfinite([found.latency_s, found.power_w]).all()
        assert 0.0 < found.power_w <= 1.01 * gpu.power.limit_w
