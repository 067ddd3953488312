"""Compute the power of kernels from counters of whole kernels.

Hardware counters, power reports and the statistics that simulators print hold one row of counters a
kernel. Components that no counter shows are left out and named: the sum is then a lower bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import bad_value
from wattcast.core.strict_files import encode_csv
from wattcast.core.whole_files import write_whole
from wattcast.lab.counter_models.profiler_counters import read_accelwattch_hw, read_ncu
from wattcast.lab.gpuwattch import measured_energies, simulator_logs
from wattcast.lab.gpuwattch.component_build import build_component_model
from wattcast.lab.gpuwattch.simulated_chip import SimulatedChip, read_chip
from wattcast.lab.gpuwattch.simulator_logs import CountedKernels, CounterSource
from wattcast.lab.gpuwattch.trace_reading import TraceSampling
from wattcast.lab.gpuwattch.trace_request import TraceRequest
from wattcast.lab.gpuwattch.unseen_counters import (
    IssueWidth,
    PowerRange,
    estimate_unseen_power,
)
from wattcast.power.component_power import ComponentPower
from wattcast.power.power_model import Power


@dataclass(frozen=True)
class CountedKernelPower:
    """Power of kernels from counters of whole kernels, and the components that they cannot show."""

    names: tuple[str, ...]
    duration_s: Array
    power: Power
    lost: tuple[str, ...]  # components none of whose counters is there
    partial: tuple[str, ...]  # components some of whose counters are there
    notes: tuple[str, ...]
    file: Path
    estimate: PowerRange | None = None  # with the unseen components estimated
    reported_w: tuple[float, ...] = ()  # totals that a simulator's report says itself

    @property
    def is_lower_bound(self) -> bool:
        """Tell whether a component is missing from the sums, which are then no totals."""
        return bool(self.lost or self.partial)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for JSON; a sum that lacks a component is not called a power."""
        kernels = []
        for row, name in enumerate(self.names):
            parts_w = self.power.part_w[row].tolist()
            kernels.append(
                {
                    "name": name,
                    "duration_s": float(self.duration_s[row]),
                    **self.kernel_watts(row),
                    "part_w": dict(zip(self.power.parts, parts_w, strict=True)),
                }
            )
        return {
            "kernels": kernels,
            "at_least": self.is_lower_bound,
            "parts_lost": list(self.lost),
            "parts_partial": list(self.partial),
            "notes": list(self.notes),
            "files": [str(self.file)],
        }

    def kernel_watts(self, row: int) -> dict[str, float | None]:
        """Return the watts of a kernel by name: its power, or a lower bound and an estimate."""
        sum_w = float(self.power.total_w[row])
        said = {"reported_w": self.reported_w[row]} if self._has_report(row) else {}
        if not self.is_lower_bound:
            return {"power_w": sum_w, **said}
        watts: dict[str, float | None] = {"power_w": None, "power_at_least_w": sum_w, **said}
        if self.estimate is not None:
            watts["estimate_w"] = float(self.estimate.about_w[row])
            watts["estimate_low_w"] = float(self.estimate.low_w[row])
            watts["estimate_high_w"] = float(self.estimate.high_w[row])
        return watts

    def _has_report(self, row: int) -> bool:
        return row < len(self.reported_w) and math.isfinite(self.reported_w[row])

    def describe_kernel(self, row: int) -> str:
        """Return the watts of a kernel in words."""
        watts = self.kernel_watts(row)
        if not self.is_lower_bound:
            said = f"; the report says {watts['reported_w']:.3f} W" * self._has_report(row)
            return f"{watts['power_w']:10.3f} W{said}"
        text = f"at least {watts['power_at_least_w']:10.3f} W"
        if self.estimate is not None:
            low, high = watts["estimate_low_w"], watts["estimate_high_w"]
            text += (
                f"; about {watts['estimate_w']:.0f} W ({low:.0f} to {high:.0f}) with "
                "the others estimated"
            )
        return text

    def describe_unseen(self) -> str:
        """Say which components are missing from the sums."""
        lost = ", ".join(self.lost) or "none"
        partial = ", ".join(self.partial) or "none"
        text = (
            "the sums are lower bounds, not totals (exit code 3): components no counter shows: "
            f"{lost}; shown in part: {partial}"
        )
        if self.estimate is not None and self.estimate.unseen:
            text += f". The estimate lacks {', '.join(self.estimate.unseen)}"
        return text


def compute_kernel_power(request: TraceRequest, source: CounterSource) -> CountedKernelPower:
    """Compute the power of each kernel from counters of whole kernels and write it to
    ``kernel_power.csv``.

    Components that no counter shows are left out and named, and so are those that only some of
    their counters show: the sum is then a lower bound, beside which an estimate stands where the
    issued instructions are known."""
    chip = read_chip(request)
    built = build_component_model(
        chip.architecture,
        chip.table,
        chip.components,
        voltage=chip.voltage,
        capped=source is CounterSource.POWER_REPORT and request.compat is not None,
        sm_count=chip.config.sm_count,
        threads=request.threads_per_warp,
    )
    counted = _read_counted_kernels(request, source, chip)
    model, lost, partial = built.model.seen_by(counted.activity.events)
    power = model.power(counted.activity)
    for part, watts in counted.given_w.items():
        if part in power.parts:
            power.part_w[:, power.parts.index(part)] = watts
    kernels = CountedKernelPower(
        names=counted.names,
        duration_s=np.broadcast_to(counted.activity.duration_s, (len(counted.names),)),
        power=power,
        lost=lost,
        partial=partial,
        notes=(*chip.notes, *counted.notes, *built.notes),
        file=request.out / "kernel_power.csv",
        reported_w=counted.reported_w,
        estimate=_estimate_all_power(built.model, counted, chip) if lost or partial else None,
    )
    _write_kernel_power(kernels)
    return kernels


def _estimate_all_power(
    model: ComponentPower,
    counted: CountedKernels,
    chip: SimulatedChip,
) -> PowerRange | None:
    """Estimate the power with the components that no counter shows, where the issue width is
    known.
    """
    dialect = chip.architecture.dialect
    sm_count = chip.config.sm_count or chip.architecture.parameters.get("number_of_cores")
    width = IssueWidth.of(
        dialect,
        sm_count if isinstance(sm_count, (int, float)) else None,
        chip.config.schedulers,
    )
    return estimate_unseen_power(
        model,
        counted.activity,
        dialect,
        width,
        counted.given_w,
        counted.names,
    )


def _read_counted_kernels(
    request: TraceRequest,
    source: CounterSource,
    chip: SimulatedChip,
) -> CountedKernels:
    """Read the kernels of a file whose source is known."""
    path = request.trace
    match source:
        case CounterSource.NCU if chip.measured is not None:
            return CountedKernels(*measured_energies.read_measured_counters(path, chip.measured))
        case CounterSource.NCU:
            launches, activity = read_ncu(path, chip.config.sm_count)
            return CountedKernels(tuple(launch.kernel for launch in launches), activity)
        case CounterSource.POWER_REPORT:
            return simulator_logs.read_power_report(
                path,
                chip.architecture.dialect,
                chip.trace_scaling(request),
                TraceSampling(chip.config.sample_cycle, chip.clock_hz),
            )
        case CounterSource.ACCELSIM:
            return simulator_logs.read_accelsim(path, chip.clock_hz)
        case CounterSource.GEM5:
            return simulator_logs.read_gem5_stats(path)
        case _ if request.clock_hz is None:
            do = "The counters hold cycles and no time."
            expectation = "the core clock the kernels ran at, such as 1447MHz"
            raise bad_value("--clock", expectation, "none", do)
        case _:
            return CountedKernels(*read_accelwattch_hw(path, request.clock_hz))


def _write_kernel_power(kernels: CountedKernelPower) -> None:
    """Write a row a kernel: time, watts and components; lower bounds have columns of their own."""
    names = [name for name, watts in kernels.kernel_watts(0).items() if watts is not None]
    lines: list[list[str]] = [["kernel", "duration_s", *names, *kernels.power.parts]]
    for row, name in enumerate(kernels.names):
        watts = kernels.kernel_watts(row)
        lines.append(
            [
                name,
                repr(float(kernels.duration_s[row])),
                *(f"{watts[column]:.6f}" for column in names),
                *(f"{part_w:.6f}" for part_w in kernels.power.part_w[row]),
            ]
        )
    write_whole(kernels.file, encode_csv(lines))
