"""The H200's own microbenchmarks: the shipped table, map and model, and what they are worth on
unseen work.
"""

from __future__ import annotations

import io
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast.cli.command_output import Environment
from wattcast.cli.main import main
from wattcast.cli.measure_bridges import prepare_estimate
from wattcast.core.errors import BadInput
from wattcast.core.row_journals import read_lines
from wattcast.core.row_tables import database_folder
from wattcast.lab.counter_models import rails_apart
from wattcast.lab.counter_models.counter_figures import make_rails_figures
from wattcast.lab.counter_models.microbench_lines import make_table_lines
from wattcast.lab.counter_models.profiler_counters import compute_ncu_events, list_ncu_metrics
from wattcast.lab.counter_models.rails_apart import RailsFit, shipped_fit
from wattcast.lab.microbench.benchmark_suite import list_benchmarks
from wattcast.lab.paper_figures.multimedia_figures import RAIL_PARTS, make_figures, table_activity
from wattcast.lab.validate.counter_model_checks import (
    dct_savings,
    kernel_energies_above_idle,
    make_counter_model_rows,
    multimedia_power,
)
from wattcast.power import power_model


@pytest.fixture(scope="module")
def fit() -> RailsFit:
    return shipped_fit("h200")


def test_multimedia_is_predicted_by_a_model_of_microbenchmarks(fit: RailsFit) -> None:
    """Must: 3 %. The aims are not reached: 2 % in the mean and 4 % at worst."""
    trained = {fit.table.benchmark_names[b] for b in fit.table.benchmark[fit.train]}
    pairs = multimedia_power(fit)
    assert len(pairs) >= 11
    assert not trained & {pair.name for pair in pairs}
    assert np.mean([abs(pair.off_percent) for pair in pairs]) <= 3.0
    assert max(abs(pair.off_percent) for pair in pairs) <= 5.0


def test_what_a_cheaper_dct_saves_is_foretold_within_30_percent(fit: RailsFit) -> None:
    found = dct_savings(fit)
    assert len(found) == 5
    for saving in found:
        assert saving.measured > 0.0
        assert saving.predicted > 0.0
        assert abs(saving.off_percent) <= 30.0


def test_a_kernel_beside_moving_frames_takes_what_its_own_counters_say(fit: RailsFit) -> None:
    """The difference of two rows of 140 to 290 W; the smallest kernel (rotation, 36 mJ) is the
    least certain.
    """
    found = {pair.name: pair for pair in kernel_energies_above_idle(fit)}
    assert set(found) == {"rotate", "dct_fp32_cached", "dct_fp64_uncached"}
    assert abs(found["dct_fp32_cached"].off_percent) < 15.0
    assert abs(found["dct_fp64_uncached"].off_percent) < 15.0
    assert abs(found["rotate"].off_percent) < 35.0


def test_the_ledger_has_every_test_with_its_goal() -> None:
    rows = {(r["set"], r["quantity"]): r for r in make_counter_model_rows("h200")}
    power = rows["H200 multimedia, trained on microbenchmarks only", "power"]
    assert (power["must"], power["aim"]) == (3.0, 2.0)
    assert power["mape"] <= power["must"] < power["floor"]
    assert sum(r["must"] == 30.0 and r["mape"] <= 30.0 for r in rows.values()) == 5
    counted = [r for (name, _), r in rows.items() if "counted operators" in name]
    assert len(counted) == 2
    assert all(r["one_factor_a_card"] < r["mape"] < r["floor"] for r in counted)
    assert all(len(r["factors"].split(", ")) >= 2 for r in counted)


def test_costs_are_identified(fit: RailsFit) -> None:
    assert fit.condition < 30.0
    assert all(c.vif is None or c.vif < 10.0 for c in fit.coefficients)
    assert all(c.standard_error is not None and c.low > 0.0 for c in fit.coefficients)
    assert any("single benchmark" in words and "imma_cycle" in words for words in fit.warnings)


def test_the_shipped_model_is_the_fit_of_the_shipped_rows(fit: RailsFit) -> None:
    """A new V(f) in the bundle moves costs a little; fit it anew where this fails
    (docs/method/counters.md).
    """
    shipped = power_model.load_saved_model(Path("h200"))
    assert "h200" in power_model.shipped_models()
    assert shipped.model.required_events == fit.model.required_events
    activity = table_activity(fit.table, fit.model.required_events)
    known = fit.train | fit.test
    assert_allclose(shipped.model.power(activity).total_w[known], fit.predicted_w[known], rtol=0.02)
    assert shipped.error_percent["never trained on multimedia"] == pytest.approx(
        np.mean([abs(pair.off_percent) for pair in multimedia_power(fit)]), abs=0.3
    )


def test_the_second_round_was_used_as_decided_beforehand(fit: RailsFit) -> None:
    """One card, one run, and the names left out as they were fixed."""
    files = [database_folder("h200") / f"{name}.jsonl" for name in ("microbench", "multimedia")]
    rows = [
        row for file in files for row in read_lines(file) if row["run"] < "20261116"
    ]  # later ones have no counters
    runs = {
        row["run"]: row["card_uuid"] for row in read_lines(database_folder("h200") / "runs.jsonl")
    }
    counters = database_folder("h200") / "microbench_counters.jsonl"
    counted = {row["id"]: row.get("version", 1) for row in read_lines(counters)}
    later = [
        row
        for row in rows
        if row.get("version", 1) > counted.get(row["name"], row.get("version", 1))
    ]
    in_turns = {b.name for b in list_benchmarks() if b.turns > 1} & {row["name"] for row in rows}
    assert {row["name"] for row in later} == in_turns  # not used here
    assert {runs[row["run"]] for row in rows if row not in later} == {
        "GPU-e6869e55-eb64-0399-404a-06d15b81ec23"
    }
    assert not [row for row in rows if row.get("error")]
    trained = {fit.table.benchmark_names[b] for b in fit.table.benchmark[fit.train]}
    measured = {row["name"] for row in rows if row["group"] != "multimedia"}
    assert measured - trained == {
        *fit.table.left_out,
        "dram_memcpy",
    }  # a copy by the driver has no counters
    assert len(fit.table.left_out) == 25


def test_a_missing_model_is_named() -> None:
    with pytest.raises(BadInput, match=r"h200 or tegra-k1, which ship, got .h2000"):
        power_model.load_saved_model(Path("h2000"))


@pytest.mark.parametrize("name", [*power_model.shipped_models(), "Tegra K1"])
def test_every_model_that_ships_loads_by_its_name(name: str) -> None:
    saved = power_model.load_saved_model(Path(name))
    assert saved.model.required_events
    assert saved.provenance.source


@pytest.fixture
def counted(fit: RailsFit, tmp_path: Path) -> Path:
    """An export of ncu with one kernel of a microsecond and a thousand of everything."""
    names = list_ncu_metrics(fit.model.required_events)
    book = tmp_path / "kernels.csv"
    head = ["ID", "Kernel Name", "Grid Size", "Block Size", *names]
    units = ["", "", "", "", *("nsecond" if name.startswith("gpu__time") else "" for name in names)]
    row = ["0", "k", "(8, 1, 1)", "(256, 1, 1)", *("1000" for _ in names)]
    book.write_text(
        "\n".join(",".join(f'"{cell}"' for cell in line) for line in (head, units, row)) + "\n"
    )
    return book


def test_measure_run_takes_the_shipped_model_by_name(
    fit: RailsFit, counted: Path, tmp_path: Path
) -> None:
    saved, book, _ = prepare_estimate(
        Path("h200"), counted, tmp_path / "trace.json", None, ["true"]
    )
    assert saved.name == "h200"
    (counts,) = book.count.values()
    assert set(fit.model.required_events) <= set(counts)


def test_a_run_that_is_over_is_estimated_from_files(counted: Path, tmp_path: Path) -> None:
    """Two launches of Nsight Systems, one of a kernel nobody counted; the same as a trace of
    PyTorch.
    """
    path = tmp_path / "run.sqlite"
    with closing(sqlite3.connect(path)) as base:
        base.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL)")
        columns = ", ".join(f"{side}{axis} INT" for side in ("grid", "block") for axis in "XYZ")
        base.execute(
            f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, demangledName INT, {columns})"
        )
        base.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, "k"), (2, "void other(int)")])
        rows = [(5000, 6000, 1, 8, 1, 1, 256, 1, 1), (7000, 7500, 2, 8, 1, 1, 256, 1, 1)]
        base.executemany(
            f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({', '.join('?' * 9)})", rows
        )
        base.commit()
    argv = (
        "lab",
        "estimate",
        "--model",
        "h200",
        "--counters",
        str(counted),
        "--memory-clock",
        "3201MHz",
    )
    code, out = run(*argv, str(path), "--json")
    assert code == 3  # a kernel without counters is not in the sum
    said = json.loads(out)
    assert said["clock_hz"] == pytest.approx(1e9)  # a thousand cycles in a microsecond
    assert [kernel["kernel"] for kernel in said["without_counters"]] == ["other"]
    assert said["known_share"] == pytest.approx(0.8)
    place = {"grid": [8, 1, 1], "block": [256, 1, 1]}
    kernels = [("k", 5.0, 1.0), ("void other(int)", 7.0, 0.5)]
    events = [
        {"ph": "X", "cat": "kernel", "name": n, "ts": t, "dur": d, "args": place}
        for n, t, d in kernels
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert json.loads(run(*argv, str(tmp_path / "trace.json"), "--json")[1])[
        "power_w"
    ] == pytest.approx(said["power_w"])
    code, out = run(*argv, str(path), "--clock", "1980MHz")
    assert code == 3
    assert "1 kernel lacks counters" in out
    path.write_bytes(path.read_bytes()[:600])
    assert run(*argv, str(path))[0] == 2
    assert run(*argv[:-4], "--counters", str(tmp_path / "none.ncu-rep"), str(path))[0] == 2


def test_table_and_fit_as_commands(
    tmp_path: Path, fit: RailsFit, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, model, figures = tmp_path / "h200.csv", tmp_path / "model.yaml", tmp_path / "figures"
    assert run("lab", "microbench", "--show", "h200", "--table", str(table))[0] == 0
    argv = (
        "lab",
        "fit",
        "counters",
        str(table),
        "--columns",
        "h200",
        "--out",
        str(model),
        "--figures",
        str(figures),
    )
    code, out = run(*argv, "--json")
    assert code == 0
    said = json.loads(out)
    assert said["leaning"] == fit.leaning
    assert {what: error for what, _, error in said["errors"]}["never trained on, multimedia"] <= 3.0
    others = {
        kind: errors["never trained on, multimedia"] for kind, errors in said["other_kinds"].items()
    }
    assert others["rate"] == pytest.approx(
        5.1, abs=0.1
    )  # docs/method/counters.md: figure 1 of the paper on the H200
    assert others["switched_capacitance"] == pytest.approx(37.4, abs=0.1)
    assert others["hybrid_rail"] == pytest.approx(5.8, abs=0.1)
    assert power_model.load_saved_model(model).model.to_plain()["base_w"] == pytest.approx(
        fit.model.base_w, rel=1e-9
    )
    assert {path.stem for path in figures.glob("*.png")} == set(
        make_rails_figures(fit) | make_figures(fit, "")
    )
    monkeypatch.setattr(rails_apart, "fit_rails", lambda *given, **options: fit)
    code, out = run("lab", "fit", "counters", str(table), "--columns", "h200")
    assert code == 0
    assert "dct_fp64_cached_at_rate" in out
    assert "Leaning" in out
    code, _ = run("lab", "fit", "counters", str(table), "--columns", "h200", "--estimator", "ols")
    assert code != 0


def test_figures_show_every_part(fit: RailsFit) -> None:
    parts = [part for _, members in RAIL_PARTS for part in members]
    assert sorted(parts) == sorted(fit.model.parts)


def run(*argv: str) -> tuple[int, str]:
    env = Environment(io.StringIO(), io.StringIO())
    return main(list(argv), env), env.stdout.getvalue()


def test_counts_are_brought_to_the_measured_launch() -> None:
    """Scaled by cycles, kernels that DRAM holds up seemed to move a quarter less at the cap than
    they did.
    """
    lines = {
        str(line["benchmark"]): line for line in make_table_lines(database_folder("h200"), "h200")
    }

    def rate(name: str, event: str) -> float:
        return float(lines[name][event]) / float(lines[name]["seconds"])

    capped = rate("mix_fp64_dram", "dram_read_byte")
    assert float(lines["mix_fp64_dram"]["clock_hz"]) < 0.9 * 1.98e9  # it met the cap
    assert capped == pytest.approx(rate("dram_read", "dram_read_byte"), rel=0.03)
    per_cycle = rate("mma_fp16", "half_instruction") / float(
        lines["mma_fp16"]["effective_clock_hz"]
    )
    assert per_cycle == pytest.approx(
        rate("mma_bf16", "half_instruction") / float(lines["mma_bf16"]["effective_clock_hz"]),
        rel=0.01,
    )
    assert rate("idle_context_on", "executed_warp") == 0.0
    assert (
        0.88
        < float(lines["mix_fp64_dram"]["relative_voltage"])
        < 1.0
        == lines["dram_copy"]["relative_voltage"]
    )


def test_a_clip_larger_than_l2_goes_through_dram() -> None:
    lines = {
        str(line["benchmark"]): line for line in make_table_lines(database_folder("h200"), "h200")
    }
    frame_byte = 1920 * 1080 * 1.5
    rotate = lines["rotate"]
    assert float(rotate["dram_write_byte"]) == pytest.approx(80 * frame_byte, rel=0.01)
    assert float(rotate["dram_read_byte"]) == pytest.approx(80 * frame_byte, rel=0.01)
    assert float(rotate["dram_read_access"]) * 32 == pytest.approx(float(rotate["dram_read_byte"]))
    assert float(lines["rotate_moved"]["dram_write_byte"]) < 0.5 * 8 * frame_byte


def test_tensor_cycles_go_to_the_kind_of_product() -> None:
    """One kernel each: warpgroup products, warp products, and arithmetic on two halves, which is no
    product.
    """
    pipe = "sm__inst_executed_pipe_tensor"
    metrics = {
        "sm__pipe_tensor_cycles_active.sum": np.array([3.9, 3.9, 3.9]),
        f"{pipe}.sum": np.array([0.03, 0.65, 1.95]),
        f"{pipe}_op_hmma.sum": np.array([0.03, 0.65, 1.95]),
        f"{pipe}_op_gmma.sum": np.array([0.03, 0.0, 0.0]),
    }
    found = compute_ncu_events(metrics)
    assert_allclose(found["wgmma_cycle"], [3.9, 0.0, 0.0])
    assert_allclose(found["mma_cycle"], [0.0, 2.6, 0.0], atol=1e-12)
    assert_allclose(found["half_instruction"], [0.0, 0.65, 1.95])
    assert "imma_cycle" not in found
