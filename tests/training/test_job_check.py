"""Checks of training jobs against their logs: what they find, what they pass, what they refuse.

Logs are made up (``made_up_logs``) from the prediction of a job, with steps, watts and clocks that
are off as a known cause makes them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_logs import (
    BEGIN_S,
    MadeUpJob,
    write_folder,
    write_lines,
    write_table,
    write_trainer_state,
)

from wattcast.calibrate.calibration_rows import read_calibration_rows
from wattcast.core.errors import BadInput, ExitCode, WattcastError
from wattcast.hardware import load_gpu
from wattcast.training.checking.expected_job import (
    ExpectedJob,
    expect_job,
    parse_expected_job,
    write_expected_job,
)
from wattcast.training.checking.job_causes import CAUSES, PredictedJob
from wattcast.training.checking.job_check import JobCheck, _find_pauses, check_job
from wattcast.training.checking.job_check_coefficients import JOB_CHECK
from wattcast.training.checking.job_check_report import summarise_job_check, write_job_rows
from wattcast.training.checking.job_logs import read_job_logs
from wattcast.training.checking.log_columns import Quantity, recognise_column
from wattcast.training.checking.measured_job import sum_up_logs
from wattcast.training.train_job import TrainingResult, train

OPTIONS: dict[str, Any] = {"gpus": 4, "seq": 1024, "global_batch": 32, "micro_batch": 8, "tp": 1}


@cache
def predict_job() -> TrainingResult:
    """The job as it is predicted."""
    return train("gpt2", "h200", **OPTIONS)


@pytest.fixture
def job() -> ExpectedJob:
    return expect_job("gpt2", "h200", OPTIONS, predict_job())


def run_as_predicted() -> MadeUpJob:
    """A job that runs as it was predicted."""
    result = predict_job()
    return MadeUpJob(result.step_s, (float(result.step.power_w),) * result.gpus)


def check(job: ExpectedJob, ran: MadeUpJob, folder: Path) -> JobCheck:
    """Check the logs of a job."""
    history = write_lines(folder / "history.jsonl", ran.list_history())
    # Short jobs have few readings: watts of a longer one stand for theirs
    system = write_lines(folder / "system.jsonl", stretch(ran).list_system())
    return check_job(job, read_job_logs([history, system]))


def stretch(ran: MadeUpJob) -> MadeUpJob:
    """The same job over at least ten minutes, so that its watts are read often."""
    return replace(ran, steps=max(ran.steps, round(600.0 / ran.step_s)))


def test_a_job_that_runs_as_predicted_raises_no_alarm(job: ExpectedJob, tmp_path: Path) -> None:
    found = check(job, run_as_predicted(), tmp_path)
    assert not found.has_alarm
    assert {figure.name for figure in found.figures} == {"step_s", "power_w"}
    assert found.measured.step_s == pytest.approx(predict_job().step_s, rel=0.005)


def test_watts_within_the_spread_of_cards_are_no_alarm(job: ExpectedJob, tmp_path: Path) -> None:
    ran = run_as_predicted()
    for factor, is_alarm in ((1.07, False), (1.1, True)):
        other = replace(ran, power_w=tuple(factor * power_w for power_w in ran.power_w))
        assert check(job, other, tmp_path).has_alarm is is_alarm


def test_idle_gpus_point_to_data(job: ExpectedJob, tmp_path: Path) -> None:
    figures = PredictedJob(job, predict_job())
    stalled = change_job(figures, "data", 0.4)
    ran = MadeUpJob(stalled["step_s"], (stalled["power_w"],) * 4, busy=0.6)
    found = check(job, ran, tmp_path)
    assert found.causes[0].name == "data"
    assert found.causes[0].strength == pytest.approx(0.4, abs=0.05)
    slightly = check(job, replace(run_as_predicted(), busy=0.945), tmp_path)
    assert not slightly.has_alarm


def change_job(predicted: PredictedJob, name: str, strength: float) -> dict[str, float]:
    """Return the figures of a job that a cause has changed."""
    kind = next(kind for kind in CAUSES if kind.name == name)
    return kind.change(predicted, strength)


def test_a_clock_tells_a_slow_card_from_a_low_clock(job: ExpectedJob, tmp_path: Path) -> None:
    predicted = PredictedJob(job, predict_job())
    plain = predicted.figures
    low = change_job(predicted, "clock", 0.6)
    ran = MadeUpJob(low["step_s"], (low["power_w"],) * 4, (low["clock_hz"],) * 4, limit_w=700.0)
    names = [cause.name for cause in check(job, ran, tmp_path).causes]
    assert names[0] == "clock"
    assert "power limit" not in names, "GPUs that draw far less than their limit"
    slow = MadeUpJob(2.2 * plain["step_s"], (plain["power_w"],) * 4, (plain["clock_hz"],) * 4)
    assert check(job, slow, tmp_path).causes[0].name in ("card", "attention")
    near = replace(run_as_predicted(), clock_hz=(0.94 * plain["clock_hz"],) * 4)
    assert not check(job, near, tmp_path).has_alarm


def test_longer_sequences_are_said_before_anything_else(job: ExpectedJob, tmp_path: Path) -> None:
    """Tokens of a step that a log counts decide which job it is compared with."""
    longer = train("gpt2", "h200", **{**OPTIONS, "seq": 1536, "force": True})
    power_w = (float(longer.step.power_w),) * 4
    ran = MadeUpJob(longer.step_s, power_w, step_tokens=1.5 * 32 * 1024)
    found = check(job, ran, tmp_path)
    assert [finding.kind for finding in found.findings] == ["tokens"]
    assert "1.50 times" in found.findings[0].sentence
    assert found.result.seq == 1536
    planned = replace(run_as_predicted(), step_tokens=0.96 * 32 * 1024)
    assert not check(job, planned, tmp_path).has_alarm


def test_padding_leaves_the_time_of_a_step_as_it_is(job: ExpectedJob, tmp_path: Path) -> None:
    ran = replace(run_as_predicted(), step_tokens=0.6 * 32 * 1024)
    found = check(job, ran, tmp_path)
    assert [finding.kind for finding in found.findings] == ["tokens"]
    assert "padding" in found.findings[0].sentence


def test_pauses_between_steps_are_said(job: ExpectedJob, tmp_path: Path) -> None:
    ran = replace(run_as_predicted(), pause_every=4)
    history = write_lines(tmp_path / "history.jsonl", ran.list_history())
    found = check_job(job, read_job_logs([history]))
    assert [finding.kind for finding in found.findings] == ["pauses"]
    assert found.measured.pause_share == pytest.approx(1.0 - 40.0 / (40.0 + 9.0 * 10), abs=0.04)
    assert found.measured.step_s == pytest.approx(ran.step_s, rel=0.01)
    assert not _find_pauses(replace(found.measured, pause_share=0.04))
    assert _find_pauses(replace(found.measured, pause_share=0.06))


def test_a_log_of_waiting_names_data(job: ExpectedJob, tmp_path: Path) -> None:
    ran = run_as_predicted().slower(1.5)
    ran = replace(ran, wait_s=ran.step_s / 3.0)
    found = check(job, ran, tmp_path)
    assert "data" in [finding.kind for finding in found.findings]
    little = replace(run_as_predicted(), wait_s=0.04 * run_as_predicted().step_s)
    assert not check(job, little, tmp_path).has_alarm


def test_a_card_unlike_the_others_is_named(job: ExpectedJob, tmp_path: Path) -> None:
    ran = run_as_predicted()
    power_w = ran.power_w[0]
    found = check(job, replace(ran, power_w=(power_w, power_w, 0.8 * power_w, power_w)), tmp_path)
    assert "GPU 2 draws" in " ".join(finding.sentence for finding in found.findings)
    clocks = replace(ran, clock_hz=(1.7e9, 1.2e9, 1.7e9, 1.7e9))
    sentences = [finding.sentence for finding in check(job, clocks, tmp_path).findings]
    assert any("GPU 1 runs at 1.2 GHz" in sentence for sentence in sentences)
    alike = replace(ran, power_w=(power_w, power_w, 0.92 * power_w, power_w))
    assert not check(job, alike, tmp_path).has_alarm


def test_an_adopted_job_is_compared_more_sharply(job: ExpectedJob, tmp_path: Path) -> None:
    healthy = run_as_predicted().slower(1.06)
    first = check(job, healthy, tmp_path)
    assert not first.has_alarm
    adopted = parse_expected_job(write_expected_job(first.adopt()), "job.json")
    assert not check(adopted, replace(healthy, seed=5), tmp_path).has_alarm
    assert not check(adopted, healthy.slower(1.02), tmp_path).has_alarm
    assert check(adopted, healthy.slower(1.08), tmp_path).has_alarm
    assert check(adopted, healthy.slower(0.92), tmp_path).has_alarm


def test_layers_that_are_not_compiled_are_among_the_causes(tmp_path: Path) -> None:
    options = {**OPTIONS, "gpus": 1}
    planned = expect_job("gpt2", "h200", options, train("gpt2", "h200", **options))
    eager = train("gpt2", "h200", **options, stack="eager")
    ran = MadeUpJob(eager.step_s, (float(eager.step.power_w),))
    found = check(planned, ran, tmp_path)
    assert "stack" in [cause.name for cause in found.causes[:2]]


@pytest.mark.parametrize("form", ["lines", "list", "table", "exported", "folder"])
def test_histories_are_read_in_the_forms_that_tools_write(form: str, tmp_path: Path) -> None:
    ran = run_as_predicted()
    lines = ran.list_history()
    path = tmp_path / "log"
    if form == "lines":
        write_lines(path, lines)
    elif form == "list":
        path.write_text(json.dumps(lines))
    elif form == "table":
        write_table(path, lines)
    elif form == "exported":
        write_table(path, lines, "run-7 - ")
    else:
        write_folder(path, [{**line, "step_time": ran.step_s} for line in lines])
    measured = sum_up_logs(read_job_logs([path]), 4)
    assert measured.step_s == pytest.approx(ran.step_s, rel=0.01)


def test_a_trainers_state_has_the_time_of_the_whole_job(job: ExpectedJob, tmp_path: Path) -> None:
    ran = run_as_predicted()
    path = write_trainer_state(tmp_path / "trainer_state.json", ran)
    measured = sum_up_logs(read_job_logs([path]), 4)
    assert measured.step_s == pytest.approx(ran.step_s)
    assert measured.step_sequences == pytest.approx(8.0)
    found = check_job(job, read_job_logs([path]))
    assert found.findings[0].kind == "batch"
    assert found.result.strategy.global_batch == 8


def test_the_callbacks_own_log_is_read(tmp_path: Path) -> None:
    lines = [
        {"step": step, "wattcast/step_s": 0.5, "wattcast/power_w": 2400.0}
        for step in range(50, 500, 50)
    ]
    path = write_lines(tmp_path / "log.jsonl", lines)
    measured = sum_up_logs(read_job_logs([path]), 4)
    assert measured.step_s == 0.5
    assert measured.power_w == 600.0


def test_evaluations_are_no_steps_of_training() -> None:
    assert recognise_column("eval/steps_per_second") is None
    assert recognise_column("eval_samples_per_second") is None
    assert recognise_column("loss/train - train/loss__MIN") is None
    column = recognise_column("system/gpu_3_power_usage_watts")
    assert column is not None
    assert (column.quantity, column.gpu) == (Quantity.POWER, 3)


def test_watts_before_and_after_the_steps_do_not_count(tmp_path: Path) -> None:
    ran = replace(run_as_predicted(), power_w=(600.0,))
    system = stretch(ran).list_system()
    idle = [
        {"_timestamp": BEGIN_S - 60.0 + 15.0 * k, "system.gpu.0.powerWatts": 70.0} for k in range(4)
    ]
    path = write_lines(tmp_path / "system.jsonl", [*idle, *system])
    measured = sum_up_logs(read_job_logs([path]), 1)
    assert measured.power_w == pytest.approx(600.0, rel=0.02)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "an empty file"),
        ("{}", "trainer_state.json"),
        ("[1, 2, 3]", "other values"),
        ('{"loss": 2.0}\n{"loss": "x"}', "columns such as"),
        ("Step,loss\n1,2.0\n", "neither times of steps nor watts"),
        ('{"step": 1, "step_time": -0.5}', "cannot be negative"),
        ('{"a": ', "JSON"),
        ("\x00\x01", "trainer_state|expected"),
    ],
)
def test_files_that_are_no_logs_are_refused(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(content)
    with pytest.raises(WattcastError, match=words):
        sum_up_logs(read_job_logs([path]), 4)


def test_two_jobs_in_one_log_are_refused(tmp_path: Path) -> None:
    lines = run_as_predicted().list_history()
    times = [line["_timestamp"] for line in lines]
    for line, time_s in zip(lines, reversed(times), strict=True):
        line["_timestamp"] = time_s
    path = write_lines(tmp_path / "log.jsonl", lines)
    with pytest.raises(BadInput, match="one job"):
        sum_up_logs(read_job_logs([path]), 4)


def test_a_broken_line_of_mlflow_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    (folder / "step_time").write_text("1763000000000 0.5 1\n1763000000000 0.5\n")
    with pytest.raises(BadInput, match="line 2"):
        read_job_logs([folder])


def test_a_row_to_calibrate_with_is_one_that_is_read(job: ExpectedJob, tmp_path: Path) -> None:
    found = check(job, run_as_predicted().slower(1.3), tmp_path)
    path = tmp_path / "rows.csv"
    path.write_bytes(write_job_rows(found))
    (row,) = read_calibration_rows(path, load_gpu("h200"))
    assert row.graph.name
    assert row.latency_s > 0.0


def test_a_check_is_plain_data(job: ExpectedJob, tmp_path: Path) -> None:
    plain = summarise_job_check(check(job, run_as_predicted().slower(2.0), tmp_path))
    assert plain["alarm"] is True
    assert json.loads(json.dumps(plain)) == plain
    assert plain["figures"]["step_s"]["is_inside"] is False


def test_train_writes_what_check_reads(tmp_path: Path, call: Any) -> None:
    """A job goes from ``train --write`` to ``check --log`` and back into its file by ``--adopt``."""
    path = tmp_path / "job.json"
    words = ["train", "gpt2", "--gpu", "h200", "--gpus", "4", "--seq", "1024"]
    words += ["--global-batch", "32", "--micro-batch", "8", "--tp", "1", "--write", str(path)]
    assert call(*words).code == 0
    history = write_lines(tmp_path / "log.jsonl", run_as_predicted().slower(2.0).list_history())
    refused = call("check", str(path), "--log", str(history))
    assert refused.code == ExitCode.REFUSED
    assert "not as predicted" in refused.out
    adopted = call("check", str(path), "--log", str(history), "--adopt")
    assert adopted.code == 0
    assert call("check", str(path), "--log", str(history)).code == 0
    without = call("check", str(path))
    assert without.code == ExitCode.BAD_INPUT
    assert "--log" in without.err


@pytest.mark.slow
def test_one_healthy_job_in_twenty_raises_an_alarm(
    job: ExpectedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are off by what predictions are off by, in a hundred draws."""
    result = predict_job()
    low, high = result.relative_interval
    draw = np.random.default_rng(56)
    monkeypatch.setattr(ExpectedJob, "predict", lambda _job, **_changes: result)
    alarms = 0
    for seed in range(100):
        slower = float(np.exp(draw.normal(0.0, 0.5 * np.log(high / low) / 1.645)))
        thirstier = float(np.exp(draw.normal(0.0, JOB_CHECK.power / 1.645)))
        power_w = tuple(thirstier * power_w for power_w in run_as_predicted().power_w)
        ran = replace(run_as_predicted().slower(slower), power_w=power_w, seed=seed)
        alarms += check(job, ran, tmp_path).has_alarm
    assert 0 <= alarms <= 10


STEP_S = 3.3


def time_usual_step(path: Path) -> float | None:
    return sum_up_logs(read_job_logs([path]), 8).step_s


def write_mlflow_run(run: Path) -> Path:
    """Write the folder of a run whose system metrics were read every 10 s, as MLflow counts them."""
    metrics = run / "metrics"
    (metrics / "system").mkdir(parents=True)
    steps = range(10, 301, 10)
    (metrics / "loss").write_text(
        "".join(f"{(BEGIN_S + step * STEP_S) * 1e3:.0f} 1.9 {step}\n" for step in steps)
    )
    (metrics / "eval_loss").write_text(f"{(BEGIN_S + 500.0) * 1e3:.0f} 2.0 7000\n")
    readings = range(99)
    (metrics / "system" / "gpu_0_power_usage_watts").write_text(
        "".join(f"{(BEGIN_S + 10 * n) * 1e3:.0f} 640.0 {n}\n" for n in readings)
    )
    (run / "meta.yaml").write_text("end_time: null\n")
    return run


@pytest.mark.parametrize("inside", ["", "metrics"])
def test_readings_of_mlflow_are_no_steps_of_training(inside: str, tmp_path: Path) -> None:
    """MLflow counts its readings of a GPU as steps: a job with one every 10 s once took 10 s a step,
    whatever its losses said, and the folder of a run itself was not understood.
    """
    run = write_mlflow_run(tmp_path / "run")
    found = sum_up_logs(read_job_logs([run / inside]), 1)
    assert found.step_s == pytest.approx(STEP_S, rel=1e-3)
    assert found.steps == 280
    assert found.power_w == pytest.approx(640.0)


def test_an_answer_of_mlflows_server_is_read(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    stamps = [(BEGIN_S + step * STEP_S, step) for step in range(10, 301, 10)]
    rows = [
        {"key": "loss", "value": 1.9, "timestamp": int(1e3 * time_s), "step": step}
        for time_s, step in stamps
    ]
    rows += [
        {"key": "system/gpu_0_power_usage_watts", "value": 640.0, "timestamp": row["timestamp"],
         "step": number}
        for number, row in enumerate(rows)
    ]  # fmt: skip
    path.write_text(json.dumps({"metrics": rows}))
    found = sum_up_logs(read_job_logs([path]), 1)
    assert found.step_s == pytest.approx(STEP_S, rel=1e-3)
    assert found.power_w == pytest.approx(640.0)


def test_steps_inside_an_object_come_before_the_number_of_a_line(tmp_path: Path) -> None:
    """W&B counts the lines of a history: one every ten steps made each step ten times as long."""
    path = tmp_path / "history.jsonl"
    lines = [
        {"train": {"global_step": step}, "_step": number, "_timestamp": BEGIN_S + step * STEP_S}
        for number, step in enumerate(range(10, 301, 10))
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert time_usual_step(path) == pytest.approx(STEP_S, rel=1e-3)


def test_lines_that_megatron_prints_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(
        "building GPT model ...\n"
        + "".join(
            f" [2025-11-19 10:00:00] iteration {step:8}/     300 | consumed samples: {64 * step} | "
            f"elapsed time per iteration (ms): {1e3 * STEP_S:.1f} | lm loss: 1.9E+00 |\n"
            for step in range(10, 301, 10)
        )
    )
    assert time_usual_step(path) == pytest.approx(STEP_S)


def test_time_that_passed_is_read_as_a_clock_shows_it(tmp_path: Path) -> None:
    """LLaMA-Factory's ``trainer_log.jsonl`` counts ``current_steps`` and writes 0:00:33."""
    path = tmp_path / "trainer_log.jsonl"
    lines = []
    for step in range(20, 401, 20):
        passed = round(step * STEP_S)
        clock = f"{passed // 3600}:{passed // 60 % 60:02}:{passed % 60:02}"
        lines.append({"current_steps": step, "elapsed_time": clock, "loss": 1.9})
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert time_usual_step(path) == pytest.approx(STEP_S, rel=0.01)


@pytest.mark.parametrize("name", ["iteration-time", "iteration_time", "wall time"])
def test_columns_of_megatron_and_tensorboard_are_known(name: str) -> None:
    assert recognise_column(name) is not None


@pytest.mark.parametrize(
    "names",
    [
        ("optimizer_step_time", "step_time"),
        ("max_step_time", "train_step_time"),
        ("optimizer/step_time", "step_time"),
        ("optimizer/step_time_ms", "train.step_time"),
        ("forward_step_time", "perf/step_time"),
        ("perf/eval_step_time", "perf/step_time"),
        ("batch_time", "wattcast/step_s"),
        ("batch_time", "step_time"),
        ("avg_step_time", "iteration_time"),
        ("eval/data_time_ms", "step_time"),
    ],
)
def test_the_time_of_a_step_is_not_that_of_a_part_of_it(
    names: tuple[str, str], tmp_path: Path
) -> None:
    """Any name that ended like a step's time was taken for it, and of several the first: of a log
    with ``optimizer_step_time``, every step took as long as the optimiser.
    """
    other, right = names
    path = write_lines(tmp_path / "log.jsonl", [{"step": 50, other: 0.01, right: STEP_S}] * 5)
    assert time_usual_step(path) == pytest.approx(STEP_S)


@pytest.mark.parametrize(
    "name",
    [
        "wattcast/step_s",
        "wattcast/power_w",
        "time_metrics/end_to_end(s)",
        "time_metrics/data_loading(s)",
        "train/train_runtime",
        "train/tokens_seen",
        "train/data_time",
        "throughput/batches_per_sec",
        "perf/step_time",
        "system/gpu/0/powerWatts",
    ],
)
def test_a_name_in_an_object_says_what_it_says_on_a_line(name: str) -> None:
    """Objects inside objects join their names by dots, of which only exact names knew: the log of
    Wattcast's own callback was read where it was flat alone.
    """
    assert recognise_column(name) is not None
    assert recognise_column(name.replace("/", ".")) == recognise_column(name)


def test_the_callbacks_own_log_is_read_from_objects(tmp_path: Path) -> None:
    line = {"step": 50, "wattcast": {"step_s": STEP_S, "power_w": 2400.0}}
    path = write_lines(tmp_path / "log.jsonl", [line] * 5)
    measured = sum_up_logs(read_job_logs([path]), 4)
    assert measured.step_s == pytest.approx(STEP_S)
    assert measured.power_w == 600.0


def test_the_callbacks_own_steps_are_read_from_weights_and_biases(tmp_path: Path) -> None:
    """``log_to_wandb`` counts steps in ``wattcast/step``, which was not known. W&B's count of lines
    was read instead: of a loop that logs every 50 steps, 98 % of the time passed in pauses.
    """
    lines = [
        {"_step": number, "_timestamp": BEGIN_S + 50 * number * STEP_S, "wattcast/step": 50 * number,
         "wattcast/step_s": STEP_S}
        for number in range(1, 20)
    ]  # fmt: skip
    path = write_lines(tmp_path / "history.jsonl", lines)
    found = sum_up_logs(read_job_logs([path]), 1)
    assert found.pause_share == pytest.approx(0.0, abs=1e-9)
    assert found.steps == 17 * 50


def test_the_best_column_of_a_log_is_read_on_all_its_lines(tmp_path: Path) -> None:
    """Each line had a best column of its own: a log with a batch's time on every line and a step's
    on every tenth was read as one of batches. Lines without the Trainer's step had W&B's count of
    lines as theirs, and two counts of one job were refused as two jobs.
    """
    lines: list[dict[str, float]] = []
    for number in range(1, 31):
        time_s = BEGIN_S + 10 * number * STEP_S
        lines.append({"_step": 2 * number, "_timestamp": time_s, "train/global_step": 10 * number})
        lines.append({"_step": 2 * number + 1, "_timestamp": time_s + 0.1, "batch_time": 0.1})
    lines[20]["step_time"] = STEP_S
    found = sum_up_logs(read_job_logs([write_lines(tmp_path / "history.jsonl", lines)]), 1)
    assert found.step_s == pytest.approx(STEP_S)
    assert found.steps == 280


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("step_time", "a usual step takes 0 s"),
        ("train_steps_per_second", "no steps in a second"),
        ("system.gpu.0.powerWatts", "neither times of steps nor watts"),
    ],
)
def test_a_log_of_nothing_but_zeros_is_refused(
    name: str, words: str, job: ExpectedJob, tmp_path: Path
) -> None:
    """Each was a division by zero."""
    lines = [{"step": step, name: 0.0} for step in range(1, 9)]
    path = write_lines(tmp_path / "log.jsonl", lines)
    with pytest.raises(BadInput, match=words):
        check_job(job, read_job_logs([path]))


def test_a_trainers_last_line_may_have_no_rates(tmp_path: Path) -> None:
    """Rates of a job that was resumed at its end are zero, which was a division by zero."""
    zeros = {"train_steps_per_second": 0.0, "train_samples_per_second": 0.0}
    path = write_lines(tmp_path / "log.jsonl", [{"step": 8, "step_time": STEP_S, **zeros}])
    assert sum_up_logs(read_job_logs([path]), 1).step_sequences is None


@pytest.mark.parametrize(
    ("name", "quantity", "factor"),
    [
        ("data_time_s", Quantity.WAIT_TIME, 1.0),
        ("data_loading_time(s)", Quantity.WAIT_TIME, 1.0),
        ("data_time(ms)", Quantity.WAIT_TIME, 1e-3),
        ("step-time_ms", Quantity.STEP_TIME, 1e-3),
        ("time_per_step_ms", Quantity.STEP_TIME, 1e-3),
        ("time_per_iteration_s", Quantity.STEP_TIME, 1.0),
    ],
)
def test_a_unit_may_follow_any_time(name: str, quantity: Quantity, factor: float) -> None:
    """Some names were known with a unit behind them and their like without one alone."""
    column = recognise_column(name)
    assert column is not None
    assert (column.quantity, column.factor) == (quantity, factor)


def test_evaluations_are_known_by_any_part_of_a_name() -> None:
    for name in ("perf/eval_step_time", "val.step_time", "model/test/step_time", "eval-step_time"):
        assert recognise_column(name) is None
    for name in ("evals_off/step_time", "latest/step_time", "valuable/step_time"):
        assert recognise_column(name) is not None


def test_other_printed_lines_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "titan.log"
    path.write_text("[rank0]:[titan] 2025-11-19 10:00:00 - root - INFO - step: 10  loss: 1.9\n")
    with pytest.raises(BadInput, match=r"expected trainer_state\.json.*Megatron's lines"):
        read_job_logs([path])
