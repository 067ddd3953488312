"""The search under a power cap: judged by application, all of them, against the capped oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wattcast.control import clock_forecast, hd7970, policy_comparison
from wattcast.control.plants import (
    Knob,
    KnobRole,
    Lattice,
    MeasurementNoise,
    Observation,
    PlantTables,
    play_application,
)
from wattcast.control.policies import Harmonia, PolicyName, PolicySetup
from wattcast.control.search_problem import Goal, Objective
from wattcast.control.sensitivity_model import load_shipped_model
from wattcast.predictor import api

CAPS_W = (135.0, 150.0, 165.0, 180.0, 195.0, 210.0)
SHARES = (0.60, 0.67, 0.74, 0.81, 0.88, 0.95)  # of the most that any application draws
MODEL = load_shipped_model("hd7970_simulated")
PLAYED = (PolicyName.HARMONIA, PolicyName.STATIC, PolicyName.ORACLE)


def judge(
    tables: PlantTables, objective: Objective, noise: MeasurementNoise | None = None
) -> dict[str, tuple[float, float]]:
    """Return by application how far the controller and the best fixed setting end above the capped
    oracle.
    """
    model = MODEL if tables.counters else None
    setup = PolicySetup(objective, model=model, noise=noise)
    comparison = policy_comparison.compare_policies([tables], setup, PLAYED)
    excess = {}
    for ours, fixed in zip(
        comparison.for_policy(PolicyName.HARMONIA),
        comparison.for_policy(PolicyName.STATIC),
        strict=True,
    ):
        share = "objective_over_oracle"
        excess[ours.application] = (ours.shares[share], fixed.shares[share])
    return excess


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_application_ends_near_its_capped_oracle(step: int) -> None:
    """All fourteen at six caps: before, 21 % over the oracle in the mean and 48.5 % at 150 W, while
    the test left two applications out. None is over 1 % worse than the best fixed setting."""
    tables = hd7970.load_tables()
    excess = []
    for cap_w in CAPS_W[::step]:
        by_application = judge(tables, Objective(cap_w=cap_w))
        assert len(by_application) == 14
        for application, (ours, fixed) in by_application.items():
            assert ours <= fixed + 0.01, (cap_w, application)
            excess.append(ours)
    assert np.mean(excess) < 0.02
    assert max(excess) < 0.25


@pytest.mark.parametrize("seeds", [(1000,), pytest.param((1000, 1001), marks=pytest.mark.slow)])
def test_cards_that_nothing_was_chosen_on_end_near_their_capped_oracles(
    seeds: tuple[int, ...],
) -> None:
    """Perturbed cards; constants were chosen on those of seeds 1 to 6."""
    excess = []
    for seed in seeds:
        tables = hd7970.perturb_simulation(hd7970.load_simulation(), seed)
        most_w = tables.power_w[:, -1].max()
        for share in (0.6, 0.8):
            excess += [ours for ours, _ in judge(tables, Objective(cap_w=share * most_w)).values()]
    assert np.mean(excess) < 0.08


@pytest.mark.parametrize(
    ("goal", "shares"),
    [
        (Goal.ED2, SHARES[1::3]),
        pytest.param(Goal.ED2, SHARES, marks=pytest.mark.slow),
        pytest.param(Goal.ENERGY, SHARES, marks=pytest.mark.slow),
    ],
)
def test_measured_clocks_of_an_a100_end_near_their_capped_oracles(
    goal: Goal, shares: tuple[float, ...], reference: Path
) -> None:
    """All twenty applications of the file, the bimodal ones too."""
    excess = []
    for tables in policy_comparison.read_replay_tables(
        reference / "energaizer" / "measurements" / "a100_pcie_40gb_dvfs.csv"
    ):
        board = replace(tables, limit_w=250.0)
        most_w = board.power_w[:, -1].max()
        for share in shares:
            objective = Objective(goal, cap_w=share * most_w)
            excess += [ours for ours, _ in judge(board, objective).values()]
    assert len(excess) == 20 * len(shares)
    assert np.mean(excess) < 0.015


@pytest.mark.parametrize("gpu", ["h200", "a100-pcie-40gb"])
def test_predicted_planes_end_near_their_capped_oracles(gpu: str) -> None:
    """Core clocks and SMs; the search is told nothing but the board's power limit."""
    workloads = {name: name for name in ("llama3-8b", "resnet50")}
    roles = (KnobRole.CORE_CLOCK, KnobRole.COMPUTE_UNITS)
    tables = clock_forecast.build_predicted_plant(workloads, api.find_gpu(gpu), roles=roles)
    most_w = tables.power_w[:, -1].max()
    excess = []
    for share in SHARES[::2]:
        excess += [ours for ours, _ in judge(tables, Objective(cap_w=share * most_w)).values()]
    assert np.mean(excess) < 0.02


@pytest.mark.parametrize("caps_w", [CAPS_W[::4], pytest.param(CAPS_W, marks=pytest.mark.slow)])
def test_the_first_run_of_a_kernel_keeps_the_cap(caps_w: tuple[float, ...]) -> None:
    """The default was run first, whatever the cap. Later tries break it seldom and by little."""
    tables = hd7970.load_tables()
    over = 0
    runs = 0
    for cap_w in caps_w:
        controller = Harmonia(
            tables.lattice, tables.default, Objective(cap_w=cap_w), MODEL, limit_w=tables.limit_w
        )
        for application in tables.applications:
            played, _ = play_application(tables, application, controller)
            power_w = played.energy_j / played.time_s
            kernels = [tables.kernels[phase] for phase in played.phase]
            first_runs = [kernels.index(kernel) for kernel in dict.fromkeys(kernels)]
            assert power_w[first_runs].max() <= cap_w, application
            over += int((power_w > cap_w).sum())
            runs += len(power_w)
            assert power_w.max() < 1.06 * cap_w
    assert over < 0.015 * runs


def test_a_cap_above_the_board_changes_no_first_run() -> None:
    tables = hd7970.load_tables()
    controller = Harmonia(
        tables.lattice, tables.default, Objective(cap_w=400.0), MODEL, limit_w=tables.limit_w
    )
    assert controller.settings(controller.start(), "any") == tables.default


def test_a_slowdown_is_measured_against_the_default_even_under_a_cap() -> None:
    tables = hd7970.load_tables()
    objective = Objective(Goal.ENERGY, slowdown=0.3, cap_w=180.0)
    controller = Harmonia(tables.lattice, tables.default, objective, limit_w=tables.limit_w)
    assert controller.settings(controller.start(), "any") == tables.default


def test_a_core_clock_that_turns_alone_leaves_other_knobs_where_they_are() -> None:
    tables = hd7970.load_tables()
    objective = Objective(cap_w=165.0)
    free = tuple(knob.role is KnobRole.CORE_CLOCK for knob in tables.lattice.knobs)
    controller = Harmonia(
        tables.lattice, tables.default, objective, MODEL, free=free, limit_w=tables.limit_w
    )
    played, _ = play_application(tables, "SRAD", controller)
    chosen = [tables.lattice.settings_at(int(index)) for index in np.unique(played.chosen)]
    assert {(units, memory) for units, _, memory in chosen} == {(7, 6)}


def test_noise_of_one_percent_leaves_the_end_near_the_capped_oracle() -> None:
    noise = MeasurementNoise(0.01, 0.01)
    excess = judge(hd7970.load_tables(), Objective(cap_w=165.0), noise)
    assert np.mean([ours for ours, _ in excess.values()]) < 0.08


def test_clocks_that_a_governor_holds_are_one_state_under_a_cap() -> None:
    """A card at its own limit runs below the set clock; clocks above are not tried one by one."""
    levels_hz = tuple(0.9e9 + 30e6 * step for step in range(18))
    lattice = Lattice((Knob(KnobRole.CORE_CLOCK, levels_hz),))
    controller = Harmonia(lattice, lattice.top, Objective(cap_w=240.0))
    state = controller.start()
    tried = []
    for _ in range(30):
        settings = controller.settings(state, "k")
        tried.append(settings)
        runs_hz = min(levels_hz[settings[0]], 1.22e9)
        power_w = 60.0 + 190.0 * (runs_hz / 1.22e9) ** 3
        seen = Observation("k", settings, 1e9 / runs_hz, power_w, core_hz=runs_hz)
        state, _ = controller.step(state, seen)
    end_hz = levels_hz[controller.settings(state, "k")[0]]
    assert 60.0 + 190.0 * (end_hz / 1.22e9) ** 3 <= 240.0
    assert end_hz >= 1.17e9
    assert len(set(tried)) <= 6
