"""Leave families of published training runs out: what a family may expect that chose none of the
stated constants.

Run ``python -m studies.training_families ../shared/reference`` (about three minutes).

``loss_share`` of ``training.training_strategy`` is one factor on the time of jobs. For every family
that is not a vendor's benchmark, the factor is chosen anew on all other such families, so that
their median error is nought, and the family is judged with it. Medians weigh families alike: each
counts with its own median error."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from wattcast.core.arrays import Array
from wattcast.lab.validate.public_checks.training_checks import TrainingComparison, compare_training

FAMILIES = ("llmfoundry", "internevo", "torchtitan", "bigscience", "jaxtoolbox", "fmsfsdp", "paper")


def judge_left_out(errors: dict[str, Array]) -> dict[str, tuple[float, float, float]]:
    """Return, for each family, the factor that the others choose and its median and 90th percentile
    with it.
    """
    found = {}
    for family, own in errors.items():
        factor = float(
            np.median([1.0 + np.median(of) for name, of in errors.items() if name != family])
        )
        left = np.abs((1.0 + own) / factor - 1.0)
        found[family] = (factor, float(np.median(left)), float(np.quantile(left, 0.9)))
    return found


def main() -> None:
    """Read the folder of reference data and print a line for each family."""
    rows: dict[str, list[float]] = defaultdict(list)
    for row in compare_training(Path(sys.argv[1]), FAMILIES):
        if isinstance(row, TrainingComparison) and row.gpus > 1:
            rows[row.family].append(row.error)
    errors = {family: np.array(of) for family, of in rows.items()}
    left_out = judge_left_out(errors)
    print(f"{'family':12} {'rows':>4} {'median':>7} {'factor':>7} {'left out':>9} {'90th':>6}")
    for family, (factor, median, tail) in left_out.items():
        own = np.median(np.abs(errors[family]))
        print(
            f"{family:12} {len(errors[family]):4} {own:7.1%} {factor:7.3f} {median:9.1%} {tail:6.1%}"
        )
    every = np.concatenate(
        [np.abs((1.0 + errors[f]) / factor - 1.0) for f, (factor, _, _) in left_out.items()]
    )
    tail = np.quantile(every, 0.9)
    print(
        f"all left out: {len(every)} rows, median {np.median(every):.1%}, 90th percentile {tail:.1%}"
    )


if __name__ == "__main__":
    main()
