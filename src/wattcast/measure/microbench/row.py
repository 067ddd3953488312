"""What a microbenchmark or a multimedia workload measured: one row, saved as soon as it is there.

Only what was read is stored; rates, energies and operations per joule follow from it (results.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from wattcast.records import Plain

MAX_POWER_OF = "largest of the sensor's readings"


@dataclass(frozen=True)
class MicroRow:
    """One measurement. ``None`` means not measured, never zero."""

    id: str  # name, version and repeat: the same in every run
    name: str
    group: str  # arithmetic, tensor, memory, structure, mix, idle, multimedia
    operation: str = ""  # what is counted
    curve: str = ""
    at: float | None = None  # place on that curve
    repeat: int = 0
    version: int = 1  # of the kernel: rows of an older one are kept, and count only while there is no newer one
    specification: str = ""  # which of the vendor's rates it is held against
    run: str = ""
    date: str = ""
    threads: int | None = None
    blocks: int | None = None
    iterations: int | None = None
    operations: float | None = None  # of one launch, all threads
    parts: dict[str, float] = field(default_factory=dict)  # operations of every unit of a mix
    byte: float | None = None  # moved by one launch
    flop: float | None = None
    launches: int | None = None  # in the window
    launch_s: float | None = None  # mean time of a launch, by events
    launch_spread_s: float | None = None
    cycles: float | None = None  # of a launch on a multiprocessor, by its own counter
    active_sms: int | None = None
    operations_per_cycle_sm: float | None = None
    effective_clock_hz: float | None = None  # cycles over the nanosecond timer, or over the mean time where capped
    sm_clock_hz: float | None = None  # as NVML reports it
    duration_s: float | None = None  # of the window
    power_w: float | None = None
    power_spread_w: float | None = None
    max_power_w: float | None = None
    max_power_of: str = ""
    idle_power_w: float | None = None  # a context open, no work, near in time
    memory_power_w: float | None = None
    temperature_c: float | None = None
    ticks: int | None = None
    throttle: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    checked: str = ""  # "passed", or "" where no self-check applies
    error: str = ""

    def plain(self) -> Plain:
        """For JSON, without what was not measured."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "", (), {})}


def from_plain(plain: dict[str, Any]) -> MicroRow:
    """A row as read back."""
    known = {name: plain[name] for name in MicroRow.__dataclass_fields__ if name in plain}
    for name in ("throttle", "flags"):
        known[name] = tuple(known.get(name, ()))
    return MicroRow(**known)
