"""Learn how much wider an interval must be for things that were never measured.

Functions, kinds of kernels, formats and sizes are left out of fits in turn: each round leaves some of them out, a
few of every family, fits the rest and predicts what was left out. The code that judges predictions
(``find_unmeasured``) gives the reason why a row is outside, so a half-width is learned for the sentence it goes
with: for each row, how far the ends of its family at its distance would have to move out, in quadrature, to hold
it; for all rows of a reason, the 90th percentile. Each thing left out counts alike, since the next thing not
measured is another thing and not another row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array, Mask
from wattcast.fit.held_out import analyse_rows, predict_with_bundle, weighted_quantile
from wattcast.fit.kernel_fit import build_bundle, fit_kernel_rows
from wattcast.fit.kernel_rows import KernelRows, on_random_data, run_each, settled_figures
from wattcast.hardware import Gpu
from wattcast.kernels import Kernels, build_kernels, reference_chip
from wattcast.power.power_model import IdlePower
from wattcast.predictor.bundle.bundle_file import ResidualEnds
from wattcast.predictor.bundle.support_widening import (
    NearnessLine,
    OutsideReason,
    ReasonWidening,
    Widening,
    default_widening,
)
from wattcast.predictor.uncertainty import find_unmeasured, kernel_log_ends

LEVEL = 0.9
ROUNDS = {"form": 4, "kind": 4, "dtype": 3, "size": 4}  # fits of what is left, by what is left out
LEAST_ROWS = 3  # bursts of a thing, to be left out
MOST = 1 / 3  # of its family's bursts: without more than that there is little left of a family
CUT = 0.08  # of a family's rows beyond a size left out
LEAST_KINDS = 3  # of a reason, to learn from; fewer: the usual half-width

Names = npt.NDArray[np.str_]


@dataclass(frozen=True)
class LeftOutRows:
    """Rows predicted by a fit that left out something of theirs; each ``(row,)``."""

    row: npt.NDArray[np.int64]  # place in the database
    thing: tuple[str, ...]  # what was left out
    why: tuple[str, ...]  # as a prediction would say; empty: it would not
    latency: Array  # log of measured over predicted of a burst; NaN of others
    power: Array  # the same of a sustained row
    ends: Array  # (row, 4) logs of the ends as of rows inside

    def needed(self, quantity: str) -> Array:
        """Return how far the ends must move out to hold each row; NaN where it has no such figure."""
        log_ratio = getattr(self, quantity)
        low, high = self.ends[:, :2].T if quantity == "latency" else self.ends[:, 2:].T
        middle = np.clip(0.0, low, high)
        inner = np.where(log_ratio > middle, high, low) - middle
        return np.asarray(np.sqrt(np.maximum((log_ratio - middle) ** 2 - inner**2, 0.0)))


def fit_widening(
    rows: KernelRows,
    gpu: Gpu,
    idle: IdlePower,
    residuals: Mapping[str, ResidualEnds],
    near: tuple[NearnessLine, NearnessLine],
    tell: Callable[[str], None] | None = None,
) -> Widening:
    """Fit what distance and unmeasured things add to the intervals of a fit on ``rows``."""
    left = predict_left_out(rows, gpu, idle, residuals, near, tell)
    apart = fit_reason_widening(left)
    said = f"{rows.source}: {len(set(left.thing))} functions, kinds, formats and sizes left out of fits in turn"
    every = {why: apart.get(why, default_widening().apart[why]) for why in OutsideReason}
    return Widening(near[0], every, said, near[1])


def fit_reason_widening(left: LeftOutRows, without: str = "") -> dict[OutsideReason, ReasonWidening]:
    """Fit the half-width of each reason with enough things left out, ``without`` one of them."""
    found = {}
    things, whys = np.array(left.thing), np.array(left.why)
    for why in OutsideReason:
        at = (whys == str(why)) & (things != without)
        if len(set(things[at].tolist())) >= LEAST_KINDS:
            time, power = (_half_width(left.needed(q)[at], things[at]) for q in ("latency", "power"))
            rest = default_widening().apart[why]
            found[why] = ReasonWidening(
                rest.latency if time is None else time,
                rest.power if power is None else power,
                int(at.sum()),
                len(set(things[at].tolist())),
            )
    return found


def _half_width(needed: Array, things: Names) -> float | None:
    known = np.isfinite(needed)
    count = Counter(things[known].tolist())
    if len(count) < LEAST_KINDS:
        return None
    weight = np.array([1.0 / count[thing] for thing in things[known]])
    return round(weighted_quantile(needed[known], weight, LEVEL), 4)


def predict_left_out(
    rows: KernelRows,
    gpu: Gpu,
    idle: IdlePower,
    residuals: Mapping[str, ResidualEnds],
    near: tuple[NearnessLine, NearnessLine],
    tell: Callable[[str], None] | None = None,
) -> LeftOutRows:
    """Predict every row that some round left out from the fit of that round."""
    plan = plan_rounds(rows, gpu)
    work = ((rows, thing, gpu, idle, residuals, near) for thing in plan)
    found = []
    for i, one in enumerate(run_each(_round, work, len(rows))):
        found.append(one)
        if tell:
            tell(f"left out {i + 1} of {len(plan)}")
    return LeftOutRows(
        np.concatenate([one.row for one in found]),
        tuple(name for one in found for name in one.thing),
        tuple(why for one in found for why in one.why),
        *(np.concatenate([getattr(one, name) for one in found]) for name in ("latency", "power", "ends")),
    )


def _round(
    rows: KernelRows,
    thing: Names,
    gpu: Gpu,
    idle: IdlePower,
    residuals: Mapping[str, ResidualEnds],
    near: tuple[NearnessLine, NearnessLine],
) -> LeftOutRows:
    """Fit without the rows that have a thing's name, and predict those rows."""
    gone = thing != ""
    known = rows.select_rows(~gone)
    bundle = build_bundle(fit_kernel_rows(known, gpu, idle), known, gpu, residuals, "")
    bundle = replace(bundle, widening=default_widening().with_nearness(near))
    at = np.flatnonzero(gone & rows.is_kind("burst", "sustained") & rows.fit & on_random_data(rows))
    test = rows.select_rows(np.isin(np.arange(len(rows)), at))
    predicted = predict_with_bundle(bundle, test, gpu)
    timeline = analyse_rows(bundle, test, gpu)
    burst = test.is_kind("burst")
    power_w, _, latency_s = settled_figures(test)
    return LeftOutRows(
        at,
        tuple(thing[at].tolist()),
        tuple("" if reason is None else str(reason.reason) for reason in find_unmeasured(timeline, bundle)),
        np.where(burst, np.log(latency_s / predicted[:, 0]), np.nan),
        np.where(burst, np.nan, np.log(power_w / predicted[:, 1])),
        kernel_log_ends(timeline, bundle, [None] * len(test)),
    )


def plan_rounds(rows: KernelRows, gpu: Gpu) -> list[Names]:
    """Plan the rounds: for each, the thing of every row that is left out; empty where a row stays."""
    kernels = build_kernels(rows.ops, rows.conditions, gpu, reference_chip(gpu), ())
    learner = kernels.work.root_family
    counted = rows.is_kind("burst") & rows.fit & on_random_data(rows)
    named = {
        "form": [op.form for op in rows.ops],
        "kind": list(kernels.work.kernel_family),
        "dtype": [str(op.dtype) for op in rows.ops],
    }
    found = []
    for what, names in named.items():
        thing = np.array([f"{own}: {name}" for own, name in zip(learner, names, strict=True)])
        dealt = _dealt(thing, np.array(learner), counted, ROUNDS[what])
        found += [np.where(dealt == k, thing, "") for k in range(ROUNDS[what]) if (dealt == k).any()]
    return found + _sizes(kernels, counted)


def _dealt(thing: Names, learner: Names, counted: Mask, hands: int) -> npt.NDArray[np.int64]:
    """Deal the things of a family to rounds; return the round of each row, -1 where it always stays."""
    of_thing, of_family = Counter(thing[counted].tolist()), Counter(learner[counted].tolist())
    kept = [t for t, n in of_thing.items() if LEAST_ROWS <= n <= MOST * of_family[t.partition(":")[0]]]
    order = sorted(kept, key=lambda t: (t.partition(":")[0], -of_thing[t], t))
    place = {t: i % hands for i, t in enumerate(order)}
    return np.array([place.get(t, -1) for t in thing.tolist()])


def _sizes(kernels: Kernels, counted: Mask) -> list[Names]:
    """Plan rounds without the largest or the smallest of one size of every family."""
    learner, features = np.array(kernels.work.root_family), kernels.work.features
    found = [np.full(len(learner), "", dtype="<U64") for _ in range(ROUNDS["size"])]
    for family in dict.fromkeys(learner.tolist()):
        own = learner == family
        cuts = [
            cut for name in features if name.startswith("log_") for cut in _cuts(name, features[name], own, counted)
        ]
        step = max(len(cuts) // len(found), 1)
        for k, names in enumerate(found):
            at = k * step + k % 2  # now at the small end, now at the large
            if at < len(cuts):
                label, gone = cuts[at]
                names[gone] = f"{family}: {label}"
    return [names for names in found if (names != "").any()]


def _cuts(name: str, values: Array, own: Mask, counted: Mask) -> list[tuple[str, Mask]]:
    """Return masks of the smallest and the largest of a size, where a few rows lie there and not more."""
    here = values[own & counted]
    if here.size == 0 or np.ptp(here) == 0.0:
        return []
    low, high = np.quantile(here, [CUT, 1.0 - CUT])
    both = ((f"small {name}", own & (values < low)), (f"large {name}", own & (values > high)))
    return [(label, gone) for label, gone in both if (gone & counted).sum() >= LEAST_ROWS]
