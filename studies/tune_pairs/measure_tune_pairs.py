"""Measure small kernels before and after a change, with which ``wattcast lab tune`` is judged.

Run ``python studies/tune_pairs/measure_tune_pairs.py --out FOLDER`` on a machine with a GPU (time
and power, about two minutes), then the same with ``--counters`` (Nsight Compute). ``--dry-run``
compiles the kernels and measures nothing.

``tune_pairs.csv`` names every program, its kernels before and after each change, and its use. It
was written before anything was measured: pairs for mending may be looked at while `tune` is
changed, held-out pairs when it is done. A change that moves the time by less than 3 % counts as
none. The first advice is right where it is one of the two changes that saved most time of the
program's measured single changes.

Rows go to ``tune_pairs.jsonl`` as they come and a second run goes on there. Clocks are never set.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.core.row_journals import Journal
from wattcast.lab.campaigns.nsight_counters import (
    find_ncu,
    keep_known_metrics,
    make_ncu_command,
    query_metrics,
)
from wattcast.measure.cuda_device import (
    CudaDevice,
    CudaError,
    CudaKernel,
    DeviceFault,
    compile_cubin,
)
from wattcast.measure.sampler import Sampler, make_child_environment
from wattcast.measure.steady_state import (
    SettlingRule,
    describe_window,
    hold_load,
    make_run_info,
    make_run_name,
    say,
)

HERE = Path(__file__).parent
METRICS = HERE.parents[1] / "src" / "wattcast" / "microbench" / "microbench_metrics.csv"
TYPES = (*(ctypes.c_void_p,) * 4, ctypes.c_int)
LARGEST = 1 << 25  # elements of an input
RULE = SettlingRule(
    settle_s=0.35, least_ticks=6, longest_s=2.4, least_s=1.2, linger_s=0.25, look_s=0.04
)
BURSTS, BURST_S, REST_S = 15, 4e-4, 0.01
CHUNK_S = 0.02
COMPARED = 1 << 21  # numbers at the begin and at the end of an output
WARM_S = 4.0
STALLS = "barrier dispatch_stall drain imc_miss lg_throttle long_scoreboard math_pipe_throttle membar mio_throttle "
STALLS += "no_instruction not_selected selected short_scoreboard sleeping tex_throttle wait"
MORE_METRICS = [
    f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio" for why in STALLS.split()
]
MORE_METRICS += [
    "smsp__average_warp_latency_per_inst_issued.ratio",
    "smsp__warps_eligible.avg.per_cycle_active",
    "smsp__sass_average_data_bytes_per_sector_mem_global_op_st.ratio",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "l1tex__lsuin_requests.sum",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_red.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_red.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_atom.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_atom.sum",
    "lts__t_sectors_op_atom.sum",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "launch__occupancy_limit_blocks",
    "launch__occupancy_limit_shared_mem",
    "launch__occupancy_limit_warps",
    "launch__waves_per_multiprocessor",
]


@dataclass(frozen=True)
class ProgramVersion:
    """A program before or after a change: its kernels in order, and the shape of their launches."""

    program: str
    use: str
    change: str
    kernels: tuple[str, ...]
    threads: int
    blocks: int
    n: int
    shared_byte: int
    prepare: str
    outputs: int
    dtype: str
    rtol: float
    advice: str = ""  # what an expert would say first, of sets that name it; ways apart by "|"

    @property
    def id(self) -> str:
        """The program and the change."""
        return f"{self.program}: {self.change}"


def read_versions(table: Path = HERE / "tune_pairs.csv") -> list[ProgramVersion]:
    """Read a table of versions, by default ``tune_pairs.csv``."""
    with table.open(encoding="utf-8") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row |= {
            name: int(row[name]) for name in ("threads", "blocks", "n", "shared_byte", "outputs")
        }
        row |= {"kernels": tuple(row["kernels"].split()), "rtol": float(row["rtol"])}
    return [ProgramVersion(**row) for row in rows]


class PairBench:
    """The device with inputs in its memory, and every kernel that was launched once."""

    def __init__(self, cubin: bytes | None = None) -> None:
        self.device = device = CudaDevice.open()
        self.cubin = cubin or compile_cubin(
            (HERE / "tune_kernels.cu").read_text(), device.architecture, "tune_kernels.cu"
        )
        self.single, self.double = device.allocate(4 * LARGEST), device.allocate(8 * LARGEST)
        self.out, self.room = device.allocate(8 * LARGEST), device.allocate(8 * LARGEST)
        self.loaded: dict[tuple[str, int], CudaKernel] = {}
        self.launch("fill_inputs", LARGEST // 256, 256, LARGEST)
        first = device.download(self.single, 1 << 16, np.float32)
        if not (0.45 < float(first.mean()) < 0.55 and float(first.max()) < 1.0):
            raise CudaError("the inputs are not what was written.")

    def launch(self, name: str, blocks: int, threads: int, n: int, shared_byte: int = 0) -> None:
        """Put one launch on the stream."""
        kernel = self.loaded.get((name, shared_byte))
        if kernel is None:
            kernel = self.loaded[name, shared_byte] = self.device.load(
                self.cubin, name, shared_byte
            )
        self.device.launch(
            kernel, blocks, threads, (self.single, self.double, self.out, self.room, n), TYPES
        )

    def enqueue(self, version: ProgramVersion) -> None:
        """Put the program's kernels on the stream, in order."""
        for name in version.kernels:
            self.launch(name, version.blocks, version.threads, version.n, version.shared_byte)

    def prepare(self, version: ProgramVersion) -> None:
        """Bring the memory into the state that the program expects."""
        self.device.zero(self.out, 8 * LARGEST)
        self.device.zero(self.room, 8 * LARGEST)
        if version.prepare:
            self.launch(version.prepare, version.blocks, version.threads, version.n)

    def run_once(self, version: ProgramVersion) -> np.ndarray[Any, Any]:
        """Run the program on fresh memory and return the begin and the end of its output."""
        self.prepare(version)
        self.enqueue(version)
        each, looked = np.dtype(version.dtype).itemsize, min(version.outputs, COMPARED)
        last = self.out + (version.outputs - looked) * each
        parts = [self.device.download(at, looked, version.dtype) for at in (self.out, last)]
        return np.concatenate(parts).astype(np.float64)

    def time_bursts_s(self, version: ProgramVersion) -> list[float]:
        """Time short bursts after rests, so that the power limit has no say."""
        calls, took_s = 1, []
        enqueue = partial(self.enqueue, version)
        for turn in range(BURSTS + 3):
            begin = self.device.mark()
            for _ in range(calls):
                enqueue()
            end = self.device.mark()
            end.synchronize()
            each_s = begin.elapsed_time(end) / 1e3 / calls
            self.device.recycle([begin, end])
            if turn < 3:  # warm up, and find how many calls fill a burst
                calls = max(1, min(round(BURST_S / each_s), 64))
            else:
                took_s.append(each_s)
                time.sleep(REST_S)
        return took_s


def measure_version(
    bench: PairBench, sampler: Sampler, version: ProgramVersion, wanted: np.ndarray[Any, Any] | None
) -> dict[str, Any]:
    """Check the output against the program's before, then measure bursts and a sustained load."""
    found = bench.run_once(version)
    error = (
        float(np.max(np.abs(found - wanted) / (np.abs(wanted) + 1e-3)))
        if wanted is not None
        else 0.0
    )
    if not np.isfinite(found).all() or error > version.rtol:
        raise CudaError(
            f"{version.id}: its output differs from the program's before by {error:.2g}."
        )
    bursts_s = bench.time_bursts_s(version)
    burst_s = float(np.median(bursts_s))
    per_chunk = max(round(CHUNK_S / burst_s), 1)

    def queue_chunk() -> None:
        for _ in range(per_chunk):
            bench.enqueue(version)

    load = hold_load(sampler, bench.device, queue_chunk, RULE)
    bench.device.recycle(list(load.marks))
    call_s = load.chunk_s / per_chunk
    return {
        "id": version.id,
        "program": version.program,
        "use": version.use,
        "change": version.change,
        "kernels": list(version.kernels),
        "largest_error": error,
        "burst_s": burst_s,
        "burst_quartiles_s": [float(q) for q in np.percentile(bursts_s, [25, 75])],
        "sustained_s": float(call_s.mean()),
        "energy_j": float(load.window.ticks.power_w * call_s.mean()),
        **{
            name: value for name, value in describe_window(load.window).items() if value is not None
        },
    }


def measure_pairs(
    out: Path,
    versions: list[ProgramVersion],
    budget_s: float,
    cubin: bytes | None = None,
) -> int:
    """Measure time and power of every version that ``out`` lacks; return how many failed."""
    deadline_s, failed = time.monotonic() + budget_s, 0
    journal, run = Journal(out / "tune_pairs.jsonl"), make_run_name()
    with Sampler("nvml") as sampler:
        bench = PairBench(cubin)
        device = bench.device
        info = make_run_info(
            run, sampler.identity, sm_count=device.sm_count, l2_byte=device.l2_byte
        )
        Journal(out / "runs.jsonl", key="run").append(info)
        end_s = time.monotonic() + WARM_S
        while time.monotonic() < end_s:
            for _ in range(4):
                bench.enqueue(versions[0])
            device.synchronize()
        before: dict[str, np.ndarray[Any, Any]] = {}
        for version in versions:
            if time.monotonic() > deadline_s:
                say("the budget is spent; run again to go on.")
                break
            try:
                if version.change == "before":
                    before = {version.program: bench.run_once(version)}
                if version.id in journal.ids:
                    continue
                row = measure_version(bench, sampler, version, before.get(version.program))
                journal.append({**row, "run": run})
                say(
                    f"{version.id:44} {1e6 * row['burst_s']:9.1f} us {row['power_w']:6.1f} W {row['flags']}"
                )
            except DeviceFault:
                raise
            except Exception as error:
                failed += 1
                journal.append(
                    {"id": version.id, "error": f"{type(error).__name__}: {error}", "run": run}
                )
                say(f"{version.id}: {type(error).__name__}: {error}")
        mark, began_s = sampler.head, time.monotonic()
        time.sleep(1.3)
        idle = sampler.since(mark).between(began_s + 0.5, np.inf)
        journal.append({"id": f"idle {run}", "instant_w": idle.mean("instant_w"), "run": run})
    return failed


def count_pairs(
    versions: list[ProgramVersion],
    budget_s: float,
    cubin: bytes | None = None,
) -> None:
    """Launch every program twice, the second time for the profiler; those before a change come
    first.
    """
    deadline_s, bench, seen = time.monotonic() + budget_s, PairBench(cubin), set()
    for version in sorted(versions, key=lambda v: v.change != "before"):
        shape = (version.kernels, version.blocks, version.shared_byte)
        if time.monotonic() > deadline_s:
            say(f"the budget is spent before {version.id}")
            break
        if shape in seen:
            continue
        seen.add(shape)
        bench.prepare(version)
        bench.enqueue(version)
        bench.device.synchronize()
        bench.device.profile(True)
        bench.enqueue(version)
        bench.device.synchronize()
        bench.device.profile(False)


def collect_counters(out: Path, budget_s: float, use: str) -> int:
    """Run the programs under ``ncu``; a list with a metric that it refuses is replaced by the
    shorter one.
    """
    ncu, raw = find_ncu(), out / "tune_pairs_ncu.csv"
    with METRICS.open(encoding="utf-8") as file:
        usual = [row["metric"] for row in csv.DictReader(file)]
    known = query_metrics(ncu)
    for wanted in ([*usual, *MORE_METRICS], usual):
        command = [
            *make_ncu_command(ncu, raw, keep_known_metrics(wanted, known)),
            "--profile-from-start",
            "off",
        ]
        command += [
            sys.executable,
            __file__,
            "--out",
            str(out),
            "--target",
            "--use",
            use,
            "--budget",
            f"{budget_s:.0f}",
        ]
        try:
            subprocess.run(
                command, timeout=budget_s + 60.0, check=False, env=make_child_environment()
            )
        except subprocess.TimeoutExpired:
            say("ncu did not end in time.")
        text = raw.read_text(errors="replace") if raw.exists() else ""
        counted = sum(line.startswith('"') and "__" in line for line in text.splitlines()) - 1
        say(f"{counted} launches counted, {len(keep_known_metrics(wanted, known))} metrics")
        if counted > 4:
            return 0
        say(text[-1500:])
    return 4


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--counters", action="store_true")
    parser.add_argument("--target", action="store_true", help="the process under ncu")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", default="", help="programs, comma-separated")
    parser.add_argument(
        "--use", default="", help="mending, held-out, second held-out ...: pairs of this use alone"
    )
    parser.add_argument("--budget", type=float, default=150.0, help="seconds")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    only = set(filter(None, options.only.split(",")))
    versions = [
        v for v in read_versions() if (not only or v.program in only) and options.use in ("", v.use)
    ]
    if options.dry_run:
        cubin = compile_cubin((HERE / "tune_kernels.cu").read_text(), "sm_90a", "tune_kernels.cu")
        names = {
            name
            for v in versions
            for name in (*v.kernels, *filter(None, [v.prepare]))
            if name.encode() in cubin
        }
        lacking = {name for v in versions for name in v.kernels} - names
        print(
            f"{len(versions)} versions, {len(names)} kernels, {len(cubin)} bytes; lacking: {sorted(lacking)}"
        )
        return 4 if lacking else 0
    if options.target:
        count_pairs(versions, options.budget)
        return 0
    if options.counters:
        return collect_counters(options.out, options.budget, options.use)
    return 4 if measure_pairs(options.out, versions, options.budget) else 0


if __name__ == "__main__":
    sys.exit(main())
