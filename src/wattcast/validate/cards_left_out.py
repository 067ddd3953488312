"""Cards left out of a fit, and whether intervals made without them hold their rows.

The model is fitted on the rows of the other cards in folds by shape, and everything an interval is made of (ends,
their growth with distance, the spread between cards, what functions and kinds never measured add) comes from those
rows. Rows of a card left out are counted inside in three classes, which ask three questions:

- *measured by others*: the very operator is among the rows fitted. What is left is the card.
- *new operator*: nobody else's, of functions and kinds that others measured. The card, and the error of the model.
- *outside*: a prediction would say that it is outside what was measured. A question of support, not of cards.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.fit.cards import KINDS, Origin, seen_of, spread_of, without
from wattcast.fit.kernels import bundle_of, fit_rows, random, settled
from wattcast.fit.kernels_data import Mask, Rows
from wattcast.fit.kernels_interval import LEVEL, conformal, power_ends, scaled
from wattcast.fit.kernels_run import _one_thread
from wattcast.fit.kernels_split import FOLDS, analyse_rows, folds_of, predict_with
from wattcast.fit.nearness import fit_near
from wattcast.fit.unseen import apart_of, leave_out
from wattcast.fitted.bundle import Bundle, Residual
from wattcast.fitted.cards import NORMAL_P90, CardSpread
from wattcast.fitted.widening import Apart, Line, Why, scale_of, usual
from wattcast.hardware import Gpu
from wattcast.power.static import IdlePower
from wattcast.uncertainty import logs_moved_out, moved_out, outside
from wattcast.validate.learning import Tell

MANY_OUTSIDE = 50  # rows of a card outside what others measured, to learn from the others what that costs
CLASSES = ("measured by others", "new operator", "outside")


@dataclass(frozen=True)
class Judged:
    """What a fit without some cards says of each row; NaN and empty where it was not asked."""

    ratio: Array  # (row, 2) measured over predicted: latency, power
    near: Array  # (row, 2) how like the nearest row fitted on
    why: npt.NDArray[np.str_]  # outside what was fitted on, and why; empty: inside


def judge(rows: Rows, gone: Mask, gpu: Gpu, idle: IdlePower) -> tuple[Judged, Judged]:
    """Every row from fits without ``gone`` and without its own fold, and rows of ``gone`` from fits with their fold.

    The second are of operators that other cards measured, and then a fit has met them.
    """
    fold = folds_of(rows)
    tested = rows.is_kind("burst", "sustained") & rows.fit & random(rows)
    asked = [(tested & (fold == k), tested & gone & (fold == (k + 1) % FOLDS)) for k in range(FOLDS)]
    joblib = importlib.import_module("joblib")  # comes with scikit-learn
    with _one_thread():
        work: Iterable[tuple[Judged, Judged]] = joblib.Parallel(n_jobs=-1, return_as="generator")(
            joblib.delayed(_fold)(rows, ~gone & (fold != k), both, gpu, idle) for k, both in enumerate(asked)
        )
        found = list(work)
    return _joined(len(rows), [(at[0], one[0]) for at, one in zip(asked, found, strict=True)]), _joined(
        len(rows), [(at[1], one[1]) for at, one in zip(asked, found, strict=True)]
    )


def _fold(rows: Rows, known: Mask, asked: tuple[Mask, Mask], gpu: Gpu, idle: IdlePower) -> tuple[Judged, Judged]:
    fitted_on = rows.where(known)
    bundle = bundle_of(fit_rows(fitted_on, gpu, idle), fitted_on, gpu, {}, "")
    # families count as held out: whether they are is for the whole bundle to say
    bundle = replace(
        bundle, residuals={name: Residual(r.latency, r.power, 1) for name, r in bundle.residuals.items()}
    )
    first, second = (_judged(rows.where(at), bundle, gpu) for at in asked)
    return first, second


def _judged(rows: Rows, bundle: Bundle, gpu: Gpu) -> Judged:
    if not len(rows):
        return Judged(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros(0, dtype="<U8"))
    predicted, timeline = predict_with(bundle, rows, gpu), analyse_rows(bundle, rows, gpu)
    power_w, _, latency_s = settled(rows)
    assert timeline.near is not None, "a fitted bundle has learned factors"
    return Judged(
        np.column_stack([latency_s / predicted[:, 0], power_w / predicted[:, 1]]),
        timeline.near.T,
        np.array(["" if reason is None else str(reason.why) for reason in outside(timeline, bundle)], dtype="<U8"),
    )


def _joined(count: int, parts: list[tuple[Mask, Judged]]) -> Judged:
    ratio, near, why = np.full((count, 2), np.nan), np.full((count, 2), np.nan), np.full(count, "", dtype="<U8")
    for at, one in parts:
        ratio[at], near[at], why[at] = one.ratio, one.near, one.why
    return Judged(ratio, near, why)


def learned_apart(rows: Rows, gone: Mask, new: Judged, gpu: Gpu, idle: IdlePower, tell: Tell) -> dict[Why, Apart]:
    """What being outside costs, learned without the cards left out where many of their rows are; else the usual."""
    if (gone & (new.why != "")).sum() < MANY_OUTSIDE:
        return dict(usual().apart)
    tell("cards: functions and kinds left out of the others")
    (time, latency), (energy, power) = (own_ends(rows, ~gone, new, quantity) for quantity in KINDS)
    residuals = {name: Residual(latency[name], power.get(name, (0.8, 1.25)), 1) for name in latency}
    with _one_thread():
        left = leave_out(rows.where(~gone), gpu, idle, residuals, (time, energy))
    return {**usual().apart, **apart_of(left)}


def own_ends(rows: Rows, own: Mask, new: Judged, quantity: str) -> tuple[Line, dict[str, tuple[float, float]]]:
    """Growth of the ends with distance, and those of each family at a typical one, from held-out rows of ``own``."""
    place = list(KINDS).index(quantity)
    at = own & rows.is_kind(KINDS[quantity]) & np.isfinite(new.ratio[:, place])
    ratio, near, family = new.ratio[at, place], new.near[at, place], np.array(rows.family)[at]
    line = fit_near(np.log(ratio), family, near)
    typical = scaled(ratio, near, line)
    names = [str(name) for name in np.unique(family)]
    if quantity == "power":
        return line, {name: power_ends(typical, family, name, LEVEL) for name in names}
    return line, {name: conformal(typical[family == name], LEVEL) for name in names}


@dataclass(frozen=True)
class Counted:
    """Rows of cards left out against intervals made without them; each ``(row,)`` of the database."""

    quantity: str
    of_class: npt.NDArray[np.str_]  # one of :data:`CLASSES`; empty: not counted
    inside: Mask
    as_for_this_card: Mask  # inside without the spread between cards
    width: Array  # high minus low end over the prediction


def counted(
    rows: Rows,
    origin: Origin,
    gone: Mask,
    quantity: str,
    new: Judged,
    again: Judged,
    apart: dict[Why, Apart],
) -> Counted:
    """Classes of the rows of ``gone``, and which lie inside."""
    place = list(KINDS).index(quantity)
    at = gone & rows.is_kind(KINDS[quantity]) & np.isfinite(new.ratio[:, place])
    shared = at & _measured_by(rows, ~gone, quantity) & np.isfinite(again.ratio[:, place])
    line, known = own_ends(rows, ~gone, new, quantity)
    at &= np.isin(rows.family, list(known))
    of_class = np.where(at & shared, CLASSES[0], np.where(at & (new.why == ""), CLASSES[1], CLASSES[2]))
    ratio = np.where(shared, again.ratio[:, place], new.ratio[:, place])
    near = np.where(shared, again.near[:, place], new.near[:, place])
    why = np.where(shared, again.why, new.why)
    ends = np.log([known.get(name, (1.0, 1.0)) for name in rows.family]) * scale_of(near, line)[:, np.newaxis]
    by = np.array([getattr(apart[Why(w)], quantity) if w else 0.0 for w in why.tolist()])
    ends = np.exp(logs_moved_out(ends, by[:, np.newaxis]))
    far = moved_out(ends, NORMAL_P90 * getattr(_spread_without(rows, origin, gone), quantity))
    inside, own = (at & (ratio >= e[:, 0]) & (ratio <= e[:, 1]) for e in (far, ends))
    return Counted(quantity, np.where(at, of_class, ""), inside, own, far[:, 1] - far[:, 0])


def _measured_by(rows: Rows, known: Mask, quantity: str) -> Mask:
    """Rows whose very operator is among the known rows that tell this quantity."""
    kinds = ("burst",) if quantity == "latency" else ("sustained", "duty")
    there = {rows.spec[i] for i in np.flatnonzero(known & rows.is_kind(*kinds) & rows.fit)}
    return np.array([spec in there for spec in rows.spec])


def _spread_without(rows: Rows, origin: Origin, gone: Mask) -> CardSpread:
    """The spread between cards as the others show it."""
    rest = without(origin, gone)
    return spread_of({quantity: seen_of(rows.where(~gone), rest, quantity, None) for quantity in KINDS})
