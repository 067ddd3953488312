"""Results of an imagined H200, from a simple model of each benchmark: for tests of tables, figures
and advice.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from wattcast.lab.microbench.benchmark_kernels import add_counts, make_blank_row
from wattcast.lab.microbench.benchmark_suite import list_benchmarks
from wattcast.lab.microbench.microbench_results import MicroRow
from wattcast.lab.microbench.unit_source import Benchmark

SMS, CLOCK_HZ, IDLE_W = 132, 1.9e9, 120.0
DRAM_BYTE_PER_S = 4.15e12
RATES = {  # operations per cycle and SM
    **{
        "fp32_fma": 127.0,
        "fp32_add": 127.0,
        "fp64_fma": 63.5,
        "int32_add": 63.8,
        "fp32_exp2_log2": 7.95,
    },
    **{
        "fp32_rcp": 15.9,
        "wgmma_bf16": 3950.0,
        "convert_int32": 31.0,
        "fp16x2_fma": 127.0,
        "int32_popc": 15.9,
    },
    **{
        "dram_copy": 1.05,
        "dram_read": 1.1,
        "l2_read": 1.9,
        "shared_read": 7.9,
        "conflicts_0": 31.5,
    },
}
WATTS = {"dram_copy": 560.0, "fp64_fma": 520.0, "wgmma_bf16": 700.0, "conflicts_0": 300.0}


def rate(benchmark: Benchmark) -> float:
    at = benchmark.at
    curves = {
        "conflicts": lambda: 31.5 / (at + 1.0),
        "coalescence": lambda: 0.26 * min(at, 8.0) / 8.0 * 8.0,
        "access": lambda: 1.05 * min(16.0 / at, 6.0),
        "divergence": lambda: 126.0 / at,
        "occupancy": lambda: min(8.0 * at, 126.0),
        "active": lambda: 127.0,
    }
    if benchmark.curve in curves:
        return curves[benchmark.curve]()
    if (
        benchmark.working_set == "dram" and benchmark.name not in RATES
    ):  # a little slower than dram_copy
        return (
            DRAM_BYTE_PER_S / (benchmark.unit.byte * SMS * CLOCK_HZ)
            if benchmark.unit.byte
            else 10.0
        )
    return RATES.get(benchmark.name, 10.0)


def watts(benchmark: Benchmark, repeat: int) -> float:
    base = WATTS.get(benchmark.name, 400.0)
    if benchmark.curve == "conflicts":
        base = 300.0 - 3.0 * benchmark.at
    return base * (1.01 if repeat else 1.0)


def row(benchmark: Benchmark, repeat: int = 0) -> MicroRow:
    counted = add_counts(
        make_blank_row("", benchmark, repeat), benchmark, SMS * benchmark.blocks_per_sm, 1000
    )
    speed = rate(benchmark)
    time_s = (counted.operations or 0.0) / (speed * SMS * CLOCK_HZ) * (1.004 if repeat else 1.0)
    return replace(
        counted,
        launch_s=time_s,
        operations_per_cycle_sm=speed,
        cycles=time_s * CLOCK_HZ,
        power_w=watts(benchmark, repeat),
        max_power_w=watts(benchmark, repeat) + 12.0,
        idle_power_w=IDLE_W,
        memory_power_w=70.0,
        effective_clock_hz=CLOCK_HZ,
        sm_clock_hz=1.98e9,
        ticks=9,
    )


def write(folder: Path, repeats: int = 2) -> Path:
    """``microbench.jsonl`` of the whole suite, with a failed row and idle rows."""
    rows = [
        asdict(row(b, repeat))
        for repeat in range(repeats)
        for b in list_benchmarks()
        if b.supported("sm_90a")
    ]
    byte = 2.0 * (1 << 30)
    copy = next(r for r in rows if r["name"] == "dram_copy")
    memcpy = {
        "id": "dram_memcpy",
        "name": "dram_memcpy",
        "group": "memory",
        "operation": "byte",
        "power_w": 550.0,
    }
    memcpy |= {
        "byte": byte,
        "operations": byte,
        "launch_s": byte * copy["launch_s"] / copy["byte"] * 0.98,
    }
    rows += [memcpy | {"idle_power_w": IDLE_W, "ticks": 8}]
    rows += [
        {
            "id": "idle_context_on",
            "name": "idle_context_on",
            "group": "idle",
            "power_w": IDLE_W,
            "ticks": 12,
        }
    ]
    rows += [{"id": "broken", "name": "broken", "group": "memory", "error": "CudaError: no"}]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "microbench.jsonl").write_text("\n".join(json.dumps(r) for r in rows) + "\n")
    return folder
