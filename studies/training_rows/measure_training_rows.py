"""Measure the training steps of ``training_plan.csv`` on one GPU: time, power, energy and memory of
whole steps.

Run on a node with PyTorch, Triton and transformers 5:
``PYTHONPATH=src python studies/training_rows/measure_training_rows.py --out DIR --set second
--seconds 235`` (``--dry`` runs two small steps of every row without a GPU.) The rows of a set are
predicted before any is measured.

Every row is built with random weights, warmed up, launched by the host a few times, captured in a
CUDA graph and held until power has settled. models.jsonl has a row for each, and one named
``-launched`` with the time of a step that the host launched; model_kernels.jsonl has the kernels of
eager steps, which are profiled last. A second call with the same folder measures what is missing,
without ``--retry`` nothing that failed. A capture that fails leaves PyTorch's random numbers
unusable: the script ends with status 3 and is to be called again. No clock, limit or mode is
changed."""

from __future__ import annotations

import argparse
import csv
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from training_variants import make_step, prepare_module

from wattcast.core.measured_rows import ModelKernels, ModelRow
from wattcast.core.row_journals import read_lines
from wattcast.core.whole_files import hold_folder
from wattcast.lab.campaigns.campaign_engine import Campaign, OperatorBench
from wattcast.lab.campaigns.model_campaign import (
    BuiltModel,
    ModelDevice,
    ModelDims,
    ModelRunSpec,
    build_model,
    find_dims,
    make_blank_model_row,
    measure_model,
    profile_iteration,
)
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import SettlingRule, say

PLAN = Path(__file__).with_name("training_plan.csv")
SETTLE = SettlingRule(least_s=2.5, longest_s=4.0)
LAUNCHED = 3  # steps that the host launches
ROW_S, COMPILED_ROW_S, PROFILE_S = 9.0, 40.0, 5.0  # time kept back for one more of each


@dataclass(frozen=True)
class TrainingRunSpec(ModelRunSpec):
    """One row of the plan."""

    plan: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def id(self) -> str:
        """The plan's name of the row."""
        return str(self.plan["id"])


def read_training_plan(chosen: str = "", only: str = "") -> list[TrainingRunSpec]:
    """Read planned rows in the order they are measured: of one set, or with a text in their names."""
    with PLAN.open(newline="", encoding="utf-8") as stream:
        rows = [
            {k: int(v) if v.isdigit() else v for k, v in row.items()}
            for row in csv.DictReader(stream)
        ]
    rows = [row for row in rows if chosen in ("", row["set"]) and only in row["id"]]
    return [
        TrainingRunSpec(row["model"], "train", row["batch"], row["seq"], plan=row) for row in rows
    ]


def build_step(spec: TrainingRunSpec, device: str, dims: ModelDims) -> tuple[BuiltModel, Any]:
    """Build the model of a row and one whole step of it."""
    torch._dynamo.reset()
    built = build_model(spec, torch, device, dims)
    built.module.config._attn_implementation = "sdpa"
    if dims.architecture == "qwen3_moe":
        built.module.config._experts_implementation = "grouped_mm"
    prepare_module(built.module, spec.plan)
    given = []
    for _ in range(spec.plan["accumulation"]):
        tokens = torch.randint(1, dims.vocab, (spec.batch, int(spec.seq or 0)), device=device)
        given.append({"input_ids": tokens, "labels": tokens.clone()})
        if dims.architecture != "bert":
            given[-1]["use_cache"] = False
    return built, make_step(built.module, spec.plan, given)


def measure_row(bench: OperatorBench, spec: TrainingRunSpec, campaign: Campaign) -> ModelRow:
    """Measure a row: launched by the host, then captured and held."""
    built, step = build_step(
        spec, "cuda", replace(find_dims(spec.model), layers=spec.plan["layers"])
    )
    device = bench.gpu
    device.recover()  # what building needed does not count
    device.warm(step)
    each_s = []
    for _ in range(LAUNCHED):
        begin = device.mark()
        device.issue(step, 1)
        end = device.mark()
        end.synchronize()
        each_s.append(begin.elapsed_time(end) / 1e3)
    blank = replace(
        make_blank_model_row(bench, spec), stack=spec.plan["stack"], dtype=spec.plan["precision"]
    )
    launched = replace(
        blank, id=f"{spec.id}-launched", graph=False, latency_s=float(np.median(each_s))
    )
    campaign.journal("models").append(
        replace(launched, peak_memory_byte=int(torch.cuda.max_memory_allocated()))
    )
    row = measure_model(bench, spec, built, step)
    return replace(row, stack=blank.stack, dtype=blank.dtype, parameters=built.parameters)


def run_plan(specs: list[TrainingRunSpec], out: Path, budget_s: float) -> bool:
    """Measure what of the plan is not on file yet, then profile it; False where a row was not
    captured.
    """
    began_s = time.monotonic()
    device = ModelDevice.open()
    with hold_folder(out), Sampler("nvml") as sampler:
        bench = OperatorBench.open(device, sampler, out, rule=SETTLE)
        campaign = Campaign(bench, out, began_s + budget_s)
        say(f"ready after {time.monotonic() - began_s:.1f} s; {len(specs)} rows planned")
        for spec in campaign.within(specs, ROW_S, "rows", every=1):
            if spec.plan["stack"] == "compiled" and campaign.left_s < COMPILED_ROW_S:
                say(f"  {spec.id}: no time left to compile")
                continue
            start_s = time.monotonic()
            device.recover()
            make = partial(measure_row, bench, spec, campaign)
            row = campaign.record("models", make_blank_model_row(bench, spec), make)
            if row is not None:
                found = f"{1e3 * (row.latency_s or 0.0):.2f} ms, {row.power_w or 0.0:.0f} W, {row.flags}"
                say(f"  {spec.id}: {row.error or found} ({time.monotonic() - start_s:.1f} s)")
                if row.error or not row.graph:
                    campaign.finish()
                    return False
        eager = [spec for spec in specs if spec.plan["stack"] == "eager"]
        for spec in campaign.within(eager, PROFILE_S, "profiles", every=1):
            device.recover()
            make_profile = partial(profile_row, bench, spec)
            campaign.record("model_kernels", ModelKernels(spec.id, run=bench.run), make_profile)
        say(str(campaign.finish()))
    return True


def profile_row(bench: OperatorBench, spec: TrainingRunSpec) -> ModelKernels:
    """Record the kernels of one step that the host launched."""
    _, step = build_step(spec, "cuda", replace(find_dims(spec.model), layers=spec.plan["layers"]))
    return profile_iteration(bench.gpu, spec.id, step, bench.run)


def run_dry(specs: list[TrainingRunSpec]) -> None:
    """Run two small steps of every row on the CPU."""
    for spec in specs:
        dims = find_dims(spec.model)
        heads = max(dims.heads // 8, 1)
        sizes = {
            "heads": heads,
            "kv_heads": min(dims.kv_heads or heads, heads),
            "head_dim": 16,
            "vocab": 320,
        }
        small = replace(
            dims, layers=2, hidden=16 * heads, intermediate=64, max_positions=64, **sizes
        )
        small = replace(small, kv_heads=1 if dims.kv_heads != dims.heads else heads)
        _, step = build_step(replace(spec, batch=2, seq=32), "cpu", small)
        losses = [float(step()) for _ in range(2)]
        say(f"{spec.id}: losses {losses}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("training-rows"), help="folder for the rows"
    )
    parser.add_argument("--seconds", type=float, default=235.0, help="budget of time")
    parser.add_argument(
        "--set", default="", help="rows of this set (first, second or third), else of all"
    )
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument(
        "--skip", default="", help="names of rows to leave out, separated by commas"
    )
    parser.add_argument(
        "--retry", action="store_true", help="measure rows again that failed in an earlier call"
    )
    parser.add_argument(
        "--dry", action="store_true", help="small steps on the CPU, nothing is measured"
    )
    options = parser.parse_args()
    rows = options.out / "models.jsonl"
    known = [] if options.retry or not rows.exists() else list(read_lines(rows))
    failed = {row["id"] for row in known if row.get("error")}
    left_out = {*options.skip.split(","), *failed}
    specs = [
        spec for spec in read_training_plan(options.set, options.only) if spec.id not in left_out
    ]
    if options.dry:
        run_dry(specs)
    elif not run_plan(specs, options.out, options.seconds):
        sys.exit(3)


if __name__ == "__main__":
    main()
