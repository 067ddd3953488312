"""The numbers the controller is held to, on plants it was and was not tuned on (docs/method/manage.md)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wattcast import api
from wattcast.fit import sensitivity as fitting
from wattcast.manage import forecast, hd7970, replay, sensitivity
from wattcast.manage.objective import Goal, Objective
from wattcast.manage.outcome import Comparison, compare, geometric_mean_gain
from wattcast.manage.plant import Noise
from wattcast.manage.policies import Name, Setup
from wattcast.manage.simulated_plants import sweep

SETUP = Setup(model=sensitivity.preset("hd7970_simulated"))
# Launch-bound and bimodal, or corrupt (reference README): left out of the A100's comparison
A100_LEFT_OUT = [
    "bertmodel_large_pbf16_b8_s128_",
    "gpt2model_gpt2_pbf16_b8_s128_",
    "optmodel_opt-1p3b_pbf16_b2_s128_",
    "qwen2model_qwen2-1p5b_pbf16_b1_s128_",
    "qwen2model_qwen2-1p5b_pbf16_b8_",
]


@pytest.fixture(scope="module")
def simulated() -> Comparison:
    return compare([hd7970.tables()], SETUP)


def test_hd7970_distance_from_the_oracle_and_slowdown(simulated: Comparison) -> None:
    """Aims: 3 % and 0.4 %, probing included. The controller was tuned on this plant."""
    mean = simulated.mean(Name.HARMONIA)
    assert mean["ed2_over_oracle_with_probing"] < 0.03
    assert mean["slowdown_with_probing"] < 0.004
    assert max(o.slowdown_with_probing for o in simulated.of(Name.HARMONIA)) < 0.036  # the paper's worst


def test_hd7970_ranks_policies_as_the_paper_does(simulated: Comparison) -> None:
    """Coarse alone gains less than coarse and fine and slows some applications a lot; the clock alone gains
    little; BPT gains most (36 % in the paper)."""
    gain = {p: geometric_mean_gain(simulated.of(p), hd7970.STRESS) for p in Name if simulated.of(p)}
    assert gain[Name.ORACLE] > gain[Name.HARMONIA] > gain[Name.STATIC] > gain[Name.COARSE] > gain[Name.CORE_CLOCK]
    assert max(o.slowdown for o in simulated.of(Name.COARSE)) > 0.1
    best = max(simulated.of(Name.HARMONIA), key=lambda o: o.ed2_gain_over_default_with_probing)
    assert best.application == "BPT"
    assert best.ed2_gain_over_default_with_probing == pytest.approx(0.36, abs=0.05)


def test_no_policy_beats_the_oracle_on_a_single_kernel(simulated: Comparison) -> None:
    for outcome in simulated.outcomes:
        if outcome.application in ("MaxFlops", "DeviceMemory", "Stencil", "SPMV", "Streamcluster"):
            assert outcome.ed2_over_oracle >= -1e-9, outcome


def test_perturbed_plants_hold_the_same_distances_in_the_median() -> None:
    """60 of the 200 plants of the docs, none of them used in tuning (seeds below 100 were)."""
    found = sweep(60, SETUP)
    assert found["ed2_over_oracle_with_probing"]["median"] < 0.03
    assert found["slowdown_with_probing"]["median"] < 0.004


def test_sensitivity_predictors_are_about_as_good_as_the_papers() -> None:
    """5.71 % and 3.03 % on the real card; 6 % and 4 % on ours, in sample as theirs."""
    tables = hd7970.tables()
    truth, counters = sensitivity.of_tables(tables), sensitivity.mean_counters(tables)
    groups = [name.split(".")[0] for name in tables.kernels]
    fitted = fitting.fit(counters, truth, groups, "again", "")
    assert fitted.error["compute"] < 0.08
    assert fitted.error["bandwidth"] < 0.06
    assert fitted.left_out_error["bandwidth"] < 0.10
    shipped = sensitivity.preset("hd7970_simulated")
    for side, stored in ((fitted.model.compute, shipped.compute), (fitted.model.bandwidth, shipped.bandwidth)):
        assert side.intercept == pytest.approx(stored.intercept)
        assert dict(side.coefficients) == pytest.approx(dict(stored.coefficients))


@pytest.fixture(scope="module")
def titan_x(reference: Path) -> list:
    return replay.read(reference / "titanx" / "real_time_power_by_clock.csv", default="1164/3505")


def test_titan_x_without_noise(titan_x: list) -> None:
    """Aims: 1 % converged, 1.5 % with probing, nobody over 1 % worse than default. Never tuned on."""
    comparison = compare(titan_x, Setup(), [Name.HARMONIA])
    mean = comparison.mean(Name.HARMONIA)
    assert len(comparison.outcomes) == 13
    assert {"stencil2d", "stencil2d#2"} <= {o.application for o in comparison.outcomes}
    assert mean["ed2_over_oracle"] < 0.01
    assert mean["ed2_over_oracle_with_probing"] < 0.015
    assert min(o.ed2_gain_over_default for o in comparison.outcomes) > -0.01


def test_titan_x_with_one_percent_noise(titan_x: list) -> None:
    """At most 1 % of runs converge to settings over 1 % worse than the default."""
    worse = []
    for seed in range(40):
        comparison = compare(titan_x, Setup(noise=Noise(0.01, 0.01), seed=seed), [Name.HARMONIA])
        worse += [o.ed2_gain_over_default < -0.01 for o in comparison.outcomes]
    assert np.mean(worse) <= 0.01


@pytest.fixture(scope="module")
def a100(reference: Path) -> list:
    tables = replay.read(reference / "energaizer" / "measurements" / "a100_pcie_40gb_dvfs.csv")
    return replay.without(tables, A100_LEFT_OUT)


def predictive(a100: list, reference: Path, objective: Objective) -> Comparison:
    """Model-predictive policy and oracle on the A100's rows; none of them goes into the prediction."""
    gpu, outcomes = api.find_gpu("a100-pcie-40gb"), []
    for tables in a100:
        found, missing = forecast.forecasts(tables, gpu, reference / "energaizer" / "workloads")
        assert not missing
        setup = Setup(objective=objective, forecast=forecast.choices(tables, found, objective))
        outcomes += compare([tables], setup, [Name.PREDICTIVE, Name.ORACLE]).outcomes
    return Comparison(tuple(outcomes), {})


def test_a100_model_predictive_clock(a100: list, reference: Path) -> None:
    """Wanted: 0.5 % in the mean, 1.5 % at worst."""
    gaps = [o.ed2_over_oracle for o in predictive(a100, reference, Objective()).of(Name.PREDICTIVE)]
    assert len(gaps) == 14
    assert np.mean(gaps) < 0.005
    assert max(gaps) < 0.015


def test_a100_model_predictive_saving_at_ten_percent_slowdown(a100: list, reference: Path) -> None:
    """At least 80 % of the oracle's saving, and none of that from breaking the bound."""
    found = predictive(a100, reference, Objective(Goal.ENERGY, slowdown=0.10))
    mine = sum(o.energy_saving for o in found.of(Name.PREDICTIVE) if o.slowdown <= 0.10)
    assert mine > 0.8 * sum(o.energy_saving for o in found.of(Name.ORACLE))
    assert max(o.slowdown for o in found.of(Name.PREDICTIVE)) < 0.11


def test_a100_with_feedback(a100: list) -> None:
    """The controller itself, from the default clocks: no model, no counters."""
    comparison = compare(a100, Setup(), [Name.HARMONIA])
    assert comparison.mean(Name.HARMONIA)["ed2_over_oracle"] < 0.005
    bounded = Setup(objective=Objective(Goal.ENERGY, slowdown=0.10))
    comparison = compare(a100, bounded, [Name.HARMONIA, Name.ORACLE])
    mine, best = (sum(o.energy_saving for o in comparison.of(p)) for p in (Name.HARMONIA, Name.ORACLE))
    assert mine > 0.99 * best
    assert max(o.slowdown for o in comparison.of(Name.HARMONIA)) <= 0.10 + 1e-9
