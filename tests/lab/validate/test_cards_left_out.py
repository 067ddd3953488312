"""A card left out: classes of its rows, intervals made without it, spreads of two levels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from wattcast.calibrate import kernel_rows
from wattcast.calibrate.kernel_rows import KernelRows, on_random_data
from wattcast.lab.fit.database_fit import (
    KIND_OF_QUANTITY,
    check_left_out_cards,
    variance_components,
)
from wattcast.lab.validate.kernel_checks import name_of
from wattcast.lab.validate.long_checks.cards_left_out import (
    CLASSES,
    SMALL,
    Counted,
    Judged,
    _said,
    counted,
    left_out_together,
    spread_without,
)
from wattcast.predictor.bundle.support_widening import (
    CardSpread,
    default_widening,
    published_spread,
)


@pytest.fixture(scope="module")
def rows() -> KernelRows:
    return kernel_rows.load_kernel_rows("h200")


@pytest.fixture(scope="module")
def spread_of_others(rows: KernelRows) -> Callable[[str], CardSpread]:
    """``spread_of_others(card)`` is the spread between all cards but one."""
    return cache(lambda card: spread_without(rows, np.array([c == card for c in rows.uuid])))


def test_small_cards_are_left_out_together(rows: KernelRows) -> None:
    found = left_out_together(rows.uuid)
    assert sorted(name for cards_ in found for name in cards_) == sorted(set(rows.uuid))
    for together in found:
        assert len(together) == 1 or all(rows.uuid.count(name) < SMALL for name in together)
    assert left_out_together(("a",) * (SMALL + 1) + ("b",) * 3 + ("c",) * 4) == [("a",), ("b", "c")]
    assert name_of("GPU-d8b4623c-ae8d-8e1f") == "d8b4623c"


def judged(
    rows: KernelRows, gone: np.ndarray, spread: float, shift: float, seed: int, why: str = ""
) -> Judged:
    """Predictions off by ``spread`` on every card, and by ``shift`` more on cards that are gone."""
    rng = np.random.default_rng(seed)
    log_ratio = rng.normal(0, spread, (len(rows), 2)) + np.where(gone, shift, 0.0)[:, np.newaxis]
    tested = rows.is_kind("burst", "sustained") & rows.fit & on_random_data(rows)
    ratio = np.where(tested[:, np.newaxis], np.exp(log_ratio), np.nan)
    return Judged(
        ratio, rng.uniform(0.5, 1.0, (len(rows), 2)), np.where(gone, why, "").astype("<U8")
    )


def shares(found: Counted) -> dict[str, float]:
    at = {name: found.of_class == name for name in CLASSES}
    return {name: float(found.inside[own].mean()) for name, own in at.items() if own.any()}


@pytest.mark.parametrize("quantity", list(KIND_OF_QUANTITY))
def test_a_card_like_the_others_is_covered_and_one_far_off_is_not(
    rows: KernelRows, spread_of_others: Callable[[str], CardSpread], quantity: str
) -> None:
    card = max(set(rows.uuid), key=rows.uuid.count)
    gone = np.array([c == card for c in rows.uuid])
    known = (dict(default_widening().apart), spread_of_others(card))
    drawn = []
    for seed in range(0, 12, 2):  # a few hundred rows of one draw are a few percent off by chance
        judgements = (judged(rows, gone, 0.1, 0.0, s) for s in (seed, seed + 1))
        like = counted(rows, gone, quantity, *judgements, *known)
        assert set(np.unique(like.of_class)) == {"", *CLASSES[:2]}
        assert not (like.of_class[~gone] != "").any()
        assert (
            like.inside | ~like.as_for_this_card
        ).all()  # the spread between cards never narrows
        drawn.append(list(shares(like).values()))
    assert (np.mean(drawn, axis=0) > 0.87).all()
    assert (np.mean(drawn, axis=0) < 0.95).all()
    judgements = (judged(rows, gone, 0.1, 0.4, s) for s in (0, 1))
    off = counted(rows, gone, quantity, *judgements, *known)
    for share in shares(off).values():
        assert share < 0.3


def test_rows_outside_are_a_class_of_their_own_and_wider(
    rows: KernelRows, spread_of_others: Callable[[str], CardSpread]
) -> None:
    card = max(set(rows.uuid), key=rows.uuid.count)
    gone = np.array([c == card for c in rows.uuid])
    new, again = judged(rows, gone, 0.1, 0.4, 0, "kind"), judged(rows, gone, 0.1, 0.0, 1)
    known = (dict(default_widening().apart), spread_of_others(card))
    found = counted(rows, gone, "latency", new, again, *known)
    assert set(np.unique(found.of_class)) == {"", CLASSES[0], CLASSES[2]}
    assert shares(found)[CLASSES[2]] > 0.85
    wide, plain = (
        float(np.median(found.width[found.of_class == c])) for c in (CLASSES[2], CLASSES[0])
    )
    assert wide > 2.0 * plain
    said = _said("made", rows, [found, replace(found, quantity="power")])
    assert {row["n"] for row in said if "all cards" in row["quantity"]} == {
        int((found.of_class == c).sum()) for c in (CLASSES[0], CLASSES[2])
    }
    assert all(row["coverage"] >= row["as_for_this_card"] for row in said)


def test_what_other_cards_measured_is_told_by_the_operator(
    rows: KernelRows, spread_of_others: Callable[[str], CardSpread]
) -> None:
    card = min(set(rows.uuid), key=rows.uuid.count)
    gone = np.array([c == card for c in rows.uuid])
    both = [judged(rows, gone, 0.1, 0.0, s) for s in (0, 1)]
    known = (dict(default_widening().apart), spread_of_others(card))
    found = counted(rows, gone, "latency", *both, *known)
    others = {rows.spec[i] for i in np.flatnonzero(~gone & rows.is_kind("burst") & rows.fit)}
    for i in np.flatnonzero(found.of_class != ""):
        assert (found.of_class[i] == CLASSES[0]) == (rows.spec[i] in others)


def two_levels(rows: KernelRows, count: int, core: float, memory: float, seed: int) -> KernelRows:
    """Bursts on several cards whose core and memory have a level each; kernels lean on one or the
    other.
    """
    rng = np.random.default_rng(seed)
    first = np.flatnonzero(
        rows.is_kind("burst") & rows.fit & (rows.repeat == 0) & on_random_data(rows)
    )[:150]
    base = rows.select_rows(np.isin(np.arange(len(rows)), first))
    lean = rng.uniform(size=len(base)) < 0.5
    values, names = [], []
    for c in range(count):
        levels = rng.normal(0, [core, memory])
        for _ in range(2):
            noise = rng.normal(0, 0.004, len(base))
            values.append(
                base.column("latency_s") * np.exp(np.where(lean, levels[0], levels[1]) + noise)
            )
            names += [f"card {c}"] * len(base)
    times = 2 * count
    number = {name: np.tile(v, times) for name, v in base.number.items()}
    number |= {
        "latency_s": np.concatenate(values),
        "settled_power_w": np.full(times * len(base), np.nan),
    }
    return KernelRows(
        base.kind * times,
        base.ops * times,
        base.conditions * times,
        base.data * times,
        tuple(f"{i}" for i in range(len(base))) * times,
        np.tile(base.repeat, times),
        base.names * times,
        base.blocks * times,
        tuple(names),
        tuple(names),
        (kernel_rows.PLANNED,) * len(names),
        number,
        np.tile(base.fit, times),
        base.source,
        base.card,
    )


def test_two_levels_of_a_card_are_found_as_one_spread(rows: KernelRows) -> None:
    """Core and memory of a card that differ apart: card and card x kernel together have the spread
    of one kernel.
    """
    found = [
        variance_components(two_levels(rows, 6, 0.02, 0.04, seed), "latency") for seed in range(16)
    ]
    total = np.sqrt(np.mean([f.apart**2 for f in found if f is not None]))
    assert total == pytest.approx(np.sqrt(2.0 * (0.02**2 + 0.04**2) / 2.0), rel=0.25)
    assert (
        np.mean([f.card_by_kernel for f in found if f is not None]) > 0.01
    )  # one level a card would leave none


def test_a_card_left_out_lies_within_the_spread_of_the_others(rows: KernelRows) -> None:
    inside = [
        np.concatenate(
            list(check_left_out_cards(two_levels(rows, 5, 0.012, 0.012, s), "latency").values())
        )
        for s in range(8)
    ]
    assert 0.82 < np.mean(np.concatenate(inside)) < 0.99
    made = two_levels(rows, 4, 0.002, 0.002, 0)
    last = np.array([c == "card 3" for c in made.uuid])
    far = replace(
        made,
        number={**made.number, "latency_s": made.column("latency_s") * np.where(last, 1.1, 1.0)},
    )
    found = check_left_out_cards(far, "latency")
    assert found["card 3"].mean() < 0.05
    assert made.select_rows(~last).uuid.count("card 3") == 0


def test_the_database_s_cards_lie_within_one_another_s_spread(rows: KernelRows) -> None:
    found = check_left_out_cards(rows, "latency")
    assert len(found) >= 4
    assert 0.85 <= np.mean(np.concatenate(list(found.values()))) <= 0.95
    assert published_spread().cards == 1
