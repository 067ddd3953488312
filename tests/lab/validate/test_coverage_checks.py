"""The ledger of coverage: sets of our own hold, and ends are learned from other chips alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wattcast.hardware import load_gpu
from wattcast.lab.validate.public_checks import coverage_checks as coverage
from wattcast.predictor.bundle import bundle_for, forecast_bundle
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.bundle.forecast import forecast_residuals
from wattcast.predictor.prediction_interval import find_ends_name


def made_set(chip: str, group: str, log_ratio: np.ndarray, bundle: Bundle) -> coverage.KernelSet:
    rows = len(log_ratio)
    return coverage.KernelSet(
        f"{chip} made up",
        chip,
        (group,) * rows,
        {"latency": log_ratio},
        np.ones(rows, dtype=bool),
        np.arange(rows) % 2 == 0,
        lambda bundle, engines: np.log(
            np.tile([*bundle.residuals[group].latency, 1.0, 1.0], (rows, 1))
        ),
        bundle,
    )


@pytest.mark.slow
def test_intervals_of_layers_and_whole_models_hold() -> None:
    """They held 97 to 100 % at twice the width, as if all kernels of a model erred together."""
    captured, launched = coverage.load_model_sets("h200")
    for found, quantity, widest in (
        (coverage.load_layer_set("h200"), "latency", 15.0),
        (captured, "latency", 15.0),
        (captured, "power", 20.0),
    ):
        row = coverage._judge(
            "own", quantity, found.log_ratio(quantity), found.ends(quantity), (85.0, 95.0)
        )
        assert 85.0 <= row["coverage"] <= 95.0, (found.name, row)
        assert row["width"] <= widest, (found.name, row)
    inside = launched.ends("latency")
    ratio = launched.log_ratio("latency")
    assert (
        np.mean((inside[:, 0] <= ratio) & (ratio <= inside[:, 1])) >= 0.8
    )  # none was, with one host for all


def test_intervals_of_engine_steps_hold_on_models_held_out() -> None:
    """Ends of kernels of other versions made them four times as wide as the errors of steps."""
    found = coverage.load_step_set("h200", held_out=True)
    row = coverage._judge(
        "steps", "latency", found.log_ratio("latency"), found.ends("latency"), coverage.WANTED
    )
    assert row["n"] >= coverage.LEAST_ROWS
    assert coverage.WANTED[0] <= row["coverage"] <= coverage.WANTED[1], row
    assert row["width"] <= 15.0, row


def test_the_chip_that_is_judged_is_left_out() -> None:
    rng, bundle = np.random.default_rng(3), forecast_bundle(load_gpu("l40s"))
    group = "attention.engine.paged.decode"
    sets = [
        made_set(chip, group, rng.normal(shift, 0.1, 400), bundle)
        for chip, shift in (("A", 0.0), ("B", 0.5))
    ]
    every, without = (coverage.learn_forecast_ends(sets, (), chip) for chip in ("", "B"))
    assert every[group].latency[1] > 1.4
    assert without[group].latency == pytest.approx((np.exp(-0.1645), np.exp(0.1645)), abs=0.03)
    assert (every[group].gpus, without[group].gpus) == (2, 1)
    assert coverage.learn_stretch(sets, "B") == 0.0 < coverage.learn_stretch(sets)


def test_a_kind_that_no_chip_has_takes_the_ends_of_all_kinds() -> None:
    """Block-scaled products in fp4 on a B200 had the ends of eager models, +-18 %, and took half of
    the forecast.
    """
    bundle = forecast_bundle(load_gpu("l40s"))
    slow, fast = np.full(100, 1.0), np.full(100, -0.4)
    kinds = (("A", "experts.half", slow), ("A", "scaled.fp8", fast), ("B", "experts.half", slow))
    sets = [made_set(chip, f"gemm.engine.{kind}", ratio, bundle) for chip, kind, ratio in kinds]
    found = coverage._group_ends(sets, 0.0)
    assert found["gemm.engine"].latency == pytest.approx((np.exp(-1.0), np.exp(1.0)), abs=1e-3)
    assert found["gemm.engine.scaled.fp8"].latency == pytest.approx(
        (np.exp(-0.7), np.exp(0.7)), abs=1e-3
    )
    residuals = forecast_residuals(bundle.residuals, found | coverage._OTHER_KINDS)
    name = find_ends_name(
        "gemm.engine.block.cutlass", "engine_block", "gemm", replace(bundle, residuals=residuals)
    )
    assert name == "gemm.engine"


def test_an_engine_on_a_measured_card_is_judged_by_other_shapes() -> None:
    bundle = bundle_for(load_gpu("h200"))
    ratio = np.tile([0.5, -0.5], 100)  # rows of one half are slow, of the other fast
    sets = [made_set("", "gemm.engine.experts.half", ratio, bundle)]
    slow, fast = (coverage.learn_engine_ends(sets, half) for half in (True, False))
    assert slow["gemm.engine.experts.half"].latency == pytest.approx((1.0, np.exp(0.5)), abs=1e-3)
    assert fast["gemm.engine.experts.half"].latency == pytest.approx((np.exp(-0.5), 1.0), abs=1e-3)


def test_a_set_says_how_wide_it_had_to_be() -> None:
    ratio = np.log(np.linspace(0.9, 1.1, 101))
    ends = np.tile(np.log([0.91, 1.09]), (101, 1))
    row = coverage._judge("made up", "latency", ratio, ends, coverage.WANTED)
    assert row["coverage"] == pytest.approx(90.1, abs=1.1)
    assert row["narrowest"] == pytest.approx(18.0, abs=0.1)
    assert row["held"]
    assert not coverage._judge("made up", "latency", ratio, 3 * ends, coverage.WANTED)["held"]


def test_chips_that_differ_stretch_the_ends_of_a_forecast() -> None:
    rng, bundle = np.random.default_rng(3), forecast_bundle(load_gpu("l40s"))
    group = "attention.engine.paged.decode"
    stretch = []
    for shift in (0.0, 0.1, 0.2):
        places = (("A", -shift), ("B", 0.0), ("C", shift))
        sets = [made_set(chip, group, rng.normal(at, 0.1, 400), bundle) for chip, at in places]
        stretch.append(coverage.learn_stretch(sets))
    assert 0.0 <= stretch[0] < 0.2
    assert stretch == sorted(stretch)
    assert stretch[2] > 0.4
    ends = [coverage._group_ends(sets[:count], 1.0)[group].latency[1] for count in (2, 3)]
    plain = [coverage._group_ends(sets[:count], 0.0)[group].latency[1] for count in (2, 3)]
    assert np.log(ends) / np.log(plain) == pytest.approx([1.5, 1.0 + 1.0 / 3.0], abs=0.01)
