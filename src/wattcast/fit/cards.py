"""Rows of one kernel measured twice: what measuring leaves open, and how far cards of a kind are apart.

A kernel i on card c, in logs, is y_ic = κ_i + card_c + (card x kernel)_ic + noise. Differences of the same kernel
between two cards have the mean of the cards' difference and a variance of 2·(σ_card x kernel² + σ_noise²); repeats in
one run give σ_noise. Variances are estimated by moments from all pairs of cards [Searle1992, 4.3], spreads from 90th
percentiles, since it is 90 % intervals they widen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from wattcast.arrays import Array
from wattcast.fit import kernels_data
from wattcast.fit.kernels import settled
from wattcast.fit.kernels_data import Rows
from wattcast.fitted.cards import NORMAL_P90, CardSpread, published, published_spread

LEAST_COMMON = 20  # rows that two cards must share
KINDS = {"latency": "burst", "power": "sustained"}
ALL = "all"


@dataclass(frozen=True)
class Origin:
    """Card and run of each row, in the order of :func:`kernels_data.load`."""

    card: tuple[str, ...]
    run: tuple[str, ...]


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
    return Origin(tuple(str(r.get("card_uuid") or "") for r in plain), tuple(str(r.get("run") or "") for r in plain))


def spread(database: str | Path) -> CardSpread:
    """How far another card may be: from cards with common rows and the published figures; else the latter alone."""
    rows, origin = kernels_data.load(database), origins(database)
    found = {quantity: components(rows, origin, quantity) for quantity in KINDS}
    return spread_of(found["latency"], found["power"])


def spread_of(latency: Components | None, power: Components | None) -> CardSpread:
    """The spread from components of both quantities; None: no two cards share enough rows."""
    known = published_spread()
    if latency is None or power is None:
        return known
    cards = min(latency.cards, power.cards)
    source = (
        f"{cards} cards, {latency.rows} burst and {power.rows} sustained rows in common, weighed with the published "
        f"figures as {published().counts_for:g} differences: {known.source}"
    )
    return CardSpread(_weighed(latency, known.latency), _weighed(power, known.power), cards, source)


def _weighed(found: Components, known: float) -> float:
    """Variances weighed by the differences between cards they rest on: C cards give C - 1."""
    weight, differences = published().counts_for, found.cards - 1
    variance = (weight * known**2 + differences * found.apart**2) / (weight + differences)
    return float(np.sqrt(variance))


def components(rows: Rows, origin: Origin, quantity: str) -> Components | None:
    """Variance components of ``latency`` (bursts) or ``power`` (sustained rows); None of fewer than two cards."""
    pairs = list(between_cards(rows, origin, quantity))
    if not pairs:
        return None
    still = repeats(rows, origin, quantity)
    noise = _p90(np.abs(still)) / NORMAL_P90 / np.sqrt(2.0) if still.size else 0.0
    middle = np.array([np.median(p.log_ratio) for p in pairs])
    within = np.array([_p90(np.abs(p.log_ratio - m)) / NORMAL_P90 for p, m in zip(pairs, middle, strict=True)])
    count = np.array([p.log_ratio.size for p in pairs])
    by_kernel = max(float(np.mean(within**2)) / 2.0 - noise**2, 0.0)
    # the median of n kernels is itself uncertain by π/2·σ²/n
    card = max(float(np.mean(middle**2 - np.pi / 2.0 * within**2 / count)) / 2.0, 0.0)
    cards = len({name for p in pairs for name in (p.first, p.second)})
    return Components(quantity, card**0.5, by_kernel**0.5, float(noise), cards, int(count.sum()))


def between_cards(rows: Rows, origin: Origin, quantity: str) -> Iterator[Apart]:
    """Every two cards with enough kernels in common; repeats of a kernel on a card are averaged first."""
    figure = _figure(rows, quantity)
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
