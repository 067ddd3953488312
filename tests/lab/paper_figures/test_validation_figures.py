"""Figures after paper 003: pairs of equal latency are found by rule, and shares of kernels add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")
from wattcast.lab.fit.database_fit import load_held_out
from wattcast.lab.paper_figures.validation_figures import (
    KERNEL_KINDS,
    NEAR_LATENCY,
    EqualLatencyPairs,
    collect_kind_shares,
    draw_equal_latency,
    find_equal_latency_pairs,
    profiled_shares,
)


@pytest.fixture(scope="module")
def found() -> EqualLatencyPairs:
    """The pairs of equal latency among the held-out rows of the H200."""
    return find_equal_latency_pairs("h200", load_held_out("h200"))


def test_pairs_of_equal_latency_differ_in_power_as_the_rule_says(found: EqualLatencyPairs) -> None:
    assert found.imbalance
    assert found.reuse
    for a, b in (*found.imbalance, *found.reuse):
        assert abs(b.latency_s / a.latency_s - 1) < NEAR_LATENCY
        assert b.power_w > a.power_w
    few, many = found.imbalance[0]
    assert few.tiles < many.tiles <= 132
    assert many.power_w - few.power_w > 96.0  # the paper's own pair differs by 96 W
    assert many.predicted_w - few.predicted_w > 0.5 * (many.power_w - few.power_w)
    assert all(b.memory_w > a.memory_w + 20 for a, b in found.reuse)


def test_held_out_rows_of_another_database_are_refused() -> None:
    held = load_held_out("h200")
    with pytest.raises(Exception, match="Fit again"):
        find_equal_latency_pairs("h200", replace(held, work=held.work[:-1]))


def test_shares_add_up() -> None:
    for entry in collect_kind_shares("h200"):
        assert sum(entry.share.values()) == pytest.approx(1.0)
        assert entry.share["GEMM-like"] > 0.2
        assert set(entry.share) == set(KERNEL_KINDS)


def test_a_figure_shows_each_pair(found: EqualLatencyPairs) -> None:
    figure = draw_equal_latency(found, "h200")
    left, right = figure.axes
    assert len(left.patches) == 2 * len(found.imbalance)
    assert len(right.patches) == 2 * len(found.reuse)
    assert left.get_xlabel() == "Power (W)"


def test_kinds_of_a_profile() -> None:
    names = [
        "nvjet_sm90_tst",
        "void softmax_warp_forward",
        "void elementwise_kernel",
        "void reduce_kernel<512>",
    ]
    profile = {"names": names, "order": [0, 1, 2, 3, 0], "kernel_s": [2.0, 1.0, 3.0, 1.0, 3.0]}
    assert profiled_shares("x", profile).share == pytest.approx(
        {"GEMM-like": 0.5, "reduction": 0.2, "elementwise": 0.3}
    )
