"""What the priors and the bounds of the fit of latencies mean."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from wattcast.calibrate.latency_fit import (
    LATENCY_FIT,
    _fit_lengths,
    fit_trees,
    refit_correction,
)
from wattcast.core.arrays import Array
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.predictor.ideal_terms import IdealTerms
from wattcast.predictor.kernel_phases import Correction

GRID = np.linspace(-2.0, 2.0, 12)[:, np.newaxis]


def list_corrections() -> Array:
    """Return the corrections of the H200's bundle, ``(group, term)``."""
    bundle = shipped_bundle("h200")
    assert bundle is not None
    return np.array(
        [
            [c.compute, c.memory, c.fixed_s, c.l2, c.serial_cycle]
            for c in bundle.corrections.values()
        ]
    )


def test_a_feature_that_explains_nothing_keeps_a_length_of_four_to_five_deviations() -> None:
    random = np.random.default_rng(1)
    rows = random.normal(size=(40, 1))
    noise = 0.1 * random.normal(size=40)
    inverse_length = _fit_lengths(rows, noise - noise.mean())[0][0]
    assert 4.0 < 1.0 / inverse_length < 5.0


def test_a_dozen_rows_of_a_wave_shorten_its_length_to_less_than_two_deviations() -> None:
    """They say 1.5 or less where no prior pulls, and the prior alone 4.5."""
    inverse_length = _fit_lengths(GRID, np.sin(2.5 * GRID[:, 0]))[0][0]
    assert 1.6 < 1.0 / inverse_length < 1.8


def test_rows_without_an_error_are_taken_to_have_one_of_half_a_percent() -> None:
    noise = _fit_lengths(GRID, 0.5 * np.sin(GRID[:, 0]))[2]
    assert np.sqrt(noise) == pytest.approx(0.0045, rel=0.1)


def test_no_residual_is_taken_for_more_than_a_factor_of_ninety() -> None:
    variance = _fit_lengths(GRID, 200.0 * np.sin(GRID[:, 0]))[1]
    assert 80.0 < np.exp(np.sqrt(variance)) < 95.0


def test_neighbours_a_fifth_of_a_deviation_apart_still_tell_of_each_other() -> None:
    rows = np.linspace(-2.0, 2.0, 60)[:, np.newaxis]
    target = np.random.default_rng(3).choice([-1.0, 1.0], 60)
    inverse_length = _fit_lengths(rows, target)[0][0]
    assert 0.2 < 1.0 / inverse_length < 0.25


def test_a_search_begins_where_families_of_a_measured_card_are() -> None:
    """Memory and fixed time of the H200, at the median, within a quarter."""
    median = np.median(list_corrections(), axis=0)
    off = np.log(np.array(LATENCY_FIT.start) / median)
    assert np.abs(off[[1, 2]]).max() < 0.25


def test_no_correction_of_a_measured_card_is_beyond_the_bounds() -> None:
    corrections = list_corrections()
    is_fitted = corrections > 0
    low, high = np.array(LATENCY_FIT.lowest), np.array(LATENCY_FIT.highest)
    assert (~is_fitted | (corrections >= low * (1 - 1e-9)))[:, 1].all()
    assert (corrections <= high * (1 + 1e-9)).all()


def test_rows_far_off_pull_a_group_by_a_twentieth() -> None:
    """Five of 25 rows take 0.8 longer in logs: their mean would pull by 0.16, a median by 0."""
    errors = np.array([0.0] * 20 + [0.8] * 5)
    terms_s = {"dram_s": np.full(len(errors), 1e-3)}
    nothing = np.zeros(len(errors))
    terms = IdealTerms(
        **{item.name: terms_s.get(item.name, nothing) for item in fields(IdealTerms)}
    )
    family = Correction(compute=1.2, memory=1.2, fixed_s=2e-6, l2=1.0, serial_cycle=20.0)
    measured_s = np.exp(errors) * 1.2e-3
    group = refit_correction(terms, measured_s, np.full(len(errors), 1.98e9), family)
    assert np.log(group.memory / family.memory) == pytest.approx(0.05, abs=0.01)


def learn(target: Array, **options: int) -> Array:
    """Return what trees learn of a target over one feature."""
    column = np.arange(len(target), dtype=float)[:, np.newaxis]
    trees = fit_trees(("place",), column, target, loss="squared_error", **options)
    return np.asarray(trees.sum_trees(column))


def test_a_tree_tells_about_ten_levels_apart() -> None:
    stairs = np.repeat(np.arange(16.0), 10)
    assert 9 <= len(np.unique(np.round(learn(stairs, trees=1), 9))) <= 11


def test_a_leaf_of_seven_rows_moves_by_seven_eighths_of_a_step() -> None:
    target = (np.arange(200) >= 193).astype(float)
    learned = learn(target, trees=1)
    assert (learned[-1] - learned[0]) / LATENCY_FIT.tree_rate == pytest.approx(7 / 8, abs=0.02)


def test_trees_leave_less_than_a_millionth_of_a_step() -> None:
    learned = learn((np.arange(200) >= 100).astype(float))
    assert 1.0 - (learned[-1] - learned[0]) < 1e-6
