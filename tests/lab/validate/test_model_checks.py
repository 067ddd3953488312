"""Whole-model rows: predicted as they were run, compared with floors; the host's launch cost from
eager ones.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wattcast import hardware
from wattcast.calibrate import whole_models
from wattcast.calibrate.whole_models import (
    ModelCase,
    build_row_graph,
    fit_host_cost,
    fit_host_database,
)
from wattcast.cli.command_output import Environment
from wattcast.cli.main import main
from wattcast.core.errors import BadInput
from wattcast.core.measured_rows import ModelRow
from wattcast.core.row_journals import Journal
from wattcast.core.row_tables import MODELS_FILE, write_table
from wattcast.lab.validate.kernel_checks import five_number_floor, model_family
from wattcast.lab.validate.long_checks.ablations import flop_byte_regression
from wattcast.lab.validate.model_checks import compare_models, model_rows
from wattcast.predictor import api
from wattcast.predictor.bundle import bundle_for

WORK = [
    ("gpt2", "prefill", 8, 512, "flash", True),
    ("gpt2", "decode", 8, 256, "flash", True),
    ("bert-large", "prefill", 32, 512, "eager", True),
    ("bert-large", "prefill", 8, 128, "flash", True),
    ("vit-large", "forward", 16, None, "flash", True),
    ("llama3-8b", "prefill", 4, 512, "flash", True),
    ("gpt2", "prefill", 1, 64, "flash", False),
    ("bert-large", "prefill", 1, 64, "flash", False),
    ("vit-large", "forward", 1, None, "flash", False),
]
HOST_S = 19e-6


def measured(slower: float = 1.05, hotter: float = 0.97) -> list[ModelRow]:
    """Rows a GPU would give whose kernels take a little longer and draw a little less than
    predicted.
    """
    rows = []
    for model, phase, batch, seq, attention, graph in WORK:
        plain = ModelRow(
            f"{model}-{phase}-{batch}-{graph}",
            model,
            phase,
            batch,
            "bf16",
            attention,
            "eager",
            graph,
            seq=seq,
        )
        p = api.predict(build_row_graph(plain), "h200", host_launch=0.0 if graph else HOST_S)
        factor = slower if graph else 1.0
        rows.append(
            replace(
                plain,
                latency_s=float(p.latency_s) * factor,
                power_w=float(p.power_w) * hotter,
                sm_clock_hz=float(p.clock_hz),
                throttle=("sw_power_cap",) if bool(p.capped) else (),
            )
        )
    return rows


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    journal = Journal(folder / "models.jsonl")
    for row in measured():
        journal.append(row)
    journal.append(
        replace(
            measured()[0], id="failed", latency_s=None, error="RuntimeError: CUDA out of memory"
        )
    )
    return folder


def by_quantity(rows: list[dict[str, object]]) -> dict[tuple[str, str], dict[str, object]]:
    return {(str(row["set"]), str(row["quantity"])): row for row in rows}


def test_errors_are_those_put_in(database: Path) -> None:
    found = by_quantity(model_rows("h200", database))
    bound = "h200 whole models, GPU-bound"
    assert found[bound, "latency"]["n"] == 6
    assert found[bound, "latency"]["mape"] == pytest.approx(100 * (1 - 1 / 1.05), abs=0.01)
    assert found[bound, "power"]["mape"] == pytest.approx(100 * (1 / 0.97 - 1), abs=0.01)
    assert found[bound, "latency"]["must"] == 11.0
    assert found[bound, "power"]["the_cap"] > found[bound, "power"]["mape"]
    assert found[bound, "clock"]["mape"] == pytest.approx(0.0, abs=1e-6)
    assert found[bound, "latency, capped"]["n"] + found[bound, "latency, not capped"]["n"] == 6


def test_a_host_is_calibrated_on_other_models(database: Path) -> None:
    found = by_quantity(model_rows("h200", database))
    launched = "h200 whole models, launched by the host"
    left_out = found[launched, "latency, launch cost from the other models"]
    assert left_out["host_us_per_operator"] == pytest.approx(19.0, rel=0.02)
    assert left_out["mape"] < 1.0
    assert found[launched, "latency, default launch cost"]["mape"] > left_out["mape"]


def test_without_rows_the_ledger_says_what_is_missing(tmp_path: Path) -> None:
    for rows in (model_rows("h200", tmp_path), model_rows("h200", tmp_path / "nowhere")):
        assert {row["quantity"] for row in rows} == {"latency", "power"}
        assert all(row["n"] == 0 and row["mape"] is None for row in rows)
    assert "wattcast.lab models" in model_rows("h200", tmp_path)[0]["missing"]


def test_a_packed_table_reads_like_its_journal(database: Path, tmp_path: Path) -> None:
    rows = [
        vars(row) | {"throttle": list(row.throttle), "flags": [], "card_name": "H200"}
        for row in measured()
    ]
    write_table(tmp_path / MODELS_FILE, rows)
    packed = {case.row.id: case.row.latency_s for case in whole_models.load_models(tmp_path)}
    assert packed == {
        case.row.id: case.row.latency_s for case in whole_models.load_models(database)
    }


def test_each_row_is_predicted_as_it_was_run(database: Path) -> None:
    chip = hardware.load_gpu("h200")
    found = compare_models(whole_models.load_models(database), chip, bundle_for(chip))
    assert found.graph.sum() == 6
    exact = found.predicted_s[found.graph] / found.latency_s[found.graph]
    np.testing.assert_allclose(exact, 1 / 1.05, rtol=1e-6)
    assert (
        found.predicted_s[~found.graph] < found.latency_s[~found.graph]
    ).all()  # the default host is faster


def test_five_numbers_never_see_their_own_family() -> None:
    """A family whose times are doubled must not move its own floor."""
    chip = hardware.load_gpu("h200")
    cases = [ModelCase(row, build_row_graph(row)) for row in measured() if row.graph]
    floor_s, floor_w = five_number_floor(cases, chip)
    assert np.isfinite(floor_s).all()
    assert (floor_w <= float(np.mean(chip.power.limit_w))).all()
    doubled = [
        ModelCase(
            replace(case.row, latency_s=2 * case.row.latency_s)
            if case.row.model == "gpt2"
            else case.row,
            case.graph,
        )
        for case in cases
    ]
    again_s, _ = five_number_floor(doubled, chip)
    own = np.array([case.row.model == "gpt2" for case in cases])
    np.testing.assert_allclose(again_s[own], floor_s[own], rtol=1e-9)
    assert not np.allclose(again_s[~own], floor_s[~own])
    assert model_family("gpt2-xl") == model_family("gpt2")


def test_a_regression_finds_what_is_linear() -> None:
    random = np.random.default_rng(0)
    flop, byte = random.uniform(1, 9, 60), random.uniform(1, 9, 60)
    latency = 2e-6 + 3e-6 * flop + 1e-6 * byte
    np.testing.assert_allclose(
        flop_byte_regression(flop, byte, latency, np.arange(60) % 5), latency, rtol=1e-6
    )


def test_host_cost_of_one_row_is_met_exactly() -> None:
    chip = hardware.load_gpu("h200")
    row = next(row for row in measured() if not row.graph)
    host = fit_host_cost([ModelCase(row, build_row_graph(row))], chip, bundle_for(chip))
    assert host.host_s == pytest.approx(HOST_S, rel=0.01)
    assert host.rows[0].host_s == pytest.approx(HOST_S, rel=1e-3)
    assert host.error("predicted_s") < 0.005


def test_a_gpu_bound_row_asks_for_nothing() -> None:
    chip = hardware.load_gpu("h200")
    row = replace(measured()[5], graph=False)
    host = fit_host_cost([ModelCase(row, build_row_graph(row))], chip, bundle_for(chip))
    assert host.rows[0].host_s is None


def run(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(list(argv), Environment(stdout=out, stderr=err, variables={}))
    return code, out.getvalue(), err.getvalue()


def test_fit_host_on_the_command_line(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(
        "model,batch,seq,phase,latency_s\ngpt2,1,64,prefill,4.5 ms\nbert-base,1,64,prefill,0.0034\n"
    )
    code, out, err = run(
        "lab", "fit", "host", str(table), "--gpu", "h200", "--out", str(tmp_path / "bundle")
    )
    assert code == 0, err
    assert "--host-launch" in out
    assert "host_per_operator" in (tmp_path / "bundle" / "bundle.json").read_text()
    code, out, _ = run("lab", "fit", "host", str(table), "--gpu", "h200", "--json")
    found = json.loads(out)
    assert 1e-5 < found["host_s"] < 4e-5
    assert found["error"]["predicted"] <= found["error"]["default"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model,batch,latency_s\ngpt2,x,1\n", "whole number"),
        ("model,size,latency_s\ngpt2,1,1\n", "size"),
        ("model,batch\ngpt2,1\n", "latency_s"),
        ("model,batch,latency_s\ngpt9,1,1\n", "gpt"),
        ("model,batch,latency_s,graph\ngpt2,1,1,yes\n", "operator by operator"),
    ],
)
def test_a_table_that_is_wrong_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(BadInput, match=said):
        fit_host_database(tmp_path / "t.csv", "h200")
