"""How busy each module was: events over what its peak rate would have made in the same time."""

from __future__ import annotations

import numpy as np

from wattcast.activity.activity import Activity
from wattcast.arrays import Array
from wattcast.dtypes import Dtype
from wattcast.hardware import Gpu

MODULES = ("tensor", "cuda", "sfu", "shared", "l2", "dram", "link")
_TENSOR = {
    "tensor_fp64_flop": Dtype.FP64,
    "tensor_tf32_flop": Dtype.TF32,
    "tensor_fp16_flop": Dtype.FP16,
    "tensor_fp8_flop": Dtype.FP8,
    "tensor_int8_op": Dtype.INT8,
}
_CUDA = {"cuda_fp64_flop": Dtype.FP64, "cuda_fp32_flop": Dtype.FP32, "cuda_fp16_flop": Dtype.FP16}


def utilisation(activity: Activity, gpu: Gpu, effective_hz: Array) -> dict[str, Array]:
    """Share of its peak each module reached in each interval, 0 to 1, ``(*sweep, interval)``.

    On-chip peaks are per cycle of the effective clock. A module whose peak is not published, or
    whose events the source could not see, is left out. Where events outrun the stated peak (Hopper's
    L2, for which only the A100's rate is published) the module counts as fully busy.
    """
    per_s = {
        "tensor": [(e, gpu.pipes.tensor_flop_per_cycle.get(d)) for e, d in _TENSOR.items()],
        "cuda": [(e, gpu.pipes.cuda_flop_per_cycle.get(d)) for e, d in _CUDA.items()],
        "sfu": [("sfu_op", gpu.pipes.sfu_op_per_cycle)],
        "shared": [("shared_byte", gpu.sm.shared_byte_per_cycle)],
    }
    shape = np.broadcast_shapes(activity.value.shape, (*activity.duration_s.shape, 1))
    duration_s = activity.duration_s[..., np.newaxis]
    rates = np.divide(activity.value, duration_s, out=np.zeros(shape), where=duration_s > 0)

    def rate_of(event: str) -> Array:
        return rates[..., activity.events.index(event)]

    found: dict[str, Array] = {}
    for module, pipes in per_s.items():
        shares = [
            rate_of(event) / (rate * gpu.sm_count * effective_hz)
            for event, rate in pipes
            if rate is not None and activity.has(event)
        ]
        if shares:
            found[module] = np.asarray(sum(shares))
    if gpu.l2.byte_per_cycle is not None and activity.has("l2_byte"):
        found["l2"] = rate_of("l2_byte") / (gpu.l2.byte_per_cycle * effective_hz)
    if activity.has("dram_read_byte") and activity.has("dram_write_byte"):
        moved = rate_of("dram_read_byte") + rate_of("dram_write_byte")
        found["dram"] = np.asarray(moved / gpu.memory.byte_per_s)
    if gpu.links.nvlink_byte_per_s is not None and activity.has("link_byte"):
        found["link"] = np.asarray(rate_of("link_byte") / (gpu.links.nvlink_byte_per_s / 2.0))
    return {module: np.minimum(share, 1.0) for module, share in found.items()}
