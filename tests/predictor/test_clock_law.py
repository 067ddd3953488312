"""The supply lowers the clock of tensor kernels; a higher set clock and faster memory slow none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wattcast.hardware import load_gpu
from wattcast.predictor.bundle import shipped_bundle
from wattcast.predictor.pipeline import analyse_graph
from wattcast.predictor.timeline import (
    ClockLaw,
    KernelPhase,
    Timeline,
    compute_effective_hz,
    compute_kernel_s,
)
from wattcast.workload.readers.one_operator import graph_of_operator

COUNT = 4000


@pytest.fixture(scope="module")
def law() -> ClockLaw:
    bundle = shipped_bundle("h200")
    assert bundle is not None
    assert bundle.clock_law is not None
    return bundle.clock_law


def draw_timeline(seed: int) -> Timeline:
    """Return a product on thousands of designs, from far below to far above what memory feeds."""
    gpu = load_gpu("h200")
    bundle = shipped_bundle("h200")
    assert bundle is not None
    timeline = analyse_graph(graph_of_operator("linear", "4096x4096x4096"), gpu, bundle)
    random = np.random.default_rng(seed)
    main = random.uniform(1e5, 1e6, (COUNT, 1))
    seconds = main / 1.98e9 * np.exp(random.uniform(-0.7, 0.7, (COUNT, 1)))
    ends = main * random.uniform(0.0, 0.3, (COUNT, 1))
    phases = (
        KernelPhase("start", None, random.uniform(1e-6, 5e-6, (COUNT, 1))),
        KernelPhase("main", main, seconds),
        KernelPhase("results", ends, ends / 1.98e9 * random.uniform(0.5, 1.5, (COUNT, 1))),
    )
    tensor_cycles = main * random.uniform(0.3, 1.0, (COUNT, 1))
    return replace(timeline, phases=phases, tensor_cycles=tensor_cycles)


def run_s(timeline: Timeline, clock_hz: float, law: ClockLaw) -> np.ndarray:
    running_hz = compute_effective_hz(timeline, np.array([clock_hz]), law)
    return compute_kernel_s(timeline.phases, running_hz)


def test_a_higher_set_clock_never_runs_slower_under_the_supply(law: ClockLaw) -> None:
    """Above a load of 0.82 the line that was fitted falls faster than the clock rises: a set clock
    of 1,980 MHz was once 1.6 % slower than 1,800 MHz.
    """
    set_hz = np.linspace(0.3e9, 2.5e9, 2000)
    effective_hz = set_hz * law.carry(np.array(law.load(set_hz)))
    assert (np.diff(effective_hz) >= -1e-6).all()
    # it is the line itself where that rises
    low = np.linspace(0.0, 0.8, 100)
    assert law.carry(low) == pytest.approx(np.interp(low, law.activity, law.ratio), rel=1e-12)


def test_activity_counts_waits_in_cycles_of_the_effective_clock(law: ClockLaw) -> None:
    """The ratio y is that of the load over Σ max(cycles, seconds·f·y), to a billionth."""
    timeline = draw_timeline(seed=1)
    set_hz = 1.98e9
    ratio = compute_effective_hz(timeline, np.array([set_hz]), law) / set_hz
    start, *others = timeline.phases
    assert start.seconds is not None
    cycles = start.seconds * set_hz
    for phase in others:
        assert phase.cycles is not None
        assert phase.seconds is not None
        cycles = cycles + np.maximum(phase.cycles, phase.seconds * set_hz * ratio)
    expected = law.carry(timeline.tensor_cycles * law.load(np.array(set_hz)) / cycles)
    assert np.abs(ratio - expected).max() < 1e-9


@pytest.mark.parametrize("what", ["memory", "results", "products", "clock"])
def test_nothing_that_is_faster_slows_a_kernel_under_the_supply(law: ClockLaw, what: str) -> None:
    """Activity was taken at the set clock: where memory feeds a kernel faster than it runs, but not
    faster than it would run at the set clock, more bandwidth once made it slower.
    """
    timeline = draw_timeline(seed=2)
    before_s = run_s(timeline, 1.7e9, law)
    start, main, results = timeline.phases
    faster = timeline
    clock_hz = 1.7e9
    if what == "clock":
        clock_hz = 1.8e9
    elif what == "products":
        main = main.change(lambda cycles: cycles / 1.1, lambda seconds: seconds)
        faster = replace(timeline, tensor_cycles=timeline.tensor_cycles / 1.1)
    elif what == "memory":
        main = main.change(lambda cycles: cycles, lambda seconds: seconds / 1.1)
    else:
        results = results.change(lambda cycles: cycles / 1.1, lambda seconds: seconds)
    faster = replace(faster, phases=(start, main, results))
    assert (run_s(faster, clock_hz, law) <= before_s * (1.0 + 1e-9)).all()


def test_any_column_of_a_sweep_may_vary_alone(law: ClockLaw) -> None:
    """The cycles alone did where the rate of shared memory varied, which ended in an error."""
    timeline = draw_timeline(seed=4)
    start, main, results = timeline.phases
    assert main.cycles is not None
    assert main.seconds is not None
    for swept in ("cycles", "seconds"):
        phase = KernelPhase(
            "main",
            main.cycles if swept == "cycles" else main.cycles[0],
            main.seconds if swept == "seconds" else main.seconds[0],
        )
        others = [p.change(lambda x: x[0], lambda x: x[0]) for p in (start, results)]
        some = replace(
            timeline,
            phases=(others[0], phase, others[1]),
            tensor_cycles=timeline.tensor_cycles[0],
        )
        whole = KernelPhase(
            "main",
            np.broadcast_to(phase.cycles, (COUNT, 1)),
            np.broadcast_to(phase.seconds, (COUNT, 1)),
        )
        spread = replace(some, phases=(others[0], whole, others[1]))
        assert run_s(some, 1.9e9, law) == pytest.approx(run_s(spread, 1.9e9, law), rel=1e-12)


def test_a_design_of_a_sweep_runs_as_it_does_alone(law: ClockLaw) -> None:
    timeline = draw_timeline(seed=3)
    together_s = run_s(timeline, 1.9e9, law)
    for row in range(0, COUNT, 500):
        phases = tuple(
            phase.change(lambda x, row=row: x[row], lambda x, row=row: x[row])
            for phase in timeline.phases
        )
        alone = replace(timeline, phases=phases, tensor_cycles=timeline.tensor_cycles[row])
        assert run_s(alone, 1.9e9, law) == pytest.approx(together_s[row], rel=1e-12)
