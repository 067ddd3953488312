"""Published training rows: dimensions agree with the published size, and a sample stays as close as
it is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wattcast.lab.validate.public_checks.training_checks import (
    predict_training_row,
    read_training_rows,
    training_models,
)
from wattcast.workload.build_model import count_parameters


@pytest.fixture
def rows(reference: Path) -> dict[str, dict[str, str]]:
    return {row["id"]: row for row in read_training_rows(reference)}


def test_dimensions_give_the_published_number_of_weights(rows: dict[str, dict[str, str]]) -> None:
    published = {row["model"]: float(row["params_b"]) for row in rows.values() if row["params_b"]}
    checked = [name for name in training_models() if name in published]
    assert len(checked) > 15
    for name in checked:
        assert count_parameters(training_models()[name]) / 1e9 == pytest.approx(
            published[name], rel=0.05
        ), name


def test_runs_of_7b_models_on_a100_come_out_within_a_tenth(rows: dict[str, dict[str, str]]) -> None:
    """InternEvo ran one model on 8 to 1,024 GPUs; these rows chose the overlaps, so this shows
    consistency only.
    """
    chosen = [row for name, row in rows.items() if name.startswith("internevo-flops")]
    errors = []
    for row in chosen:
        result = predict_training_row(row)
        errors.append(result.tokens_per_s / result.gpus / float(row["tokens_per_s_per_gpu"]) - 1.0)
    assert len(errors) >= 8
    assert np.median(np.abs(errors)) < 0.1
