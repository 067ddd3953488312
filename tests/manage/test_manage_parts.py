"""Knobs, objectives, sensitivities and beliefs, each by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattcast.errors import BadInput, MissingEvents
from wattcast.manage import sensitivity
from wattcast.manage.beliefs import Beliefs
from wattcast.manage.knobs import Knob, Lattice, Role
from wattcast.manage.objective import Goal, Objective
from wattcast.manage.sensitivity import Bin, binned, ic_activity, memory_w, peak_byte_per_s, preset
from wattcast.manage.tuning import Tuning

positive = st.floats(1e-3, 1e3)


def lattice() -> Lattice:
    return Lattice((Knob(Role.CORE_CLOCK, (1e9, 1.5e9, 2e9)), Knob(Role.MEMORY_CLOCK, (1e9, 3e9))))


def test_flat_positions_follow_the_order_of_all_settings() -> None:
    found = lattice()
    assert [found.flat(at) for at in found.all()] == list(range(found.count))
    assert all(found.unflat(found.flat(at)) == at for at in found.all())
    np.testing.assert_array_equal(found.table(Role.MEMORY_CLOCK), [1e9, 3e9] * 3)


@pytest.mark.parametrize("levels", [(), (2.0, 1.0), (1.0, 1.0), (0.0, 1.0)])
def test_bad_knobs_are_refused(levels: tuple[float, ...]) -> None:
    with pytest.raises(BadInput, match="levels"):
        Knob(Role.CORE_CLOCK, levels)


@given(positive, positive, positive, st.sampled_from(list(Goal)), st.none() | st.floats(0, 1), st.none() | positive)
def test_one_score_and_a_table_of_scores_agree(
    time_s: float, power_w: float, reference_s: float, goal: Goal, slowdown: float | None, cap_w: float | None
) -> None:
    objective = Objective(goal, slowdown, None, cap_w)
    one = objective.score(float(np.log(time_s)), float(np.log(power_w)), float(np.log(reference_s)))
    many = objective.scores(np.array([time_s]), np.array([power_w]), np.array([reference_s]))
    assert one == pytest.approx(float(many[0]), rel=1e-6, abs=1e-6)


@given(positive, positive)
def test_scores_are_logs_of_the_objective(time_s: float, power_w: float) -> None:
    for goal, power in ((Goal.ED2, 3), (Goal.ED, 2), (Goal.ENERGY, 1)):
        value = Objective(goal).score(float(np.log(time_s)), float(np.log(power_w)), None)
        assert np.exp(value) == pytest.approx(power_w * time_s**power, rel=1e-9)


@pytest.mark.parametrize("bad", [{"cap_w": 0.0}, {"latency_s": float("nan")}, {"slowdown": -0.1}])
def test_bad_bounds_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(BadInput):
        Objective(Goal.ED2, **bad)


def test_table_3_as_printed() -> None:
    """Table 3, worked by hand for one set of counters (paper 004)."""
    model = preset()
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
    compute, bandwidth = sensitivity.predicted(model, counters)
    assert compute == pytest.approx(0.06 + 0.007 * 100.0 + 0.452 * 0.1 + 0.024 * 0.2)
    by_hand = -0.42 + 0.003 * 80 + 0.011 * 2 + 0.01 * 40 - 0.004 * 10 + 1.003 * 0.3 + 1.158 * 0.1 - 0.731 * 0.2
    assert bandwidth == pytest.approx(by_hand)


def test_a_missing_counter_is_named() -> None:
    with pytest.raises(MissingEvents, match="WriteUnitStalled"):
        sensitivity.predicted(preset(), {"VALUBusy": 1.0, "MemUnitBusy": 2.0, "NormVGPR": 0.1, "NormSGPR": 0.1})


def test_equations_1_2_and_4() -> None:
    """264 GB/s: six controllers of 64 bit, four transfers a clock, at 1375 MHz."""
    assert peak_byte_per_s(1.375e9, 64, 6, 4) == pytest.approx(264e9)
    assert ic_activity(132e9, 264e9) == 0.5
    assert memory_w(200.0, 110.0, 40.0) == 50.0


def test_bins_have_the_edges_of_the_paper() -> None:
    assert [binned(s) for s in (0.0, 0.2999, 0.3, 0.5, 0.7, 0.7001, 1.0)] == [
        Bin.LOW,
        Bin.LOW,
        Bin.MEDIUM,
        Bin.MEDIUM,
        Bin.MEDIUM,
        Bin.HIGH,
        Bin.HIGH,
    ]


@given(st.floats(0, 1), st.floats(0, 1))
def test_beliefs_bound_the_sensitivities_they_were_made_of(units: float, rest: float) -> None:
    """A kernel follows the clock at least as much as the units; both lie within the bounds of their mean."""
    clock = units + rest * (1 - units)
    beliefs = Beliefs(0.5 * (units + clock), None, 0.0)
    for role, value in ((Role.COMPUTE_UNITS, units), (Role.CORE_CLOCK, clock)):
        low, high = beliefs.bounds(role, has_units=True)
        assert low - 1e-9 <= value <= high + 1e-9


def test_coarse_targets_fall_with_the_bins() -> None:
    tuning = Tuning()
    found = Lattice((Knob(Role.CORE_CLOCK, (1e9, 1.5e9, 1.8e9, 2e9)), Knob(Role.MEMORY_CLOCK, (1e9, 2e9, 3e9))))
    assert tuning.coarse_target(found, Bin.HIGH, Bin.HIGH) == found.top
    low = tuning.coarse_target(found, Bin.LOW, Bin.LOW)
    assert all(a <= b for a, b in zip(low, found.top, strict=True))
    assert low != found.top
