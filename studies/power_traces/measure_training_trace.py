"""Measure the power of a training job over time: steps of several micro-batches, and checkpoints.

Run on a node with PyTorch and transformers 5:
``PYTHONPATH=src:studies/training_rows python studies/power_traces/measure_training_trace.py
--out trace.json --seconds 50`` (``--dry`` trains a tiny model on the CPU and measures no power.)

The job trains a model with random weights. After every ``--every`` steps it writes a checkpoint:
the weights are copied to the host and saved, and the GPU waits. The file has the moments at which
steps and checkpoints began and ended, and mean power between ticks of the energy counter, on one
clock that starts with the first step. No clock, limit or mode is changed."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from measure_training_rows import TrainingRunSpec, build_step

from wattcast.lab.campaigns.engine_session import power_over_time
from wattcast.lab.campaigns.model_campaign import ModelDims, find_dims
from wattcast.measure.sampler import Sampler

WARM_STEPS = 2
TICKS_S = 0.4  # in which the energy counter steps once more


@dataclass
class JobEvents:
    """When steps and checkpoints began and ended."""

    step_s: list[tuple[float, float]] = field(default_factory=list)
    checkpoint_s: list[tuple[float, float]] = field(default_factory=list)


def save_checkpoint(module: Any, path: Path) -> None:
    """Copy the weights to the host and save them, as a simple training loop does."""
    state = {name: value.detach().cpu() for name, value in module.state_dict().items()}
    torch.save(state, path)
    path.unlink()


def run_job(
    module: Any, step: Any, folder: Path, seconds: float, every: int, synchronize: Any
) -> tuple[JobEvents, float]:
    """Train until the time is over, and return what happened and the moment of the first step."""
    events = JobEvents()
    origin_s = time.monotonic()
    while time.monotonic() - origin_s < seconds:
        begin_s = time.monotonic() - origin_s
        step()
        synchronize()
        end_s = time.monotonic() - origin_s
        events.step_s.append((round(begin_s, 5), round(end_s, 5)))
        if len(events.step_s) % every == 0:
            save_checkpoint(module, folder / "checkpoint.pt")
            saved_s = time.monotonic() - origin_s
            events.checkpoint_s.append((round(end_s, 5), round(saved_s, 5)))
    return events, origin_s


def make_spec(model: str, batch: int, seq: int, accumulation: int) -> TrainingRunSpec:
    """Return the job as a row of the training plan."""
    plan = {
        "id": f"trace-{model}",
        "accumulation": accumulation,
        "stack": "eager",
        "precision": "bf16",
        "optimizer": "adamw",
        "lora": 0,
        "base_bits": 16,
        "recompute": "none",
        "layers": find_dims(model).layers,
    }
    return TrainingRunSpec(model, "train", batch, seq, plan=plan)


def shrink(dims: ModelDims) -> ModelDims:
    """Return a tiny model of the same kind, for a try without a GPU."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 320}
    return replace(dims, layers=2, hidden=64, intermediate=128, max_positions=64, **sizes)


def main() -> None:
    """Read the command line, run the job, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the trace")
    parser.add_argument("--model", default="llama-3.2-3b", help="a model of models.csv")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--every", type=int, default=8, help="steps between checkpoints")
    parser.add_argument("--seconds", type=float, default=50.0, help="length of the job")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="of checkpoints")
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()

    dims = find_dims(options.model)
    seq = 32 if options.dry else options.seq
    spec = make_spec(options.model, options.batch, seq, options.accumulation)
    device = "cpu" if options.dry else "cuda"
    built, step = build_step(spec, device, shrink(dims) if options.dry else dims)
    synchronize = (lambda: None) if options.dry else torch.cuda.synchronize
    for _ in range(WARM_STEPS):
        step()
    synchronize()

    source: Any = nullcontext() if options.dry else Sampler("nvml", period_s=0.005)
    with source as sampler:
        mark = sampler.head if sampler else 0
        time.sleep(TICKS_S)
        events, origin_s = run_job(
            built.module, step, options.folder, options.seconds, options.every, synchronize
        )
        time.sleep(TICKS_S)
        power = power_over_time(sampler.since(mark), origin_s) if sampler else {}
        card = asdict(sampler.identity) if sampler else {}
    job = {name: str(value) for name, value in vars(options).items()}
    trace = {"job": job, "card": card, **asdict(events), "power": power}
    options.out.write_text(json.dumps(trace, default=str), encoding="utf-8")
    print(f"{len(events.step_s)} steps, {len(events.checkpoint_s)} checkpoints: {options.out}")


if __name__ == "__main__":
    main()
