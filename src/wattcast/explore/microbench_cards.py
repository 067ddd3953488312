"""The same microbenchmarks on two cards of a GPU: how far apart times, powers and memory powers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wattcast.explore.microbench import Result, first, read_results, results_folder
from wattcast.fit.counters_table import OTHER_CARD, RESULT_FILES
from wattcast.hardware import Gpu

NEAR_CAP = 0.97  # share of the power limit from which on the limit, not the card, sets the power


@dataclass(frozen=True)
class CardPair:
    """One kernel of one version on two cards; differences of the second relative to the first."""

    name: str
    kind: str
    time: float | None  # None where nothing was timed
    power: float
    memory_w: float | None
    capped: bool


def other_card(gpu: Gpu) -> tuple[Result, ...]:
    """Rows of the other card that ships, multimedia included; none where there is no such card."""
    folder = results_folder(gpu) / OTHER_CARD
    return tuple(r for name in RESULT_FILES if (folder / name).is_file() for r in read_results(folder / name))


def card_pairs(results: Sequence[Result], others: Sequence[Result], gpu: Gpu) -> list[CardPair]:
    """First rounds of every benchmark that both cards measured with the same version of its kernel."""
    theirs, limit_w = first(others), float(gpu.power.limit_w)
    pairs = []
    for name, a in first(results).items():
        b = theirs.get(name)
        if b is None or a.version != b.version or not a.power_w or not b.power_w:
            continue
        pairs.append(
            CardPair(
                name=name,
                kind=_kind(a),
                time=b.operation_s / a.operation_s - 1.0 if a.operation_s and b.operation_s else None,
                power=b.power_w / a.power_w - 1.0,
                memory_w=b.memory_power_w - a.memory_power_w if a.memory_power_w and b.memory_power_w else None,
                capped=max(a.power_w, b.power_w) > NEAR_CAP * limit_w,
            )
        )
    return pairs


def _kind(result: Result) -> str:
    """Its group, but what moves DRAM by itself: there the memory's own power counts."""
    moves = result.group in ("memory", "structure") and (
        result.name.startswith(("dram_", "coalescence_", "access_")) or result.name.endswith("_dram")
    )
    return "DRAM" if moves else result.group
