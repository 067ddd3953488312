"""Print a check of a service, return it as data, and offer rows to calibrate the card with."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from wattcast.core import bad_value
from wattcast.core.units import show
from wattcast.predictor.api import predict
from wattcast.predictor.prediction_json import take_fields
from wattcast.report.text_tables import print_notes, print_rows
from wattcast.serving.checking.promised_replica import PromisedReplica
from wattcast.serving.checking.service_check import CheckedLoad, CheckResult
from wattcast.serving.simulate_serving import find_language_model
from wattcast.workload.build_model import build_graph
from wattcast.workload.model_options import WorkloadPhase

MOST_CAUSES = 3
_COLUMNS = {
    "load": "requests/s",
    "figure": "of an engine",
    "measured": "measured",
    "planned": "planned",
    "simulated": "with this traffic",
    "interval": "healthy",
    "verdict": "",
}
_LABELS = {
    "ttft_mean_s": "time to first token",
    "tpot_mean_s": "time per output token",
    "power_w": "power",
}


def print_check(console: Console, result: CheckResult) -> None:
    """Print the verdict, what differs, what would explain it, then all figures."""
    replica = result.expected.replica
    title = f"{replica.model} on {replica.gpu}, {replica.gpus} GPUs a replica"
    if not result.has_alarm:
        console.print(f"[bold]{escape(title)}[/bold]: as planned")
    else:
        console.print(f"[bold]{escape(title)}[/bold]: [red]not as planned[/red]")
    for finding in result.findings:
        console.print(f"  {escape(finding.sentence)}")
    kinds = {finding.kind for finding in result.findings}
    if kinds and "figure" not in kinds:
        console.print("  With this traffic, all figures are where a healthy service has them.")
    if "figure" in kinds:
        _print_causes(console, result)
    print_rows(console, _list_rows(result), _COLUMNS, left=("figure", "interval", "verdict"))
    print_notes(console, list_check_notes(result))


def _print_causes(console: Console, result: CheckResult) -> None:
    """Print what would explain the figures of the worst load, the best first."""
    causes = [cause for load in result.loads for cause in load.causes]
    if not causes:
        console.print("  None of the causes that are simulated explains it.")
        return
    console.print("  What would explain it, best first:")
    for cause in causes[:MOST_CAUSES]:
        console.print(f"    {escape(cause.sentence)}")


def _list_rows(result: CheckResult) -> list[dict[str, Any]]:
    rows = []
    for load in result.loads:
        for figure in load.figures:
            unit = "W" if figure.name == "power_w" else "s"
            low, high = show(figure.low, unit, 3), show(figure.high, unit, 3)
            rows.append(
                {
                    "load": f"{load.window.rate_per_s:.3g}",
                    "figure": _LABELS[figure.name],
                    "measured": show(figure.measured, unit, 3),
                    "planned": show(figure.planned, unit, 3),
                    "simulated": show(figure.simulated, unit, 3),
                    "interval": f"{low} to {high}",
                    "verdict": "" if figure.is_inside else "OUTSIDE",
                }
            )
    return rows


def list_check_notes(result: CheckResult) -> list[str]:
    """List what a check assumes."""
    notes = [
        "planned: at the nearest load of the plan; with this traffic: the planned replica, "
        "simulated "
        "under the rate and the mean lengths that came"
    ]
    if result.is_adopted:
        notes.append("healthy: as the service that was adopted, but for chance and drift")
    else:
        notes.append(
            "healthy: within the prediction's own error. Once the service is known to be well, "
            "--adopt compares later ones with it, ten times as sharply"
        )
    notes.append("one healthy service in twenty raises an alarm")
    if any(load.window.power_w is None for load in result.loads):
        notes.append("no power in the metrics: scrape wattcast export prometheus or DCGM as well")
    return notes


def summarise_check(result: CheckResult) -> dict[str, Any]:
    """Return the names and numbers of ``check --json``."""
    return {
        "alarm": result.has_alarm,
        "adopted": result.is_adopted,
        "findings": [take_fields(finding, "kind", "sentence") for finding in result.findings],
        "loads": [_summarise_load(load) for load in result.loads],
        "assumptions": list_check_notes(result),
    }


def _summarise_load(load: CheckedLoad) -> dict[str, Any]:
    window = load.window
    names = ("seconds", "engines", "requests", "rate_per_s", "prompt_tokens", "output_tokens")
    figures = {}
    for figure in load.figures:
        fields = ("measured", "planned", "simulated", "low", "high", "is_inside")
        figures[figure.name] = take_fields(figure, *fields)
    causes = [
        take_fields(
            cause,
            "name",
            "strength",
            "sentence",
            "gain",
        )
        for cause in load.causes
    ]
    return {
        **take_fields(
            window,
            *names,
            "output_tokens_per_s",
            "running",
            "waiting",
        ),
        **take_fields(
            window,
            "power_w",
            "clock_hz",
            "prefix_hit_share",
            "preemptions",
        ),
        "figures": figures,
        "causes": causes,
    }


def write_calibration_rows(result: CheckResult, promised: PromisedReplica) -> str:
    """Return rows for ``wattcast calibrate``: the mean decode step of each load.

    An engine reports no single step. The step's time is the predicted one times measured over
    simulated time per token, and its power likewise. A load whose answers have one token has no
    decode step.
    """
    spec = find_language_model(result.expected.replica.model)
    decoding = [load for load in result.loads if math.isfinite(load.window.tpot_s)]
    if not decoding:
        raise bad_value("metrics", "a mean time per token, for rows of decode steps", "none")
    rows = [_make_row(load, promised, spec) for load in decoding]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _make_row(
    load: CheckedLoad,
    promised: PromisedReplica,
    spec: Any,
) -> dict[str, Any]:
    """Return the mean decode step of a load, as it must have been."""
    window = load.window
    replica = promised.expected.replica
    decoding = window.rate_per_s * max(window.output_tokens - 1.0, 0.0) * window.tpot_s
    batch = min(max(round(decoding), 1), replica.max_seqs)
    context = max(round(window.prompt_tokens + window.output_tokens / 2.0), 1)
    step = replace(
        promised.shared,
        phase=WorkloadPhase.DECODE,
        batch=batch,
        seq=context,
    )
    prediction = predict(build_graph(spec, step), promised.gpu, clock=replica.clock_hz)
    figures = {figure.name: figure for figure in load.figures}
    latency_ms = 1e3 * float(prediction.latency_s)
    if "tpot_mean_s" in figures:
        latency_ms *= figures["tpot_mean_s"].measured / figures["tpot_mean_s"].simulated
    row = {
        "workload": replica.model,
        "phase": "decode",
        "batch": batch,
        "seq": context,
        **{name: value for name, value in replica.formats.items() if name != "sampling"},
        "tp": replica.tp,
        "stack": "engine",
        "latency_ms": f"{latency_ms:.4g}",
    }
    if "power_w" in figures:
        ratio = figures["power_w"].measured / figures["power_w"].simulated
        row["power_w"] = f"{float(prediction.power_w) * ratio:.4g}"
    if window.clock_hz is not None:
        row["clock_mhz"] = f"{window.clock_hz / 1e6:.0f}"
    return row
