"""Recognise the columns of training logs, whoever wrote them.

A column is known by its name as Weights & Biases, MLflow, the Trainer of transformers, Lightning,
torchtitan, NeMo or Wattcast's own callback write it. Names are compared in lower case, without the
name of a run that W&B's page puts before them (``run-7 - system/gpu.0.powerWatts``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum, auto


class Quantity(StrEnum):
    """What a column of a log says."""

    STEP = auto()  # optimiser steps so far
    TIME = auto()  # of the clock on the wall
    RUNTIME = auto()  # since the job began
    STEP_TIME = auto()
    STEP_RATE = auto()
    TRAIN_TIME = auto()  # of the whole job, in the Trainer's last line
    WAIT_TIME = auto()  # for data, in a step
    TOKENS = auto()  # seen so far
    SAMPLE_RATE = auto()
    POWER = auto()  # of one GPU
    TOTAL_POWER = auto()  # of the GPUs that a callback meters
    BUSY = auto()  # share of the time that one GPU works
    CLOCK = auto()  # of one GPU
    LIMIT = auto()  # of one GPU's power


@dataclass(frozen=True)
class LogColumn:
    """What a column says: a quantity in SI units once it is multiplied, of a GPU or of the job."""

    quantity: Quantity
    factor: float = 1.0
    gpu: int | None = None
    # of a log's columns with a quantity those of the lowest rank are read, on a line the first
    rank: int = 0


# Names of equal worth stand together, the best first
_STEP_NAMES = (
    (
        "train/global_step",
        "trainer/global_step",
        "global_step",
        "current_steps",
        "wattcast/step",
    ),
    ("step",),
    ("iteration",),
    ("iter",),
    ("_step",),  # of W&B, which counts lines
)
_RUNTIMES = (
    ("_runtime",),
    ("relative time (process)",),
    ("relative time (wall)",),
    ("relative_time",),
    ("elapsed_time",),
)
_TIMES = (("_timestamp",), ("timestamp",), ("wall_time",), ("wall time",), ("time",))
_PATH = r"(?:.*/)?"  # of objects or folders around a name
_GPU = r"gpu[_/ ]?(?P<gpu>\d+)[_/ ]"
_SECONDS = r"(?:_s|_sec|_seconds|\(s\))"
_MILLISECONDS = r"(?:_ms|\(ms\))"
_STEP_TIME = r"(?:train_)?(?:step|iteration|iter)[_-]?time"
_TIME_PER_STEP = rf"{_PATH}(?:time|seconds)_per_(?:step|iteration)"
_MEAN_STEP_TIME = rf"{_PATH}(?:avg|average|mean)_(?:step|iteration|iter)[_-]?time"
_BATCH_TIME = rf"{_PATH}(?:train_)?batch[_-]?time"
_DATA = rf"{_PATH}(?:data|dataloader|data_loading|data_wait)"
# Patterns of whole names, the best of a quantity first: quantity, factor to SI units
_PATTERNS: tuple[tuple[str, Quantity, float], ...] = (
    (r"wattcast/step_s", Quantity.STEP_TIME, 1.0),
    (r"wattcast/power_w", Quantity.TOTAL_POWER, 1.0),
    (rf"(?:train/)?{_STEP_TIME}{_SECONDS}?", Quantity.STEP_TIME, 1.0),
    (rf"(?:train/)?{_STEP_TIME}{_MILLISECONDS}", Quantity.STEP_TIME, 1e-3),
    # of an object, which may be a part of the step
    (rf"{_PATH}{_STEP_TIME}{_SECONDS}?", Quantity.STEP_TIME, 1.0),
    (rf"{_PATH}{_STEP_TIME}{_MILLISECONDS}", Quantity.STEP_TIME, 1e-3),
    (rf"{_TIME_PER_STEP}{_SECONDS}?", Quantity.STEP_TIME, 1.0),
    (rf"{_TIME_PER_STEP}{_MILLISECONDS}", Quantity.STEP_TIME, 1e-3),
    (rf"{_PATH}train_step_timing(?: in s)?", Quantity.STEP_TIME, 1.0),
    (rf"{_PATH}end_to_end\(s\)", Quantity.STEP_TIME, 1.0),
    (r"elapsed time per iteration \(ms\)", Quantity.STEP_TIME, 1e-3),
    (rf"{_MEAN_STEP_TIME}{_SECONDS}?", Quantity.STEP_TIME, 1.0),
    (rf"{_MEAN_STEP_TIME}{_MILLISECONDS}", Quantity.STEP_TIME, 1e-3),
    # gradients of several batches may make one step
    (rf"{_BATCH_TIME}{_SECONDS}?", Quantity.STEP_TIME, 1.0),
    (rf"{_BATCH_TIME}{_MILLISECONDS}", Quantity.STEP_TIME, 1e-3),
    (rf"{_PATH}train_runtime", Quantity.TRAIN_TIME, 1.0),
    (rf"{_PATH}(?:train_)?steps_per_second", Quantity.STEP_RATE, 1.0),
    (r"throughput/batches_per_sec", Quantity.STEP_RATE, 1.0),
    (rf"{_PATH}(?:train_)?samples_per_second", Quantity.SAMPLE_RATE, 1.0),
    (rf"{_DATA}(?:_time|(?:_time)?{_SECONDS})", Quantity.WAIT_TIME, 1.0),
    (rf"{_DATA}(?:_time)?{_MILLISECONDS}", Quantity.WAIT_TIME, 1e-3),
    (
        rf"{_PATH}(?:num_input_tokens_seen|tokens_seen|total_tokens|consumed_tokens|num_tokens)",
        Quantity.TOKENS,
        1.0,
    ),
    (rf"(?:system/)?{_GPU}(?:powerwatts|power_usage_watts)", Quantity.POWER, 1.0),
    (rf"(?:system/)?{_GPU}(?:gpu|utilization_percentage)", Quantity.BUSY, 1e-2),
    (rf"(?:system/)?{_GPU}smclock", Quantity.CLOCK, 1e6),
    (rf"(?:system/)?{_GPU}enforcedpowerlimitwatts", Quantity.LIMIT, 1.0),
)
_COMPILED = [(re.compile(pattern), quantity, factor) for pattern, quantity, factor in _PATTERNS]
# W&B's page writes the extremes of smoothed points into columns of their own
_EXTREMES = re.compile(r"__(?:min|max)$")
_OTHER_LOOP = re.compile(
    r"(?:eval|evaluate|evaluation|val|valid|validate|validation|test|testing|predict|prediction)"
    r"(?:[^a-z].*)?"
)
KNOWN_NAMES = (
    "global_step, _timestamp, step_time, train_steps_per_second, num_input_tokens_seen, "
    "system.gpu.0.powerWatts, system/gpu_0_power_usage_watts or wattcast/step_s"
)


def is_of_other_loop(name: str) -> bool:
    """Whether a column is of an evaluation or a test, whose steps are not those of training."""
    return any(_OTHER_LOOP.fullmatch(part) for part in _find_path(name).split("/"))


def recognise_column(name: str) -> LogColumn | None:
    """Return what a column says; None where it is not needed.

    >>> column = recognise_column("run-7 - system/gpu.3.powerWatts")
    >>> column.quantity, column.gpu
    (<Quantity.POWER: 'power'>, 3)
    >>> recognise_column("train.global_step")
    LogColumn(quantity=<Quantity.STEP: 'step'>, factor=1.0, gpu=None, rank=0)
    >>> recognise_column("train/loss") is None
    True
    """
    path = _find_path(name)
    if _EXTREMES.search(path) or is_of_other_loop(name):
        return None
    for names_by_rank, quantity in (
        (_STEP_NAMES, Quantity.STEP),
        (_RUNTIMES, Quantity.RUNTIME),
        (_TIMES, Quantity.TIME),
    ):
        for rank, names in enumerate(names_by_rank):
            if path in names:
                return LogColumn(quantity, rank=rank)
    for rank, (pattern, quantity, factor) in enumerate(_COMPILED):
        match = pattern.fullmatch(path)
        if match is not None:
            gpu = match.groupdict().get("gpu")
            return LogColumn(quantity, factor, None if gpu is None else int(gpu), rank)
    return None


def _find_path(name: str) -> str:
    """Return a name in lower case, without the name of a run, its parts joined by slashes.

    Objects inside objects join their names by dots.
    """
    return name.rsplit(" - ", 1)[-1].strip().lower().replace(".", "/")
