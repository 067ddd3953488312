"""Set what Nsight Compute counted of a kernel beside what ``lab kernel`` predicts of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from wattcast.core.errors import bad_value
from wattcast.hardware import Gpu
from wattcast.kernels import build_kernels
from wattcast.kernels.kernel_labels import find_label
from wattcast.kernels.kernel_table import COUNTED_ROTATION, USUAL_CONDITION
from wattcast.lab.counter_models.profiler_counters import read_ncu_metrics
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.kernel_phases import count_events
from wattcast.predictor.kernel_view import KernelView
from wattcast.report.text_tables import print_rows

BANK_BYTE = 4.0  # a bank of shared memory and L1 is 4 bytes wide, and each is counted by itself
# Counters whose sum is what a level moves: L2 towards the SMs; shared memory and L1 in banks
LEVELS = {
    "DRAM": ("dram__bytes_read.sum", "dram__bytes_write.sum"),
    "L2": ("l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum"),
    "shared": ("l1tex__data_bank_reads.sum", "l1tex__data_bank_writes.sum"),
}
_TIME = "gpu__time_duration.sum"


@dataclass(frozen=True)
class ProfiledKernel:
    """What a profile counts of one run of an operator, all of its kernels together."""

    names: tuple[str, ...]
    seconds: float | None
    level_byte: Mapping[str, float]  # without levels whose counters the profile lacks


def read_profiled_kernel(path: Path) -> ProfiledKernel:
    """Read a profile of one run: a CSV that ncu exports, or its report where ncu is installed."""
    launches, metrics = read_ncu_metrics(path)
    level_byte = {}
    for level, names in LEVELS.items():
        if all(name in metrics for name in names):
            scale = BANK_BYTE if level == "shared" else 1.0
            level_byte[level] = scale * float(sum(metrics[name].sum() for name in names))
    seconds = float(metrics[_TIME].sum()) if _TIME in metrics else None
    if not level_byte and seconds is None:
        wanted = ", ".join([_TIME, *(name for names in LEVELS.values() for name in names)])
        do = "Collect them with ncu --metrics."
        raise bad_value(path.name, f"one of {wanted}", "none of them", do)
    return ProfiledKernel(tuple(launch.kernel for launch in launches), seconds, level_byte)


def count_predicted_bytes(view: KernelView, chip: Gpu) -> dict[str, float]:
    """Return the bytes of an operator by level, in the state in which a profiler counts them: it
    runs a kernel again for each of its passes.
    """
    condition = replace(USUAL_CONDITION, rotated=COUNTED_ROTATION)
    kernels = build_kernels((view.op,), [condition], chip, bundle_for(chip).reference, ())
    events, value = count_events(kernels)
    column = dict(zip(events, value[0].tolist(), strict=True))
    return {
        "DRAM": column["dram_read_byte"] + column["dram_write_byte"],
        "L2": view.level_byte["l2"],
        "shared": view.level_byte["shared"],
    }


def compare_with_profile(
    view: KernelView,
    chip: Gpu,
    profile: ProfiledKernel,
) -> list[dict[str, Any]]:
    """Return a row for each quantity that both have: predicted, counted, and the difference."""
    rows: list[dict[str, Any]] = []
    if profile.seconds is not None:
        rows.append(_compare("time", "s", view.seconds, profile.seconds))
    predicted = count_predicted_bytes(view, chip)
    for level, counted in profile.level_byte.items():
        rows.append(_compare(f"bytes of {level}", "byte", predicted[level], counted))
    label = find_label(profile.names)
    if view.chosen is not None and label is not None and label.tile_n:
        named = f"{label.tile_n}x{label.tile_m}"
        sides = view.chosen.label.split()[-1]
        rows.append({"quantity": "tile", "predicted": sides, "counted": named})
    return rows


def _compare(
    quantity: str,
    unit: str,
    predicted: float,
    counted: float,
) -> dict[str, Any]:
    row = {"quantity": quantity, "unit": unit, "predicted": predicted, "counted": counted}
    return row | ({"difference": predicted / counted - 1.0} if counted > 0.0 else {})


def print_profile(
    console: Console,
    profile: ProfiledKernel,
    rows: list[dict[str, Any]],
) -> None:
    """Print a prediction beside a profile."""
    from wattcast.core.units import show

    shown = []
    for row in rows:
        texts = dict(row)
        if "unit" in row:
            texts |= {name: show(row[name], row["unit"]) for name in ("predicted", "counted")}
        if "difference" in row:
            texts["difference"] = f"{row['difference']:+.1%}"
        shown.append(texts)
    headings = {
        "quantity": "quantity",
        "predicted": "predicted",
        "counted": "counted",
        "difference": "predicted over counted",
    }
    console.print(f"Profiled: {', '.join(dict.fromkeys(profile.names))}", markup=False)
    print_rows(console, shown, headings, "Beside the profile", ["quantity"])
