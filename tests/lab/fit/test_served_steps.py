"""How ``predict`` is asked for the steady state of served models."""

from __future__ import annotations

from dataclasses import replace

import pytest

import wattcast
from wattcast.lab.fit import served_steps
from wattcast.lab.fit.served_rows import ServedRow
from wattcast.lab.fit.served_steps import ask_row

ROW = ServedRow(
    model_id="meta-llama/Llama-3.1-70B-Instruct",
    task="lm-arena-chat",
    gpus=2,
    expert_gpus=1,
    batch=2042,
    mean_tokens=351.0,
    median_tokens=289.0,
    power_w=954.0,
    between_tokens_s=0.14,
    joules_per_token=0.19,
)


def test_a_batch_that_ran_has_contexts_that_its_cache_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2,042 sequences of 387 tokens would need 126 GB of cache on each GPU, beside 70 of weights."""
    held = ask_row(ROW)
    monkeypatch.setattr(served_steps, "_CACHE_SHARE", 10.0)
    unbounded = ask_row(ROW)
    assert held.between_tokens_s < 0.98 * unbounded.between_tokens_s
    assert held.joules_per_token < 0.98 * unbounded.joules_per_token


def test_the_median_step_holds_prompts_of_half_the_mean_length() -> None:
    """Few prompts are long: time between tokens was 24 % too long at 1,407 sequences."""
    few = replace(ROW, batch=64, mean_tokens=64.0, median_tokens=64.0)
    none = replace(few, mean_tokens=6400.0, median_tokens=6400.0)
    context_s = ask_row(none).between_tokens_s
    prompt = wattcast.predict(
        "llama3-70b", "b200", phase="prefill", batch=8, seq=128, tp=2, force=True
    )
    added_s = ask_row(few).between_tokens_s - context_s
    assert added_s < 0.6 * float(prompt.latency_s) / 8
    assert ask_row(few).power_w == pytest.approx(ask_row(none).power_w, rel=0.2)
