"""Ask why some sets of public rows are not inside their intervals as often, or these not as narrow,
as promised.

Run: ``python -m studies.limits_of_coverage`` (two minutes; WATTCAST_REFERENCE names the
measurements).

Prints eight tables. Nothing is learned or chosen from them but the steps of a tile.

- *runs of a second*: the error of public products on an H200 with the settled clock, and with the
  mean clock of a run of ``RUN_S``; of rows that ``wattcast lab validate`` does not judge.
- *watts*: public rows that read less than the limit although our own cards would draw far more on
  random operands.
- *clock*: our own sustained products, at the clock that was measured, by their time in device
  memory over their time on the chip. The predicted time on the chip was learned from bursts, where
  the clock is higher and memory busier.
- *tiles*: decode attention of public tables, by how many tiles an SM takes one after another.
- *steps*: decode attention of TensorRT-LLM on the H200, by the steps that a tile of its kernels
  takes: the source of ``NVIDIA_TILE_STEPS``, which a B200's forecast takes.
- *power*: errors of forecasts of whole models on A100 and A10, before and after the error of time
  is taken out.
- *windows*: how long these runs were polled beyond the 30 s that their iterations take, and where a
  run failed.
- *joules*: whole models on an A100 at clocks of one voltage, where E = P₀·t + J whatever the clock.
  A window that is too long changes neither, since it adds P₀ for some time.
"""

from __future__ import annotations

import csv
import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from wattcast import hardware
from wattcast.calibrate.kernel_rows import KernelRows, load_kernel_rows, on_random_data
from wattcast.calibrate.row_prediction import analyse_rows, predict_with_bundle
from wattcast.calibrate.table_fit import predict_tables_s
from wattcast.calibrate.table_rows import RUN_S, read_tables
from wattcast.core.arrays import Array, Mask
from wattcast.core.row_tables import database_folder
from wattcast.core.strict_files import reference_folder
from wattcast.core.units import Dtype
from wattcast.hardware import Gpu
from wattcast.kernels.families.engine import paged_attention
from wattcast.lab.validate.public_checks.coverage_checks import TABLE_ROWS, load_published_models
from wattcast.predictor.bundle import bundle_for, forecast_bundle
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.timeline import compute_effective_hz, compute_kernel_s
from wattcast.workload.engine_operators import PagedAttention

TABLE = "h200_sxm.vllm-0.22.0.gemm{}.csv"
# shorter rows ran less than a second: the collector stops at 3,000 replays of six products
LEAST_S = 5.5e-5
FREE_W, ASKED_W = (
    680.0,
    760.0,
)  # read by a card that its limit of 700 W does not hold; asked for by one that it does
NVIDIA_TABLE = "h200_sxm.trtllm-1.3.0rc20.generation_attention.csv"
TILE_STEPS = (0.2, 0.4, 0.8, 1.2, 2.0, 4.0)
CHIPS = ("h200", "a100-sxm-80gb", "l40s", "b200")
TILES = ((1.0, 4.0), (16.0, np.inf))
LESS_POWER = 0.45  # percent of power that an A100 draws less where it takes a percent longer
FAILED_S = 3.0  # a shorter window is that of a run that failed
RUNS_S = 30.0  # the time that iterations are counted for
MANY_S = (0.04, 0.5)  # an iteration of a run that the host does not hold up and that takes many
FLAT_HZ = 1.02e9  # one voltage up to here: the published table of the A100
LEAST_BUSY, LEAST_CLOCKS = 0.95, 5
SHARES = (0.0, 0.2, 0.3, 0.5, 0.7, 1.0, np.inf)  # time in device memory over time on the chip


def main() -> None:
    """Print the tables."""
    gpu = hardware.load_gpu("h200")
    bundle, folder = bundle_for(gpu), reference_folder(os.environ)
    if folder is None:
        raise SystemExit("no reference data: set WATTCAST_REFERENCE to their folder.")
    judged = read_tables([folder / "aiconfigurator" / TABLE.format("_power")], gpu, TABLE_ROWS).rows
    rows = read_tables([folder / "aiconfigurator" / TABLE.format("")], gpu, TABLE_ROWS).rows
    plain = np.array([op.kind == "linear" and op not in judged.ops for op in rows.ops])
    sys.stdout.write(
        compare_runs(rows.select_rows(plain & (rows.column("latency_s") >= LEAST_S)), gpu, bundle)
    )
    sys.stdout.write(count_low_watts(judged, gpu, bundle))
    sys.stdout.write(compare_clocks(load_kernel_rows(database_folder("h200")), gpu, bundle))
    sys.stdout.write(compare_tiles(folder))
    sys.stdout.write(compare_steps(folder))
    sys.stdout.write(compare_power(folder))
    sys.stdout.write(measure_windows(folder))
    sys.stdout.write(split_energy(folder))


def compare_runs(rows: KernelRows, gpu: Gpu, bundle: Bundle) -> str:
    """Return errors of public sustained rows with the settled clock and with that of a run of
    ``RUN_S``.
    """
    settled, run = (predict_with_bundle(bundle, rows, gpu, run_s) for run_s in (None, RUN_S))
    capped = settled[:, 3] > float(np.mean(gpu.power.limit_w))
    lines = [
        "runs of a second: rows, mean error and median of measured over predicted, settled and over the run\n"
    ]
    for name, at in (("held by the limit", capped), ("not held", ~capped)):
        errors = [
            _summarise(rows.column("latency_s")[at] / found[at, 0]) for found in (settled, run)
        ]
        lines.append(f"  {name:18} {at.sum():4} {errors[0]}   {errors[1]}\n")
    return "".join(lines)


def count_low_watts(rows: KernelRows, gpu: Gpu, bundle: Bundle) -> str:
    """Return how many of the judged rows read watts of a card that its limit does not hold."""
    asked_w = predict_with_bundle(bundle, rows, gpu)[:, 3]
    held = asked_w > ASKED_W
    low = held & (rows.column("power_w") < FREE_W)
    said = f"asked for {asked_w[low].min():.0f} to {asked_w[low].max():.0f} W with random operands"
    return f"watts: {low.sum()} of {held.sum()} rows read less than {FREE_W:.0f} W, {said}\n"


def compare_clocks(rows: KernelRows, gpu: Gpu, bundle: Bundle) -> str:
    """Return our own sustained products at their measured clock by how much of their time memory
    takes.
    """
    half = np.array([op.family == "gemm" and op.dtype in ("bf16", "fp16") for op in rows.ops])
    known = rows.is_kind("sustained") & on_random_data(rows) & rows.fit & half
    rows = rows.select_rows(
        known & (rows.column("sm_clock_hz") < 0.98 * float(np.mean(gpu.clocks.max_hz)))
    )
    timeline = analyse_rows(bundle, rows, gpu)
    clock_hz = rows.column("sm_clock_hz")
    running_hz = np.empty(len(rows))
    for hz in np.unique(clock_hz):
        at_clock = clock_hz == hz
        running_hz[at_clock] = compute_effective_hz(timeline, hz, bundle.clock_law)[at_clock]
    main_phase = timeline.phases[-1]
    assert main_phase.cycles is not None
    assert main_phase.seconds is not None
    share = main_phase.seconds * running_hz / main_phase.cycles
    ratio = rows.column("latency_s") / compute_kernel_s(timeline.phases, running_hz)
    lines = [
        "clock: share of memory, rows, mean error and median of measured over predicted at the measured clock\n"
    ]
    for low, high in pairwise(SHARES):
        at: Mask = (share >= low) & (share < high)
        if at.any():
            lines.append(f"  {low:.1f} to {high:.1f} {at.sum():4} {_summarise(ratio[at])}\n")
    return "".join(lines)


def compare_tiles(folder: Path) -> str:
    """Return measured over predicted decode attention of four chips by the tiles that an SM takes
    in a row.
    """
    lines = [
        "tiles: chip, rows and median of measured over predicted for 1 to 4 tiles of an SM, and for over 16\n"
    ]
    for name in CHIPS:
        gpu = hardware.load_gpu(name)
        bundle = bundle_for(gpu) if name == "h200" else forecast_bundle(gpu)
        table = read_tables([folder / "aiconfigurator"], gpu, TABLE_ROWS)
        decode = [
            isinstance(op, PagedAttention) and op.kind_of_batch == "decode" for op in table.rows.ops
        ]
        table = table.select_rows(np.array(decode) & table.rows.is_kind("burst"))
        each = analyse_rows(bundle, table.rows, gpu).kernels.work.units / float(
            np.mean(gpu.sm_count)
        )
        ratio = table.rows.column("latency_s") / predict_tables_s(table, gpu, bundle)
        some = [ratio[(each > low) & (each <= high)] for low, high in TILES]
        lines.append(
            f"  {name:14}" + "".join(f" {len(r):4} {np.median(r):.2f}" for r in some) + "\n"
        )
    return "".join(lines)


def compare_steps(folder: Path) -> str:
    """Return the mean error of logs of TensorRT-LLM's decode kernels on the H200 by the steps of a
    tile.

    The H200 counts as a Blackwell chip here, so that tiles and parts are those of TensorRT-LLM.
    Heads that share no keys run another kernel there, and are left out."""
    gpu = hardware.load_gpu("h200")
    bundle = bundle_for(gpu)
    per_cycle = {**bundle.reference.per_cycle, "tensor_fp4_flop": 0.0}
    table = read_tables([folder / "aiconfigurator" / NVIDIA_TABLE], gpu, TABLE_ROWS)
    shared = [
        isinstance(op, PagedAttention)
        and op.kv_dtype is Dtype.FP8
        and 1 < op.heads // op.kv_heads <= 16
        for op in table.rows.ops
    ]
    table = table.select_rows(np.array(shared))
    lines = [
        f"steps: of a tile, and mean error of logs of {len(table.rows)} rows of TensorRT-LLM's decode attention\n"
    ]
    shipped = paged_attention.ENGINE_ATTENTION
    for steps in TILE_STEPS:
        paged_attention.ENGINE_ATTENTION = replace(shipped, tensorrt_tile_steps=steps)
        like_blackwell = replace(bundle, reference=replace(bundle.reference, per_cycle=per_cycle))
        ratio = table.rows.column("latency_s") / predict_tables_s(table, gpu, like_blackwell)
        lines.append(
            f"  {steps:.1f} {np.mean(np.abs(np.log(ratio))):.3f} median {np.median(ratio):.2f}\n"
        )
    paged_attention.ENGINE_ATTENTION = shipped
    return "".join(lines)


def compare_power(folder: Path) -> str:
    """Return what holds 90 % of the errors of power of whole models, and of what the error of time
    leaves of them.
    """
    lines = [
        "power: set, median of measured over forecast, what holds 90 % of the rows, and given the time measured\n"
    ]
    for some in load_published_models(folder):
        power, time = some.log_ratio("power"), some.log_ratio("latency")
        widths = [np.quantile(np.abs(error), 0.9) for error in (power, power + LESS_POWER * time)]
        lines.append(
            f"  {some.name:32} {np.median(np.exp(power)):.3f} {widths[0]:.3f} {widths[1]:.3f}\n"
        )
    return "".join(lines)


def measure_windows(folder: Path) -> str:
    """Return by how much the windows of public whole models exceed their runs, and how long failed
    ones are.
    """
    lines = [
        "windows: file, rows, seconds beyond 30 (5th, 50th, 95th percentile), time high and power low by percent\n"
    ]
    for path in sorted((folder / "energaizer" / "measurements").glob("a10*.csv")):
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
        count = np.array(
            [int(row["workload"].rpartition("_iter")[2].removesuffix(".csv")) for row in rows]
        )
        each_s, joules, mhz = (
            np.array([float(row[name]) for row in rows]) for name in ("time", "energy", "avg_freq")
        )
        each_s = each_s / 1e3
        window_s, watts = count * each_s, joules / each_s
        failed = window_s < FAILED_S
        plain = ~failed & (each_s > MANY_S[0]) & (each_s < MANY_S[1])
        beyond = np.quantile((window_s - RUNS_S - each_s / 2)[plain], [0.05, 0.5, 0.95])
        long = beyond[1] / (window_s[plain] - beyond[1])
        low = long * (
            1.0 - watts[failed].min() / watts[plain]
        )  # a failed run draws little more than an idle card
        shares = " ".join(f"{100.0 * np.median(share):.1f}" for share in (long, low))
        lines.append(
            f"  {path.name:28} {plain.sum():3} {' '.join(f'{s:.2f}' for s in beyond)}  {shares}\n"
        )
        if (
            len(set(mhz[failed])) >= LEAST_CLOCKS
        ):  # what is left at an endless clock, where the GPU takes no time
            left_s = np.polyfit(1.0 / mhz[failed], window_s[failed], 1)[1]
            lines.append(
                f"    {failed.sum()} runs failed: {left_s:.2f} s without the GPU's own time\n"
            )
    return "".join(lines)


def split_energy(folder: Path) -> str:
    """Return watts that go with time and joules that do not, of an A100's whole models, measured
    and forecast.
    """
    some = next(s for s in load_published_models(folder) if s.name.endswith("other clocks"))
    names = np.array([p.name for p in some.predictions])
    clock_hz, said_s, said_w, busy_s = (
        np.array([float(np.mean(getattr(p, name))) for p in some.predictions])
        for name in ("clock_hz", "latency_s", "power_w", "busy_s")
    )
    lines, shares = (
        ["joules: workload, clocks, P₀ measured and forecast in W, J measured over forecast\n"],
        [],
    )
    for name in sorted(set(names)):
        at: Mask = (names == name) & (clock_hz < FLAT_HZ)
        if at.sum() < LEAST_CLOCKS or np.mean(busy_s[at] / said_s[at]) < LEAST_BUSY:
            continue
        pairs = ((some.measured["latency"], some.measured["power"]), (said_s, said_w))
        (watts, joules), (said_watts, said_joules) = (
            np.polyfit(t[at], (t * w)[at], 1) for t, w in pairs
        )
        shares.append((watts / said_watts, joules / said_joules))
        lines.append(
            f"  {name:34} {at.sum():2} {watts:3.0f} {said_watts:3.0f} {shares[-1][1]:.2f}\n"
        )
    middle = np.median(shares, axis=0)
    return "".join(
        [*lines, f"  median of measured over forecast: P₀ {middle[0]:.2f}, J {middle[1]:.2f}\n"]
    )


def _summarise(ratio: Array) -> str:
    return f"{100.0 * np.mean(np.abs(1.0 / ratio - 1.0)):4.1f} % {np.median(ratio):.3f}"


if __name__ == "__main__":
    main()
