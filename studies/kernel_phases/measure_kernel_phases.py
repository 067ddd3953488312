"""Count the bytes, blocks and time of twenty operators with Nsight Compute.

Run ``python studies/kernel_phases/measure_kernel_phases.py --out FOLDER`` on a machine with a GPU,
PyTorch and Nsight Compute, from the repository's root. The operators are in
``kernel_phases.jsonl``, drawn by a seed before anything was measured (``--draw`` writes the file
again): linear layers in bf16 and fp8, attention, softmax, norms and elementwise operators as
PyTorch runs them, none of which is in the plan of the kernel campaign. Each runs twice warm and once
counted. ``kernel_counters.csv`` is the profiler's table. Clocks and caches are left alone.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from wattcast.lab.campaigns.kernel_plan import (
    OperatorSpec,
    read_kernel_plan,
    spec_from_operator,
)
from wattcast.lab.campaigns.nsight_counters import (
    POOL_BYTE,
    RANGE,
    count_operator,
    find_ncu,
    keep_known_metrics,
    make_ncu_command,
    query_metrics,
    read_wanted_metrics,
)
from wattcast.measure.sampler import make_child_environment
from wattcast.measure.steady_state import say

HERE = Path(__file__).parent
LIST = HERE / "kernel_phases.jsonl"
SEED = 54
LEAST_S, MOST_S = 8e-6, 1.5e-3  # by a roofline, so that a kernel is longer than its launch
MOST_BYTE = 4e8
LIMIT_S = 100.0
WRITE_S = 15.0  # ncu writes its table after the program has ended
ROWS = (32, 64, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192)
WIDTHS = (1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 11008, 14336)
COUNTS = (
    ("linear", "bf16", 7),
    ("linear", "fp8", 3),
    ("attention", "bf16", 4),
    ("softmax", "bf16", 1),
    ("rmsnorm", "bf16", 1),
    ("layernorm", "bf16", 1),
    ("elementwise", "bf16", 3),
)
FUNCTIONS = ("add", "mul", "gelu", "silu", "relu")


def draw_operator(
    random_source: random.Random,
    family: str,
    dtype: str,
) -> dict[str, Any]:
    """Draw the sizes of one operator."""
    pick = random_source.choice
    operator: dict[str, Any] = {"op": family, "dtype": dtype}
    match family:
        case "linear":
            operator |= {"m": pick(ROWS), "n": pick(WIDTHS), "k": pick(WIDTHS)}
            if dtype == "fp8":
                operator["out_dtype"] = "bf16"
        case "attention":
            heads, shared = pick(((16, 1), (32, 4), (32, 8), (40, 1), (64, 8), (24, 3)))
            length = pick((512, 1024, 1536, 2048, 3072, 4096))
            operator |= {
                "batch": pick((1, 2, 4, 8)),
                "heads": heads,
                "kv_heads": heads // shared,
                "q_len": length,
                "kv_len": length,
                "head_dim": pick((64, 128)),
                "causal": pick((True, False)),
            }
        case "elementwise":
            operator |= {"op": pick(FUNCTIONS), "n": pick(ROWS) * pick(WIDTHS)}
        case _:
            operator |= {"rows": pick(ROWS), "dim": pick(WIDTHS)}
    return operator


def draw_operators(seed: int = SEED) -> list[dict[str, Any]]:
    """Draw the operators of the study; those of the campaign's plan and too short ones are drawn
    again.
    """
    source = random.Random(seed)
    planned = {spec.id for spec in read_kernel_plan()}
    operators: list[dict[str, Any]] = []
    for family, dtype, count in COUNTS:
        drawn: list[dict[str, Any]] = []
        while len(drawn) < count:
            operator = draw_operator(source, family, dtype)
            spec = spec_from_operator(dict(operator))
            if spec is None or spec.id in planned or operator in drawn:
                continue
            if LEAST_S < spec.guessed_s < MOST_S and spec.byte < MOST_BYTE:
                drawn.append(operator)
        operators += drawn
    return operators


def read_operators() -> list[OperatorSpec]:
    """Read the operators of the study."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    specs = [spec_from_operator(json.loads(line)) for line in lines]
    return [spec for spec in specs if spec is not None]


def run_operators(out: Path, budget_s: float) -> None:
    """Run each operator twice warm and once for the profiler."""
    from wattcast.lab.campaigns.operator_rows import CampaignGpu

    deadline_s = time.monotonic() + budget_s
    gpu = CampaignGpu.open(POOL_BYTE)
    for spec in read_operators():
        if time.monotonic() > deadline_s:
            say(f"the budget is spent before {spec.operator}")
            break
        try:
            count_operator(gpu, spec)
        except Exception as error:
            say(f"{spec.operator}: {type(error).__name__}: {str(error)[:200]}")


def collect_counters(out: Path) -> int:
    """Run the operators under ``ncu``."""
    ncu = find_ncu()
    metrics = keep_known_metrics(read_wanted_metrics(), query_metrics(ncu))
    raw = out / "kernel_counters.csv"
    command = [
        *make_ncu_command(ncu, raw, metrics),
        *("--profile-from-start", "off", "--nvtx"),
        sys.executable,
        __file__,
        *("--out", str(out), "--target"),
    ]
    try:
        subprocess.run(
            command,
            timeout=LIMIT_S + WRITE_S,
            check=False,
            env=make_child_environment(),
            stdout=2,
        )
    except subprocess.TimeoutExpired:
        say("ncu did not end in time.")
    lines = raw.read_text(errors="replace").splitlines() if raw.exists() else []
    counted = sum(RANGE in line for line in lines)
    say(f"{counted} kernels counted, {len(metrics)} metrics")
    if counted == 0:
        say("\n".join(lines)[-1500:])
    return 0 if counted >= len(read_operators()) else 4


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--target", action="store_true", help="the process under ncu")
    parser.add_argument("--draw", action="store_true", help="write the list of operators")
    options = parser.parse_args()
    if options.draw:
        lines = [json.dumps(operator) for operator in draw_operators()]
        LIST.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return 0
    if options.out is None:
        parser.error("--out is needed")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.target:
        run_operators(options.out, LIMIT_S)
        return 0
    return collect_counters(options.out)


if __name__ == "__main__":
    sys.exit(main())
