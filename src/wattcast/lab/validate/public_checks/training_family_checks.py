"""Judge published training jobs family by family, and the width of their intervals.

``python -m wattcast.lab.validate.public_checks.training_family_checks`` takes about two minutes
(WATTCAST_REFERENCE names the measurements). ``TRAINING.job_interval`` widens the interval of a job
on several GPUs. For every family, the table shows the value that the other families ask for, so
that nine in ten of their rows are inside, and the share of its own rows that are inside by that."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import WattcastError
from wattcast.core.strict_files import reference_folder
from wattcast.lab.validate.public_checks.training_checks import (
    TrainingComparison,
    compare_training,
)
from wattcast.training.training_coefficients import TRAINING

INSIDE = 0.9  # of the rows that choose the width


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


def main() -> None:
    """Print the families and all rows together."""
    reference = reference_folder(os.environ)
    if reference is None:
        raise WattcastError("WATTCAST_REFERENCE names no folder of measurements")
    rows = [row for row in compare_training(reference) if isinstance(row, TrainingComparison)]
    rows = [row for row in rows if row.gpus > 1]
    judged = judge_families(rows)
    print(
        f"{'family':14} {'rows':>5} {'median':>8} {'90th':>8} {'inside':>8} {'width':>6} {'by others':>10}"
    )
    for one in judged:
        print(
            f"{one.family:14} {one.rows:5} {one.median:8.1%} {one.ninetieth:8.1%} "
            f"{one.inside:8.1%} {one.width:6.2f} {one.inside_by_others:10.1%}"
        )
    errors = np.abs([row.error for row in rows])
    held = sum(one.inside_by_others * one.rows for one in judged) / len(rows)
    inside = float(np.mean(measure_widths(rows) <= TRAINING.job_interval))
    asked = float(np.quantile(measure_widths(rows), INSIDE))
    print(
        f"{'all':14} {len(rows):5} {np.median(errors):8.1%} {np.quantile(errors, 0.9):8.1%} "
        f"{inside:8.1%} {asked:6.2f} {held:10.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
