"""Sum up what the logs of a training job say of a step and of a GPU.

A step's time is the median over the intervals between logged steps, so that checkpoints,
evaluations and the compilation at the begin do not count; what all of it takes beyond those is the
share of pauses. Watts are the mean over the time between the first and the last step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import BadInput
from wattcast.training.checking.job_logs import JobLog, LogSeries
from wattcast.training.checking.log_columns import Quantity

LEAST_INTERVALS = 3  # between logged steps; fewer say little of the usual one
_NORMAL_SPREAD = 1.4826  # standard deviation over the median absolute deviation
_MEDIAN_ERROR = 1.2533  # standard error of a median over that of a mean
RUNNING = (
    0.5  # of the median watts, below which the first and the last readings are before or after
)


@dataclass(frozen=True)
class MeasuredGpu:
    """A GPU of a job, in the mean."""

    index: int
    power_w: float
    clock_hz: float | None = None


@dataclass(frozen=True)
class MeasuredJob:
    """What a job's logs say; None where they do not."""

    step_s: float | None
    scatter: float  # standard error of the step's time, as a share of it
    steps: float
    pause_share: float | None  # of the time from the first step to the last
    power_w: float | None  # of a GPU
    gpus: tuple[MeasuredGpu, ...]
    busy: float | None
    clock_hz: float | None
    limit_w: float | None
    step_tokens: float | None
    step_sequences: float | None
    wait_s: float | None  # for data, in a step


def sum_up_logs(log: JobLog, gpus: int) -> MeasuredJob:
    """Return the figures of a job of so many GPUs; an error where neither times nor watts are
    there.
    """
    times = _time_steps(log)
    per_gpu = _measure_gpus(log)
    power_w = _find_power(log, per_gpu, gpus)
    if times.step_s is None and not power_w:
        raise BadInput(
            "the logs have neither times of steps nor watts. Give a log with global_step and "
            "_timestamp, step_time or train_runtime, or the system metrics of W&B or MLflow."
        )
    return MeasuredJob(
        step_s=times.step_s,
        scatter=times.scatter,
        steps=times.steps,
        pause_share=times.pause_share,
        power_w=power_w,
        gpus=per_gpu,
        busy=_mean_over_gpus(log, Quantity.BUSY),
        clock_hz=_mean_over_gpus(log, Quantity.CLOCK),
        limit_w=_mean_over_gpus(log, Quantity.LIMIT),
        step_tokens=_count_tokens(log),
        step_sequences=_count_sequences(log),
        wait_s=_find_wait(log),
    )


@dataclass(frozen=True)
class StepTimes:
    """How long steps took."""

    step_s: float | None = None
    scatter: float = 0.0
    steps: float = 0.0
    pause_share: float | None = None


def _time_steps(log: JobLog) -> StepTimes:
    """Return the usual step: from a column of times, from stamps, or from the whole job."""
    stamped = _time_by_stamps(log)
    column = log.find(Quantity.STEP_TIME)
    if column is not None:
        median, scatter = _find_median(column.values)
        pause_share = None
        if stamped.step_s is not None and stamped.pause_share is not None:
            elapsed_s = stamped.step_s / (1.0 - stamped.pause_share)
            pause_share = max(1.0 - median / elapsed_s, 0.0)
        return StepTimes(median, scatter, stamped.steps or len(column.values), pause_share)
    if stamped.step_s is not None:
        return stamped
    steps = log.find(Quantity.STEP)
    last_step = 0.0 if steps is None else float(np.max(steps.values))
    whole = log.find(Quantity.TRAIN_TIME)
    rate = log.find(Quantity.STEP_RATE)
    if rate is not None:
        steps_per_s = float(np.median(rate.values))
        if steps_per_s == 0.0:
            raise BadInput("a log says that its job does no steps in a second.")
        return StepTimes(1.0 / steps_per_s, 0.0, last_step)
    if whole is not None and last_step > 0.0:
        return StepTimes(float(whole.values[-1]) / last_step, 0.0, last_step)
    return StepTimes()


def _time_by_stamps(log: JobLog) -> StepTimes:
    """Return the usual step from the times at which steps were logged."""
    logged = log.find(Quantity.STEP)
    if logged is None or np.isnan(logged.times_s).any():
        return StepTimes()
    steps, places = np.unique(logged.values, return_index=True)
    times_s = logged.times_s[places]
    if len(steps) < LEAST_INTERVALS + 2:
        return StepTimes()
    # Compiling and warming up count to the first interval
    steps, times_s = steps[1:], times_s[1:]
    lengths_s = np.diff(times_s) / np.diff(steps)
    if (lengths_s <= 0.0).any():
        raise BadInput("the times of a log do not rise with its steps: give the log of one job")
    median, scatter = _find_median(lengths_s)
    elapsed_s = float(times_s[-1] - times_s[0])
    count = float(steps[-1] - steps[0])
    return StepTimes(median, scatter, count, max(1.0 - median * count / elapsed_s, 0.0))


def _find_median(values: Array) -> tuple[float, float]:
    """Return the median time of a step and its standard error, as a share of it."""
    median = float(np.median(values))
    if median == 0.0:
        raise BadInput("a log says that a usual step takes 0 s.")
    spread = _NORMAL_SPREAD * float(np.median(np.abs(values - median)))
    return median, _MEDIAN_ERROR * spread / (median * math.sqrt(len(values)))


def _measure_gpus(log: JobLog) -> tuple[MeasuredGpu, ...]:
    """Return the mean watts of every GPU, and its clock."""
    measured = []
    for gpu in log.list_gpus(Quantity.POWER):
        series = log.find(Quantity.POWER, gpu)
        assert series is not None
        clock = log.find(Quantity.CLOCK, gpu)
        clock_hz = None if clock is None else float(np.median(clock.values))
        measured.append(MeasuredGpu(gpu, _mean_while_running(log, series), clock_hz))
    return tuple(measured)


def _mean_while_running(log: JobLog, series: LogSeries) -> float:
    """Return the mean from the first step to the last, or without what is idle at both ends."""
    values = series.values
    steps = log.find(Quantity.STEP)
    if steps is not None and not np.isnan(steps.times_s).any():
        inside = (series.times_s >= steps.times_s[0]) & (series.times_s <= steps.times_s[-1])
        if inside.any():
            return float(np.mean(values[inside]))
    running = np.flatnonzero(values >= RUNNING * np.median(values))
    return float(np.mean(values[running[0] : running[-1] + 1]))


def _find_power(log: JobLog, per_gpu: tuple[MeasuredGpu, ...], gpus: int) -> float | None:
    """Return the mean watts of a GPU."""
    if per_gpu:
        return float(np.mean([gpu.power_w for gpu in per_gpu]))
    total = log.find(Quantity.TOTAL_POWER)
    return None if total is None else float(np.mean(total.values)) / gpus


def _mean_over_gpus(log: JobLog, quantity: Quantity) -> float | None:
    """Return the mean over GPUs of each one's median."""
    medians = []
    for gpu in log.list_gpus(quantity):
        series = log.find(quantity, gpu)
        assert series is not None
        medians.append(float(np.median(series.values)))
    return float(np.mean(medians)) if medians else None


def _count_tokens(log: JobLog) -> float | None:
    """Return the tokens of a step, from a count that rises over the job."""
    series = log.find(Quantity.TOKENS)
    if series is None or np.isnan(series.steps).any() or len(series.values) < 2:
        return None
    steps = float(np.ptp(series.steps))
    tokens = float(np.ptp(series.values))
    return tokens / steps if steps > 0.0 and tokens > 0.0 else None


def _count_sequences(log: JobLog) -> float | None:
    """Return the sequences of a step, from the rates of both."""
    samples = log.find(Quantity.SAMPLE_RATE)
    steps = log.find(Quantity.STEP_RATE)
    if samples is None or steps is None:
        return None
    samples_per_s = float(samples.values[-1])
    steps_per_s = float(steps.values[-1])
    return samples_per_s / steps_per_s if samples_per_s > 0.0 and steps_per_s > 0.0 else None


def _find_wait(log: JobLog) -> float | None:
    series = log.find(Quantity.WAIT_TIME)
    return None if series is None else float(np.median(series.values))
