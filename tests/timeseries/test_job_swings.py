"""What a staggered start and a floor of power change in the swing of several training jobs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wattcast.core.arrays import Array
from wattcast.core.errors import WattcastError
from wattcast.hardware import load_gpu
from wattcast.timeseries.hall_file import JobStart, TrainingLoad, parse_hall
from wattcast.timeseries.job_timeline import JobSteps, draw_job, plan_steps

JOBS = 8
LOAD = TrainingLoad(
    model="gpt2",
    jobs=JOBS,
    checkpoint_every_s=600.0,
    checkpoint_takes_s=60.0,
    failures_per_gpu_day=0.0,
    restart_s=600.0,
    options={"seq": 1024, "global_batch": 64, "micro_batch": 8, "tp": 1},
)
HOUR_S = np.arange(0.0, 3601.0)
HALL = """
groups:
  - name: job
    system: dgx-h100
    racks: 4
    train: {model: gpt2, jobs: 2, START}
"""


@pytest.fixture(scope="module")
def steps() -> JobSteps:
    return plan_steps(LOAD, "h100-sxm", 8)


def watts_of_jobs(load: TrainingLoad, steps: JobSteps) -> Array:
    """Return the watts of a GPU of each job, added up, over an hour in seconds."""
    watts = np.zeros(len(HOUR_S) - 1)
    for job in range(load.jobs):
        timeline = draw_job(load, steps, (1, 0, job))
        watts += np.diff(timeline.energy_until(steps, 70.0, HOUR_S))
    return watts


def test_a_staggered_start_takes_most_of_the_swing(steps: JobSteps) -> None:
    """Eight jobs that checkpoint at once swing eight times as far as one; spread out, as one."""
    together = watts_of_jobs(replace(LOAD, start=JobStart.TOGETHER), steps)
    staggered = watts_of_jobs(replace(LOAD, start=JobStart.STAGGERED), steps)
    one_swing_w = np.ptp(together) / JOBS
    assert np.ptp(staggered) < 2.5 * one_swing_w
    assert np.ptp(staggered) < 0.35 * np.ptp(together)
    assert staggered.mean() == pytest.approx(together.mean(), rel=0.05)


def test_jobs_that_start_together_checkpoint_together(steps: JobSteps) -> None:
    load = replace(LOAD, start=JobStart.TOGETHER)
    begins = [draw_job(load, steps, (1, 0, job)).begin_s[1] for job in range(JOBS)]
    assert begins == [600.0] * JOBS


def test_a_floor_bounds_the_dip_and_costs_joules(steps: JobSteps) -> None:
    """Power smoothing burns power where GPUs wait, so that a hall's dips are smaller."""
    limit_w = float(np.mean(load_gpu("h100-sxm").power.limit_w))
    load = replace(LOAD, start=JobStart.TOGETHER, floor=0.6)
    usual = watts_of_jobs(load, steps) / JOBS
    smooth = watts_of_jobs(load, plan_steps(load, "h100-sxm", 8)) / JOBS
    assert usual.min() < 0.4 * limit_w
    assert smooth.min() == pytest.approx(0.6 * limit_w, rel=0.01)
    assert np.ptp(smooth) < 0.8 * np.ptp(usual)
    assert smooth.mean() > usual.mean()


@pytest.mark.parametrize(
    ("words", "error"),
    [("start: later", "staggered"), ("floor: 70", "0 to 1"), ("floor: x", "floor")],
)
def test_starts_and_floors_that_cannot_be_are_refused(words: str, error: str, tmp_path) -> None:
    with pytest.raises(WattcastError, match=error):
        parse_hall(HALL.replace("START", words).encode(), "hall.yaml", tmp_path)


def test_a_file_says_how_jobs_start(tmp_path) -> None:
    plan = parse_hall(
        HALL.replace("START", "start: staggered, floor: 60%").encode(), "hall.yaml", tmp_path
    )
    load = plan.groups[0].load
    assert isinstance(load, TrainingLoad)
    assert (load.start, load.floor) == (JobStart.STAGGERED, 0.6)
