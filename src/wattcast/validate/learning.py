"""Learning curves: the error on the same held-out rows from a sixteenth, an eighth ... and all of the training rows.

Each fold is held out in turn; of the other four, nested subsets of shapes in a random order (several orders) are
fitted whole, so that every stage learns from the subset alone. Results are kept by fold and order, so a study that
was stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.arrays import Array
from wattcast.fit import kernels_data
from wattcast.fit.cards import ALL, KINDS, noise
from wattcast.fit.kernels import fit_rows, idle_curve, random, settled
from wattcast.fit.kernels_data import Mask, Rows
from wattcast.fit.kernels_run import _one_thread
from wattcast.fit.kernels_split import FOLDS, folds_of, predict_rows, shape_of
from wattcast.fit.power_law import Learned, learned
from wattcast.hardware import Gpu
from wattcast.power.static import IdlePower
from wattcast.validate.rows import Row, absent, row
from wattcast.validate.store import kept, seen

SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
ORDERS = 2
QUANTITIES = tuple(KINDS)
WORTH_DOUBLING = 0.08  # of the error: what another doubling has to buy to call rows the limit
NEAR_NOISE = 2.0  # times the error of repeats: below, noise is the limit
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Curve:
    """Error in percent against rows of one family, and what it says."""

    quantity: str
    family: str
    tested: int
    rows: Array  # (share,) in the training folds, on average
    error: Array  # (share,) percent
    spread: Array  # (share,) percent: standard deviation between orders
    law: Learned
    noise: float | None  # percent: what repeats of one row differ from their mean

    @property
    def limited_by(self) -> str:
        """What keeps the error where it is: measurement noise, the number of rows, or the model."""
        if self.noise is not None and self.error[-1] < NEAR_NOISE * self.noise:
            return "noise"
        if self.law.buys_ends[0] > WORTH_DOUBLING:
            return "rows"
        return "model" if self.law.buys_ends[1] < WORTH_DOUBLING else "rows or model"


def learning_rows(gpu: str, variables: Mapping[str, str], tell: Tell, long: bool, again: bool = False) -> list[Row]:
    """The section of the ledger; one row that says how to get it where nothing was kept."""
    sections = [_section(gpu, fold, order) for fold in range(FOLDS) for order in range(ORDERS)]
    if not long and not all(seen(name, variables) for name in sections):
        return [absent(f"{gpu} learning", ALL, "takes minutes: run `wattcast validate --learning`")]
    return [_row(gpu, curve) for curve in curves(gpu, variables, tell, again and long)]


def curves(gpu: str, variables: Mapping[str, str], tell: Tell, again: bool = False) -> list[Curve]:
    """Latency of bursts and power of sustained rows, overall and by family."""
    rows = kernels_data.load(gpu)
    points = study(gpu, rows, variables, tell, again)
    floor = noise(gpu)
    _, shape = np.unique([shape_of(op) for op in rows.ops], return_inverse=True)
    found = []
    for quantity, kind in KINDS.items():
        at = _tested(rows, kind)
        families = np.array(rows.family)[at]
        for family in (ALL, *dict.fromkeys(families.tolist())):
            mask = np.ones(len(families), dtype=bool) if family == ALL else families == family
            error = points.error[quantity][:, at][:, mask]  # (order, row, share)
            count = np.maximum(points.trained[quantity][family], 0.5)
            found.append(_curve(quantity, family, error, count, shape[at][mask], floor.get((kind, family))))
    return found


def _curve(
    quantity: str, family: str, error: Array, count: Array, shape: npt.NDArray[np.int64], noise: float | None
) -> Curve:
    each = 100.0 * error.mean(axis=1)  # (order, share)
    law = learned(count, 100.0 * error.mean(axis=0), shape)
    return Curve(quantity, family, error.shape[1], count, each.mean(axis=0), each.std(axis=0), law, noise)


@dataclass(frozen=True)
class Points:
    """Absolute relative errors ``(order, row, share)``, NaN where a row has no such figure; rows trained on."""

    error: dict[str, Array]
    trained: dict[str, dict[str, Array]]  # quantity -> family -> (share,)


def study(gpu: str, rows: Rows, variables: Mapping[str, str], tell: Tell, again: bool = False) -> Points:
    """Every fold, order and share; kept ones are read."""
    chip = hardware.load(gpu)
    predict = partial(_fitted, chip, idle_curve(kernels_data.idle(gpu), chip))
    fold = folds_of(rows)
    error = {quantity: np.full((ORDERS, len(rows), len(SHARES)), np.nan) for quantity in QUANTITIES}
    counted: dict[str, list[Array]] = {quantity: [] for quantity in QUANTITIES}
    for k in range(FOLDS):
        for order in range(ORDERS):
            make = partial(_one, rows, fold, k, order, predict, tell)
            for entry in kept(_section(gpu, k, order), make, variables, again):
                _place(entry, rows, fold == k, order, error)
            subsets = [(fold != k) & (nested(rows, k, order) < share) for share in SHARES]
            for quantity in QUANTITIES:
                counted[quantity].append(_trained(rows, subsets, quantity))
    for found in error.values():
        found[1:, :, -1] = found[0, :, -1]  # all rows are the same in every order
    families = (ALL, *dict.fromkeys(rows.family))
    means = {q: dict(zip(families, np.mean(counts, axis=0), strict=True)) for q, counts in counted.items()}
    return Points(error, means)


Predict = Callable[[Rows, Rows], Array]  # training rows, test rows -> latency, power, clock


def _fitted(chip: Gpu, idle: IdlePower, train: Rows, test: Rows) -> Array:
    with _one_thread():
        return predict_rows(fit_rows(train, chip, idle), test, chip)


def _one(
    rows: Rows, fold: npt.NDArray[np.int64], k: int, order: int, predict: Predict, tell: Tell
) -> list[dict[str, Any]]:
    """One fold held out, one order of shapes: errors at every share."""
    place = nested(rows, k, order)
    found = []
    power_w, _, latency_s = settled(rows)
    true = {"latency": latency_s, "power": power_w}
    test = (_tested(rows, "burst") | _tested(rows, "sustained")) & (fold == k)
    for share in SHARES if order == 0 else SHARES[:-1]:
        train = (fold != k) & (place < share)
        tell(f"learning: fold {k + 1} of {FOLDS}, order {order + 1} of {ORDERS}, {int(train.sum())} rows")
        predicted = predict(rows.where(train), rows.where(test))
        each = {
            q: np.abs(predicted[:, i] / true[q][test] - 1.0)[_tested(rows, kind)[test]]
            for i, (q, kind) in enumerate(KINDS.items())
        }
        found.append({"share": share, "error": {q: [round(float(e), 5) for e in v] for q, v in each.items()}})
    return found


def nested(rows: Rows, fold: int, order: int) -> Array:
    """Place of each row's shape in a random order, 0 to 1: rows below a share are also below a larger one."""
    _, shape = np.unique([shape_of(op) for op in rows.ops], return_inverse=True)
    count = int(shape.max()) + 1
    return np.asarray(np.random.default_rng([fold, order]).permutation(count)[shape] / count)


def _trained(rows: Rows, subsets: list[Mask], quantity: str) -> Array:
    """Rows that latency or power learns from, in all and by family, of each subset: ``(family, subset)``."""
    families, usable = np.array(rows.family), _tested(rows, KINDS[quantity])
    used = [families[subset & usable] for subset in subsets]
    of = [[(some == family).sum() for some in used] for family in dict.fromkeys(rows.family)]
    return np.array([[len(some) for some in used], *of], dtype=np.float64)


def _place(entry: dict[str, Any], rows: Rows, inside: Mask, order: int, error: dict[str, Array]) -> None:
    share = SHARES.index(entry["share"])
    for quantity, kind in KINDS.items():
        error[quantity][order, inside & _tested(rows, kind), share] = entry["error"][quantity]


def _tested(rows: Rows, kind: str) -> Mask:
    """First rows of a kind on random data, not flagged, with the figure the kind is for."""
    power_w, _, latency_s = settled(rows)
    figure = latency_s if kind == "burst" else power_w
    return np.asarray(rows.is_kind(kind) & random(rows) & rows.fit & (rows.repeat == 0) & np.isfinite(figure))


def _section(gpu: str, fold: int, order: int) -> str:
    return f"learning-{gpu}-{fold}-{order}"


def _row(gpu: str, curve: Curve) -> Row:
    law = curve.law
    more: dict[str, Any] = {
        "trained_on": [round(n) for n in curve.rows.tolist()],
        "errors": [round(e, 1) for e in curve.error.tolist()],
        "law_floor": _percent(law.law.floor, law.floor),
        "rate": round(law.law.rate, 2),
        "twice_the_rows": _percent(law.doubled, law.doubled_ends),
        "noise": None if curve.noise is None else round(curve.noise, 2),
        "limited_by": curve.limited_by,
    }
    return row(f"{gpu} learning, {curve.quantity}", curve.family, curve.tested, float(curve.error[-1]), **more)


def _percent(value: float, ends: tuple[float, float]) -> str:
    return f"{value:.1f} [{ends[0]:.1f} to {ends[1]:.1f}]"
