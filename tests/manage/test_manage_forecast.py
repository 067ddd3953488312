"""Our predictor as plant and policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wattcast import api
from wattcast.errors import BadInput
from wattcast.manage import forecast
from wattcast.manage.objective import Goal, Objective
from wattcast.manage.outcome import compare
from wattcast.manage.policies import Name, Setup

A100 = api.find_gpu("a100-pcie-40gb")


def test_clocks_lie_on_the_cards_own_steps() -> None:
    clocks = np.asarray(forecast.core_clocks(A100))
    assert clocks[-1] == 1410e6
    assert ((1410e6 - clocks) % 15e6 == 0).all()
    assert len(clocks) <= forecast.LEVELS


def test_a_forecast_picks_what_its_own_plant_rewards() -> None:
    """On a plant that is the predictor itself, the model-predictive policy is the oracle."""
    tables = forecast.plant({"gpt2": "gpt2"}, A100, {"batch": 8, "seq": 512}, iterations=20)
    clocks = tables.lattice.knobs[0].levels
    objective = Objective(Goal.ENERGY, slowdown=0.1)
    found = {"gpt2": forecast.predicted("gpt2", A100, clocks, {"batch": 8, "seq": 512})}
    setup = Setup(objective=objective, forecast=forecast.choices(tables, found, objective))
    comparison = compare([tables], setup)
    (mine,) = comparison.of(Name.PREDICTIVE)
    assert mine.objective_over_oracle == pytest.approx(0.0, abs=1e-12)
    (guided,) = comparison.of(Name.GUIDED)
    assert guided.objective_over_oracle < 0.01


def test_names_of_runs_lead_to_workloads(tmp_path: Path) -> None:
    name = "gpt2model_gpt2_pfp32_b32_s128_modeprefill_attneager"
    model, options = forecast.workload_of(name, None)
    assert model == "gpt2"
    assert options == {
        "batch": 32,
        "seq": 128,
        "dtype": "fp32",
        "phase": "prefill",
        "attention": "eager",
        "head": "none",
    }
    assert forecast.workload_of("optmodel_opt-1p3b_pbf16_b2_s2048_modeprefill", None)[0] == "opt-1.3b"
    assert forecast.workload_of("bertmodel_large_pbf16_b8_s512_modeprefill", None)[0] == "bert-large"
    listed = tmp_path / "gpt2model_gpt2_pfp32_b32_s128_modeprefill.json"
    listed.write_text("[]")
    assert forecast.workload_of(name, tmp_path) == (listed, {})
    with pytest.raises(BadInput, match="--workloads"):
        forecast.workload_of("2mm", None)
