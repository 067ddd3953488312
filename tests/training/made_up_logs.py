"""Logs of training jobs that never ran, in the forms that W&B, MLflow and transformers write."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

BEGIN_S = 1_763_000_000.0


@dataclass(frozen=True)
class MadeUpJob:
    """How a job ran."""

    step_s: float
    power_w: tuple[float, ...]  # of each GPU
    clock_hz: tuple[float, ...] = ()
    busy: float | None = None
    step_tokens: float | None = None
    wait_s: float | None = None
    limit_w: float | None = None
    pause_every: int = 0  # logged steps, after which one takes ten times as long
    steps: int = 400
    every: int = 10  # steps between two lines
    seed: int = 1

    def slower(self, factor: float) -> MadeUpJob:
        """Return the job with longer steps."""
        return replace(self, step_s=self.step_s * factor)

    def list_history(self) -> list[dict[str, float]]:
        """Return the lines of a history."""
        draw = np.random.default_rng(self.seed)
        time_s = BEGIN_S
        lines = []
        for number, step in enumerate(range(0, self.steps + 1, self.every)):
            line = {"train/global_step": step, "_timestamp": time_s, "train/loss": 2.0}
            if self.step_tokens is not None:
                line["train/num_input_tokens_seen"] = step * self.step_tokens
            if self.wait_s is not None:
                line["data_time"] = self.wait_s
            lines.append(line)
            is_paused = self.pause_every and number % self.pause_every == 1
            # The first steps compile
            factor = 5.0 if number == 0 else 10.0 if is_paused else draw.normal(1.0, 0.005)
            time_s += self.every * self.step_s * factor
        return lines

    def list_system(self) -> list[dict[str, float]]:
        """Return the lines of system metrics, one every 15 s."""
        draw = np.random.default_rng(self.seed + 1)
        end_s = self.list_history()[-1]["_timestamp"]
        lines = []
        for time_s in np.arange(BEGIN_S, end_s, 15.0):
            line = {"_timestamp": float(time_s)}
            for gpu, power_w in enumerate(self.power_w):
                line[f"system.gpu.{gpu}.powerWatts"] = draw.normal(power_w, 0.02 * power_w)
                if self.limit_w is not None:
                    line[f"system.gpu.{gpu}.enforcedPowerLimitWatts"] = self.limit_w
                if self.busy is not None:
                    line[f"system.gpu.{gpu}.gpu"] = 100.0 * self.busy
            for gpu, clock_hz in enumerate(self.clock_hz):
                line[f"system.gpu.{gpu}.smClock"] = clock_hz / 1e6
            lines.append(line)
        return lines


def write_lines(path: Path, lines: list[dict[str, float]]) -> Path:
    """Write lines of JSON."""
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def write_table(path: Path, lines: list[dict[str, float]], prefix: str = "") -> Path:
    """Write a CSV as W&B's page exports it: the run's name before the names of columns."""
    plain = ("Step", "_timestamp")
    names = list(lines[0])
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([name if name in plain else f"{prefix}{name}" for name in names])
        writer.writerows([line[name] for name in names] for line in lines)
    return path


def write_folder(folder: Path, lines: list[dict[str, float]]) -> Path:
    """Write MLflow's folder of metrics: a file for each, with time, value and step."""
    for line in lines:
        for name, value in line.items():
            if name in ("_timestamp", "train/global_step"):
                continue
            path = folder / name.replace("system.", "system/").replace(".powerWatts", "_power")
            path.parent.mkdir(parents=True, exist_ok=True)
            step = int(line.get("train/global_step", 0))
            with path.open("a") as stream:
                stream.write(f"{1e3 * line['_timestamp']:.0f} {value} {step}\n")
    return folder


def write_trainer_state(path: Path, job: MadeUpJob) -> Path:
    """Write what transformers keeps of a job: no times but those of all of it."""
    history = []
    for line in job.list_history():
        step = line["train/global_step"]
        history.append({"loss": 2.0, "step": step})
    steps = history[-1]["step"]
    end = {
        "step": steps,
        "train_runtime": steps * job.step_s,
        "train_steps_per_second": 1.0 / job.step_s,
        "train_samples_per_second": 8.0 / job.step_s,
        "total_flos": 1e18,
    }
    path.write_text(json.dumps({"global_step": steps, "log_history": [*history, end]}))
    return path
