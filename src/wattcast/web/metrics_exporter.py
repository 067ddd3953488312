"""Export metrics to Prometheus: what cards measure, what Wattcast predicts, and what a better clock
would save.

Names end in their base unit, as Prometheus wants: watts, joules, hertz, seconds, celsius, ratio. A
card is read when somebody asks, at most every ``busy_s``; a card that says it is idle is left alone
for ``idle_s``, since every reading wakes parts of it. The driver stays open between readings:
opening it anew would wake the card. A driver that hangs is waited for in a thread of its own, so
that a scrape is answered whatever the driver does."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import (
    dataclass,
    field,
    replace,
)
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from wattcast.core.errors import MissingTool, import_extra
from wattcast.core.units import parse_amount
from wattcast.explore.explorations import ExploreObjective, explore
from wattcast.hardware import Gpu
from wattcast.measure import energy_sources
from wattcast.measure.counter_ticks import UnwrappedCounter
from wattcast.measure.energy_samples import name_throttle_reasons
from wattcast.measure.energy_sources import (
    DeviceIdentity,
    EnergySource,
    ReadError,
    SlowReadings,
)
from wattcast.measure.source_check import CHECKS, is_plausible_power
from wattcast.predictor.prediction import Prediction
from wattcast.web.card_holders import HOLDER_LABELS, HolderSources
from wattcast.web.client_limits import (
    HEADER_S,
    is_known_host,
    known_hosts,
    open_socket,
)

BUSY_S = 5.0
IDLE_S = 60.0
SCRAPE_S = 1.0  # that a scrape waits for a driver
PATIENT_S = 10.0  # that a program which reads once waits for it
IDLE_REASON = "gpu_idle"
MOST_DEVICES = 64


@dataclass(frozen=True)
class MetricsReading:
    """One reading of a card; NaN where it does not say."""

    at_s: float
    energy_j: float
    clock_hz: float
    slow: SlowReadings
    idle: bool
    lost: bool = False
    hung: bool = False
    doubtful: bool = False  # the counter stood still, fell, or rose above the card's limit

    @property
    def power_w(self) -> float:
        """The instant reading, or the average where there is no other."""
        return self.slow.instant_w if math.isfinite(self.slow.instant_w) else self.slow.average_w

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the clock is what it is, in NVML's names."""
        return (
            name_throttle_reasons(int(self.slow.throttle))
            if math.isfinite(self.slow.throttle)
            else ()
        )


@dataclass
class WatchedCard:
    """A card and its latest reading."""

    index: int
    source: EnergySource
    identity: DeviceIdentity
    busy_s: float = BUSY_S
    idle_s: float = IDLE_S
    now: Callable[[], float] = time.monotonic
    readings: int = 0
    errors: int = 0
    _last: MetricsReading | None = field(default=None, repr=False)
    _reader: threading.Thread | None = field(default=None, repr=False)
    _starting: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        most_w = self.identity.power_limit_w or CHECKS.most_w
        self._counter = UnwrappedCounter(self.source.energy_range_j, CHECKS.above_limit * most_w)

    def look(self, until_s: float | None = None) -> MetricsReading:
        """Return the latest reading, or a fresh one when that is due, and none where the driver
        does not answer.

        ``until_s`` is the ``time.monotonic()`` up to which a fresh one is waited for.
        """
        reader = self.start_reading()
        reader.join(
            max(
                (time.monotonic() + PATIENT_S if until_s is None else until_s) - time.monotonic(),
                0.0,
            )
        )
        if self._last is not None and not reader.is_alive():
            return self._last
        at_s = self.now() if self._last is None else self._last.at_s
        return MetricsReading(
            at_s,
            math.nan,
            math.nan,
            SlowReadings(),
            idle=False,
            hung=True,
        )

    def start_reading(self) -> threading.Thread:
        """Start to read the card when that is due and no reading is under way; return the latest
        that was begun.
        """
        with self._starting:
            due = self._last is None or self.now() - self._last.at_s >= self.due_s
            if self._reader is None or (due and not self._reader.is_alive()):
                self._reader = threading.Thread(target=self._read, daemon=True)
                self._reader.start()
            return self._reader

    @property
    def due_s(self) -> float:
        """How old a reading may grow."""
        return self.idle_s if self._last is not None and self._last.idle else self.busy_s

    @property
    def limit_w(self) -> float:
        """The power limit in force when the card was opened; NaN where it does not say."""
        return math.nan if self.identity.power_limit_w is None else self.identity.power_limit_w

    def _read(self) -> None:
        now_s = self.now()
        self.readings += 1
        try:
            energy_j = self._counter.follow(self.source.energy_j(), now_s)
            clock_hz = self.source.sm_clock_hz()
            slow = self.source.slow()
        except ReadError as error:
            self.errors += 1
            self._last = MetricsReading(
                now_s,
                math.nan,
                math.nan,
                SlowReadings(),
                idle=False,
                lost=error.lost,
            )
            return
        reading = MetricsReading(
            now_s,
            energy_j,
            clock_hz,
            slow,
            idle=False,
        )
        reading = replace(reading, doubtful=self._is_doubtful(reading))
        self._last = replace(reading, idle=IDLE_REASON in reading.reasons)

    def _is_doubtful(self, reading: MetricsReading) -> bool:
        """Tell whether the counter cannot have risen as it did since the last reading."""
        last = self._last
        if last is None or not math.isfinite(last.energy_j) or not math.isfinite(reading.energy_j):
            return False
        passed_s = reading.at_s - last.at_s
        if passed_s < 1.0:
            return False
        mean_w = (reading.energy_j - last.energy_j) / passed_s
        return not is_plausible_power(mean_w, (), self.identity.power_limit_w or CHECKS.most_w)


def find_cards(
    source: str = "auto",
    busy_s: float = BUSY_S,
    idle_s: float = IDLE_S,
) -> list[WatchedCard]:
    """Return all cards of the first source that answers; raises ``MissingTool`` when none does.

    A driver that has not answered after ``PATIENT_S`` is waited for in the background: the list
    gets its cards then."""
    watched: list[WatchedCard] = []
    failed: list[MissingTool] = []

    def open_all() -> None:
        try:
            for make in energy_sources.find_source_makers(source).values():
                cards: list[WatchedCard] = []
                with contextlib.suppress(MissingTool):
                    for index in range(MOST_DEVICES):
                        opened = make(index)
                        cards.append(
                            WatchedCard(
                                index,
                                opened,
                                opened.open(),
                                busy_s,
                                idle_s,
                            )
                        )
                if cards:
                    return watched.extend(cards)
            energy_sources.open_source(source)  # raises the error that says why none answers
        except MissingTool as error:
            failed.append(error)

    opening = threading.Thread(target=open_all, daemon=True)
    opening.start()
    opening.join(PATIENT_S)
    if failed:
        raise failed[0]
    return watched


REASONS = (
    "sw_power_cap",
    "hw_slowdown",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
)


@dataclass(frozen=True)
class ModelledWorkload:
    """A predicted workload, and its clock of least energy within a slowdown."""

    prediction: Prediction
    slowdown: float
    best: Mapping[str, Any]  # row of an exploration

    @property
    def saving(self) -> float:
        """Share of the energy that the best clock saves."""
        return 1.0 - float(self.best["energy_j"]) / float(self.prediction.energy_j)


def model_workload(
    workload: Any,
    gpu: Gpu,
    prediction: Prediction,
    slowdown: str,
    **options: Any,
) -> ModelledWorkload:
    """Find the saving of the best clock that is at most ``slowdown`` (``5%``) slower than the
    fastest.
    """
    best = explore(
        workload,
        gpu,
        ["clock=all"],
        slowdown=slowdown,
        **options,
    ).best[ExploreObjective.ENERGY]
    return ModelledWorkload(prediction, parse_amount(slowdown, "", "slowdown"), best.row)


MEASURED: dict[str, tuple[str, str, Callable[[WatchedCard, MetricsReading], float]]] = {
    "power_watts": ("gauge", "Measured board power", lambda c, r: r.power_w),
    "memory_power_watts": ("gauge", "Measured memory power", lambda c, r: r.slow.memory_w),
    "energy_joules": ("counter", "Energy since the driver was loaded", lambda c, r: r.energy_j),
    "clock_hertz": ("gauge", "Core clock the driver reports", lambda c, r: r.clock_hz),
    "temperature_celsius": ("gauge", "Die temperature", lambda c, r: r.slow.temperature_c),
    "power_limit_watts": ("gauge", "Enforced power limit", lambda c, r: c.limit_w),
    "idle": ("gauge", "1 while the card says it is idle", lambda c, r: r.idle),
    "lost": ("gauge", "1 when the card is gone", lambda c, r: r.lost),
    "hung": ("gauge", "1 while the driver does not answer", lambda c, r: r.hung),
    "reading_age_seconds": (
        "gauge",
        "Age of what is shown; idle cards are left alone",
        lambda c, r: c.now() - r.at_s,
    ),
    "energy_doubtful": (
        "gauge",
        "1 where the energy counter stood still, restarted or rose above the limit",
        lambda c, r: r.doubtful,
    ),
    "readings": ("counter", "Times the card was read", lambda c, r: c.readings),
    "reading_errors": ("counter", "Readings that failed", lambda c, r: c.errors),
}
PREDICTED: dict[str, tuple[str, Callable[[ModelledWorkload], Any]]] = {
    "power_watts": ("Predicted mean power", lambda m: m.prediction.power_w),
    "power_low_watts": ("Low end of its interval", lambda m: m.prediction.interval.power_w[0]),
    "power_high_watts": ("High end of its interval", lambda m: m.prediction.interval.power_w[1]),
    "energy_joules": ("Predicted energy of one run", lambda m: m.prediction.energy_j),
    "latency_seconds": ("Predicted time of one run", lambda m: m.prediction.latency_s),
    "clock_hertz": ("Predicted core clock", lambda m: m.prediction.clock_hz),
    "best_clock_hertz": (
        "Clock of least energy within the slowdown",
        lambda m: m.best["asked_clock_hz"],
    ),
    "best_power_watts": ("Predicted power at that clock", lambda m: m.best["power_w"]),
    "saving_ratio": ("Share of the energy that clock saves", lambda m: m.saving),
    "slowdown_ratio": ("Slowdown allowed for it", lambda m: m.slowdown),
    "inside_measured": (
        "1 when the prediction is near what was measured",
        lambda m: m.prediction.support.inside,
    ),
}


@dataclass(frozen=True, eq=False)
class MetricsCollector:
    """Yields all metrics when prometheus_client asks, at every scrape."""

    cards: Sequence[WatchedCard]
    workloads: Sequence[ModelledWorkload]
    wait_s: float = SCRAPE_S
    holders: HolderSources = field(default_factory=HolderSources)

    def collect(self) -> Iterator[Any]:
        """Yield all metrics, cards first."""
        cards = list(self.cards)
        until_s = time.monotonic() + self.wait_s
        for card in cards:
            card.start_reading()
        readings = []
        for card in cards:
            labels = [str(card.index), card.identity.uuid, card.identity.name]
            readings.append((labels, card, card.look(until_s)))

        names = ["device", "uuid", "name"]
        for name, (kind, text, pick) in MEASURED.items():
            rows = [(labels, float(pick(card, reading))) for labels, card, reading in readings]
            yield _make_family(kind, f"wattcast_{name}", text, names, rows)
        held_clocks = []
        for labels, _, reading in readings:
            held_clocks += [
                ([*labels, reason], float(reason in reading.reasons)) for reason in REASONS
            ]
        yield _make_family(
            "gauge",
            "wattcast_clock_held",
            "1 while this holds the clock down",
            [*names, "reason"],
            held_clocks,
        )
        if not self.holders.is_empty:
            devices = {card.identity.uuid: labels[0] for labels, card, _ in readings}
            yield from self._collect_holders(devices)
        for name, (text, choose) in PREDICTED.items():
            rows = [
                ([m.prediction.name, m.prediction.gpu], float(choose(m))) for m in self.workloads
            ]
            yield _make_family("gauge", f"wattcast_model_{name}", text, ["workload", "gpu"], rows)

    def _collect_holders(self, devices: Mapping[str, str]) -> Iterator[Any]:
        """Yield who holds which card, and whether that is all; ``devices`` are numbers by uuid."""
        holders, is_whole = self.holders.list_holders()
        holder_rows = []
        for holder in holders:
            if holder.uuid in devices:
                labels = [devices[holder.uuid], holder.uuid, *holder.labels]
                holder_rows.append((labels, 1.0))
        yield _make_family(
            "gauge",
            "wattcast_held_info",
            "Pods and jobs that hold a card, to join by uuid",
            ["device", "uuid", *HOLDER_LABELS],
            holder_rows,
        )
        yield _make_family(
            "gauge",
            "wattcast_holders_known",
            "1 where the kubelet and the job folder told who holds cards",
            [],
            [([], float(is_whole))],
        )


def _make_family(
    kind: str,
    name: str,
    text: str,
    labels: list[str],
    rows: list[tuple[list[str], float]],
) -> Any:
    """Return a family of Prometheus; numbers that are absent are left out, as absent is not
    zero."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    family = kinds[kind](name, text, labels=labels)
    for values, number in rows:
        if math.isfinite(number):
            family.add_metric(values, number)
    return family


def make_registry(collector: MetricsCollector) -> Any:
    """Return a registry of our metrics alone."""
    client = import_extra("prometheus_client", "metrics need prometheus-client", "serve")
    registry = client.CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry


def write_metrics(
    cards: Sequence[WatchedCard],
    workloads: Sequence[ModelledWorkload],
    holders: HolderSources | None = None,
) -> bytes:
    """Write all metrics as text."""
    sources = holders or HolderSources()
    registry = make_registry(
        MetricsCollector(
            cards,
            workloads,
            PATIENT_S,
            sources,
        )
    )
    from prometheus_client import generate_latest

    return bytes(generate_latest(registry))


class _MetricsHandler(WSGIRequestHandler):
    timeout = HEADER_S

    def log_message(
        self,
        format: str,
        *args: Any,
    ) -> None:
        """Say nothing: scrapes come all the time."""


def serve_metrics(
    host: str,
    port: int,
    cards: Sequence[WatchedCard],
    workloads: Sequence[ModelledWorkload],
    allowed: Sequence[str] = (),
    holders: HolderSources | None = None,
) -> tuple[WSGIServer, threading.Thread]:
    """Answer scrapes in a thread; return the server and the thread. ``allowed`` are further names
    it answers to.
    """
    names = known_hosts(host, allowed)
    sources = holders or HolderSources()
    registry = make_registry(MetricsCollector(cards, workloads, holders=sources))
    from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        if is_known_host([environ.get("HTTP_HOST", "")], names):
            return metrics(environ, start_response)
        start_response("421 Misdirected Request", [("content-type", "text/plain; charset=utf-8")])
        return [
            b"this server does not answer to that Host. Start it with --allow-host NAME "
            b"to allow one.\n"
        ]

    server = ThreadingWSGIServer((host, port), _MetricsHandler, bind_and_activate=False)
    server.socket.close()
    server.socket = open_socket(host, port)
    server.server_address = server.socket.getsockname()[:2]
    server.server_name, server.server_port = host, server.server_address[1]
    server.setup_environ()
    server.set_app(answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    return server, thread
