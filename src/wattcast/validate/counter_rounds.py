"""What else was promised beside the counter model's figure (docs/method/counters.md, "A second round").

Each is the error of the total on multimedia rows, in percent: (a) with kernels let in that have been mended since the
names to leave out were fixed; (b) without the rows of DRAM at a part of its rate; (c) by the model of the other card
that ships, as it is and with one factor, the median of microbenchmarks trained on.
"""

from __future__ import annotations

import numpy as np

from wattcast.arrays import Array
from wattcast.fit.counters_rails import Mask, leaning_errors, solve_rails
from wattcast.fit.counters_table import OTHER_CARD, RESULT_FILES, moves_frames
from wattcast.fit.counters_two_rails import RailsFit, activity_of, shipped_fit
from wattcast.records import database_folder, read_lines

PARTIAL_RATES = ("dram_rate_", "dram_fma_")


def side_reports(fit: RailsFit, gpu: str) -> dict[str, float]:
    """Errors in percent, by what was done otherwise."""
    names = _names(fit)
    mended = np.isin(names, [name for name in fit.table.left_out if name in mended_kernels(gpu)])
    partial = np.array([name.startswith(PARTIAL_RATES) for name in names])
    found = {
        "mended_let_in": _error(fit, _refitted_w(fit, fit.train | mended)),
        "without_partial_dram_rates": _error(fit, _refitted_w(fit, fit.train & ~partial)),
    }
    if (database_folder(gpu) / OTHER_CARD).is_dir():
        model = shipped_fit(gpu, OTHER_CARD).model
        other_w = model.power(activity_of(fit.table, model.required_events)).total_w
        factor = float(np.median((fit.table.power_w / other_w)[fit.train]))
        found["model_of_the_other_card"] = _error(fit, other_w)
        found["the_same_with_one_factor"] = _error(fit, factor * other_w)
    return found


def mended_kernels(gpu: str) -> set[str]:
    """Benchmarks whose kernel is not its first."""
    rows = read_lines(database_folder(gpu) / RESULT_FILES[0])
    return {str(row["name"]) for row in rows if int(row.get("version", 1)) > 1}


def _refitted_w(fit: RailsFit, train: Mask) -> Array:
    """Totals of a fit to other rows; the leaning is chosen anew, in the same way."""
    trials = leaning_errors(fit.table, fit.design, train)
    return solve_rails(fit.design, train, min(trials, key=lambda lean: trials[lean])).total_w(fit.design)


def _error(fit: RailsFit, predicted_w: Array) -> float:
    """Mean absolute percentage error over multimedia rows without transfers."""
    rows = fit.test & np.array([not moves_frames(name) for name in _names(fit)])
    return float(100.0 * np.abs(predicted_w[rows] / fit.table.power_w[rows] - 1.0).mean())


def _names(fit: RailsFit) -> list[str]:
    return [fit.table.benchmark_names[b] for b in fit.table.benchmark]
