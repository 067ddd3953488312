"""Judge published training jobs family by family, and the width of their intervals.

``python -m wattcast.lab.validate.public_checks.training_family_checks`` takes about two minutes
(WATTCAST_REFERENCE names the measurements). ``TRAINING.job_interval`` widens the interval of a job
on several GPUs. For every family, the table shows the value that the other families ask for, so
that nine in ten of their rows are inside, and the share of its own rows that are inside by that.

The share of compute time that users lose (``loss_share``) makes the mean of the median errors of
families of users least. The last columns judge each of them by the share that the others choose,
from the parts of the predicted steps; vendors' benchmarks are judged without a loss, as they are."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wattcast.core.arrays import Array
from wattcast.lab.module_commands import require_reference, run_module
from wattcast.lab.validate.public_checks.training_checks import (
    TrainingComparison,
    compare_training,
)
from wattcast.training.training_coefficients import TRAINING

INSIDE = 0.9  # of the rows that choose the width
LEAST_ROWS = 7  # of a family that chooses the share that users lose
LOSS_SHARES = np.arange(0.0, 0.3, 0.005)


@dataclass(frozen=True)
class FamilyErrors:
    """How far a family's rows are off."""

    family: str
    rows: int
    median: float
    ninetieth: float
    inside: float  # share of rows inside the interval as it is
    width: float  # of intervals, that the other families ask for
    inside_by_others: float  # share of rows inside by that


def measure_widths(comparisons: Sequence[TrainingComparison]) -> Array:
    """Return by how much the interval of each row would have to be wider to hold it, in logarithms
    and before ``job_interval``.
    """
    widths = []
    for comparison in comparisons:
        low, high = comparison.result.relative_interval
        # A step that is measured slower than predicted has its ratio above one
        slower = math.log(comparison.predicted / comparison.measured)
        end = math.log(high) if slower > 0.0 else math.log(low)
        widths.append(TRAINING.job_interval * slower / end)
    return np.array(widths)


def judge_families(comparisons: Sequence[TrainingComparison]) -> list[FamilyErrors]:
    """Judge every family by intervals that the others chose."""
    families = np.array([comparison.family for comparison in comparisons])
    errors = np.abs([comparison.error for comparison in comparisons])
    widths = measure_widths(comparisons)
    judged = []
    for family in sorted(set(families)):
        own = families == family
        width = float(np.quantile(widths[~own], INSIDE))
        judged.append(
            FamilyErrors(
                family=str(family),
                rows=int(own.sum()),
                median=float(np.median(errors[own])),
                ninetieth=float(np.quantile(errors[own], 0.9)),
                inside=float(np.mean(widths[own] <= TRAINING.job_interval)),
                width=width,
                inside_by_others=float(np.mean(widths[own] <= width)),
            )
        )
    return judged


def change_loss(comparisons: Sequence[TrainingComparison], share: float) -> Array:
    """Return the errors of jobs that lose this share of their compute time.

    Vendors' benchmarks, which lose none, keep theirs. Watts and clocks are left as they are.
    """
    errors = []
    for comparison in comparisons:
        result = comparison.result
        lost = result.recipe.loss_share
        step_s = result.step_s
        if lost > 0.0:
            step_s += float(result.step.compute_s) * (share - lost)
        errors.append(comparison.predicted * result.step_s / step_s / comparison.measured - 1.0)
    return np.array(errors)


def choose_loss(families: Mapping[str, Sequence[TrainingComparison]]) -> float:
    """Return the share by which the mean of the families' median errors is least."""
    users = [
        rows
        for rows in families.values()
        if len(rows) >= LEAST_ROWS and rows[0].result.recipe.loss_share > 0.0
    ]
    means = []
    for share in LOSS_SHARES:
        medians = [np.median(np.abs(change_loss(rows, share))) for rows in users]
        means.append(np.mean(medians))
    return float(LOSS_SHARES[int(np.argmin(means))])


def judge_losses(comparisons: Sequence[TrainingComparison]) -> dict[str, tuple[float, Array]]:
    """Return, for each family, the share that the others choose, and its errors with it."""
    families: dict[str, list[TrainingComparison]] = {}
    for comparison in comparisons:
        families.setdefault(comparison.family, []).append(comparison)
    judged = {}
    for family, rows in families.items():
        share = choose_loss({name: of for name, of in families.items() if name != family})
        judged[family] = (share, np.abs(change_loss(rows, share)))
    return judged


def main() -> None:
    """Print the families and all rows together."""
    reference = require_reference(os.environ)
    rows = [row for row in compare_training(reference) if isinstance(row, TrainingComparison)]
    rows = [row for row in rows if row.gpus > 1]
    judged = judge_families(rows)
    losses = judge_losses(rows)
    words = ("rows", "median", "90th", "inside", "width", "by others", "loss", "median", "90th")
    print(f"{'family':14} " + " ".join(f"{word:>9}" for word in words))
    for one in judged:
        share, left_out = losses[one.family]
        print(
            f"{one.family:14} {one.rows:9} {one.median:9.1%} {one.ninetieth:9.1%} "
            f"{one.inside:9.1%} {one.width:9.2f} {one.inside_by_others:9.1%} {share:9.3f} "
            f"{np.median(left_out):9.1%} {np.quantile(left_out, 0.9):9.1%}"
        )
    errors = np.abs([row.error for row in rows])
    held = sum(one.inside_by_others * one.rows for one in judged) / len(rows)
    widths = measure_widths(rows)
    inside = float(np.mean(widths <= TRAINING.job_interval))
    every = np.concatenate([left_out for _, left_out in losses.values()])
    print(
        f"{'all':14} {len(rows):9} {np.median(errors):9.1%} {np.quantile(errors, 0.9):9.1%} "
        f"{inside:9.1%} {np.quantile(widths, INSIDE):9.2f} {held:9.1%} {'':9} "
        f"{np.median(every):9.1%} {np.quantile(every, 0.9):9.1%}"
    )


if __name__ == "__main__":
    run_module(main)
