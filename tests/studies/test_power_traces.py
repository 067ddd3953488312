"""Predicted power over time against runs of an H200 that were judged once, blind.

The bounds are those the runs were to be judged by, where they hold. One does not, and its test says
so: prompts of Granite 4 wait half as long for their host as predicted. How power moves around the
limit was fitted to two of these runs after they had been judged.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from studies.power_traces.judge_power_traces import Figure, judge_run, read_runs

MOST = {
    "tokens/s": 0.02,
    "J/token": 0.03,
    "ttft p50 (s)": 0.10,
    "tpot p50 (s)": 0.05,
    "tpot p99 (s)": 0.10,
    "mean power (W)": 0.03,
    "p95 at 250 ms (W)": 0.05,
    "peak at 1 s (W)": 0.05,
}


@cache
def judge(name: str) -> tuple[dict[str, Figure], float]:
    run: dict[str, Any] = next(run for run in read_runs() if run["id"].startswith(name))
    figures, explained = judge_run(run)
    return {figure.name: figure for figure in figures}, explained


@pytest.mark.parametrize("name", sorted(MOST))
def test_users_of_a_window_model_are_served_as_measured(name: str) -> None:
    figures, _ = judge("olmo-3-7b/load-users")
    assert abs(figures[name].error) <= MOST[name], figures[name]


def test_a_training_job_draws_what_was_measured_between_its_checkpoints() -> None:
    figures, explained = judge("llama-3.2-3b/training")
    assert abs(figures["step (s)"].error) <= 0.03
    assert abs(figures["mean power (W)"].error) <= 0.03
    assert abs(figures["peak at 1 s (W)"].error) <= 0.05
    assert explained >= 0.9  # of the autocorrelation: the swing between steps and checkpoints


def test_quarters_of_a_second_of_a_training_job_are_within_five_percent() -> None:
    """Not blind: the ripple of power at the limit was fitted to this run."""
    figures, _ = judge("llama-3.2-3b/training")
    assert abs(figures["p95 at 250 ms (W)"].error) <= 0.05


@pytest.mark.xfail(strict=True, reason="the host's time for a prompt with scans and experts")
def test_users_of_a_hybrid_mixture_are_served_as_measured() -> None:
    figures, _ = judge("granite-4.0-h-tiny/load-users")
    assert abs(figures["tpot p50 (s)"].error) <= 0.05
