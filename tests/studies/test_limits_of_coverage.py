"""The study of what limits coverage, on the rows that ship with Wattcast."""

from __future__ import annotations

import numpy as np
from studies.limits_of_coverage import compare_clocks

from wattcast.core.measured_rows import database_folder
from wattcast.fit.kernel_rows import load_kernel_rows
from wattcast.hardware import load_gpu
from wattcast.predictor.bundle import bundle_for
from wattcast.workload.operator_types import Linear


def test_own_products_near_the_balance_of_memory_and_chip_are_faster_than_predicted() -> None:
    """At the clock that was measured: what the limits of docs/method/confidence.md say."""
    rows = load_kernel_rows(database_folder("h200"))
    some = np.array([isinstance(op, Linear) and op.m in (512, 4096) for op in rows.ops])
    table = compare_clocks(rows.select_rows(some), load_gpu("h200"), bundle_for(load_gpu("h200"))).splitlines()[1:]
    median = {line.split()[0]: float(line.split()[-1]) for line in table}
    assert median["0.3"] < 0.95 < median["0.0"]
