"""Run ``wattcast lab fit kernels``: held-out predictions, intervals, a bundle from all rows, files."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.core.arrays import Array
from wattcast.core.errors import BadInput
from wattcast.core.measured_rows import CHAINS_FILE, Plain, database_folder, read_table, write_table
from wattcast.fit import few_rows_fit, kernel_rows
from wattcast.fit.card_spread import fit_card_spread
from wattcast.fit.engine_fit import extend_bundle
from wattcast.fit.held_out import HeldOutRows, fit_interval_ends, fit_nearness, fit_widening, predict_held_out
from wattcast.fit.kernel_fit import build_bundle, fit_idle_curve, fit_kernel_rows
from wattcast.fit.kernel_rows import parse_operators
from wattcast.hardware import Gpu
from wattcast.kernels import build_kernels, reference_chip
from wattcast.kernels.kernel_table import USUAL_CONDITION, IssueSegment
from wattcast.predictor.bundle import bundle_file as bundles
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.bundle.calibrated import save_bundle
from wattcast.predictor.bundle.support_widening import NearnessLine, Widening, default_widening
from wattcast.predictor.learned_factors import ColdCacheDelay, cold_cache_terms

LEAST_LAYERS = 20  # to say how far workloads of several kernels may be from their sum


@dataclass(frozen=True)
class MeasuredLayers:
    """Measured layers, ``(layer,)`` each; the coefficients multiply ``terms``, ``(layer, 2)``."""

    name: tuple[str, ...]
    layer_s: Array
    alone_s: Array  # sum of its operators, each run alone
    kernels: Array
    terms: Array

    def select_rows(self, rows: npt.NDArray[np.bool_]) -> MeasuredLayers:
        """Return some of the layers."""
        names = tuple(name for name, wanted in zip(self.name, rows, strict=True) if wanted)
        return MeasuredLayers(names, self.layer_s[rows], self.alone_s[rows], self.kernels[rows], self.terms[rows])

    @property
    def architecture(self) -> npt.NDArray[np.str_]:
        """The architecture of each layer: ``llama`` of ``stack llama-2048 decode 1 512``."""
        return np.array([name.split()[1].partition("-")[0] for name in self.name])


def collect_layers(chains: Sequence[Plain], gpu: Gpu) -> MeasuredLayers:
    """Collect the layers of a database whose operators were all measured alone."""
    whole = [row for row in chains if row.get("handed_on") and row.get("latency_s") and row.get("alone_s")]
    good = [row for row in whole if not (row.get("error") or row.get("flags"))]
    if not good:
        raise BadInput("no layer has all its operators measured by themselves. Measure them: `--steps stack`.")
    reference = reference_chip(gpu)
    found = []
    for row in good:
        listed = list(row["operators"])
        distinct = list(dict.fromkeys(listed))
        calls = np.array([listed.count(text) for text in distinct], np.float64)
        ops = parse_operators([json.loads(text) for text in distinct])
        order = (IssueSegment(np.arange(len(ops)), calls, 2),)  # a layer follows another like it
        kernels = build_kernels(ops, (USUAL_CONDITION,) * len(ops), gpu, reference, order)
        found.append((calls @ kernels.work.launches, *(cold_cache_terms(kernels, reference.l2_byte) @ calls)))
    table = np.array(found)
    layer_s, alone_s = np.array([(float(row["latency_s"]), float(sum(row["alone_s"]))) for row in good]).T
    return MeasuredLayers(tuple(str(row["name"]) for row in good), layer_s, alone_s, table[:, 0], table[:, 1:])


def fit_cold_cache(layers: MeasuredLayers) -> ColdCacheDelay:
    """Fit non-negative coefficients by least squares on the relative error of the layers' times."""
    from scipy.optimize import nnls

    scale = np.maximum(layers.terms.max(axis=0), 1e-30)
    value, _ = nnls(layers.terms / scale / layers.layer_s[:, None], 1.0 - layers.alone_s / layers.layer_s)
    operator_s, s_per_byte = (float(f"{x:.3g}") for x in value / scale)
    return ColdCacheDelay(operator_s, s_per_byte, len(layers.name))


def predict_layers_s(layers: MeasuredLayers, law: ColdCacheDelay) -> Array:
    """Predict the seconds of each layer: its operators alone, plus the extra time of the law."""
    return np.asarray(layers.alone_s + layers.terms @ np.array([law.operator_s, law.s_per_byte]))


def predict_held_out_layers_s(layers: MeasuredLayers) -> Array:
    """Predict the seconds of each layer from a law that saw no layer of its architecture."""
    found = np.empty(len(layers.name))
    for architecture in dict.fromkeys(layers.architecture.tolist()):
        own = layers.architecture == architecture
        found[own] = predict_layers_s(layers.select_rows(own), fit_cold_cache(layers.select_rows(~own)))
    return found


def load_layers(database: str | Path, gpu: Gpu) -> MeasuredLayers | None:
    """Load the layers of a database; None where it has too few."""
    folder = Path(database) if Path(database).is_dir() else database_folder(str(database))
    if not (folder / CHAINS_FILE).is_file():
        return None
    handed_on = [row for row in read_table(folder / CHAINS_FILE) if row.get("handed_on")]
    return collect_layers(handed_on, gpu) if len(handed_on) >= LEAST_LAYERS else None


HELD_OUT_FILE = "out_of_fold.parquet"


def fit_kernel_database(
    database: str | Path,
    gpu: str,
    tell: Callable[[str], None] | None = None,
    inherits: bool | None = None,
    leaves_out: bool = False,
) -> tuple[Bundle, HeldOutRows]:
    """Fit a bundle of ``gpu`` to a database, with the held-out predictions that its intervals come from.

    ``inherits``: whether the rows move the card's forecast (or shipped bundle) instead of being fitted from nothing;
    None: when they are few (``few_rows_fit``). ``leaves_out``: learn anew, by fifteen more fits, how far
    intervals must reach for what was never measured (``fit_widening``), instead of taking what ships.
    """
    chip = hardware.load_gpu(gpu)
    rows, idle_rows = kernel_rows.load_kernel_rows(database), kernel_rows.load_idle_rows(database)
    if inherits is None:
        inherits = int((rows.is_kind("burst") & rows.fit).sum()) < few_rows_fit.FEW_BURSTS
    if inherits and leaves_out:
        raise BadInput(
            "--leave-out is for a fit from nothing, and these rows move the card's forecast: "
            "leave it away, or ask for --alone."
        )
    if inherits:
        with one_thread():
            bundle, held = few_rows_fit.fit_few_rows(
                rows, chip, bundle_for(chip), idle_rows, tell or (lambda _: None)
            )
        return replace(bundle, cards=fit_card_spread(database)), held
    if not idle_rows:
        raise BadInput(f"{database}: no idle rows, so static power cannot be told from work. Run the idle step.")
    idle = fit_idle_curve(idle_rows, chip)
    with one_thread():
        held = predict_held_out(rows, chip, idle, tell=tell)
        found = fit_kernel_rows(rows, chip, idle)
        near = fit_nearness(held)
        residuals = fit_interval_ends(held, near=near)
        widening = fit_widening(rows, chip, idle, residuals, near, tell) if leaves_out else _shipped(gpu, near)
    layers, shipped = load_layers(database, chip), bundles.shipped_bundle(gpu)
    cold = None if shipped is None else shipped.cold
    if shipped is not None:  # ends of collectives come from public timings
        residuals = {"collective": shipped.residuals["collective"], **residuals}
    if layers is not None:
        cold = fit_cold_cache(layers)
    burst = sum(kind == "burst" for kind in held.kind)
    rest = len(held.kind) - burst
    note = f"{len(rows)} rows; residuals from {burst} burst and {rest} sustained rows held out in 5 folds"
    bundle = build_bundle(found, rows, chip, residuals, note)
    return replace(bundle, cards=fit_card_spread(database, held), widening=widening, cold=cold), held


def fit_engine_database(
    database: str | Path, gpu: str, bundle: Path | None = None, tell: Callable[[str], None] = lambda _: None
) -> Bundle:
    """Fit the kernels of an engine into a fitted bundle: one read from a folder, or the one that ships."""
    chip = hardware.load_gpu(gpu)
    start = bundles.shipped_bundle(gpu) if bundle is None else bundles.read_bundle(bundle)
    if start is None or start.learned is None or start.clock_law is None:
        raise BadInput(f"{gpu}: no bundle with learned factors to add to. Fit one with `wattcast lab fit kernels`.")
    with one_thread():
        return extend_bundle(start, kernel_rows.load_kernel_rows(database), chip, tell)


def _shipped(gpu: str, near: tuple[NearnessLine, NearnessLine]) -> Widening:
    """Return the widening of the GPU's shipped bundle, or the default, with the nearness of the rows at hand."""
    known = bundles.shipped_bundle(gpu)
    return (default_widening() if known is None else known.widening).with_nearness(near)


def one_thread() -> Any:
    """Limit fits to one thread: on a few hundred rows several threads only wait for one another.

    Only libraries already loaded are held to one thread, so the one that grows trees is loaded first.
    """
    importlib.import_module("sklearn.ensemble")
    return importlib.import_module("threadpoolctl").threadpool_limits(limits=1)  # comes with scikit-learn


def write_fit(bundle: Bundle, held: HeldOutRows, folder: Path) -> None:
    """Write ``bundle.yaml``, ``arrays.npz`` and ``out_of_fold.parquet`` to ``folder``."""
    save_bundle(bundle, folder)
    write_table(folder / HELD_OUT_FILE, _plain(held))


def shipped_held_out(gpu: str) -> HeldOutRows | None:
    """Return the held-out predictions that ship with a bundle, or None."""
    path = files("wattcast.predictor.bundle").joinpath(gpu, HELD_OUT_FILE)
    return read_held_out(Path(str(path))) if path.is_file() else None


def read_held_out(path: Path) -> HeldOutRows:
    """Read the held-out predictions that ``write_fit`` wrote."""
    rows = read_table(path)
    columns: dict[str, Any] = {}
    for item in fields(HeldOutRows):
        values = [row.get(item.name) for row in rows]
        text = item.type == "tuple[str, ...]"
        number = [float("nan") if v is None else v for v in values]
        columns[item.name] = tuple(values) if text else np.array(number)
    return HeldOutRows(**columns)


def _plain(held: HeldOutRows) -> list[dict[str, Any]]:
    columns = {item.name: getattr(held, item.name) for item in fields(held)}
    return [{name: _value(values[i]) for name, values in columns.items()} for i in range(len(held.kind))]


def _value(value: Any) -> Any:
    if isinstance(value, str):
        return value
    number = float(value)
    if not np.isfinite(number):
        return None
    return int(value) if isinstance(value, np.integer) else float(f"{number:.6g}")
