"""Kernels that an H200 ran are predicted right only with the coefficients that they depend on.

A case of ``kernel_row_cases.csv`` takes the measured rows whose prediction moves by 1 % when a
coefficient grows by a tenth, or all rows where it decides on kernels or is a feature of learned
corrections: bursts for their time, the blocks of their longest kernel and the number of their
kernels, long runs for their watts, operators under the profiler for their bytes. The bias of these predictions, which is their median, or their mean error
stays below a bound. With the coefficient a third off it does not.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from measured_h200 import judge_all, judge_dependent, load_measured

CASES = list(
    csv.DictReader(
        (Path(__file__).parent / "kernel_row_cases.csv").read_text(encoding="utf-8").splitlines()
    )
)


# A case that predicts its rows anew with a changed coefficient takes ten times as long as one that
# judges all rows: by day every third of them.
CHANGED = [case["coefficient"] for case in CASES if case["least_move"] != "all"]
BY_DAY = {case["coefficient"] for case in CASES} - set(CHANGED) | set(CHANGED[::3])
TRIED = [
    pytest.param(
        case,
        id=case["coefficient"],
        marks=() if case["coefficient"] in BY_DAY else pytest.mark.slow,
    )
    for case in CASES
]


@pytest.mark.parametrize("case", TRIED)
def test_rows_that_depend_on_it_are_predicted_right(case: dict[str, str]) -> None:
    rows = load_measured(case["database"], case["quantity"], case["kernels"])
    if case["least_move"] == "all":
        judged = judge_all(rows, case["quantity"])
    else:
        judged = judge_dependent(
            rows, case["quantity"], case["coefficient"], float(case["least_move"])
        )
    assert len(judged.log_errors) >= int(case["least_rows"])
    found = judged.bias if case["statistic"] == "bias" else judged.error
    assert found < float(case["bound"])
