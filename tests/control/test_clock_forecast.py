"""Our predictor as plant and policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wattcast.control import clock_forecast, policy_comparison
from wattcast.control.clock_forecast import ClockCurves
from wattcast.control.plants import KnobRole
from wattcast.control.policies import PolicyName, PolicySetup
from wattcast.control.policy_comparison import compare_policies
from wattcast.control.search_problem import Goal, Objective
from wattcast.core.errors import BadInput
from wattcast.predictor import api
from wattcast.predictor.kernel_coefficients import MEMORY_KNEE

A100 = api.find_gpu("a100-pcie-40gb")


def test_clocks_lie_on_the_cards_own_steps() -> None:
    clocks = np.asarray(clock_forecast.list_core_clocks(A100))
    assert clocks[-1] == 1410e6
    assert ((1410e6 - clocks) % 15e6 == 0).all()
    assert len(clocks) <= clock_forecast.LEVELS


def test_memory_clock_and_sms_are_knobs_of_a_catalogue_gpu() -> None:
    h200, options = api.find_gpu("h200"), {"batch": 8, "phase": "decode"}
    roles = (KnobRole.CORE_CLOCK, KnobRole.MEMORY_CLOCK, KnobRole.COMPUTE_UNITS)
    plain = clock_forecast.build_predicted_plant({"gpt2": "gpt2"}, h200, options, iterations=50)
    tables = clock_forecast.build_predicted_plant({"gpt2": "gpt2"}, h200, options, 50, roles)
    units, clocks, memory = tables.lattice.shape
    assert (clocks, memory) == (plain.lattice.count, 2)
    time_s = tables.time_s.reshape(units, clocks, memory)
    np.testing.assert_allclose(time_s[-1, :, -1], plain.time_s[0])
    assert (time_s[:, :, 0] > 0.999999 * time_s[:, :, 1]).all()  # slower memory
    assert time_s[0, -1, -1] >= time_s[-1, -1, -1]
    (mine,) = compare_policies([tables], PolicySetup(), [PolicyName.HARMONIA]).outcomes
    assert mine.shares["objective_over_oracle"] < 0.02
    alone = clock_forecast.build_predicted_plant(
        {"gpt2": "gpt2"}, h200, options, 50, [KnobRole.MEMORY_CLOCK]
    )
    assert [knob.role for knob in alone.lattice.knobs] == [KnobRole.MEMORY_CLOCK]
    np.testing.assert_allclose(alone.time_s, time_s[-1:, -1])
    with pytest.raises(BadInput, match="no two memory clocks"):
        clock_forecast.build_predicted_plant(
            {"gpt2": "gpt2"}, api.find_gpu("b200"), options, 5, roles
        )


def test_a_forecast_picks_what_its_own_plant_rewards() -> None:
    """On a plant that is the predictor itself, taking the prediction at its word is the oracle."""
    tables = clock_forecast.build_predicted_plant(
        {"gpt2": "gpt2"}, A100, {"batch": 8, "seq": 512}, iterations=20
    )
    objective = Objective(Goal.ENERGY, slowdown=0.1)
    time_s, power_w = tables.time_s[0], tables.power_w[0]
    scores = objective.log_scores(time_s, power_w, time_s[tables.default[0]])
    at_its_word = {
        "gpt2": (int(np.argmax(scores <= scores.min() + 1e-6)),)
    }  # of equal ones the lowest clock
    setup = PolicySetup(objective=objective, forecast=at_its_word)
    comparison = compare_policies([tables], setup)
    (mine,) = comparison.for_policy(PolicyName.PREDICTIVE)
    assert mine.shares["objective_over_oracle"] == pytest.approx(0.0, abs=1e-12)
    (guided,) = comparison.for_policy(PolicyName.GUIDED)
    assert guided.shares["objective_over_oracle"] < 0.01


def test_names_of_runs_lead_to_workloads(tmp_path: Path) -> None:
    name = "gpt2model_gpt2_pfp32_b32_s128_modeprefill_attneager"
    model, options = clock_forecast.find_named_workload(name, None)
    assert model == "gpt2"
    assert options == {
        "batch": 32,
        "seq": 128,
        "dtype": "fp32",
        "phase": "prefill",
        "attention": "eager",
        "head": "none",
    }
    assert (
        clock_forecast.find_named_workload("optmodel_opt-1p3b_pbf16_b2_s2048_modeprefill", None)[0]
        == "opt-1.3b"
    )
    assert (
        clock_forecast.find_named_workload("bertmodel_large_pbf16_b8_s512_modeprefill", None)[0]
        == "bert-large"
    )
    listed = tmp_path / "gpt2model_gpt2_pfp32_b32_s128_modeprefill.json"
    listed.write_text("[]")
    assert clock_forecast.find_named_workload(name, tmp_path) == (listed, {})
    with pytest.raises(BadInput, match="--workloads"):
        clock_forecast.find_named_workload("2mm", None)


def curves(core: float, limit_w: float = 1e3) -> ClockCurves:
    """A workload of which this share of the time at the top clock follows the core clock."""
    clock_hz = np.linspace(0.5e9, 1.4e9, 64)
    stretch = clock_hz[-1] / clock_hz
    time_s = core * stretch + 1.0 - core
    power_w = 50.0 + 200.0 / time_s / stretch**1.6
    return ClockCurves(clock_hz, time_s, power_w, np.full(64, 50.0), limit_w)


LEVELS_HZ = np.linspace(0.5e9, 1.4e9, 10)


@pytest.mark.parametrize("core", [0.0, 0.3, 1.0])
def test_time_is_split_into_what_follows_the_core_clock_and_what_does_not(core: float) -> None:
    assert clock_forecast.split_core_time(curves(core)) == pytest.approx((core, 1 - core), abs=1e-9)


def test_the_path_to_dram_follows_the_clock_below_the_knee_and_costs_no_energy() -> None:
    """As on the Titan X: time put down to the knee, then one to one. With no time in DRAM nothing
    changes.
    """
    all_dram = curves(0.0)
    time_s, power_w = clock_forecast.estimate_card_behaviour(all_dram, LEVELS_HZ)
    above = LEVELS_HZ >= MEMORY_KNEE * 1.4e9
    assert 0 < above.sum() < 10
    assert time_s[above] == pytest.approx(np.ones(above.sum()), rel=1e-3)
    assert time_s[~above] == pytest.approx(MEMORY_KNEE * 1.4e9 / LEVELS_HZ[~above], rel=1e-3)
    free_w = np.interp(LEVELS_HZ, all_dram.clock_hz, all_dram.power_w)
    assert (power_w - 50.0) * time_s == pytest.approx(free_w - 50.0, rel=5e-3)
    all_core = curves(1.0)
    time_s, power_w = clock_forecast.estimate_card_behaviour(all_core, LEVELS_HZ)
    assert time_s == pytest.approx(np.interp(LEVELS_HZ, all_core.clock_hz, all_core.time_s))
    assert power_w == pytest.approx(np.interp(LEVELS_HZ, all_core.clock_hz, all_core.power_w))


def test_a_power_limit_makes_high_clocks_one_state_and_the_lowest_of_them_is_taken() -> None:
    held = curves(1.0, limit_w=150.0)
    time_s, power_w = clock_forecast.estimate_card_behaviour(held, LEVELS_HZ)
    limit_w = clock_forecast.ESTIMATES.held_share * 150.0
    assert power_w.max() == pytest.approx(limit_w)
    plateau = np.isclose(power_w, limit_w)
    assert 2 <= plateau.sum() < 10
    assert (time_s[plateau] == time_s[-1]).all()
    level = clock_forecast.choose_clock_level(held, LEVELS_HZ, Objective(), 9, worth=1e-6)
    assert level == int(np.argmax(plateau))


def test_a_slowdown_bound_holds_on_the_path_to_dram() -> None:
    objective = Objective(Goal.ENERGY, slowdown=0.10)
    level = clock_forecast.choose_clock_level(curves(0.5), LEVELS_HZ, objective, 9, worth=0.0)
    time_s, _ = clock_forecast.estimate_card_behaviour(curves(0.5), LEVELS_HZ)
    slow = time_s / time_s[9] - 1
    assert slow[level] <= 0.10 < slow[level - 1]


def test_the_knee_is_the_titan_x_s(reference: Path) -> None:
    """Microbenchmarks that follow the memory clock: their time over the core clock gives the knee
    to a percent.
    """
    (tables,) = policy_comparison.read_replay_tables(
        reference / "titanx" / "micro_time_power_by_clock.csv"
    )
    core_hz, memory_hz = (np.array(knob.levels) for knob in tables.lattice.knobs)
    time_s = tables.time_s.reshape(len(tables.kernels), len(core_hz), len(memory_hz))
    follows = -np.log(time_s[:, -1, -1] / time_s[:, -1, -2]) / np.log(memory_hz[-1] / memory_hz[-2])
    bound = time_s[follows > 0.85, :, -1]
    assert len(bound) == 16
    slower = np.median(bound / bound[:, [-1]], axis=0)
    assert slower == pytest.approx(np.maximum(1.0, MEMORY_KNEE * core_hz[-1] / core_hz), rel=0.02)
