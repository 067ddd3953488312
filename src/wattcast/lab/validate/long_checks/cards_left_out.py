"""Leave cards out of a fit and check whether intervals made without them hold their rows.

Run: ``python -m wattcast.lab.validate.long_checks.cards_left_out`` (minutes; ``wattcast lab
validate`` then lists the rows).

The model is fitted on the rows of the other cards in folds by shape, and everything an interval is
made of (ends, their growth with distance, the spread between cards, what functions and kinds never
measured add) comes from those rows. Rows of a card left out are counted inside in three classes,
which ask three questions:

- *measured by others*: the very operator is among the rows fitted. What is left is the card.
- *new operator*: nobody else's, of functions and kinds that others measured. The card, and the
  error of the model.
- *outside*: a prediction would say that it is outside what was measured. A question of support, not
  of cards.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.calibrate import kernel_rows
from wattcast.calibrate.kernel_rows import (
    FOLDS,
    PLANNED,
    KernelRows,
    assign_folds,
    on_random_data,
    settled_figures,
)
from wattcast.calibrate.latency_fit import one_thread
from wattcast.calibrate.row_prediction import (
    INTERVAL_LEVEL,
    analyse_rows,
    conformal_ends,
    predict_with_bundle,
)
from wattcast.calibrate.scoring import (
    LedgerRow,
    Tell,
    make_absent_row,
    make_ledger_row,
)
from wattcast.core.arrays import Array, Mask
from wattcast.hardware import Gpu
from wattcast.lab.fit.database_fit import (
    KIND_OF_QUANTITY,
    combine_spread,
    compare_cards,
)
from wattcast.lab.fit.held_out import (
    fit_nearness_line,
    fit_reason_widening,
    power_ends,
    predict_left_out,
    scale_ratios,
)
from wattcast.lab.fit.kernel_fit import (
    build_bundle,
    fit_idle_curve,
    fit_kernel_rows,
)
from wattcast.lab.validate.kernel_checks import name_of
from wattcast.power.power_model import IdlePower
from wattcast.predictor.bundle.bundle_file import Bundle, ResidualEnds
from wattcast.predictor.bundle.support_widening import (
    NORMAL_P90,
    CardSpread,
    NearnessLine,
    OutsideReason,
    ReasonWidening,
    default_widening,
    nearness_scale,
)
from wattcast.predictor.prediction_interval import widen_log_ends
from wattcast.predictor.unmeasured_kernels import find_unmeasured

SMALL = 1000  # rows of a card: below, it is left out together with others like it
LEAST_SAID = 20  # rows; of fewer a share says nothing
MANY_OUTSIDE = (
    50  # rows of a card outside what others measured, to learn from the others what that costs
)
CLASSES = ("measured by others", "new operator", "outside")


@dataclass(frozen=True)
class Judged:
    """What a fit without some cards says of each row; NaN and empty where it was not asked."""

    ratio: Array  # (row, 2) measured over predicted: latency, power
    near: Array  # (row, 2) how like the nearest row fitted on
    why: npt.NDArray[np.str_]  # outside what was fitted on, and why; empty: inside


def judge(
    rows: KernelRows,
    gone: Mask,
    gpu: Gpu,
    idle: IdlePower,
) -> tuple[Judged, Judged]:
    """Every row from fits without ``gone`` and without its own fold, and rows of ``gone`` from fits
    with their fold.

    The second are of operators that other cards measured, and then a fit has met them.
    """
    fold = assign_folds(rows)
    tested = rows.is_kind("burst", "sustained") & rows.fit & on_random_data(rows)
    judged_masks = [
        (tested & (fold == k), tested & gone & (fold == (k + 1) % FOLDS)) for k in range(FOLDS)
    ]
    joblib = importlib.import_module("joblib")  # comes with scikit-learn
    with one_thread():
        work: Iterable[tuple[Judged, Judged]] = joblib.Parallel(n_jobs=-1, return_as="generator")(
            joblib.delayed(_fold)(
                rows,
                ~gone & (fold != k),
                masks,
                gpu,
                idle,
            )
            for k, masks in enumerate(judged_masks)
        )
        judgements = list(work)
    return _joined(
        len(rows), [(at[0], one[0]) for at, one in zip(judged_masks, judgements, strict=True)]
    ), _joined(
        len(rows), [(at[1], one[1]) for at, one in zip(judged_masks, judgements, strict=True)]
    )


def _fold(
    rows: KernelRows,
    training: Mask,
    judged_masks: tuple[Mask, Mask],
    gpu: Gpu,
    idle: IdlePower,
) -> tuple[Judged, Judged]:
    fitted_on = rows.select_rows(training)
    bundle = build_bundle(
        fit_kernel_rows(fitted_on, gpu, idle),
        fitted_on,
        gpu,
        {},
        "",
    )
    # families count as held out: whether they are is for the whole bundle to say
    bundle = replace(
        bundle,
        residuals={
            name: ResidualEnds(r.latency, r.power, 1) for name, r in bundle.residuals.items()
        },
    )
    first, second = (_judged(rows.select_rows(at), bundle, gpu) for at in judged_masks)
    return first, second


def _judged(
    rows: KernelRows,
    bundle: Bundle,
    gpu: Gpu,
) -> Judged:
    if not len(rows):
        return Judged(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros(0, dtype="<U8"))
    predicted = predict_with_bundle(bundle, rows, gpu)
    timeline = analyse_rows(bundle, rows, gpu)
    power_w, _, latency_s = settled_figures(rows)
    assert timeline.near is not None, "a fitted bundle has learned factors"
    outside = find_unmeasured(timeline, bundle)
    return Judged(
        np.column_stack([latency_s / predicted[:, 0], power_w / predicted[:, 1]]),
        timeline.near.T,
        np.array(
            [str(outside[i].reason) if i in outside else "" for i in range(len(rows))],
            dtype="<U8",
        ),
    )


def _joined(count: int, parts: list[tuple[Mask, Judged]]) -> Judged:
    ratio = np.full((count, 2), np.nan)
    near = np.full((count, 2), np.nan)
    why = np.full(count, "", dtype="<U8")
    for at, one in parts:
        ratio[at], near[at], why[at] = one.ratio, one.near, one.why
    return Judged(ratio, near, why)


def learned_apart(
    rows: KernelRows,
    gone: Mask,
    new: Judged,
    gpu: Gpu,
    idle: IdlePower,
    tell: Tell,
) -> dict[OutsideReason, ReasonWidening]:
    """What being outside costs, learned without the cards left out where many of their rows are;
    else the usual.
    """
    if (gone & (new.why != "")).sum() < MANY_OUTSIDE:
        return dict(default_widening().apart)
    tell("cards: functions and kinds left out of the others")
    (time, latency), (energy, power) = (
        own_ends(rows, ~gone, new, quantity) for quantity in KIND_OF_QUANTITY
    )
    residuals = {
        name: ResidualEnds(latency[name], power.get(name, (0.8, 1.25)), 1) for name in latency
    }
    with one_thread():
        left_out = predict_left_out(
            rows.select_rows(~gone),
            gpu,
            idle,
            residuals,
            (time, energy),
        )
    return {**default_widening().apart, **fit_reason_widening(left_out)}


def own_ends(
    rows: KernelRows,
    other_cards: Mask,
    new: Judged,
    quantity: str,
) -> tuple[NearnessLine, dict[str, tuple[float, float]]]:
    """Growth of the ends with distance, and those of each family at a typical one, from held-out
    rows of ``own``.
    """
    place = list(KIND_OF_QUANTITY).index(quantity)
    at = other_cards & rows.is_kind(KIND_OF_QUANTITY[quantity]) & np.isfinite(new.ratio[:, place])
    ratio = new.ratio[at, place]
    near = new.near[at, place]
    family = np.array(rows.family)[at]
    line = fit_nearness_line(np.log(ratio), family, near)
    typical = scale_ratios(ratio, near, line)
    names = [str(name) for name in np.unique(family)]
    if quantity == "power":
        return line, {name: power_ends(typical, family, name) for name in names}
    return line, {name: conformal_ends(typical[family == name], INTERVAL_LEVEL) for name in names}


@dataclass(frozen=True)
class Counted:
    """Rows of cards left out against intervals made without them; each ``(row,)`` of the
    database.
    """

    quantity: str
    of_class: npt.NDArray[np.str_]  # one of ``CLASSES``; empty: not counted
    inside: Mask
    as_for_this_card: Mask  # inside without the spread between cards
    width: Array  # high minus low end over the prediction


def counted(
    rows: KernelRows,
    gone: Mask,
    quantity: str,
    new: Judged,
    again: Judged,
    apart: dict[OutsideReason, ReasonWidening],
    spread: CardSpread,
) -> Counted:
    """Classes of the rows of ``gone``, and which lie inside; ``spread`` is that of other cards."""
    place = list(KIND_OF_QUANTITY).index(quantity)
    at = gone & rows.is_kind(KIND_OF_QUANTITY[quantity]) & np.isfinite(new.ratio[:, place])
    shared = at & _measured_by(rows, ~gone, quantity) & np.isfinite(again.ratio[:, place])
    line, ends_of_family = own_ends(rows, ~gone, new, quantity)
    at &= np.isin(rows.family, list(ends_of_family))
    of_class = np.where(
        at & shared, CLASSES[0], np.where(at & (new.why == ""), CLASSES[1], CLASSES[2])
    )
    ratio = np.where(shared, again.ratio[:, place], new.ratio[:, place])
    near = np.where(shared, again.near[:, place], new.near[:, place])
    why = np.where(shared, again.why, new.why)
    ends = (
        np.log([ends_of_family.get(name, (1.0, 1.0)) for name in rows.family])
        * nearness_scale(near, line)[:, np.newaxis]
    )
    by = np.array([getattr(apart[OutsideReason(w)], quantity) if w else 0.0 for w in why.tolist()])
    ends = np.exp(widen_log_ends(ends, by[:, np.newaxis]))
    by = NORMAL_P90 * getattr(spread, quantity)
    far = np.exp(widen_log_ends(np.log(ends), by))
    inside, inside_own = (at & (ratio >= e[:, 0]) & (ratio <= e[:, 1]) for e in (far, ends))
    return Counted(
        quantity,
        np.where(at, of_class, ""),
        inside,
        inside_own,
        far[:, 1] - far[:, 0],
    )


def _measured_by(
    rows: KernelRows,
    training: Mask,
    quantity: str,
) -> Mask:
    """Rows whose very operator is among the known rows that tell this quantity."""
    kinds = ("burst",) if quantity == "latency" else ("sustained", "duty")
    there = {rows.spec[i] for i in np.flatnonzero(training & rows.is_kind(*kinds) & rows.fit)}
    return np.array([spec in there for spec in rows.spec])


def spread_without(rows: KernelRows, gone: Mask) -> CardSpread:
    """The spread between cards as the others show it."""
    remaining = rows.select_rows(~gone)
    return combine_spread(
        {quantity: compare_cards(remaining, quantity, None) for quantity in KIND_OF_QUANTITY}
    )


def coverage_rows(gpu: str, tell: Tell) -> list[LedgerRow]:
    """Share of the rows of cards left out that lie inside intervals made without them; minutes."""
    rows = kernel_rows.load_kernel_rows(gpu)
    where = f"{gpu} cards of the kind"
    if len(set(rows.uuid)) < 2:
        reason = "rows of one card alone: nothing to count intervals for another card against"
        return [
            make_absent_row(where, f"{quantity}, rows of another card inside intervals", reason)
            for quantity in KIND_OF_QUANTITY
        ]
    chip = hardware.load_gpu(gpu)
    idle = fit_idle_curve(kernel_rows.load_idle_rows(gpu), chip)
    tables: list[Counted] = []
    for cards in left_out_together(rows.uuid):
        tell(f"cards: fitting without {', '.join(map(name_of, cards))}")
        gone = np.isin(rows.uuid, cards)
        new, again = judge(rows, gone, chip, idle)
        apart = learned_apart(
            rows,
            gone,
            new,
            chip,
            idle,
            tell,
        )
        spread = spread_without(rows, gone)
        tables += [
            counted(
                rows,
                gone,
                quantity,
                new,
                again,
                apart,
                spread,
            )
            for quantity in KIND_OF_QUANTITY
        ]
    return _said(where, rows, tables)


def left_out_together(cards: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Cards with many rows each by itself, the others together: without few rows a fit is what it
    was.
    """
    names = list(dict.fromkeys(cards))
    small = tuple(name for name in names if cards.count(name) < SMALL)
    large = [(name,) for name in names if name not in small]
    return large + ([small] if small else [])


def _said(
    where: str,
    rows: KernelRows,
    tables: list[Counted],
) -> list[LedgerRow]:
    """Each class of all cards together, of each card, and of new operators by why they were
    measured.
    """
    card = np.array(rows.uuid)
    chosen = np.array(rows.chosen)
    out: list[LedgerRow] = []
    for quantity in KIND_OF_QUANTITY:
        mine = [table for table in tables if table.quantity == quantity]
        for name in CLASSES:
            whole = np.ones(len(rows), dtype=bool)
            parts = {"all cards": whole}
            parts |= {f"card {name_of(c)}": card == c for c in dict.fromkeys(rows.uuid)}
            if name == CLASSES[1]:
                reasons = dict.fromkeys(rows.chosen)
                parts |= {_chosen(why): chosen == why for why in reasons}
            class_rows = [
                _counted_row(
                    where,
                    f"{quantity}, {name}, {part}",
                    name,
                    mine,
                    at,
                )
                for part, at in parts.items()
            ]
            out += [one for one in class_rows if one["n"] >= LEAST_SAID]
    return out


def _chosen(why: str) -> str:
    return "at random" if why == PLANNED else f"chosen as {why}"


def _counted_row(
    where: str,
    quantity: str,
    of_class: str,
    tables: list[Counted],
    part: Mask,
) -> LedgerRow:
    at = [table.of_class == of_class for table in tables]
    inside, inside_own, width = (
        np.concatenate(
            [getattr(table, name)[here & part] for table, here in zip(tables, at, strict=True)]
        )
        for name in ("inside", "as_for_this_card", "width")
    )
    more: dict[str, Any] = {"wanted": [85.0, 95.0]}
    if inside.size:
        more |= {
            "coverage": round(100 * float(inside.mean()), 1),
            "as_for_this_card": round(100 * float(inside_own.mean()), 1),
            "median_width": round(100 * float(np.median(width)), 1),
        }
    return make_ledger_row(
        where,
        f"{quantity}, inside {INTERVAL_LEVEL:.0%}",
        int(inside.size),
        None,
        **more,
    )


if __name__ == "__main__":
    from wattcast.lab.validate.long_checks.ledger_rows import run_study

    run_study("cards", coverage_rows)
