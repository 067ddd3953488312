"""What the chip did in each interval, however we came to know it.

Counts add up across intervals and mean the same from every source; the few events that are means
(``events.csv`` says which) are weighted by duration when intervals merge. A source leaves out the
events it cannot see: absent is not zero.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files

import numpy as np

from wattcast.arrays import Array, Scalar
from wattcast.errors import MissingEvents, nearest, unknown_name
from wattcast.hardware import OperatingPoint


class Source(StrEnum):
    """How an activity became known."""

    PREDICTED = "predicted"
    PROFILED = "profiled"
    SIMULATED = "simulated"


@dataclass(frozen=True)
class Event:
    """One row of ``events.csv``."""

    name: str
    unit: str
    is_mean: bool
    module: str
    meaning: str


@cache
def events() -> dict[str, Event]:
    """Every event Wattcast knows, by name."""
    text = files("wattcast.activity").joinpath("events.csv").read_text(encoding="utf-8")
    return {
        row["event"]: Event(row["event"], row["unit"], row["kind"] == "mean", row["module"], row["meaning"])
        for row in csv.DictReader(text.splitlines())
    }


@dataclass(frozen=True)
class Activity:
    """Event values over intervals: kernels, gaps, or samples.

    ``at`` holds the set clocks that held during each interval and broadcasts to
    ``(*sweep, interval)``.
    """

    duration_s: Array  # (*sweep, interval)
    value: Array  # (*sweep, interval, event)
    events: tuple[str, ...]
    at: OperatingPoint
    source: Source

    def __post_init__(self) -> None:
        known = events()
        for name in self.events:
            if name not in known:
                raise unknown_name("event", name, known)
        if self.value.shape[-1:] != (len(self.events),):
            raise ValueError(f"value has {self.value.shape[-1:]} events, named are {len(self.events)}")
        np.broadcast_shapes(self.duration_s.shape, self.value.shape[:-1])

    def has(self, event: str) -> bool:
        """Whether the source could see this event."""
        return event in self.events

    def of(self, event: str) -> Array:
        """Values of one event, ``(*sweep, interval)``."""
        return self.value[..., self.events.index(event)]

    def rate(self, event: str) -> Array:
        """Events per second; an interval of no duration has rate zero."""
        count = self.of(event)
        return np.divide(
            count,
            self.duration_s,
            out=np.zeros(np.broadcast(count, self.duration_s).shape),
            where=self.duration_s > 0,
        )

    def require(self, names: Iterable[str], model: str) -> None:
        """Raise :class:`~wattcast.errors.MissingEvents` unless all of ``names`` are here."""
        wanted = [name for name in names if name not in self.events]
        if wanted:
            close = {n: nearest(n, self.events, 1) for n in wanted}
            listed = ", ".join(f"{n} (closest: {c[0]})" if c else n for n, c in close.items())
            raise MissingEvents(
                f"{model} needs {listed}, absent from this {self.source} activity, which has "
                f"{', '.join(self.events)}. Collect the missing counters, or choose a model that does not need them."
            )


def merge(activity: Activity) -> Activity:
    """All intervals as one: counts add up, means are weighted by duration."""
    known = events()
    total_s = activity.duration_s.sum(axis=-1, keepdims=True)
    weight = np.divide(
        activity.duration_s, total_s, out=np.zeros_like(activity.duration_s, dtype=float), where=total_s > 0
    )
    is_mean = np.array([known[name].is_mean for name in activity.events])
    summed = np.where(
        is_mean,
        (activity.value * weight[..., np.newaxis]).sum(axis=-2, keepdims=True),
        activity.value.sum(axis=-2, keepdims=True),
    )
    return replace(activity, duration_s=total_s, value=summed)


def split(activity: Activity, share: Scalar) -> Activity:
    """Each interval cut in two, ``share`` of its time and counts first; means stay as they are."""
    known = events()
    is_mean = np.array([known[name].is_mean for name in activity.events])
    parts_s = [activity.duration_s * share, activity.duration_s * (1.0 - np.asarray(share))]
    factor = np.asarray(share)[..., np.newaxis]
    parts = [activity.value * np.where(is_mean, 1.0, f) for f in (factor, 1.0 - factor)]
    return replace(
        activity,
        duration_s=np.concatenate(parts_s, axis=-1),
        value=np.concatenate(parts, axis=-2),
        at=_doubled(activity),
    )


def _doubled(activity: Activity) -> OperatingPoint:
    """Settings of each interval, laid out twice along the interval axis."""
    at = activity.at
    return OperatingPoint(
        None if at.clock_hz is None else _twice(at.clock_hz),
        None if at.power_limit_w is None else _twice(at.power_limit_w),
        _twice(at.temperature_c),
        None if at.memory_clock_hz is None else _twice(at.memory_clock_hz),
    )


def _twice(setting: Scalar) -> Scalar:
    array = np.asarray(setting, dtype=np.float64)
    return setting if array.ndim == 0 or array.shape[-1] == 1 else np.concatenate([array, array], axis=-1)
