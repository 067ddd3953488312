"""Find what would explain how a training job differs from its prediction.

A cause changes the job: GPUs that wait for data, a slower card, a lower clock or power limit, other
sequences, layers that are not compiled, an older attention kernel, slower exchanges. Each is
predicted at several strengths. As for services (``serving.checking.service_causes``), the strength
is the one that leaves the least χ², and the cause that leaves least explains best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from wattcast.core.errors import BadInput
from wattcast.options.training_options import Recompute
from wattcast.serving.checking.service_causes import LEAST_GAIN, FoundCause, fit_strength
from wattcast.training.checking.expected_job import ExpectedJob
from wattcast.training.train_job import TrainingResult
from wattcast.workload.model_options import SoftwareStack

FIGURES = ("step_s", "power_w", "clock_hz", "busy")
StepFigures = dict[str, float]  # by name of ``FIGURES``


@dataclass(frozen=True)
class KindOfJobCause:
    """A way in which a job can differ, of several strengths."""

    name: str
    sentence: str  # with the strength, or how far it is from the first one, as {0}
    strengths: tuple[float, ...]  # the first is none at all
    change: Callable[[PredictedJob, float], StepFigures]
    is_switch: bool = False  # there is no strength between the first and the last
    is_relative: bool = True  # the sentence names the distance from the first strength


@dataclass
class PredictedJob:
    """A job as it is predicted, and the changes that causes make to it."""

    job: ExpectedJob
    result: TrainingResult

    @property
    def figures(self) -> StepFigures:
        """The figures of the job as it is."""
        return find_figures(self.result)

    def change(self, **options: object) -> StepFigures:
        """Return the figures of a job with other options that is shared as this one is."""
        strategy = self.result.strategy
        fixed = {
            "tp": strategy.tp,
            "pp": strategy.pp,
            "sharding": str(strategy.sharding),
            "recompute": str(strategy.recompute),
            "micro_batch": strategy.micro_batch,
            "global_batch": strategy.global_batch,
            "force": True,
        }
        return find_figures(self.job.predict(**(fixed | options)))


def find_figures(result: TrainingResult) -> StepFigures:
    """Return the figures of a step that logs have."""
    return {
        "step_s": result.step_s,
        "power_w": float(result.step.power_w),
        "clock_hz": float(result.step.clock_hz),
        "busy": 1.0,
    }


def _wait_for_data(job: PredictedJob, share: float) -> StepFigures:
    plain = job.figures
    waiting_w = float(job.result.step.waiting_w)
    power_w = (1.0 - share) * plain["power_w"] + share * waiting_w
    step_s = plain["step_s"] / (1.0 - share)
    return plain | {"step_s": step_s, "power_w": power_w, "busy": 1.0 - share}


def _slow_card(job: PredictedJob, factor: float) -> StepFigures:
    plain = job.figures
    return plain | {"step_s": plain["step_s"] * factor}


def _thirsty_card(job: PredictedJob, factor: float) -> StepFigures:
    plain = job.figures
    return plain | {"power_w": plain["power_w"] * factor}


def _lower_clock(job: PredictedJob, share: float) -> StepFigures:
    swept = job.result.candidates[0].swept
    assert swept is not None, "the strategy that is reported was timed at all clocks"
    plain = job.figures
    clock_hz = share * plain["clock_hz"]
    rising = np.argsort(np.ravel(swept.clock_hz))
    clocks_hz = np.ravel(swept.clock_hz)[rising]
    step_s = float(np.interp(clock_hz, clocks_hz, np.ravel(swept.latency_s)[rising]))
    power_w = float(np.interp(clock_hz, clocks_hz, np.ravel(swept.power_w)[rising]))
    return plain | {"step_s": step_s, "power_w": power_w, "clock_hz": clock_hz}


def _lower_limit(job: PredictedJob, share: float) -> StepFigures:
    swept = job.result.candidates[0].swept
    assert swept is not None, "the strategy that is reported was timed at all clocks"
    plain = job.figures
    step = swept.hold_power(share * plain["power_w"])
    return plain | {
        "step_s": float(step.latency_s),
        "power_w": float(step.power_w),
        "clock_hz": float(step.clock_hz),
    }


def _other_lengths(job: PredictedJob, factor: float) -> StepFigures:
    return job.change(seq=max(round(job.result.seq * factor), 1))


def _slow_attention(job: PredictedJob, factor: float) -> StepFigures:
    usual = job.result.recipe.attention_slowdown
    return job.change(attention_slowdown=usual * factor)


def _leave_uncompiled(job: PredictedJob, strength: float) -> StepFigures:
    return job.change(stack="eager")


def _compute_again(job: PredictedJob, strength: float) -> StepFigures:
    return job.change(recompute="full")


def _slow_exchanges(job: PredictedJob, factor: float) -> StepFigures:
    step = job.result.step
    plain = job.figures
    more_s = (factor - 1.0) * float(step.exchange_s)
    step_s = plain["step_s"] + more_s
    energy_j = float(step.energy_j) + more_s * float(step.waiting_w)
    return plain | {"step_s": step_s, "power_w": energy_j / step_s}


_SLOWER = (1.0, 1.05, 1.12, 1.25, 1.6, 2.5)
CAUSES = (
    KindOfJobCause(
        "data",
        "GPUs wait for input {0:.0%} of the time (data loading, logging, the host)",
        (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7),
        _wait_for_data,
    ),
    KindOfJobCause(
        "card", "the slowest card takes {0:.0%} longer for all work", _SLOWER, _slow_card
    ),
    KindOfJobCause(
        "card", "all work takes {0:.0%} less time than predicted", (1.0, 0.9, 0.75, 0.5), _slow_card
    ),
    KindOfJobCause(
        "clock",
        "the clock is {0:.0%} lower than predicted",
        (1.0, 0.9, 0.8, 0.7, 0.55, 0.4),
        _lower_clock,
    ),
    KindOfJobCause(
        "power limit",
        "the power limit holds GPUs at {0:.0%} fewer watts",
        (1.0, 0.85, 0.7, 0.55),
        _lower_limit,
    ),
    KindOfJobCause(
        "power", "cards draw {0:.0%} more at the same speed", (1.0, 1.1, 1.3), _thirsty_card
    ),
    KindOfJobCause(
        "power", "cards draw {0:.0%} less at the same speed", (1.0, 0.9, 0.7), _thirsty_card
    ),
    KindOfJobCause(
        "lengths",
        "sequences are {0:.1f} times as long as told (--seq)",
        (1.0, 1.5, 3.0),
        _other_lengths,
        is_relative=False,
    ),
    KindOfJobCause(
        "lengths",
        "sequences are {0:.2f} times as long as told (--seq), or batches are cut to their longest",
        (1.0, 0.6, 0.3),
        _other_lengths,
        is_relative=False,
    ),
    KindOfJobCause(
        "attention",
        "attention takes {0:.1f} times as long (an older kernel, or a mask that is written out)",
        (1.0, 2.0, 5.0),
        _slow_attention,
        is_relative=False,
    ),
    KindOfJobCause(
        "stack",
        "layers are not compiled (--stack eager)",
        (0.0, 1.0),
        _leave_uncompiled,
        is_switch=True,
    ),
    KindOfJobCause(
        "recomputation",
        "layers compute their activations again (--recompute full)",
        (0.0, 1.0),
        _compute_again,
        is_switch=True,
    ),
    KindOfJobCause(
        "exchanges",
        "exchanges between GPUs take {0:.1f} times as long (the network, or less overlap)",
        (1.0, 1.5, 2.5, 5.0, 10.0),
        _slow_exchanges,
        is_relative=False,
    ),
)


def _can_happen(kind: KindOfJobCause, result: TrainingResult) -> bool:
    """Whether a cause can change this job."""
    if kind.name == "stack":
        return result.recipe.stack is SoftwareStack.COMPILED
    if kind.name == "recomputation":
        return result.strategy.recompute is not Recompute.FULL
    if kind.name == "exchanges":
        return float(result.step.exchange_s) > 0.0
    return True


def find_job_causes(
    predicted: PredictedJob,
    logs: Mapping[str, float],
    sigmas: Mapping[str, float],
) -> list[FoundCause]:
    """Return the causes that explain what was measured, best first.

    ``logs`` are the logarithms of measured over predicted figures, and ``sigmas`` how far each may
    be off for other reasons.
    """
    names = list(logs)
    seen = np.array([logs[name] for name in names])
    sigma = np.array([sigmas[name] for name in names])
    alone = float(((seen / sigma) ** 2).sum())
    plain = predicted.figures
    causes = []
    for kind in CAUSES:
        if not _can_happen(kind, predicted.result):
            continue
        try:
            changed = [kind.change(predicted, strength) for strength in kind.strengths[1:]]
        except BadInput:  # sequences or a way to share them that the model does not take
            continue
        effects = [[0.0] * len(names)]
        effects += [
            [math.log(figures[name] / plain[name]) for name in names] for figures in changed
        ]
        strength, chi_squared = fit_strength(
            np.array(kind.strengths), np.array(effects), seen, sigma, is_switch=kind.is_switch
        )
        gain = alone - chi_squared
        if gain > LEAST_GAIN:
            amount = abs(strength - kind.strengths[0]) if kind.is_relative else strength
            sentence = kind.sentence.format(amount)
            causes.append(FoundCause(kind.name, strength, sentence, chi_squared, gain))
    return sorted(causes, key=lambda cause: cause.left)
