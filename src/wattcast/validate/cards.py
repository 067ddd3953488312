"""Cards of one kind: how far they are apart, and whether intervals for another card cover one.

Every card is left out in turn (small ones together, each counted by itself); :mod:`wattcast.validate.cards_left_out`
says what is counted. With one card there is nothing to count, and a row says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.fit import kernels_data
from wattcast.fit.cards import KINDS, PLAN, Components, Origin, Shifted, inside_spread, origins, seen_of, spread_of
from wattcast.fit.kernels import idle_curve
from wattcast.fit.kernels_data import Mask, Rows
from wattcast.fit.kernels_interval import LEVEL
from wattcast.fit.kernels_split import HeldOut
from wattcast.fitted.cards import CardSpread
from wattcast.validate.cards_left_out import CLASSES, Counted, counted, judge, learned_apart
from wattcast.validate.learning import Tell
from wattcast.validate.rows import Row, absent, row

SMALL = 1000  # rows of a card: below, it is left out together with others like it
LEAST_SAID = 20  # rows; of fewer a share says nothing


def card_rows(gpu: str, held: HeldOut) -> list[Row]:
    """Spread between cards: what the database shows, what is taken, and whether it holds for a card left out."""
    rows, origin = kernels_data.load(gpu), origins(gpu)
    where = f"{gpu} cards of the kind"
    found = {quantity: seen_of(rows, origin, quantity, held) for quantity in KINDS}
    spreads = [_spread(where, quantity, found[quantity], spread_of(found)) for quantity in KINDS]
    return spreads + [one for quantity in KINDS for one in _common(where, quantity, rows, origin)]


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


def _common(where: str, quantity: str, rows: Rows, origin: Origin) -> list[Row]:
    """Kernels in common, each card left out: share of them within the spread that the other cards show."""
    found = inside_spread(rows, origin, quantity)
    if not found:
        return []
    inside = np.concatenate(list(found.values()))
    more: dict[str, Any] = {"wanted": [85.0, 95.0], "coverage": round(100 * float(inside.mean()), 1)}
    more |= {f"card_{name_of(card)}": round(100 * float(one.mean()), 1) for card, one in found.items()}
    name = f"{quantity}, kernels in common, inside the spread that the other cards show"
    return [row(where, name, int(inside.size), None, **more)]


def name_of(card: str) -> str:
    """A card in short: the first digits of its identity."""
    return card.removeprefix("GPU-").partition("-")[0] or "unnamed"


def coverage_rows(gpu: str, tell: Tell) -> list[Row]:
    """Share of the rows of cards left out that lie inside intervals made without them; minutes."""
    rows, origin = kernels_data.load(gpu), origins(gpu)
    where = f"{gpu} cards of the kind"
    if len(set(origin.card)) < 2:
        reason = "rows of one card alone: nothing to count intervals for another card against"
        return [absent(where, f"{quantity}, rows of another card inside intervals", reason) for quantity in KINDS]
    chip = hardware.load(gpu)
    idle = idle_curve(kernels_data.idle(gpu), chip)
    tables: list[Counted] = []
    for cards in left_out_together(origin.card):
        tell(f"cards: fitting without {', '.join(map(name_of, cards))}")
        gone = np.isin(origin.card, cards)
        new, again = judge(rows, gone, chip, idle)
        apart = learned_apart(rows, gone, new, chip, idle, tell)
        tables += [counted(rows, origin, gone, quantity, new, again, apart) for quantity in KINDS]
    return _said(where, rows, origin, tables)


def left_out_together(cards: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Cards with many rows each by itself, the others together: without few rows a fit is what it was."""
    names = list(dict.fromkeys(cards))
    small = tuple(name for name in names if cards.count(name) < SMALL)
    large = [(name,) for name in names if name not in small]
    return large + ([small] if small else [])


def _said(where: str, rows: Rows, origin: Origin, tables: list[Counted]) -> list[Row]:
    """Each class of all cards together, of each card, and of new operators by why they were measured."""
    card, chosen = np.array(origin.card), np.array(origin.chosen)
    out: list[Row] = []
    for quantity in KINDS:
        mine = [table for table in tables if table.quantity == quantity]
        for name in CLASSES:
            whole = np.ones(len(rows), dtype=bool)
            parts = {"all cards": whole}
            parts |= {f"card {name_of(c)}": card == c for c in dict.fromkeys(origin.card)}
            if name == CLASSES[1]:
                reasons = dict.fromkeys(origin.chosen)
                parts |= {_chosen(why): chosen == why for why in reasons}
            found = [_counted_row(where, f"{quantity}, {name}, {part}", name, mine, at) for part, at in parts.items()]
            out += [one for one in found if one["n"] >= LEAST_SAID]
    return out


def _chosen(why: str) -> str:
    return "at random" if why == PLAN else f"chosen as {why}"


def _counted_row(where: str, quantity: str, of_class: str, tables: list[Counted], part: Mask) -> Row:
    at = [table.of_class == of_class for table in tables]
    inside, own, width = (
        np.concatenate([getattr(table, name)[here & part] for table, here in zip(tables, at, strict=True)])
        for name in ("inside", "as_for_this_card", "width")
    )
    more: dict[str, Any] = {"wanted": [85.0, 95.0]}
    if inside.size:
        more |= {
            "coverage": round(100 * float(inside.mean()), 1),
            "as_for_this_card": round(100 * float(own.mean()), 1),
            "median_width": round(100 * float(np.median(width)), 1),
        }
    return row(where, f"{quantity}, inside {LEVEL:.0%}", int(inside.size), None, **more)
