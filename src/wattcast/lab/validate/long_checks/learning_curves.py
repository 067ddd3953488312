"""Learning curves: the error on the same held-out rows from a sixteenth, an eighth ... and all of
the training rows.

Run: ``python -m wattcast.lab.validate.long_checks.learning_curves [--figures FOLDER]`` (minutes; a
study that was stopped goes on where it was; ``wattcast lab validate`` then lists the rows).

Each fold is held out in turn. Nested subsets of the shapes of the other four, in a random order
(several orders), are fitted whole, so that every stage learns from the subset alone. An error falls
with the number of rows as e(n) = floor + scale·n^-rate; such laws hold over the range that matters
[Viering2023]. A floor far below what was seen is an extrapolation, so every figure comes with an
interval from resampled shapes."""

from __future__ import annotations

import os
import sys
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.calibrate import kernel_rows
from wattcast.calibrate.kernel_rows import (
    FOLDS,
    KernelRows,
    assign_folds,
    on_random_data,
    settled_figures,
    shape_name,
)
from wattcast.calibrate.latency_fit import one_thread
from wattcast.calibrate.scoring import LedgerRow, make_ledger_row
from wattcast.core.arrays import Array, Mask
from wattcast.hardware import Gpu
from wattcast.lab.fit.database_fit import (
    ALL_FAMILIES,
    KIND_OF_QUANTITY,
    repeat_log_ratios,
)
from wattcast.lab.fit.kernel_fit import fit_idle_curve, fit_kernel_rows
from wattcast.lab.validate.ledger import load_or_make_rows
from wattcast.lab.validate.long_checks.ablations import predict_with_fit
from wattcast.power.power_model import IdlePower
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.report.figure_style import add_caption, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from wattcast.report.figure_style import save_figure

RATES = np.linspace(
    0.1, 1.2, 45
)  # slower than 0.1 is no learning, faster than 1 is not seen of noisy targets
DRAWS = 200
LEVEL = 0.9


@dataclass(frozen=True)
class PowerLaw:
    """e(n) = ``floor`` + ``scale``·n^-``rate``, in the unit of the errors it was fitted to."""

    floor: float
    scale: float
    rate: float

    def at(self, count: npt.ArrayLike) -> Array:
        """The error with ``count`` rows."""
        return np.asarray(
            self.floor + self.scale * np.asarray(count, dtype=np.float64) ** -self.rate
        )


@dataclass(frozen=True)
class LearningCurve:
    """A law with 90 % intervals of its floor and of what twice the rows would leave."""

    law: PowerLaw
    floor: tuple[float, float]
    doubled: float  # the error with twice the rows of the largest point
    doubled_ends: tuple[float, float]
    buys: float  # share of the present error that another doubling takes away, by the law
    buys_ends: tuple[float, float]


def fit_power_law(count: Array, error: Array) -> PowerLaw:
    """Fit floor, scale and rate by least squares of the relative error, none of them negative.

    >>> n = np.array([50.0, 100.0, 200.0, 400.0])
    >>> law = fit_power_law(n, 4.0 + 60.0 * n**-0.5)
    >>> round(law.floor, 1), round(law.rate, 2)
    (4.0, 0.5)
    """
    falling = count[np.newaxis, :] ** -RATES[:, np.newaxis] / error  # (rate, point), relative
    flat = 1.0 / error
    # normal equations of two non-negative unknowns: both, or the better one alone
    ff = float(flat @ flat)
    gg = (falling**2).sum(axis=-1)
    fg = falling @ flat
    f1 = float(flat.sum())
    g1 = falling.sum(axis=-1)
    determinant = ff * gg - fg**2
    floor = np.where(
        determinant > 0, (f1 * gg - g1 * fg) / np.where(determinant > 0, determinant, 1.0), 0.0
    )
    scale = np.where(
        determinant > 0, (g1 * ff - f1 * fg) / np.where(determinant > 0, determinant, 1.0), 0.0
    )
    scale = np.where(floor < 0, g1 / gg, scale)
    floor = np.where(floor < 0, 0.0, floor)
    floor = np.where(scale < 0, f1 / ff, floor)
    scale = np.where(scale < 0, 0.0, scale)
    misfit = ((floor[:, None] * flat + scale[:, None] * falling - 1.0) ** 2).sum(axis=-1)
    best = int(np.argmin(misfit))
    return PowerLaw(float(floor[best]), float(scale[best]), float(RATES[best]))


def fit_learning_curve(
    count: Array,
    error: Array,
    cluster: npt.NDArray[np.int64],
    seed: int = 0,
) -> LearningCurve:
    """The law of the mean of ``error`` ``(row, point)``; intervals from rows resampled by
    ``cluster``.
    """
    law = fit_power_law(count, error.mean(axis=0))
    names, place = np.unique(cluster, return_inverse=True)
    sums = np.stack([np.bincount(place, column, len(names)) for column in error.T], axis=-1)
    sizes = np.bincount(place, minlength=len(names)).astype(np.float64)
    rng = np.random.default_rng(seed)
    picks = rng.multinomial(len(names), np.full(len(names), 1.0 / len(names)), DRAWS)
    means = (picks @ sums) / (picks @ sizes)[:, np.newaxis]
    laws = [fit_power_law(count, mean) for mean in means]
    last = float(count[-1])
    doubled = [float(one.at(2.0 * last)) for one in laws]
    buys = [_buys(one, last) for one in laws]
    return LearningCurve(
        law,
        _ends([one.floor for one in laws]),
        float(law.at(2.0 * last)),
        _ends(doubled),
        _buys(law, last),
        _ends(buys),
    )


def _buys(law: PowerLaw, count: float) -> float:
    return float(1.0 - law.at(2.0 * count) / law.at(count))


def _ends(values: list[float]) -> tuple[float, float]:
    tail = (1.0 - LEVEL) / 2.0
    low, high = np.quantile(values, [tail, 1.0 - tail])
    return float(low), float(high)


SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
ORDERS = 2
QUANTITIES = tuple(KIND_OF_QUANTITY)
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
    law: LearningCurve
    noise: float | None  # percent: what repeats of one row differ from their mean

    @property
    def limited_by(self) -> str:
        """What keeps the error where it is: measurement noise, the number of rows, or the model."""
        if self.noise is not None and self.error[-1] < NEAR_NOISE * self.noise:
            return "noise"
        if self.law.buys_ends[0] > WORTH_DOUBLING:
            return "rows"
        return "model" if self.law.buys_ends[1] < WORTH_DOUBLING else "rows or model"


LEAST_REPEATS = 4


def measurement_noise(database: str | Path) -> dict[tuple[str, str], float]:
    """Return the mean error in percent of a perfect prediction, by kind of row and family: |d|/√2
    of repeats.
    """
    rows = kernel_rows.load_kernel_rows(database)
    noise = {}
    for quantity, kind in KIND_OF_QUANTITY.items():
        for family in (ALL_FAMILIES, *dict.fromkeys(rows.family)):
            apart = repeat_log_ratios(rows, quantity, family)
            if apart.size >= LEAST_REPEATS:
                noise[kind, family] = float(100.0 * np.mean(np.abs(apart)) / np.sqrt(2.0))
    return noise


def learning_rows(gpu: str, tell: Tell) -> list[LedgerRow]:
    """Return a ledger row for each quantity and family; folds and orders done before are read from
    the cache.
    """
    return [_row(gpu, curve) for curve in curves(gpu, os.environ, tell, "--again" in sys.argv)]


def curves(
    gpu: str,
    variables: Mapping[str, str],
    tell: Tell,
    again: bool = False,
) -> list[Curve]:
    """Latency of bursts and power of sustained rows, overall and by family."""
    rows = kernel_rows.load_kernel_rows(gpu)
    points = study(
        gpu,
        rows,
        variables,
        tell,
        again,
    )
    floor = measurement_noise(gpu)
    _, shape = np.unique([shape_name(op) for op in rows.ops], return_inverse=True)
    all_curves = []
    for quantity, kind in KIND_OF_QUANTITY.items():
        at = _tested(rows, kind)
        families = np.array(rows.family)[at]
        for family in (ALL_FAMILIES, *dict.fromkeys(families.tolist())):
            mask = (
                np.ones(len(families), dtype=bool) if family == ALL_FAMILIES else families == family
            )
            error = points.error[quantity][:, at][:, mask]  # (order, row, share)
            count = np.maximum(points.trained[quantity][family], 0.5)
            all_curves.append(
                _curve(
                    quantity,
                    family,
                    error,
                    count,
                    shape[at][mask],
                    floor.get((kind, family)),
                )
            )
    return all_curves


def _curve(
    quantity: str,
    family: str,
    error: Array,
    count: Array,
    shape: npt.NDArray[np.int64],
    noise: float | None,
) -> Curve:
    order_errors = 100.0 * error.mean(axis=1)  # (order, share)
    law = fit_learning_curve(count, 100.0 * error.mean(axis=0), shape)
    return Curve(
        quantity,
        family,
        error.shape[1],
        count,
        order_errors.mean(axis=0),
        order_errors.std(axis=0),
        law,
        noise,
    )


@dataclass(frozen=True)
class Points:
    """Absolute relative errors ``(order, row, share)``, NaN where a row has no such figure; rows
    trained on.
    """

    error: dict[str, Array]
    trained: dict[str, dict[str, Array]]  # quantity -> family -> (share,)


def study(
    gpu: str,
    rows: KernelRows,
    variables: Mapping[str, str],
    tell: Tell,
    again: bool = False,
) -> Points:
    """Every fold, order and share; kept ones are read."""
    chip = hardware.load_gpu(gpu)
    predict = partial(_fitted, chip, fit_idle_curve(kernel_rows.load_idle_rows(gpu), chip))
    fold = assign_folds(rows)
    error = {quantity: np.full((ORDERS, len(rows), len(SHARES)), np.nan) for quantity in QUANTITIES}
    counted: dict[str, list[Array]] = {quantity: [] for quantity in QUANTITIES}
    for k in range(FOLDS):
        for order in range(ORDERS):
            make = partial(
                _one,
                rows,
                fold,
                k,
                order,
                predict,
                tell,
            )
            for entry in load_or_make_rows(_section(gpu, k, order), make, variables, again):
                _place(
                    entry,
                    rows,
                    fold == k,
                    order,
                    error,
                )
            subsets = [(fold != k) & (nested(rows, k, order) < share) for share in SHARES]
            for quantity in QUANTITIES:
                counted[quantity].append(_trained(rows, subsets, quantity))
    for fold_errors in error.values():
        fold_errors[1:, :, -1] = fold_errors[0, :, -1]  # all rows are the same in every order
    families = (ALL_FAMILIES, *dict.fromkeys(rows.family))
    means = {
        q: dict(zip(families, np.mean(counts, axis=0), strict=True))
        for q, counts in counted.items()
    }
    return Points(error, means)


Predict = Callable[
    [KernelRows, KernelRows], Array
]  # training rows, test rows -> latency, power, clock


def _fitted(
    chip: Gpu,
    idle: IdlePower,
    train: KernelRows,
    test: KernelRows,
) -> Array:
    with one_thread():
        return predict_with_fit(fit_kernel_rows(train, chip, idle), test, chip)


def _one(
    rows: KernelRows,
    fold: npt.NDArray[np.int64],
    k: int,
    order: int,
    predict: Predict,
    tell: Tell,
) -> list[dict[str, Any]]:
    """One fold held out, one order of shapes: errors at every share."""
    place = nested(rows, k, order)
    share_errors = []
    power_w, _, latency_s = settled_figures(rows)
    true = {"latency": latency_s, "power": power_w}
    test = (_tested(rows, "burst") | _tested(rows, "sustained")) & (fold == k)
    for share in SHARES if order == 0 else SHARES[:-1]:
        train = (fold != k) & (place < share)
        tell(
            f"learning: fold {k + 1} of {FOLDS}, order {order + 1} of {ORDERS}, "
            f"{int(train.sum())} rows"
        )
        predicted = predict(rows.select_rows(train), rows.select_rows(test))
        quantity_errors = {
            q: np.abs(predicted[:, i] / true[q][test] - 1.0)[_tested(rows, kind)[test]]
            for i, (q, kind) in enumerate(KIND_OF_QUANTITY.items())
        }
        share_errors.append(
            {
                "share": share,
                "error": {q: [round(float(e), 5) for e in v] for q, v in quantity_errors.items()},
            }
        )
    return share_errors


def nested(
    rows: KernelRows,
    fold: int,
    order: int,
) -> Array:
    """Place of each row's shape in a random order, 0 to 1: rows below a share are also below a
    larger one.
    """
    _, shape = np.unique([shape_name(op) for op in rows.ops], return_inverse=True)
    count = int(shape.max()) + 1
    return np.asarray(np.random.default_rng([fold, order]).permutation(count)[shape] / count)


def _trained(
    rows: KernelRows,
    subsets: list[Mask],
    quantity: str,
) -> Array:
    """Rows that latency or power learns from, in all and by family, of each subset: ``(family,
    subset)``.
    """
    families = np.array(rows.family)
    usable = _tested(rows, KIND_OF_QUANTITY[quantity])
    used = [families[subset & usable] for subset in subsets]
    of = [[(some == family).sum() for some in used] for family in dict.fromkeys(rows.family)]
    return np.array([[len(some) for some in used], *of], dtype=np.float64)


def _place(
    entry: dict[str, Any],
    rows: KernelRows,
    inside: Mask,
    order: int,
    error: dict[str, Array],
) -> None:
    share = SHARES.index(entry["share"])
    for quantity, kind in KIND_OF_QUANTITY.items():
        error[quantity][order, inside & _tested(rows, kind), share] = entry["error"][quantity]


def _tested(rows: KernelRows, kind: str) -> Mask:
    """First rows of a kind on random data, not flagged, with the figure the kind is for."""
    power_w, _, latency_s = settled_figures(rows)
    figure = latency_s if kind == "burst" else power_w
    return np.asarray(
        rows.is_kind(kind)
        & on_random_data(rows)
        & rows.fit
        & (rows.repeat == 0)
        & np.isfinite(figure)
    )


def _section(
    gpu: str,
    fold: int,
    order: int,
) -> str:
    return f"learning-{gpu}-{fold}-{order}"


def _row(gpu: str, curve: Curve) -> LedgerRow:
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
    return make_ledger_row(
        f"{gpu} learning, {curve.quantity}",
        curve.family,
        curve.tested,
        float(curve.error[-1]),
        **more,
    )


def _percent(value: float, ends: tuple[float, float]) -> str:
    return f"{value:.1f} [{ends[0]:.1f} to {ends[1]:.1f}]"


_COLOUR = {
    "latency": "#332288",
    "power": "#CC6677",
}  # Tol's muted set (2021), as in the other figures of the ledger
_COLUMNS = 4


def draw_learning_curves(curves: Sequence[Curve], gpu: str) -> Figure:
    """A panel a family: dots are held-out errors (bars: between orders), lines the law, to four
    times the rows.
    """
    families = list(dict.fromkeys(curve.family for curve in curves))
    lines = -(-len(families) // _COLUMNS)
    figure = new_figure(11.0, 2.6 * lines + 0.6)
    panels = figure.subplots(lines, _COLUMNS, squeeze=False).ravel()
    for panel, family in zip(panels, families, strict=False):
        for curve in curves:
            if curve.family == family:
                _draw(panel, curve)
        _finish(panel, family)
    for panel in panels[len(families) :]:
        panel.set_visible(False)
    for panel in panels[::_COLUMNS]:
        panel.set_ylabel("Held-out error (%)")
    for panel in panels[max(len(families) - _COLUMNS, 0) : len(families)]:
        panel.set_xlabel("Rows of the family trained on")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        frameon=False,
        ncols=len(labels),
        loc="outside upper right",
    )
    bundle = shipped_bundle(gpu)
    origin = f", {bundle.provenance.device}" if bundle else ""
    note = (
        "nested subsets of the training folds, the same held-out rows; bars at twice "
        "the rows: 90 % interval"
    )
    return add_caption(figure, f"{gpu}{origin}: {note}")


def _draw(axes: Axes, curve: Curve) -> None:
    colour = _COLOUR[curve.quantity]
    first = curve.quantity == "latency"
    what = {"latency": "latency of bursts", "power": "power of sustained rows"}[curve.quantity]
    axes.errorbar(
        curve.rows,
        curve.error,
        yerr=curve.spread,
        fmt="o",
        ms=3.5,
        lw=0.8,
        color=colour,
        label=what,
    )
    along = np.geomspace(curve.rows[0], 4.0 * curve.rows[-1], 60)
    axes.plot(
        along,
        curve.law.law.at(along),
        "-",
        lw=1.0,
        color=colour,
        label="law" if first else None,
    )
    low, high = curve.law.doubled_ends
    axes.plot(
        [2.0 * curve.rows[-1]] * 2,
        [low, high],
        "-",
        lw=4.0,
        alpha=0.35,
        color=colour,
    )
    if curve.noise is not None:
        axes.axhline(
            curve.noise,
            ls=":",
            lw=1.0,
            color=colour,
            label="repeats" if first else None,
        )


def _finish(axes: Axes, title: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(0.1, 60.0)
    axes.set_yticks([0.1, 0.3, 1, 3, 10, 30], ["0.1", "0.3", "1", "3", "10", "30"])
    axes.minorticks_off()
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)


def save_learning_figure(
    folder: Path,
    gpu: str,
    ending: str = "png",
) -> Path:
    """Draw the curves that the study found into a folder."""
    path = folder / f"learning-{gpu}.{ending}"
    save_figure(draw_learning_curves(curves(gpu, os.environ, print), gpu), path)
    return path


if __name__ == "__main__":
    from wattcast.lab.validate.long_checks.ledger_rows import run_study

    run_study("learning", learning_rows)
    if "--figures" in sys.argv:
        print(save_learning_figure(Path(sys.argv[sys.argv.index("--figures") + 1]), "h200"))
