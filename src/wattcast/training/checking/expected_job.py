"""Write and read what a training job is and what is expected of it (``train --write``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wattcast import __version__
from wattcast.core import bad_value
from wattcast.core.strict_files import (
    convert_plain,
    decode_json,
    encode_json,
)
from wattcast.training.train_job import TrainingResult, train

FORM = 1  # of the file; a file of another form is not read


@dataclass(frozen=True)
class JobFigures:
    """What a step of a job is expected to be, for readers of the file."""

    strategy: str
    step_s: float
    step_s_low: float
    step_s_high: float
    power_w: float  # of a GPU
    clock_hz: float
    step_tokens: int


@dataclass(frozen=True)
class ExpectedJob:
    """A training job: how to predict it, and how one that was healthy compared."""

    model: str
    gpu: str
    options: dict[str, Any]
    expected: JobFigures
    # logarithms of measured over predicted figures of a healthy job
    adopted: dict[str, float] = field(default_factory=dict)
    kind: str = "training job"
    form: int = FORM
    wattcast: str = __version__

    def predict(self, **changes: Any) -> TrainingResult:
        """Predict the job anew, or one whose options differ."""
        result: TrainingResult = train(self.model, self.gpu, **(self.options | changes))
        return result

    def adopt(self, logs: Mapping[str, float]) -> ExpectedJob:
        """Return the job with how it ran as the healthy one."""
        return replace(self, adopted=dict(logs))


def expect_job(
    model: str,
    gpu: str,
    options: Mapping[str, Any],
    result: TrainingResult,
) -> ExpectedJob:
    """Return a job as its file has it; ``options`` are those that were asked for."""
    low, high = result.relative_interval
    figures = JobFigures(
        strategy=str(result.strategy),
        step_s=result.step_s,
        step_s_low=result.step_s * low,
        step_s_high=result.step_s * high,
        power_w=float(result.step.power_w),
        clock_hz=float(result.step.clock_hz),
        step_tokens=result.step_tokens,
    )
    return ExpectedJob(model, gpu, dict(options), figures)


def write_expected_job(job: ExpectedJob) -> bytes:
    """Return the content of the file."""
    return encode_json(job) + b"\n"


def is_training_job(data: bytes, where: str) -> bool:
    """Tell whether a file is that of a training job, not of a service."""
    plain = decode_json(data, dict, where)
    return plain.get("kind") == ExpectedJob.kind


def parse_expected_job(data: bytes, where: str) -> ExpectedJob:
    """Parse the content of the file; an error names the field that is wrong."""
    plain = decode_json(data, dict, where)
    if plain.get("form", FORM) != FORM:
        raise bad_value(f"{where}: form", f"form {FORM}, which this version writes", plain["form"])
    return convert_plain(plain, ExpectedJob, where)


def name_files_absolutely(model: str, gpu: str) -> tuple[str, str]:
    """Return names as they are, and files by paths that hold from any folder."""
    names = []
    for word in (model, gpu):
        path = Path(word)
        names.append(str(path.resolve()) if path.is_file() else word)
    return names[0], names[1]
