"""25 kernels on a Quadro GV100 with 17 hardware counters and measured watts (AccelWattch)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wattcast.core.errors import BadInput
from wattcast.lab.counter_models import counter_table
from wattcast.lab.counter_models.counter_fit import CounterFit, CounterFitOptions, fit_counters
from wattcast.lab.counter_models.rail_terms import CounterModelKind

MAP = Path(__file__).with_name("volta.yaml")


@pytest.fixture(scope="module")
def path(reference: Path) -> Path:
    table = reference / "accelwattch" / "volta_hw_counters_power_components.csv"
    if not table.is_file():
        pytest.skip("no Volta counters in the reference folder")
    return table


@pytest.fixture(scope="module")
def result(path: Path) -> CounterFit:
    return fit_counters(
        {"counted": counter_table.read_counter_table(path, MAP)},
        CounterFitOptions(models=(CounterModelKind.HYBRID,), advice=False, hold=("group",)),
    )


def test_unseen_kernels_and_applications(result: CounterFit) -> None:
    """Must 10 and 12; a constant is off by 18.7."""
    held = result.kinds[CounterModelKind.HYBRID].held_out
    assert held["benchmark"].score.mape <= 10.0
    assert held["group"].score.mape <= 11.0
    assert np.unique(result.table.group).size == 17


def test_costs_are_not_negative(result: CounterFit) -> None:
    assert min(c.value for c in result.kinds[CounterModelKind.HYBRID].diagnosis.coefficients) >= 0.0


def test_what_one_clock_cannot_show_is_said(result: CounterFit) -> None:
    words = " ".join(result.warnings)
    assert "core clock is the same in every row" in words
    assert "No row shows an idle device" in words


def test_a_counter_that_is_always_zero_is_refused_by_name(path: Path, tmp_path: Path) -> None:
    columns = tmp_path / "map.yaml"
    columns.write_text(MAP.read_text() + "  l2_write_miss: {column: hw_L2_WM}\n")
    with pytest.raises(BadInput, match=r"l2_write_miss \(hw_L2_WM\): expected values that differ"):
        counter_table.read_counter_table(path, columns)
