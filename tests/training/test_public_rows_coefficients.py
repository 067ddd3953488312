"""Published training rows are predicted right only with the coefficients that they depend on.

The rows of a framework on a card whose prediction moves if a coefficient grows by a tenth: their
mean error stays below a bound. With the coefficient a third off it does not.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from wattcast.coefficients.coefficient_files import change_coefficient
from wattcast.core.arrays import Array
from wattcast.lab.validate.public_checks.training_checks import (
    predict_training_row,
    read_training_rows,
)

LEAST_MOVE = 0.003  # of the logarithm of tokens a second
MOST_ROWS = 14
BIAS = 0.025  # where other errors of the rows outweigh the one that is looked for
Row = dict[str, str]


def is_of_group(row: Row, framework: str, gpu: str, models: str) -> bool:
    has_model = row["model"].startswith(tuple(models.split()))
    return row["id"].startswith(framework) and row["gpu"].startswith(gpu) and has_model


def compare(rows: list[Row]) -> Array:
    """Return log(predicted / published) of tokens a second and GPU."""
    errors = []
    for row in rows:
        result = predict_training_row(row)
        published = float(row["tokens_per_s_per_gpu"])
        errors.append(np.log(result.tokens_per_s / result.gpus / published))
    return np.array(errors)


@cache  # two bounds of one coefficient ask for the same
def judge_dependent(reference: Path, name: str, framework: str, gpu: str, models: str) -> Array:
    """Return the errors of the rows whose prediction moves if a coefficient grows by a tenth."""
    rows = [
        row
        for row in read_training_rows(reference)
        if is_of_group(row, framework, gpu, models) and row["tokens_per_s_per_gpu"]
    ]
    errors = compare(rows[:MOST_ROWS])
    with change_coefficient(f"training.{name}", 1.1):
        moved = compare(rows[:MOST_ROWS])
    return errors[np.abs(moved - errors) > LEAST_MOVE]


@pytest.mark.parametrize(
    ("name", "framework", "gpu", "models", "least_rows", "most_error"),
    [
        ("persistent_slowed", "llmfoundry", "H100", "mpt", 5, 0.085),
        ("tensor_overlap", "mbridge", "H100", "llama3", 4, 0.036),
        ("expert_host", "mbridge", "H100", "qwen3", 3, 0.2),
        ("blackwell_attention", "mbridge", "GB200", "llama3", 5, 0.066),
        pytest.param(
            *("blackwell_attention", "mbridge", "GB200", "llama3", 5, BIAS),
            marks=pytest.mark.xfail(
                strict=True,
                reason="3.5 % too slow since the GB200's quantising was fitted without long rows",
            ),
        ),
    ],
    ids=[
        "persistent_slowed",
        "tensor_overlap",
        "expert_host",
        "blackwell_attention",
        "bias_of_blackwell_attention",
    ],
)
def test_published_jobs_that_depend_on_it_take_as_long_as_predicted(
    reference: Path,
    name: str,
    framework: str,
    gpu: str,
    models: str,
    least_rows: int,
    most_error: float,
) -> None:
    """Not blind: these rows chose the coefficients (docs/method/training-jobs.md)."""
    errors = judge_dependent(reference, name, framework, gpu, models)
    assert len(errors) >= least_rows
    if most_error is BIAS:
        assert abs(float(np.median(errors))) < BIAS
    else:
        assert np.abs(errors).mean() < most_error
