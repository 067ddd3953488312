"""Power over time of a training job: its steps, with every GPU of the job in the same state.

The micro-batches of a step compute and exchange in turn; then come the exchange of gradients, the
wait for other pipeline stages, and the update of the weights. The mean power of a step and the
power while it waits are those of ``train``. The job counts evaluation, and work that failures
repeat, as further steps, so the series has them as steps, too: its sum is the energy of the job.
After so many steps as ``train`` was told the GPUs wait for a checkpoint. At the power limit tenths
of a second differ (``governor_ripple``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wattcast.core.arrays import Array
from wattcast.timeseries.governor_ripple import add_ripple
from wattcast.timeseries.power_curve import (
    PowerCurve,
    StateCodes,
    join_pieces,
    state_code,
)
from wattcast.training.train_job import TrainingResult

MOST_PIECES = 1 << 18  # of a job that is drawn step by step
_STEP = 0  # places of the blocks that a job is made of
_FIRST_CHECKPOINT = 1
MOST_BATCHES = 4096  # micro-batches of a step, of which more are drawn as so many


def trace_training(result: TrainingResult) -> PowerCurve:
    """Return the power curve of all steps and checkpoints of a job.

    A job whose tokens fill no whole number of steps has steps that are a little longer or shorter,
    so that its length and its energy are those of ``train``.
    """
    spans_s, watts, states = list_step_pieces(result)
    steps = max(round(result.steps), 1)
    is_short = steps * len(spans_s) <= MOST_PIECES
    pauses_s = [result.checkpoint_s]
    if not result.checkpoints:
        repeats = steps
        order = [_STEP]
    elif result.checkpoint_log:
        repeats = 1
        pauses_s = [checkpoint.seconds for checkpoint in result.checkpoint_log]
        written_after = [checkpoint.step for checkpoint in result.checkpoint_log]
        order = _order_logged(steps, written_after)
    elif is_short:
        repeats = 1
        order = _order_steps(steps, result.checkpoint_every, result.checkpoints)
    else:  # all turns alike
        repeats = result.checkpoints
        steps = repeats * max(round(result.steps / repeats), 1)
        order = [*[_STEP] * (steps // repeats), _FIRST_CHECKPOINT]

    spans_s = spans_s * (result.steps * result.step_s / steps / float(spans_s.sum()))
    pause = np.array([state_code("checkpoint")], dtype=np.int8)
    blocks = (
        (spans_s, watts, states),
        *((np.array([pause_s]), np.array([result.waiting_w]), pause) for pause_s in pauses_s),
    )
    spans_s, watts, states = (
        np.concatenate([blocks[place][column] for place in order]) for column in range(3)
    )
    part_j = np.zeros((len(spans_s), 2))
    waiting_w = np.minimum(result.waiting_w, watts)
    part_j[:, 0] = spans_s * waiting_w
    part_j[:, 1] = spans_s * (watts - waiting_w)
    idle_part_w = np.array([result.waiting_w, 0.0])
    curve = join_pieces(
        spans_s,
        part_j,
        states,
        ("static", "work"),
        idle_part_w,
        result.gpus,
        repeats=repeats,
    )
    limit = find_power_limit(result)
    return curve if limit is None else add_ripple(curve, limit.held_w, limit.unlimited_w)


class HeldPower(NamedTuple):
    """The power that the governor holds a computing GPU at, and what it would draw without."""

    held_w: float
    unlimited_w: float


def find_power_limit(result: TrainingResult) -> HeldPower | None:
    """Return what a job that is held at its power limit draws; None where it meets the limit."""
    swept = result.candidates[0].swept
    if swept is None or float(result.step.clock_hz) >= float(swept.clock_hz[-1]):
        return None
    _, watts, _ = list_step_pieces(result)
    return HeldPower(float(watts.max()), float(swept.compute_w[-1]))


def _order_steps(
    steps: int,
    every: int,
    checkpoints: int,
) -> list[int]:
    """Return the order of steps (0) and checkpoints (1) of a job.

    >>> _order_steps(5, 2, 2), _order_steps(3, 2, 2)
    ([0, 0, 1, 0, 0, 1, 0], [0, 0, 1, 0, 1])
    """
    order = []
    written = 0
    for step in range(1, steps + 1):
        order.append(_STEP)
        if step % every == 0 and written < checkpoints:
            order.append(_FIRST_CHECKPOINT)
            written += 1
    return order + [_FIRST_CHECKPOINT] * (checkpoints - written)


def _order_logged(steps: int, written_after: Sequence[int]) -> list[int]:
    """Return the order of steps (0) and of checkpoints (1, 2, ...), written after these steps.

    >>> _order_logged(4, [1, 4])
    [0, 1, 0, 0, 0, 2]
    """
    order = []
    place = 0
    for step in range(1, steps + 1):
        order.append(_STEP)
        if place < len(written_after) and step == written_after[place]:
            order.append(_FIRST_CHECKPOINT + place)
            place += 1
    return order


def list_step_pieces(result: TrainingResult) -> tuple[Array, Array, StateCodes]:
    """Return seconds, watts of a mean GPU and states of the pieces of one step, in order.

    While it computes, a GPU draws what makes the energy of the step come out: pipeline stages that
    wait for others in the meantime are part of the mean.
    """
    step = result.step
    compute_s = float(step.compute_s)
    bubble_s = float(step.bubble_s)
    optimiser_s = float(step.optimiser_s)
    last_exchange_s = max(float(step.end_s) - bubble_s - optimiser_s, 0.0)
    exchange_s = float(step.exchange_s)
    last_exchange_s = min(last_exchange_s, exchange_s)
    batches = min(result.strategy.accumulation, MOST_BATCHES)

    spans = []
    names = []
    for _ in range(batches):
        spans += [compute_s / batches, (exchange_s - last_exchange_s) / batches]
        names += ["compute", "exchange"]
    spans += [last_exchange_s, bubble_s, optimiser_s]
    names += ["exchange", "waiting", "optimiser"]

    # Waiting pieces draw the power of a waiting GPU; the rest of the energy goes to the others.
    spans_s = np.array(spans)
    is_busy = np.array([name in ("compute", "optimiser") for name in names])
    waiting_w = min(float(step.waiting_w), float(step.power_w))
    waiting_j = waiting_w * float(spans_s[~is_busy].sum())
    energy_j = float(step.power_w) * float(spans_s.sum())
    busy_w = (energy_j - waiting_j) / max(float(spans_s[is_busy].sum()), 1e-300)
    watts = np.where(is_busy, busy_w, waiting_w)
    states = np.array([state_code(name) for name in names], dtype=np.int8)
    return spans_s, watts, states
