"""Activity: how often each event happened in each interval.

It may be predicted, profiled or simulated. Counts add up across intervals and mean the same from
every source. The few events that are means (``events.csv`` says which) are weighted by duration
when intervals merge. A source leaves out the events it cannot see: absent is not zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import numpy as np

from wattcast.core import Dtype, check_names
from wattcast.core.arrays import Array
from wattcast.core.errors import MissingEvents, nearest_names
from wattcast.core.strict_files import read_shipped_table
from wattcast.hardware import Gpu, OperatingPoint


class ActivitySource(StrEnum):
    """How an activity became known."""

    PREDICTED = "predicted"
    PROFILED = "profiled"
    SIMULATED = "simulated"


@dataclass(frozen=True)
class EventDefinition:
    """One row of ``events.csv``."""

    name: str
    unit: str
    is_mean: bool
    module: str
    meaning: str


@cache
def known_events() -> dict[str, EventDefinition]:
    """Return every event Wattcast knows, by name, from ``events.csv``."""
    events = {}
    for row in read_shipped_table("wattcast.power", "events.csv"):
        events[row["event"]] = EventDefinition(
            name=row["event"],
            unit=row["unit"],
            is_mean=row["kind"] == "mean",
            module=row["module"],
            meaning=row["meaning"],
        )
    return events


@dataclass(frozen=True)
class Activity:
    """Event values over intervals: kernels, gaps, or samples.

    ``at`` holds the settings of the card during each interval and broadcasts to ``(*sweep,
    interval)``.
    """

    duration_s: Array  # (*sweep, interval)
    value: Array  # (*sweep, interval, event)
    events: tuple[str, ...]
    at: OperatingPoint
    source: ActivitySource

    def __post_init__(self) -> None:
        check_names("event", self.events, known_events(), "")
        if self.value.shape[-1:] != (len(self.events),):
            raise ValueError(
                f"value has {self.value.shape[-1:]} events, named are {len(self.events)}"
            )
        np.broadcast_shapes(self.duration_s.shape, self.value.shape[:-1])

    def has(self, event: str) -> bool:
        """Return whether the source could see this event."""
        return event in self.events

    def event_values(self, event: str) -> Array:
        """Return the counts, or means, of one event, ``(*sweep, interval)``."""
        return self.value[..., self.events.index(event)]

    def rate(self, event: str) -> Array:
        """Return events per second; an interval of no duration has rate zero."""
        count = self.event_values(event)
        nothing = np.zeros(np.broadcast(count, self.duration_s).shape)
        return np.divide(count, self.duration_s, out=nothing, where=self.duration_s > 0)

    def require(
        self,
        names: Iterable[str],
        model: str,
    ) -> None:
        """Raise ``MissingEvents`` unless all of ``names`` are here."""
        missing_events = [name for name in names if name not in self.events]
        if missing_events:
            listed = ", ".join(self._name_with_closest(name) for name in missing_events)
            raise MissingEvents(
                f"{model} needs {listed}, absent from this {self.source} activity, which has "
                f"{', '.join(self.events)}. Collect the missing counters, or choose a model that "
                "does not need them."
            )

    def _name_with_closest(self, event: str) -> str:
        """Return the name of an event, with the closest name that is here."""
        closest = nearest_names(event, self.events, 1)
        return f"{event} (closest: {closest[0]})" if closest else event


# Number formats of the events of tensor and CUDA cores
_TENSOR = {
    "tensor_fp64_flop": Dtype.FP64,
    "tensor_tf32_flop": Dtype.TF32,
    "tensor_fp16_flop": Dtype.FP16,
    "tensor_fp8_flop": Dtype.FP8,
    "tensor_fp4_flop": Dtype.FP4,
    "tensor_int8_op": Dtype.INT8,
}
_CUDA = {
    "cuda_fp64_flop": Dtype.FP64,
    "cuda_fp32_flop": Dtype.FP32,
    "cuda_fp16_flop": Dtype.FP16,
}


def module_utilisation(
    activity: Activity,
    gpu: Gpu,
    effective_hz: Array,
) -> dict[str, Array]:
    """Return the share of its peak that each module reached, from 0 to 1, ``(*sweep, interval)``.

    It is u = n/t / peak, with n the module's events in an interval of t seconds. On-chip peaks are
    rate per cycle times SMs times the effective clock; a pipe with several formats adds up its
    shares. A module whose peak is not published, or whose events the source could not see, is left
    out. Where events outrun the stated peak (Hopper's L2, for which only the A100's rate is
    published) the module counts as fully busy.
    """
    utilisation: dict[str, Array] = {}

    # Modules of each SM, by the events of their pipes
    tensor_rates = gpu.pipes.tensor_flop_per_cycle
    cuda_rates = gpu.pipes.cuda_flop_per_cycle
    rates_of_module = {
        "tensor": [(event, tensor_rates.get(dtype)) for event, dtype in _TENSOR.items()],
        "cuda": [(event, cuda_rates.get(dtype)) for event, dtype in _CUDA.items()],
        "sfu": [("sfu_op", gpu.pipes.sfu_op_per_cycle)],
        "shared": [("shared_byte", gpu.sm.shared_byte_per_cycle)],
    }
    for module, pipes in rates_of_module.items():
        shares = []
        for event, rate in pipes:
            if rate is not None and activity.has(event):
                shares.append(activity.rate(event) / (rate * gpu.sm_count * effective_hz))
        if shares:
            utilisation[module] = np.asarray(sum(shares))

    # Modules of the whole chip
    if gpu.l2.byte_per_cycle is not None and activity.has("l2_byte"):
        utilisation["l2"] = activity.rate("l2_byte") / (gpu.l2.byte_per_cycle * effective_hz)
    if activity.has("dram_read_byte") and activity.has("dram_write_byte"):
        moved = activity.rate("dram_read_byte") + activity.rate("dram_write_byte")
        utilisation["dram"] = np.asarray(moved / gpu.memory.byte_per_s)
    if gpu.links.nvlink_byte_per_s is not None and activity.has("link_byte"):
        one_way_byte_per_s = gpu.links.nvlink_byte_per_s / 2.0
        utilisation["link"] = np.asarray(activity.rate("link_byte") / one_way_byte_per_s)
    return {module: np.minimum(share, 1.0) for module, share in utilisation.items()}
