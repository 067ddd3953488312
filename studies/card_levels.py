"""Print what each card of a kernel database draws over the mean card, in all and in its memory.

Run: ``python -m studies.card_levels`` (the H200). A card whose memory has the level v draws v·s more of its power,
where s is the share of memory in the power that the shipped bundle gives a kernel.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from wattcast import hardware
from wattcast.fit.database_fit import load_origins
from wattcast.fit.engine_fit import describe_bundle_cards, without_engine
from wattcast.fit.kernel_fit import find_card_levels
from wattcast.fit.kernel_rows import CARD, load_kernel_rows
from wattcast.predictor.bundle import bundle_for


def main(database: str = "h200") -> None:
    """Print a line for each card, the leanest memory first."""
    gpu = hardware.load_gpu(database)
    rows, origin = load_kernel_rows(database), load_origins(database)
    uuid = dict(zip(rows.column(CARD).tolist(), origin.card, strict=True))
    cards = describe_bundle_cards(without_engine(bundle_for(gpu)), rows, gpu)
    levels, count = find_card_levels(cards), Counter(cards.card[cards.told].tolist())
    for card, (whole, memory) in sorted(levels.items(), key=lambda item: item[1][1]):
        found = f"in all {100 * whole:+.1f} %, in memory {100 * memory:+.1f} %"
        print(f"{uuid[card][:12]}: {found} ({count[card]} sustained rows)")
    spread = np.std(list(levels.values()), axis=0, ddof=1)
    print(f"standard deviation of {len(levels)} cards: {100 * spread[0]:.1f} % and {100 * spread[1]:.1f} %")


if __name__ == "__main__":
    main()
