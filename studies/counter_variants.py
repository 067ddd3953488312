"""Errors of variants of the shipped counter model on multimedia rows, which were promised before
rows were measured.

Run: ``python -m studies.counter_variants --gpu h200``. docs/method/counters.md quotes the figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.core.row_journals import read_lines
from wattcast.core.row_tables import database_folder
from wattcast.lab.counter_models.microbench_lines import (
    OTHER_CARD,
    RESULT_FILES,
    moves_frames,
)
from wattcast.lab.counter_models.rails_apart import (
    RailsDesign,
    RailsFit,
    leaning_errors,
    shipped_fit,
    solve_rails,
)
from wattcast.lab.paper_figures.multimedia_figures import table_activity

PARTIAL_RATES = ("dram_rate_", "dram_fma_")


def error_variants(fit: RailsFit, gpu: str) -> dict[str, float]:
    """Return the error on multimedia rows without transfers, in percent, of variants of the fit.

    They are: plain least squares; the form of the second round, without a step of memory power and
    writes to L2; training also on kernels that were mended after the list of names to leave out was
    fixed; training without rows of DRAM at a part of its rate; and the model of the other shipped
    card, as it is and with one factor (the median over the training rows)."""
    names = [fit.table.benchmark_names[b] for b in fit.table.benchmark]
    tested = fit.test & np.array([not moves_frames(name) for name in names])

    def error(predicted_w: Array) -> float:
        return float(100.0 * np.abs(predicted_w[tested] / fit.table.power_w[tested] - 1.0).mean())

    def refit(train: Mask, design: RailsDesign = fit.design) -> float:
        trials = leaning_errors(fit.table, design, train)
        return error(
            solve_rails(design, train, min(trials, key=lambda lean: trials[lean])).total_w(design)
        )

    mended = np.isin(
        names, [name for name in fit.table.left_out if name in find_mended_kernels(gpu)]
    )
    partial = np.array([name.startswith(PARTIAL_RATES) for name in names])
    kept = [event != "l2_write_sector" for event in fit.design.core_events]
    memory = fit.design.rail("memory")
    without_step = replace(memory, columns=memory.columns[:, :-1])
    second = replace(fit.design, core=fit.design.core[:, kept]).with_rail(without_step)
    found = {
        "plain_least_squares": error(solve_rails(fit.design, fit.train, 0.5).total_w(fit.design)),
        "form_of_the_second_round": refit(fit.train, second),
        "mended_let_in": refit(fit.train | mended),
        "without_partial_dram_rates": refit(fit.train & ~partial),
    }
    if (database_folder(gpu) / OTHER_CARD).is_dir():
        model = shipped_fit(gpu, OTHER_CARD).model
        other_w = model.power(table_activity(fit.table, model.required_events)).total_w
        factor = float(np.median((fit.table.power_w / other_w)[fit.train]))
        found["model_of_the_other_card"] = error(other_w)
        found["the_same_with_one_factor"] = error(factor * other_w)
    return found


def find_mended_kernels(gpu: str) -> set[str]:
    """Return the benchmarks whose kernel is no longer its first version."""
    rows = read_lines(database_folder(gpu) / RESULT_FILES[0])
    return {str(row["name"]) for row in rows if int(row.get("version", 1)) > 1}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print every variant with its error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h200")
    gpu = parser.parse_args(arguments).gpu
    for name, error in error_variants(shipped_fit(gpu), gpu).items():
        print(f"{name:28} {error:6.2f} %")


if __name__ == "__main__":
    main()
