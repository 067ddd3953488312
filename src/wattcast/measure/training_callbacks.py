"""Log the energy of training steps, measured and predicted, to W&B, MLflow, Lightning and
Transformers.

    meter = StepMeter(wattcast.predict("llama3-8b", gpu="h200", phase="train", batch=4, seq=2048))

    Trainer(..., callbacks=[make_transformers_callback(meter, log_to_wandb)])
    lightning.Trainer(..., callbacks=[make_lightning_callback(meter)])  # logs to its own loggers

``log_to_wandb`` and ``log_to_mlflow`` log to the active run. In a loop of your own, put ``with
meter:`` around it, and after each step ``if numbers := meter.read(step): log_to_mlflow(numbers,
step)``. Steps may count from 1, from 0, or from where a run was resumed."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from wattcast.core.errors import (
    BadInput,
    MissingTool,
    bad_value,
)
from wattcast.measure.counter_ticks import UnwrappedCounter
from wattcast.measure.energy_sources import (
    EnergySource,
    ReadError,
    open_source,
)
from wattcast.measure.source_check import CHECKS, is_plausible_power

# Takes the numbers, and the step they belong to.
StepLog = Callable[[dict[str, float], int], object]


LEAST_CHECKED_S = 1.0  # a counter is updated every 100 ms: a shorter time says little of its rate


class _MeteredDevice:
    """The counter of one card, with what its readings are checked against."""

    def __init__(
        self,
        source: EnergySource,
        limit_w: float | None,
    ) -> None:
        self.source = source
        self._most_w = limit_w or CHECKS.most_w
        self._counter = UnwrappedCounter(source.energy_range_j, CHECKS.above_limit * self._most_w)
        self._energy_j = math.nan
        self._power_w = math.nan

    def begin(self, now_s: float) -> bool:
        """Take the first reading; false where the device has no counter."""
        self._energy_j = self._counter.follow(self.source.energy_j(), now_s)
        self._power_w = self._read_power_w()
        return math.isfinite(self._energy_j)

    def count_joules(
        self,
        now_s: float,
        passed_s: float,
    ) -> float | None:
        """Return the joules since the last reading; None where they are doubtful."""
        before_j = self._energy_j
        before_w = self._power_w
        try:
            self._energy_j = self._counter.follow(self.source.energy_j(), now_s)
            self._power_w = self._read_power_w()
        except ReadError:
            self._energy_j = math.nan
        spent_j = self._energy_j - before_j
        if not math.isfinite(spent_j) or spent_j <= 0.0:
            return None
        if passed_s < LEAST_CHECKED_S:
            return spent_j
        ends_w = (before_w, self._power_w)
        is_plausible = is_plausible_power(spent_j / passed_s, ends_w, self._most_w)
        return spent_j if is_plausible else None

    def close(self) -> None:
        """Disconnect."""
        self.source.close()

    def _read_power_w(self) -> float:
        readings = self.source.slow()
        return readings.average_w if math.isfinite(readings.average_w) else readings.instant_w


class StepMeter:
    """Joules, watts and seconds of a training step, beside those of a prediction of one step.

    Every ``every`` steps it reads the energy counters of ``devices``, which takes microseconds and
    waits for no GPU. The host runs a few steps ahead of the GPU: read over many steps, so that
    those few do not matter. Evaluations and checkpoints between two readings count into the time
    and the joules of a step. ``predicted`` has ``energy_j`` and ``latency_s`` of one GPU and one
    step, as ``wattcast.predict(..., phase="train")`` gives them.

    ``source`` is ``nvml``, ``amd``, ``jetson``, ``rapl``, or with ``auto`` the first of these that
    answers. ``devices`` are numbers as nvidia-smi counts; without them, the first card that
    ``CUDA_VISIBLE_DEVICES`` shows this process.

    A reading is doubtful, and says so by ``wattcast/doubtful``, where a counter stood still,
    restarted or rose above the card's limit. Over a second or more it is doubtful too where it is
    above 1.5 times the card's own power readings, or below them divided by 1.5. The joules of a
    doubtful reading do not enter the total.
    """

    def __init__(
        self,
        predicted: Any = None,
        every: int = 50,
        source: str = "auto",
        devices: Sequence[int] | None = None,
    ) -> None:
        if every < 1 or (devices is not None and not devices):
            raise bad_value(
                "every, devices", "one step or more, and one device or more", f"{every}, {devices}"
            )
        self._predicted = predicted
        self._every = every
        self._source = source
        self._devices: tuple[int | None, ...] = (None,) if devices is None else tuple(devices)
        self._open: list[_MeteredDevice] = []
        self._awaits_step = False  # whether the number of the first step is not known yet
        self._last_step = 0
        self._last_s = 0.0
        self._total_j = 0.0

    def start(self, step: int = 0) -> None:
        """Open the devices and begin to count after ``step``; MissingTool where a device counts no
        energy, or does not answer.
        """
        self.stop()
        self._awaits_step = False
        self._last_step = step
        self._last_s = time.monotonic()
        self._total_j = 0.0
        try:
            self._open_devices()
        except ReadError as error:
            self.stop()
            raise MissingTool(
                f"the energy counter of this device cannot be read: {error}"
            ) from None
        except BaseException:
            self.stop()
            raise

    def _open_devices(self) -> None:
        for index in self._devices:
            source, identity = open_source(self._source, index)
            self._open.append(_MeteredDevice(source, identity.power_limit_w))
        if not all(device.begin(self._last_s) for device in self._open):
            raise MissingTool(
                "this device has no energy counter. Measure the run as a whole: wattcast "
                "measure run."
            )

    def read(self, step: int) -> dict[str, float] | None:
        """Return the numbers since the last reading; None while fewer than ``every`` steps have
        passed.
        """
        if not self._open:
            return None
        if self._awaits_step:
            self._awaits_step = False
            if step != 1:  # how many steps came before it is not known: count from here
                self._count_joules(step)
                return None
        steps = step - self._last_step
        if steps < self._every:
            return None
        passed_s, spent = self._count_joules(step)

        numbers = {"wattcast/step_s": passed_s / steps}
        spent_j = 0.0
        for joules in spent:
            if joules is None:
                return numbers | {"wattcast/doubtful": 1.0}
            spent_j += joules
        self._total_j += spent_j
        numbers["wattcast/total_energy_j"] = self._total_j
        numbers["wattcast/energy_j_per_step"] = spent_j / steps
        numbers["wattcast/power_w"] = spent_j / passed_s
        if self._predicted is not None:
            predicted_j = float(self._predicted.energy_j) * len(self._devices)
            numbers["wattcast/predicted_energy_j_per_step"] = predicted_j
            numbers["wattcast/predicted_step_s"] = float(self._predicted.latency_s)
            numbers["wattcast/predicted_over_measured_energy"] = predicted_j * steps / spent_j
        return {name: value for name, value in numbers.items() if math.isfinite(value)}

    def _count_joules(self, step: int) -> tuple[float, list[float | None]]:
        """Return the seconds since the last reading, and the joules of each device."""
        now_s = time.monotonic()
        passed_s = max(now_s - self._last_s, 1e-9)
        spent = [device.count_joules(now_s, passed_s) for device in self._open]
        self._last_step = step
        self._last_s = now_s
        return passed_s, spent

    def stop(self) -> None:
        """Close the devices."""
        while self._open:
            self._open.pop().close()

    def __enter__(self) -> StepMeter:
        self.start()
        self._awaits_step = True
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def log_to_wandb(numbers: dict[str, float], step: int) -> None:
    """Log to the active run of Weights & Biases, over a step of our own: other logs may count
    theirs differently.
    """
    import wandb

    if wandb.run is None:
        raise BadInput("Weights & Biases has no run to log to. Call wandb.init() first.")
    wandb.run.define_metric("wattcast/*", step_metric="wattcast/step")
    wandb.run.log(numbers | {"wattcast/step": step})


def log_to_mlflow(numbers: dict[str, float], step: int) -> None:
    """Log to the active run of MLflow, which begins one where there is none."""
    import mlflow

    mlflow.log_metrics(numbers, step=step)


def make_lightning_callback(meter: StepMeter, *logs: StepLog) -> Any:
    """Return a Lightning callback that logs to the trainer's loggers and to ``logs``, from one
    process.
    """
    is_old = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    lightning = import_module("pytorch_lightning" if is_old else "lightning.pytorch")
    base: Any = lightning.Callback

    class EnergyCallback(base):  # type: ignore[misc]
        def on_train_start(
            self,
            trainer: Any,
            module: Any,
        ) -> None:
            if trainer.is_global_zero:
                meter.start(trainer.global_step)

        def on_train_batch_end(
            self,
            trainer: Any,
            *_: Any,
        ) -> None:
            numbers = meter.read(trainer.global_step)
            if not numbers:
                return
            for logger in trainer.loggers:
                logger.log_metrics(numbers, trainer.global_step)
            for log in logs:
                log(numbers, trainer.global_step)

        def teardown(
            self,
            trainer: Any,
            module: Any,
            stage: str,
        ) -> None:
            meter.stop()

    return EnergyCallback()


def make_transformers_callback(meter: StepMeter, *logs: StepLog) -> Any:
    """Return a callback of Transformers' Trainer that adds to its log history and logs to
    ``logs``.
    """
    base: Any = import_module("transformers").TrainerCallback

    class EnergyCallback(base):  # type: ignore[misc]
        def on_train_begin(
            self,
            args: Any,
            state: Any,
            control: Any,
            **_: Any,
        ) -> None:
            if state.is_world_process_zero:
                meter.start(state.global_step)

        def on_step_end(
            self,
            args: Any,
            state: Any,
            control: Any,
            **_: Any,
        ) -> None:
            numbers = meter.read(state.global_step)
            if not numbers:
                return
            state.log_history.append({**numbers, "step": state.global_step})
            for log in logs:
                log(numbers, state.global_step)

        def on_train_end(
            self,
            args: Any,
            state: Any,
            control: Any,
            **_: Any,
        ) -> None:
            meter.stop()

    return EnergyCallback()
