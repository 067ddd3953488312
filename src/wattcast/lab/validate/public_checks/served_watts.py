"""Judge served language models on B200s by the ML.ENERGY Leaderboard: watts, joules a token, and
time between tokens.

Rows are asked as ``lab/fit/served_steps.py`` says. Models that are evidence for the card's energies
are told apart from those that judge. Run: ``python -m
wattcast.lab.validate.public_checks.served_watts --reference FOLDER``, or ``wattcast lab validate
--ablations`` (WATTCAST_REFERENCE names the measurements).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from wattcast.calibrate.scoring import (
    LedgerRow,
    Tell,
    make_absent_row,
    make_ledger_row,
)
from wattcast.hardware import load_gpu
from wattcast.lab.fit.served_rows import (
    GPU,
    TABLE,
    ServedRow,
    read_served_rows,
    select_half,
)
from wattcast.lab.fit.served_steps import ask_row
from wattcast.lab.module_commands import require_measurements, run_module
from wattcast.predictor.bundle import (
    Bundle,
    bundle_for,
    forecast_bundle,
)

WHERE = "ML.ENERGY served models, B200"
# quantity of the ledger -> field of a row and of what is asked
_QUANTITIES = {
    "power": "power_w",
    "energy per token": "joules_per_token",
    "time between tokens": "between_tokens_s",
}


def served_rows(reference: Path | None, tell: Tell) -> list[LedgerRow]:
    """Return errors on served models: those left out of all fits, those that were evidence, and
    those left out by a forecast that knows no watts of the chip.
    """
    if reference is None or not (reference / TABLE).is_file():
        return [make_absent_row(WHERE, "power", "no reference data")]
    rows = read_served_rows(reference)
    judged = select_half(rows, False)
    tell(f"{WHERE}: {len(rows)} rows")
    shipped = bundle_for(load_gpu(GPU))
    no_watts = shipped.with_power_of(forecast_bundle(load_gpu(GPU)))
    ledger_rows = _judge(f"{WHERE}, models left out", judged, None)
    ledger_rows += _judge(f"{WHERE}, models left out, no watts of the chip known", judged, no_watts)
    ledger_rows += _judge(f"{WHERE}, models that were evidence", select_half(rows, True), None)
    return ledger_rows


def _judge(
    where: str,
    rows: Sequence[ServedRow],
    bundle: Bundle | None,
) -> list[LedgerRow]:
    answers = [ask_row(row, bundle) for row in rows]
    ledger_rows = []
    for quantity, name in _QUANTITIES.items():
        measured = np.array([getattr(row, name) for row in rows])
        predicted = np.array([getattr(figures, name) for figures in answers])
        ends = np.array([figures.ends[name] for figures in answers])
        error = 100.0 * np.abs(predicted / measured - 1.0)
        inside = (measured >= predicted * ends[:, 0]) & (measured <= predicted * ends[:, 1])
        ledger_rows.append(
            make_ledger_row(
                where,
                quantity,
                len(rows),
                float(error.mean()),
                median=round(float(np.median(error)), 1),
                bias=round(100.0 * float(np.median(predicted / measured - 1.0)), 1),
                coverage=round(100.0 * float(inside.mean()), 1),
            )
        )
    return ledger_rows


def main() -> None:
    """Print every row of one half, and the errors of its models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--half", choices=("evidence", "judged"), default="judged")
    parser.add_argument("--no-watts", action="store_true", help="by the forecast's energies")
    options = parser.parse_args()
    require_measurements(options.reference / "mlenergy")
    chip = load_gpu(GPU)
    bundle = bundle_for(chip)
    if options.no_watts:
        bundle = bundle.with_power_of(forecast_bundle(chip))
    rows = select_half(read_served_rows(options.reference), options.half == "evidence")
    for row in rows:
        figures = ask_row(row, bundle)
        words = []
        for name in _QUANTITIES.values():
            measured = getattr(row, name)
            error = 100.0 * (getattr(figures, name) / measured - 1.0)
            words.append(f"{name} {measured:.4g} {error:+.1f} %")
        print(f"{row.name}: {', '.join(words)}")
    for item in _judge(options.half, rows, bundle):
        print(item)


if __name__ == "__main__":
    run_module(main)
