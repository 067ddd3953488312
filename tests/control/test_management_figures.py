"""Figures like the paper's 10 to 13 and 18: each one has labelled axes, something on them, and says
what it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from wattcast.control import clock_forecast, hd7970
from wattcast.control.policies import PolicyName, PolicySetup
from wattcast.control.policy_comparison import PolicyComparison, compare_policies
from wattcast.control.search_problem import Objective
from wattcast.control.sensitivity_model import load_shipped_model
from wattcast.predictor import api

pytest.importorskip("matplotlib")
from wattcast.control import management_figures as figures

TABLES = hd7970.load_tables()


@pytest.fixture(scope="module")
def comparison() -> PolicyComparison:
    return compare_policies([TABLES], PolicySetup(model=load_shipped_model("hd7970_simulated")))


MAKERS: dict[str, Callable[[PolicyComparison], Any]] = {
    "10": lambda c: figures.draw_gains(
        c, "ed2_gain_over_default_with_probing", "ED² gain (%)", "here"
    ),
    "13": lambda c: figures.draw_gains(c, "slowdown_with_probing", "Slowdown (%)", "here"),
    "18": lambda c: figures.list_management_figures([TABLES], c, PolicySetup())[
        "figure_18_contributions"
    ](),
    "convergence": lambda c: figures.draw_convergence(
        TABLES, c.runs[PolicyName.HARMONIA, "CoMD"], Objective()
    ),
}


@pytest.mark.parametrize("which", MAKERS)
def test_every_figure_is_labelled_and_not_empty(comparison: PolicyComparison, which: str) -> None:
    figure = MAKERS[which](comparison)
    assert figure.axes
    for axes in figure.axes:
        assert axes.get_ylabel()
        assert axes.lines or axes.patches
    assert figure.get_supxlabel()


def test_picks_lie_on_the_measured_curves() -> None:
    gpu = api.find_gpu("a100-pcie-40gb")
    tables = clock_forecast.build_predicted_plant(
        {"gpt2": "gpt2"}, gpu, {"batch": 8, "seq": 512}, iterations=5
    )
    found = {
        "gpt2": clock_forecast.forecast_workload(
            "gpt2", gpu, tables.lattice.knobs[0].levels, {"batch": 8, "seq": 512}
        )
    }
    choices = clock_forecast.choose_forecast_settings(tables, found, Objective())
    figure = figures.draw_picked_clocks(
        tables, compare_policies([tables], PolicySetup(forecast=choices)), Objective()
    )
    curve, pick = figure.axes[0].lines
    assert tuple(*pick.get_xydata()) in {tuple(point) for point in curve.get_xydata()}
    assert figure.axes[0].get_xlabel()
