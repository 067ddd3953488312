"""Columns of many operators at once: what is looked up, folded or left out for speed changes
nothing.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from wattcast.hardware import load_gpu
from wattcast.kernels import RunCondition, build_kernels
from wattcast.kernels.families.elementwise_grids import ISSUE_PER_CYCLE
from wattcast.kernels.kernel_labels import KERNEL_KINDS, tile_constants
from wattcast.kernels.kernel_table import USUAL_CONDITION, ConditionColumns
from wattcast.predictor.bundle import bundle_for
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import (
    Attention,
    Collective,
    Conv2d,
    Elementwise,
    LayerNorm,
    Layout,
    Linear,
    Softmax,
)

GPU = load_gpu("h200")
REFERENCE = bundle_for(GPU).reference
MIXED: tuple[Operator, ...] = (
    Linear(300, 1001, 767),
    Elementwise("add", 1 << 20),
    Conv2d(8, 64, 128, 28, 28, 3, 3, padding=1),
    Elementwise("mean", 1 << 20, write=2 * 1024),
    Attention(2, 8, 8, 128, 128, 64),
    Conv2d(8, 64, 64, 28, 28, 3, 3, padding=1, groups=64),
    Softmax(1024, 4096),
    Elementwise("gather", 1 << 16, read=(1 << 17) + 8 * 64),
    LayerNorm(512, 767),
    Linear(4096, 4096, 4096),
)


def test_nothing_told_is_what_usual_conditions_say() -> None:
    """Conditions of a whole workload are not read: one that is not usual makes all of them be."""
    usual, read = (
        ConditionColumns.from_conditions((USUAL_CONDITION,) * 4),
        ConditionColumns.from_conditions(
            (*(USUAL_CONDITION,) * 4, RunCondition(rotated="all"))
        ).select_rows(np.arange(4)),
    )
    assert usual.usual
    assert not read.usual
    for item in fields(ConditionColumns):
        if item.name not in ("usual", "ran"):
            assert_array_equal(getattr(usual, item.name), getattr(read, item.name))
    assert list(usual.ran) == list(read.ran)


def test_rows_of_conditions_stay_with_their_operators() -> None:
    conditions = [
        RunCondition(rotated="all"),
        RunCondition(layout="nn", rows=7),
        RunCondition(backend="flash"),
        USUAL_CONDITION,
    ]
    some = ConditionColumns.from_conditions(conditions).select_rows(np.array([2, 1]))
    assert some.flash.tolist() == [True, False]
    assert some.straight.tolist() == [False, True]
    assert some.rows.tolist() == [0.0, 7.0]
    assert not some.cold.any()


def test_every_row_is_of_some_group() -> None:
    """Shares of groups add up to one, whether a family is sure of them or not."""
    work = build_kernels(MIXED, (USUAL_CONDITION,) * len(MIXED), GPU, REFERENCE, ()).work
    groups = {name: values for name, values in work.features.items() if name.startswith("is ")}
    assert_allclose(sum(groups.values()), 1.0, rtol=1e-12)
    assert any(((values > 0.0) & (values < 1.0)).any() for values in groups.values())
    for i, group in enumerate(work.kernel_family):
        assert groups[f"is {group}"][i] > 0.0


def test_columns_of_mixed_families_are_those_of_each_operator() -> None:
    work = build_kernels(MIXED, (USUAL_CONDITION,) * len(MIXED), GPU, REFERENCE, ()).work
    for i, op in enumerate(MIXED):
        alone = build_kernels((op,), (USUAL_CONDITION,), GPU, REFERENCE, ()).work
        assert alone.kernel_family[0] == work.kernel_family[i]
        for name, values in work.features.items():
            own = alone.features.get(name, np.zeros(1))
            assert_allclose(values[i], own[0], rtol=1e-10, atol=1e-12, err_msg=f"{op}: {name}")


def test_a_workload_of_collectives_alone_has_no_family() -> None:
    work = build_kernels(
        (Collective("all_reduce", 800, 8),), (USUAL_CONDITION,), GPU, REFERENCE, ()
    ).work
    assert (work.launches.tolist(), work.slots.tolist()) == (
        [0.0],
        [1.0],
    )  # the law of links has its launch
    assert work.features["is collective"].tolist() == [1.0]


def test_what_is_put_behind_a_small_cache_is_spread_over_all_sms() -> None:
    """Its grid says nothing of cycles: they stay those of a concatenation, whose blocks are many
    however small it is, and not those of a block for 1,024 elements."""
    op = Elementwise("cat", 4096, layout=Layout.STRIDED, rows=16, run=8)
    kernels = build_kernels((op,), (USUAL_CONDITION,), GPU, REFERENCE, ())
    assert kernels.work.kernel_family == ("elementwise.cat.append",)
    issue = kernels.work.features["flop_per_element"][0]
    sm_cycle = op.n * issue / ISSUE_PER_CYCLE / REFERENCE.sm_count
    rate = REFERENCE.per_cycle[kernels.pipe_event[0]]
    assert_allclose(kernels.work.unit_flop[0], rate * sm_cycle / 2.0, rtol=1e-12)


def test_constants_of_a_tile_are_finite_for_every_kind() -> None:
    kind = np.arange(len(KERNEL_KINDS))
    found = tile_constants(
        kind, np.full(len(KERNEL_KINDS), 128.0), np.full(len(KERNEL_KINDS), 64.0)
    )
    assert np.isfinite(found).all()
    assert (found[4] >= 1.0).all()  # tiles on an SM
