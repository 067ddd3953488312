"""Metrics for Prometheus: what cards measure, what Wattcast predicts of a workload, and what could be saved.

Names end in their base unit, as Prometheus wants: watts, joules, hertz, seconds, celsius, ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from wattcast.errors import MissingTool, Refused
from wattcast.explore.dvfs import Objective, clocks
from wattcast.hardware import Gpu
from wattcast.prediction import Prediction
from wattcast.web.readings import Card, Reading

REASONS = ("sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")


@dataclass(frozen=True)
class Modelled:
    """A workload on a GPU, and its clock of least energy within a slowdown."""

    prediction: Prediction
    slowdown: float
    best_clock_hz: float
    best_energy_j: float
    best_power_w: float

    @property
    def saving(self) -> float:
        """Share of the energy that the best clock saves."""
        return 1.0 - self.best_energy_j / float(self.prediction.energy_j)


def modelled(workload: Any, gpu: Gpu, prediction: Prediction, slowdown: str, **options: Any) -> Modelled:
    """The saving that the best clock at most ``slowdown`` (``5%``) slower than the fastest would bring."""
    found = clocks(workload, gpu, slowdown=slowdown, **options)
    row = found.best[Objective.ENERGY]
    columns = found.columns
    return Modelled(
        prediction,
        float(slowdown.rstrip("%")) / (100.0 if slowdown.endswith("%") else 1.0),
        float(columns["asked_clock_hz"][row]),
        float(columns["energy_j"][row]),
        float(columns["power_w"][row]),
    )


Family: TypeAlias = tuple[str, str, str, list[str], list[tuple[list[str], float]]]  # name, kind, text, labels, rows

MEASURED: dict[str, tuple[str, str, Callable[[Card, Reading], float]]] = {
    "power_watts": ("gauge", "Measured board power", lambda c, r: r.power_w),
    "memory_power_watts": ("gauge", "Measured memory power", lambda c, r: r.slow.memory_w),
    "energy_joules": ("counter", "Energy since the driver was loaded", lambda c, r: r.energy_j),
    "clock_hertz": ("gauge", "Core clock the driver reports", lambda c, r: r.clock_hz),
    "temperature_celsius": ("gauge", "Die temperature", lambda c, r: r.slow.temperature_c),
    "power_limit_watts": ("gauge", "Enforced power limit", lambda c, r: c.limit_w),
    "idle": ("gauge", "1 while the card says it is idle", lambda c, r: r.idle),
    "lost": ("gauge", "1 when the card is gone", lambda c, r: r.lost),
    "reading_age_seconds": ("gauge", "Age of what is shown; idle cards are left alone", lambda c, r: c.age_s(r)),
    "readings": ("counter", "Times the card was read", lambda c, r: c.readings),
    "reading_errors": ("counter", "Readings that failed", lambda c, r: c.errors),
}
PREDICTED: dict[str, tuple[str, Callable[[Modelled], Any]]] = {
    "power_watts": ("Predicted mean power", lambda m: m.prediction.power_w),
    "power_low_watts": ("Low end of its interval", lambda m: m.prediction.interval.power_w[0]),
    "power_high_watts": ("High end of its interval", lambda m: m.prediction.interval.power_w[1]),
    "energy_joules": ("Predicted energy of one run", lambda m: m.prediction.energy_j),
    "latency_seconds": ("Predicted time of one run", lambda m: m.prediction.latency_s),
    "clock_hertz": ("Predicted core clock", lambda m: m.prediction.clock_hz),
    "best_clock_hertz": ("Clock of least energy within the slowdown", lambda m: m.best_clock_hz),
    "best_power_watts": ("Predicted power at that clock", lambda m: m.best_power_w),
    "saving_ratio": ("Share of the energy that clock saves", lambda m: m.saving),
    "slowdown_ratio": ("Slowdown allowed for it", lambda m: m.slowdown),
    "inside_measured": ("1 when the prediction is inside what was measured", lambda m: m.prediction.support.inside),
}


class Collector:
    """What prometheus_client asks at every scrape."""

    def __init__(self, cards: Sequence[Card], workloads: Sequence[Modelled]) -> None:
        self._cards, self._workloads = cards, workloads

    def collect(self) -> Iterator[Any]:
        """All metrics, cards first."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        make = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        for name, kind, text, labels, rows in (*self._measured(), *self._predicted()):
            family = make[kind](name, text, labels=labels)
            for values, number in rows:
                if math.isfinite(number):  # absent is not zero
                    family.add_metric(values, number)
            yield family

    def _measured(self) -> Iterator[Family]:
        names = ["device", "uuid", "name"]
        seen = [([str(c.index), c.identity.uuid, c.identity.name], c, c.look()) for c in self._cards]
        for name, (kind, text, pick) in MEASURED.items():
            yield f"wattcast_{name}", kind, text, names, [(labels, float(pick(c, r))) for labels, c, r in seen]
        held = [([*labels, reason], float(reason in r.reasons)) for labels, _, r in seen for reason in REASONS]
        yield "wattcast_clock_held", "gauge", "1 while this holds the clock down", [*names, "reason"], held

    def _predicted(self) -> Iterator[Family]:
        for name, (text, pick) in PREDICTED.items():
            rows = [([m.prediction.name, m.prediction.gpu], float(pick(m))) for m in self._workloads]
            yield f"wattcast_model_{name}", "gauge", text, ["workload", "gpu"], rows


def registry(cards: Sequence[Card], workloads: Sequence[Modelled]) -> Any:
    """A registry of our metrics alone."""
    try:
        from prometheus_client import CollectorRegistry
    except ImportError:
        raise MissingTool("metrics need prometheus-client. Install it: pip install 'wattcast[serve]'.") from None
    made = CollectorRegistry(auto_describe=False)
    made.register(Collector(cards, workloads))
    return made


def exposition(cards: Sequence[Card], workloads: Sequence[Modelled]) -> bytes:
    """All metrics as text."""
    made = registry(cards, workloads)
    from prometheus_client import generate_latest

    text: bytes = generate_latest(made)
    return text


def serve(host: str, port: int, cards: Sequence[Card], workloads: Sequence[Modelled]) -> tuple[Any, Any]:
    """Answer scrapes in a thread; the server and the thread."""
    made = registry(cards, workloads)
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, host, made)
    except OSError as error:
        raise Refused(f"{host}:{port} cannot be served on ({error}). Choose another --port.") from None
    return server, thread
