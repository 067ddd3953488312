"""The clock of least energy for a model, and what it costs in speed: one call over all clocks."""

import wattcast
from wattcast.explore import ExploreObjective

found = wattcast.explore("llama3-8b", "h100-sxm", ["clock=all"], batch=8, seq=1024)
best, top = found.best[ExploreObjective.ENERGY].row, found.rows[-1]
print(
    f"least energy at {best['clock_hz'] / 1e6:.0f} MHz: {best['energy_j']:.1f} J in {best['latency_s']:.3f} s"
)
print(f"at the top clock: {top['energy_j']:.1f} J, {top['latency_s']:.3f} s")
