"""Write the tables of docs/method/h200-units.md, each between two marks in the page's text.

Run: ``python -m wattcast.lab.microbench.microbench_page docs/method/h200-units.md --gpu h200``. The
text around the tables is written by hand and stays as it is."""

from __future__ import annotations

import argparse
import re
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wattcast.core.errors import bad_value
from wattcast.core.row_journals import read_lines
from wattcast.hardware import Gpu, load_gpu
from wattcast.lab.campaigns.database_files import make_pipe_table
from wattcast.lab.counter_models.microbench_lines import OTHER_CARD, RESULT_FILES
from wattcast.lab.microbench.microbench_report import (
    Row,
    make_device_rows,
    make_latency_rows,
    make_truth_rows,
)
from wattcast.lab.microbench.microbench_results import (
    MicroRow,
    compute_costs,
    find_curve,
    find_fault,
    find_specified_rate,
    keep_first_rounds,
    read_results,
    read_shipped_results,
    results_folder,
)
from wattcast.lab.microbench.tuning import rank_advice
from wattcast.lab.microbench.unit_work import (
    TIME,
    KernelProfile,
    find_idle_power_w,
    make_profile,
)
from wattcast.lab.module_commands import require_page, run_module

NEAR_CAP = 0.97  # share of the power limit from which on the limit, not the card, sets the power
MARK = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
CURVES = {  # curve: what is counted along it
    "conflicts": "bank conflicts",
    "coalescence": "neighbouring lanes",
    "access": "bytes a thread",
    "divergence": "paths",
    "occupancy": "warps on an SM",
    "ilp": "chains a warp",
    "icache": "bytes of code",
    "dram_active": "share of SMs",
    "tensor_active": "share of SMs",
    "atomic_lines": "lines of 128 bytes",
    "multicast": "blocks of a cluster",
    "cluster_read": "blocks of a cluster",
}
KNOWN = {  # a kernel with one bottleneck: the one that does the same without it
    **{
        "conflicts_31": "conflicts_0",
        "conflicts_7": "conflicts_0",
        "coalescence_1": "coalescence_32",
    },
    **{
        "divergence_32": "divergence_1",
        "divergence_4": "divergence_1",
        "fp64_fma": "fp32_fma",
    },
    "occupancy_1": "occupancy_64",
}


@dataclass(frozen=True)
class CardRowPair:
    """One kernel of one version on two cards; differences of the second relative to the first."""

    name: str
    kind: str
    time: float | None  # None where nothing was timed
    power: float
    memory_w: float | None
    capped: bool


def make_counted_profile(
    name: str,
    counters: Mapping[str, float],
    results: Sequence[MicroRow],
) -> KernelProfile:
    """Make a profile from a row of ``microbench_counters.jsonl``, in ncu's units (nanoseconds,
    percent).
    """
    values = dict(counters)
    for metric in values:
        if ".pct" in metric:
            values[metric] /= 100.0
    values[TIME] = counters[TIME] * 1e-9
    return make_profile(name, values, results, find_idle_power_w(results))


def read_other_card(gpu: Gpu) -> tuple[MicroRow, ...]:
    """Rows of the other card that ships, multimedia included; none where there is no such card."""
    results: list[MicroRow] = []
    for name in RESULT_FILES:
        path = results_folder(gpu) / OTHER_CARD / name
        if path.is_file():
            results += read_results(path)
    return tuple(results)


def pair_cards(
    results: Sequence[MicroRow],
    second_results: Sequence[MicroRow],
    gpu: Gpu,
) -> list[CardRowPair]:
    """First rounds of every benchmark that both cards measured with the same version of its
    kernel.
    """
    theirs = keep_first_rounds(second_results)
    limit_w = float(gpu.power.limit_w)
    pairs = []
    for name, a in keep_first_rounds(results).items():
        b = theirs.get(name)
        if b is None or a.version != b.version or not a.power_w or not b.power_w:
            continue
        pairs.append(
            CardRowPair(
                name=name,
                kind=_work_kind(a),
                time=b.operation_s / a.operation_s - 1.0
                if a.operation_s and b.operation_s
                else None,
                power=b.power_w / a.power_w - 1.0,
                memory_w=b.memory_power_w - a.memory_power_w
                if a.memory_power_w and b.memory_power_w
                else None,
                capped=max(a.power_w, b.power_w) > NEAR_CAP * limit_w,
            )
        )
    return pairs


def _work_kind(result: MicroRow) -> str:
    """Its group, but what moves DRAM by itself: there the memory's own power counts."""
    moves = result.group in ("memory", "structure") and (
        result.name.startswith(("dram_", "coalescence_", "access_"))
        or result.name.endswith("_dram")
    )
    return "DRAM" if moves else result.group


def renew_tables(
    page: str,
    results: Sequence[MicroRow],
    gpu: Gpu,
) -> str:
    """Return the page with its tables written anew; raise ``BadInput`` for a mark that names no
    table.
    """

    def table(mark: re.Match[str]) -> str:
        make = TABLES.get(mark[1])
        if make is None:
            raise bad_value("table", f"one of {', '.join(TABLES)}", mark[1])
        return f"<!-- table: {mark[1]} -->\n{make_pipe_table(make(results, gpu))}\n<!-- end -->"

    return MARK.sub(table, page)


def _named(r: MicroRow) -> str:
    return f"`{r.name}`" if find_fault(r) is None else f"`{r.name}` †"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:.0f}"


def unit_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """Arithmetic and tensor units: rate by the specification, energy of an operation, operations of
    a joule.
    """
    head = [
        "benchmark",
        "counted",
        "specified",
        "measured",
        "W",
        "pJ",
        "pJ above idle",
        "Gop/J",
        "true MHz",
        "NVML MHz",
    ]
    rows = [head]
    for r in keep_first_rounds(results).values():
        if (
            r.group not in ("arithmetic", "tensor")
            or r.curve
            or not r.operation_j
            or not r.operations_per_j
        ):
            continue
        above = r.operation_above_idle_j
        rows.append(
            [
                _named(r),
                r.operation,
                _number(find_specified_rate(gpu, r), 4),
                _number(r.operations_per_cycle_sm, 4),
                _number(r.power_w),
                _number(1e12 * r.operation_j),
                _number(1e12 * above if above is not None else None),
                _number(r.operations_per_j / 1e9),
                _number((r.effective_clock_hz or 0.0) / 1e6, 4),
                _number((r.sm_clock_hz or 0.0) / 1e6, 4),
            ]
        )
    return rows


def memory_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """Memory: bytes a second, power of the card and of its memory, energy of a byte."""
    rows = [
        ["benchmark", "TB/s", "of DRAM's", "W", "memory W", "pJ a byte", "above idle", "true MHz"]
    ]
    for r in keep_first_rounds(results).values():
        if r.group != "memory" or r.curve or not r.byte_per_s or not r.energy_j or not r.byte:
            continue
        share = r.byte_per_s / float(gpu.memory.byte_per_s) if "dram" in r.name else None
        above = max((r.power_w or 0.0) - (r.idle_power_w or 0.0), 0.0) / r.byte_per_s
        rows.append(
            [
                _named(r),
                f"{r.byte_per_s / 1e12:.3f}",
                "-" if share is None else f"{share:.0%}",
                _number(r.power_w),
                _number(r.memory_power_w),
                _number(1e12 * r.energy_j / r.byte),
                _number(1e12 * above),
                _number(r.effective_clock_hz / 1e6 if r.effective_clock_hz else None, 4),
            ]
        )
    return rows


def transfer_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """Copies between host and device: rate, power, and joules of this card."""
    rows = [["copy", "GB/s", "W", "pJ a byte above idle"]]
    for r in keep_first_rounds(results).values():
        if r.group == "transfer" and r.byte_per_s and r.operation_above_idle_j is not None:
            cells = [
                _number(r.byte_per_s / 1e9),
                _number(r.power_w),
                _number(1e12 * r.operation_above_idle_j),
            ]
            rows.append([_named(r), *cells])
    return rows


def rate_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """DRAM at a part of its rate: power of the card and of its memory, and energy of a byte above
    idle.
    """
    rows = [["benchmark", "TB/s", "of DRAM's", "W", "memory W", "pJ a byte above idle"]]
    for r in sorted(keep_first_rounds(results).values(), key=lambda r: r.byte_per_s or 0.0):
        if r.curve not in ("dram_rate", "dram_rate_copy") or not r.byte_per_s or not r.power_w:
            continue
        above_j = max(r.power_w - (r.idle_power_w or 0.0), 0.0) / r.byte_per_s
        share = r.byte_per_s / float(gpu.memory.byte_per_s)
        cells = [
            f"{r.byte_per_s / 1e12:.3f}",
            f"{share:.0%}",
            _number(r.power_w),
            _number(r.memory_power_w),
        ]
        rows.append([_named(r), *cells, _number(1e12 * above_j)])
    return rows


def curve_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """Every curve: rate, time and energy of an operation over the best point's, power."""
    rows = [["curve", "at", "operations /cycle/SM", "time", "energy", "W"]]
    for name, what in CURVES.items():
        points = [r for r in find_curve(results, name) if r.operation_s and r.operation_j]
        costs = compute_costs(points, by_byte=name == "access")
        for place, r in enumerate(points):
            mark = _named(r).removeprefix(f"`{r.name}`")
            rows.append(
                [
                    f"{name} ({what}){mark}",
                    f"{r.at:g}",
                    _number(r.operations_per_cycle_sm, 4),
                    f"{costs.time_s[place] / costs.time_s.min():.2f}",
                    f"{costs.energy_j[place] / costs.energy_j.min():.2f}",
                    _number(r.power_w),
                ]
            )
    return rows


def active_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """Power by the number of SMs at work, and the line through it."""
    points = [r for r in find_curve(results, "active") if r.power_w]
    active_sms = [float(round(r.at * int(gpu.sm_count)) or 1) for r in points]
    watts = [r.power_w or 0.0 for r in points]
    slope_w, fixed_w = np.polyfit(active_sms, watts, 1)
    rows: list[Row] = [["SMs at work", "W", f"{fixed_w:.1f} W + {slope_w:.3f} W an SM"]]
    for sms, power_w in zip(active_sms, watts, strict=True):
        rows.append([f"{sms:.0f}", f"{power_w:.1f}", f"{fixed_w + slope_w * sms:.1f}"])
    return rows


def idle_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """Nothing to do: with and without a context."""
    rows: list[Row] = [["row", "W", "memory W", "NVML MHz"]]
    for r in keep_first_rounds(results).values():
        if r.group == "idle":
            memory_w = _number(r.memory_power_w)
            clock_mhz = _number((r.sm_clock_hz or 0.0) / 1e6)
            rows.append([f"`{r.name}`", _number(r.power_w, 4), memory_w, clock_mhz])
    return rows


def clock_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """Rows whose true clock is more than 2 % from what NVML says."""
    rows = [["row", "true MHz", "NVML MHz", "true over NVML", "W"]]
    for r in keep_first_rounds(results).values():
        if (
            r.sm_clock_hz
            and r.effective_clock_hz
            and abs(r.effective_clock_hz / r.sm_clock_hz - 1.0) > 0.02
        ):
            cells = [_number(r.effective_clock_hz / 1e6, 4), _number(r.sm_clock_hz / 1e6, 4)]
            rows.append(
                [
                    _named(r),
                    *cells,
                    f"{r.effective_clock_hz / r.sm_clock_hz:.3f}",
                    _number(r.power_w),
                ]
            )
    return rows


def card_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """The other card over this one, by kind of work: times, and watts where the power limit does
    not set them.
    """
    pairs = pair_cards(results, read_other_card(gpu), gpu)
    rows = [
        [
            "work",
            "rows",
            "time apart, median",
            "rows below the cap",
            "power: median",
            "from",
            "to",
            "memory W",
        ]
    ]
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        mine = [pair for pair in pairs if pair.kind == kind]
        time = [abs(pair.time) for pair in mine if pair.time is not None]
        power = [pair.power for pair in mine if not pair.capped]
        memory_w = [pair.memory_w for pair in mine if pair.memory_w is not None]
        spread = ["-", "-", "-"]
        if power:
            spread = [f"{np.median(power):+.1%}", f"{min(power):+.1%}", f"{max(power):+.1%}"]
        rows.append(
            [
                kind,
                str(len(mine)),
                f"{np.median(time):.2%}" if time else "-",
                str(len(power)),
                *spread,
                f"{np.median(memory_w):+.0f}",
            ]
        )
    return rows


def advice_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """What ``lab tune`` says first of kernels whose bottleneck is known, beside what was measured
    without it.
    """
    path = results_folder(gpu) / "microbench_counters.jsonl"
    by_name = keep_first_rounds(results)
    counted = {str(row["id"]): row["metrics"] for row in read_lines(path)}
    rows = [["kernel", "bottleneck", "time", "measured", "energy", "measured"]]
    for name, without in KNOWN.items():
        advice, _ = rank_advice([make_counted_profile(name, counted[name], results)], results)
        a = by_name[name]
        b = by_name[without]
        if not advice or not (a.operation_s and b.operation_s and a.operation_j and b.operation_j):
            continue
        measured_time = b.operation_s / a.operation_s - 1.0
        measured_energy = b.operation_j / a.operation_j - 1.0
        rows.append(
            [
                f"`{name}`",
                advice[0].bottleneck,
                f"{100.0 * advice[0].time:.1f} %",
                f"{100.0 * measured_time:.1f} %",
                f"{100.0 * advice[0].energy:.1f} %",
                f"{100.0 * measured_energy:.1f} %",
            ]
        )
    return rows


def multimedia_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """Workloads on the clip: time and energy of a frame."""
    rows = [["workload", "us a frame", "W", "mJ a frame", "above idle"]]
    for r in keep_first_rounds(results).values():
        if (
            r.group == "multimedia"
            and r.operation_s
            and r.operation_j
            and r.operation_above_idle_j is not None
        ):
            joules = [_number(1e3 * r.operation_j), _number(1e3 * r.operation_above_idle_j)]
            rows.append([f"`{r.name}`", _number(1e6 * r.operation_s), _number(r.power_w), *joules])
    return rows


TABLES: Mapping[str, Callable[[Sequence[MicroRow], Gpu], list[Row]]] = {
    "units": unit_rows,
    "memory": memory_rows,
    "rates": rate_rows,
    "transfers": transfer_rows,
    "latencies": make_latency_rows,
    "curves": curve_rows,
    "active": active_rows,
    "idle": idle_rows,
    "clocks": clock_rows,
    "cards": card_rows,
    "advice": advice_rows,
    "multimedia": multimedia_rows,
    "devices": make_device_rows,
    "truths": make_truth_rows,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Renew the tables of the page in place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--gpu", default="h200")
    options = parser.parse_args(arguments)
    gpu = load_gpu(options.gpu)
    results = (*read_shipped_results(gpu), *read_results(results_folder(gpu) / "multimedia.jsonl"))
    page = require_page(options.page).read_text(encoding="utf-8")
    options.page.write_text(renew_tables(page, results, gpu), encoding="utf-8")


if __name__ == "__main__":
    run_module(main)
