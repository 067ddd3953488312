"""Small made-up files under the names that documented commands use for a reader's own."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

from tests.lab.gpuwattch.demo_chip import demo_architecture

from wattcast.hardware import load_gpu
from wattcast.lab.gpuwattch.architecture import write_architecture
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, dialect_counters
from wattcast.lab.microbench.microbench_results import results_folder
from wattcast.predictor.bundle import forecast_bundle
from wattcast.predictor.bundle.calibrated import save_bundle

CHIPS = ("gpuwattch_gtx480.xml", "gpu.xml")
KERNEL = {"op": "linear", "m": 64, "n": 4096, "k": 4096, "dtype": "bf16"}
TIME = "gpu__time_duration.sum"
CAMPAIGN = (
    {"record": "run", "run": "r1", "date": "2026-11-16T00:00:00+00:00"},
    {
        "record": "row",
        "id": "burst-1",
        "run": "r1",
        "kind": "burst",
        "family": "linear",
        "latency_s": 1e-5,
    }
    | {"operator": {"op": "linear", "m": 8, "n": 8, "k": 8}},
)
TEXTS = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,10,3\n"
    "2023-11-16 18:15:47.6805900,20,4\n",
    "mine.csv": "model,batch,seq,phase,latency_s\ngpt2,1,64,prefill,2.9 ms\nbert-large,1,64,forward,5.1 ms\n",
    "nvidia-smi.csv": "timestamp, power.draw [W]\n"
    + "".join(f"2026/10/25 02:59:0{second}.100, 300.00 W\n" for second in range(10)),
    "kernels.json": json.dumps({"name": "mine", "ops": [KERNEL]}),
    "hall.yaml": "hours: 24\ngroups:\n  - name: job\n    system: dgx-h100\n    racks: 2\n"
    "    train: {model: llama3-8b}\n",
    "requests.csv": "arrival_s,prompt_tokens,output_tokens\n0.0,100,10\n0.5,200,20\n",
    "run.json": json.dumps(
        {"name": "python", "duration_s": 0.6, "power_w": 240.0, "energy_j": 144.0}
    ),
}


def stage_files(folder: Path) -> None:
    """Write the files into ``folder``: what a stranger brings, as small as it can be."""
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name in CHIPS:
        write_architecture(demo_architecture(), folder / name)
    columns = [c.column for c in dialect_counters(SimulatorDialect.GPUWATTCH)]
    rows = [
        ",".join(f"{1.0 + 0.01 * i + j:f}" for j in range(len(columns))) + "," for i in range(6)
    ]
    trace = "\n".join([",".join(columns), *rows]) + "\n"
    (folder / "TRACE").write_text(trace)
    energies = [
        ["counter", "mcpat_energy_J_per_count"],
        *([c, 1e-7 if c.startswith("MEM") else 1e-10] for c in columns),
    ]
    for name in ("gtx480.csv", "TABLE"):
        _write_table(folder / name, [*energies, ["#executionTime_s(sample)", 7.14285714e-07]])
    (folder / "metric_trace.log.gz").write_bytes(gzip.compress(trace.encode()))
    parts = [
        [f"app{i % 5}_k{i}", 1.4 * (5 + i) + 0.7 * (20 - i), 0.001, 5 + i, 20 - i]
        for i in range(15)
    ]
    _write_table(
        folder / "runs.csv", [["kernel", "watts", "seconds", "part_RFP", "part_L2CP"], *parts]
    )
    reads = [[f"k{i}", 1e9 * (1 + i % 4), 1e9 * (1 + i % 3), 1e8 * (1 + i % 5)] for i in range(20)]
    watts = [
        [name, 2e-9 * rd + 1e-9 * wr + 4e-9 * pre, 1.0, pre, rd, wr] for name, rd, wr, pre in reads
    ]
    _write_table(
        folder / "dram.csv",
        [["kernel", "dram_watts", "seconds", "MEM_PRE", "MEM_RD", "MEM_WR"], *watts],
    )
    clocks = [(core, 12000 / core, 60 + core / 20) for core in range(600, 1165, 47)]
    lines = [
        [memory, core, ms, watt, ms * watt] for memory in (810, 3505) for core, ms, watt in clocks
    ]
    _write_table(folder / "table.csv", [["work"], *lines])
    for name in ("DIR", "mine"):
        (folder / name).mkdir()
        (folder / name / "rows.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in CAMPAIGN)
        )
    save_bundle(forecast_bundle(load_gpu("h100-sxm")), folder / "my-bundle")
    measured = results_folder(load_gpu("h200"))
    (folder / "rows").symlink_to(measured)
    (folder / "DIR" / "microbench.jsonl").symlink_to(measured / "microbench.jsonl")
    sizes = [(64 << i % 7, 64 << i % 5, 64 << i % 6) for i in range(210)]
    products = [["torch", "bfloat16", m, n, k, 0.005 + m * n * k / 1e11] for m, n, k in sizes]
    (folder / "tables").mkdir()
    heading = ["kernel_source", "gemm_dtype", "m", "n", "k", "latency"]
    _write_table(folder / "tables" / "l40s.vllm-0.24.0.gemm.csv", [heading, *products])
    profile = ["ID", "Kernel Name", TIME, "sm__inst_executed_pipe_fp64.sum"]
    _write_table(
        folder / "profile.csv",
        [profile, ["", "", "nsecond", "inst"], [0, "fp64_product", 1e6, 2.5e8]],
    )


def _write_table(path: Path, rows: list[list[object]]) -> None:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
