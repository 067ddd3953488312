"""Read how far a calibrated card is off on rows that its calibration never saw.

``errors.csv`` beside a calibration has a line for each kind of kernel and band of latency, as
``wattcast calibrate --table --check`` compares them. Products are summed up from 0.1 ms on, since
shorter ones are launches more than work; attention and experts in all bands.
"""

from __future__ import annotations

from dataclasses import dataclass

from wattcast.core import files
from wattcast.core.strict_files import read_shipped_table
from wattcast.hardware import strip_board

ERRORS_FILE = "errors.csv"
FAMILIES = ("products", "attention", "experts")
_LONG_BAND = "0.1 ms and above"
_PACKAGE = "wattcast.predictor.bundle"


@dataclass(frozen=True)
class HeldOutError:
    """The mean absolute error of a family of kernels, in percent."""

    family: str
    rows: int
    percent: float


def read_held_out_errors(gpu: str) -> tuple[HeldOutError, ...]:
    """Return the errors of a card's calibration by family; empty where none was written down."""
    name = strip_board(gpu)
    if not files(_PACKAGE).joinpath(name, ERRORS_FILE).is_file():
        return ()
    lines = read_shipped_table(_PACKAGE, f"{name}/{ERRORS_FILE}")
    errors = []
    for family in FAMILIES:
        judged = [
            line
            for line in lines
            if line["what"].startswith(family)
            and (line["latency"] == _LONG_BAND or family != "products")
        ]
        rows = sum(int(line["rows"]) for line in judged)
        if rows:
            total = sum(int(line["rows"]) * float(line["calibrated_percent"]) for line in judged)
            errors.append(HeldOutError(family, rows, round(total / rows, 1)))
    return tuple(errors)
