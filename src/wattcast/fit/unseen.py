"""What it costs a fit never to have measured something: functions, kinds of kernels, formats, sizes left out in turn.

Each round leaves some of them out, a few of every family, fits the rest whole and predicts what was left out. Why a
row is outside is asked of the code that judges predictions (:func:`wattcast.uncertainty.outside`), so a half-width is
learned for the sentence it will go with: of each row, how far the ends of its family at its distance would have to be
moved out, in quadrature, to hold it; of all rows of a reason, the 90th percentile, each thing left out counting
alike, since the next thing not measured is another thing and not another row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.fit.beside import each
from wattcast.fit.kernels import bundle_of, fit_rows, random, settled
from wattcast.fit.kernels_data import Mask, Rows
from wattcast.fit.kernels_split import analyse_rows, predict_with
from wattcast.fit.nearness import weighted_quantile
from wattcast.fitted.bundle import Residual
from wattcast.fitted.forms import form_of
from wattcast.fitted.widening import Apart, Line, Why, Widening, usual
from wattcast.hardware import Gpu
from wattcast.kernels import Kernels, kernels_of, reference_of
from wattcast.power.static import IdlePower
from wattcast.uncertainty import kernel_ends, outside

LEVEL = 0.9
ROUNDS = {"form": 4, "kind": 4, "dtype": 3, "size": 4}  # fits of what is left, by what is left out
LEAST_ROWS = 3  # bursts of a thing, to be left out
MOST = 1 / 3  # of its family's bursts: without more than that there is little left of a family
CUT = 0.08  # of a family's rows beyond a size left out
LEAST_KINDS = 3  # of a reason, to learn from; fewer: the usual half-width

Names = npt.NDArray[np.str_]


@dataclass(frozen=True)
class LeftOut:
    """Rows predicted by a fit that never met something of theirs; each ``(row,)``."""

    row: npt.NDArray[np.int64]  # place in the database
    thing: tuple[str, ...]  # what was left out
    why: tuple[str, ...]  # as a prediction would say; empty: it would not
    latency: Array  # log of measured over predicted of a burst; NaN of others
    power: Array  # the same of a sustained row
    ends: Array  # (row, 4) logs of the ends as of rows inside

    def needed(self, quantity: str) -> Array:
        """How far the ends must be moved out to hold each row; NaN where it has no such figure."""
        log_ratio = getattr(self, quantity)
        low, high = self.ends[:, :2].T if quantity == "latency" else self.ends[:, 2:].T
        middle = np.clip(0.0, low, high)
        inner = np.where(log_ratio > middle, high, low) - middle
        return np.asarray(np.sqrt(np.maximum((log_ratio - middle) ** 2 - inner**2, 0.0)))


def learn(
    rows: Rows,
    gpu: Gpu,
    idle: IdlePower,
    residuals: Mapping[str, Residual],
    near: tuple[Line, Line],
    tell: Callable[[str], None] | None = None,
) -> Widening:
    """What distance and things never measured add to an interval, of a fit on ``rows``."""
    left = leave_out(rows, gpu, idle, residuals, near, tell)
    apart = apart_of(left)
    said = f"{rows.source}: {len(set(left.thing))} functions, kinds, formats and sizes left out of fits in turn"
    every = {why: apart.get(why, usual().apart[why]) for why in Why}
    return Widening(*near, every, said)


def apart_of(left: LeftOut, without: str = "") -> dict[Why, Apart]:
    """Half-width of each reason with enough things left out; ``without`` one of them."""
    found = {}
    things, whys = np.array(left.thing), np.array(left.why)
    for why in Why:
        at = (whys == str(why)) & (things != without)
        if len(set(things[at].tolist())) >= LEAST_KINDS:
            time, power = (_half_width(left.needed(q)[at], things[at]) for q in ("latency", "power"))
            rest = usual().apart[why]
            found[why] = Apart(
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


def leave_out(
    rows: Rows,
    gpu: Gpu,
    idle: IdlePower,
    residuals: Mapping[str, Residual],
    near: tuple[Line, Line],
    tell: Callable[[str], None] | None = None,
) -> LeftOut:
    """Every row that some round left out, as the fit of that round predicts it."""
    plan = rounds(rows, gpu)
    work = ((rows, thing, gpu, idle, residuals, near) for thing in plan)
    found = []
    for i, one in enumerate(each(_round, work, len(rows))):
        found.append(one)
        if tell:
            tell(f"left out {i + 1} of {len(plan)}")
    return LeftOut(
        np.concatenate([one.row for one in found]),
        tuple(name for one in found for name in one.thing),
        tuple(why for one in found for why in one.why),
        *(np.concatenate([getattr(one, name) for one in found]) for name in ("latency", "power", "ends")),
    )


def _round(
    rows: Rows,
    thing: Names,
    gpu: Gpu,
    idle: IdlePower,
    residuals: Mapping[str, Residual],
    near: tuple[Line, Line],
) -> LeftOut:
    """One fit without the rows that have a thing's name, and what it says of them."""
    gone = thing != ""
    known = rows.where(~gone)
    bundle = bundle_of(fit_rows(known, gpu, idle), known, gpu, residuals, "")
    bundle = replace(bundle, widening=replace(usual(), near=near[0], near_power=near[1]))
    at = np.flatnonzero(gone & rows.is_kind("burst", "sustained") & rows.fit & random(rows))
    test = rows.where(np.isin(np.arange(len(rows)), at))
    predicted = predict_with(bundle, test, gpu)
    timeline = analyse_rows(bundle, test, gpu)
    burst = test.is_kind("burst")
    power_w, _, latency_s = settled(test)
    return LeftOut(
        at,
        tuple(thing[at].tolist()),
        tuple("" if reason is None else str(reason.why) for reason in outside(timeline, bundle)),
        np.where(burst, np.log(latency_s / predicted[:, 0]), np.nan),
        np.where(burst, np.nan, np.log(power_w / predicted[:, 1])),
        kernel_ends(timeline, bundle, [None] * len(test)),
    )


def rounds(rows: Rows, gpu: Gpu) -> list[Names]:
    """Of each round, what of every row is left out; empty where a row stays."""
    kernels = kernels_of(rows.ops, rows.conditions, gpu, reference_of(gpu), ())
    learner = kernels.work.learner
    counted = rows.is_kind("burst") & rows.fit & random(rows)
    named = {
        "form": [form_of(op) for op in rows.ops],
        "kind": list(kernels.work.group),
        "dtype": [str(op.dtype) for op in rows.ops],
    }
    found = []
    for what, names in named.items():
        thing = np.array([f"{own}: {name}" for own, name in zip(learner, names, strict=True)])
        dealt = _dealt(thing, np.array(learner), counted, ROUNDS[what])
        found += [np.where(dealt == k, thing, "") for k in range(ROUNDS[what]) if (dealt == k).any()]
    return found + _sizes(kernels, counted)


def _dealt(thing: Names, learner: Names, counted: Mask, hands: int) -> npt.NDArray[np.int64]:
    """The round of each row, things of a family spread over all of them; -1: it stays in every one."""
    of_thing, of_family = Counter(thing[counted].tolist()), Counter(learner[counted].tolist())
    kept = [t for t, n in of_thing.items() if LEAST_ROWS <= n <= MOST * of_family[t.partition(":")[0]]]
    order = sorted(kept, key=lambda t: (t.partition(":")[0], -of_thing[t], t))
    place = {t: i % hands for i, t in enumerate(order)}
    return np.array([place.get(t, -1) for t in thing.tolist()])


def _sizes(kernels: Kernels, counted: Mask) -> list[Names]:
    """Rounds without the largest or the smallest of one size of every family."""
    learner, features = np.array(kernels.work.learner), kernels.work.features
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
    """The smallest and the largest of a size, where a few rows lie there and not more."""
    here = values[own & counted]
    if here.size == 0 or np.ptp(here) == 0.0:
        return []
    low, high = np.quantile(here, [CUT, 1.0 - CUT])
    both = ((f"small {name}", own & (values < low)), (f"large {name}", own & (values > high)))
    return [(label, gone) for label, gone in both if (gone & counted).sum() >= LEAST_ROWS]
