"""Measure runs under load and a training job on one card in ten minutes, and keep them at once.

Run on a node with vLLM 0.25.1, PyTorch and transformers 5, from the root of the repository:

    PYTHONPATH=src:studies/training_rows python studies/power_traces/run_campaign.py two --out rows-two

``--dry`` prints the commands and the seconds they may take. The same command continues where another
ended. After each stage the runs so far lie in FOLDER/collected.jsonl; add them to ``h200_runs.jsonl``
with ``collect_runs.py FOLDER`` and commit both before anything is judged.

What is asked, before it is measured:

- **The reference** (llama-3.1-8b, which was fitted) runs first under the same arrivals on every card. It
  tells the machine (``judge_power_traces.py --tell``): how fast the host launches, and how many watts
  the card draws in a step, over the usual. It is judged by nothing else.
- **Steps** of each model come before its loads: eight of the plan of ``measure engine``, which no load
  disturbs. They are judged by their own bounds, and say whether a miss under load is one of the steps.
- **Judged** are the other models, with the bounds and the rule for autocorrelations of
  ``judge_power_traces.py``, with the machine told and with nothing told. Both tables are kept.
- Temperatures and the memory's watts are kept by the second. If the factor of a card's watts follows
  its temperature over cards (1.6 W for a degree are known from kernels), it is a law and no level.
- The plan of the first card was measured on 19 November 2026, and its runs are among those judged.
- No clock, limit or mode is changed, and no other program runs on the card.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from collect_runs import collect_serving, collect_training

REFERENCE = "llama-3.1-8b:brief+tide"
START_S = 130.0  # three engines that start together
STEPS_S = 18.0  # the steps of ``brief``, which tell the capacity that arrivals are a share of
ENGINES_TOGETHER = 3
TRAINING_START_S = 30.0


@dataclass(frozen=True)
class TrainingJob:
    """A job that writes checkpoints, as ``measure_training_trace.py`` takes it."""

    model: str
    batch: int
    accumulation: int
    every: int
    seconds: int = 40

    def list_arguments(self, out: Path) -> list[str]:
        """Return the command line of the job."""
        numbers = vars(self) | {"out": out}
        return [f"--{name}={value}" for name, value in numbers.items()]


@dataclass(frozen=True)
class CardPlan:
    """What one card measures."""

    models: tuple[str, ...]  # with their shapes of load, as ``measure engine --models`` takes them
    job: TrainingJob
    serving_s: float = 480.0


PLANS = {
    "two": CardPlan(
        (REFERENCE, "moonlight-16b-a3b:brief+tide+rounds", "phi-4-fp8-kv8:brief+tide+pauses+crowd"),
        TrainingJob("gemma-2b", batch=4, accumulation=4, every=5),
    ),
}


def list_commands(plan: CardPlan, out: Path) -> Iterator[tuple[str, list[str], float]]:
    """Yield the stages of a card: a name, its command, and the seconds it may take."""
    measure = [sys.executable, "-m", "wattcast", "measure", "engine", "--out", str(out)]
    limits = ["--budget", f"{plan.serving_s:g}s", "--together", str(ENGINES_TOGETHER)]
    models = ["--parts", "tide", "--models", ",".join(plan.models)]
    yield "serving", [*measure, *limits, *models], plan.serving_s
    script = Path(__file__).with_name("measure_training_trace.py")
    job = plan.job.list_arguments(out / "training.json")
    yield "training", [sys.executable, str(script), *job], TRAINING_START_S + plan.job.seconds


def keep_runs(out: Path) -> int:
    """Write all runs so far to one file, and return how many there are."""
    runs = list(collect_serving(out)) if (out / "rows.jsonl").exists() else []
    if (out / "training.json").exists():
        runs.append(collect_training(out / "training.json", datetime.now(UTC).date().isoformat()))
    lines = [json.dumps(run, separators=(",", ":")) for run in runs]
    (out / "collected.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(runs)


def main() -> None:
    """Read the command line, measure stage by stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("card", choices=sorted(PLANS))
    parser.add_argument("--out", type=Path, required=True, help="folder of rows")
    parser.add_argument("--dry", action="store_true", help="print the commands")
    options = parser.parse_args()
    stages = list(list_commands(PLANS[options.card], options.out))
    if options.dry:
        for name, command, seconds in stages:
            print(f"# {name}: at most {seconds:g} s\n{' '.join(command)}")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for name, command, _ in stages:
        code = subprocess.run(command, check=False).returncode
        print(f"{name} ended with {code}; {keep_runs(options.out)} runs kept", flush=True)


if __name__ == "__main__":
    main()
