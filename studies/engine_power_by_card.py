"""Part the power error of an engine's decode steps into cards, temperature and the rest.

Run: ``python -m studies.engine_power_by_card``. For held-out models it prints the error as
predicted, with the die's temperature, with the card's factor from the other models measured on the
same card, and with both; then how far predictions below the limit are above what each card drew,
for held-out and for fitting models; then the errors with the card's make of memory known, and
calibrated on the card's own kernels. A card at T draws ``W_PER_C``·(T - ``AT_ZERO_C`` -
``C_PER_W``·P) more. The last two are the line that sustained rows of the H200's kernels follow, and
the first comes from kernels measured on one or several cards at different temperatures, with an
offset and a gain for every card (1.6 +- 0.3 W/C)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.calibrate.forecast_shift import shift_energies
from wattcast.calibrate.kernel_rows import load_kernel_rows
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.lab.fit.card_levels import load_card_levels
from wattcast.lab.fit.engine_fit import load_measured_model, read_engine_options
from wattcast.lab.fit.engine_records import load_engine_records
from wattcast.lab.validate.model_checks import compare_serving
from wattcast.predictor.bundle import Bundle, bundle_for
from wattcast.predictor.prediction import predict_graph
from wattcast.workload.build_model import build_graph
from wattcast.workload.model_options import WorkloadPhase

W_PER_C, AT_ZERO_C, C_PER_W = 1.6, 35.2, 0.0316
CAPPED_W = 688.0  # predicted power above which the limit decides
SLOW_PERCENT = 12.0  # latency error beyond which a step says nothing of power


def main() -> None:
    """Print the table."""
    records = load_engine_records("h200")
    rows = {row["id"]: row for row in records.rows}
    found = [
        one for one in compare_serving(records, hardware.load_gpu("h200")) if one.kind == "decode"
    ]
    steps = [(one, rows[one.id], *one.values["power"]) for one in found]
    for warm in (False, True):
        said = {}
        for one, row, measured_w, power_w in steps:
            more_w = W_PER_C * (row["temperature_c"] - AT_ZERO_C - C_PER_W * power_w)
            said[one.id] = (
                min(power_w + more_w, 693.0) if warm and power_w < CAPPED_W else power_w
            ) / measured_w
        for knows in (False, True):
            errors = []
            for one, row, _, power_w in steps:
                others = [
                    said[other.id]
                    for other, on, _, other_w in steps
                    if on["card_uuid"] == row["card_uuid"] and other.model != one.model
                    if other_w < CAPPED_W and abs(other.error_percent("latency")) < SLOW_PERCENT
                ]
                card = float(np.mean(others)) if others and knows and power_w < CAPPED_W else 1.0
                if one.held_out:
                    errors.append(abs(100.0 * (said[one.id] / card - 1.0)))
            given = " and ".join(
                name for name, is_given in (("temperature", warm), ("card", knows)) if is_given
            )
            print(
                f"power of {len(errors)} held-out decode steps, {given or 'nothing'} known: {np.mean(errors):.1f} %"
            )
    for held_out in (True, False):
        for card in sorted(
            {row["card_uuid"] for one, row, _, _ in steps if one.held_out == held_out}
        ):
            ratios = [
                power_w / measured_w
                for one, row, measured_w, power_w in steps
                if one.held_out == held_out and row["card_uuid"] == card and power_w < CAPPED_W
            ]
            kind = "held-out" if held_out else "fitting"
            if not ratios:
                continue
            print(
                f"card {card[4:8]}: {100.0 * (np.mean(ratios) - 1.0):+.1f} % over {len(ratios)} {kind} steps"
            )
    judge_known_makes()
    judge_known_cards()


def judge_known_makes() -> None:
    """Print errors of held-out steps for the mean card, and for the board of the card's make of
    memory where known.

    A card's make is the side on which its own kernels of PyTorch lie: where the board's part number
    was read, or its time tells the make, they agree (``wattcast.lab.fit.card_levels``)."""
    records, levels = load_engine_records("h200"), load_card_levels("h200")
    boards = {
        card: "h200-000" if level.memory < 0.0 else "h200-001" for card, level in levels.items()
    }
    steps = [row for row in records.rows if row["kind"] != "traffic"]
    for known in (False, True):
        found = []
        for name in ("h200", "h200-000", "h200-001"):
            kept = tuple(row for row in steps if boards.get(row["card_uuid"], "h200") == name)
            told = hardware.load_gpu(name if known else "h200")
            found += compare_serving(replace(records, rows=kept), told, held_out=True)
        subsets = {
            f"{kind} steps": [one for one in found if one.kind == kind]
            for kind in ("decode", "prefill")
        }
        dense = {
            name: [one for one in some if not has_experts(one.model)]
            for name, some in subsets.items()
        }
        for name, some in tuple(subsets.items()):
            subsets[f"{name} of models with experts"] = [
                one for one in some if one not in dense[name]
            ]
        subsets["steps of eight prompts of dense models"] = [
            one for one in dense["prefill steps"] if "p8x" in one.id
        ]
        for name, some in subsets.items():
            errors = {
                of: np.mean([abs(one.error_percent(of)) for one in some]) for of in some[0].values
            }
            said = ", ".join(f"{of} {error:.2f} %" for of, error in errors.items())
            print(
                f"{len(some)} held-out {name}, {'board where known' if known else 'mean card'}: {said}"
            )


def has_experts(model: str) -> bool:
    """Tell whether a measured model has experts."""
    return bool(getattr(load_measured_model(model).dims, "experts", 0))


def select_judged_steps() -> list[Mapping[str, Any]]:
    """Select decode steps of held-out models on normal weights."""
    decode = load_engine_records("h200").select_kind("decode")
    return [row for row in decode if row["held_out"] and row["normal_weights"]]


def compute_power_errors(
    row: Mapping[str, Any], gpu: Gpu, bundles: Iterable[Bundle]
) -> list[float]:
    """Compute errors of a step's predicted power in percent, one a bundle."""
    sizes = {"batch": int(row["batch"]), "seq": round(row["context_mean"])}
    options = replace(read_engine_options(row), phase=WorkloadPhase.DECODE, **sizes)
    graph = build_graph(load_measured_model(row["model"]), options)
    watts = (
        float(predict_graph(graph, gpu, OperatingPoint(), bundle).power_w) for bundle in bundles
    )
    return [100.0 * (w / row["power_w"] - 1.0) for w in watts]


def judge_known_cards() -> None:
    """Print errors of held-out steps on cards that ran kernels of PyTorch too, before and after
    calibrating on these.

    ``wattcast calibrate --gpu h200 --table FOLDER`` moves energies by rows with watts in this way.
    No step of an engine has a part in it."""
    gpu, kernels, judged = (
        hardware.load_gpu("h200"),
        load_kernel_rows("h200"),
        select_judged_steps(),
    )
    mean_card, uuid = bundle_for(gpu), np.array(kernels.uuid)
    found: dict[str, list[list[float]]] = {}
    for card in dict.fromkeys(row["card_uuid"] for row in judged if row["card_uuid"] in uuid):
        measured = kernels.select_rows((uuid == card) & kernels.is_kind("sustained"))
        moved, own_card = shift_energies(measured, gpu, mean_card)
        on_card = (row for row in judged if row["card_uuid"] == card)
        found[card] = [compute_power_errors(row, gpu, (mean_card, own_card)) for row in on_card]
        plain, known = np.abs(found[card]).mean(axis=0)
        steps = f"card {card[4:8]}, {len(found[card])} held-out steps: {plain:.1f} %"
        told = f"calibrated on {len(measured)} kernels {known:.1f} %"
        print(f"{steps}, {told}" + ("" if moved.levels else ", which moved nothing"))
    every = np.abs(np.concatenate([np.array(errors) for errors in found.values()])).mean(axis=0)
    print(
        f"mean error on these cards: {every[0]:.1f} % for the mean card, {every[1]:.1f} % calibrated"
    )


if __name__ == "__main__":
    main()
