"""Log the energy of training steps, measured and predicted, to W&B, MLflow, Lightning and
Transformers.

    meter = StepMeter(wattcast.predict("llama3-8b", gpu="h200", phase="train", batch=4, seq=2048))
    Trainer(..., callbacks=[make_transformers_callback(meter, log_to_wandb)])      # or
    log_to_mlflow, or both lightning.Trainer(..., callbacks=[make_lightning_callback(meter)])
    # to the trainer's own loggers

In a loop of one's own, ``with meter:``; after a step, ``if found := meter.read(step):
log_to_mlflow(found, step)``."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from wattcast.core.errors import BadInput, MissingTool, bad_value
from wattcast.measure.energy_sources import EnergySource, open_source

StepLog = Callable[
    [dict[str, float], int], object
]  # takes the numbers, and the step they belong to


class StepMeter:
    """Joules, watts and seconds of a training step, beside those of a prediction of one step.

    Every ``every`` steps it reads the energy counters of ``devices``, which takes microseconds and
    waits for no GPU. The host runs a few steps ahead of the GPU: read over many steps, so that
    these do not count. ``predicted`` has ``energy_j`` and ``latency_s`` of one GPU and one step, as
    ``wattcast.predict(..., phase="train")`` gives them."""

    def __init__(
        self,
        predicted: Any = None,
        every: int = 50,
        source: str = "auto",
        devices: Sequence[int] = (0,),
    ) -> None:
        if every < 1 or not devices:
            raise bad_value(
                "every, devices", "one step or more, and one device or more", f"{every}, {devices}"
            )
        self._predicted, self._every, self._source, self._devices = (
            predicted,
            every,
            source,
            tuple(devices),
        )
        self._open: list[EnergySource] = []
        self._last: tuple[int, float, list[float]] = (
            0,
            0.0,
            [],
        )  # step, moment and counters of the last reading
        self._total_j = 0.0

    def start(self, step: int = 0) -> None:
        """Open the devices and begin to count after ``step``; MissingTool where a device counts no
        energy.
        """
        self._open = [open_source(self._source, index)[0] for index in self._devices]
        counters = [device.energy_j() for device in self._open]
        if not all(map(math.isfinite, counters)):
            self.stop()
            raise MissingTool(
                "this device has no energy counter. Measure the run as a whole: wattcast measure run."
            )
        self._last, self._total_j = (step, time.monotonic(), counters), 0.0

    def read(self, step: int) -> dict[str, float] | None:
        """Return the numbers since the last reading; None while fewer than ``every`` steps have
        passed.
        """
        last_step, last_s, last_j = self._last
        steps = step - last_step
        if steps < self._every or not self._open:
            return None
        now_s, counters = time.monotonic(), [device.energy_j() for device in self._open]
        pairs = zip(self._open, last_j, counters, strict=True)
        spent_j = sum(
            now - before + (device.energy_range_j or 0.0) * (now < before)
            for device, before, now in pairs
        )
        self._last = step, now_s, counters
        self._total_j += spent_j
        found = {
            "wattcast/total_energy_j": self._total_j,
            "wattcast/energy_j_per_step": spent_j / steps,
            "wattcast/power_w": spent_j / max(now_s - last_s, 1e-9),
            "wattcast/step_s": (now_s - last_s) / steps,
        }
        if self._predicted is not None and spent_j > 0:
            joules = float(self._predicted.energy_j) * len(self._devices)
            found["wattcast/predicted_energy_j_per_step"] = joules
            found["wattcast/predicted_step_s"] = float(self._predicted.latency_s)
            found["wattcast/predicted_over_measured_energy"] = joules * steps / spent_j
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def stop(self) -> None:
        """Close the devices."""
        while self._open:
            self._open.pop().close()

    def __enter__(self) -> StepMeter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def log_to_wandb(found: dict[str, float], step: int) -> None:
    """Log to the active run of Weights & Biases, over a step of our own: other logs may count
    theirs differently.
    """
    import wandb

    if wandb.run is None:
        raise BadInput("Weights & Biases has no run to log to. Call wandb.init() first.")
    wandb.run.define_metric("wattcast/*", step_metric="wattcast/step")
    wandb.run.log(found | {"wattcast/step": step})


def log_to_mlflow(found: dict[str, float], step: int) -> None:
    """Log to the active run of MLflow, which begins one where there is none."""
    import mlflow

    mlflow.log_metrics(found, step=step)


def make_lightning_callback(meter: StepMeter, *logs: StepLog) -> Any:
    """Return a Lightning callback that logs to the trainer's loggers and to ``logs``, from one
    process.
    """
    old = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    base: Any = import_module("pytorch_lightning" if old else "lightning.pytorch").Callback

    class EnergyCallback(base):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            if trainer.is_global_zero:
                meter.start(trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if found := meter.read(trainer.global_step):
                for log in (*(logger.log_metrics for logger in trainer.loggers), *logs):
                    log(found, trainer.global_step)

        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            meter.stop()

    return EnergyCallback()


def make_transformers_callback(meter: StepMeter, *logs: StepLog) -> Any:
    """Return a callback of Transformers' Trainer that adds to its log history and logs to ``logs``."""
    base: Any = import_module("transformers").TrainerCallback

    class EnergyCallback(base):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                meter.start(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if found := meter.read(state.global_step):
                state.log_history.append({**found, "step": state.global_step})
                for log in logs:
                    log(found, state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            meter.stop()

    return EnergyCallback()
