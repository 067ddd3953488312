"""What single coefficients of the controller's search mean.

Each test puts the search where a coefficient decides, once on either side.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from wattcast.control import hd7970, policies
from wattcast.control.plants import Knob, KnobRole, Lattice, Observation, Settings
from wattcast.control.policies import ControllerState, Harmonia
from wattcast.control.run_memory import RunMemory, SensitivityBeliefs
from wattcast.control.search_problem import (
    POWER_ELASTICITY,
    ControllerTuning,
    Goal,
    Objective,
    SearchProblem,
    SearchView,
)
from wattcast.control.sensitivity_model import load_shipped_model
from wattcast.control.setting_search import SearchMove, choose_next_move

MEMORY = KnobRole.MEMORY_CLOCK
# Two memory clocks, four in steps of a tenth, and one in steps of 1 %.
TWO = Lattice((Knob(MEMORY, (1.0e9, 1.1e9)),))
COARSE = Lattice((Knob(MEMORY, (1.0e9, 1.1e9, 1.2e9, 1.3e9)),))
FINE = Lattice((Knob(MEMORY, tuple(1e9 * 1.01**step for step in range(70))),))
FINE_CORE = Lattice((Knob(KnobRole.CORE_CLOCK, FINE.knobs[0].levels),))
STEP = math.log(1.3 / 1.2)  # between the two highest levels of COARSE


def observe(settings: Settings, log_time: float = 0.0, log_power: float = 0.0) -> Observation:
    return Observation("k", settings, math.exp(log_time), 100.0 * math.exp(log_power))


def remember(*runs: tuple[int, float, float, int]) -> RunMemory:
    """Remember runs as (level, log of time, log of power, how often)."""
    memory = RunMemory()
    for level, log_time, log_power, count in runs:
        for _ in range(count):
            memory = memory.record(observe((level,), log_time, log_power))
    return memory


def pose(
    lattice: Lattice, objective: Objective | None = None, default: Settings | None = None
) -> SearchProblem:
    start = default or lattice.top
    return SearchProblem(
        lattice, start, start, objective or Objective(), ControllerTuning(), (True,)
    )


def choose(
    lattice: Lattice, memory: RunMemory, bandwidth: float = 0.5, margin: float = 0.0
) -> SearchMove:
    """Choose the next run with a sensitivity to memory that counters gave."""
    beliefs = SensitivityBeliefs(0.5, bandwidth, margin)
    return choose_next_move(pose(lattice), memory, beliefs, None)


def play(lattice: Lattice, log_power: dict[int, float]) -> list[tuple[SearchMove, RunMemory]]:
    """Let the search run until it settles, on a card whose power is that of its level."""
    memory = RunMemory()
    moves = []
    for _ in range(100):
        move = choose(lattice, memory, bandwidth=0.05)
        moves.append((move, memory))
        if move.settled:
            return moves
        memory = memory.record(observe(move.settings, 0.0, log_power[move.settings[0]]))
    raise AssertionError("the search did not settle")


def count_runs(memory: RunMemory) -> set[int]:
    return {record.runs for record in memory.seen.values()}


def test_a_close_rival_runs_twice_before_the_search_goes_on() -> None:
    moves = play(COARSE, {3: 0.0, 2: -0.002, 1: 0.1, 0: 0.2})
    _, before_third = next(
        (move, memory) for move, memory in moves if move.settings not in ((3,), (2,))
    )
    assert count_runs(before_third) == {2}


def test_close_rivals_run_four_times_and_a_doubtful_gain_ten_times() -> None:
    moves = play(TWO, {1: 0.0, 0: -0.0001})
    verifying = next(memory for move, memory in moves if move.why == "verify")
    assert count_runs(verifying) == {4}
    last_move, memory = moves[-1]
    assert 8 <= min(count_runs(memory)) <= max(count_runs(memory)) <= 12
    assert last_move.settings == (1,)  # the default, since no gain was shown


@pytest.mark.parametrize(("errors", "is_adopted"), [(1.15, False), (1.45, True)])
def test_a_setting_must_beat_the_default_by_more_than_a_standard_error(
    errors: float, is_adopted: bool
) -> None:
    view = SearchView(pose(TWO), remember((1, 0.0, 0.0, 4), (0, 0.0, -0.001, 4)), None)
    gain = errors * view.error((1,), (0,))
    move = choose(TWO, remember((1, 0.0, 0.0, 4), (0, 0.0, -gain, 4)))
    assert move.settled is is_adopted


@pytest.mark.parametrize(("gain", "is_rival"), [(0.0035, True), (0.005, False)])
def test_runs_four_tenths_of_a_percent_apart_are_told_apart(gain: float, is_rival: bool) -> None:
    """A power meter of a card repeats to some 0.2 %, so that single runs 0.4 % apart differ."""
    move = choose(TWO, remember((1, 0.0, 0.0, 1), (0, 0.0, -gain, 1)))
    assert (move.why == "again") is is_rival


SLOWDOWN = Objective(Goal.ENERGY, slowdown=0.1)
LIMIT = math.log(1.1)


def view_bound(before_limit: float, runs: int) -> SearchView:
    """Look at a setting that keeps a bound on time by some room, run so often."""
    memory = remember((1, 0.0, 0.0, 1), (0, LIMIT - before_limit, -0.2, runs))
    return SearchView(pose(TWO, SLOWDOWN), memory, None)


@pytest.mark.parametrize(("before_limit", "keeps_bound"), [(0.0012, False), (0.0017, True)])
def test_a_bound_is_kept_by_two_standard_errors_of_time(
    before_limit: float, keeps_bound: bool
) -> None:
    """Times repeat to 0.05 %: the difference of two runs to 0.07 %, of which two are 0.14 %."""
    assert (view_bound(before_limit, 1).score[(0,)] < 10.0) is keeps_bound


@pytest.mark.parametrize(
    ("before_limit", "runs", "is_open"),
    [(0.027, 1, True), (0.036, 1, False), (0.027, 2, True), (0.027, 3, False)],
)
def test_a_setting_within_three_percent_of_its_bound_runs_three_times(
    before_limit: float, runs: int, is_open: bool
) -> None:
    assert ((0,) in view_bound(before_limit, runs).open_bounds) is is_open


def test_what_is_sensed_of_memory_may_be_a_fifth_off() -> None:
    """Sensitivity to memory is 1 less that to the core clock only where nothing else takes time."""
    problem = pose(FINE_CORE)
    sensing = problem.sensing_step(FINE_CORE.top)
    assert sensing is not None
    (low,), ratio = sensing
    memory = remember((FINE_CORE.top[0], 0.0, 0.0, 1), (low, 0.5 * ratio, -0.1, 1))
    low_bound, high_bound = SearchView(problem, memory, None).beliefs.bounds(MEMORY, False)
    assert 0.25 < low_bound < 0.35
    assert 0.65 < high_bound < 0.75


@pytest.mark.parametrize(("promise", "is_tried"), [(-0.0025, False), (-0.0035, True)])
def test_a_step_must_promise_three_thousandths_of_the_score(promise: float, is_tried: bool) -> None:
    """The step from 1.2 to 1.1 GHz is expected to do what that from 1.3 to 1.2 GHz did."""
    next_step = math.log(1.2 / 1.1)
    slowdown = 0.2 * STEP
    saving = 3.0 * slowdown - promise * STEP / next_step
    memory = remember((3, 0.0, 0.0, 4), (2, slowdown, -saving, 4))
    move = choose(COARSE, memory)
    assert (move.settings == (1,)) is is_tried


@pytest.mark.parametrize(("cost", "is_tried"), [(0.042, True), (0.058, False)])
def test_the_smallest_step_is_tried_where_it_costs_little(cost: float, is_tried: bool) -> None:
    """Three levels of 1 % down, where a fine step of 6 % would cost more than it saves."""
    top = FINE.top[0]
    smallest = 3 * math.log(1.01)
    sensitivity = (cost / smallest + POWER_ELASTICITY[MEMORY]) / 3.0
    move = choose(FINE, remember((top, 0.0, 0.0, 1)), sensitivity)
    assert (move.settings == (top - 3,)) is is_tried


@pytest.mark.parametrize(("runs", "is_tried"), [(60, False), (70, True)])
def test_a_risky_probe_may_cost_a_hundredth_of_all_runs(runs: int, is_tried: bool) -> None:
    """Memory at 1/1.6 of its clock takes 1.6^0.35 of the time, or 1.64 of E·D²: 64 runs' worth."""
    lattice = Lattice((Knob(MEMORY, (1.0e9, 1.6e9)),))
    move = choose(lattice, remember((1, 0.0, 0.0, runs)), 0.35, margin=0.35)
    assert (move.settings == (0,)) is is_tried


def test_a_run_that_broke_its_bound_cost_some_twenty_runs() -> None:
    memory = remember((1, 0.0, 0.0, 1), (0, 2.0 * LIMIT, -0.2, 1))
    assert 12.0 < SearchView(pose(TWO, SLOWDOWN), memory, None).loss() < 30.0


@pytest.mark.parametrize(("elasticity", "is_in_force"), [(0.045, False), (0.056, True)])
def test_a_knob_that_moves_power_by_a_twentieth_of_itself_is_in_force(
    elasticity: float, is_in_force: bool
) -> None:
    """A step that changed nothing says nothing of the next one, which may cost time."""
    memory = remember((3, 0.0, 0.0, 8), (2, 0.0, -elasticity * STEP, 8))
    move = choose(COARSE, memory, bandwidth=0.9)
    assert (move.settings == (1,)) is is_in_force


@pytest.mark.parametrize(("sensitivity", "is_tried"), [(0.075, False), (0.09, True)])
def test_a_higher_clock_costs_a_twentieth_of_itself_in_power_at_least(
    sensitivity: float, is_tried: bool
) -> None:
    """Ten percent more clock save time worth 0.3 % of the energy from a sensitivity of 0.08 on."""
    problem = pose(COARSE, Objective(Goal.ENERGY), default=(0,))
    beliefs = SensitivityBeliefs(0.5, sensitivity, 0.0)
    move = choose_next_move(problem, remember((0, 0.0, 0.0, 1)), beliefs, None)
    assert (move.settings == (1,)) is is_tried


def settle(controller: Harmonia) -> ControllerState:
    state = controller.start()
    for _ in range(60):
        settings = controller.settings(state, "k")
        state, _ = controller.step(state, observe(settings, 0.0, -0.1 * settings[0]))
    assert controller.is_settled(state, "k")
    return state


@pytest.mark.parametrize(("change", "is_new"), [(1.09, False), (1.13, True)])
def test_a_tenth_more_time_is_another_phase(change: float, is_new: bool) -> None:
    controller = Harmonia(TWO, TWO.top)
    state = settle(controller)
    for _ in range(2):
        settings = controller.settings(state, "k")
        odd = observe(settings, math.log(change), -0.1 * settings[0])
        state, _ = controller.step(state, odd)
    assert (state.kernels["k"].runs.runs < 10) is is_new


def test_a_settled_kernel_is_looked_at_every_ninth_run(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Harmonia(TWO, TWO.top)
    state = settle(controller)
    looks = []

    def count_look(*arguments: object) -> SearchMove:
        looks.append(arguments)
        return choose_next_move(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(policies, "choose_next_move", count_look)
    for _ in range(45):
        settings = controller.settings(state, "k")
        state, _ = controller.step(state, observe(settings, 0.0, -0.1 * settings[0]))
    assert len(looks) == 5


@pytest.mark.parametrize(("below", "is_lowered"), [(0.004, False), (0.006, True)])
def test_a_clock_one_step_below_was_lowered_and_half_a_step_is_rounding(
    below: float, is_lowered: bool
) -> None:
    """Clocks of an H200 have steps of 15 MHz, 0.8 % of its highest."""
    asked_hz = 1.98e9
    clock_hz = asked_hz * (1.0 - below)
    lattice = Lattice((Knob(KnobRole.CORE_CLOCK, (1.0e9, clock_hz, asked_hz)),))
    controller = Harmonia(lattice, lattice.top)
    run = replace(observe(lattice.top), core_hz=clock_hz)
    state, _ = controller.step(controller.start(), run)
    assert bool(state.kernels["k"].runs.held) is is_lowered


def test_what_counters_predict_of_a_sensitivity_may_be_a_seventh_off() -> None:
    """A controller looks for no saving where a kernel that is 0.15 more sensitive has none."""
    tables = hd7970.load_tables()
    controller = Harmonia(
        tables.lattice, tables.default, model=load_shipped_model("hd7970_simulated")
    )
    kernel = tables.kernels[0]
    counters = {name: float(table[0, -1]) for name, table in tables.counters.items()}
    seen = Observation(kernel, tables.default, 0.01, 230.0, counters=counters)
    state, _ = controller.step(controller.start(), seen)
    beliefs = state.kernels[kernel].beliefs
    assert beliefs is not None
    assert beliefs.bandwidth is not None
    low, high = beliefs.bounds(KnobRole.MEMORY_CLOCK, False)
    edges = [abs(edge - beliefs.bandwidth) for edge in (low, high) if 0.0 < edge < 1.0]
    assert edges
    assert 0.12 < max(edges) < 0.18
