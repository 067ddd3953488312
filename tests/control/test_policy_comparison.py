"""The numbers the controller is held to, on plants it was and was not tuned on
(docs/method/manage.md).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wattcast.control import clock_forecast, hd7970, policy_comparison, sensitivity_model
from wattcast.control.plants import MeasurementNoise
from wattcast.control.policies import PolicyName, PolicySetup
from wattcast.control.policy_comparison import (
    PolicyComparison,
    compare_policies,
    geometric_mean_gain,
    sweep_perturbed_cards,
)
from wattcast.control.search_problem import Goal, Objective
from wattcast.lab.paper_figures.hd7970_figures import average_counters, measure_table_sensitivities
from wattcast.predictor import api

SETUP = PolicySetup(model=sensitivity_model.load_shipped_model("hd7970_simulated"))
# Launch-bound and bimodal, or corrupt (reference README): left out of the A100's comparison
A100_LEFT_OUT = [
    "bertmodel_large_pbf16_b8_s128_",
    "gpt2model_gpt2_pbf16_b8_s128_",
    "optmodel_opt-1p3b_pbf16_b2_s128_",
    "qwen2model_qwen2-1p5b_pbf16_b1_s128_",
    "qwen2model_qwen2-1p5b_pbf16_b8_",
]


@pytest.fixture(scope="module")
def simulated() -> PolicyComparison:
    return compare_policies([hd7970.load_tables()], SETUP)


def test_hd7970_distance_from_the_oracle_and_slowdown(simulated: PolicyComparison) -> None:
    """Aims: 3 % and 0.4 %, probing included. The controller was tuned on this plant."""
    mean = simulated.mean(PolicyName.HARMONIA)
    assert mean["ed2_over_oracle_with_probing"] < 0.03
    assert mean["slowdown_with_probing"] < 0.004
    assert (
        max(o.shares["slowdown_with_probing"] for o in simulated.for_policy(PolicyName.HARMONIA))
        < 0.036
    )  # the paper's worst


def test_hd7970_ranks_policies_as_the_paper_does(simulated: PolicyComparison) -> None:
    """Coarse alone gains less than coarse and fine and slows some applications a lot; the clock
    alone gains little; BPT gains most (36 % in the paper)."""
    gain = {
        p: geometric_mean_gain(simulated.for_policy(p), hd7970.STRESS_APPLICATIONS)
        for p in PolicyName
        if simulated.for_policy(p)
    }
    assert (
        gain[PolicyName.ORACLE]
        > gain[PolicyName.HARMONIA]
        > gain[PolicyName.STATIC]
        > gain[PolicyName.COARSE]
        > gain[PolicyName.CORE_CLOCK]
    )
    assert max(o.shares["slowdown"] for o in simulated.for_policy(PolicyName.COARSE)) > 0.1
    best = max(
        simulated.for_policy(PolicyName.HARMONIA),
        key=lambda o: o.shares["ed2_gain_over_default_with_probing"],
    )
    assert best.application == "BPT"
    assert best.shares["ed2_gain_over_default_with_probing"] == pytest.approx(0.36, abs=0.05)


def test_no_policy_beats_the_oracle_on_a_single_kernel(simulated: PolicyComparison) -> None:
    for outcome in simulated.outcomes:
        if outcome.application in ("MaxFlops", "DeviceMemory", "Stencil", "SPMV", "Streamcluster"):
            assert outcome.shares["ed2_over_oracle"] >= -1e-9, outcome


@pytest.mark.slow
def test_perturbed_plants_hold_the_same_distances_in_the_median() -> None:
    """60 of the 200 plants of the docs, none of them used in tuning (seeds below 100 were)."""
    found = sweep_perturbed_cards(60, SETUP)
    assert found["ed2_over_oracle_with_probing"]["median"] < 0.03
    assert found["slowdown_with_probing"]["median"] < 0.004


def test_sensitivity_predictors_are_about_as_good_as_the_papers() -> None:
    """5.71 % and 3.03 % on the real card; 6 % and 4 % on ours, in sample as theirs."""
    tables = hd7970.load_tables()
    truth, counters = (
        measure_table_sensitivities(tables),
        average_counters(tables),
    )
    groups = [name.split(".")[0] for name in tables.kernels]
    fitted = sensitivity_model.fit_sensitivity(counters, truth, groups, "again", "")
    assert fitted.error["compute"] < 0.08
    assert fitted.error["bandwidth"] < 0.06
    assert fitted.left_out_error["bandwidth"] < 0.10
    shipped = sensitivity_model.load_shipped_model("hd7970_simulated")
    for side, stored in (
        (fitted.model.compute, shipped.compute),
        (fitted.model.bandwidth, shipped.bandwidth),
    ):
        assert side.intercept == pytest.approx(stored.intercept)
        assert dict(side.coefficients) == pytest.approx(dict(stored.coefficients))


@pytest.fixture(scope="module")
def titan_x(reference: Path) -> list:
    return policy_comparison.read_replay_tables(
        reference / "titanx" / "real_time_power_by_clock.csv", default="1164/3505"
    )


def test_titan_x_without_noise(titan_x: list) -> None:
    """Aims: 0.5 %, probing included, nobody over 1 % worse than default. Never tuned on."""
    comparison = compare_policies(titan_x, PolicySetup(), [PolicyName.HARMONIA])
    mean = comparison.mean(PolicyName.HARMONIA)
    assert len(comparison.outcomes) == 13
    assert {"stencil2d", "stencil2d#2"} <= {o.application for o in comparison.outcomes}
    assert mean["ed2_over_oracle"] < 0.005
    assert mean["ed2_over_oracle_with_probing"] < 0.005
    assert min(o.shares["ed2_gain_over_default"] for o in comparison.outcomes) > -0.01


def test_titan_x_with_one_percent_noise(titan_x: list) -> None:
    """At most 1 % of runs converge to settings over 1 % worse than the default."""
    worse = []
    for seed in range(40):
        comparison = compare_policies(
            titan_x,
            PolicySetup(noise=MeasurementNoise(0.01, 0.01), seed=seed),
            [PolicyName.HARMONIA],
        )
        worse += [o.shares["ed2_gain_over_default"] < -0.01 for o in comparison.outcomes]
    assert np.mean(worse) <= 0.01


@pytest.fixture(scope="module")
def a100(reference: Path) -> list:
    tables = policy_comparison.read_replay_tables(
        reference / "energaizer" / "measurements" / "a100_pcie_40gb_dvfs.csv"
    )
    return policy_comparison.leave_out_applications(tables, A100_LEFT_OUT)


def predictive(a100: list, reference: Path, objective: Objective) -> PolicyComparison:
    """Model-predictive policies with and without feedback, and the oracle, on the A100's rows,
    which none knows.
    """
    gpu, outcomes = api.find_gpu("a100-pcie-40gb"), []
    for tables in a100:
        found, missing = clock_forecast.forecast_applications(
            tables, gpu, reference / "energaizer" / "workloads"
        )
        assert not missing
        setup = PolicySetup(
            objective=objective,
            forecast=clock_forecast.choose_forecast_settings(tables, found, objective),
        )
        wanted = [PolicyName.PREDICTIVE, PolicyName.GUIDED, PolicyName.ORACLE]
        outcomes += compare_policies([tables], setup, wanted).outcomes
    return PolicyComparison(objective, tuple(outcomes), {})


def test_a100_forecast_alone_is_near_the_oracle_but_leaves_savings(
    a100: list, reference: Path
) -> None:
    """The baseline that no measurement corrects: 0.42 % over the oracle's ED² in the mean, at
    most 2 %, and more than half of the energy that a slowdown of 10 % can save. What `manage run` does is the next test's
    policy."""
    gaps = [
        o.shares["ed2_over_oracle"]
        for o in predictive(a100, reference, Objective()).for_policy(PolicyName.PREDICTIVE)
    ]
    assert len(gaps) == 14
    assert 0.003 < np.mean(gaps) < 0.006
    assert max(gaps) < 0.02
    found = predictive(a100, reference, Objective(Goal.ENERGY, slowdown=0.10))
    alone, best = (
        found.for_policy(policy) for policy in (PolicyName.PREDICTIVE, PolicyName.ORACLE)
    )
    assert (
        0.55
        < sum(o.shares["energy_saving"] for o in alone)
        / sum(o.shares["energy_saving"] for o in best)
        < 0.8
    )
    assert max(o.shares["slowdown"] for o in alone) <= 0.10


def test_a100_forecast_corrected_by_measurements(a100: list, reference: Path) -> None:
    """What the forecast alone misses, a few runs correct: 0.5 % in the mean and 1.5 % at worst,
    probing included.
    """
    found = predictive(a100, reference, Objective()).for_policy(PolicyName.GUIDED)
    gaps = [o.shares["ed2_over_oracle_with_probing"] for o in found]
    assert np.mean(gaps) < 0.005
    assert max(gaps) < 0.015
    bounded = predictive(a100, reference, Objective(Goal.ENERGY, slowdown=0.10))
    mine, best = (bounded.for_policy(policy) for policy in (PolicyName.GUIDED, PolicyName.ORACLE))
    saved = sum(o.shares["energy_saving_with_probing"] for o in mine)
    assert saved > 0.95 * sum(o.shares["energy_saving"] for o in best)
    assert max(o.shares["slowdown_with_probing"] for o in mine) <= 0.10


def test_a100_with_feedback(a100: list) -> None:
    """The controller itself, from the default clocks: no model, no counters."""
    comparison = compare_policies(a100, PolicySetup(), [PolicyName.HARMONIA])
    assert comparison.mean(PolicyName.HARMONIA)["ed2_over_oracle"] < 0.005
    bounded = PolicySetup(objective=Objective(Goal.ENERGY, slowdown=0.10))
    comparison = compare_policies(a100, bounded, [PolicyName.HARMONIA, PolicyName.ORACLE])
    mine, best = (
        sum(o.shares["energy_saving"] for o in comparison.for_policy(p))
        for p in (PolicyName.HARMONIA, PolicyName.ORACLE)
    )
    assert mine > 0.99 * best
    assert (
        max(o.shares["slowdown"] for o in comparison.for_policy(PolicyName.HARMONIA)) <= 0.10 + 1e-9
    )


def test_a100_with_feedback_on_every_row_of_the_file(reference: Path) -> None:
    """All 20 applications: the docs quoted 0.18 %, which is that of 14 chosen ones. Three bimodal
    rows end 6 to 28 % over the oracle, the other 17 within 1.1 %."""
    tables = policy_comparison.read_replay_tables(
        reference / "energaizer" / "measurements" / "a100_pcie_40gb_dvfs.csv"
    )
    comparison = compare_policies(tables, PolicySetup(), [PolicyName.HARMONIA])
    excess = sorted(o.shares["ed2_over_oracle"] for o in comparison.outcomes)
    assert len(excess) == 20
    assert np.mean(excess) < 0.03
    assert excess[16] < 0.011
    assert excess[-1] < 0.29


def test_a100_forecast_bounds_hold_with_the_promised_chance(a100: list, reference: Path) -> None:
    """At its word, an earlier forecast broke its bound at 2, 3, 5, 8 and 15 % in 1, 1, 4, 2 and 2
    of 14 applications.
    Margins come from how it missed other model families."""
    gpu, found = api.find_gpu("a100-pcie-40gb"), {}
    for tables in a100:
        found |= clock_forecast.forecast_applications(
            tables, gpu, reference / "energaizer" / "workloads"
        )[0]
    errors = clock_forecast.measure_slowdown_errors(a100, found)
    kept, saved = [], []
    for percent in range(1, 21):
        goal, chosen = Objective(Goal.ENERGY, slowdown=percent / 100), {}
        for tables in a100:
            chosen |= clock_forecast.choose_forecast_settings(tables, found, goal, errors)
        outcomes = compare_policies(
            a100, PolicySetup(objective=goal, forecast=chosen), [PolicyName.PREDICTIVE]
        ).outcomes
        kept += [o.shares["slowdown"] <= percent / 100 + 1e-9 for o in outcomes]
        saved += [o.shares["energy_saving"] for o in outcomes]
    assert len(kept) == 280
    assert np.mean(kept) >= 0.95
    assert np.mean(saved) > 0.05


@pytest.mark.parametrize("percent", [1, 5, 20])
def test_bounds_hold_under_noise_on_measured_tables(
    a100: list, titan_x: list, percent: int
) -> None:
    """With 1 % noise the controller broke a bound of 1 % in a third of its runs on the Titan X, of
    5 % in a seventh on the A100."""
    goal, kept = Objective(Goal.ENERGY, slowdown=percent / 100), []
    for seed in range(3):
        setup = PolicySetup(objective=goal, noise=MeasurementNoise(0.01, 0.01), seed=seed)
        outcomes = compare_policies([*a100, *titan_x], setup, [PolicyName.HARMONIA]).outcomes
        kept += [o.shares["slowdown"] <= percent / 100 + 1e-9 for o in outcomes]
    assert np.mean(kept) >= 0.95
