"""Part the power error of an engine's decode steps into cards, temperature and the rest.

Run: ``python -m studies.engine_power_by_card``. For held-out models it prints the error as predicted, with the die's
temperature, with the card's factor from the other models measured on the same card, and with both; then how far
predictions below the limit are above what each card drew, for held-out and for fitting models. A card at T draws
``W_PER_C``·(T - ``AT_ZERO_C`` - ``C_PER_W``·P) more. The last two are the line that sustained rows of the H200's
kernels follow, and the first comes from kernels measured on one or several cards at different temperatures, with an
offset and a gain for every card (1.6 +- 0.3 W/C).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from studies.card_levels import load_card_levels

from wattcast import hardware
from wattcast.fit.engine_fit import load_measured_model, read_engine_options
from wattcast.hardware import OperatingPoint
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.prediction import predict_graph
from wattcast.serving.host_times import load_engine_records
from wattcast.validate.model_checks import compare_serving
from wattcast.workload.build_model import build_graph
from wattcast.workload.model_options import WorkloadPhase

W_PER_C, AT_ZERO_C, C_PER_W = 1.6, 35.2, 0.0316
CAPPED_W = 688.0  # predicted power above which the limit decides
SLOW_PERCENT = 12.0  # latency error beyond which a step says nothing of power


def main() -> None:
    """Print the table."""
    records = load_engine_records("h200")
    rows = {row["id"]: row for row in records.rows}
    found = [one for one in compare_serving(records, hardware.load_gpu("h200")) if one.kind == "decode"]
    steps = [(one, rows[one.id], *one.values["power"]) for one in found]
    for warm in (False, True):
        said = {}
        for one, row, measured_w, power_w in steps:
            more_w = W_PER_C * (row["temperature_c"] - AT_ZERO_C - C_PER_W * power_w)
            said[one.id] = (min(power_w + more_w, 693.0) if warm and power_w < CAPPED_W else power_w) / measured_w
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
            given = " and ".join(name for name, is_given in (("temperature", warm), ("card", knows)) if is_given)
            print(
                f"power of {len(errors)} held-out decode steps, {given or 'nothing'} known: {np.mean(errors):.1f} %"
            )
    for held_out in (True, False):
        for card in sorted({row["card_uuid"] for one, row, _, _ in steps if one.held_out == held_out}):
            ratios = [
                power_w / measured_w
                for one, row, measured_w, power_w in steps
                if one.held_out == held_out and row["card_uuid"] == card and power_w < CAPPED_W
            ]
            kind = "held-out" if held_out else "fitting"
            if not ratios:
                continue
            print(f"card {card[4:8]}: {100.0 * (np.mean(ratios) - 1.0):+.1f} % over {len(ratios)} {kind} steps")
    judge_known_cards()


def judge_known_cards() -> None:
    """Print errors of held-out steps on cards that ran common kernels of PyTorch, with and without what these tell.

    A card of the levels u in all and v in memory draws exp(u + v·s) times the mean card's power, where s is the
    share of memory in the predicted power. No step of an engine has a part in u and v.
    """
    gpu, levels = hardware.load_gpu("h200"), load_card_levels("h200")
    bundle, records = bundle_for(gpu), load_engine_records("h200")
    engines = {row["model"]: row for row in records.select_kind("engine")}
    found: dict[str, list[tuple[float, float]]] = {}
    for row in records.select_kind("decode"):
        if not (row["held_out"] and row["normal_weights"] and row["card_uuid"] in levels):
            continue
        options = read_engine_options(engines[row["model"]])
        sizes = {"batch": int(row["batch"]), "seq": round(row["context_mean"])}
        graph = build_graph(load_measured_model(row["model"]), replace(options, phase=WorkloadPhase.DECODE, **sizes))
        prediction = predict_graph(graph, gpu, OperatingPoint(), bundle)
        watts = {part.name: float(part.power_w) for part in prediction.modules}
        level, power_w = levels[row["card_uuid"]], float(prediction.power_w)
        known_w = power_w * float(np.exp(level.whole + level.memory * watts["dram"] / sum(watts.values())))
        said = (power_w, known_w if power_w < CAPPED_W else power_w)
        found.setdefault(row["card_uuid"], []).append(tuple(100.0 * (w / row["power_w"] - 1.0) for w in said))
    every = np.abs(np.concatenate([np.array(errors) for errors in found.values()])).mean(axis=0)
    for card, errors in found.items():
        plain, known = np.mean(errors, axis=0)
        print(f"card {card[4:8]}, {len(errors)} held-out steps: {plain:+.1f} %, by its kernels' level {known:+.1f} %")
    print(f"mean error on these cards: {every[0]:.1f} % for the mean card, {every[1]:.1f} % by their kernels' levels")


if __name__ == "__main__":
    main()
