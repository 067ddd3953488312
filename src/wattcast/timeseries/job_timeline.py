"""A training job over a day: its steps, with pauses for checkpoints and failures.

All GPUs of a job are in the same state, which is the swing that grid operators fear: a checkpoint
takes thousands of them from full power to waiting within a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from wattcast.core.arrays import Array
from wattcast.timeseries.governor_ripple import RIPPLE, overshoot_after_pause_j
from wattcast.timeseries.hall_file import JobStart, TrainingLoad
from wattcast.timeseries.job_power import (
    HeldPower,
    find_power_limit,
    list_step_pieces,
)
from wattcast.timeseries.power_curve import (
    PowerCurve,
    StateCodes,
    join_pieces,
    state_code,
)
from wattcast.training.train_job import TrainingResult, train

_RUNNING = state_code("compute")
_CHECKPOINT = state_code("checkpoint")
_DOWN = state_code("idle")
SECONDS_A_DAY = 86400.0


@dataclass(frozen=True)
class JobSteps:
    """One step of a job: the curve of a GPU, and what it draws while it waits."""

    step: PowerCurve
    waiting_w: float
    tokens_per_s: float
    gpus: int
    limit: HeldPower | None  # None: the job draws less than the governor allows

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return float(self.step.moments_s[-1])


@dataclass(frozen=True)
class JobTimeline:
    """What a job does over a day, in pieces of one state each."""

    begin_s: Array  # (piece + 1,), the last is the end
    states: StateCodes  # (piece,)
    phase_s: float  # of the first step at moment 0
    lost_s: float  # of running that failures repeat
    failures: int

    def running_until(self, times_s: Array) -> Array:
        """Return the seconds that the job has run up to each time."""
        return self._seconds_in(_RUNNING, times_s)

    def energy_until(
        self,
        steps: JobSteps,
        down_w: float,
        times_s: Array,
    ) -> Array:
        """Return the joules of one GPU up to each time."""
        running_s = self.running_until(times_s) + self.phase_s
        last_s = float(self.begin_s[-1]) + self.phase_s
        count = math.ceil(last_s / steps.step_s) + 1
        curve = replace(steps.step, repeats=count)
        waiting_j = steps.waiting_w * self._seconds_in(_CHECKPOINT, times_s)
        down_j = down_w * self._seconds_in(_DOWN, times_s)
        beyond_j = self._overshoot_until(steps.limit, times_s)
        return np.asarray(curve.energy_until(running_s)[:, 0] + waiting_j + down_j + beyond_j)

    def _overshoot_until(
        self,
        limit: HeldPower | None,
        times_s: Array,
    ) -> Array:
        """Return the joules of one GPU beyond its limit, drawn after pauses and not yet made up
        for.

        All GPUs of a job go on at once, so a hall sees the sum.
        """
        is_running = self.states == _RUNNING
        is_after_pause = np.diff(self.begin_s)[:-1] >= RIPPLE.pause_s
        resumed_s = self.begin_s[1:-1][is_running[1:] & is_after_pause]
        if limit is None or not len(resumed_s):
            return np.zeros(len(times_s))
        place = np.searchsorted(resumed_s, times_s, side="right") - 1
        since_s = times_s - resumed_s[np.maximum(place, 0)]
        beyond_j = overshoot_after_pause_j(since_s, *limit)
        return np.where(place < 0, 0.0, beyond_j)

    def working_share(self, seconds: Array) -> Array:
        """Return the share of each second in which the job runs; ``seconds`` are edges."""
        return np.asarray(np.diff(self.running_until(seconds)))

    def _seconds_in(
        self,
        state: int,
        times_s: Array,
    ) -> Array:
        spans_s = np.where(self.states == state, np.diff(self.begin_s), 0.0)
        so_far_s = np.concatenate([[0.0], np.cumsum(spans_s)])
        return np.asarray(np.interp(times_s, self.begin_s, so_far_s))


def plan_steps(
    load: TrainingLoad,
    gpu: str,
    gpus: int,
    gpu_limit_w: float | None = None,
) -> JobSteps:
    """Return one step of a job on so many GPUs, as ``train`` predicts it."""
    options = dict(load.options)
    if gpu_limit_w is not None:
        options["power_limit"] = gpu_limit_w
    result = train(
        load.model,
        gpu,
        gpus=gpus,
        tokens="1T",
        **options,
    )
    return _trace_step(result, load.floor)


def _trace_step(result: TrainingResult, floor: float) -> JobSteps:
    """Return one step of a job whose GPUs never draw less than a share of their power limit."""
    spans_s, watts, states = list_step_pieces(result)
    limit_w, *_ = result.curve[0]
    least_w = floor * limit_w
    watts = np.maximum(watts, least_w)
    waiting_w = max(float(result.step.waiting_w), least_w)
    curve = join_pieces(
        spans_s,
        (watts * spans_s)[:, np.newaxis],
        states,
        ("gpu",),
        np.array([waiting_w]),
        1,
    )
    limit = find_power_limit(result)
    return JobSteps(
        curve,
        waiting_w,
        result.tokens_per_s,
        result.gpus,
        limit,
    )


def draw_job(
    load: TrainingLoad,
    steps: JobSteps,
    key: tuple[int, ...],
) -> JobTimeline:
    """Draw a day of a job; the same key gives the same one, and ends with the number of the job.

    Jobs that start together or staggered lie so to one another until the first failure. Failures come at random (Poisson) at the rate of all its GPUs together. The job then restarts
    from its last checkpoint, and runs what was lost again.
    """
    random = np.random.default_rng(key)
    phase_s = float(random.random()) * steps.step_s
    next_checkpoint_s = float(random.random()) * load.checkpoint_every_s
    if load.start is not JobStart.RANDOM:
        share = (key[-1] % load.jobs) / load.jobs if load.start is JobStart.STAGGERED else 0.0
        phase_s = share * steps.step_s
        next_checkpoint_s = (1.0 - share) * load.checkpoint_every_s
    failures_per_s = load.failures_per_gpu_day * steps.gpus / SECONDS_A_DAY
    pieces: list[tuple[float, int]] = []
    now_s = 0.0
    lost_s = 0.0
    failures = 0
    kept_s = 0.0  # when what a checkpoint holds began to grow
    next_failure_s = _next_failure(random, now_s, failures_per_s)
    while now_s < SECONDS_A_DAY:
        pieces.append((now_s, _RUNNING))
        if next_failure_s < next_checkpoint_s:
            now_s = max(next_failure_s, now_s)
            failures += 1
            lost_s += now_s - kept_s if now_s < SECONDS_A_DAY else 0.0
            pieces.append((now_s, _DOWN))
            now_s += load.restart_s
            next_failure_s = _next_failure(random, now_s, failures_per_s)
        else:
            now_s = next_checkpoint_s
            pieces.append((now_s, _CHECKPOINT))
            now_s += load.checkpoint_takes_s
        kept_s = now_s
        next_checkpoint_s = now_s + load.checkpoint_every_s
    inside = [piece for piece in pieces if piece[0] < SECONDS_A_DAY]
    begin_s = np.array([piece[0] for piece in inside] + [SECONDS_A_DAY])
    states = np.array([piece[1] for piece in inside], dtype=np.int8)
    in_day = int((states == _DOWN).sum())
    return JobTimeline(
        begin_s,
        states,
        phase_s,
        lost_s,
        in_day,
    )


def _next_failure(
    random: np.random.Generator,
    now_s: float,
    per_s: float,
) -> float:
    """Return when the next failure comes; never where there are none."""
    if per_s == 0.0:
        return math.inf
    return now_s + float(random.exponential(1.0 / per_s))
