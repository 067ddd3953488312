"""Sensor, comparison, profiler traces, counters, packing and the shipped database; recorded runs
replayed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import DATA, synthetic

from wattcast.core.errors import BadInput, Refused
from wattcast.core.measured_rows import KernelRow, NameRow, RunInfo
from wattcast.core.row_journals import Journal
from wattcast.core.row_tables import database_folder
from wattcast.core.row_tables import read_table as read_parquet
from wattcast.lab.campaigns.database_files import (
    find_phases,
    make_summary_page,
    make_workload_form,
    pack_database,
    summarise_database,
)
from wattcast.lab.campaigns.kernel_campaign import kernels_by_range
from wattcast.lab.campaigns.nsight_counters import (
    keep_known_metrics,
    read_counter_table,
    read_wanted_metrics,
)
from wattcast.measure.counter_ticks import find_ticks
from wattcast.measure.energy_samples import EnergySamples
from wattcast.measure.run_verdict import ModelTerm, compare_with_prediction
from wattcast.measure.sampler import describe_sensor
from wattcast.measure.steady_state import SettlingRule, find_settled_window
from wattcast.measure.window_summary import Measurement

CAPPED = (
    DATA / "h200_capped.npz"
)  # an H200 under a linear layer of 16384 x 4096 x 1024, bf16, after a convolution


def test_the_recorded_sensor_of_an_h200_is_described_as_it_is() -> None:
    """Recorded 2026-11-15, driver 580.159.04: 2.5 s idle, then copies of random data."""
    samples = EnergySamples.load(DATA / "h200_sensor.npz")
    step_s = float(samples["time_s"][np.argmax(samples["instant_w"] > 400.0)]) - 0.05
    found = describe_sensor(samples, step_s)
    assert found.energy_period_s == pytest.approx(0.1, rel=2e-3)
    assert found.instant_period_s == pytest.approx(0.1, abs=0.03)
    assert found.average_window_s == pytest.approx(1.0, abs=0.15)
    assert found.memory_window_s == pytest.approx(1.0, abs=0.15)
    assert found.instant_window_s < 0.15
    assert any("every 100 ms" in sentence for sentence in found.implies)
    assert any("useless for shorter runs" in sentence for sentence in found.implies)


def test_a_sensor_without_load_says_only_what_it_saw() -> None:
    found = describe_sensor(synthetic(1.0))
    assert found.energy_period_s == pytest.approx(0.1, rel=0.01)
    assert found.average_window_s is None
    rows = synthetic(1.0).rows
    rows[:, 1] = np.nan
    assert "no energy counter" in describe_sensor(EnergySamples(rows)).implies[0]


def test_a_recorded_uncapped_load_settles_at_its_power() -> None:
    samples = EnergySamples.load(DATA / "h200_softmax.npz")
    stepped = find_ticks(samples)
    held = find_settled_window(samples, float(stepped.time_s[8]), SettlingRule())
    assert held is not None
    assert held.ticks.power_w == pytest.approx(652.0, rel=0.01)
    assert held.flags == ()


def test_a_recorded_capped_load_shows_why_half_a_second_is_too_little() -> None:
    """The governor lets 720 W pass for 0.8 s, then cuts to 550 W: a flat half second is 20 W high."""
    samples = EnergySamples.load(CAPPED)
    stepped = find_ticks(samples)
    load = stepped.between(float(stepped.time_s[8]), float(stepped.time_s[-4]))
    assert stepped.last(14).between(0.0, float(stepped.time_s[-4])).power_w < 705.0
    assert load.interval_w.max() > 725.0
    assert load.interval_w.min() < 560.0
    assert (
        find_settled_window(samples, float(stepped.time_s[7]), SettlingRule()) is None
    )  # 20 steps are wanted, and are not there


def test_a_capped_row_that_holds_a_cycle_is_settled_as_it_is(tmp_path: Path) -> None:
    linear = {"op": "linear", "m": 16, "n": 16, "k": 16, "dtype": "bf16"}
    row = KernelRow(
        "sustained-y", "sustained", "linear", linear, power_w=691.0, sm_clock_hz=1.9e9, ticks=20
    )
    row = replace(row, throttle=("sw_power_cap",), date="2026-11-15T02:55:45+00:00", run="r")
    short = replace(row, id="sustained-z", ticks=5)
    journal = Journal(tmp_path / "sustained.jsonl")
    journal.append(row)
    journal.append(short)
    pack_database([tmp_path], tmp_path / "packed")
    found = {one["id"]: one for one in read_parquet(tmp_path / "packed" / "rows.parquet")}
    settled = [
        found["sustained-y"][name]
        for name in ("settled_power_w", "settled_clock_hz", "settled_ticks")
    ]
    assert settled == [691.0, 1.9e9, 20]
    assert found["sustained-z"]["settled_power_w"] is None


def predicted_json(**changes: float) -> dict[str, Any]:
    return {
        "predictions": [
            {"latency_s": 1.0, "power_w": 500.0, "clock_hz": 1.98e9, "busy_s": 0.9} | changes
        ]
    }


def test_the_term_that_is_off_is_named() -> None:
    cases = {
        ModelTerm.NONE: (1.02, 510.0, 1.98e9),
        ModelTerm.ENERGY: (1.02, 600.0, 1.98e9),
        ModelTerm.CLOCK: (1.25, 520.0, 1.60e9),
        ModelTerm.HOST: (1.5, 380.0, 1.98e9),
        ModelTerm.KERNELS: (1.5, 510.0, 1.98e9),
    }
    for term, (latency_s, power_w, clock_hz) in cases.items():
        measured = Measurement("run", latency_s, power_w=power_w, sm_clock_hz=clock_hz)
        verdict = compare_with_prediction(measured, predicted_json())
        assert verdict.term is term
        assert verdict.energy == pytest.approx(latency_s * power_w / 500.0)
        assert f"measured time is {100 * (latency_s - 1):+.1f} %" in verdict.sentence
    no_clock = Measurement("run", 1.2, power_w=500.0)
    assert compare_with_prediction(no_clock, predicted_json(busy_s=0.4)).term is ModelTerm.HOST


def test_figures_that_are_none_are_refused() -> None:
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BadInput, match="above zero"):
            compare_with_prediction(
                Measurement("run", 1.0, power_w=500.0), predicted_json(latency_s=wrong)
            )


def test_a_window_against_the_output_of_predict() -> None:
    predicted = {"predictions": [{"latency_s": 0.1, "power_w": 500.0, "clock_hz": 1.98e9}]}
    window = Measurement("run", 10.0, energy_j=5000.0, power_w=500.0, sm_clock_hz=1.98e9)
    assert compare_with_prediction(window, predicted, 100).term is ModelTerm.NONE
    with pytest.raises(Refused, match="nothing to compare"):
        compare_with_prediction(
            Measurement("run", 0.1, flags=("2 counter steps, 5 needed",)), predicted
        )
    with pytest.raises(BadInput, match="wattcast predict"):
        compare_with_prediction(window, {"predictions": []})
    with pytest.raises(BadInput, match="at least 1"):
        compare_with_prediction(window, predicted, 0)


def test_kernels_belong_to_the_range_that_launched_them() -> None:
    """The kernel runs after the range has closed; its launch lies inside."""
    events = [
        {"cat": "user_annotation", "name": "wattcast:aaaa", "ts": 10.0, "dur": 20.0},
        {"cat": "user_annotation", "name": "wattcast:bbbb", "ts": 40.0, "dur": 20.0},
        {"cat": "user_annotation", "name": "other", "ts": 0.0, "dur": 99.0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 12.0, "args": {"correlation": 1}},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 45.0, "args": {"correlation": 2}},
        {"cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": 47.0, "args": {"correlation": 3}},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 35.0, "args": {"correlation": 4}},
        {"cat": "kernel", "name": "third", "ts": 90.0, "dur": 1.0, "args": {"correlation": 3}},
        {"cat": "kernel", "name": "first", "ts": 70.0, "dur": 1.0, "args": {"correlation": 1}},
        {"cat": "gpu_memcpy", "name": "second", "ts": 80.0, "dur": 1.0, "args": {"correlation": 2}},
        {"cat": "kernel", "name": "between", "ts": 75.0, "dur": 1.0, "args": {"correlation": 4}},
        {"cat": "kernel", "name": "unlaunched", "ts": 75.0, "dur": 1.0, "args": {}},
    ]
    found = {
        name: [event["name"] for event in held] for name, held in kernels_by_range(events).items()
    }
    assert found == {"aaaa": ["first"], "bbbb": ["second", "third"]}


NCU = """==PROF== Connected to process 508
"ID","Kernel Name","thread Domain:Push/Pop_Range:Msg","dram__bytes_read.sum","gpu__time_duration.sum","device__x"
"","","","byte","ns",""
"0","nvjet_x","<default domain>:wattcast:0123456789abcdef:none","1,024","3000","7"
"1","splitKreduce","<default domain>:wattcast:0123456789abcdef:none","7","n/a","7"
"2","stray","","9","9","7"
"""


def test_counters_are_read_by_the_range_they_ran_in() -> None:
    first, second = read_counter_table(NCU.splitlines())
    assert first["id"] == "0123456789abcdef-0"
    assert first["metrics"] == {"dram__bytes_read.sum": 1024.0, "gpu__time_duration.sum": 3000.0}
    assert second["id"].endswith("-1")
    assert second["metrics"] == {"dram__bytes_read.sum": 7.0}
    assert list(read_counter_table(["==ERROR== nothing"])) == []


def test_metrics_a_profiler_does_not_know_are_dropped() -> None:
    wanted = read_wanted_metrics()
    assert "dram__bytes_read.sum" in wanted
    known = keep_known_metrics(wanted, {"dram__bytes_read"})
    assert "dram__bytes_read.sum" in known
    assert all(name.startswith(("dram__bytes_read", "launch__")) for name in known)
    assert keep_known_metrics(
        wanted, set()
    )  # a profiler that does not say gets the few that all know


def test_periods_that_beat_with_the_boards_sampling_are_found() -> None:
    assert find_phases(0.05) == 5
    assert find_phases(0.02) == 1
    assert find_phases(0.01236) > 20


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    """Two rows, a repeat, a failure and a duty cycle, as a campaign leaves them."""
    row = KernelRow(
        "sustained-a-random",
        "sustained",
        "elementwise",
        {"op": "elementwise", "function": "add", "n": 8, "dtype": "bf16"},
        detail={"spec": "aaaa", "form": "contiguous"},
        run="r1",
        latency_s=1e-5,
        power_w=400.0,
        date="2026-11-15T00:00:00+00:00",
    )
    journal = Journal(tmp_path / "in" / "sustained.jsonl")
    journal.append(row)
    journal.append(replace(row, id="sustained-a-random-r1", repeat=1, power_w=404.0))
    journal.append(
        replace(row, id="sustained-b-random", detail={"spec": "bbbb"}, error="boom", latency_s=None)
    )
    duty = replace(row, id="duty-a", kind="duty", period_s=0.05, on_power_w=500.0)
    Journal(tmp_path / "in" / "duty.jsonl").append(duty)
    Journal(tmp_path / "in" / "runs.jsonl", "run").append(
        RunInfo("r1", "2026-11-15", "NVIDIA H200", "GPU-1")
    )
    Journal(tmp_path / "in" / "names.jsonl", "spec").append(
        NameRow("aaaa", ("k1",), ((1, 1, 1),), ((128, 1, 1),))
    )
    (tmp_path / "in" / "counters.csv").write_text(NCU)
    return tmp_path


def test_packing_joins_cards_names_and_counters(campaign: Path) -> None:
    pytest.importorskip("polars")
    counts = pack_database([campaign / "in"], campaign / "out")
    assert counts == {"rows": 4, "runs": 1, "named": 1, "counters": 2, "kept": 0}
    rows = {row["id"]: row for row in read_parquet(campaign / "out" / "rows.parquet")}
    row = rows["sustained-a-random"]
    assert row["card_uuid"] == "GPU-1"
    assert row["kernel_names"] == ["k1"]
    assert row["operator"] == {"op": "add", "n": 8, "dtype": "bf16"}
    assert rows["duty-a"]["flags"] == ["period_beats_with_sensor"]
    assert rows["sustained-b-random"]["error"] == "boom"
    with pytest.raises(BadInput, match="no measured rows"):
        pack_database([campaign / "out"], campaign / "again")


def test_packing_adds_to_a_database_and_loses_nothing(campaign: Path) -> None:
    """A later campaign without the earlier one's files: its rows join, known operators keep their
    kernels' names.
    """
    pytest.importorskip("polars")
    pack_database([campaign / "in"], campaign / "out")
    first = {row["id"]: row for row in read_parquet(campaign / "out" / "rows.parquet")}
    later = KernelRow(
        "sustained-a-random",
        "sustained",
        "elementwise",
        {"op": "copy"},
        detail={"spec": "aaaa"},
        run="r2",
        power_w=1.0,
    )
    Journal(campaign / "later" / "sustained.jsonl").append(later)
    assert pack_database([campaign / "later"], campaign / "out") == {
        "rows": 1,
        "runs": 0,
        "named": 0,
        "counters": 0,
        "kept": 4,
    }
    rows = {(row["id"], row["run"]): row for row in read_parquet(campaign / "out" / "rows.parquet")}
    assert len(rows) == 5
    assert rows["sustained-a-random", "r2"]["kernel_names"] == ["k1"]
    assert rows["sustained-a-random", "r1"] == first["sustained-a-random"]
    assert len(read_parquet(campaign / "out" / "counters.parquet")) == 2


def test_the_summary_counts_and_compares(campaign: Path) -> None:
    pytest.importorskip("polars")
    pack_database([campaign / "in"], campaign / "out")
    found = summarise_database(campaign / "out")
    assert found["rows"] == {"duty": {"elementwise": 1}, "sustained": {"elementwise": 2}}
    assert found["failed"] == 1
    within = found["repeatability"]["within a run"]["power, sustained, one window"]
    assert within["pairs"] == 1
    assert within["median"] == pytest.approx(4.0 / 402.0)
    assert found["repeatability"]["between cards"]["latency, burst"] == {"pairs": 0}
    assert "| elementwise | 1 | 2 |" in make_summary_page(found)


def test_workload_form_leaves_other_operators_alone() -> None:
    assert make_workload_form({"op": "bmm", "b": 2}) == {"op": "bmm", "b": 2}


@pytest.fixture(scope="module")
def h200() -> Path:
    pytest.importorskip("polars")
    return database_folder("h200")


@pytest.fixture(scope="module")
def summary(h200: Path) -> dict[str, Any]:
    return summarise_database(h200)


@pytest.fixture(scope="module")
def shipped_rows(h200: Path) -> list[dict[str, Any]]:
    return read_parquet(h200 / "rows.parquet")


def test_the_shipped_database_holds_what_its_readme_says(
    h200: Path, summary: dict[str, Any]
) -> None:
    """The README's tables are the summary's own words."""
    text = (h200 / "README.md").read_text(encoding="utf-8")
    assert make_summary_page(summary) in text
    assert sum(path.stat().st_size for path in h200.iterdir()) < 15e6


def test_the_shipped_database_is_large_enough_and_repeats(summary: dict[str, Any]) -> None:
    totals = {kind: sum(families.values()) for kind, families in summary["rows"].items()}
    assert totals["burst"] >= 2500
    assert totals["sustained"] >= 300
    assert summary["kernels"]["with data patterns"] >= 30
    assert summary["kernels"]["with counters"] >= 60
    within = summary["repeatability"]["within a run"]
    assert within["latency, burst"]["pairs"] >= 100
    assert within["latency, burst"]["median"] <= 0.005
    assert within["power, sustained, settled where capped"]["pairs"] >= 30
    assert within["power, sustained, settled where capped"]["median"] <= 0.01


def test_every_row_of_the_shipped_database_is_an_operator(
    shipped_rows: list[dict[str, Any]],
) -> None:
    from wattcast.workload.readers.from_json import parse_workload

    assert all(row["card_uuid"] and row["driver"] and row["date"] for row in shipped_rows)
    operators = [row["operator"] for row in shipped_rows if row["kind"] != "idle"]
    graph = parse_workload(json.dumps({"name": "h200", "ops": operators}).encode(), "h200")
    assert len(list(graph.calls())) == len(operators)


def test_rows_of_the_shipped_database_are_physical(shipped_rows: list[dict[str, Any]]) -> None:
    """No row beats DRAM from beyond the cache, none draws less than idle; capped loads settle near
    the limit.
    """
    from wattcast.workload.readers.from_json import parse_workload

    rows = [row for row in shipped_rows if row["latency_s"]]
    for row in rows:
        skips = row["operator"].get("stride", 1) > row["operator"].get(
            "r", 1
        )  # pixels that no filter reads
        if row["footprint_byte"] and row["footprint_byte"] > 4 * row_l2_byte and not skips:
            graph = parse_workload(
                json.dumps({"name": "x", "ops": [row["operator"]]}).encode(), "x"
            )
            assert graph.byte / row["latency_s"] < 4.8e12, row["id"]
        if row["kind"] == "sustained":
            assert 120.0 < row["power_w"] < 780.0, row["id"]
    settled_w = [
        row["settled_power_w"] for row in rows if row["settled_power_w"] and row["data"] == "random"
    ]
    assert np.percentile(settled_w, 5) > 680.0
    assert np.percentile(settled_w, 95) < 710.0


row_l2_byte = 60 * 2**20


def test_measurements_go_to_json() -> None:
    plain = Measurement("x", 1.0, power_w=2.0).plain()
    assert json.loads(json.dumps(plain))["power_w"] == 2.0
    assert "energy_j" not in plain
    assert asdict(Measurement("x", 1.0))["ticks"] == 0
