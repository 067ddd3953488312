"""A workload of your own, from Python: operators in a repeated block."""

import wattcast
from wattcast.workload.graph import Block, Graph
from wattcast.workload.operator_types import Elementwise, Linear

layer = (Linear(4096, 14336, 4096), Elementwise("silu", 4096 * 14336), Linear(4096, 4096, 14336))
p = wattcast.predict(Graph("mlp", (Block(layer, repeat=32),)), gpu="h200", power_limit="500 W")
print(
    f"{float(p.latency_s) * 1e3:.2f} ms, {float(p.power_w):.0f} W, clock {float(p.clock_hz) / 1e6:.0f} MHz"
)
for share in p.ops:
    print(f"  {share.op.name:10s} {share.count:4d} calls  {float(share.energy_j):.2f} J")
