"""Print what each card of a kernel database draws over the mean card, in all and in its memory.

Run: ``python -m studies.card_levels`` (the H200). A card whose memory has the level v draws v·s more of its power,
where s is the share of memory in the power that the shipped bundle gives a kernel. The last line says how well the
card with the nearest serial number tells the level of memory: boards of one lot carry memory of one make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattcast import hardware
from wattcast.fit.engine_fit import describe_bundle_cards, without_engine
from wattcast.fit.kernel_fit import find_card_levels
from wattcast.fit.kernel_rows import CARD, load_kernel_rows, read_plain_rows
from wattcast.predictor.bundle import bundle_for


@dataclass(frozen=True)
class CardLevel:
    """Logs of what a card draws over the mean card, in all and in its memory, from so many sustained rows."""

    whole: float
    memory: float
    rows: int
    serial: int
    board: str  # part number; empty where it was not read


def load_card_levels(database: str) -> dict[str, CardLevel]:
    """Find the level of each card of a database, by its UUID, from rows of PyTorch's kernels alone."""
    gpu = hardware.load_gpu(database)
    rows = load_kernel_rows(database)
    uuid = dict(zip(rows.column(CARD).tolist(), rows.uuid, strict=True))
    of_card = {row["card_uuid"]: row for row in read_plain_rows(database)}
    cards = describe_bundle_cards(without_engine(bundle_for(gpu)), rows, gpu)
    count = Counter(cards.card[cards.told].tolist())
    found = {}
    for card, level in find_card_levels(cards).items():
        told = of_card[uuid[card]]
        found[uuid[card]] = CardLevel(*level, count[card], int(told["card_serial"]), told["card_board"] or "")
    return found


def find_neighbours(levels: Sequence[CardLevel]) -> list[CardLevel]:
    """Find the card with the nearest serial number for each card."""
    return [min((b for b in levels if b is not a), key=lambda b: abs(b.serial - a.serial)) for a in levels]


def main(database: str = "h200") -> None:
    """Print a line for each card, the leanest memory first."""
    levels = load_card_levels(database)
    for card, level in sorted(levels.items(), key=lambda item: item[1].memory):
        found = f"in all {100 * level.whole:+.1f} %, in memory {100 * level.memory:+.1f} %"
        print(f"{card[:12]}, serial {level.serial} {level.board}: {found} ({level.rows} sustained rows)")
    spread = np.std([(level.whole, level.memory) for level in levels.values()], axis=0, ddof=1)
    print(f"standard deviation of {len(levels)} cards: {100 * spread[0]:.1f} % and {100 * spread[1]:.1f} %")
    pairs = [
        (one.memory, near.memory)
        for one, near in zip(levels.values(), find_neighbours([*levels.values()]), strict=True)
    ]
    alike = sum(mine * other > 0.0 for mine, other in pairs)
    off = np.sqrt(np.mean([(mine - other) ** 2 for mine, other in pairs]))
    print(f"{alike} of {len(pairs)} have memory on the side of the nearest serial number, {100 * off:.1f} % off it")


if __name__ == "__main__":
    main()
