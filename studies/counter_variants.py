"""Errors of variants of the shipped counter model on multimedia rows, which were promised before rows were measured.

Run: ``python studies/counter_variants.py --gpu h200``. docs/method/counters.md quotes the figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.core.measured_rows import database_folder, read_lines
from wattcast.counter_models.profiler_counters import OTHER_CARD, RESULT_FILES, moves_frames
from wattcast.counter_models.two_rails import (
    RailsDesign,
    RailsFit,
    leaning_errors,
    shipped_fit,
    solve_rails,
    table_activity,
)

PARTIAL_RATES = ("dram_rate_", "dram_fma_")
STEP_BYTE_PER_S = (2e10, 5e10, 1e11, 2e11, 4e11)


def error_variants(fit: RailsFit, gpu: str) -> dict[str, float]:
    """Return the error on multimedia rows without transfers, in percent, of variants of the fit.

    They are: plain least squares; training also on kernels that were mended after the list of names to leave out was
    fixed; training without rows of DRAM at a part of its rate; memory that draws more as soon as it is awake; and the
    model of the other shipped card, as it is and with one factor (the median over the training rows).
    """
    names = [fit.table.benchmark_names[b] for b in fit.table.benchmark]
    tested = fit.test & np.array([not moves_frames(name) for name in names])

    def error(predicted_w: Array) -> float:
        return float(100.0 * np.abs(predicted_w[tested] / fit.table.power_w[tested] - 1.0).mean())

    def refit(train: Mask) -> float:
        trials = leaning_errors(fit.table, fit.design, train)
        return error(solve_rails(fit.design, train, min(trials, key=lambda lean: trials[lean])).total_w(fit.design))

    mended = np.isin(names, [name for name in fit.table.left_out if name in find_mended_kernels(gpu)])
    partial = np.array([name.startswith(PARTIAL_RATES) for name in names])
    found = {
        "plain_least_squares": error(solve_rails(fit.design, fit.train, 0.5).total_w(fit.design)),
        "mended_let_in": refit(fit.train | mended),
        "without_partial_dram_rates": refit(fit.train & ~partial),
    }
    stepped = add_memory_step(fit)
    trials = leaning_errors(fit.table, stepped, fit.train)
    leaning = min(trials, key=lambda lean: trials[lean])
    found["memory_step"] = error(solve_rails(stepped, fit.train, leaning).total_w(stepped))
    if (database_folder(gpu) / OTHER_CARD).is_dir():
        model = shipped_fit(gpu, OTHER_CARD).model
        other_w = model.power(table_activity(fit.table, model.required_events)).total_w
        factor = float(np.median((fit.table.power_w / other_w)[fit.train]))
        found["model_of_the_other_card"] = error(other_w)
        found["the_same_with_one_factor"] = error(factor * other_w)
    return found


def add_memory_step(fit: RailsFit) -> RailsDesign:
    """Return the design with power that memory draws once it is awake: a ramp, full from some bytes a second on.

    The width of the ramp is the one with which the memory power of the training rows is met best.
    """
    memory = [i for i, p in enumerate(fit.table.predictors) if p.rail == "memory"]
    byte_per_s = fit.table.occurrence[:, memory].sum(axis=1)

    def widen(full_byte_per_s: float) -> RailsDesign:
        awake = np.minimum(byte_per_s / full_byte_per_s, 1.0)[:, np.newaxis]
        return replace(fit.design, memory=np.concatenate([fit.design.memory, awake], axis=1))

    def missed_w(design: RailsDesign) -> float:
        found_w = solve_rails(design, fit.train, fit.leaning).memory_power_w(design)
        return float(np.abs(found_w - design.memory_w)[fit.train].mean())

    return min(map(widen, STEP_BYTE_PER_S), key=missed_w)


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
