"""The protocol of Stokke et al. on a Tegra K1 whose costs are known, by the commands of the lesson."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wattcast.core.errors import ExitCode
from wattcast.lab.counter_models.apply_model import apply_model
from wattcast.lab.counter_models.counter_table import read_counter_table
from wattcast.lab.paper_figures.tegra_k1 import (
    compare_costs,
    list_table_4,
    measure_board,
    write_board,
)

FIT = ("--model", "hybrid_rail", "--estimator", "ols", "--no-advice", "--folds", "2")
OFFSETS = ("--offset", "204MHz", "--offset", "300MHz")


def test_table_4_is_printed_beside_what_the_model_gives() -> None:
    """To half a unit of the last printed digit, and one more: the paper truncates and rounds."""
    for cost, nj in list_table_4():
        assert nj == pytest.approx(cost.printed_nj, abs=0.0101)
        assert nj / cost.byte == pytest.approx(cost.printed_nj_per_byte, abs=0.0101)


@pytest.mark.slow
def test_an_exact_meter_finds_every_cost(call, tmp_path: Path) -> None:
    """And programs, which no row that was trained on has."""
    write_board(tmp_path, 0.0)
    columns = ("--columns", str(tmp_path / "k1.yaml"))
    out = tmp_path / "found.yaml"
    done = call(
        "lab",
        "fit",
        "counters",
        str(tmp_path / "k1.csv"),
        *columns,
        *FIT,
        *OFFSETS,
        "--out",
        str(out),
    )
    assert done.code == ExitCode.OK, done.err
    for event, truth, found in compare_costs(out):
        assert found == pytest.approx(truth, rel=1e-3), event
    applied = apply_model(out, tmp_path / "programs.csv", "table", columns=tmp_path / "k1.yaml")
    assert applied.error_percent == pytest.approx(0.0, abs=0.01)


def test_programs_are_not_among_what_is_trained_on(tmp_path: Path) -> None:
    write_board(tmp_path, 0.01)
    table = read_counter_table(tmp_path / "k1.csv", tmp_path / "k1.yaml")
    assert not [name for name in table.benchmark_names if name.startswith("program")]
    exact = measure_board(0.0).power_w
    apart = measure_board(0.01).power_w / exact - 1.0
    assert np.std(apart) == pytest.approx(0.01, rel=0.1)
