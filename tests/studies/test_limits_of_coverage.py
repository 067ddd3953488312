"""The study of what limits coverage, on the rows that ship with Wattcast."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from studies.limits_of_coverage import compare_clocks, measure_windows

from wattcast.calibrate.kernel_rows import load_kernel_rows
from wattcast.hardware import load_gpu
from wattcast.predictor.bundle import bundle_for
from wattcast.workload.operator_types import Linear


def test_own_products_near_the_balance_of_memory_and_chip_are_faster_than_predicted() -> None:
    """At the clock that was measured: what the limits of docs/method/confidence.md say."""
    rows = load_kernel_rows("h200")
    some = np.array([isinstance(op, Linear) and op.m in (512, 4096) for op in rows.ops])
    table = compare_clocks(
        rows.select_rows(some), load_gpu("h200"), bundle_for(load_gpu("h200"))
    ).splitlines()[1:]
    median = {line.split()[0]: float(line.split()[-1]) for line in table}
    assert median["0.3"] < 0.95 < median["0.0"]


def test_windows_show_what_was_polled_beyond_the_runs(tmp_path: Path) -> None:
    """Two seconds of 50 W around 30 s of 150 W, and runs that failed after a second at 1 GHz."""
    folder = tmp_path / "energaizer" / "measurements"
    folder.mkdir(parents=True)
    mean_w = (30.0 * 150.0 + 2.0 * 50.0) / 32.0
    rows = [(300, 32.0 / 300, mean_w, 900.0)] * 5
    rows += [
        (10, (2.0 + 1e3 / mhz) / 10, 50.0, mhz) for mhz in (1010.0, 1100.0, 1200.0, 1300.0, 1400.0)
    ]
    lines = [f"m_iter{n}.csv,{s * w},{1e3 * s},{mhz},60" for n, s, w, mhz in rows]
    (folder / "a10_clocks.csv").write_text(
        "\n".join(["workload,energy,time,avg_freq,temp", *lines])
    )
    found = measure_windows(tmp_path).splitlines()
    assert found[1].split() == ["a10_clocks.csv", "5", "1.95", "1.95", "1.95", "6.5", "4.2"]
    assert found[2].split()[:4] == ["5", "runs", "failed:", "2.00"]
