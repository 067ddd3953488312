"""Which chip would run a model best: a few thousand designs around an H200, and the ones nothing
beats.
"""

from wattcast.explore import explore_designs

found = explore_designs(
    "llama3-8b",
    "h200",
    ["clock=900MHz:1980MHz:60MHz", "sm_count=96:192:8", "memory.bandwidth=3TB/s:8TB/s:1TB/s"],
    where=["power_w<=500"],
    batch=8,
    seq=1024,
)
front = found.summary.front
print(
    f"{found.points} designs, {found.summary.kept} within 500 W, {len(front['point'])} on the front"
)
for row in range(0, len(front["point"]), max(len(front["point"]) // 5, 1)):
    print(
        f"{front['sm_count'][row]:.0f} SMs at {front['clock_hz'][row] / 1e6:.0f} MHz, "
        f"{front['memory.byte_per_s'][row] / 1e12:.0f} TB/s: "
        f"{front['latency_s'][row] * 1e3:.0f} ms, {front['power_w'][row]:.0f} W"
    )
