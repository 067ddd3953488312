"""Callbacks against the real libraries: a counter set by the test, two steps, what the library has
kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from wattcast.core.errors import BadInput, MissingTool
from wattcast.measure import training_callbacks
from wattcast.measure.energy_sources import DeviceIdentity, ReadError, SlowReadings
from wattcast.measure.training_callbacks import (
    StepMeter,
    log_to_mlflow,
    log_to_wandb,
    make_lightning_callback,
    make_transformers_callback,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries about each other
PREDICTED = SimpleNamespace(energy_j=90.0, latency_s=0.2)


@dataclass
class CountingSource:
    """A device that spends 100 J between two readings, and wraps where it is told to."""

    joules: float = 1000.0
    energy_range_j: float | None = 2000.0
    closed: bool = False

    def energy_j(self) -> float:
        self.joules = (self.joules + 100.0) % (self.energy_range_j or math.inf)
        return self.joules

    def slow(self) -> SlowReadings:
        return SlowReadings()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[CountingSource]:
    made: list[CountingSource] = []

    def open_source(name: str, index: int | None) -> tuple[CountingSource, DeviceIdentity]:
        made.append(CountingSource())
        return made[-1], DeviceIdentity("card")

    monkeypatch.setattr(training_callbacks, "open_source", open_source)
    return made


def test_energy_of_steps_beside_its_prediction(sources: list[CountingSource]) -> None:
    meter = StepMeter(PREDICTED, every=2, devices=(0, 1))
    with meter:
        assert meter.read(1) is None
        found = meter.read(4)
        assert found is not None
        assert found["wattcast/energy_j_per_step"] == 50.0, "two devices, 100 J each, four steps"
        assert found["wattcast/predicted_energy_j_per_step"] == 180.0
        assert found["wattcast/predicted_over_measured_energy"] == 3.6
        assert found["wattcast/predicted_step_s"] == 0.2
        assert found["wattcast/power_w"] * found["wattcast/step_s"] == pytest.approx(50.0)
        for step in range(6, 40, 2):  # the counters wrap on the way
            found = meter.read(step)
            assert found is not None
            assert found["wattcast/energy_j_per_step"] == 100.0
        assert found["wattcast/total_energy_j"] == 200.0 * 18
    assert all(source.closed for source in sources)
    assert meter.read(1000) is None, "nothing is read once it is closed"
    assert "wattcast/predicted_step_s" not in (read_once(StepMeter(every=1)) or {})


def read_once(meter: StepMeter) -> dict[str, float] | None:
    with meter:
        return meter.read(1)


@pytest.mark.parametrize(("first", "read"), [(0, [4, 8]), (1, [4, 8]), (1001, [1005, 1009])])
def test_a_loop_may_count_from_any_step(
    first: int, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``with`` took every loop for one that counts from 1: the first step of one that was resumed
    at 1001 had a thousandth of its time and joules, and of one from 0 five steps were read as four.
    """
    now_s = 0.0
    source = SimpleNamespace(energy_range_j=None, slow=SlowReadings, close=lambda: None)
    source.energy_j = lambda: 300.0 * now_s
    opened = (source, DeviceIdentity("card"))
    monkeypatch.setattr(training_callbacks, "open_source", lambda *_: opened)
    monkeypatch.setattr(training_callbacks, "time", SimpleNamespace(monotonic=lambda: now_s))
    readings = {}
    with StepMeter(every=4) as meter:
        for step in range(first, first + 10):
            now_s += 2.0
            numbers = meter.read(step)
            if numbers is not None:
                readings[step] = numbers
    assert list(readings) == read
    assert [one["wattcast/step_s"] for one in readings.values()] == [2.0, 2.0]
    assert [one["wattcast/energy_j_per_step"] for one in readings.values()] == [600.0, 600.0]


class LyingSource:
    """A card that draws 300 W, whose counter says what the test wants; ten seconds a reading."""

    energy_range_j = 2.0**32 / 1e3

    def __init__(self, counter_j: list[float], power_w: float = 300.0) -> None:
        self._counter_j = iter(counter_j)
        self._power_w = power_w

    def energy_j(self) -> float:
        return next(self._counter_j)

    def slow(self) -> SlowReadings:
        return SlowReadings(average_w=self._power_w)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("counter_j", "is_doubtful"),
    [
        ([0.0, 3000.0], False),
        ([4.2949e6, 2932.7], False),  # wrapped
        ([4.0e6, 10.0], True),
        ([0.0, 0.0], True),
        ([0.0, 6000.0], True),
        ([0.0, 1500.0], True),
        ([0.0, 430e3], True),
        ([0.0, math.nan], True),
    ],
    ids=["good", "wrap", "restart", "frozen", "doubled", "halved", "above the limit", "unread"],
)
def test_a_doubtful_counter_is_not_logged_as_energy(
    counter_j: list[float], is_doubtful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A counter that restarted was taken for one that had wrapped; the rest was logged as it was."""
    now_s = iter([0.0, 10.0])
    monkeypatch.setattr(training_callbacks, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    opened = (LyingSource(counter_j), DeviceIdentity("card", power_limit_w=700.0))
    monkeypatch.setattr(training_callbacks, "open_source", lambda *_: opened)
    meter = StepMeter(every=10)
    meter.start()
    numbers = meter.read(10)
    assert numbers is not None
    assert ("wattcast/doubtful" in numbers) == is_doubtful
    assert ("wattcast/energy_j_per_step" in numbers) != is_doubtful
    if not is_doubtful:
        assert numbers["wattcast/total_energy_j"] == pytest.approx(3000.0, rel=1e-3)


def test_a_counter_that_stood_still_is_doubtful_however_short_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Below a second nothing was checked, and steps between two updates of a counter took 0 J."""
    now_s = iter([0.0, 0.05, 0.1])
    monkeypatch.setattr(training_callbacks, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    opened = (LyingSource([7.0, 7.0, 37.0]), DeviceIdentity("card"))
    monkeypatch.setattr(training_callbacks, "open_source", lambda *_: opened)
    with StepMeter(every=1) as meter:
        still = meter.read(1)
        risen = meter.read(2)
    assert still == {"wattcast/step_s": pytest.approx(0.05), "wattcast/doubtful": 1.0}
    assert risen is not None
    assert risen["wattcast/total_energy_j"] == 30.0


def test_what_cannot_be_measured_is_refused(
    sources: list[CountingSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in ({"every": 0}, {"devices": ()}):
        with pytest.raises(BadInput, match="every, devices"):
            StepMeter(**wrong)
    monkeypatch.setattr(CountingSource, "energy_j", lambda self: math.nan)
    with pytest.raises(MissingTool, match="no energy counter"):
        StepMeter().start()
    assert sources[0].closed


def test_devices_are_closed_where_a_later_one_does_not_open(
    sources: list[CountingSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stayed open where there was no second, and for good."""
    opens = training_callbacks.open_source

    def open_first(name: str, index: int | None) -> tuple[CountingSource, DeviceIdentity]:
        if index:
            raise MissingTool("no such card")
        return opens(name, index)  # type: ignore[return-value]

    monkeypatch.setattr(training_callbacks, "open_source", open_first)
    meter = StepMeter(devices=(0, 1))
    with pytest.raises(MissingTool, match="no such card"):
        meter.start()
    assert [source.closed for source in sources] == [True]
    assert meter.read(100) is None


def test_a_counter_that_cannot_be_read_at_first_is_refused_in_words(
    sources: list[CountingSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended in a ``ReadError``, which no user's code expects, with the device left open."""

    def fail(source: CountingSource) -> float:
        raise ReadError("GPU is lost", lost=True)

    monkeypatch.setattr(CountingSource, "energy_j", fail)
    with pytest.raises(MissingTool, match="GPU is lost"):
        StepMeter().start()
    assert sources[0].closed


def test_a_meter_that_is_started_anew_closes_what_it_had_open(
    sources: list[CountingSource],
) -> None:
    """A second ``fit`` of a trainer left the devices of the first one open."""
    meter = StepMeter()
    meter.start()
    meter.start()
    assert [source.closed for source in sources] == [True, False]
    meter.stop()
    assert sources[1].closed


def test_a_card_without_a_driver_is_named() -> None:
    with pytest.raises(MissingTool, match="nvml"):
        StepMeter(source="nvml", devices=(63,)).start()


@pytest.mark.slow
def test_weights_and_biases_keeps_the_numbers(
    sources: list[CountingSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="no wandb: pip install 'wattcast[dev]'")
    with pytest.raises(BadInput, match=r"wandb\.init"):
        log_to_wandb({"wattcast/power_w": 1.0}, 1)
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    with wandb.init(
        mode="offline", project="wattcast", dir=tmp_path, settings=wandb.Settings(console="off")
    ) as run:
        with StepMeter(PREDICTED, every=1) as meter:
            for step in (1, 2):
                run.log({"loss": 1.0 / step})  # which counts steps of its own
                log_to_wandb(meter.read(step) or {}, step)
        assert run.summary["wattcast/energy_j_per_step"] == 100.0
        assert run.summary["wattcast/predicted_energy_j_per_step"] == 90.0
        assert run.summary["wattcast/step"] == 2


def test_mlflow_keeps_the_numbers(
    sources: list[CountingSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="no mlflow: pip install 'wattcast[dev]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())  # which it makes itself
    with mlflow.start_run() as run, StepMeter(PREDICTED, every=1) as meter:
        for step in (1, 2):
            log_to_mlflow(meter.read(step) or {}, step)
    kept = mlflow.MlflowClient().get_metric_history(run.info.run_id, "wattcast/energy_j_per_step")
    assert [(m.step, m.value) for m in kept] == [(1, 100.0), (2, 100.0)]


def test_lightning_logs_while_it_trains(sources: list[CountingSource], tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="no lightning: pip install 'wattcast[dev]'")
    import lightning
    import torch
    from lightning.pytorch.loggers import CSVLogger

    class Line(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    told: list[tuple[dict[str, float], int]] = []
    callback = make_lightning_callback(
        StepMeter(PREDICTED, every=2), lambda found, step: told.append((found, step))
    )
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=2,
        logger=CSVLogger(tmp_path),
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=1))
    assert [step for _, step in told] == [2, 4], "optimiser steps, not batches"
    assert told[0][0]["wattcast/energy_j_per_step"] == 50.0
    written = next(tmp_path.rglob("metrics.csv")).read_text()
    assert "wattcast/predicted_over_measured_energy" in written
    assert sources[0].closed


def test_transformers_logs_while_it_trains(sources: list[CountingSource], tmp_path: Path) -> None:
    for name in ("torch", "transformers", "accelerate"):
        pytest.importorskip(name, reason=f"no {name}: pip install 'wattcast[dev]'")
    import torch
    from transformers import Trainer, TrainingArguments

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).square().mean()}

    told: list[int] = []
    callback = make_transformers_callback(
        StepMeter(PREDICTED, every=2), lambda found, step: told.append(step)
    )
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=1, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=Line(), args=arguments, train_dataset=[{"x": torch.ones(4)}] * 8, callbacks=[callback]
    )
    trainer.train()
    assert told == [2, 4]
    kept = [row for row in trainer.state.log_history if "wattcast/energy_j_per_step" in row]
    assert [(row["step"], row["wattcast/energy_j_per_step"]) for row in kept] == [
        (2, 50.0),
        (4, 50.0),
    ]
    assert sources[0].closed
