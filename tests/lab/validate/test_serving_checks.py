"""Serving against the measured engines that ship: figures of the fitting models, and the split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from wattcast import hardware
from wattcast.hardware.catalogue_reader import list_boards
from wattcast.lab.fit.engine_host_times import FITTING, fit_host_times
from wattcast.lab.fit.engine_records import load_engine_records
from wattcast.lab.validate.model_checks import (
    compare_known_boards,
    compare_serving,
    make_serving_rows,
    serving_rows,
)
from wattcast.lab.validate.public_checks.learn_distances import learn_engine_host
from wattcast.predictor.bundle.support_widening import learned_distances
from wattcast.predictor.engine_host import load_host_times


@pytest.fixture(scope="module")
def records():
    return load_engine_records("h200")


def test_intervals_hold_the_hosts_of_engines_that_were_measured() -> None:
    shipped = learned_distances().engine_host
    learned = learn_engine_host("h200")
    assert shipped.rows == learned.rows
    assert shipped.low == pytest.approx(learned.low, abs=0.02)
    assert shipped.high == pytest.approx(learned.high, abs=0.02)


def test_fitting_runs_meet_the_goals_of_traffic(records) -> None:
    found = compare_serving(
        records, hardware.load_gpu("h200"), models=("llama-3.1-8b",), held_out=False
    )
    said = make_serving_rows("h200", found, {False: "fitting"})
    rows = {row["quantity"]: row["mape"] for row in said if "traffic" in row["set"]}
    goals = {
        "TPOT p50": 6,
        "TPOT p99": 12,
        "TTFT p50": 12,
        "TTFT p99": 25,
        "throughput": 4,
        "power": 4,
    }
    assert all(rows[name] < goal for name, goal in goals.items()), rows
    assert not any(one.held_out for one in found)


@pytest.mark.parametrize(
    "models_a_board", [1, pytest.param(None, marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_a_step_is_judged_with_the_board_that_was_read(records, models_a_board: int | None) -> None:
    """Power is nearer than for the mean card on both boards; steps on cards without one are left
    out.
    """
    models: set[str] = set()
    for part_number in list_boards("h200").values():
        read = {row["model"] for row in records.rows if row["card_board"] == part_number}
        models.update(sorted(read)[:models_a_board])
    records = replace(records, rows=tuple(row for row in records.rows if row["model"] in models))
    told = compare_known_boards(records, "h200")
    board = {row["id"]: row["card_board"] for row in records.rows if row["card_board"]}
    read = {row["model"] for row in records.rows if row["card_board"]}
    steps = replace(records, rows=tuple(row for row in records.rows if row["kind"] != "traffic"))
    plain = {
        one.id: one
        for one in compare_serving(steps, hardware.load_gpu("h200"), sorted(read), held_out=True)
    }
    assert {one.id for one in told} == {name for name in board if name in plain}
    assert set(board.values()) == set(list_boards("h200").values())
    for part_number in list_boards("h200").values():
        same = [one for one in told if one.kind == "decode" and board[one.id] == part_number]
        known = sum(abs(one.error_percent("power")) for one in same)
        assert known < 0.8 * sum(abs(plain[one.id].error_percent("power")) for one in same), (
            part_number
        )


def test_held_out_rows_stay_apart(records) -> None:
    models = {row["model"]: row["held_out"] for row in records.rows}
    steps_alone = {"llama-3.1-8b-kv8"}  # no traffic, from which host times are fitted
    assert {name for name, held in models.items() if not held} == {*FITTING} | steps_alone
    held_loads = {row["load"] for row in records.select_kind("traffic") if row["held_out_load"]}
    assert held_loads == {0.5}


def test_shipped_host_times_are_the_fitted_ones(records) -> None:
    fitted, shipped = (
        fit_host_times(records, FITTING, experts=("qwen3-30b-a3b", "mixtral-8x7b-fp8")),
        load_host_times(),
    )
    for name in ("expert_layers", "same_expert_layers", "launch_spread", "launch_memory"):
        assert getattr(shipped, name) == pytest.approx(fitted.pop(name), rel=0.02), name
    for name, value in fitted.items():
        assert getattr(shipped, f"{name}_s") == pytest.approx(value, rel=0.02), name


def test_experts_are_judged_on_weights_that_tell_tokens_apart(records) -> None:
    found = compare_serving(records, hardware.load_gpu("h200"), models=("olmoe-1b-7b",))
    steps = [one for one in found if one.kind == "decode"]
    assert steps
    normal = {row["id"] for row in records.rows if row["normal_weights"]}
    assert {one.id for one in steps} <= normal
    assert (
        len([one for one in found if one.kind == "traffic"]) == 2
    )  # a third compiled a kernel on the way


def test_missing_tables_give_a_row_that_says_so(tmp_path: Path) -> None:
    (row,) = serving_rows("h200", tmp_path)
    assert "not found" in row["missing"]


def test_packed_folder_reads_back(call, tmp_path: Path) -> None:
    folder = tmp_path / "measured"
    folder.mkdir()
    (folder / "runs.jsonl").write_text('{"run": "r1", "card_uuid": "GPU-1"}\n')
    step = '"kind": "prefill", "model": "m", "run": "r1", "held_out": false, "throttle": ["cap"], "flags": []'
    group = '{"prompt_tokens": 8, "prompt_context": 0, "device_median_s": 0.001}'
    (folder / "rows.jsonl").write_text(
        '{"id": "m/failed", "kind": "failed", "model": "m", "rows": 0, "error": "ended with the budget"}\n'
        f'{{"id": "m/a", {step}, "groups": [{group}], "latency_s": 1}}\n'
        f'{{"id": "m/a", {step}, "groups": [{group}], "latency_s": 2.5}}\n'
        f'{{"id": "m/t", "kind": "traffic", "model": "m", "run": "r1", "ttft_s": {{"p50": 0.25}}}}\n'
    )
    (folder / "requests.jsonl").write_text('{"run": "m/t", "number": 0, "arrival_s": 0.5}\n')
    (folder / "steps.jsonl").write_text(
        '{"run": "m/t", "begin_s": [0.0, 1.0], "device_s": [null, 0.5]}\n'
    )
    later = tmp_path / "steps-alone"
    later.mkdir()
    (later / "runs.jsonl").write_text("")
    (later / "rows.jsonl").write_text(
        f'{{"id": "m/b", {step.replace("prefill", "decode")}, "latency_s": 3}}\n'
    )
    assert call("lab", "pack-engine", str(folder), "--out", str(tmp_path)).code == 0
    assert (
        "4 rows, 1 serving runs, 1 requests"
        in call("lab", "pack-engine", str(later), "--out", str(tmp_path)).out
    )
    found = load_engine_records(tmp_path)
    assert [row["latency_s"] for row in found.select_kind("decode")] == [3.0]
    (row,) = found.select_kind("prefill")
    assert (row["latency_s"], row["card_uuid"], row["groups"]) == (2.5, "GPU-1", "8@0:1.0000")
    assert found.select_kind("traffic")[0]["ttft_s.p50"] == 0.25
    assert [row["begin_s"] for row in found.serving_steps if row["run"] == "m/t"] == [0.0, 1.0]
    assert len(found.requests_of("m/t")) == 1


def test_a_folder_of_another_campaign_is_refused(call, tmp_path: Path) -> None:
    """Without ``runs.jsonl``, or with rows of kernels, packing once ended in an internal error."""
    (tmp_path / "rows.jsonl").write_text('{"record": "run", "run": "r1"}\n')
    for missing, said in ((True, "no runs.jsonl"), (False, "rows with id, kind, model")):
        if not missing:
            (tmp_path / "runs.jsonl").write_text('{"run": "r1"}\n')
        done = call("lab", "pack-engine", str(tmp_path), "--out", str(tmp_path / "out"))
        assert done.code == 2
        assert said in done.err
