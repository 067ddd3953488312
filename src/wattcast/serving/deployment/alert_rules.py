"""Write Prometheus alert rules from what is expected of a service.

What an engine may take depends on its load, so that there is a rule for each range of load:

    tokens' time over ten minutes > its upper end    and    requests a second within the range

Metric names are those of vLLM 0.25.1 and, for power, of NVIDIA's DCGM exporter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from wattcast.serving.deployment.expected_service import ExpectedLevel, ExpectedService

WINDOW = "10m"
PATIENCE = "15m"  # for which a figure has to be outside
_LATENCIES = {
    "tpot_mean_s": ("TimePerToken", "vllm:request_time_per_output_token_seconds"),
    "ttft_mean_s": ("TimeToFirstToken", "vllm:time_to_first_token_seconds"),
}
_SUBJECTS = {
    "TimePerTokenAboveExpected": "The mean time per output token",
    "TimeToFirstTokenAboveExpected": "The mean time to first token",
    "PowerOutsideExpected": "The mean power",
}
_REQUESTS = f"sum by (instance) (rate(vllm:request_success_total[{WINDOW}]))"

_BEYOND = 1.1  # of the highest load with expected figures, up to which these are compared


def make_alert_rules(expected: ExpectedService, name: str) -> dict[str, Any]:
    """Return a rule file of Prometheus: latencies and watts outside of what is expected, and load
    beyond what was planned."""
    rules = list(_list_level_rules(expected, name))
    rules.append(_make_overload_rule(expected))
    return {"groups": [{"name": f"wattcast-{name}", "rules": rules}]}


def _list_level_rules(expected: ExpectedService, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rules of each range of load, which ends half-way to the levels next to it."""
    levels = expected.levels
    edges = [0.0]
    for below, above in itertools.pairwise(levels):
        edges.append((below.rate_per_s + above.rate_per_s) / 2.0)
    edges.append(levels[-1].rate_per_s * _BEYOND)
    for level, low, high in zip(levels, edges, edges[1:], strict=False):
        load = f"{_REQUESTS} > {low:.6g} and on (instance) {_REQUESTS} <= {high:.6g}"
        for figure, (title, metric) in _LATENCIES.items():
            most = level.figures[figure].high
            expression = f"{_mean_of(metric)} > {most:.6g} and on (instance) {load}"
            yield _make_rule(f"{title}AboveExpected", expression, level, f"above {most:.3g} s")
        yield _make_power_rule(expected, level, (low, high), name)


def _mean_of(metric: str) -> str:
    """Return the mean of a histogram over the window, for each engine."""
    parts = [f"sum by (instance) (rate({metric}_{end}[{WINDOW}]))" for end in ("sum", "count")]
    return " / ".join(parts)


def _make_power_rule(
    expected: ExpectedService,
    level: ExpectedLevel,
    ends: tuple[float, float],
    name: str,
) -> dict[str, Any]:
    """Return the rule of the mean power of a GPU, over all pods of the service."""
    figure = level.figures["power_w"]
    gpus = expected.replica.gpus
    low_w = figure.low / gpus
    high_w = figure.high / gpus
    power = f'avg(avg_over_time(DCGM_FI_DEV_POWER_USAGE{{pod=~"{name}-.*"}}[{WINDOW}]))'
    rate = f"avg({_REQUESTS})"
    load = f"{rate} > {ends[0]:.6g} and on () {rate} <= {ends[1]:.6g}"
    expression = f"({power} < {low_w:.6g} or {power} > {high_w:.6g}) and on () {load}"
    words = f"outside {low_w:.0f} to {high_w:.0f} W a GPU"
    return _make_rule("PowerOutsideExpected", expression, level, words)


def _make_overload_rule(expected: ExpectedService) -> dict[str, Any]:
    """Return the rule of a load beyond what a replica serves within all bounds."""
    most = expected.capacity_per_replica_per_s
    expression = f"{_REQUESTS} > {most:.6g}"
    return {
        "alert": "LoadBeyondPlan",
        "expr": expression,
        "for": PATIENCE,
        "labels": {"severity": "warning"},
        "annotations": {
            "summary": (
                f"An engine gets more than the {most:.3g} requests/s that it serves within all bounds."
            )
        },
    }


def _make_rule(
    title: str,
    expression: str,
    level: ExpectedLevel,
    words: str,
) -> dict[str, Any]:
    load = f"{level.rate_per_s:.3g} requests/s"
    subject = _SUBJECTS[title]
    return {
        "alert": title,
        "expr": expression,
        "for": PATIENCE,
        "labels": {"severity": "warning", "load": f"{level.load_share:.0%}"},
        "annotations": {
            "summary": f"{subject} of an engine at about {load} is {words}.",
            "description": "`wattcast check expected.json` says what would explain it.",
        },
    }
