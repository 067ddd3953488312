"""Tokens per second, joules per token, watts and cost of a deployment, and its clock of least
energy.
"""

from __future__ import annotations

import numpy as np

import wattcast

p = wattcast.predict(
    "llama3-8b", gpu="h200", phase="decode", batch=32, seq=4096, price="2.50/h", carbon="us"
)
print(p)
print(f"{p.tokens_per_s:.0f} tokens/s, {p.energy_j_per_token:.2f} J/token, {p.total_power_w:.0f} W")
print(f"{p.cost_per_million_tokens:.2f} a million tokens, {p.carbon_g} g of CO2e a step")
print(p.to_dict()["support"]["why"])

clocks_hz = np.linspace(1e9, 1.9e9, 10)
sweep = wattcast.predict(
    "llama3-8b", gpu="h200", phase="decode", batch=32, seq=4096, clock=clocks_hz
)
print(f"least energy at {clocks_hz[np.argmin(sweep.energy_j)] / 1e6:.0f} MHz")

for q in wattcast.predict_many(
    [("resnet50", {"batch": 64}), ("whisper-small", {"phase": "generate"})], gpu="l40s"
):
    print(q.name, q.items_per_s, q.energy_j_per_item, q.fits)
