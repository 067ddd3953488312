"""The power report and the steady-state file, in the simulator's own format [GPUWattch manual, 4.3]."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from wattcast.arrays import Array
from wattcast.power.component.kernels import KernelName
from wattcast.power.component.statistics import KernelPower
from wattcast.power.component.steady import NOT_ENOUGH, Region

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Labels:
    """Names of components and counters as a file writes them: in the original, commas belong to most labels."""

    parts: tuple[str, ...]
    counters: tuple[str, ...]
    no_comma: tuple[str, ...] = ()
    compat: bool = False
    totals: bool = False  # AccelWattch adds threads per warp and totals of the counters

    @property
    def part_labels(self) -> tuple[str, ...]:
        """Components, with their commas."""
        return tuple(name + ("," if self.compat and name not in self.no_comma else "") for name in self.parts)

    @property
    def counter_labels(self) -> tuple[str, ...]:
        """Counters, with their commas."""
        last = self.counters[-1:]
        return tuple(name + ("," if self.compat and (name,) != last else "") for name in self.counters)

    @property
    def power_header(self) -> str:
        """First line of a power trace. The original's AccelWattch header lacks one comma."""
        return "power," + "".join(self.part_labels) if self.compat else ",".join(("power", *self.parts))

    @property
    def steady_header(self) -> str:
        """First line of the steady-state file."""
        return ",".join(("start", "end", "power", "IPC", *self.counters))


def report(kernel: KernelPower, names: Sequence[KernelName], labels: Labels) -> Iterator[str]:
    """What the report says of one kernel."""
    known = names[kernel.index] if kernel.index < len(names) else None
    yield f"kernel_name = {known.name if known else UNKNOWN} \n"
    yield f"kernel_launch_uid = {known.uid if known else kernel.index + 1} \n\n"
    yield "Kernel Average Power Data:\n"
    yield from _block("avg", kernel.mean_w, kernel.mean_part_w, kernel.mean_counter, labels)
    if labels.totals:
        if kernel.mean_thread is not None:
            yield f"gpu_avg_threads_per_warp = {_g(kernel.mean_thread)}\n"
        yield from _lines("tot", labels.counter_labels, kernel.total_counter)
    for kind, title, extreme in (("max", "Maximum", kernel.highest), ("min", "Minimum", kernel.lowest)):
        yield f"\nKernel {title} Power Data:\n"
        yield from _block(kind, extreme.power_w, extreme.part_w, extreme.counter, labels)
    yield "\nAccumulative Power Statistics Over Previous Kernels:\n"
    yield f"gpu_tot_avg_power = {_g(kernel.so_far_mean_w)}\n"
    yield f"gpu_tot_max_power = {_g(kernel.so_far_max_w)}\n"
    yield f"gpu_tot_min_power = {_g(kernel.so_far_min_w)}\n\n\n"


def steady_rows(
    regions: Iterable[Region | None], names: Sequence[KernelName], compat: bool, ipc: Sequence[float | None] = ()
) -> Iterator[str]:
    """Rows of the steady-state file. ``ipc`` holds the figure of each region that is there, where it is known."""
    end = "," if compat else ""
    known = iter(ipc)
    for region in regions:
        if region is None:
            yield (NOT_ENOUGH + "\n") * (2 if compat else 1)  # the original looks twice when a kernel ends
            continue
        value = next(known, None)
        if value is None and region.kernel < len(names):
            value = names[region.kernel].ipc
        shown = "" if value is None else f"{value:f}"
        counters = ",".join(f"{c:f}" for c in region.counter)
        yield f"{region.start},{region.end},{region.power_w:f},{shown},{counters}{end}\n"


def _block(kind: str, power_w: float, part_w: Array, counter: Array, labels: Labels) -> Iterator[str]:
    yield f"kernel_{kind}_power = {_g(power_w)}\n"
    yield from _lines(kind, labels.part_labels, part_w)
    yield from _lines(kind, labels.counter_labels, counter)


def _lines(kind: str, names: Sequence[str], values: Array) -> Iterator[str]:
    for name, value in zip(names, values.tolist(), strict=True):
        yield f"gpu_{kind}_{name} = {_g(value)}\n"


def _g(value: float) -> str:
    """A number as a C++ stream prints it; 0/0 is ``-nan`` there."""
    return "-nan" if math.isnan(value) else f"{value:g}"
