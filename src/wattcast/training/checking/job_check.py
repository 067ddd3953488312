"""Compare a training job that ran with its prediction, and say what would explain differences.

The time of a step, the watts of a GPU, its clock and the share of time in which it works are each
judged by an interval around the prediction:

    half² = model² + sampling²      of a job that was not adopted
    half² = floor² + sampling²      of one that was

``model`` is the predictor's own interval of the step's time, and the spread of cards for watts;
``sampling`` how well the log knows its median. One healthy job in twenty raises an alarm, over all
figures. Steps with other numbers of tokens are another job: that is said first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from wattcast.core.errors import BadInput
from wattcast.core.units import show
from wattcast.serving.checking.check_coefficients import CHECK
from wattcast.serving.checking.service_causes import FoundCause
from wattcast.serving.checking.service_check import count_deviations
from wattcast.training.checking.expected_job import ExpectedJob
from wattcast.training.checking.job_causes import PredictedJob, find_figures, find_job_causes
from wattcast.training.checking.job_check_coefficients import JOB_CHECK
from wattcast.training.checking.job_logs import JobLog
from wattcast.training.checking.measured_job import MeasuredGpu, MeasuredJob, sum_up_logs
from wattcast.training.train_job import TrainingResult

_NINE_IN_TEN = 1.645
UNITS = {"step_s": "s", "power_w": "W", "clock_hz": "Hz", "busy": ""}
WORDS = {  # around a measured value
    "step_s": "a step takes {}",
    "power_w": "a GPU draws {}",
    "clock_hz": "the clock is {}",
    "busy": "GPUs work {} of the time",
}


@dataclass(frozen=True)
class JobFigure:
    """A figure of a job beside its prediction."""

    name: str
    measured: float
    predicted: float
    low: float
    high: float
    sigma: float  # standard deviation of the logarithm of measured over predicted
    offset: float = 0.0  # logarithm of measured over predicted when the job was adopted

    @property
    def is_inside(self) -> bool:
        """Whether the figure is where a healthy job has it."""
        return self.low <= self.measured <= self.high

    @property
    def log_ratio(self) -> float:
        """The logarithm of measured over predicted, less what it was when adopted."""
        return math.log(self.measured / self.predicted) - self.offset

    def show(self, value: float) -> str:
        """Return a value in the figure's unit."""
        return f"{value:.0%}" if self.name == "busy" else show(value, UNITS[self.name], 3)


@dataclass(frozen=True)
class JobFinding:
    """A way in which a job differs from its prediction."""

    kind: str  # tokens, batch, pauses, data, card, figure
    sentence: str


@dataclass(frozen=True)
class JobCheck:
    """What a check of a training job found."""

    job: ExpectedJob
    result: TrainingResult  # with the tokens of a step that the log has
    measured: MeasuredJob
    figures: tuple[JobFigure, ...]
    findings: tuple[JobFinding, ...]
    causes: tuple[FoundCause, ...]

    @property
    def has_alarm(self) -> bool:
        """Whether anything differs."""
        return bool(self.findings)

    def adopt(self) -> ExpectedJob:
        """Return the job with how it ran as the healthy one."""
        logs = {}
        for figure in self.figures:
            logs[figure.name] = math.log(figure.measured / figure.predicted)
        return self.job.adopt(logs)


def check_job(job: ExpectedJob, log: JobLog) -> JobCheck:
    """Compare a job with its prediction."""
    planned = job.predict()
    measured = sum_up_logs(log, planned.gpus)
    findings = _find_other_work(planned, measured)
    result = _predict_logged_work(job, planned, measured)
    figures = _compare_figures(job, result, measured)
    findings += _find_pauses(measured)
    findings += _find_other_cards(measured.gpus)
    outside = [figure for figure in figures if not figure.is_inside]
    findings += [JobFinding("figure", describe_figure(figure)) for figure in outside]
    causes: list[FoundCause] = []
    if outside:
        logs = {figure.name: figure.log_ratio for figure in figures}
        sigmas = {figure.name: figure.sigma for figure in figures}
        causes = find_job_causes(PredictedJob(job, result), logs, sigmas)
        causes = _put_logged_wait_first(_rule_out_limit(causes, measured), measured)
    return JobCheck(job, result, measured, tuple(figures), tuple(findings), tuple(causes))


def _find_other_work(planned: TrainingResult, measured: MeasuredJob) -> list[JobFinding]:
    """Return that a step has other sequences or tokens than planned."""
    findings = []
    sequences = planned.strategy.global_batch
    if measured.step_sequences is not None:
        factor = measured.step_sequences / sequences
        if abs(factor - 1.0) > JOB_CHECK.tokens:
            sentence = (
                f"a step has {measured.step_sequences:.0f} sequences, planned {sequences} "
                "(--global-batch)"
            )
            findings.append(JobFinding("batch", sentence))
    if measured.step_tokens is not None:
        factor = measured.step_tokens / planned.step_tokens
        if abs(factor - 1.0) > JOB_CHECK.tokens:
            sentence = (
                f"a step has {measured.step_tokens:,.0f} tokens, planned {planned.step_tokens:,}: "
                f"{factor:.2f} times as many"
            )
            sentence += (
                " (longer sequences or larger batches)"
                if factor > 1.0
                else (" (shorter sequences, or padding that the log does not count)")
            )
            findings.append(JobFinding("tokens", sentence))
    return findings


def _predict_logged_work(
    job: ExpectedJob,
    planned: TrainingResult,
    measured: MeasuredJob,
) -> TrainingResult:
    """Return the prediction of a step with the sequences and tokens that the log has."""
    changes: dict[str, Any] = {}
    sequences = planned.strategy.global_batch
    batch_factor = (measured.step_sequences or sequences) / sequences
    if abs(batch_factor - 1.0) > JOB_CHECK.tokens:
        sequences = round(measured.step_sequences or sequences)
        changes["global_batch"] = sequences
    if measured.step_tokens is not None:
        length = measured.step_tokens / sequences
        # Tokens that a log does not count, as padding, take as long as others
        if length > (1.0 + JOB_CHECK.tokens) * planned.seq:
            changes["seq"] = round(length)
    if not changes:
        return planned
    try:
        return job.predict(**changes, force=True)
    except BadInput:  # so many sequences are shared in other micro-batches
        return job.predict(**changes, micro_batch=None, force=True)


def _compare_figures(
    job: ExpectedJob,
    result: TrainingResult,
    measured: MeasuredJob,
) -> list[JobFigure]:
    """Return the figures that the logs have, with their intervals."""
    predicted = find_figures(result)
    pause_share = measured.pause_share or 0.0
    waiting_w = float(result.step.waiting_w)
    predicted["power_w"] += pause_share * (waiting_w - predicted["power_w"])
    predicted["busy"] -= pause_share
    low, high = result.relative_interval
    halves = {
        "step_s": 0.5 * math.log(high / low),
        "power_w": JOB_CHECK.power,
        "clock_hz": JOB_CHECK.clock,
        "busy": JOB_CHECK.busy,
    }
    values = {name: getattr(measured, name) for name in predicted}
    known = {name: value for name, value in values.items() if value}
    deviations = count_deviations(len(known))
    figures = []
    for name, value in known.items():
        offset = job.adopted.get(name)
        half = halves[name] if offset is None else JOB_CHECK.floor
        sampling = measured.scatter if name == "step_s" else 0.0
        sigma = math.hypot(half / _NINE_IN_TEN, sampling)
        centre = math.log(predicted[name]) + (offset or 0.0)
        most = 1.0 if name == "busy" else math.inf
        figure = JobFigure(
            name=name,
            measured=value,
            predicted=predicted[name],
            low=math.exp(centre - deviations * sigma),
            high=min(math.exp(centre + deviations * sigma), most),
            sigma=sigma,
            offset=offset or 0.0,
        )
        figures.append(figure)
    return figures


def _find_pauses(measured: MeasuredJob) -> list[JobFinding]:
    """Return that much of the time passes between steps, or in waiting for data."""
    findings = []
    share = measured.pause_share
    if share is not None and share > JOB_CHECK.pauses:
        sentence = (
            f"{share:.0%} of the time passes between usual steps: checkpoints, evaluations, "
            "restarts or input that stalls now and then"
        )
        findings.append(JobFinding("pauses", sentence))
    wait_share = _share_of_waiting(measured)
    if wait_share > JOB_CHECK.wait:
        wait = show(measured.wait_s or 0.0, "s", 3)
        sentence = f"the log says that a step waits {wait} for data, {wait_share:.0%} of its time"
        findings.append(JobFinding("data", sentence))
    return findings


def _share_of_waiting(measured: MeasuredJob) -> float:
    """Return the share of a step that waits for data, where the log has it."""
    if measured.wait_s is None or not measured.step_s:
        return 0.0
    return measured.wait_s / measured.step_s


def _find_other_cards(gpus: tuple[MeasuredGpu, ...]) -> list[JobFinding]:
    """Return GPUs whose watts or clock are unlike those of the others."""
    if len(gpus) < 3:
        return []
    findings = []
    usual_w = median(gpu.power_w for gpu in gpus)
    clocks_hz = [gpu.clock_hz for gpu in gpus if gpu.clock_hz]
    usual_hz = median(clocks_hz) if clocks_hz else 0.0
    for gpu in gpus:
        if usual_hz and (gpu.clock_hz or usual_hz) < (1.0 - JOB_CHECK.other_card) * usual_hz:
            sentence = (
                f"GPU {gpu.index} runs at {show(gpu.clock_hz or 0.0, 'Hz', 3)}, the others at "
                f"{show(usual_hz, 'Hz', 3)}: they wait for it"
            )
            findings.append(JobFinding("card", sentence))
        elif abs(gpu.power_w / usual_w - 1.0) > JOB_CHECK.other_card:
            side = "it may be the one that they wait for"
            if gpu.power_w < usual_w:
                side = "look at its clock, its limit and its share of the work"
            sentence = (
                f"GPU {gpu.index} draws {show(gpu.power_w, 'W', 3)}, the others "
                f"{show(usual_w, 'W', 3)}: {side}"
            )
            findings.append(JobFinding("card", sentence))
    return findings


def _rule_out_limit(causes: list[FoundCause], measured: MeasuredJob) -> list[FoundCause]:
    """Return causes without the power limit, where GPUs draw much less than the log's limit."""
    if measured.limit_w is None or measured.power_w is None:
        return causes
    if measured.power_w >= CHECK.limit_share * measured.limit_w:
        return causes
    return [cause for cause in causes if cause.name != "power limit"]


def _put_logged_wait_first(causes: list[FoundCause], measured: MeasuredJob) -> list[FoundCause]:
    """Return causes with data first, where the log itself says that steps wait for it."""
    if _share_of_waiting(measured) <= JOB_CHECK.wait:
        return causes
    first = [cause for cause in causes if cause.name == "data"]
    return [replace(cause, sentence=f"{cause.sentence}, as the log says") for cause in first] + [
        cause for cause in causes if cause.name != "data"
    ]


def describe_figure(figure: JobFigure) -> str:
    """Say where a figure is and where a healthy job has it."""
    side = "more" if figure.measured > figure.high else "less"
    low, high = figure.show(figure.low), figure.show(figure.high)
    words = WORDS[figure.name].format(figure.show(figure.measured))
    return f"{words}, {side} than the {low} to {high} of a healthy job"
