"""Layers of made-up models: their time from operators measured by themselves, with and without the law of caches."""

from __future__ import annotations

from wattcast import hardware
from wattcast.fit.cold import fit_cold, held_out_s, measured_layers
from wattcast.validate.rows import Row, percent, row


def layer_rows(gpu: str) -> list[Row]:
    """Error of layers' times from a law that saw no layer of the architecture; floor: their operators' sum."""
    layers = measured_layers(gpu, hardware.load(gpu))
    if layers is None:
        return []
    law = fit_cold(layers)
    return [
        row(
            f"{gpu} layers of operators that hand on results",
            "latency, architecture unseen",
            len(layers.name),
            percent(held_out_s(layers), layers.layer_s),
            percent(layers.alone_s, layers.layer_s),
            floor_is="sum of the operators alone",
            cold_operator_us=round(1e6 * law.operator_s, 2),
            cold_us_per_MB=round(1e12 * law.s_per_byte, 3),
        )
    ]
