"""Print what each card of a kernel database draws over the mean card, in all and in its memory.

Run: ``python -m wattcast.lab.fit.card_levels`` (the H200). A card whose memory has the level v
draws v·s more of its power, where s is the share of memory in the power that the shipped bundle
gives a kernel. Three things tell the two makes of memory apart beside their power: the time of a
large multiplication, the board's part number, and, less surely, the card with the nearest serial
number. ``--write`` writes the means of boards to ``predictor/bundle/boards.yaml``."""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

import wattcast
from wattcast import hardware
from wattcast.calibrate.kernel_rows import (
    CARD,
    load_kernel_rows,
    read_plain_rows,
)
from wattcast.lab.fit.engine_fit import describe_bundle_cards, without_engine
from wattcast.lab.fit.kernel_fit import find_card_levels
from wattcast.lab.module_commands import run_module
from wattcast.predictor.bundle import bundle_for

TELLING = "0a9e05ba426d9711"  # x·y of 2,097,152 x 64 numbers of bf16, strided: 0.36 ms


@dataclass(frozen=True)
class CardLevel:
    """Logs of what a card draws over the mean card, in all and in its memory, from so many
    sustained rows.
    """

    whole: float
    memory: float
    rows: int
    serial: int
    board: str  # part number; empty where it was not read
    product_s: float | None  # time of the kernel ``TELLING``; None where the card did not run it


def load_card_levels(database: str) -> dict[str, CardLevel]:
    """Find the level of each card of a database, by its UUID, from rows of PyTorch's kernels
    alone.
    """
    gpu = hardware.load_gpu(database)
    rows = load_kernel_rows(database)
    uuid = dict(zip(rows.column(CARD).tolist(), rows.uuid, strict=True))
    plain = read_plain_rows(database)
    of_card = {row["card_uuid"]: row for row in plain}
    product_s = {
        row["card_uuid"]: row["latency_s"]
        for row in plain
        if TELLING in row["id"] and row["latency_s"]
    }
    cards = describe_bundle_cards(without_engine(bundle_for(gpu)), rows, gpu)
    count = Counter(cards.card[cards.comparable].tolist())
    levels = {}
    for card, level in find_card_levels(cards).items():
        facts = of_card[uuid[card]]
        serial = int(facts["card_serial"])
        board = facts["card_board"] or ""
        levels[uuid[card]] = CardLevel(
            *level,
            count[card],
            serial,
            board,
            product_s.get(uuid[card]),
        )
    return levels


def find_neighbours(levels: Sequence[CardLevel]) -> list[CardLevel]:
    """Find the card with the nearest serial number for each card."""
    return [
        min((b for b in levels if b is not a), key=lambda b: abs(b.serial - a.serial))
        for a in levels
    ]


def group_boards(levels: Mapping[str, CardLevel]) -> dict[str, list[float]]:
    """Group the levels of memory of cards by their part number, where it was read."""
    levels_of_board = defaultdict(list)
    for level in levels.values():
        if level.board:
            levels_of_board[level.board].append(level.memory)
    return dict(sorted(levels_of_board.items()))


def write_boards(levels: Mapping[str, CardLevel], path: Path) -> None:
    """Write the factor on the energy of memory of each board."""
    source = (
        "levels of memory of cards whose part number was read (python -m "
        "wattcast.lab.fit.card_levels)"
    )
    boards = {
        board: {
            "factors": {"dram_energy": round(float(np.exp(np.mean(board_levels))), 3)},
            "cards": len(board_levels),
        }
        for board, board_levels in group_boards(levels).items()
    }
    path.write_text(
        yaml.safe_dump({board: fields | {"source": source} for board, fields in boards.items()})
    )


def main(database: str = "h200") -> None:
    """Print a line for each card, the leanest memory first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write boards.yaml")
    levels = load_card_levels(database)
    write = parser.parse_args().write
    _print_cards(levels)
    _print_product_times(levels)
    spread = np.std([(level.whole, level.memory) for level in levels.values()], axis=0, ddof=1)
    print(
        f"standard deviation of {len(levels)} cards: {100 * spread[0]:.1f} % and "
        f"{100 * spread[1]:.1f} %"
    )
    _print_neighbours(levels)
    if write:
        write_boards(
            levels, Path(wattcast.__file__).parent / "predictor" / "bundle" / "boards.yaml"
        )


def _print_cards(levels: Mapping[str, CardLevel]) -> None:
    for card, level in sorted(levels.items(), key=lambda item: item[1].memory):
        deviation = f"in all {100 * level.whole:+.1f} %, in memory {100 * level.memory:+.1f} %"
        took = f", {1e6 * level.product_s:.1f} us" if level.product_s else ""
        print(
            f"{card[:12]}, serial {level.serial} {level.board}: {deviation}{took} "
            f"({level.rows} sustained rows)"
        )
    for board, memory in group_boards(levels).items():
        span = f"{100 * min(memory):+.1f} to {100 * max(memory):+.1f} %"
        print(
            f"board {board}: memory {100 * np.mean(memory):+.1f} %, {span} on {len(memory)} cards"
        )


def _print_product_times(levels: Mapping[str, CardLevel]) -> None:
    """Print how long the cards with lean memory, and the others, take for the same product."""
    lean_us: list[float] = []
    hungry_us: list[float] = []
    for level in levels.values():
        if level.product_s:
            group_us = lean_us if level.memory < 0.0 else hungry_us
            group_us.append(1e6 * level.product_s)
    for name, product_us in (("lean", lean_us), ("hungry", hungry_us)):
        print(
            f"{len(product_us)} {name} cards multiply in {min(product_us):.1f} to "
            f"{max(product_us):.1f} us"
        )


def _print_neighbours(levels: Mapping[str, CardLevel]) -> None:
    """Print whether cards with near serial numbers have like memory."""
    cards = list(levels.values())
    memory = np.array([card.memory for card in cards])
    nearest = np.array([card.memory for card in find_neighbours(cards)])
    alike = int(np.sum(memory * nearest > 0.0))
    off = np.sqrt(np.mean((memory - nearest) ** 2))
    print(
        f"{alike} of {len(cards)} have memory on the side of the nearest serial number, "
        f"{100 * off:.1f} % off it"
    )


if __name__ == "__main__":
    run_module(main)
