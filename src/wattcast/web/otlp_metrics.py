"""Send power and energy of cards, and the tokens of an engine, to an OpenTelemetry collector.

OTLP over HTTP in its JSON form needs no library. Names follow OpenTelemetry's conventions: hardware
metrics (``hw.power``, ``hw.energy``, ``hw.temperature`` with ``hw.id``, ``hw.type``, ``hw.name``)
and GenAI usage (``gen_ai.client.token.usage``, from an engine's own histograms of prompt and output
tokens of a request)."""

from __future__ import annotations

import json
import math
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wattcast import __version__
from wattcast.core.errors import (
    MissingTool,
    bad_value,
    import_extra,
)
from wattcast.web.metrics_exporter import MetricsReading, WatchedCard

POST_S = 10.0
LONGEST_PAGE_BYTE = 8 << 20
CUMULATIVE = 2  # AGGREGATION_TEMPORALITY_CUMULATIVE
TOKEN_HISTOGRAMS = {  # of an engine -> the type of its tokens
    "vllm:request_prompt_tokens": "input",
    "vllm:request_generation_tokens": "output",
    "sglang:prompt_tokens_histogram": "input",
    "sglang:generation_tokens_histogram": "output",
}
HARDWARE: dict[str, tuple[str, str, Callable[[MetricsReading], float]]] = {
    "hw.power": ("W", "Instantaneous power", lambda reading: reading.power_w),
    "hw.energy": ("J", "Energy since the driver was loaded", lambda reading: reading.energy_j),
    "hw.temperature": ("Cel", "Die temperature", lambda reading: reading.slow.temperature_c),
}


@dataclass(frozen=True)
class EngineTokens:
    """Where an engine tells its tokens, and what it serves."""

    url: str
    model: str

    def read(self) -> list[dict[str, Any]]:
        """Return the data points of its histograms of tokens."""
        import_extra("prometheus_client", "metrics need prometheus-client", "serve")
        from prometheus_client.parser import text_string_to_metric_families

        text = _fetch_page(self.url)
        points = []
        for family in text_string_to_metric_families(text):
            kind = TOKEN_HISTOGRAMS.get(family.name)
            if kind is not None:
                points.append(_make_histogram_point(family.samples, family.name, kind, self.model))
        if not points:
            expected = "histograms of tokens of vLLM or SGLang"
            raise MissingTool(f"{self.url} has no {expected}; is it the engine's /metrics?")
        return points


def _fetch_page(url: str) -> str:
    check_address(url, "--metrics")
    try:
        with urllib.request.urlopen(url, timeout=POST_S) as page:  # noqa: S310  (checked)
            return str(page.read(LONGEST_PAGE_BYTE).decode(errors="replace"))
    except (OSError, ValueError) as error:
        raise MissingTool(f"{url} does not answer ({error}).") from None


def check_address(url: str, option: str) -> None:
    """Raise ``BadInput`` where a URL is none of HTTP."""
    if not url.startswith(("http://", "https://")):
        raise bad_value(option, "an address such as http://localhost:4318", url)


def _make_histogram_point(
    samples: Sequence[Any],
    name: str,
    kind: str,
    model: str,
) -> dict[str, Any]:
    """Return one data point of a Prometheus histogram, over all its labels."""
    below: dict[float, float] = {}
    total = 0.0
    for sample in samples:
        if sample.name == f"{name}_bucket":
            edge = float(sample.labels["le"])
            below[edge] = below.get(edge, 0.0) + sample.value
        elif sample.name == f"{name}_sum":
            total += sample.value
    edges = sorted(below)
    counts = [round(below[edge]) for edge in edges]
    in_buckets = [count - before for count, before in zip(counts, [0, *counts], strict=False)]
    return {
        "attributes": _list_attributes(
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": name.partition(":")[0],
                "gen_ai.request.model": model,
                "gen_ai.token.type": kind,
            }
        ),
        "count": str(counts[-1] if counts else 0),
        "sum": total,
        "bucketCounts": [str(count) for count in in_buckets],
        "explicitBounds": [edge for edge in edges if math.isfinite(edge)],
    }


def _list_attributes(values: dict[str, str]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in values.items()]


def build_request(
    cards: Sequence[WatchedCard],
    begin_ns: int,
    engine: EngineTokens | None = None,
) -> dict[str, Any]:
    """Return the request that an OTLP collector takes: what cards and the engine tell now."""
    now = {"startTimeUnixNano": str(begin_ns), "timeUnixNano": str(time.time_ns())}
    readings = [(card, card.look()) for card in cards]
    metrics = []
    for name, (unit, text, pick) in HARDWARE.items():
        points = []
        for card, reading in readings:
            value = float(pick(reading))
            if math.isfinite(value):  # absent is not zero
                points.append({**now, "asDouble": value, "attributes": _name_card(card)})
        kind: dict[str, Any] = {"gauge": {"dataPoints": points}}
        if name == "hw.energy":
            kind = {"sum": _make_cumulative(points, isMonotonic=True)}
        if points:
            metrics.append({"name": name, "unit": unit, "description": text, **kind})
    if engine is not None:
        tokens = [{**now, **point} for point in engine.read()]
        metrics.append(
            {
                "name": "gen_ai.client.token.usage",
                "unit": "{token}",
                "description": "Tokens of requests, by the engine's own histograms",
                "histogram": _make_cumulative(tokens),
            }
        )
    resource = {"service.name": "wattcast", "host.name": socket.gethostname()}
    scope = {"name": "wattcast", "version": __version__}
    return {
        "resourceMetrics": [
            {
                "resource": {"attributes": _list_attributes(resource)},
                "scopeMetrics": [{"scope": scope, "metrics": metrics}],
            }
        ]
    }


def _make_cumulative(points: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"dataPoints": points, "aggregationTemporality": CUMULATIVE, **more}


def _name_card(card: WatchedCard) -> list[dict[str, Any]]:
    return _list_attributes(
        {
            "hw.id": card.identity.uuid,
            "hw.type": "gpu",
            "hw.name": card.identity.name,
        }
    )


def send_request(endpoint: str, request: dict[str, Any]) -> None:
    """Post a request to a collector; ``MissingTool`` where it does not take it."""
    check_address(endpoint, "--endpoint")
    url = f"{endpoint.rstrip('/')}/v1/metrics"
    post = urllib.request.Request(  # noqa: S310  (checked)
        url,
        data=json.dumps(request).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(post, timeout=POST_S) as answer:  # noqa: S310  (checked)
            answer.read(LONGEST_PAGE_BYTE)
    except urllib.error.HTTPError as error:
        raise MissingTool(f"{url} refuses the metrics (HTTP {error.code}).") from None
    except OSError as error:
        raise MissingTool(f"no collector takes metrics at {url} ({error}).") from None


def push_metrics(
    endpoint: str,
    cards: Sequence[WatchedCard],
    interval_s: float,
    say: Callable[[str], None],
    count: int = 0,
    engine: EngineTokens | None = None,
) -> int:
    """Send what is read every interval, ``count`` times or (0) until interrupted; return how often
    it was sent. A collector that is away is tried again.
    """
    begin_ns = time.time_ns()
    sent = 0
    tries = 0
    complaint = ""
    while True:
        try:
            send_request(endpoint, build_request(cards, begin_ns, engine))
            sent += 1
            complaint = ""
        except MissingTool as error:
            if str(error) != complaint:
                say(str(error))
            complaint = str(error)
        tries += 1
        if count and tries >= count:
            return sent
        time.sleep(interval_s)
