"""Check whether intervals hold rows of functions, kinds, formats and sizes that were left out of a
fit.

Run: ``python -m wattcast.lab.validate.long_checks.never_measured`` (minutes; ``wattcast lab
validate`` then lists the rows).

Things are left out as ``lab fit kernels`` does to learn half-widths (``fit.unseen``). A row is
counted inside the interval that would have been learned from all other things, never from its own;
each thing counts alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.calibrate import kernel_rows
from wattcast.calibrate.latency_fit import one_thread
from wattcast.calibrate.row_prediction import INTERVAL_LEVEL
from wattcast.calibrate.scoring import (
    LedgerRow,
    Tell,
    make_ledger_row,
)
from wattcast.core.arrays import Array, Mask
from wattcast.lab.fit.database_fit import KIND_OF_QUANTITY, load_held_out
from wattcast.lab.fit.held_out import (
    LEAST_KINDS,
    HeldOutRows,
    LeftOutRows,
    fit_interval_ends,
    fit_nearness,
    fit_reason_widening,
    predict_left_out,
)
from wattcast.lab.fit.kernel_fit import fit_idle_curve
from wattcast.predictor.bundle.support_widening import OutsideReason
from wattcast.predictor.prediction_interval import widen_log_ends

SAID = {
    OutsideReason.KIND: "kind of kernel never measured",
    OutsideReason.FORM: "function never measured, its kernel often",
    OutsideReason.DTYPE: "number format never measured",
    OutsideReason.SIZE: "size beyond the range",
}


def unseen_rows(
    gpu: str,
    held_rows: HeldOutRows,
    tell: Tell,
) -> list[LedgerRow]:
    """Coverage of what was left out, by reason; minutes."""
    rows = kernel_rows.load_kernel_rows(gpu)
    chip = hardware.load_gpu(gpu)
    near = fit_nearness(held_rows)
    with one_thread():
        idle = fit_idle_curve(kernel_rows.load_idle_rows(gpu), chip)
        left_out = predict_left_out(
            rows,
            chip,
            idle,
            fit_interval_ends(held_rows, near=near),
            near,
            tell,
        )
    return counted_rows(f"{gpu} never measured", left_out)


def counted_rows(where: str, left_out: LeftOutRows) -> list[LedgerRow]:
    """A row of each reason and quantity with enough things left out."""
    whole = fit_reason_widening(left_out)
    without = {
        thing: fit_reason_widening(left_out, thing) for thing in dict.fromkeys(left_out.thing)
    }
    why = np.array(left_out.why)
    things = np.array(left_out.thing)
    out = []
    for quantity in KIND_OF_QUANTITY:
        for reason, description in SAID.items():
            at = (why == str(reason)) & np.isfinite(getattr(left_out, quantity))
            if reason not in whole or len(set(things[at].tolist())) < LEAST_KINDS:
                continue
            by = np.array(
                [
                    getattr(without[t].get(reason, whole[reason]), quantity)
                    for t in things[at].tolist()
                ]
            )
            more = _counted(left_out, quantity, at, by) | {
                "half_width": round(getattr(whole[reason], quantity), 3)
            }
            out.append(
                make_ledger_row(
                    where,
                    f"{quantity}, {description}, inside {INTERVAL_LEVEL:.0%}",
                    int(at.sum()),
                    None,
                    **more,
                )
            )
    return out


def _counted(
    left_out: LeftOutRows,
    quantity: str,
    at: Mask,
    by: Array,
) -> dict[str, Any]:
    place = slice(0, 2) if quantity == "latency" else slice(2, 4)
    ends = left_out.ends[at, place]
    log_ratio = getattr(left_out, quantity)[at]
    things = np.array(left_out.thing)[at]
    far = widen_log_ends(ends, by[:, np.newaxis])
    inside, plain = ((log_ratio >= e[:, 0]) & (log_ratio <= e[:, 1]) for e in (far, ends))
    names = list(dict.fromkeys(things.tolist()))

    def share(covered: Mask) -> float:
        return round(100 * float(np.mean([covered[things == name].mean() for name in names])), 1)

    return {
        "wanted": [85.0, 95.0],
        "coverage": share(inside),
        "without_widening": share(plain),
        "things": len(names),
        "median_width": round(100 * float(np.median(np.exp(far[:, 1]) - np.exp(far[:, 0]))), 1),
    }


def never_measured_rows(gpu: str, tell: Tell) -> list[LedgerRow]:
    """Return the rows of this study for the held-out predictions that ship."""
    return unseen_rows(gpu, load_held_out(gpu), tell)


if __name__ == "__main__":
    from wattcast.lab.validate.long_checks.ledger_rows import run_study

    run_study("never-measured", never_measured_rows)
