"""Advice on the H200's own microbenchmarks, whose answers were measured: counters of each kernel as
a profile.
"""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from wattcast import hardware
from wattcast.core.row_journals import read_lines
from wattcast.lab.microbench.microbench_page import make_counted_profile
from wattcast.lab.microbench.microbench_results import (
    MicroRow,
    keep_first_rounds,
    read_shipped_results,
    results_folder,
)
from wattcast.lab.microbench.tuning import tune_export
from wattcast.lab.microbench.unit_work import TIME

H200 = hardware.load_gpu("h200")
# kernel, its bottleneck, the benchmark that does the same without it
KNOWN = (
    ("conflicts_31", "bank conflicts", "conflicts_0"),
    ("conflicts_7", "bank conflicts", "conflicts_0"),
    ("coalescence_1", "coalescing", "coalescence_32"),
    ("divergence_32", "divergence", "divergence_1"),
    ("divergence_4", "divergence", "divergence_1"),
    ("fp64_fma", "fp64", "fp32_fma"),
    ("occupancy_1", "occupancy", "occupancy_64"),
)
SOUND = (
    "dram_read",
    "dram_copy",
    "l1_read",
    "shared_read",
    "fp32_fma",
    "fp32_add",
    "int32_add",
    "wgmma_bf16",
)


@cache
def counted() -> dict[str, dict[str, float]]:
    path = results_folder(H200) / "microbench_counters.jsonl"
    return {str(row["id"]): row["metrics"] for row in read_lines(path)}


@cache
def measured() -> dict[str, MicroRow]:
    return keep_first_rounds(read_shipped_results(H200))


def unit_of(metric: str) -> str:
    if metric == TIME:
        return "nsecond"
    return "byte" if "bytes" in metric else "%" if ".pct" in metric else ""


def export(path: Path, names: tuple[str, ...]) -> Path:
    """An ``ncu --page raw --csv`` table of shipped counters."""
    columns = list(dict.fromkeys(metric for name in names for metric in counted()[name]))
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, quoting=csv.QUOTE_ALL)
        writer.writerow(["ID", "Kernel Name", *columns])
        writer.writerow(["", "", *map(unit_of, columns)])
        for i, name in enumerate(names):
            writer.writerow([i, name, *(counted()[name].get(column, "") for column in columns)])
    return path


@pytest.fixture(scope="module")
def advice(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    names = (*(name for name, _, _ in KNOWN), *SOUND)
    tuning = tune_export(
        export(tmp_path_factory.mktemp("profile") / "p.csv", names), read_shipped_results(H200)
    )
    return {name: [a for a in tuning.advice if a.kernel == name] for name in names}


@pytest.mark.parametrize(("name", "bottleneck", "without"), KNOWN)
def test_a_known_bottleneck_comes_first_and_its_removal_is_worth_what_was_measured(
    advice: dict[str, list], name: str, bottleneck: str, without: str
) -> None:
    """Time within two points of a hundred, energy within twelve: its power is a first-order sum of
    units.
    """
    found = advice[name][0]
    assert found.bottleneck == bottleneck
    time = measured()[without].operation_s / measured()[name].operation_s - 1.0
    energy = measured()[without].operation_j / measured()[name].operation_j - 1.0
    assert found.time == pytest.approx(time, abs=0.02)
    assert found.energy == pytest.approx(energy, abs=0.12)


# before, change, after: pairs of the multimedia workloads, whole kernels with several busy units
DCT = (
    ("dct_fp64_cached", "fp64", "dct_fp32_cached"),
    ("dct_fp64_uncached", "fp64", "dct_fp32_uncached"),
    ("dct_fp64_uncached", "caching", "dct_fp64_cached"),
    ("dct_fp32_uncached", "caching", "dct_fp32_cached"),
    ("dct_fp64_uncached", "fp64 + caching", "dct_fp32_cached"),
)


@pytest.mark.parametrize(("before", "change", "after"), DCT)
def test_a_kernel_with_several_busy_units_changes_as_measured(
    before: str, change: str, after: str, tmp_path: Path
) -> None:
    """No change of time was once predicted from fp64 to fp32, and conversions came first."""
    rows = {
        row["name"]: row
        for row in read_lines(results_folder(H200) / "multimedia.jsonl")
        if not row.get("repeat")
    }
    tuning = tune_export(export(tmp_path / "p.csv", (before,)), read_shipped_results(H200))
    found = {a.bottleneck: a for a in (*tuning.advice, *tuning.combined)}[change]
    assert found.time == pytest.approx(
        rows[after]["launch_s"] / rows[before]["launch_s"] - 1.0, abs=0.15
    )
    assert tuning.advice[0].bottleneck == ("fp64" if "fp64" in before else "caching")


@pytest.mark.parametrize("name", SOUND)
def test_a_kernel_at_its_units_limit_is_left_alone(advice: dict[str, list], name: str) -> None:
    """Loads of 16 bytes fill 16 sectors: dram_read was once told to coalesce, wgmma_bf16 to have
    more warps.
    """
    assert [a for a in advice[name] if abs(a.time) > 0.02] == []


def test_the_power_of_a_kernel_follows_from_its_counts() -> None:
    """Idle power and the joules of units, of every counted row below the cap: 15 % or better in the
    median.
    """
    results = read_shipped_results(H200)
    errors = []
    for name, metrics in counted().items():
        row = measured().get(name)
        if row is None or not row.power_w or row.power_w > 690.0 or row.group == "idle":
            continue
        profile = make_counted_profile(name, metrics, results)
        errors.append(profile.energy_j / profile.time_s / row.power_w - 1.0)
    assert len(errors) > 90
    assert np.median(np.abs(errors)) < 0.15


def test_the_command_needs_no_results_for_the_h200(tmp_path: Path, call) -> None:
    path = export(tmp_path / "p.csv", ("conflicts_31", "dram_read"))
    done = call("lab", "tune", str(path), "--gpu", "h200", "--json")
    assert done.code == 0, done.err
    plain = json.loads(done.out)
    assert [a["bottleneck"] for a in plain["advice"]] == ["bank conflicts"]
    assert {k["name"]: k["busiest"] for k in plain["kernels"]} == {
        "conflicts_31": "l1",
        "dram_read": "dram",
    }


def test_two_cards_stand_side_by_side(call) -> None:
    """Card B draws more in its memory alone."""
    other = results_folder(H200) / "card-b"
    done = call("lab", "microbench", "--show", "h200", "--against", str(other), "--json")
    assert done.code == 0, done.err
    rows = {row["benchmark"]: row for row in json.loads(done.out)}
    assert rows["int32_add"]["time_ratio"] == pytest.approx(1.0, abs=0.01)
    assert rows["dram_read"]["energy_ratio"] > 1.05 > rows["l1_read"]["energy_ratio"]
    assert (
        "card-b over h200"
        in call("lab", "microbench", "--show", "h200", "--against", str(other)).out
    )
    assert call("lab", "microbench", "--against", str(other)).code == 2
