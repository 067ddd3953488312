"""The clock of least energy for a model, and what it costs in speed: one call over all clocks."""

import numpy as np

import wattcast

clocks_hz = np.arange(345e6, 1980e6 + 1, 15e6)
sweep = wattcast.predict("llama3-8b", gpu="h100-sxm", batch=8, seq=1024, clock=clocks_hz)
best = sweep.energy_j.argmin()
print(
    f"least energy at {clocks_hz[best] / 1e6:.0f} MHz: {sweep.energy_j[best]:.1f} J in {sweep.latency_s[best]:.3f} s"
)
print(f"at the top clock: {sweep.energy_j[-1]:.1f} J, {sweep.latency_s[-1]:.3f} s")
