"""Public tables of kernels are predicted right only with the coefficients that they depend on.

The rows of a table whose prediction moves by half a percent if a coefficient grows by a tenth:
their bias, which is the median of log(predicted / measured), or their mean error stays below a
bound. With the coefficient a third off it does not. Most of these tables chose the coefficients
(the evidence of each says which), so that they show what it means and not how well it forecasts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from measured_h200 import Dependence, forget_kernels

from wattcast.calibrate.table_fit import predict_tables_s
from wattcast.calibrate.table_rows import read_tables
from wattcast.coefficients.coefficient_files import change_coefficient
from wattcast.core.arrays import Array
from wattcast.hardware import load_gpu
from wattcast.predictor.bundle import bundle_for

LEAST_MOVE = 0.005


def judge_table(
    path: Path,
    gpu_name: str,
    coefficient: str,
    most_rows: int,
) -> Dependence:
    """Judge the rows of a table that depend on a coefficient; ``most_rows`` of each format."""
    gpu = load_gpu(gpu_name)
    bundle = bundle_for(gpu)
    table = read_tables([path], gpu, most_rows)

    def predict_s() -> Array:
        forget_kernels(bundle)
        return predict_tables_s(table, gpu, bundle)

    predicted_s = predict_s()
    with change_coefficient(coefficient, 1.1):
        moved_s = predict_s()
    forget_kernels(bundle)
    is_dependent = np.abs(np.log(moved_s / predicted_s)) > LEAST_MOVE
    measured_s = table.rows.column("latency_s")
    return Dependence(np.log(predicted_s / measured_s)[is_dependent])


@pytest.mark.parametrize(
    ("coefficient", "gpu", "table", "most_rows", "least_rows", "statistic", "bound"),
    [
        ("product_tiles.large_tiles", "l40s", "l40s.vllm-0.24.0.gemm", 400, 4, "error", 0.07),
        (
            *("engine_experts.oai_sharing_launches", "h200", "h200_sxm.vllm-0.24.0.moe"),
            *(60, 30, "bias", 0.03),
        ),
        (
            *("engine_products.weights_per_cycle", "a100-sxm-80gb"),
            *("a100_sxm.trtllm-1.0.0.gemm", 100, 200, "bias", 0.015),
        ),
    ],
    ids=["large_tiles", "oai_sharing_launches", "weights_per_cycle"],
)
def test_rows_of_a_table_that_depend_on_it_are_predicted_right(
    reference: Path,
    coefficient: str,
    gpu: str,
    table: str,
    most_rows: int,
    least_rows: int,
    statistic: str,
    bound: float,
) -> None:
    path = reference / "aiconfigurator" / f"{table}.csv"
    judged = judge_table(path, gpu, coefficient, most_rows)
    assert len(judged.log_errors) >= least_rows
    assert getattr(judged, statistic) < bound
