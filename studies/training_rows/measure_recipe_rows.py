"""Measure the training steps of ``recipe_plan.csv`` on one GPU: fp8 recipes, 4-bit weights,
convolutions, long sequences, packed and padded batches.

Run on a node with what ``recipe_variants`` names:
``PYTHONPATH=src:LIBRARIES python studies/training_rows/measure_recipe_rows.py --out DIR --set fitting
--seconds 200``; ``--dry`` runs two small steps of every row without a GPU. Rows of the fitting set are
measured first, coefficients are fitted to them alone, then rows of the held-out set are predicted,
and only then measured. What the held-out set showed was mended; the ``second`` set has other models and
shapes, and was predicted before any row of it was measured.

Rows are measured as ``measure_training_rows`` says. Rows in fp8 are compiled beforehand by
processes of their own (``--compile``), side by side, through the compiler's cache on disk. A second
call with the same folder measures what is missing; status 3: a capture failed, call again."""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import recipe_variants as variants
import torch

from wattcast.core.measured_rows import ModelKernels, ModelRow
from wattcast.core.row_journals import read_lines
from wattcast.core.whole_files import hold_folder
from wattcast.lab.campaigns.campaign_engine import Campaign, OperatorBench
from wattcast.lab.campaigns.model_campaign import (
    BuiltModel,
    ModelDevice,
    ModelRunSpec,
    build_model,
    find_dims,
    make_blank_model_row,
    measure_model,
    profile_iteration,
)
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import SettlingRule, say

PLAN = Path(__file__).with_name("recipe_plan.csv")
SETTLE = SettlingRule(least_s=2.0, longest_s=3.5)
LAUNCHED = 2  # steps that the host launches
ROW_S, PROFILE_S = 9.0, 5.0  # time kept back for one more of each
COMPILE_S = 150.0  # after which processes that compile are ended


@dataclass(frozen=True)
class RecipeRunSpec(ModelRunSpec):
    """One row of the plan."""

    plan: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def id(self) -> str:
        """The plan's name of the row."""
        return str(self.plan["id"])

    @property
    def head(self) -> str:
        """For which tokens the language-model head runs; empty for a network of pictures."""
        return "" if self.is_network else "all"

    @property
    def is_network(self) -> bool:
        """Whether it trains a convolutional network."""
        return self.id.startswith("conv-")


def read_recipe_plan(chosen: str = "", only: str = "") -> list[RecipeRunSpec]:
    """Read planned rows in the order they are measured: of one set, or with a text in their names."""
    with PLAN.open(newline="", encoding="utf-8") as stream:
        rows = [
            {k: int(v) if v.isdigit() else v for k, v in row.items()}
            for row in csv.DictReader(stream)
        ]
    rows = [row for row in rows if chosen in ("", row["set"]) and only in row["id"]]
    return [
        RecipeRunSpec(row["model"], "train", row["batch"], row["seq"], plan=row) for row in rows
    ]


def build_step(
    spec: RecipeRunSpec,
    device: str,
    changes: dict[str, int] | None = None,
) -> tuple[BuiltModel, Any]:
    """Build the model of a row and one whole step of it; ``changes`` make its sizes smaller."""
    torch._dynamo.reset()
    if spec.is_network:
        module = variants.build_network(spec.model, spec.plan["recipe"], device)
        count = sum(p.numel() for p in module.parameters())
        built = BuiltModel(module, spec.model, True, count)
        return built, variants.make_step(
            module, spec.plan, variants.draw_pictures(spec.plan, device)
        )
    dims = replace(find_dims(spec.model), **({"layers": spec.plan["layers"]} | (changes or {})))
    built = build_model(spec, torch, device, dims)
    is_packed = spec.plan["recipe"] == "packed"
    attention = variants.register_packed_attention(spec.plan, device) if is_packed else "sdpa"
    built.module.config._attn_implementation = attention
    built.module = variants.prepare_language_model(built.module, spec.plan)
    tokens = torch.randint(1, dims.vocab, (spec.batch, int(spec.seq or 0)), device=device)
    inputs = {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False}
    inputs = variants.add_inputs(spec.plan, inputs, device)
    return built, variants.make_step(built.module, spec.plan, inputs)


def measure_row(
    bench: OperatorBench,
    spec: RecipeRunSpec,
    campaign: Campaign,
) -> ModelRow:
    """Measure a row: launched by the host, then captured and held, then checked."""
    began_s = time.monotonic()
    built, step = build_step(spec, "cuda")
    device = bench.gpu
    device.recover()  # what building needed does not count
    built_s = time.monotonic()
    device.warm(step)
    each_s = []
    for _ in range(LAUNCHED):
        begin = device.mark()
        device.issue(step, 1)
        end = device.mark()
        end.synchronize()
        each_s.append(begin.elapsed_time(end) / 1e3)
    blank = replace(
        make_blank_model_row(bench, spec), stack=spec.plan["stack"], dtype=spec.plan["recipe"]
    )
    launched = replace(
        blank, id=f"{spec.id}-launched", graph=False, latency_s=float(np.median(each_s))
    )
    campaign.journal("models").append(
        replace(launched, peak_memory_byte=int(torch.cuda.max_memory_allocated()))
    )
    warm_s = time.monotonic()
    row = measure_model(bench, spec, built, step)
    if not variants.are_finite(built.module, step()):
        row = replace(row, error="a loss or a weight is no number")
    parts = f"{built_s - began_s:.1f} build, {warm_s - built_s:.1f} warm"
    say(f"  {spec.id}: {parts}, {time.monotonic() - warm_s:.1f} s held")
    return replace(row, stack=blank.stack, dtype=blank.dtype, parameters=built.parameters)


def run_plan(
    specs: list[RecipeRunSpec],
    out: Path,
    budget_s: float,
    profiles: bool,
) -> bool:
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
            device.recover()
            make = partial(measure_row, bench, spec, campaign)
            row = campaign.record("models", make_blank_model_row(bench, spec), make)
            if row is not None:
                power = f"{row.power_w or 0.0:.0f} W"
                say(
                    f"  {spec.id}: {1e3 * (row.latency_s or 0.0):.2f} ms, {power}, {row.flags} {row.error}"
                )
                if not row.graph or row.error:
                    return False
        for spec in campaign.within(specs if profiles else [], PROFILE_S, "profiles", every=1):
            device.recover()
            make_profile = partial(profile_row, bench, spec)
            campaign.record("model_kernels", ModelKernels(spec.id, run=bench.run), make_profile)
        say(str(campaign.finish()))
    return True


def profile_row(bench: OperatorBench, spec: RecipeRunSpec) -> ModelKernels:
    """Record the kernels of one step that the host launched."""
    _, step = build_step(spec, "cuda")
    return profile_iteration(bench.gpu, spec.id, step, bench.run)


def compile_rows(specs: list[RecipeRunSpec]) -> None:
    """Compile the layers of fp8 rows side by side, each row in a process of its own."""
    began_s = time.monotonic()
    names = [spec.id for spec in specs if spec.plan["recipe"].startswith("fp8")]
    os.environ["TRITON_CACHE_AUTOTUNING"] = "1"  # what was tried is not tried again
    settings = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "3"}
    started = [
        subprocess.Popen([sys.executable, __file__, "--compile", name], env=settings)
        for name in names
    ]
    for process in started:
        try:
            process.wait(max(COMPILE_S - (time.monotonic() - began_s), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
    say(f"compiled {len(names)} rows in {time.monotonic() - began_s:.1f} s")


def compile_row(name: str) -> None:
    """Take two steps of one layer of a row, so that what is compiled lies in the cache."""
    (spec,) = [spec for spec in read_recipe_plan() if spec.id == name]
    began_s = time.monotonic()
    _, step = build_step(spec, "cuda", {"layers": 1})
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    say(f"  {name} compiled in {time.monotonic() - began_s:.1f} s")


def run_dry(specs: list[RecipeRunSpec]) -> None:
    """Run two small steps of every row on the CPU."""
    tiny = {
        "layers": 2,
        "hidden": 128,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 64,
        "intermediate": 256,
        "vocab": 320,
        "max_positions": 128,
    }
    for spec in specs:
        side = 32 if spec.is_network else 64
        plan = spec.plan | {"batch": 2, "seq": side, "documents": min(spec.plan["documents"], 40)}
        plan |= {"lora": min(spec.plan["lora"], 4)}
        small = replace(spec, batch=2, seq=side, plan=plan)
        many = find_dims(spec.model) if not spec.is_network else None
        changes = tiny | ({"kv_heads": 2} if many and many.heads == many.kv_heads else {})
        built, step = build_step(small, "cpu", changes)
        losses = [float(step()) for _ in range(2)]
        finite = variants.are_finite(built.module, step())
        say(f"{spec.id}: losses {losses}, finite {finite}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("recipe-rows"), help="folder for the rows")
    parser.add_argument("--seconds", type=float, default=200.0, help="budget of time")
    parser.add_argument("--set", default="", help="rows of this set (fitting or held-out)")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--skip", default="", help="names to leave out, separated by commas")
    parser.add_argument("--compile", default="", help="compile this row alone")
    parser.add_argument("--ahead", action="store_true", help="compile rows side by side first")
    parser.add_argument("--profiles", action="store_true", help="profile rows in the end")
    parser.add_argument("--dry", action="store_true", help="small steps on the CPU")
    options = parser.parse_args()
    if options.compile:
        compile_row(options.compile)
        return
    rows = options.out / "models.jsonl"
    known = list(read_lines(rows)) if rows.exists() else []
    left_out = {*options.skip.split(","), *(row["id"] for row in known if row.get("error"))}
    specs = [
        spec for spec in read_recipe_plan(options.set, options.only) if spec.id not in left_out
    ]
    if options.dry:
        run_dry(specs)
        return
    done = {row["id"] for row in known}
    if options.ahead:
        compile_rows([spec for spec in specs if spec.id not in done])
    if not run_plan(
        specs,
        options.out,
        options.seconds,
        options.profiles,
    ):
        sys.exit(3)


if __name__ == "__main__":
    main()
