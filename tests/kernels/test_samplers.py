"""What drawing tokens costs in a decode step, beside steps of Llama-3.1-8B that an H200 took.

The steps were measured at growing contexts, so that a sampler's own cost is what a step takes beyond
a greedy one of the same context. Top-k with top-p was never fitted to them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from wattcast import predict
from wattcast.core.row_tables import database_folder
from wattcast.lab.fit.engine_records import load_engine_records

# How a row's name ends -> the option
SAMPLERS = {
    "t0.8": "random",
    "k50": "top-k",
    "n0.95": "top-p",
    "k50-n0.95": "top-k-top-p",
    "r1.1": "penalties",
}


@cache
def measured_steps() -> dict[str, dict[str, Any]]:
    records = load_engine_records(database_folder("h200") / "sampling")
    return {row["id"].partition("/")[2]: row for row in records.rows if row["kind"] == "decode"}


def predict_step(row: dict[str, Any], sampling: str) -> float:
    batch = int(row["batch"])
    context = round(row["context_mean"])
    # the row's card
    step = predict(
        "llama3-8b", "h200-001", phase="decode", batch=batch, seq=context, sampling=sampling
    )
    return step.latency_s


def own_costs(batch: int, ending: str) -> tuple[float, float]:
    """Return what a sampler adds to a greedy step, in seconds: measured and predicted."""
    greedy = measured_steps()[f"decode-b{batch}-c512"]
    name = f"decode-b{batch}-c512-t0.8"
    row = measured_steps()[name if ending == "t0.8" else f"{name}-{ending}"]
    calibration = greedy["latency_s"] / predict_step(greedy, "greedy")
    greedy_s = predict_step(row, "greedy")
    measured_s = row["latency_s"] - calibration * greedy_s
    return measured_s, predict_step(row, SAMPLERS[ending]) - greedy_s


@pytest.mark.parametrize(
    ("batch", "ending", "most_off_s"),
    [
        (1, "k50-n0.95", 55e-6),
        (16, "k50-n0.95", 10e-6),
        (64, "k50-n0.95", 55e-6),
        (256, "k50-n0.95", 35e-6),
        (64, "t0.8", 55e-6),
        (64, "k50", 110e-6),
        (64, "n0.95", 70e-6),
        (256, "n0.95", 90e-6),
        (64, "r1.1", 60e-6),
    ],
)
def test_a_sampler_costs_what_an_engine_took(batch: int, ending: str, most_off_s: float) -> None:
    measured_s, predicted_s = own_costs(batch, ending)
    assert predicted_s == pytest.approx(measured_s, abs=most_off_s)


def test_greedy_is_assumed_and_said() -> None:
    silent = predict("llama3-8b", "h200", phase="decode", batch=64, seq=512)
    greedy = predict("llama3-8b", "h200", phase="decode", batch=64, seq=512, sampling="greedy")
    assert silent.latency_s == greedy.latency_s
    assert any("drawn by greedy sampling" in sentence for sentence in silent.assumptions)


def test_larger_vocabularies_take_longer_to_sort() -> None:
    """Qwen's 152,064 words cost top-p more than Llama 2's 32,000."""
    extra_s = {}
    for model in ("llama2-7b", "qwen2-7b"):
        options: dict[str, Any] = {"phase": "decode", "batch": 128, "seq": 256}
        top_p = predict(model, "h200", **options, sampling="top-p", clock="1.5GHz")
        greedy = predict(model, "h200", **options, sampling="greedy", clock="1.5GHz")
        extra_s[model] = top_p.latency_s - greedy.latency_s
    assert extra_s["qwen2-7b"] > 2.0 * extra_s["llama2-7b"] > 0.0


def test_only_engines_draw_tokens() -> None:
    with pytest.raises(Exception, match="only engines draw tokens"):
        predict("llama3-8b", "h200", phase="decode", stack="eager", sampling="top-p")
