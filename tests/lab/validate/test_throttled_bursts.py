"""Bursts that were throttled while they were measured are told from others by measurements."""

from __future__ import annotations

import numpy as np
import pytest

from wattcast.calibrate.kernel_rows import PLANNED, ROW_NUMBERS, KernelRows
from wattcast.calibrate.table_rows import TableRows
from wattcast.core import Dtype
from wattcast.core.arrays import Array
from wattcast.kernels.kernel_table import RunCondition
from wattcast.lab.validate.public_checks.throttled_bursts import find_throttled
from wattcast.workload.operator_types import Linear

DENSE = Linear(4096, 8192, 8192, dtype=Dtype.BF16)
NARROW = Linear(1, 8192, 8192, dtype=Dtype.BF16)


def make_table(
    ops: tuple[Linear, ...],
    latency_s: Array,
    kinds: tuple[str, ...] = (),
) -> TableRows:
    count = len(ops)
    number = {name: np.full(count, np.nan) for name in ROW_NUMBERS}
    number["latency_s"] = latency_s
    rows = KernelRows(
        kind=kinds or ("burst",) * count,
        ops=ops,
        conditions=(RunCondition(),) * count,
        data=("random",) * count,
        spec=("",) * count,
        repeat=np.zeros(count, dtype=np.int64),
        names=((),) * count,
        blocks=((),) * count,
        uuid=("",) * count,
        run=("",) * count,
        chosen=(PLANNED,) * count,
        number=number,
        fit=np.ones(count, dtype=bool),
        source="made up",
        card="",
    )
    return TableRows(rows, ((),) * count, ("vllm",) * count, ())


@pytest.mark.parametrize(("rate", "throttled"), [(0.66, True), (0.95, False), (1.2, False)])
def test_bursts_at_two_thirds_of_the_rate_of_long_runs_were_throttled(
    rate: float, throttled: bool
) -> None:
    kinds = ("sustained", "burst", "sustained", "burst")
    table = make_table((DENSE,) * 2 + (NARROW,) * 2, np.array([2e-3, 2e-3 / rate] * 2), kinds)
    assert find_throttled(table).tolist() == [False, throttled, False, False]


@pytest.mark.parametrize(("side", "is_dense"), [(1200, True), (900, False)])
def test_products_of_a_thousand_on_every_side_are_dense(side: int, is_dense: bool) -> None:
    product = Linear(side, 8192, 8192, dtype=Dtype.BF16)
    table = make_table((product,) * 2, np.array([2e-4, 4e-4]), ("sustained", "burst"))
    assert find_throttled(table).tolist() == [False, is_dense]


def test_short_bursts_are_compared_with_short_products_alone() -> None:
    """A long product is throttled, a short one is not."""
    kinds = ("sustained", "burst", "sustained", "burst")
    table = make_table((DENSE,) * 4, np.array([2e-3, 4e-3, 2e-4, 2e-4]), kinds)
    assert find_throttled(table).tolist() == [False, True, False, False]


def test_nothing_is_throttled_where_no_long_run_says_so() -> None:
    table = make_table((DENSE,) * 2, np.array([2e-3, 9e-3]))
    assert not find_throttled(table).any()
