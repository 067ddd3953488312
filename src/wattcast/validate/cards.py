"""Cards of one kind: how far they are apart, and whether intervals for another card cover one.

With rows of two cards or more, each card in turn is the one that was measured: the model is fitted on its rows alone,
in folds by shape, intervals come from its own held-out rows and are moved out by the published spread between cards
(not by that of the cards at hand, which would be judged by itself), and rows of the other cards, of shapes that the
fit has not seen, are counted inside. With one card there is nothing to count, and a row says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.arrays import Array
from wattcast.fit import kernels_data
from wattcast.fit.cards import KINDS, PLAN, Components, Shifted, origins, seen_of, spread_of
from wattcast.fit.kernels import fit_rows, idle_curve, random, settled
from wattcast.fit.kernels_data import Mask, Rows
from wattcast.fit.kernels_interval import LEVEL, conformal, power_ends
from wattcast.fit.kernels_run import _one_thread
from wattcast.fit.kernels_split import FOLDS, HeldOut, folds_of, predict_rows
from wattcast.fitted.cards import NORMAL_P90, CardSpread, published_spread
from wattcast.uncertainty import moved_out
from wattcast.validate.learning import Tell
from wattcast.validate.rows import Row, absent, row

LEAST_ROWS = 1000  # of a card, to be fitted by itself


def card_rows(gpu: str, held: HeldOut) -> list[Row]:
    """Spread between cards: what the database shows, or what is taken in its place."""
    rows, origin = kernels_data.load(gpu), origins(gpu)
    where = f"{gpu} cards of the kind"
    found = {quantity: seen_of(rows, origin, quantity, held) for quantity in KINDS}
    return [_spread(where, quantity, found[quantity], spread_of(found)) for quantity in KINDS]


def _spread(where: str, quantity: str, found: Components | list[Shifted], spread: CardSpread) -> Row:
    taken = getattr(spread, quantity)
    if not isinstance(found, Components):
        more: dict[str, Any] = {"taken": f"{100 * taken:.2f} %"}
        for i, s in enumerate(found):
            more[f"card_{i + 2}_against_1"] = f"{100 * s.shift:+.2f} ± {100 * s.error:.2f} % by {s.rows} rows"
        more["from"] = spread.source
        return row(where, f"{quantity}, deviation of another card", sum(s.rows for s in found), None, **more)
    more = {
        "taken": f"{100 * taken:.2f} %",
        "cards": found.cards,
        "common_to_a_card": f"{100 * found.card:.2f} %",
        "card_by_kernel": f"{100 * found.card_by_kernel:.2f} %",
        "repeats": f"{100 * found.noise:.2f} %",
    }
    return row(where, f"{quantity}, deviation of another card", found.rows, None, **more)


def coverage_rows(gpu: str, tell: Tell) -> list[Row]:
    """Share of other cards' rows inside intervals of a card; minutes, where there are several cards."""
    rows, origin = kernels_data.load(gpu), origins(gpu)
    where = f"{gpu} cards of the kind"
    sustained = {card for card, kind in zip(origin.card, rows.kind, strict=True) if kind == "sustained"}
    cards = [card for card in dict.fromkeys(origin.card) if origin.card.count(card) >= LEAST_ROWS]
    cards = [card for card in cards if card in sustained]  # others have no power to fit
    if len(set(origin.card)) < 2 or not cards:
        reason = "rows of one card alone: nothing to count intervals for another card against"
        return [absent(where, f"{quantity}, rows of another card inside intervals", reason) for quantity in KINDS]
    out: list[Row] = []
    for card in cards:
        tell(f"cards: fitting {card} alone")
        mine = np.array([c == card for c in origin.card])
        ratio, fold = _predicted(gpu, rows, mine)
        for quantity in KINDS:
            others = {
                why: ~mine & np.array([c == why for c in origin.chosen]) for why in dict.fromkeys(origin.chosen)
            }
            found = [_inside(where, quantity, w, rows, (mine, o), ratio[quantity], fold) for w, o in others.items()]
            out += [one for one in found if one["n"]]
    return out


def _predicted(gpu: str, rows: Rows, mine: Mask) -> tuple[dict[str, Array], npt.NDArray[np.int64]]:
    """Measured over predicted of every row, from a fit of one card's rows in the other folds."""
    chip = hardware.load(gpu)
    idle, fold = idle_curve(kernels_data.idle(gpu), chip), folds_of(rows)
    tested = rows.is_kind("burst", "sustained") & rows.fit & random(rows)
    predicted = np.full((len(rows), 3), np.nan)
    with _one_thread():
        for k in range(FOLDS):
            test = tested & (fold == k)
            found = fit_rows(rows.where(mine & (fold != k)), chip, idle)
            predicted[test] = predict_rows(found, rows.where(test), chip)
    power_w, _, latency_s = settled(rows)
    return {"latency": latency_s / predicted[:, 0], "power": power_w / predicted[:, 1]}, fold


def _inside(
    where: str,
    quantity: str,
    chosen: str,
    rows: Rows,
    cards: tuple[Mask, Mask],
    ratio: Array,
    fold: npt.NDArray[np.int64],
) -> Row:
    """Share of another card's rows inside the measured card's intervals, as they are and moved out."""
    known, (mine, others) = published_spread(), cards
    at = rows.is_kind(KINDS[quantity]) & np.isfinite(ratio)
    families, inside, wider = np.array(rows.family), [], []
    for name in dict.fromkeys(rows.family):
        other = at & others & (families == name)
        for k in np.unique(fold[other]):
            own = at & mine & (fold != k)
            if quantity == "power":
                ends = np.array(power_ends(ratio[own], families[own], name, LEVEL))
            else:
                ends = np.array(conformal(ratio[own & (families == name)], LEVEL))
            far = moved_out(ends, NORMAL_P90 * getattr(known, quantity))
            some = ratio[other & (fold == k)]
            inside += ((some >= ends[0]) & (some <= ends[1])).tolist()
            wider += ((some >= far[0]) & (some <= far[1])).tolist()
    more: dict[str, Any] = {"wanted": [85.0, 95.0]}
    if inside:
        more |= {
            "coverage": round(100 * float(np.mean(wider)), 1),
            "as_for_this_card": round(100 * float(np.mean(inside)), 1),
        }
    what = "at random" if chosen == PLAN else f"chosen as {chosen}"
    return row(where, f"{quantity}, rows of another card, {what}, inside {LEVEL:.0%}", len(inside), None, **more)
