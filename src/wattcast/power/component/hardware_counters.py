"""Power of kernels from hardware counters: AccelWattch's HW columns or an Nsight Compute export, a line a kernel."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.activity.profiled import read_accelwattch_hw, read_ncu
from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.files import write_whole
from wattcast.power.component.architecture_yaml import read_architecture
from wattcast.power.component.build import build
from wattcast.power.component.components import component_set
from wattcast.power.component.service import TraceRequest, find_energies, simulator_config
from wattcast.power.interface import Power


class Counters(StrEnum):
    """Where counters come from."""

    TRACE = "trace"
    ACCELWATTCH_HW = "accelwattch-hw"
    NCU = "ncu"


@dataclass(frozen=True)
class KernelResult:
    """Power of kernels from hardware counters, and what the counters could not show."""

    names: tuple[str, ...]
    duration_s: Array
    power: Power
    lost: tuple[str, ...]
    partial: tuple[str, ...]
    notes: tuple[str, ...]
    file: Path

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kernels": [
                {
                    "name": name,
                    "duration_s": float(s),
                    "power_w": float(w.sum()),
                    "part_w": dict(zip(self.power.parts, w.tolist(), strict=True)),
                }
                for name, s, w in zip(self.names, self.duration_s, self.power.part_w, strict=True)
            ],
            "parts_lost": list(self.lost),
            "parts_partial": list(self.partial),
            "notes": list(self.notes),
            "files": [str(self.file)],
        }


def power_kernels(request: TraceRequest, source: Counters) -> KernelResult:
    """Power of each kernel in a table of hardware counters, written to ``kernel_power.csv``.

    Components that no counter shows are left out and named; so are those that only some of theirs show.
    """
    notes: list[str] = []
    architecture = read_architecture(request.architecture)
    config = simulator_config(request, notes)
    table = find_energies(request, architecture, config, config.clock_hz, notes)
    components = component_set(architecture.dialect, request.compat is not None, request.components)
    built = build(
        architecture, table, components, sm_count=config.sm_count, threads=request.threads_per_warp, capped=False
    )
    if source is Counters.NCU:
        names, activity = read_ncu(request.trace, config.sm_count)
    else:
        if request.clock_hz is None:
            raise bad_value("--clock", "the core clock the kernels ran at, such as 1447MHz", "none")
        names, activity = read_accelwattch_hw(request.trace, request.clock_hz)
    model, lost, partial = built.model.seen_by(activity.events)
    power = model.power(activity)
    duration_s = np.broadcast_to(activity.duration_s, (len(names),))
    file = request.out / "kernel_power.csv"
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["kernel", "duration_s", "power_w", *power.parts])
    for name, seconds, watts in zip(names, duration_s, power.part_w, strict=True):
        writer.writerow([name, repr(float(seconds)), f"{watts.sum():.6f}", *(f"{w:.6f}" for w in watts)])
    write_whole(file, buffer.getvalue().encode())
    return KernelResult(names, duration_s, power, lost, partial, (*notes, *built.notes), file)
