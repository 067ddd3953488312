"""Print the errors of every calibrated card and engine on kernels that no fit saw.

One shape in five is held out of every calibration by a hash of its sizes. This table compares the
bundles that ship with these rows of the public tables, through ``check_tables``, the function
behind ``wattcast calibrate --table --check``. Products are judged from 0.1 ms on, attention and
experts whole. Collectives of H100 and GB200 follow laws that were fitted to other cards.
Run: ``python -m wattcast.lab.validate.public_checks.card_errors --reference FOLDER [CARD ...]``, or
``wattcast lab validate --ablations`` (WATTCAST_REFERENCE names the measurements).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from wattcast.calibrate.scoring import (
    LedgerRow,
    Tell,
    make_absent_row,
    make_ledger_row,
)
from wattcast.calibrate.table_fit import TableError, check_tables
from wattcast.lab.fit.ship_calibrations import CARDS, table_folder
from wattcast.lab.module_commands import require_measurements, run_module
from wattcast.lab.validate.public_checks.newer_tables import collective_card_rows

WHERE = "calibrated cards, shapes held out"
_GOALS = {
    "products": 7.0,
    "attention": 8.0,
    "experts": 11.0,
}
_AMD_PRODUCTS = 10.0
_LONG_BAND = "0.1 ms and above"


def card_rows(
    reference: Path | None,
    tell: Tell,
    cards: Sequence[str] = CARDS,
) -> list[LedgerRow]:
    """Return errors of products, attention and experts of each card and engine, and collectives."""
    if reference is None or not (reference / "aiconfigurator").is_dir():
        return [make_absent_row(WHERE, "latency", "no reference data")]
    rows = []
    for card in cards:
        tell(f"{WHERE}: {card}")
        rows += _judge_card(card, reference)
    return rows + collective_card_rows(reference / "aiconfigurator")


def _judge_card(card: str, reference: Path) -> list[LedgerRow]:
    gpu, _, engine = card.partition(":")
    folder = table_folder(gpu, reference)
    checked = check_tables([folder], gpu, engine=engine or None, held_out_alone=True)
    rows = []
    for family, goal in _GOALS.items():
        errors = [error for error in checked.errors if _is_judged(error, family)]
        count = sum(error.rows for error in errors)
        if not count:
            continue
        calibrated = sum(error.rows * error.calibrated for error in errors) / count
        forecast = sum(error.rows * error.forecast for error in errors) / count
        must: float | None = goal
        if gpu.startswith("mi"):
            must = _AMD_PRODUCTS if family == "products" else None
        row = make_ledger_row(
            f"{card}, {WHERE}",
            family,
            count,
            calibrated,
            forecast,
            must=must,
        )
        rows.append(row)
    return rows


def _is_judged(error: TableError, family: str) -> bool:
    is_long = error.band == _LONG_BAND or family != "products"
    return error.what.startswith(family) and is_long


def main() -> None:
    """Print a line a card, engine and family of kernels, with its goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "cards",
        nargs="*",
        default=CARDS,
        help="GPU or GPU:ENGINE; default: all",
    )
    parser.add_argument(
        "--reference",
        type=Path,
        required=True,
        help="folder of public rows",
    )
    options = parser.parse_args()
    require_measurements(options.reference / "aiconfigurator")
    for row in card_rows(options.reference, lambda _: None, options.cards):
        figures = f"{row['n']:>5} rows  {row['mape']:>6.2f} %  forecast {row['floor']} %"
        print(f"{row['set']:60} {row['quantity']:32} {figures}  must {row['must']}")


if __name__ == "__main__":
    run_module(main)
