"""What was never measured: whether intervals hold rows of functions, kinds, formats and sizes left out of a fit.

Things are left out as ``fit kernels`` does to learn half-widths (:mod:`wattcast.fit.unseen`). A row is counted inside
the interval that would have been learned from all other things, never from its own; each thing counts alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.arrays import Array
from wattcast.fit import kernels_data
from wattcast.fit.cards import KINDS
from wattcast.fit.kernels import idle_curve
from wattcast.fit.kernels_data import Mask
from wattcast.fit.kernels_interval import LEVEL, quantiles
from wattcast.fit.kernels_run import _one_thread
from wattcast.fit.kernels_split import HeldOut
from wattcast.fit.nearness import near_of
from wattcast.fit.unseen import LEAST_KINDS, LeftOut, apart_of, leave_out
from wattcast.fitted.widening import Why
from wattcast.uncertainty import logs_moved_out
from wattcast.validate.learning import Tell
from wattcast.validate.rows import Row, row

SAID = {
    Why.KIND: "kind of kernel never measured",
    Why.FORM: "function never measured, its kernel often",
    Why.DTYPE: "number format never measured",
    Why.SIZE: "size beyond the range",
}


def unseen_rows(gpu: str, held: HeldOut, tell: Tell) -> list[Row]:
    """Coverage of what was left out, by reason; minutes."""
    rows, chip = kernels_data.load(gpu), hardware.load(gpu)
    near = near_of(held)
    with _one_thread():
        idle = idle_curve(kernels_data.idle(gpu), chip)
        left = leave_out(rows, chip, idle, quantiles(held, near=near), near, tell)
    return counted_rows(f"{gpu} never measured", left)


def counted_rows(where: str, left: LeftOut) -> list[Row]:
    """A row of each reason and quantity with enough things left out."""
    whole = apart_of(left)
    without = {thing: apart_of(left, thing) for thing in dict.fromkeys(left.thing)}
    why, things = np.array(left.why), np.array(left.thing)
    out = []
    for quantity in KINDS:
        for reason, said in SAID.items():
            at = (why == str(reason)) & np.isfinite(getattr(left, quantity))
            if reason not in whole or len(set(things[at].tolist())) < LEAST_KINDS:
                continue
            by = np.array([getattr(without[t].get(reason, whole[reason]), quantity) for t in things[at].tolist()])
            more = _counted(left, quantity, at, by) | {"half_width": round(getattr(whole[reason], quantity), 3)}
            out.append(row(where, f"{quantity}, {said}, inside {LEVEL:.0%}", int(at.sum()), None, **more))
    return out


def _counted(left: LeftOut, quantity: str, at: Mask, by: Array) -> dict[str, Any]:
    place = slice(0, 2) if quantity == "latency" else slice(2, 4)
    ends, log_ratio, things = left.ends[at, place], getattr(left, quantity)[at], np.array(left.thing)[at]
    far = logs_moved_out(ends, by[:, np.newaxis])
    inside, plain = ((log_ratio >= e[:, 0]) & (log_ratio <= e[:, 1]) for e in (far, ends))
    names = list(dict.fromkeys(things.tolist()))

    def share(found: Mask) -> float:
        return round(100 * float(np.mean([found[things == name].mean() for name in names])), 1)

    return {
        "wanted": [85.0, 95.0],
        "coverage": share(inside),
        "without_widening": share(plain),
        "things": len(names),
        "median_width": round(100 * float(np.median(np.exp(far[:, 1]) - np.exp(far[:, 0]))), 1),
    }
