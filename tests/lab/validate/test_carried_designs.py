"""Chips of other designs, predicted from the H200 by architecture alone, are judged and ranked."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest

from wattcast.cli.command_output import Environment
from wattcast.cli.main import main
from wattcast.core.strict_files import reference_folder
from wattcast.lab.validate.public_checks.carried_designs import (
    CARRIED_CHIPS,
    CarriedSet,
    compare_chips,
    find_tau,
    judge_carried_designs,
    pool_attention,
)

SHAPES = tuple(range(40))


def make_set(chip: str, work: str, measured: float, predicted: float) -> CarriedSet:
    ones = np.linspace(1e-5, 1e-3, len(SHAPES))
    return CarriedSet(chip, work, SHAPES, predicted * ones, measured * ones)


def test_errors_are_those_of_kernels_long_enough() -> None:
    some = make_set("a", "products bf16", 1.0, 1.1)
    count, mean, median, bias = some.percent_error()
    assert count == 40
    assert mean == pytest.approx(10.0)
    assert median == pytest.approx(10.0)
    assert bias == pytest.approx(100.0 * np.log(1.1))
    assert some.percent_error(1e-4)[0] == int((some.measured_s >= 1e-4).sum())


def test_the_ranking_counts_pairs_in_the_wrong_order() -> None:
    """Three chips: the middle one is predicted slower than the slowest."""
    sets = [
        make_set("fast", "products bf16", 1.0, 1.0),
        make_set("middle", "products bf16", 2.0, 4.0),
        make_set("slow", "products bf16", 3.0, 3.0),
    ]
    pairs = compare_chips(sets)
    assert [pair["chips"] for pair in pairs] == [
        ["fast", "middle"],
        ["fast", "slow"],
        ["middle", "slow"],
    ]
    assert find_tau(pairs) == pytest.approx(1.0 / 3.0)
    assert find_tau([]) is None


def test_chips_are_compared_on_shapes_and_work_they_share() -> None:
    few = CarriedSet("b", "products bf16", SHAPES[:5], np.ones(5), np.ones(5))
    other = make_set("b", "attention decode over bf16", 1.0, 1.0)
    assert compare_chips([make_set("a", "products bf16", 1.0, 1.0), few, other]) == []


def test_attention_of_both_phases_is_judged_together() -> None:
    sets = [
        make_set("a", "attention prefill over bf16", 1.0, 1.1),
        make_set("a", "attention decode over bf16", 1.0, 1.3),
        make_set("a", "products bf16", 1.0, 1.0),
        make_set("b", "attention decode over bf16", 1.0, 1.0),
    ]
    (pooled,) = pool_attention(sets)
    assert pooled.chip == "a"
    count, mean, _, _ = pooled.percent_error()
    assert (count, mean) == (80, pytest.approx(20.0))


def test_without_reference_data_the_command_says_what_is_missing() -> None:
    env = Environment(io.StringIO(), io.StringIO(), variables={"WATTCAST_REFERENCE": "/nowhere"})
    assert main(["lab", "carry-over"], env) != 0
    assert "WATTCAST_REFERENCE" in env.stderr.getvalue()


@pytest.mark.slow
def test_long_kernels_of_all_other_chips_are_within_what_is_asked() -> None:
    """Products within 12 %, attention within 15 %, of eight chips by published numbers alone."""
    folder = reference_folder(dict(os.environ))
    if folder is None:
        pytest.skip("no reference data")
    found = judge_carried_designs(folder, lambda text: None)
    errors = {
        (row["chip"], row["work"], row["least_s"]): row["error_percent"] for row in found.rows()
    }
    for chip in CARRIED_CHIPS:
        assert errors[chip, "products bf16", 1e-4] <= 12.0, chip
        assert errors[chip, "attention, all of it", 1e-4] <= 15.0, chip
    assert found.tau is not None
    assert found.tau >= 0.9
