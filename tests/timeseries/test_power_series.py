"""Power over time has the energy of its run at every grid, by part, by GPU and by state."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import numpy as np
import polars
import pytest

import wattcast
from wattcast.core import BadInput
from wattcast.timeseries.engine_power import split_engine_power, trace_serving
from wattcast.timeseries.job_power import trace_training
from wattcast.timeseries.power_curve import STATES, PowerCurve, join_pieces, state_code
from wattcast.timeseries.power_series import PowerSeries, sample_curves
from wattcast.timeseries.step_power import trace_prediction

GRIDS_S = (0.007, 0.02, 0.25, 1.0, 900.0)
TRAFFIC = {"rate": "3/s", "prompt": 512, "output": 64, "seconds": 20, "replicas": 2, "tp": 2}


@cache
def trace_run(kind: str) -> tuple[tuple[PowerCurve, ...], float, float]:
    """Return the curves of a run of each verb, its length and its energy."""
    if kind == "simulate":
        served = wattcast.simulate("llama3-8b", "h200", **TRAFFIC)
        split = split_engine_power(served, "llama3-8b", "h200", TRAFFIC)
        return tuple(trace_serving(served, split)), served.length_s, served.energy_j
    if kind == "train with checkpoints":
        pauses = {"checkpoint_every": 4, "checkpoint_time": "9s"}
        job = wattcast.train("llama3-8b", "h100-sxm", gpus=16, tokens="7M", **pauses)
        return (trace_training(job),), job.hours * 3600.0, job.energy_kwh * 3.6e6
    if kind == "train":
        lossy = {"pause_share": 0.03, "failures_per_gpu_day": 0.01}
        job = wattcast.train("llama3-8b", "h100-sxm", gpus=16, tokens="7M", **lossy)
        return (trace_training(job),), job.hours * 3600.0, job.energy_kwh * 3.6e6
    options = {"phase": kind.removeprefix("predict "), "batch": 4, "seq": 256, "tp": 2}
    if "generate" in kind:
        options |= {"tokens": 32}
    prediction = wattcast.predict("llama3-8b", "h200", **options)
    curve = trace_prediction(prediction)
    return (curve,), float(prediction.latency_s), float(prediction.total_energy_j)


KINDS = (
    "simulate",
    "train",
    "train with checkpoints",
    "predict decode",
    "predict generate",
    "predict prefill",
)


def sample_run(kind: str, grid_s: float) -> PowerSeries:
    curves, length_s, _ = trace_run(kind)
    return sample_curves(curves, grid_s, length_s)


@pytest.mark.parametrize("grid_s", GRIDS_S)
@pytest.mark.parametrize("kind", KINDS)
def test_a_series_has_the_energy_of_its_run(kind: str, grid_s: float) -> None:
    _, length_s, energy_j = trace_run(kind)
    series = sample_run(kind, grid_s)
    assert series.energy_j == pytest.approx(energy_j, rel=1e-9)
    assert series.duration_s.sum() == pytest.approx(length_s, rel=1e-12)
    np.testing.assert_allclose(series.group_j.sum(axis=-1), series.interval_j, rtol=1e-9)
    np.testing.assert_allclose(series.state_s.sum(axis=-1), series.duration_s, rtol=1e-6)
    assert (series.part_j >= -1e-9).all()


@pytest.mark.parametrize("kind", ["simulate", "train"])
def test_a_fine_series_adds_up_to_the_coarse_one(kind: str) -> None:
    coarse = sample_run(kind, 1.0)
    added = sample_run(kind, 0.02).coarsen(50)
    np.testing.assert_allclose(added.power_w, coarse.power_w, rtol=1e-9)
    np.testing.assert_allclose(added.state_s, coarse.state_s, atol=1e-9)
    assert added.start_s.tolist() == coarse.start_s.tolist()


def test_states_follow_one_another_as_they_were_simulated() -> None:
    """One request: its prompt first, then its tokens, and nothing before it arrives."""
    trace = wattcast.serving.arrivals.make_trace([0.5], [2000], [40])
    served = wattcast.simulate("llama3-8b", "h200", trace=trace)
    split = split_engine_power(served, "llama3-8b", "h200", {"trace": trace})
    series = sample_curves(trace_serving(served, split), 0.02, served.length_s)
    states = series.list_columns()["state"].tolist()
    assert set(states[:24]) == {"idle"}
    assert states[26] == "prefill"
    assert states[-2] == "decode"
    busy_s = series.state_s[:, [state_code("prefill"), state_code("decode")]].sum(axis=0)
    assert (busy_s > 0.0).all()
    idle_w = served.runs[0].idle_w
    np.testing.assert_allclose(series.power_w[:24], idle_w, rtol=1e-9)


def test_a_prompt_draws_more_than_its_second() -> None:
    """A prompt of 40 ms is a peak at 20 ms, which a mean over a second hides."""
    fine = sample_run("simulate", 0.02)
    coarse = sample_run("simulate", 1.0)
    assert fine.power_w.max() > 1.2 * coarse.power_w.max()


def test_training_swings_between_work_and_exchange() -> None:
    series = sample_run("train", 0.02)
    exchange = series.state_s[:, state_code("exchange")] / series.duration_s
    is_working = exchange < 0.01
    is_exchanging = exchange > 0.99
    if is_exchanging.any():
        assert series.power_w[is_exchanging].max() < series.power_w[is_working].min()
    assert series.state_s[:, state_code("compute")].sum() > 0.0


def test_gpus_wait_idle_for_checkpoints() -> None:
    """Each lasts as long as was said, between so many steps; both ways to draw a job agree."""
    options = {"gpus": 8, "tokens": "20M", "global_batch": 64}
    plain = wattcast.train("llama3-8b", "h100-sxm", **options)
    every = 10
    job = wattcast.train(
        "llama3-8b", "h100-sxm", checkpoint_every=every, checkpoint_time=12.0, **options
    )
    count = round(plain.steps / every)
    assert job.checkpoints == count > 3
    assert job.hours == pytest.approx(plain.hours + count * 12.0 / 3600.0)
    waiting_kwh = count * 12.0 * 8 * job.waiting_w / 3.6e6
    assert job.energy_kwh == pytest.approx(plain.energy_kwh + waiting_kwh)
    assert job.waiting_w < 0.3 * float(job.step.power_w)
    waited_h = count * 12.0 / 3600.0  # was told, so it widens no interval
    ends_h = np.array(plain.hours_interval)
    assert job.hours_interval == pytest.approx(tuple(ends_h + waited_h))
    ends_kwh = np.array(plain.energy_interval_kwh)
    assert job.energy_interval_kwh == pytest.approx(tuple(ends_kwh + waiting_kwh))

    curve = trace_training(job)
    states = curve.states == state_code("checkpoint")
    begins_s = curve.moments_s[:-1][states]
    step_s = job.steps * job.step_s / round(job.steps)
    assert begins_s[0] == pytest.approx(every * step_s)
    turns_s = np.diff(begins_s)
    np.testing.assert_allclose(turns_s[:-1], every * step_s + 12.0)
    assert 0.5 * every * step_s < turns_s[-1] - 12.0 <= every * step_s  # the job ends with one
    assert curve.moments_s[1:][states] - begins_s == pytest.approx(np.full(count, 12.0))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--checkpoint-every 8", "checkpoint-time: expected both, or neither"),
        ("--checkpoint-time 9s", "checkpoint-time: expected both, or neither"),
        ("--checkpoint-every 8 --checkpoint-time 9", "Write the unit beside the number"),
        ("--checkpoint-every 8 --checkpoint-time 9W", "checkpoint_time"),
        ("--checkpoint-every -8 --checkpoint-time 9s", "checkpoint-every"),
    ],
)
def test_half_a_checkpoint_gets_one_sentence(call, words: str, complaint: str) -> None:
    end = call("train", "gpt2", "--gpu", "h200", "--gpus", "1", *words.split())
    assert end.code == 2
    assert complaint in end.err


def test_checkpoints_of_a_log_come_when_and_as_long_as_it_says(tmp_path: Path) -> None:
    options = {"gpus": 8, "tokens": "20M", "global_batch": 64}
    plain = wattcast.train("llama3-8b", "h100-sxm", **options)
    last = round(plain.steps)
    path = tmp_path / "log.csv"
    path.write_text(f"step,seconds\n3,4.5\n10,9\n{last},2\n")
    job = wattcast.train("llama3-8b", "h100-sxm", checkpoint_log=path, **options)
    assert job.checkpoints == 3
    assert job.hours == pytest.approx(plain.hours + 15.5 / 3600.0)
    curve = trace_training(job)
    states = curve.states == state_code("checkpoint")
    spans_s = np.diff(curve.moments_s)
    np.testing.assert_allclose(spans_s[states], [4.5, 9.0, 2.0])
    begins_s = curve.moments_s[:-1][states]
    step_s = job.steps * job.step_s / last
    before_s = np.array([0.0, 4.5, 13.5])
    np.testing.assert_allclose(begins_s - before_s, step_s * np.array([3, 10, last]))
    energy_j = curve.energy_until(np.array([curve.length_s])).sum()
    assert energy_j == pytest.approx(job.energy_kwh * 3.6e6, rel=1e-9)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("4.5\n9\n", "a header with step and seconds"),
        ("step,seconds\n", "at least one checkpoint"),
        ("step,seconds\n3,4\n3,4\n", "line 3: expected a step after step 3"),
        ("step,seconds\n3,soon\n", "line 2"),
        ("step,seconds\n3,-1\n", "seconds above 0"),
        ("step,seconds\n3\n", "as many fields"),
        ("step,seconds\n1000000,4\n", "steps of this job"),
    ],
)
def test_a_log_of_checkpoints_that_cannot_be_gets_one_sentence(
    call, tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text)
    words = f"train gpt2 --gpu h200 --gpus 1 --tokens 10M --checkpoint-log {path}"
    end = call(*words.split())
    assert end.code == 2
    assert complaint in end.err
    assert "Traceback" not in end.err


def test_a_log_says_how_often_checkpoints_were_written(call, tmp_path: Path) -> None:
    words = "train gpt2 --gpu h200 --gpus 1 --checkpoint-every 8 --checkpoint-time 9s"
    end = call(*words.split(), "--checkpoint-log", str(tmp_path / "log.csv"))
    assert end.code == 2
    assert "a log, or how often" in end.err


def test_a_long_job_repeats_turns_of_steps_and_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"gpus": 8, "tokens": "20M", "checkpoint_every": 3, "checkpoint_time": "5s"}
    job = wattcast.train("llama3-8b", "h100-sxm", **options)
    monkeypatch.setattr("wattcast.timeseries.job_power.MOST_PIECES", 10)
    curve = trace_training(job)
    assert curve.repeats == job.checkpoints
    assert curve.length_s == pytest.approx(job.hours * 3600.0)
    energy_j = curve.energy_until(np.array([curve.length_s])).sum()
    assert energy_j == pytest.approx(job.energy_kwh * 3.6e6)


def test_repeated_curves_equal_written_out_ones() -> None:
    spans_s = np.array([0.3, 0.1, 0.05])
    part_j = np.array([[3.0, 30.0], [1.0, 0.0], [0.5, 9.0]])
    states = np.array([2, 3, 4], dtype=np.int8)
    idle_w = np.array([10.0, 0.0])
    once = join_pieces(spans_s, part_j, states, ("a", "b"), idle_w, 4, repeats=7)
    written = join_pieces(
        np.tile(spans_s, 7), np.tile(part_j, (7, 1)), np.tile(states, 7), ("a", "b"), idle_w, 4
    )
    times_s = np.linspace(-1.0, 5.0, 401)
    expected_j = written.energy_until(times_s)
    np.testing.assert_allclose(once.energy_until(times_s), expected_j, atol=1e-9)
    np.testing.assert_allclose(once.state_until(times_s), written.state_until(times_s), atol=1e-9)


def test_energy_that_takes_no_time_is_counted_in_each_turn_from_moment_0_on() -> None:
    """A curve of no length had the energy of one of its turns, and had it before it began."""
    no_span_s = np.zeros(1)
    burst_j = np.array([[5.0]])
    states = np.array([2], dtype=np.int8)
    curve = join_pieces(no_span_s, burst_j, states, ("all",), np.array([10.0]), 1, repeats=3)
    energy_j = curve.energy_until(np.array([-1.0, 0.0, 1.0]))[:, 0]
    assert energy_j.tolist() == [-10.0, 15.0, 25.0]

    spans_s = np.array([0.0, 1.0])
    later = join_pieces(spans_s, np.array([[5.0], [2.0]]), states[[0, 0]], ("all",), np.zeros(1), 1)
    assert later.energy_until(np.array([-1.0, 1.0]))[:, 0].tolist() == [0.0, 7.0]


def test_a_curve_may_have_no_parts() -> None:
    """Its energy was an error of NumPy's."""
    curve = join_pieces(
        np.ones(2), np.zeros((2, 0)), np.zeros(2, dtype=np.int8), (), np.zeros(0), 1
    )
    assert curve.energy_until(np.array([0.5, 3.0])).shape == (2, 0)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_simulation_writes_its_power(call, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"power.{suffix}"
    words = "simulate llama3-8b --gpu h200 --rate 4/s --prompt 128 --output 16 --requests 9"
    end = call(*words.split(), "--grid", "20ms", "--sensor", "nvml", "--power-out", str(path))
    assert end.code == 0
    assert "power over time written" in end.err
    if suffix == "csv":
        with path.open() as stream:
            rows = list(csv.DictReader(stream))
    else:
        rows = polars.read_parquet(path).to_dicts()
    energy_j = sum(float(row["energy_j"]) for row in rows)
    served = wattcast.simulate("llama3-8b", "h200", rate="4/s", prompt=128, output=16, requests=9)
    assert energy_j == pytest.approx(served.energy_j, rel=1e-9)
    assert float(rows[1]["time_s"]) == 0.02
    assert {row["state"] for row in rows} <= set(STATES)
    assert float(rows[3]["gpu0_w"]) == pytest.approx(float(rows[3]["power_w"]))
    assert "sensor_w" in rows[0]


def test_predict_and_train_write_their_power(call, tmp_path: Path) -> None:
    step = tmp_path / "step.csv"
    job = tmp_path / "job.csv"
    words = "predict llama3-8b --gpu h200 --phase decode --batch 8 --seq 512 --grid 1ms"
    assert call(*words.split(), "--power-out", str(step)).code == 0
    words = "train llama3-8b --gpu h200 --gpus 8 --tokens 1B --power-span 30s --grid 100ms"
    assert call(*words.split(), "--power-out", str(job)).code == 0
    assert "decode" in step.read_text()
    assert len(job.read_text().splitlines()) == 301


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--power-out p.txt", ".csv or .parquet"),
        ("--power-out p.csv --grid 0s", "grid"),
        ("--power-out p.csv --grid 20", "grid"),
        ("--power-out p.csv --grid 1us", "at most 5000000 intervals"),
        ("--power-out p.csv --sensor ouija", "sensor"),
        ("--sensor nvml", "--power-out FILE"),
        ("--power-span 1s", "--power-out FILE"),
    ],
)
def test_wrong_series_get_one_sentence(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    start = "simulate llama3-8b --gpu h200 --rate 2/s --prompt 64 --output 8 --requests 20"
    end = call(*start.split(), *words.split())
    assert end.code == 2
    assert complaint in end.err
    assert not list(tmp_path.iterdir())


def test_many_gpus_share_columns() -> None:
    spans_s = np.array([2.0])
    part_j = np.array([[200.0]])
    states = np.array([2], dtype=np.int8)
    curves = [
        join_pieces(spans_s, part_j, states, ("all",), np.zeros(1), gpus) for gpus in (60, 20)
    ]
    columns = sample_curves(curves, 1.0).list_columns()
    assert columns["gpu0-59_w"].tolist() == [100.0, 100.0]
    assert columns["gpu60-79_w"].tolist() == [100.0, 100.0]
    assert columns["power_w"].tolist() == [8000.0, 8000.0]


def test_a_grid_of_a_million_years_is_refused() -> None:
    spans_s = np.array([1e9])
    curve = join_pieces(
        spans_s, np.array([[1.0]]), np.array([2], dtype=np.int8), ("all",), np.zeros(1), 1
    )
    with pytest.raises(BadInput, match="--power-span"):
        sample_curves([curve], 0.02)
