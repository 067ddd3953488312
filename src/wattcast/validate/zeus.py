"""Training under power limits on V100, A40, Quadro RTX 6000 and P100 [You2023, the Zeus data], after one row each.

Nobody has the operators of those epochs, so each network is stood for by one of ours on the card's forecast
(``PROTOTYPE``), with a share of the time in which the GPU waits. That share, or the scale of the energy, is set by
the row at the highest limit; lower limits are then predicted: the clock is the highest at which mean power meets one.

    T(f) = d·τ(f) + 1 - d,   P(f) = (d·τ(f)·B(f) + (1 - d)·I(f)) / T(f)

with τ relative time and B power of the prototype at clock f, I idle power, d the busy share at the top clock.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from wattcast import hardware
from wattcast.arrays import Array
from wattcast.errors import BadInput
from wattcast.fitted import bundle_for
from wattcast.flow import analyse, at_clock
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.power.module import ModulePower
from wattcast.validate.rows import Row, row
from wattcast.workload import source
from wattcast.workload.options import Options

FILE = Path("zeus") / "zeus_powerlimit_batch_sweep.csv"
GPUS = {"v100": "v100-pcie", "a40": "a40", "rtx6000": "quadro-rtx-6000", "p100": "p100-pcie"}
PROTOTYPE = {
    "resnet50": "resnet50",
    "shufflenetv2": "resnet50",
    "deepspeech2": "bert-base",
    "ncf": "bert-base",
    "bert_base_uncased": "bert-base",
}
CAPPED = 0.95  # mean power above this share of the limit: the limit held the clock down
LOWEST = 0.15  # of the top clock, where a card's lowest is not published
WAITING = 0.85  # of the power at the highest limit: idle power is no more than this
HELD = 0.98  # of a limit that binds, where the highest one did not: cards stay a little below


@dataclass(frozen=True)
class Epoch:
    """One training configuration under one limit."""

    gpu: str
    network: str
    configuration: tuple[str, ...]
    limit_w: float
    time_s: float
    power_w: float


@dataclass(frozen=True)
class Predicted:
    """One row below the highest limit: measured and predicted, time relative to the highest limit's."""

    epoch: Epoch
    highest: Epoch
    relative_time: float
    predicted_time: float
    predicted_w: float


def epochs(folder: Path) -> list[Epoch]:
    """The rows; repeats of one configuration and limit become their mean."""
    try:
        lines = (folder / FILE).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadInput(f"{FILE.name}: cannot be read ({error.strerror}).") from None
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for line in csv.DictReader(lines):
        key = (
            line["gpu"],
            line["network"],
            line["dataset"],
            line["batch_size"],
            line["optimizer"],
            line["power_limit"],
        )
        groups[key].append((float(line["time_per_epoch"]), float(line["average_power"])))
    return [
        Epoch(
            key[0], key[1], key[1:5], float(key[5]), *(float(np.mean(column)) for column in zip(*pairs, strict=True))
        )
        for key, pairs in groups.items()
    ]


@dataclass(frozen=True)
class Curves:
    """A prototype over clocks: relative time, power without a cap, idle power. ``(clock,)``, rising clocks."""

    clock_hz: Array
    time: Array
    power_w: Array
    idle_w: Array


@cache
def curves(gpu: str, model: str) -> Curves:
    """The prototype's training step on the forecast of a card."""
    chip = _chip(gpu)
    given = {"batch": 64, "phase": "train", "dtype": "fp32"} | ({"seq": 128, "batch": 32} if "bert" in model else {})
    bundle = bundle_for(chip)
    timeline = analyse(source.load(model, Options.of(**given)), chip, bundle)
    top_hz = float(np.max(chip.clocks.max_hz))
    lowest_hz = LOWEST * top_hz if chip.clocks.min_hz is None else float(np.min(chip.clocks.min_hz))
    clock_hz = np.linspace(lowest_hz, top_hz, 181)
    totals = at_clock(timeline, OperatingPoint(clock_hz[:, np.newaxis]), bundle)
    assert isinstance(bundle.power, ModulePower)
    idle_w = bundle.power.idle.at(clock_hz, 45.0)
    return Curves(clock_hz, totals.latency_s / totals.latency_s[-1], totals.power_w, idle_w)


def _chip(gpu: str) -> Gpu:
    own = files("wattcast.validate").joinpath("gpus").joinpath(f"{GPUS[gpu]}.yaml")
    return hardware.load_file(Path(str(own))) if own.is_file() else hardware.load(GPUS[gpu])


def predicted(found: Iterable[Epoch]) -> list[Predicted]:
    """Every row below its configuration's highest limit, from the row at that limit."""
    groups: dict[tuple[str, ...], list[Epoch]] = defaultdict(list)
    for epoch in found:
        groups[epoch.gpu, *epoch.configuration].append(epoch)
    rows = []
    for alike in groups.values():
        highest = max(alike, key=lambda e: e.limit_w)
        limits_w = np.array([e.limit_w for e in alike if e is not highest])
        time, power_w = _under(highest, curves(highest.gpu, PROTOTYPE[highest.network]), limits_w)
        rest = (e for e in alike if e is not highest)
        rows += [
            Predicted(e, highest, e.time_s / highest.time_s, float(t), float(w))
            for e, t, w in zip(rest, time, power_w, strict=True)
        ]
    return rows


def _under(highest: Epoch, c: Curves, limits_w: Array) -> tuple[Array, Array]:
    """Time against the highest limit's, and mean power, under each limit; one row sets busy share or energy scale."""
    held = highest.power_w / highest.limit_w if highest.power_w > CAPPED * highest.limit_w else HELD
    idle_w = c.idle_w * min(1.0, WAITING * highest.power_w / c.idle_w[-1])
    above_w = c.power_w - c.idle_w
    scale = max(1.0, (highest.power_w - idle_w[-1]) / above_w[-1])
    busy_w = idle_w + scale * above_w
    capped = highest.power_w > CAPPED * highest.limit_w
    busy = 1.0 if capped else float(np.clip((highest.power_w - idle_w[-1]) / (busy_w[-1] - idle_w[-1]), 0.0, 1.0))
    time = busy * c.time + 1.0 - busy
    mean_w = (busy * c.time * busy_w + (1.0 - busy) * idle_w) / time
    first = _governed(mean_w, held * highest.limit_w)
    at = np.array([_governed(mean_w, held * limit_w) for limit_w in limits_w], dtype=np.int64)
    return time[at] / time[first], mean_w[at]


def _governed(power_w: Array, limit_w: float) -> int:
    """Index of the highest clock at which mean power meets the limit; the lowest where none does."""
    within = np.flatnonzero(power_w <= limit_w)
    return int(within[-1]) if within.size else 0


def zeus_rows(folder: Path) -> list[Row]:
    """Errors of relative time and of power by card, beside "time unchanged" and "power = limit"."""
    found = predicted(epochs(folder))
    rows = []
    for gpu in (*GPUS, "all"):
        some = [p for p in found if gpu in (p.epoch.gpu, "all")]
        if not some:
            continue
        true, said = (np.array(x) for x in zip(*((p.relative_time, p.predicted_time) for p in some), strict=True))
        watts, told, limit, highest = (
            np.array(x)
            for x in zip(
                *((p.epoch.power_w, p.predicted_w, p.epoch.limit_w, p.highest.power_w) for p in some), strict=True
            )
        )
        name = "Zeus, power limits" if gpu == "all" else f"Zeus, power limits, {GPUS[gpu]}"
        rows += [
            row(name, "relative time", len(some), _mean(said - true), _mean(1.0 - true), floor_is="time unchanged"),
            row(
                name,
                "power",
                len(some),
                _mean(told / watts - 1),
                _mean(limit / watts - 1),
                floor_is="power = limit",
                never_above_the_highest_limits=round(_mean(np.minimum(limit, highest) / watts - 1), 2),
            ),
        ]
    return rows


def _mean(error: Array) -> float:
    return float(100.0 * np.mean(np.abs(error)))
