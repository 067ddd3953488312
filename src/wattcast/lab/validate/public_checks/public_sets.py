"""List the sets of ledger rows that judge Wattcast by measurements of others, which lie outside the
project.

Run: ``wattcast lab validate`` in the repository (WATTCAST_REFERENCE names the measurements).
``--ablations`` also makes the sets that take minutes.
"""

from __future__ import annotations

from pathlib import Path

from wattcast.calibrate.scoring import LedgerRow, Tell
from wattcast.lab.validate.public_checks.card_errors import WHERE as CARD_ERRORS
from wattcast.lab.validate.public_checks.card_errors import card_rows
from wattcast.lab.validate.public_checks.chips_left_out import WHERE as CHIPS_LEFT_OUT
from wattcast.lab.validate.public_checks.chips_left_out import left_out_rows
from wattcast.lab.validate.public_checks.collective_checks import (
    collective_rows,
    published_collective_rows,
)
from wattcast.lab.validate.public_checks.coverage_checks import coverage_rows
from wattcast.lab.validate.public_checks.dumped_energies import make_dumped_rows
from wattcast.lab.validate.public_checks.engine_tables import table_rows
from wattcast.lab.validate.public_checks.newer_tables import WHERE as NEWER_TABLES
from wattcast.lab.validate.public_checks.newer_tables import newer_table_rows
from wattcast.lab.validate.public_checks.other_gpu_checks import (
    calibrated_table_rows,
    kernel_table_rows,
    list_published_rows,
    other_gpu_rows,
)
from wattcast.lab.validate.public_checks.published_checks import (
    TITANX,
    V100,
    component_rows,
    power_limit_rows,
    titanx_rows,
    v100_rows,
)
from wattcast.lab.validate.public_checks.published_commands import amd_rows, ask_amd_rows
from wattcast.lab.validate.public_checks.reference_list import unjudged_rows
from wattcast.lab.validate.public_checks.served_points import WHERE as SERVED_POINTS
from wattcast.lab.validate.public_checks.served_points import served_point_rows
from wattcast.lab.validate.public_checks.served_watts import WHERE as SERVED_WATTS
from wattcast.lab.validate.public_checks.served_watts import served_rows
from wattcast.lab.validate.public_checks.training_checks import ask_training_rows, training_rows
from wattcast.lab.validate.public_checks.wide_format_checks import (
    ask_fp32_rows,
    ask_speed_rows,
    fp32_rows,
    training_speed_rows,
)
from wattcast.lab.validate.typed_commands import JudgedRow

# section of the kept results -> set and quantity of its row while it was not made, and what makes
# it
LONG_SETS = {
    "titanx": (TITANX, "power, leave one benchmark out, V inferred", titanx_rows),
    "v100": (V100, "power, leave one kernel out", v100_rows),
    "training": ("published training", "tokens/s", training_rows),
    "tables": (
        "h200 kernel tables, held out, calibrated on the other rows",
        "latency",
        calibrated_table_rows,
    ),
    "cards": (CARD_ERRORS, "latency", card_rows),
    "newer-tables": (NEWER_TABLES, "latency", newer_table_rows),
    "served-points": (SERVED_POINTS, "time between tokens", served_point_rows),
    "chips-left-out": (CHIPS_LEFT_OUT, "power", left_out_rows),
    "served-watts": (SERVED_WATTS, "power", served_rows),
    "coverage": ("coverage of 90 % intervals", "latency and power", coverage_rows),
}


def list_public_rows(reference: Path | None) -> list[JudgedRow]:
    """Return every measured row of others that a command predicts and whose figures are here, with
    the command.
    """
    rows: list[JudgedRow] = []
    if reference is not None and (reference / "energaizer").is_dir():
        rows += list_published_rows(reference)
        rows += ask_fp32_rows(reference)
    if reference is not None and (reference / "lambda").is_dir():
        rows += ask_speed_rows(reference)
    if reference is not None and (reference / "training").is_dir():
        rows += ask_training_rows(reference)
    return rows + ask_amd_rows()


def make_quick_rows(reference: Path | None, tell: Tell) -> list[LedgerRow]:
    """Return the rows of every set that takes seconds and whose measurements are here."""
    rows = component_rows(reference, tell)
    for folder, makers in (
        ("accelwattch", (make_dumped_rows,)),
        ("energaizer", (other_gpu_rows, fp32_rows)),
        ("lambda", (training_speed_rows,)),
        ("aiconfigurator", (kernel_table_rows, collective_rows, table_rows)),
        ("zeus", (power_limit_rows,)),
    ):
        if reference is not None and (reference / folder).is_dir():
            rows += [row for make in makers for row in make(reference)]
    rows += published_collective_rows() + amd_rows()
    return rows if reference is None else rows + unjudged_rows(reference)
