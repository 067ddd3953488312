"""Calibrate cards on public rows and save the bundles that ship.

    python -m wattcast.lab.fit.ship_calibrations --reference FOLDER b200 h100-sxm h100-sxm:trtllm

Without names every card of ``CARDS`` is calibrated, in this order, since some cards start from the
energies of others. A card whose rows, code of tables and starting rule have not changed since its
bundle was written is passed over, so that an interrupted run goes on where it stopped; ``--anew``
fits it all the same. The bundle's provenance names tables and versions, the count of rows fitted
and held out, and the watts that moved its energies.
"""

from __future__ import annotations

import argparse
import hashlib
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import wattcast.predictor.bundle as bundle_package
from wattcast import hardware
from wattcast.calibrate import (
    energy_evidence,
    table_files,
    table_fit,
    table_rows,
)
from wattcast.calibrate.row_prediction import conformal_ends
from wattcast.core.strict_files import Provenance
from wattcast.core.whole_files import write_whole
from wattcast.hardware import Gpu
from wattcast.lab.fit.served_evidence import served_evidence
from wattcast.lab.fit.served_rows import (
    GPU,
    TABLE,
    ServedRow,
    read_served_rows,
    select_half,
)
from wattcast.lab.fit.served_steps import ask_row
from wattcast.lab.module_commands import require_measurements, run_module
from wattcast.predictor.bundle.bundle_file import (
    ARRAYS_FILE,
    Bundle,
    ResidualEnds,
)
from wattcast.predictor.bundle.calibrated import calibration_folder, save_bundle
from wattcast.workload.engine_operators import FusedExperts

# cards with tables of vLLM's kernels, and those with tables of other engines
CARDS = (
    "a100-sxm-80gb",
    "l40s",
    "h100-sxm",
    "b200",
    "gb200",
    "b300",
    "gb300",
    "rtx-pro-6000",
    "rtx-4090",
    "mi300x",
    "mi355x",
    "h100-sxm:trtllm",
    "h100-sxm:sglang",
    "h200:trtllm",
    "h200:sglang",
    "b200:trtllm",
    "b200:sglang",
)
# cards of the same processor, whose rows a card learns from besides its own
_SIBLINGS = {
    "b200": ("gb200",),
    "b300": ("gb300",),
    "h100-sxm:trtllm": ("h200",),
    "h200:trtllm": ("h100-sxm",),
}
# Engines whose experts in fp8 by block are those that another engine's table timed: TensorRT-LLM
# serves DeepSeek on Blackwell with its generated kernels, which vLLM calls through FlashInfer, and
# its own table times DeepGEMM's (``moe_config: backend: TRTLLM``; ``collector/trtllm``).
_BORROWED_EXPERTS = {"b200:trtllm": "vllm"}
# folder of a card's tables, where it is not the usual one
_TABLE_FOLDERS = {
    "rtx-4090": "llmservingsim",
    "mi300x": "aiter",
    "mi355x": "aiter",
}
MARK_FILE = "rows.sha256"  # of what a bundle was made from
ERRORS_FILE = "errors.csv"  # of rows held out


def ship_card(
    name: str,
    reference: Path,
    target: Path,
    anew: bool = False,
) -> bool:
    """Calibrate a card, with a colon before an engine, unless its bundle is up to date."""
    gpu_name, _, engine = name.partition(":")
    chip = replace(hardware.load_gpu(gpu_name), engine=engine)
    tables = table_folder(gpu_name, reference)
    folder = target / calibration_folder(gpu_name, engine)
    lender = _BORROWED_EXPERTS.get(name)
    mark = _hash_inputs(chip, engine, reference, lender)
    mark_path = folder / MARK_FILE
    if not anew and mark_path.is_file() and mark_path.read_text(encoding="utf-8") == mark:
        return False
    table = table_rows.read_tables([tables], chip, engine=engine or None)
    if lender:
        table = table_rows.join_tables([table, _read_generated_experts(tables, chip, lender)])
    siblings = [_read_sibling(other, engine, reference) for other in _SIBLINGS.get(name, ())]
    result = table_fit.calibrate_rows(table, chip, print, siblings)
    bundle = result.bundle
    if gpu_name == GPU and not engine:
        bundle = _weigh_served(bundle, chip, table, reference)
    if engine:
        bundle = _take_energies(bundle, chip)
    save_bundle(bundle, folder)
    _compress_arrays(folder / ARRAYS_FILE)
    lines = ["what,engine,latency,rows,forecast_percent,calibrated_percent"]
    for error in result.errors:
        figures = f"{error.rows},{error.forecast:.2f},{error.calibrated:.2f}"
        lines.append(f"{error.what},{error.engine},{error.band},{figures}")
    write_whole(folder / ERRORS_FILE, ("\n".join(lines) + "\n").encode())
    write_whole(mark_path, mark.encode())
    return True


def _read_sibling(
    gpu_name: str,
    engine: str,
    reference: Path,
) -> table_fit.SiblingRows:
    """Read the rows of a card of the same processor."""
    chip = replace(hardware.load_gpu(gpu_name), engine=engine)
    folder = table_folder(gpu_name, reference)
    table = table_rows.read_tables([folder], chip, engine=engine or None)
    return table_fit.SiblingRows(chip, table)


def _read_generated_experts(tables: Path, gpu: Gpu, engine: str) -> table_rows.TableRows:
    """Read the experts in fp8 by block that an engine's table timed by TensorRT-LLM's generated
    kernels.
    """
    table = table_rows.read_tables([tables], replace(gpu, engine=""), engine=engine)
    is_generated = [
        isinstance(op, FusedExperts) and op.scales == "block" and op.kernel == "trtllm"
        for op in table.rows.ops
    ]
    return table.select_rows(np.array(is_generated, dtype=bool))


def table_folder(gpu: str, reference: Path) -> Path:
    """Return the folder of a card's kernel tables."""
    return reference / _TABLE_FOLDERS.get(gpu, "aiconfigurator")


def _weigh_served(
    bundle: Bundle,
    gpu: Gpu,
    table: table_rows.TableRows,
    reference: Path,
) -> Bundle:
    """Weigh the forecast's energies with products and served models of the evidence half."""
    prior = replace(bundle, power=table_fit.start_bundle(gpu).power)
    powered = table_fit.take_few_powered(table.rows)
    evidence = energy_evidence.kernel_evidence(powered, gpu, prior)
    evidence += served_evidence(select_half(read_served_rows(reference), True), gpu, prior)
    weighed = energy_evidence.weigh_energies(evidence, energy_evidence.scalable_modules(prior))
    moved = _widen_power(weighed.move(prior), select_half(read_served_rows(reference), True))
    return _tell_energies(moved, weighed.describe(), "ML.ENERGY Leaderboard v3")


def _widen_power(bundle: Bundle, rows: Sequence[ServedRow]) -> Bundle:
    """Widen the ends of power to those that served models of the evidence half have.

    Kernels of a step err together, in the energies and in how long the host waits, so that every
    family takes the ends of whole steps.
    """
    ratio = np.array([row.power_w / ask_row(row, bundle).power_w for row in rows])
    low, high = conformal_ends(ratio)
    residuals = {}
    for family, ends in bundle.residuals.items():
        power = (min(ends.power[0], low), max(ends.power[1], high))
        residuals[family] = ResidualEnds(
            latency=ends.latency,
            power=power,
            rows=ends.rows,
        )
    return replace(bundle, residuals=residuals)


def _take_energies(bundle: Bundle, gpu: Gpu) -> Bundle:
    """Give a bundle of another engine's kernels the energies of the card."""
    card = bundle_package.bundle_for(replace(gpu, engine=""))
    residuals = {
        family: ResidualEnds(
            latency=ends.latency,
            power=card.residuals[family].power,
            rows=ends.rows,
        )
        for family, ends in bundle.residuals.items()
    }
    moved = replace(bundle, power=card.power, residuals=residuals)
    return _tell_energies(moved, "energies: those of the card", "")


def _tell_energies(
    bundle: Bundle,
    words: str,
    source: str,
) -> Bundle:
    """Return a bundle whose provenance says where its energies come from."""
    before = bundle.provenance
    times, _, _ = before.note.partition("; energies")
    note = f"{times}; {words}; V(f), idle power's shape and other families: forecast"
    sources = "; ".join(name for name in (before.source, source) if name)
    provenance = Provenance(sources, before.date, device=before.device, note=note)
    assumptions = (f"calibrated: {note}", *bundle.assumptions[1:])
    return replace(bundle, provenance=provenance, assumptions=assumptions)


def _hash_inputs(
    gpu: Gpu,
    engine: str,
    reference: Path,
    lender: str | None = None,
) -> str:
    """Return a hash of the tables that a card's bundle is made from."""
    digest = hashlib.sha256(f"{replace(gpu, engine='')!r} {engine}".encode())
    folder = table_folder(gpu.name, reference)
    tables_of_gpu, _ = table_files.find_tables([folder], gpu, engine or None)
    paths = [file.path for file in tables_of_gpu]
    if lender:
        lent_tables, _ = table_files.find_tables([folder], gpu, lender)
        paths += [file.path for file in lent_tables]
    if gpu.name == GPU:
        paths.append(reference / TABLE)
    for path in sorted(paths):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _compress_arrays(path: Path) -> None:
    """Pack the arrays of a bundle: small enough to inflate in some milliseconds."""
    with np.load(path) as arrays:
        plain = {name: arrays[name] for name in arrays.files}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **plain)
    write_whole(path, buffer.getvalue())


def main(arguments: Sequence[str] | None = None) -> None:
    """Calibrate the cards that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cards", nargs="*", help="GPU or GPU:ENGINE; default: all")
    parser.add_argument(
        "--reference",
        type=Path,
        required=True,
        help="folder of public rows",
    )
    parser.add_argument("--out", type=Path, help="default: the package's own bundles")
    parser.add_argument("--anew", action="store_true", help="also those that are up to date")
    options = parser.parse_args(arguments)
    require_measurements(options.reference)
    target = options.out or Path(next(iter(bundle_package.__path__)))
    for name in options.cards or CARDS:
        is_new = ship_card(name, options.reference, target, options.anew)
        print(f"{name}: {'calibrated' if is_new else 'up to date'}", flush=True)


if __name__ == "__main__":
    run_module(main)
