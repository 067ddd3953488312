"""Where control draws its lines: what lies just inside counts, and what lies just outside does not."""

from __future__ import annotations

import numpy as np
import pytest

from wattcast.control.plants import Knob, KnobRole, Lattice, build_card_lattice
from wattcast.control.savings import SavingsInterval
from wattcast.control.search_problem import ControllerTuning, Objective, SearchProblem
from wattcast.control.sensitivity_model import SensitivityBin, bin_sensitivity, select_counters
from wattcast.control.site_budget import SiteGpu, SitePlan

# A core clock in steps of 1 %, and one in steps of 100 MHz.
FINE = Lattice((Knob(KnobRole.CORE_CLOCK, tuple(1e9 * 1.01**step for step in range(70))),))
COARSE = Lattice((Knob(KnobRole.CORE_CLOCK, (1.0e9, 1.1e9, 1.2e9, 1.3e9)),))
CORE_HZ = tuple(15e6 * step for step in range(20, 141))  # 300 MHz to 2.1 GHz


@pytest.mark.parametrize(
    ("sensitivity", "expected"),
    [
        (0.27, SensitivityBin.LOW),
        (0.33, SensitivityBin.MEDIUM),
        (0.67, SensitivityBin.MEDIUM),
        (0.73, SensitivityBin.HIGH),
    ],
)
def test_sensitivities_have_the_bins_of_the_paper(
    sensitivity: float, expected: SensitivityBin
) -> None:
    assert bin_sensitivity(sensitivity) is expected


def test_a_card_has_16_clocks_of_its_upper_half_and_8_power_limits() -> None:
    lattice = build_card_lattice(CORE_HZ, (), limits_w=(700.0, 200.0, 700.0))
    clocks, limits = lattice.knobs
    assert clocks.role is KnobRole.CORE_CLOCK
    assert 14 <= len(clocks.levels) <= 16
    assert 1.05e9 <= clocks.levels[0] < 1.2e9
    assert len(limits.levels) == 8
    assert limits.levels[0] == 350.0


@pytest.mark.parametrize(
    ("drawn_w", "limit_w"),
    [
        (470.0, 1.1 * 470.0),  # 94 % of its limit: some room above what it draws
        (480.0, 1.3 * 500.0),  # 96 % of its limit: more than it is allowed now
    ],
)
def test_a_gpu_at_its_limit_is_offered_more_than_one_below(drawn_w: float, limit_w: float) -> None:
    plan = SitePlan(5000.0, (SiteGpu("a", 200.0, 2000.0), SiteGpu("b", 200.0, 2000.0)), 1e6)
    shares = plan.share([drawn_w, 0.0], [500.0, 500.0])
    assert shares[0] == pytest.approx(limit_w)


@pytest.mark.parametrize(("pairs", "is_shown"), [(9, False), (10, True)])
def test_a_saving_is_claimed_from_ten_pairs_on(pairs: int, is_shown: bool) -> None:
    assert SavingsInterval(-0.1, -0.12, -0.08, pairs).is_shown is is_shown


def test_steps_of_the_search_have_their_sizes() -> None:
    """A fine step changes a clock by 6 %, the smallest by 2 %, the sensing step by 9 %, and a risky
    one by half.
    """
    problem = SearchProblem(FINE, FINE.top, FINE.top, Objective(), ControllerTuning(), (True,))
    top = FINE.top[0]
    assert problem.stride_down[0][top] == 7
    assert problem.finest_down[0][top] == 3
    assert problem.sensing_down[0][top] == 10
    assert problem.safe[0][top] == top - 40


def test_the_coarse_step_of_a_clock_alone_goes_down_by_bin() -> None:
    shares = []
    for compute in (SensitivityBin.LOW, SensitivityBin.MEDIUM, SensitivityBin.HIGH):
        (level,) = ControllerTuning().coarse_target(FINE, compute, SensitivityBin.LOW)
        shares.append(FINE.knobs[0].levels[level] / FINE.knobs[0].levels[-1])
    assert shares == pytest.approx([0.855, 0.955, 1.0], abs=0.006)


def test_a_model_of_sensitivity_has_no_more_counters_than_the_longer_one_of_the_paper() -> None:
    """Paper 004 predicts sensitivities with at most seven counters; here all twelve correlate."""
    target = np.linspace(0.0, 1.0, 40)
    wave = np.sin(np.arange(40.0))
    counters = {f"counter {place}": target + 0.02 * place * wave for place in range(12)}
    chosen = select_counters(counters, target)
    assert chosen == list(counters)[:7]
