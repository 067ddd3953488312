"""A hall is the sum of its racks, at every level and on every grid."""

from __future__ import annotations

import csv
import inspect
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wattcast.coefficients.coefficient_files import change_coefficient
from wattcast.core import BadInput
from wattcast.explore.sweep import cluster_runner
from wattcast.timeseries import hall_run
from wattcast.timeseries.hall_capping import hold_cap
from wattcast.timeseries.hall_combination import CombinedHall
from wattcast.timeseries.hall_figures import FIGURES
from wattcast.timeseries.hall_file import HallPlan, parse_hall
from wattcast.timeseries.hall_parts import HallWork, percentile_of_counts
from wattcast.timeseries.hall_report import list_diversity, summarise_hall
from wattcast.timeseries.hall_run import (
    ComputedPart,
    HallSpan,
    Runner,
    prepare_work,
    run_hall,
)
from wattcast.timeseries.hall_statistics import RackStatistics, racks_that_fit, window_means_w
from wattcast.timeseries.job_timeline import draw_job
from wattcast.timeseries.part_store import (
    PartStore,
    StoredWork,
    keep_parts,
)
from wattcast.timeseries.power_curve import state_code

HALL = """
title: test hall
hours: 1
limits: {rack: 30 kW, hall: 200 kW}
groups:
  - name: chat
    system: dgx-h200
    racks: 3
    nodes_per_rack: 2
    racks_per_row: 2
    serve: {model: llama3-8b, rate: 3/s, prompt: 256, output: 64, tp: 2, day: office}
  - name: job
    system: dgx-h100
    racks: 2
    nodes_per_rack: 1
    train:
      model: llama3-8b
      checkpoint_every: 5min
      checkpoint_takes: 20s
      failures_per_gpu_day: 0.9
      restart: 1min
  - name: spare
    system: dgx-h100
    racks: 1
    nodes_per_rack: 1
    idle: cold
"""
CAPPED = HALL.replace("rack: 30 kW", "rack: 7 kW") + "cap: {level: rack, gpu: 300 W, hold: 30s}\n"


def read(text: str) -> HallPlan:
    return parse_hall(text.encode(), "hall.yaml", Path())


Simulated = dict[bytes, Any]


def simulate_once(simulate: Callable[..., Any], simulated: Simulated) -> Callable[..., Any]:
    """Return a function that answers from ``simulated`` where it was asked the same before."""

    def answer(*asked: Any, **options: Any) -> Any:
        named = inspect.signature(simulate).bind(*asked, **options).arguments
        named.pop("progress", None)
        key = pickle.dumps((simulate.__name__, named))
        if key not in simulated:
            simulated[key] = simulate(*asked, **options)
        return simulated[key]

    return answer


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[Simulated]:
    """Simulate little: three rates, two minutes each, and each load once."""
    simulated: Simulated = {}
    with ExitStack() as stack:
        for name, factor in (("rates", 0.375), ("stretch_requests", 0.02), ("least_stretch", 0.2)):
            stack.enter_context(change_coefficient(f"hall.{name}", factor))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for function in (hall_run.build_library, hall_run.plan_steps):
            patch.setattr(hall_run, function.__name__, simulate_once(function, simulated))
        yield simulated


@pytest.fixture(scope="module")
def hall(small: Simulated) -> CombinedHall:
    return run_hall(read(HALL))


@pytest.fixture(scope="module")
def capped(small: Simulated) -> CombinedHall:
    return run_hall(read(CAPPED), HallSpan(span_s=600.0))


def test_the_sum_of_a_series_is_the_energy(hall: CombinedHall) -> None:
    for bin_j in (hall.row_j.sum(axis=0), hall.rack_j.sum(axis=0), hall.group_j.sum(axis=0)):
        assert bin_j.sum() == pytest.approx(hall.energy_j, rel=1e-12)
    assert hall.energy_j > hall.gpu_j.sum() > 0.5 * hall.energy_j
    for grid_s in (1.0, 7.0, 60.0, 900.0):
        on_grid = CombinedHall(**{**vars(hall), "grid_s": grid_s})
        joules = on_grid.on_grid(hall.hall_j)
        assert joules.sum() == pytest.approx(hall.energy_j, rel=1e-9)
        assert len(joules) == len(on_grid.grid_begin_s) == len(on_grid.grid_duration_s)
        assert on_grid.grid_duration_s.sum() == pytest.approx(3600.0)


@pytest.mark.parametrize("grid_s", [0.02, 0.25])
def test_a_finer_grid_adds_up_to_a_second(hall: CombinedHall, grid_s: float) -> None:
    """Every level, around a checkpoint: what is computed at 20 ms sums to what is at 1 s."""
    fine = run_hall(read(HALL), HallSpan(begin_s=600.0, span_s=60.0, grid_s=grid_s))
    for name in ("rack_j", "row_j", "group_j", "gpu_j"):
        parts = getattr(fine, name)
        seconds = parts.reshape(*parts.shape[:-1], 60, -1).sum(axis=-1)
        coarse = getattr(hall, name)[..., 600:660]
        np.testing.assert_allclose(seconds, coarse, rtol=1e-9)
    assert fine.row_j.shape[-1] == 60 / grid_s


def test_levels_and_diversity(hall: CombinedHall) -> None:
    summary = summarise_hall(hall, 1e-3)
    peaks = summary["levels"]["hall"]["peaks_w"]["1s"]
    assert peaks["max"] == pytest.approx(hall.power_w.max())
    assert peaks["p50"] <= peaks["p95"] <= peaks["p99.9"] <= peaks["max"]
    assert summary["levels"]["hall"]["mean_w"] == pytest.approx(hall.energy_j / 3600.0)
    factors = list_diversity(hall)
    assert factors["node"] >= factors["rack"] >= factors["row"] >= 1.0
    # a checkpoint takes 16 GPUs from work to waiting from one second to the next
    assert summary["levels"]["hall"]["step_w"] > 16 * 300.0
    racks_w = hall.rack_j.mean(axis=-1)
    assert summary["levels"]["rack"]["mean_w"] == pytest.approx(racks_w.mean())
    assert [group["racks"] for group in summary["groups"]] == [3, 2, 1]
    assert summary["groups"][0]["replicas"] == 3 * 2 * 4


def test_results_do_not_depend_on_the_order_or_the_place_of_rows(
    hall: CombinedHall, small: Simulated
) -> None:
    """Loads are simulated anew for it."""
    small.clear()

    def backwards(work: StoredWork, indices) -> Iterator[ComputedPart]:
        return map(work.compute_part, reversed(list(indices)))

    other = run_hall(read(HALL), runner=backwards)
    np.testing.assert_array_equal(other.rack_j, hall.rack_j)
    assert other.energy_j == hall.energy_j


def test_a_cluster_gives_the_same_to_the_last_bit(hall: CombinedHall) -> None:
    pytest.importorskip("distributed", reason="no Dask: pip install 'wattcast[explore]'")
    other = run_hall(read(HALL), runner=cluster_runner("local", 2))
    np.testing.assert_array_equal(other.rack_j, hall.rack_j)
    np.testing.assert_array_equal(other.card_counts, hall.card_counts)
    assert other.energy_j == hall.energy_j


WORKED = """
groups:
  - name: chat
    system: dgx-h200
    racks: 60
    racks_per_row: 10
    serve: {model: llama3-8b, rate: 3/s, prompt: 256, output: 64}
"""


def count_processor_s() -> float:
    """Return the processor time of this process and of all below it."""
    psutil = pytest.importorskip("psutil")
    here = psutil.Process()
    times = [process.cpu_times() for process in (here, *here.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def time_parts(runner: Runner, work: HallWork, folder: Path) -> float:
    """Return the processor time of all parts, workers and their start included."""
    began_s = count_processor_s()
    spent_s = 0.0
    folder.mkdir()
    with keep_parts(work, PartStore(folder, "timed")) as stored:
        for _ in runner(stored, range(work.part_count)):
            spent_s = count_processor_s() - began_s  # before the workers end
    return spent_s


def test_a_worker_keeps_its_row_where_it_sees_the_folder(tmp_path: Path) -> None:
    """A row of a hall is some ten megabytes, which a worker elsewhere has to send."""
    work = prepare_work(read(HALL), HallSpan(span_s=60.0), lambda _: None)
    store = PartStore(tmp_path, "abc")
    with keep_parts(work, store) as stored:
        elsewhere = replace(stored, mark=tmp_path / "not-there")
        stranger = replace(stored, word="of another folder")
        index, sent = elsewhere.compute_part(1)
        assert index == 1
        assert sent is not None
        assert not store.is_finished(1)
        assert stranger.compute_part(1)[1] is not None
        assert stored.compute_part(1) == (1, None)
    np.testing.assert_array_equal(store.read(1).rack_j, sent.rack_j)
    assert [path.name for path in tmp_path.iterdir()] == ["abc-00001.npz"]


def test_what_workers_elsewhere_send_is_kept(hall: CombinedHall) -> None:
    def send(work: StoredWork, indices) -> Iterator[ComputedPart]:
        return map(replace(work, word="").compute_part, indices)

    other = run_hall(read(HALL), runner=send)
    np.testing.assert_array_equal(other.rack_j, hall.rack_j)


@pytest.mark.slow
def test_a_cluster_takes_little_more_work_than_one_process(tmp_path: Path) -> None:
    """It took 84 % more: workers watched themselves, and each imported what it needed anew.

    The start of a cluster, two to three seconds, is counted apart: it is the same for a whole hall.
    """
    pytest.importorskip("distributed", reason="no Dask: pip install 'wattcast[explore]'")
    work = prepare_work(read(WORKED), HallSpan(), lambda _: None)
    start_s = time_parts(cluster_runner("local", 2), replace(work, seconds=60), tmp_path / "start")
    cluster_s = time_parts(cluster_runner("local", 2), work, tmp_path / "cluster") - start_s
    here_s = time_parts(hall_run.run_here, work, tmp_path / "here")
    assert cluster_s <= 1.2 * here_s


def test_a_run_continues(hall: CombinedHall, tmp_path: Path) -> None:
    class Broken(Exception):
        pass

    def two_only(work: StoredWork, indices) -> Iterator[ComputedPart]:
        for index in list(indices)[:2]:
            yield work.compute_part(index)
        raise Broken

    computed: list[int] = []

    def count(work: StoredWork, indices) -> Iterator[ComputedPart]:
        for index in indices:
            computed.append(index)
            yield work.compute_part(index)

    with pytest.raises(Broken):
        run_hall(read(HALL), out=tmp_path, runner=two_only)
    (damaged, _) = sorted((tmp_path / "parts").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-100])
    told: list[str] = []
    found = run_hall(read(HALL), out=tmp_path, runner=count, progress=told.append)
    assert computed == [0, 2, 3]
    assert "1 of 4 rows were there before" in told
    assert told[-1] == "4 of 4 rows of racks"
    np.testing.assert_array_equal(found.rack_j, hall.rack_j)
    # another hall takes none of them
    computed.clear()
    run_hall(read(HALL.replace("hours: 1", "hours: 0.5")), out=tmp_path, runner=count)
    assert computed == [0, 1, 2, 3]


def test_a_job_pauses_for_checkpoints_and_failures() -> None:
    plan = read(HALL)
    work = prepare_work(plan, HallSpan(), lambda _: None)
    group = work.groups[1]
    assert group.steps is not None
    timeline = work.draw_timeline(1, group.group.load, 0)
    spans_s = np.diff(timeline.begin_s)
    assert spans_s.sum() == pytest.approx(86400.0)
    checkpoints_s = spans_s[timeline.states == state_code("checkpoint")]
    assert checkpoints_s[:-1] == pytest.approx(20.0)
    # 16 GPUs with 0.9 failures a day each
    assert timeline.failures == pytest.approx(14.4, abs=4 * 14.4**0.5)
    edges_s = np.linspace(0.0, 86400.0, 1001)
    joules = timeline.energy_until(group.steps, group.cold_w, edges_s)
    running_s = timeline.running_until(edges_s)[-1]
    mean_w = group.steps.step.joules[-1, 0] / group.steps.step_s
    expected_j = running_s * mean_w + checkpoints_s.sum() * group.steps.waiting_w
    expected_j += spans_s[timeline.states == state_code("idle")].sum() * group.cold_w
    assert joules[-1] - joules[0] == pytest.approx(expected_j, rel=1e-4)
    assert (np.diff(joules) > 0).all()


def test_jobs_of_a_group_have_days_of_their_own() -> None:
    work = prepare_work(read(HALL), HallSpan(), lambda _: None)
    load = work.groups[1].group.load
    steps = work.groups[1].steps
    assert steps is not None
    days = [draw_job(load, steps, (1, 1, job)).begin_s[1] for job in range(5)]
    assert len(set(days)) == 5


def test_a_cap_holds_and_says_what_it_costs(capped: CombinedHall) -> None:
    assert capped.cap is not None
    assert capped.cap.over_before_s > 5 * capped.cap.over_after_s > 0
    assert capped.cap.capped_rack_s > 100
    assert capped.cap.saved_j > 0
    chat = capped.cap.groups["chat"]
    assert chat["capped_requests"] > 0
    assert chat["capped_tpot_p50_s"] > chat["tpot_p50_s"]
    assert 0 < capped.cap.groups["job"]["lost_progress"] < 1
    assert capped.cap.groups["spare"] == {}


@pytest.mark.parametrize("level", ["row", "hall"])
def test_a_cap_of_rows_or_of_the_hall(level: str) -> None:
    text = CAPPED.replace("level: rack", f"level: {level}").replace("hall: 200 kW", "hall: 36 kW")
    text = text.replace("limits: {rack: 7 kW", "limits: {row: 14 kW")
    found = run_hall(read(text), HallSpan(span_s=300.0))
    assert found.cap is not None
    assert found.cap.over_before_s > found.cap.over_after_s
    assert found.cap.members == {"row": 4, "hall": 1}[level]


def test_a_controller_looks_again_after_its_hold() -> None:
    power_w = np.array([1.0, 5.0, 5.0, 5.0, 1.0, 1.0, 5.0, 1.0])
    expected = [False, False, True, True, False, False, False, True]
    assert hold_cap(power_w, 4.0, 2).tolist() == expected


def test_more_racks_fit_as_often_as_they_are_drawn() -> None:
    """Racks are added one by one, and the limit is passed as often as was asked."""
    random = np.random.default_rng(5)
    times = np.linspace(0.0, 2 * np.pi, 20_000)
    mean_w = 10e3 + 2e3 * np.sin(times)
    statistics = RackStatistics(mean_w, np.full_like(mean_w, 1.5e3**2))
    hall_w = 20 * mean_w
    count = racks_that_fit(hall_w, 300e3, statistics, 0.01)
    assert 3 <= count <= 5

    def share_above(racks: int) -> float:
        added = random.normal(mean_w, 1.5e3, (racks, len(times))).sum(axis=0)
        return float((hall_w + added > 300e3).mean())

    assert share_above(count) <= 0.012 < share_above(count + 1)
    assert racks_that_fit(hall_w, 200e3, statistics, 0.01) == 0


def test_percentiles_of_a_histogram() -> None:
    counts = np.bincount(np.repeat([100, 200], [90, 10]), minlength=4096)
    assert percentile_of_counts(counts, 4096.0, 50.0) == pytest.approx(100.5)
    assert percentile_of_counts(counts, 4096.0, 95.0) == pytest.approx(200.5)
    assert window_means_w(np.arange(10.0), 0.5, 2.0).tolist() == [3.0, 11.0]


def test_the_command_writes_series_and_figures(call, tmp_path: Path) -> None:
    (tmp_path / "hall.yaml").write_text(HALL, encoding="utf-8")
    out = tmp_path / "day"
    argv = ["hall", str(tmp_path / "hall.yaml"), "--span", "10min", "--grid", "15s"]
    argv += ["--out", str(out), "--workers", "1", "--format", "csv"]
    done = call(*argv)
    assert done.code == 0, done.err
    with (out / "power.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert len(rows) == 40
    energy_j = sum(float(row["energy_j"]) for row in rows)
    assert energy_j == pytest.approx(summary["energy_j"], rel=1e-9)
    assert rows[4]["time"] == "2026-01-01T00:01:00.000"
    rows_mw = [float(row["row0_w"]) / 1e6 for row in rows]
    with (out / "profiles.csv").open(encoding="utf-8") as stream:
        profiles = list(csv.DictReader(stream))
    np.testing.assert_allclose([float(row["row0_p_mw"]) for row in profiles], rows_mw)


@pytest.mark.parametrize("name", FIGURES)
def test_figures_show_the_whole_span(hall: CombinedHall, name: str) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'wattcast[plot]'")
    figure = FIGURES[name](hall)
    (axes, *_) = figure.axes
    low, high = axes.get_xlim()
    assert (low, high) == pytest.approx((0.0, 100.0 if name == "load-duration" else 3599.0), abs=3)
    top_mw = axes.get_ylim()[1]
    assert top_mw > float(hall.power_w.max()) / 1e6


SENTENCES = {
    "racks: 3": ("racks: -3", "chat: racks: expected a whole number, 1 to"),
    "system: dgx-h200": ("system: dgx-h300", "unknown node system 'dgx-h300'. Closest:"),
    "hours: 1": ("hours: 25", "hours: expected above 0, at most 24, got 25"),
    "hall: 200 kW": ("hall: 12 kW", "that an idle hall draws, got '12 kW'"),
    "rack: 30 kW": ("rack: -1 kW", "limits: rack: expected a power above zero"),
    "day: office": ("day: offce", "unknown shape of a day 'offce'. Closest: office"),
    "tp: 2": ("tp: 16", "tp: expected 1 to the 8 GPUs of a node, got 16"),
    "rate: 3/s": ("rate: -3/s", "rate"),
    "idle: cold": ("idle: warm", "unknown kind of idle racks 'warm'"),
    "model: llama3-8b, rate": ("model: lama3-8b, rate", "Closest: llama3-8b"),
    "restart: 1min": ("restart: -1min", "restart: expected a time of zero or more"),
    "0.9": ("2.0", "failures_per_gpu_day: expected from 0 to 1"),
    "title: test": ("titel: test", "titel"),
    "groups:": ("group:", "group"),
    "name: spare": ("name: job", "names that differ"),
    "racks_per_row: 2": ("racks_per_row: 0", "racks_per_row"),
    "hours": ("inlet: 50 °C\nhours", "air of -20 to 30 °C"),
    "nodes_per_rack: 1\n    idle": ("gpu: a100\n    idle", "GPU of dgx-h100"),
}


@pytest.mark.parametrize("place", SENTENCES)
def test_bad_input_gets_one_sentence(call, tmp_path: Path, place: str) -> None:
    wrong, sentence = SENTENCES[place]
    text = HALL.replace(place, wrong, 1)
    assert text != HALL
    (tmp_path / "hall.yaml").write_text(text, encoding="utf-8")
    done = call("hall", str(tmp_path / "hall.yaml"), "--workers", "1", "--span", "60s")
    assert done.code == 2, done.err
    # before anything is simulated: a model is looked up when its first rate begins
    (line,) = [line for line in done.err.strip().splitlines() if ": rate 1 of " not in line]
    assert sentence in line


def test_a_day_of_25_values(tmp_path: Path) -> None:
    day = ", ".join(["1"] * 25)
    with pytest.raises(BadInput, match=r"day: expected 24 numbers .* got '25 of them'"):
        read(HALL.replace("day: office", f"day: [{day}]"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--begin", "2h"], "--begin: expected a whole second of the hall's 1 hours"),
        (["--begin", "25:99"], "begin: expected a moment such as 14:30"),
        (["--span", "3h"], "--span: expected whole seconds up to the end"),
        (["--grid", "0.3s"], "--grid: expected whole seconds"),
        (["--grid", "-1s"], "grid: expected a number above zero"),
        (["--chance", "0"], "chance: expected a number above zero"),
        (["--out", "/dev/null"], "/dev/null"),
    ],
)
def test_wrong_options(call, tmp_path: Path, options: list[str], sentence: str) -> None:
    (tmp_path / "hall.yaml").write_text(HALL, encoding="utf-8")
    done = call("hall", str(tmp_path / "hall.yaml"), "--workers", "1", *options)
    assert done.code == 2, (done.out, done.err)
    assert sentence in done.err


def test_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hall_run, "MOST_VALUES", 1000)
    with pytest.raises(BadInput, match="a --span of 166 s at most"):
        run_hall(read(HALL))


def test_no_time_between_checkpoints_is_refused_with_the_time_that_is_expected() -> None:
    """The message asked for "a time of zero or more" and got zero."""
    text = HALL.replace("checkpoint_every: 5min", "checkpoint_every: 0s")
    with pytest.raises(BadInput, match="checkpoint_every: expected a time above zero"):
        parse_hall(text.encode(), "hall.yaml", Path())
