"""Columns of many operators at once: what is looked up, folded or left out for speed changes nothing."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from wattcast.dtypes import Dtype
from wattcast.fitted import bundle_for
from wattcast.hardware import load as load_gpu
from wattcast.kernels import Condition, kernels_of
from wattcast.kernels.elementwise_forms import forms_of
from wattcast.kernels.function_cost import ISSUE_PER_CYCLE
from wattcast.kernels.tiles import KINDS, tile_constants
from wattcast.kernels.work import USUAL, Told, kept, kept_share, resident, resident_share
from wattcast.workload.graph import (
    Attention,
    Collective,
    Conv2d,
    Elementwise,
    LayerNorm,
    Layout,
    Linear,
    Operator,
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
    usual, read = Told.by((USUAL,) * 4), Told.by((*(USUAL,) * 4, Condition(rotated="all"))).at(np.arange(4))
    assert usual.usual
    assert not read.usual
    for item in fields(Told):
        if item.name not in ("usual", "ran"):
            assert_array_equal(getattr(usual, item.name), getattr(read, item.name))
    assert list(usual.ran) == list(read.ran)


def test_rows_of_conditions_stay_with_their_operators() -> None:
    conditions = [Condition(rotated="all"), Condition(layout="nn", rows=7), Condition(backend="flash"), USUAL]
    some = Told.by(conditions).at(np.array([2, 1]))
    assert some.flash.tolist() == [True, False]
    assert some.straight.tolist() == [False, True]
    assert some.rows.tolist() == [0.0, 7.0]
    assert not some.cold.any()


@pytest.mark.parametrize("megabyte", [0.0, 3.0, 20.0, 45.0, 70.0])
def test_shares_of_one_kernel_are_those_of_many(megabyte: float) -> None:
    byte, l2_byte = megabyte * 1e6, 62.9e6
    assert resident_share(byte, l2_byte) == float(resident(np.array(byte), l2_byte))
    assert kept_share(byte, l2_byte) == float(kept(np.array(byte), l2_byte))


def test_every_row_is_of_some_group() -> None:
    """Shares of groups add up to one, whether a family is sure of them or not."""
    work = kernels_of(MIXED, (USUAL,) * len(MIXED), GPU, REFERENCE, ()).work
    groups = {name: values for name, values in work.features.items() if name.startswith("is ")}
    assert_allclose(sum(groups.values()), 1.0, rtol=1e-12)
    assert any(((values > 0.0) & (values < 1.0)).any() for values in groups.values())
    for i, group in enumerate(work.group):
        assert groups[f"is {group}"][i] > 0.0


def test_columns_of_mixed_families_are_those_of_each_operator() -> None:
    work = kernels_of(MIXED, (USUAL,) * len(MIXED), GPU, REFERENCE, ()).work
    for i, op in enumerate(MIXED):
        alone = kernels_of((op,), (USUAL,), GPU, REFERENCE, ()).work
        assert alone.group[0] == work.group[i]
        for name, values in work.features.items():
            own = alone.features.get(name, np.zeros(1))
            assert_allclose(values[i], own[0], rtol=1e-10, atol=1e-12, err_msg=f"{op}: {name}")


def test_a_workload_of_collectives_alone_has_no_family() -> None:
    work = kernels_of((Collective("all_reduce", 800, 8),), (USUAL,), GPU, REFERENCE, ()).work
    assert work.launches.tolist() == work.slots.tolist() == [1.0]
    assert work.features["is collective"].tolist() == [1.0]


def test_what_is_put_behind_a_small_cache_is_spread_over_all_sms() -> None:
    """Its grid says nothing of cycles: they stay those of a concatenation, whose blocks are many however small it is,
    and not those of a block for 1,024 elements."""
    op = Elementwise("cat", 4096, layout=Layout.STRIDED, rows=16, run=8)
    kernels = kernels_of((op,), (USUAL,), GPU, REFERENCE, ())
    assert kernels.work.group == ("elementwise.cat.append",)
    issue = kernels.work.features["flop_per_element"][0]
    sm_cycle = op.n * issue / ISSUE_PER_CYCLE / REFERENCE.sm_count
    rate = REFERENCE.per_cycle[kernels.pipe_event[0]]
    assert_allclose(kernels.work.unit_flop[0], rate * sm_cycle / 2.0, rtol=1e-12)


def test_forms_are_looked_up_once_and_cannot_be_changed() -> None:
    first = forms_of([Elementwise("gelu", 100), Elementwise("add", 64, layout=Layout.STRIDED, dtype=Dtype.FP32)])
    again = forms_of([Elementwise("gelu", 7), Elementwise("add", 128, layout=Layout.STRIDED, dtype=Dtype.FP32)])
    assert first is again
    with pytest.raises(ValueError, match="read-only"):
        first.columns[0][0] = 1.0


def test_constants_of_a_tile_are_finite_for_every_kind() -> None:
    kind = np.arange(len(KINDS))
    found = tile_constants(kind, np.full(len(KINDS), 128.0), np.full(len(KINDS), 64.0))
    assert np.isfinite(found).all()
    assert (found[4] >= 1.0).all()  # tiles on an SM
