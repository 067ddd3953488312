"""Errors on work never seen: settings chosen and costs fitted anew without each held-out part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.fit.choose import Settings, Workbench, choose
from wattcast.fit.score import Score, score
from wattcast.fit.split import Mask, by_label, few_folds
from wattcast.fit.table import Codes
from wattcast.fit.terms import Model

INNER_FOLDS = 4
MANY = 40  # benchmarks, from which on the inner folds are a few instead of one each

Progress = Callable[[str], None]


def silent(_: str) -> None:
    """No progress shown."""


@dataclass(frozen=True)
class HeldOut:
    """Predictions of rows whose benchmark, group or cluster was held out."""

    by: str
    predicted_w: Array  # (row,)
    anchored_w: Array | None  # with the power at the default clocks known
    score: Score
    anchored: Score | None
    settings: tuple[tuple[Settings, int], ...]  # chosen, and in how many folds


def held_out(
    bench: Workbench, model: Model, labels: Codes, by: str, folds: int = 0, progress: Progress = silent
) -> HeldOut:
    """Hold out each label in turn (or ``folds`` parts of them), choose settings inside the rest, predict it.

    Nothing of the held-out rows enters: not the choice of settings, not the scale of a column, not the
    voltages, not the costs. With the power at the default clocks known, one row of each held-out
    benchmark enters its own prediction and nothing else.
    """
    table = bench.table
    if np.unique(labels).size < 2:
        raise bad_value(table.name, f"at least two {by}s to hold out", f"{np.unique(labels).size}")
    predicted_w = np.full(table.rows, np.nan)
    anchored_w = np.full(table.rows, np.nan)
    chosen: Counter[Settings] = Counter()
    outer = few_folds(labels, folds) if folds else by_label(labels)
    for index, fold in enumerate(outer):
        train = ~fold
        settings = choose(bench, model, train, inner_folds(labels, train))
        chosen[settings] += 1
        fit = bench.fit(model, settings, train)
        rows = fold[table.benchmark]
        predicted_w[rows] = bench.predict(fit)[rows]
        if bench.anchor is not None:
            anchored_w[rows] = bench.anchored(fit)[rows]
        if (index + 1) * 10 // len(outer) > index * 10 // len(outer):
            progress(f"{model}: {index + 1} of {len(outer)} held out by {by}")
    known = anchored_w if bench.anchor is not None else None
    return HeldOut(
        by,
        predicted_w,
        known,
        score(table, predicted_w),
        score(table, known) if known is not None else None,
        tuple(chosen.most_common()),
    )


def inner_folds(labels: Codes, train: Mask) -> list[Mask]:
    """Folds inside the training part, of the same kind as the outer ones."""
    kept = np.unique(labels[train])
    if kept.size < 2:
        return []
    spare = np.where(train, labels, kept[0])  # held-out benchmarks are in no inner fold that counts
    folds = few_folds(spare, INNER_FOLDS) if kept.size > MANY else by_label(spare)
    return [fold & train for fold in folds]
