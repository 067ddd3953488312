"""The whole of ``wattcast fit kernels``: held-out predictions, quantiles, a bundle from all rows, files."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.errors import BadInput
from wattcast.fit import few_rows, kernels_data
from wattcast.fit.cards import spread
from wattcast.fit.cold import among_of, fit_cold, measured_layers
from wattcast.fit.kernels import bundle_of, fit_rows, idle_curve
from wattcast.fit.kernels_interval import quantiles
from wattcast.fit.kernels_split import HeldOut, hold_out
from wattcast.fit.nearness import near_of
from wattcast.fit.unseen import learn
from wattcast.fitted import bundle as bundles
from wattcast.fitted import bundle_for
from wattcast.fitted.bundle import Bundle
from wattcast.fitted.widening import Line, Widening, usual
from wattcast.records import read_table, write_table

HELD_OUT_FILE = "out_of_fold.parquet"


def fit_database(
    database: str | Path,
    gpu: str,
    tell: Callable[[str], None] | None = None,
    inherits: bool | None = None,
    leaves_out: bool = False,
) -> tuple[Bundle, HeldOut]:
    """A bundle of ``gpu`` from a database, with the held-out predictions its intervals come from.

    ``inherits``: whether the rows move the card's forecast (or shipped bundle) instead of being fitted from nothing;
    None: when they are few (:mod:`wattcast.fit.few_rows`). ``leaves_out``: learn anew, by fifteen more fits, how far
    intervals must reach for what was never measured (:mod:`wattcast.fit.unseen`), instead of taking what ships.
    """
    chip = hardware.load(gpu)
    rows, idle_rows = kernels_data.load(database), kernels_data.idle(database)
    if inherits is None:
        inherits = int((rows.is_kind("burst") & rows.fit).sum()) < few_rows.FEW
    if inherits and leaves_out:
        raise BadInput(
            "--leave-out is for a fit from nothing, and these rows move the card's forecast: "
            "leave it away, or ask for --alone."
        )
    if inherits:
        with _one_thread():
            bundle, held = few_rows.fit_few(rows, chip, bundle_for(chip), idle_rows, tell or (lambda _: None))
        return replace(bundle, cards=spread(database)), held
    if not idle_rows:
        raise BadInput(f"{database}: no idle rows, so static power cannot be told from work. Run the idle step.")
    idle = idle_curve(idle_rows, chip)
    with _one_thread():
        held = hold_out(rows, chip, idle, tell=tell)
        found = fit_rows(rows, chip, idle)
        near = near_of(held)
        residuals = quantiles(held, near=near)
        widening = learn(rows, chip, idle, residuals, near, tell) if leaves_out else _shipped(gpu, near)
    layers, shipped = measured_layers(database, chip), bundles.fitted(gpu)
    cold = None if shipped is None else shipped.cold
    if layers is not None:
        cold, widening = fit_cold(layers), replace(widening, among=among_of(layers))
    burst = sum(kind == "burst" for kind in held.kind)
    rest = len(held.kind) - burst
    note = f"{len(rows)} rows; residuals from {burst} burst and {rest} sustained rows held out in 5 folds"
    bundle = bundle_of(found, rows, chip, residuals, note)
    return replace(bundle, cards=spread(database, held), widening=widening, cold=cold), held


def _shipped(gpu: str, near: tuple[Line, Line]) -> Widening:
    """What never measured things add by the GPU's shipped bundle, or usually; distance by the rows at hand."""
    known = bundles.fitted(gpu)
    return replace(usual() if known is None else known.widening, near=near[0], near_power=near[1])


def _one_thread() -> Any:
    """Fits of a few hundred rows: several threads only wait for one another, minutes on a busy machine.

    Only libraries already loaded are held to one thread, so the one that grows trees is loaded first.
    """
    importlib.import_module("sklearn.ensemble")
    return importlib.import_module("threadpoolctl").threadpool_limits(limits=1)  # comes with scikit-learn


def write(bundle: Bundle, held: HeldOut, folder: Path) -> None:
    """``bundle.yaml``, ``arrays.npz`` and ``out_of_fold.parquet`` in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    bundles.write(bundle, folder / "bundle.yaml")
    write_table(folder / HELD_OUT_FILE, _plain(held))


def held_out_of(gpu: str) -> HeldOut | None:
    """Held-out predictions that ship with a bundle, or None."""
    path = files("wattcast.fitted").joinpath(gpu, HELD_OUT_FILE)
    return read_held_out(Path(str(path))) if path.is_file() else None


def read_held_out(path: Path) -> HeldOut:
    """Held-out predictions as :func:`write` left them."""
    rows = read_table(path)
    columns: dict[str, Any] = {}
    for item in fields(HeldOut):
        values = [row.get(item.name) for row in rows]
        text = item.type == "tuple[str, ...]"
        number = [float("nan") if v is None else v for v in values]
        columns[item.name] = tuple(values) if text else np.array(number)
    return HeldOut(**columns)


def _plain(held: HeldOut) -> list[dict[str, Any]]:
    columns = {item.name: getattr(held, item.name) for item in fields(held)}
    return [{name: _value(values[i]) for name, values in columns.items()} for i in range(len(held.kind))]


def _value(value: Any) -> Any:
    if isinstance(value, str):
        return value
    number = float(value)
    if not np.isfinite(number):
        return None
    return int(value) if isinstance(value, np.integer) else float(f"{number:.6g}")
