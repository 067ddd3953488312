"""Rows of one kernel measured twice: what measuring leaves open, and how far cards of a kind are apart.

A kernel i on card c, in logs, is y_ic = κ_i + card_c + (card x kernel)_ic + noise. Differences of the same kernel
between two cards have the mean of the cards' difference and a variance of 2·(σ_card x kernel² + σ_noise²); repeats in
one run give σ_noise. Variances are estimated by moments from all pairs of cards [Searle1992, 4.3], spreads from 90th
percentiles, since it is 90 % intervals they widen. Power is compared where the power limit does not hold it.

Cards that measured different kernels are compared through the model: both ran rows of the same random plan, so the
difference of their median held-out residuals is that of the cards. It may widen the published spread, not narrow it,
since card x kernel cannot be told from the error of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from wattcast.arrays import Array
from wattcast.fit import kernels_data
from wattcast.fit.kernels import settled
from wattcast.fit.kernels_data import Mask, Rows
from wattcast.fit.kernels_split import HeldOut
from wattcast.fitted.cards import NORMAL_P90, CardSpread, published, published_spread

LEAST_COMMON = 20  # rows that two cards must share
PLAN = "plan"  # why a row was measured: at random
_UNCAPPED = 0.995  # of the top clock: below, the power limit holds the clock
KINDS = {"latency": "burst", "power": "sustained"}
ALL = "all"


@dataclass(frozen=True)
class Origin:
    """Card and run of each row, and why it was measured, in the order of :func:`kernels_data.load`."""

    card: tuple[str, ...]
    run: tuple[str, ...]
    chosen: tuple[str, ...]


@dataclass(frozen=True)
class Apart:
    """Two cards: log of second over first by kernel, of one quantity."""

    first: str
    second: str
    quantity: str
    log_ratio: Array


@dataclass(frozen=True)
class Components:
    """Standard deviations of logs: between cards, of kernels within a card, of repeats; and what they rest on."""

    quantity: str
    card: float
    card_by_kernel: float
    noise: float
    cards: int
    rows: int  # pairs of rows on two cards

    @property
    def apart(self) -> float:
        """Of one kernel on two cards, without what measuring adds."""
        return float(np.sqrt(2.0 * (self.card**2 + self.card_by_kernel**2)))


def origins(database: str | Path) -> Origin:
    """Card and run of the rows that :func:`kernels_data.load` gives."""
    plain = [row for row in kernels_data._plain(database) if row.get("kind") != "idle" and not row.get("error")]
    card, run, chosen = (
        tuple(str(row.get(name) or usual) for row in plain)
        for name, usual in (("card_uuid", ""), ("run", ""), ("chosen", PLAN))
    )
    return Origin(card, run, chosen)


def without(origin: Origin, gone: Mask) -> Origin:
    """The origins of the rows that stay."""
    kept = np.flatnonzero(~gone)
    return Origin(*(tuple(column[i] for i in kept) for column in (origin.card, origin.run, origin.chosen)))


def spread(database: str | Path, held: HeldOut | None = None) -> CardSpread:
    """How far another card may be, from what the database and its held-out predictions show and what is published."""
    rows, origin = kernels_data.load(database), origins(database)
    return spread_of({quantity: seen_of(rows, origin, quantity, held) for quantity in KINDS})


def seen_of(rows: Rows, origin: Origin, quantity: str, held: HeldOut | None) -> Components | list[Shifted]:
    """Components from kernels in common; where cards have none, their shifts (an empty list: one card)."""
    found = components(rows, origin, quantity)
    return found if found is not None else shifts(rows, origin, quantity, held)


def spread_of(found: Mapping[str, Components | list[Shifted]]) -> CardSpread:
    """The spread from what was seen of each quantity."""
    known = published_spread()
    value, cards, said = {}, 1, []
    for quantity, seen in found.items():
        published_value = getattr(known, quantity)
        if isinstance(seen, Components):
            value[quantity] = _weighed(seen.apart**2, seen.cards - 1, published_value)
            cards = max(cards, seen.cards)
            said.append(f"{quantity} of {seen.cards} cards with {seen.rows} rows in common")
        elif seen:
            variance = float(np.mean([max(s.shift**2 - s.error**2, 0.0) for s in seen]))
            value[quantity] = max(_weighed(variance, len(seen), published_value), published_value)
            cards = max(cards, 1 + len(seen))
            said.append(f"{quantity} of {1 + len(seen)} cards by their residuals")
        else:
            value[quantity] = published_value
            said.append(f"{quantity} as published")
    return CardSpread(value["latency"], value["power"], cards, f"{'; '.join(said)}. Published: {known.source}")


def _weighed(variance: float, differences: int, known: float) -> float:
    """Variances weighed by the differences between cards they rest on: C cards give C - 1."""
    weight = published().counts_for
    return float(np.sqrt((weight * known**2 + differences * variance) / (weight + differences)))


@dataclass(frozen=True)
class Shifted:
    """A card against the one with most rows: difference of median log-residuals, and its standard error."""

    card: str
    against: str
    quantity: str
    shift: float
    error: float
    rows: int


def shifts(rows: Rows, origin: Origin, quantity: str, held: HeldOut | None) -> list[Shifted]:
    """Every card with enough rows of the plan, against the one with most; none without matching predictions."""
    wanted = np.flatnonzero(rows.is_kind("burst", "sustained") & rows.fit & (rows.repeat == 0))
    if held is None or len(held.kind) != len(wanted):
        return []
    time = quantity == "latency"
    ratio = held.latency_s / held.predicted_latency_s if time else held.power_w / held.predicted_power_w
    of_kind = np.array([kind == KINDS[quantity] for kind in held.kind], dtype=bool)
    usable = of_kind & np.isfinite(ratio) & np.array([d == "random" for d in held.data], dtype=bool)
    usable &= np.array([origin.chosen[i] == PLAN for i in wanted], dtype=bool)
    if not time:
        usable &= held.clock_hz > _UNCAPPED * np.nanmax(held.clock_hz)
    card = np.array([origin.card[i] for i in wanted])
    logs = {name: np.log(ratio[usable & (card == name)]) for name in dict.fromkeys(card.tolist())}
    logs = {name: values for name, values in logs.items() if values.size >= LEAST_COMMON}
    first = max(logs, key=lambda name: logs[name].size, default="")
    return [_shifted(name, first, quantity, logs) for name in logs if name != first]


def _shifted(card: str, against: str, quantity: str, logs: Mapping[str, Array]) -> Shifted:
    mine, theirs = logs[card], logs[against]
    variance = sum(np.pi / 2.0 * (_p90(np.abs(v - np.median(v))) / NORMAL_P90) ** 2 / v.size for v in (mine, theirs))
    shift = float(np.median(mine) - np.median(theirs))
    return Shifted(card, against, quantity, shift, float(np.sqrt(variance)), mine.size)


def components(rows: Rows, origin: Origin, quantity: str) -> Components | None:
    """Variance components of ``latency`` (bursts) or ``power`` (sustained rows); None of fewer than two cards."""
    pairs = list(between_cards(rows, origin, quantity))
    if not pairs:
        return None
    noise = _noise(rows, origin, quantity)
    middle = np.array([np.median(p.log_ratio) for p in pairs])
    within = np.array([_p90(np.abs(p.log_ratio - m)) / NORMAL_P90 for p, m in zip(pairs, middle, strict=True)])
    count = np.array([p.log_ratio.size for p in pairs])
    by_kernel = max(float(np.mean(within**2)) / 2.0 - noise**2, 0.0)
    # the median of n kernels is itself uncertain by π/2·σ²/n
    card = max(float(np.mean(middle**2 - np.pi / 2.0 * within**2 / count)) / 2.0, 0.0)
    cards = len({name for p in pairs for name in (p.first, p.second)})
    return Components(quantity, card**0.5, by_kernel**0.5, float(noise), cards, int(count.sum()))


def _noise(rows: Rows, origin: Origin, quantity: str) -> float:
    """Standard deviation of one row among repeats."""
    still = repeats(rows, origin, quantity)
    return float(_p90(np.abs(still)) / NORMAL_P90 / np.sqrt(2.0)) if still.size else 0.0


def between_cards(rows: Rows, origin: Origin, quantity: str) -> Iterator[Apart]:
    """Every two cards with enough kernels in common; repeats of a kernel on a card are averaged first."""
    figure = _figure(rows, quantity)
    if quantity == "power":
        _, clock_hz, _ = settled(rows)
        figure = np.where(clock_hz > _UNCAPPED * np.nanmax(clock_hz), figure, np.nan)
    means: dict[str, dict[tuple[str, str], float]] = {}
    for key, members in _alike(rows, quantity, figure).items():
        for card in dict.fromkeys(origin.card[i] for i in members):
            own = [float(np.log(figure[i])) for i in members if origin.card[i] == card]
            means.setdefault(card, {})[key] = float(np.mean(own))
    for first, second in combinations(sorted(means), 2):
        common = [key for key in means[first] if key in means[second]]
        if len(common) >= LEAST_COMMON:
            ratio = np.array([means[second][key] - means[first][key] for key in common])
            yield Apart(first, second, quantity, ratio)


def inside_spread(rows: Rows, origin: Origin, quantity: str) -> dict[str, Mask]:
    """Of each card with kernels in common, which of them lie within 90 % of the spread that the others show.

    Differences to every other card, each against sqrt(apart² + 2·noise²): spread and repeats of both.
    """
    pairs = list(between_cards(rows, origin, quantity))
    found = {}
    for card in dict.fromkeys(name for p in pairs for name in (p.first, p.second)):
        gone = np.array([c == card for c in origin.card])
        rest, others = rows.where(~gone), without(origin, gone)
        seen = components(rest, others, quantity)
        spread = getattr(spread_of({q: seen if q == quantity and seen else [] for q in KINDS}), quantity)
        noise = _noise(rest, others, quantity)
        within = NORMAL_P90 * float(np.sqrt(spread**2 + 2.0 * noise**2))
        apart = np.concatenate([p.log_ratio for p in pairs if card in (p.first, p.second)])
        found[card] = np.abs(apart) <= within
    return found


def repeats(rows: Rows, origin: Origin, quantity: str, family: str = ALL) -> Array:
    """Log-ratios of rows and their repeats in the same run on the same card."""
    figure, families = _figure(rows, quantity), rows.family
    found = [
        float(np.log(figure[a] / figure[b]))
        for members in _alike(rows, quantity, figure).values()
        for a, b in combinations(members, 2)
        if origin.run[a] == origin.run[b] and family in (ALL, families[a])
    ]
    return np.array(found)


def noise(database: str | Path) -> dict[tuple[str, str], float]:
    """Mean error in percent that a perfect prediction would show, by kind of row and family: of repeats, |d|/√2."""
    rows, origin = kernels_data.load(database), origins(database)
    found = {}
    for quantity, kind in KINDS.items():
        for family in (ALL, *dict.fromkeys(rows.family)):
            apart = repeats(rows, origin, quantity, family)
            if apart.size >= LEAST_REPEATS:
                found[kind, family] = float(100.0 * np.mean(np.abs(apart)) / np.sqrt(2.0))
    return found


LEAST_REPEATS = 4


def _figure(rows: Rows, quantity: str) -> Array:
    power_w, _, latency_s = settled(rows)
    return latency_s if quantity == "latency" else power_w


def _alike(rows: Rows, quantity: str, figure: Array) -> dict[tuple[str, str], Sequence[int]]:
    """Rows of one operator and data, of the kind that tells the quantity."""
    found: dict[tuple[str, str], list[int]] = {}
    usable = rows.is_kind(KINDS[quantity]) & rows.fit & np.isfinite(figure) & (figure > 0)
    for i in np.flatnonzero(usable):
        found.setdefault((rows.spec[i], rows.data[i]), []).append(int(i))
    return {key: members for key, members in found.items() if len(members) > 1}


def _p90(values: Array) -> float:
    return float(np.quantile(values, 0.9))
