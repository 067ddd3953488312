"""What each part of the kernel model is worth: leave it out, or give it the truth, and predict held-out rows.

Every ablation runs the whole fit on altered rows and is compared with the full model on the same test rows,
whose predictions ship with the bundle:

- tile oracle: rows say which kernels ran, so that tiles are not chosen but known (in the cross-validation itself);
- NVML clock: the effective clock of every row is set to the reported one, so that no clock law is learned;
- half the database: half of the training shapes, three draws;
- no correction: the scaffold's ideal terms alone, nothing fitted;
- FLOPs and bytes: a non-negative regression by family in place of the scaffold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.arrays import Array
from wattcast.fit import kernels_data
from wattcast.fit.kernels import Fitted, fit_rows, idle_curve, random
from wattcast.fit.kernels_data import Mask, Rows
from wattcast.fit.kernels_run import _one_thread
from wattcast.fit.kernels_split import HeldOut, folds_of, predict_rows, shape_of
from wattcast.fitted import Bundle, fitted
from wattcast.fitted.bundle import FAMILIES
from wattcast.hardware import Gpu
from wattcast.power.module import ModulePower
from wattcast.power.static import IdlePower
from wattcast.timeline.phases import Correction
from wattcast.timeline.residual import Residuals
from wattcast.validate.floors import regression
from wattcast.validate.rows import Row, percent, row

Tell = Callable[[str], None]
FOLDS = (0, 1)  # of five: a fit takes a minute or two
DRAWS = 3


def quick_rows(gpu: str, held: HeldOut) -> list[Row]:
    """Ablations without a fit of the whole: no correction, and a regression on FLOPs and bytes."""
    chip, bundle = hardware.load(gpu), fitted(gpu)
    rows = kernels_data.load(gpu)
    where = f"{gpu} ablations, latency"
    test = _tested(rows) & rows.is_kind("burst") & random(rows)
    measured = rows.of("latency_s")[test]
    full = _full(held, None, "burst")
    out = [row(where, "full model", full[1], full[0])]
    if bundle is not None:
        bare = predict_rows(_uncorrected(bundle), rows.where(test), chip)[:, 0]
        out.append(row(where, "no correction: the ideal scaffold", int(test.sum()), percent(bare, measured), full[0]))
    out.append(_oracle(where, held))
    by_size = _regressed(rows.where(test), folds_of(rows)[test])
    out.append(
        row(where, "FLOPs-and-bytes regression by family", int(test.sum()), percent(by_size, measured), full[0])
    )
    return out


def _oracle(where: str, held: HeldOut) -> Row:
    """Latency of products with the kernels that ran, beside the full model on those rows."""
    oracle_s = held.oracle_latency_s
    at = np.isfinite(oracle_s)
    error, full = (percent(s[at], held.latency_s[at]) for s in (oracle_s, held.predicted_latency_s))
    return row(where, "tile oracle: the kernels that ran", int(at.sum()), error, full)


def long_rows(gpu: str, held: HeldOut, tell: Tell) -> list[Row]:
    """Ablations that fit the whole again, several times; minutes each."""
    chip, rows = hardware.load(gpu), kernels_data.load(gpu)
    idle = idle_curve(kernels_data.idle(gpu), chip)
    out = []
    with _one_thread():
        out += _refitted(gpu, "NVML clock for the effective clock", _reported(rows), held, chip, idle, tell)
        out += _halved(gpu, rows, held, chip, idle, tell)
    return out


def _reported(rows: Rows) -> Rows:
    """Rows that know no clock but the one NVML reports."""
    clock = rows.of("sm_clock_hz")
    effective = np.where(np.isfinite(rows.of("effective_clock_hz")), clock, np.nan)
    return replace(rows, number={**rows.number, "effective_clock_hz": effective})


def _refitted(gpu: str, name: str, rows: Rows, held: HeldOut, chip: Gpu, idle: IdlePower, tell: Tell) -> list[Row]:
    """Latency, power and clock of the test folds from fits of altered rows; the floor is the full model."""
    fold = folds_of(rows)
    predicted = np.full((len(rows), 3), np.nan)
    for k in FOLDS:
        tell(f"ablation: {name}, fold {k + 1} of {len(FOLDS)}")
        test = _tested(rows) & (fold == k)
        predicted[test] = predict_rows(fit_rows(rows.where(fold != k), chip, idle), rows.where(test), chip)
    return _compared(gpu, name, rows, predicted, held, np.isin(fold, FOLDS), FOLDS)


def _halved(gpu: str, rows: Rows, held: HeldOut, chip: Gpu, idle: IdlePower, tell: Tell) -> list[Row]:
    """Half of the training shapes, a draw for each of three test folds."""
    fold = folds_of(rows)
    _, shape = np.unique([shape_of(op) for op in rows.ops], return_inverse=True)
    predicted = np.full((len(rows), 3), np.nan)
    each = []
    for draw in range(DRAWS):
        tell(f"ablation: half the database, draw {draw + 1} of {DRAWS}")
        kept = np.random.default_rng(draw).permutation(int(shape.max()) + 1)[shape] % 2 == 0
        test = _tested(rows) & (fold == draw)
        predicted[test] = predict_rows(
            fit_rows(rows.where((fold != draw) & kept), chip, idle), rows.where(test), chip
        )
        one = test & rows.is_kind("burst") & random(rows)
        each.append(round(percent(predicted[one, 0], rows.of("latency_s")[one]) or 0.0, 2))
    draws = tuple(range(DRAWS))
    out = _compared(gpu, "half the database", rows, predicted, held, np.isin(fold, draws), draws)
    out[0]["draws"] = each
    return out


def _compared(
    gpu: str, name: str, rows: Rows, predicted: Array, held: HeldOut, inside: Mask, folds: tuple[int, ...]
) -> list[Row]:
    from wattcast.fit.kernels import settled

    power_w, clock_hz, latency_s = settled(rows)
    ran = _tested(rows) & random(rows) & inside
    burst, sustained = ran & rows.is_kind("burst"), ran & rows.is_kind("sustained")
    out = []
    for quantity, at, column, true in (
        ("latency", burst, 0, latency_s),
        ("latency, sustained", sustained, 0, latency_s),
        ("power", sustained, 1, power_w),
        ("clock", sustained, 2, clock_hz),
    ):
        known = at & np.isfinite(predicted[:, column]) & np.isfinite(true)
        error = percent(predicted[known, column], true[known])
        full = _full(held, folds, "burst" if quantity == "latency" else quantity)
        out.append(row(f"{gpu} ablations, {quantity}", name, int(known.sum()), error, full[0]))
    return out


def _full(held: HeldOut, folds: tuple[int, ...] | None, what: str) -> tuple[float | None, int]:
    """Error of the full model on the same rows, and how many."""
    at = np.array(held.data) == "random"
    at &= np.ones(len(at), dtype=bool) if folds is None else np.isin(held.fold, folds)
    burst = np.array([kind == "burst" for kind in held.kind])
    if what == "burst":
        at &= burst
        return percent(held.predicted_latency_s[at], held.latency_s[at]), int(at.sum())
    at &= ~burst
    found, true = {
        "latency, sustained": (held.predicted_latency_s, held.latency_s),
        "power": (held.predicted_power_w, held.power_w),
        "clock": (held.predicted_clock_hz, held.clock_hz),
    }[what]
    at &= np.isfinite(found) & np.isfinite(true)
    return percent(found[at], true[at]), int(at.sum())


def _tested(rows: Rows) -> Mask:
    return np.asarray(rows.is_kind("burst", "sustained") & rows.fit & (rows.repeat == 0))


def _uncorrected(bundle: Bundle) -> Fitted:
    """The shipped clock law and energies, but every λ one, no fixed time and nothing learned."""
    assert bundle.clock_law is not None
    assert isinstance(bundle.power, ModulePower)
    ideal = dict.fromkeys(FAMILIES, Correction(1.0, 1.0, 0.0))
    nothing = Residuals(bundle.reference, {}, {})
    return Fitted(ideal, bundle.clock_law, bundle.power, dict(bundle.toggling), nothing)


def _regressed(rows: Rows, fold: npt.NDArray[np.int64]) -> Array:
    """Latency from FLOPs and bytes, by family, out of fold."""
    flop = np.array([op.flop for op in rows.ops])
    byte = np.array([op.read_byte + op.write_byte for op in rows.ops])
    family, found = np.array(rows.family), np.full(len(rows), np.nan)
    for name in dict.fromkeys(rows.family):
        at = family == name
        found[at] = regression(flop[at] + 1.0, byte[at] + 1.0, rows.of("latency_s")[at], fold[at])
    return found
