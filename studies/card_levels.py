"""Print what each card of a kernel database draws over the mean card, in all and in its memory.

Run: ``python -m studies.card_levels`` (the H200). A card whose memory has the level v draws v·s more of its power,
where s is the share of memory in the power that the shipped bundle gives a kernel.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from wattcast import hardware
from wattcast.fit.engine_fit import describe_bundle_cards, without_engine
from wattcast.fit.kernel_fit import find_card_levels
from wattcast.fit.kernel_rows import CARD, load_kernel_rows
from wattcast.predictor.bundle import bundle_for


@dataclass(frozen=True)
class CardLevel:
    """Logs of what a card draws over the mean card, in all and in its memory, from so many sustained rows."""

    whole: float
    memory: float
    rows: int


def load_card_levels(database: str) -> dict[str, CardLevel]:
    """Find the level of each card of a database, by its UUID, from rows of PyTorch's kernels alone."""
    gpu = hardware.load_gpu(database)
    rows = load_kernel_rows(database)
    uuid = dict(zip(rows.column(CARD).tolist(), rows.uuid, strict=True))
    cards = describe_bundle_cards(without_engine(bundle_for(gpu)), rows, gpu)
    count = Counter(cards.card[cards.told].tolist())
    return {uuid[card]: CardLevel(*level, count[card]) for card, level in find_card_levels(cards).items()}


def main(database: str = "h200") -> None:
    """Print a line for each card, the leanest memory first."""
    levels = load_card_levels(database)
    for card, level in sorted(levels.items(), key=lambda item: item[1].memory):
        found = f"in all {100 * level.whole:+.1f} %, in memory {100 * level.memory:+.1f} %"
        print(f"{card[:12]}: {found} ({level.rows} sustained rows)")
    spread = np.std([(level.whole, level.memory) for level in levels.values()], axis=0, ddof=1)
    print(f"standard deviation of {len(levels)} cards: {100 * spread[0]:.1f} % and {100 * spread[1]:.1f} %")


if __name__ == "__main__":
    main()
