"""Print a check of a training job, return it as data, and offer rows to calibrate the card with."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape

from wattcast.core.strict_files import encode_csv
from wattcast.predictor.api import predict
from wattcast.predictor.prediction_json import take_fields
from wattcast.report.text_tables import print_notes, print_rows
from wattcast.training.checking.job_check import JobCheck

MOST_CAUSES = 3
_COLUMNS = {
    "figure": "of a GPU and a step",
    "measured": "measured",
    "predicted": "predicted",
    "interval": "healthy",
    "verdict": "",
}
_LABELS = {
    "step_s": "time of a step",
    "power_w": "power of a GPU",
    "clock_hz": "clock",
    "busy": "share of time at work",
}


def print_job_check(console: Console, check: JobCheck) -> None:
    """Print the verdict, what differs, what would explain it, then all figures."""
    result = check.result
    title = f"{result.model} on {result.gpus} x {result.gpu}, {result.strategy}"
    verdict = "[red]not as predicted[/red]" if check.has_alarm else "as predicted"
    console.print(f"[bold]{escape(title)}[/bold]: {verdict}")
    for finding in check.findings:
        console.print(f"  {escape(finding.sentence)}")
    kinds = {finding.kind for finding in check.findings}
    if "figure" in kinds and check.causes:
        console.print("  What would explain it, best first:")
        for cause in check.causes[:MOST_CAUSES]:
            console.print(f"    {escape(cause.sentence)}")
    elif "figure" in kinds:
        console.print("  None of the causes that are predicted explains it.")
    print_rows(console, _list_rows(check), _COLUMNS, left=("figure", "interval", "verdict"))
    print_notes(console, list_job_notes(check))


def _list_rows(check: JobCheck) -> list[dict[str, Any]]:
    rows = []
    for figure in check.figures:
        low, high = figure.show(figure.low), figure.show(figure.high)
        rows.append(
            {
                "figure": _LABELS[figure.name],
                "measured": figure.show(figure.measured),
                "predicted": figure.show(figure.predicted),
                "interval": f"{low} to {high}",
                "verdict": "" if figure.is_inside else "OUTSIDE",
            }
        )
    return rows


def list_job_notes(check: JobCheck) -> list[str]:
    """List what a check assumes."""
    measured = check.measured
    notes = [f"steps in the logs: {measured.steps:,.0f}"]
    if check.job.adopted:
        notes.append("healthy: as the job that was adopted")
    else:
        notes.append(
            "healthy: within the prediction's own error. Once a job is known to be well, --adopt "
            "compares later ones with it, more sharply"
        )
    notes.append("one healthy job in twenty raises an alarm")
    if measured.step_s is None:
        notes.append("no times of steps in the logs: give global_step with _timestamp as well")
    if measured.power_w is None:
        notes.append("no watts in the logs: give the system metrics of W&B or MLflow as well")
    elif measured.gpus and len(measured.gpus) < check.result.gpus:
        notes.append(f"watts of {len(measured.gpus)} of {check.result.gpus} GPUs")
    if measured.pause_share is None:
        notes.append("no stamps of steps: pauses between them count to the steps")
    return notes


def summarise_job_check(check: JobCheck) -> dict[str, Any]:
    """Return the names and numbers of ``check --json``."""
    fields = ("measured", "predicted", "low", "high", "is_inside")
    names = ("name", "strength", "sentence", "gain")
    measured = (
        "steps",
        "pause_share",
        "step_tokens",
        "step_sequences",
        "wait_s",
        "limit_w",
    )
    return {
        "alarm": check.has_alarm,
        "adopted": bool(check.job.adopted),
        "findings": [take_fields(finding, "kind", "sentence") for finding in check.findings],
        "causes": [take_fields(cause, *names) for cause in check.causes],
        "figures": {figure.name: take_fields(figure, *fields) for figure in check.figures},
        **take_fields(check.measured, *measured),
        "gpus": [take_fields(gpu, "index", "power_w", "clock_hz") for gpu in check.measured.gpus],
        "assumptions": list_job_notes(check),
    }


def write_job_rows(check: JobCheck) -> bytes:
    """Return a row for ``wattcast calibrate``: one pass of one GPU over its micro-batch.

    A log has no single pass. Its time is the predicted one times measured over predicted time of
    a step, and its power likewise.
    """
    result = check.result
    strategy = result.strategy
    run: dict[str, Any] = {
        "phase": "train",
        "batch": strategy.micro_batch,
        "seq": result.seq,
        "dtype": str(result.recipe.dtype),
        "stack": str(result.recipe.stack),
    }
    step = predict(check.job.model, gpu=check.job.gpu, tp=strategy.tp, force=True, **run)
    figures = {figure.name: figure for figure in check.figures}
    row: dict[str, Any] = {"workload": check.job.model, **run, "tp": strategy.tp}
    for name, column, value in (
        ("step_s", "latency_ms", 1e3 * float(step.latency_s)),
        ("power_w", "power_w", float(step.power_w)),
    ):
        if name in figures:
            ratio = figures[name].measured / figures[name].predicted
            row[column] = f"{value * ratio:.4g}"
    if check.measured.clock_hz:
        row["clock_mhz"] = f"{check.measured.clock_hz / 1e6:.0f}"
    return encode_csv([list(row), list(row.values())])
