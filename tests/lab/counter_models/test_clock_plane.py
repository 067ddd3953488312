"""Rows over a plane of clocks become one table, and its fit finds the voltage; all watts here are
made up.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from wattcast.core.errors import BadInput
from wattcast.core.row_journals import read_lines
from wattcast.core.row_tables import database_folder
from wattcast.lab.counter_models import counter_table
from wattcast.lab.counter_models.counter_fit import CounterFitOptions, fit_counters
from wattcast.lab.counter_models.microbench_lines import make_table_lines
from wattcast.lab.counter_models.rail_terms import CounterModelKind

CLOCKS = {1980: 1.0, 1500: 0.85, 1000: 0.75}  # MHz, made-up relative voltage
ENERGY_J = {
    "executed_warp": 1e-10,
    "fma_full_warp": 3e-10,
    "alu_full_warp": 4e-10,
    "l1_wavefront": 6e-10,
}
SHIPPED = database_folder("h200")


@pytest.fixture
def plane(tmp_path: Path) -> Path:
    """Kernels that the multiprocessors hold up, at three core clocks, with launches twice as long
    at the lowest.
    """
    counts = {str(line["benchmark"]): line for line in make_table_lines(SHIPPED, "h200")}
    chosen = ("fp32_", "int32_", "conflicts_", "ilp_", "idle_")
    shutil.copy(SHIPPED / "microbench_counters.jsonl", tmp_path)
    rows = {
        str(r["name"]): r for r in read_lines(SHIPPED / "microbench.jsonl") if not r.get("repeat")
    }
    for mhz, volt in CLOCKS.items():
        (tmp_path / f"{mhz}-3201").mkdir()
        lines = []
        for name, row in rows.items():
            if not name.startswith(chosen) or name not in counts:
                continue
            longer, clock = (2.0 if mhz == 1000 else 1.0), mhz / 1980.0
            rate = {
                e: float(counts[name][e]) / float(counts[name]["seconds"]) * clock for e in ENERGY_J
            }
            watts = (
                60.0
                + 40.0 * volt**2 * clock
                + volt**2 * sum(ENERGY_J[e] * rate[e] for e in ENERGY_J)
            )
            now = {"power_w": watts, "sm_clock_hz": mhz * 1e6, "effective_clock_hz": mhz * 1e6}
            if row.get("launch_s"):
                now |= {
                    "launch_s": row["launch_s"] * longer / clock,
                    "operations": row["operations"] * longer,
                }
            lines.append(json.dumps(row | now))
        (tmp_path / f"{mhz}-3201" / "microbench.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_plane_is_one_table_and_tells_the_voltage(plane: Path) -> None:
    import polars as pl

    lines = make_table_lines(plane, "h200")
    assert {line["memory_clock_hz"] for line in lines} == {3.201e9}
    per_clock = {
        mhz: [
            float(x["fma_full_warp"]) / float(x["seconds"])
            for x in lines
            if x["clock_hz"] == mhz * 1e6
        ]
        for mhz in CLOCKS
    }
    for mhz in CLOCKS:  # the same work in proportion to the clock, whatever a launch lasts
        np.testing.assert_allclose(
            per_clock[mhz], np.array(per_clock[1980]) * mhz / 1980.0, rtol=1e-9
        )
    columns = counter_table.read_column_map(Path("h200-plane"))
    events = {name: column for name, column in columns.events.items() if name in ENERGY_J}
    columns.events = events
    table = counter_table.build_counter_table(pl.DataFrame(lines, strict=False), columns, "plane")
    # with two folds a half has no kernel of some unit to learn its cost from
    options = CounterFitOptions(
        models=(CounterModelKind.HYBRID,), folds=3, advice=False, hold=("benchmark",)
    )
    found = fit_counters({"counted": table}, options)
    (core,) = [rail for rail in found.rails if rail.rail == "core"]
    np.testing.assert_allclose(core.relative, [CLOCKS[mhz] for mhz in sorted(CLOCKS)], atol=0.02)
    assert found.kinds[CounterModelKind.HYBRID].held_out["benchmark"].score.mape < 1.0


def test_a_plane_needs_counters(plane: Path) -> None:
    (plane / "microbench_counters.jsonl").unlink()
    with pytest.raises(BadInput, match=r"microbench_counters\.jsonl"):
        make_table_lines(plane, "h200")
