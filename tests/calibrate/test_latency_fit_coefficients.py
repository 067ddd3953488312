"""What single coefficients of the fit of latencies mean."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from wattcast.calibrate import latency_fit
from wattcast.calibrate.latency_fit import (
    ResidualSample,
    fit_residuals,
    fit_trees,
    refit_correction,
)
from wattcast.core.arrays import Array
from wattcast.hardware import load_gpu
from wattcast.kernels import Kernels, build_kernels
from wattcast.kernels.kernel_table import RunCondition
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.ideal_terms import IdealTerms
from wattcast.predictor.kernel_phases import Correction
from wattcast.workload.operator_types import Linear

GPU = load_gpu("h200")
BUNDLE = bundle_for(GPU)
TOP_HZ = 1.98e9


def build_products(rows: int) -> Kernels:
    ops = tuple(Linear(64 * place, 4096, 4096) for place in range(1, rows + 1))
    conditions = [RunCondition("nt", "weights", "")] * rows
    return build_kernels(ops, conditions, GPU, BUNDLE.reference, ())


def learn_step(trees: int, high_rows: int, rows: int = 4000) -> Array:
    """Return what trees learn of a step of one in the last rows."""
    column = np.arange(rows, dtype=float)[:, None]
    target = (np.arange(rows) >= rows - high_rows).astype(float)
    ensemble = fit_trees(("place",), column, target, trees=trees, loss="squared_error")
    return np.asarray(ensemble.sum_trees(column))


def test_five_to_six_trees_learn_half_of_a_step() -> None:
    """Each learns the rate's share of what is left: half is left after ln 2 over the rate."""
    steps = [learn_step(trees, 2000) for trees in (5, 6)]
    five, six = (float(step[-1] - step[0]) for step in steps)
    assert five < 0.5 < six


@pytest.mark.parametrize(("high_rows", "is_learned"), [(5, False), (7, True)])
def test_a_leaf_needs_six_rows(high_rows: int, is_learned: bool) -> None:
    """Fewer rows share a leaf with others, so that their neighbour below the step seems high."""
    learned = learn_step(150, high_rows, 60)
    assert bool(learned[-1] - learned[-1 - high_rows] > 0.9) is is_learned


@pytest.mark.parametrize(
    ("rows", "has_process", "has_trees"),
    [(7, False, False), (9, True, False), (36, True, False), (46, True, True)],
)
def test_trees_need_forty_rows_and_a_process_eight(
    rows: int, has_process: bool, has_trees: bool
) -> None:
    ratio = 1.0 + 0.1 * np.sin(np.arange(rows))
    factors = fit_residuals([ResidualSample(build_products(rows), ratio)], trees=3)
    assert bool(factors) is has_process
    for factor in factors.values():
        assert (factor.forest is not None) is has_trees


def test_errors_beyond_three_deviations_are_drawn_in() -> None:
    """Of rows with quartiles at ±1, a standard deviation is 1.48; one row is 3.3 of them off."""
    usual = np.linspace(-2.0, 2.0, 401)
    deviation = 1.4826
    target = np.concatenate([usual, [2.5 * deviation, 3.3 * deviation, -9.0 * deviation]])
    drawn = latency_fit._draw_outliers_in(target)[len(usual) :]
    assert drawn[0] == target[-3]
    assert drawn[1] < target[-2] - 0.1 * deviation
    assert drawn[2] > target[-1]


def test_one_row_moves_its_group_by_nine_tenths_of_what_it_is_off() -> None:
    """A kernel that streams from device memory takes a tenth more than its family says."""
    nothing = np.zeros(1)
    streams = {"dram_s": np.array([1e-3])}
    terms = IdealTerms(
        **{item.name: streams.get(item.name, nothing) for item in fields(IdealTerms)}
    )
    family = Correction(compute=1.2, memory=1.2, fixed_s=2e-6, l2=1.0, serial_cycle=20.0)
    off = 0.1
    measured_s = np.array([np.exp(off) * 1.2e-3])
    group = refit_correction(terms, measured_s, np.array([TOP_HZ]), family)
    assert 0.89 < np.log(group.memory / family.memory) / off < 0.93
