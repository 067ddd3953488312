"""Rows under the power cap find their settled power in the samples of their run."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from wattcast.core.measured_rows import KernelRow
from wattcast.core.row_tables import ROWS_FILE, read_table, write_table
from wattcast.lab.campaigns.settle_capped_rows import settle_capped_rows, settle_database
from wattcast.measure.counter_ticks import find_ticks
from wattcast.measure.energy_samples import EnergySamples

CAPPED = (
    Path(__file__).parent.parent / "measure" / "data" / "h200_capped.npz"
)  # as in test_analysis.py


def test_a_capped_row_finds_its_settled_power_in_the_samples() -> None:
    samples = EnergySamples.load(CAPPED)
    stepped = find_ticks(samples)
    last = len(stepped.time_s) - 4
    window_w = (stepped.energy_j[last] - stepped.energy_j[last - 5]) / (
        stepped.time_s[last] - stepped.time_s[last - 5]
    )
    row = KernelRow(
        "sustained-x",
        "sustained",
        "linear",
        {},
        date="2026-11-15T02:55:45+00:00",
        power_w=float(window_w),
        ticks=5,
        throttle=("sw_power_cap",),
        copies=11,
        replays=760,
        latency_s=2.2345e-4,
    )
    found = settle_capped_rows([row], samples)["sustained-x"]
    assert 690.0 < found["settled_power_w"] < 706.0 < window_w
    assert found["settled_ticks"] >= 10
    assert found["settled_clock_hz"] < 1.56e9
    assert settle_capped_rows([replace(row, power_w=400.0)], samples) == {}
    assert settle_capped_rows([replace(row, throttle=())], samples) == {}
    assert (
        settle_capped_rows([replace(row, ticks=20)], samples) == {}
    )  # its own window holds a cycle


def test_packed_rows_get_their_settled_power(tmp_path: Path) -> None:
    samples = EnergySamples.load(CAPPED)
    stepped = find_ticks(samples).last(8)
    window_w = (stepped.energy_j[5] - stepped.energy_j[0]) / (stepped.time_s[5] - stepped.time_s[0])
    row = KernelRow(
        "x",
        "sustained",
        "linear",
        {"op": "linear"},
        power_w=float(window_w),
        ticks=5,
        copies=11,
        replays=760,
        run="r",
    )
    row = replace(
        row, throttle=("sw_power_cap",), latency_s=2.2345e-4, date="2026-11-15T02:55:45+00:00"
    )
    plain = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(row).items()
    }
    write_table(tmp_path / ROWS_FILE, [plain])
    samples.save(tmp_path / "samples-r.npz")
    assert settle_database(tmp_path, tmp_path) == 1
    (found,) = read_table(tmp_path / ROWS_FILE)
    assert found["settled_ticks"] >= 10
