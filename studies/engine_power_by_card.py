"""Part the power error of an engine's decode steps into cards, temperature and the rest.

Run: ``python studies/engine_power_by_card.py``. For held-out models it prints the error as predicted, with the die's
temperature, with the card's factor from the other models measured on the same card, and with both; then how far
predictions below the limit are above what each card drew, for held-out and for fitting models. A card at T draws
``W_PER_C``·(T - ``AT_ZERO_C`` - ``C_PER_W``·P) more. The last two are the line that sustained rows of the H200's
kernels follow, and the first comes from kernels measured on one or several cards at different temperatures, with an
offset and a gain for every card (1.6 +- 0.3 W/C).
"""

from __future__ import annotations

import numpy as np

from wattcast import hardware
from wattcast.serving.host_times import load_engine_records
from wattcast.validate.model_checks import compare_serving

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
            print(f"card {card[4:8]}: {100.0 * (np.mean(ratios) - 1.0):+.1f} % over {len(ratios)} {kind} steps")


if __name__ == "__main__":
    main()
