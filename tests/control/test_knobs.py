"""Knobs, objectives, sensitivities and beliefs, each by itself."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattcast.control.plants import Knob, KnobRole, Lattice, Observation
from wattcast.control.run_memory import RunMemory, SensitivityBeliefs
from wattcast.control.search_problem import (
    ControllerTuning,
    Goal,
    Objective,
    SearchProblem,
    SearchView,
)
from wattcast.control.sensitivity_model import SensitivityBin, bin_sensitivity, load_shipped_model
from wattcast.core.errors import BadInput, MissingEvents

positive = st.floats(1e-3, 1e3)


def lattice() -> Lattice:
    return Lattice(
        (Knob(KnobRole.CORE_CLOCK, (1e9, 1.5e9, 2e9)), Knob(KnobRole.MEMORY_CLOCK, (1e9, 3e9)))
    )


def test_flat_positions_follow_the_order_of_all_settings() -> None:
    found = lattice()
    assert [found.flat_index(at) for at in product(range(3), range(2))] == list(range(found.count))
    assert all(found.settings_at(found.flat_index(at)) == at for at in product(range(3), range(2)))
    np.testing.assert_array_equal(found.knob_values(KnobRole.MEMORY_CLOCK), [1e9, 3e9] * 3)


@pytest.mark.parametrize("levels", [(), (2.0, 1.0), (1.0, 1.0), (0.0, 1.0)])
def test_bad_knobs_are_refused(levels: tuple[float, ...]) -> None:
    with pytest.raises(BadInput, match="levels"):
        Knob(KnobRole.CORE_CLOCK, levels)


@given(positive, positive)
def test_scores_are_logs_of_the_objective(time_s: float, power_w: float) -> None:
    for goal, power in ((Goal.ED2, 3), (Goal.ED, 2), (Goal.ENERGY, 1)):
        value = Objective(goal).log_scores(np.array(time_s), np.array(power_w), np.array(1.0))
        assert np.exp(value) == pytest.approx(power_w * time_s**power, rel=1e-9)


@given(
    positive,
    positive,
    positive,
    st.sampled_from(list(Goal)),
    st.none() | st.floats(0, 1),
    st.none() | positive,
)
def test_the_scores_of_a_decision_and_of_a_table_agree(
    time_s: float,
    power_w: float,
    reference_s: float,
    goal: Goal,
    slowdown: float | None,
    cap_w: float | None,
) -> None:
    """The controller scores plain numbers, policies that know the tables score arrays and need no
    margin.
    """
    found, objective = lattice(), Objective(goal, slowdown, None, cap_w)
    tuning = ControllerTuning(bound_sigmas=0.0)
    problem = SearchProblem(found, found.top, found.top, objective, tuning, (True, True))
    memory = RunMemory().record(Observation("k", found.top, reference_s, 100.0))
    memory = memory.record(Observation("k", found.bottom, time_s, power_w))
    one = SearchView(problem, memory, None).score[found.bottom]
    many = objective.log_scores(np.array([time_s]), np.array([power_w]), np.array([reference_s]))
    assert one == pytest.approx(float(many[0]), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("bad", [{"cap_w": 0.0}, {"latency_s": float("nan")}, {"slowdown": -0.1}])
def test_bad_bounds_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(BadInput):
        Objective(Goal.ED2, **bad)


def test_table_3_as_printed() -> None:
    """Table 3, worked by hand for one set of counters (paper 004)."""
    model = load_shipped_model()
    counters = {
        "VALUBusy": 50.0,
        "VALUUtilization": 80.0,
        "MemUnitBusy": 40.0,
        "MemUnitStalled": 10.0,
        "WriteUnitStalled": 2.0,
        "NormVGPR": 0.1,
        "NormSGPR": 0.2,
        "icActivity": 0.3,
    }
    compute, bandwidth = model.predict(counters)
    assert compute == pytest.approx(0.06 + 0.007 * 100.0 + 0.452 * 0.1 + 0.024 * 0.2)
    by_hand = (
        -0.42
        + 0.003 * 80
        + 0.011 * 2
        + 0.01 * 40
        - 0.004 * 10
        + 1.003 * 0.3
        + 1.158 * 0.1
        - 0.731 * 0.2
    )
    assert bandwidth == pytest.approx(by_hand)


def test_a_missing_counter_is_named() -> None:
    with pytest.raises(MissingEvents, match="WriteUnitStalled"):
        load_shipped_model().predict(
            {"VALUBusy": 1.0, "MemUnitBusy": 2.0, "NormVGPR": 0.1, "NormSGPR": 0.1}
        )


def test_bins_have_the_edges_of_the_paper() -> None:
    assert [bin_sensitivity(s) for s in (0.0, 0.2999, 0.3, 0.5, 0.7, 0.7001, 1.0)] == [
        SensitivityBin.LOW,
        SensitivityBin.LOW,
        SensitivityBin.MEDIUM,
        SensitivityBin.MEDIUM,
        SensitivityBin.MEDIUM,
        SensitivityBin.HIGH,
        SensitivityBin.HIGH,
    ]


@given(st.floats(0, 1), st.floats(0, 1))
def test_beliefs_bound_the_sensitivities_they_were_made_of(units: float, rest: float) -> None:
    """A kernel follows the clock at least as much as the units; both lie within the bounds of their
    mean.
    """
    clock = units + rest * (1 - units)
    beliefs = SensitivityBeliefs(0.5 * (units + clock), None, 0.0)
    for role, value in ((KnobRole.COMPUTE_UNITS, units), (KnobRole.CORE_CLOCK, clock)):
        low, high = beliefs.bounds(role, has_units=True)
        assert low - 1e-9 <= value <= high + 1e-9


def test_coarse_targets_fall_with_the_bins() -> None:
    tuning = ControllerTuning()
    found = Lattice(
        (
            Knob(KnobRole.CORE_CLOCK, (1e9, 1.5e9, 1.8e9, 2e9)),
            Knob(KnobRole.MEMORY_CLOCK, (1e9, 2e9, 3e9)),
        )
    )
    assert tuning.coarse_target(found, SensitivityBin.HIGH, SensitivityBin.HIGH) == found.top
    low = tuning.coarse_target(found, SensitivityBin.LOW, SensitivityBin.LOW)
    assert all(a <= b for a, b in zip(low, found.top, strict=True))
    assert low != found.top
