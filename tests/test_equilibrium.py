"""The clock under a power limit."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast.equilibrium import settle
from wattcast.fitted import bundle_for
from wattcast.flow import analyse, at_clock
from wattcast.hardware import OperatingPoint, load
from wattcast.workload.graph import Graph, Linear

HEAVY = Graph.of("heavy", [Linear(8192, 8192, 8192, count=10)])


@pytest.fixture
def parts():
    gpu = load("h200")
    bundle = bundle_for(gpu)
    return analyse(HEAVY, gpu, bundle), gpu, bundle


def test_a_capped_workload_draws_what_the_governor_makes_of_the_limit(parts) -> None:
    """An H200 at its cap settles at 99.3 % of the limit, not at the limit."""
    timeline, gpu, bundle = parts
    limits = np.array([300.0, 400.0, 500.0, 600.0])[:, None]
    settled = settle(timeline, gpu, OperatingPoint(power_limit_w=limits), bundle)
    assert settled.capped.all()
    assert settled.met.all()
    assert_allclose(at_clock(timeline, settled.at, bundle).power_w, bundle.settles * limits[:, 0], rtol=1e-6)


def test_an_uncapped_workload_runs_at_the_clock_asked_for(parts) -> None:
    timeline, gpu, bundle = parts
    settled = settle(timeline, gpu, OperatingPoint(clock_hz=1.2e9, power_limit_w=2000.0), bundle)
    assert not settled.capped
    assert settled.clock_hz[..., 0] == 1.2e9


def test_a_locked_clock_is_lowered_too_when_the_limit_does_not_allow_it(parts) -> None:
    timeline, gpu, bundle = parts
    settled = settle(timeline, gpu, OperatingPoint(clock_hz=1.8e9, power_limit_w=400.0), bundle)
    assert settled.capped
    assert settled.clock_hz[..., 0] < 1.8e9


def test_a_limit_nobody_can_meet_gives_the_lowest_clock_and_says_so(parts) -> None:
    timeline, gpu, bundle = parts
    settled = settle(timeline, gpu, OperatingPoint(power_limit_w=50.0), bundle)
    assert not settled.met
    assert settled.clock_hz[..., 0] == gpu.clocks.min_hz


def test_the_limit_is_the_highest_clock_that_meets_it(parts) -> None:
    timeline, gpu, bundle = parts
    settled = settle(timeline, gpu, OperatingPoint(power_limit_w=500.0), bundle)
    step_hz = 1e6
    above = OperatingPoint(clock_hz=settled.clock_hz + step_hz)
    assert at_clock(timeline, above, bundle).power_w > bundle.settles * 500.0
