"""``lab tune`` from what ``ncu --set full`` collects, and bottlenecks of launches and code."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import synthetic_results
from test_tune import CHIP, TIME, advised, export

import judge_tune_pairs
from judge_tune_pairs import find_files, judge_pairs
from wattcast import hardware
from wattcast.lab.microbench.microbench_results import read_results
from wattcast.lab.microbench.profile_sets import PipeRates
from wattcast.lab.microbench.tuning import TuningReport, collect_command, tune_export
from wattcast.lab.microbench.unit_work import METRICS

H200 = PipeRates.of(hardware.load_gpu("h200"))
# what the full set does not have: sizes and kinds of instructions, counts of pipes
NOT_IN_FULL = ("sm__sass_", "sm__inst_executed_pipe", "sm__pipe", "lts__t_bytes")
NOT_IN_FULL += ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",)
NOT_IN_FULL += ("smsp__thread_inst_executed.sum", "sm__cycles_elapsed.sum", "sm__cycles_active.sum")
Table = list[list[str]]


def to_number(cell: str) -> float:
    return float(cell.replace(",", "") or 0.0)


def as_full_set(table: Table) -> Table:
    """Return a table of counts as ``--set full`` would give it: shares of peaks instead of pipes."""
    head, units, *rows = table
    place = {name: i for i, name in enumerate(head)}
    kept = [i for i, name in enumerate(head) if not name.startswith(NOT_IN_FULL)]
    shares = {
        f"sm__inst_executed_pipe_{pipe}": rate
        for pipe, rate in H200.per_cycle.items()
        if f"sm__inst_executed_pipe_{pipe}.sum" in place
    }
    conflicts = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"
    branches = "sm__sass_thread_inst_executed_op_control_pred_on.sum"
    names = [f"{name}.avg.pct_of_peak_sustained_active" for name in shares]
    names += [f"{conflicts}_op_ld.sum", f"{conflicts}_op_st.sum"]
    names += ["smsp__inst_executed_op_branch.sum"]
    made = [[head[i] for i in kept] + names]
    made.append([units[i] for i in kept] + ["%"] * len(shares) + [""] * 3)
    for row in rows:
        active = to_number(row[place["sm__cycles_active.sum"]])
        values = [
            100.0 * to_number(row[place[f"{name}.sum"]]) / (rate * active)
            for name, rate in shares.items()
        ]
        values += [to_number(row[place[f"{conflicts}.sum"]]), 0.0]
        values += [to_number(row[place[branches]]) / 32.0]
        made.append([row[i] for i in kept] + [repr(value) for value in values])
    return made


@pytest.mark.parametrize(
    ("use", "signs", "near", "firsts"),
    [("held-out", 34, 31, 23), ("fourth held-out", 22, 22, 16), ("sixth held-out", 15, 15, 11)],
)
def test_the_full_set_judges_all_bottlenecks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, use: str, signs: int, near: int, firsts: int
) -> None:
    """Six of eleven judges fell silent; now what the full set has stands for what it lacks."""
    reports: list[TuningReport] = []

    def tune(path: Path, results: object) -> TuningReport:
        with path.open(newline="") as stream:
            table = as_full_set(list(csv.reader(stream)))
        full = tmp_path / "full.csv"
        with full.open("w", newline="") as stream:
            csv.writer(stream, quoting=csv.QUOTE_ALL).writerows(table)
        reports.append(tune_export(full, results, H200))  # type: ignore[arg-type]
        return reports[-1]

    monkeypatch.setattr(judge_tune_pairs, "tune_export", tune)
    pairs, advice, _ = judge_pairs(use)
    assert not reports[0].missing
    assert sum(pair["sign"] for pair in pairs) >= signs
    assert sum(pair["near"] for pair in pairs) >= near
    assert sum(first["right"] for first in advice) >= firsts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_results.write(tmp_path_factory.mktemp("results"), repeats=1)


def test_the_command_prints_what_to_collect(call) -> None:
    """No command printed the list of metrics."""
    done = call("lab", "tune", "--collect")
    assert done.code == 0
    assert "--clock-control none --cache-control none" in done.out
    assert all(
        metric in done.out
        for metric in METRICS.values()
        if "__" in metric and "launch" not in metric
    )
    assert done.out.strip() == collect_command()
    assert call("lab", "tune").code == 2


def test_kernels_of_one_shape_that_read_other_data_are_not_fused(tmp_path: Path) -> None:
    """Two kernels of one grid were to be fused where DRAM's bytes were alike within 40 %."""
    table = next(iter(read_tables("held-out", "passes")))
    head = table[0]
    column = head.index(METRICS["l2_read"])
    path = tmp_path / "p.csv"
    results = judge_tune_pairs.read_shipped_results(hardware.load_gpu("h200"))
    for factor, fused in ((1.0, True), (1.2, False)):
        changed = [list(row) for row in table]
        changed[3][column] = repr(factor * to_number(table[3][column]))
        with path.open("w", newline="") as stream:
            csv.writer(stream, quoting=csv.QUOTE_ALL).writerows(changed[:4])
        found = tune_export(path, results)
        advice = [line for line in found.advice if line.bottleneck == "fusion"]
        assert bool(advice) == fused
        if fused:
            assert "if each reads" in advice[0].seen
            assert advice[0].time_range[1] == 0.0


def read_tables(use: str, program: str) -> list[Table]:
    """Return head, units and kernels of a program of the study before its change."""
    versions = [v for v in judge_tune_pairs.read_versions() if v.use == use]
    counted = judge_tune_pairs.read_profiles(find_files(use)[1], versions)
    return [[*counted[""], *counted[f"{program}: before"]]]


STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
CYCLES = {"sm__cycles_elapsed.sum": CHIP * 1e-3, "sm__cycles_elapsed.max": CHIP * 1e-3 / 132}


def test_waiting_at_barriers_and_for_instructions_is_named(folder: Path, tmp_path: Path) -> None:
    """Uneven work before a barrier cost half of the time and was not seen."""
    little = {"sm__inst_executed_pipe_fma.sum": 0.1 * 1e-3 * 127 * CHIP / 32}
    for reason, name in (("barrier", "barriers"), ("no_instruction", "instruction cache")):
        waits = {STALLED.format(reason): 6.0, STALLED.format("wait"): 4.0}
        advice = advised(export(tmp_path / "p.csv", little | waits), folder)[name]
        assert -0.65 < advice.time < -0.3
        assert advice.time_range[1] == 0.0


@pytest.mark.parametrize(
    ("grid", "limit", "name"), [(33, 8, "small grid"), (1188, 8, "tail wave"), (1056, 8, "")]
)
def test_few_blocks_and_tails_are_named(
    folder: Path, tmp_path: Path, grid: int, limit: int, name: str
) -> None:
    """33 blocks for 132 multiprocessors; 1188 blocks where 1056 have room at once."""
    launch = {"launch__grid_size": float(grid), "launch__occupancy_limit_warps": float(limit)}
    little = {"sm__inst_executed_pipe_fma.sum": 0.1 * 1e-3 * 127 * CHIP / 32}
    advice = advised(export(tmp_path / "p.csv", CYCLES | launch | little), folder)
    named = {"small grid", "tail wave"} & set(advice)
    assert named == ({name} if name else set())


def test_integer_divisions_are_no_conversions(folder: Path, tmp_path: Path) -> None:
    """A division is two conversions, a reciprocal and eleven others; a known divisor needs none."""
    divisions = 1e-3 * 16 * CHIP / 32 / 3.0  # of warps, that fill the special unit
    counts = {
        "sm__inst_executed_pipe_xu.sum": 3.0 * divisions,
        "sm__sass_thread_inst_executed_op_conversion_pred_on.sum": 64.0 * divisions,
        "sm__inst_executed_pipe_alu.sum": 6.0 * divisions,
        "sm__inst_executed_pipe_fmaheavy.sum": 5.0 * divisions,
        "smsp__inst_executed.sum": 15.0 * divisions,
    }
    advice = advised(export(tmp_path / "p.csv", counts), folder)
    assert "conversions" not in advice
    assert advice["integer division"].time < -0.4


def test_a_profile_at_the_base_clock_is_judged_at_its_clock(folder: Path, tmp_path: Path) -> None:
    """Without --clock-control none the clock is locked to its base, and units need longer."""
    half = {
        "sm__cycles_elapsed.sum": 0.5 * CHIP * 1e-3,
        "sm__cycles_elapsed.max": 0.5 * CHIP * 1e-3 / 132,
    }
    count = {"sm__inst_executed_pipe_fp64.sum": 0.5 * 1e-3 * 63.5 * CHIP / 32, TIME: 1e6}
    shares = []
    for cycles in (CYCLES, half):
        path = export(tmp_path / "p.csv", cycles | count)
        (profile,) = tune_export(path, read_results(folder)).profiles
        shares.append(profile.busy_share)
    assert shares[0] == pytest.approx(0.5, rel=1e-2)
    assert shares[1] == pytest.approx(1.0, rel=1e-2)


def count_special_busy(share: float) -> float:
    """Return the instructions of warps that keep the special unit busy in a millisecond."""
    return share * 1e-3 * 16 * CHIP / 32


def test_divisions_are_told_by_pipes_where_conversions_are_not_counted(
    folder: Path, tmp_path: Path
) -> None:
    """The full set has no conversions: integer products and few fp32 ones tell divisions."""
    special = count_special_busy(0.6)
    divisions = special / 3.0
    counts = {
        "sm__inst_executed_pipe_xu.sum": special,
        "sm__inst_executed_pipe_alu.sum": 6.0 * divisions,
        "sm__inst_executed_pipe_fmaheavy.sum": 5.0 * divisions,
        "sm__inst_executed_pipe_fma.sum": 5.0 * divisions,
        "smsp__inst_executed.sum": 15.0 * divisions,
    }
    advice = advised(export(tmp_path / "p.csv", counts), folder)
    assert "conversions" not in advice
    assert advice["integer division"].time < -0.3
    # as many fp32 instructions on both halves: these are functions
    functions = counts | {"sm__inst_executed_pipe_fma.sum": 10.0 * divisions}
    assert "integer division" not in advised(export(tmp_path / "p.csv", functions), folder)


@pytest.mark.parametrize(("share", "is_named"), [(0.8, True), (0.3, False)])
def test_a_busy_special_unit_may_convert(
    folder: Path, tmp_path: Path, share: float, is_named: bool
) -> None:
    """What it does is not counted, so that the interval reaches to no change."""
    counts = {
        "sm__inst_executed_pipe_xu.sum": count_special_busy(share),
        "sm__inst_executed_pipe_fma.sum": 0.2 * 1e-3 * 127 * CHIP / 32,
    }
    advice = advised(export(tmp_path / "p.csv", CYCLES | counts), folder)
    assert ("conversions" in advice) == is_named
    if is_named:
        assert advice["conversions"].time_range[1] == 0.0
        assert "if those are conversions" in advice["conversions"].seen
