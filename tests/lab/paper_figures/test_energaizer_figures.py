"""Figures after EnergAIzer: rows read right, errors by their definition, figures drawn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from wattcast.core.errors import WattcastError
from wattcast.lab.paper_figures import energaizer_figures as figures
from wattcast.lab.validate.public_checks.published_runs import (
    clean_runs,
    fp32_runs,
    read_published_runs,
)


@pytest.fixture(scope="module")
def formats(reference: Path) -> list[figures.FormatRow]:
    return figures.list_formats(reference)


def test_errors_are_those_of_time_and_of_power(reference: Path) -> None:
    runs = [
        run
        for run in clean_runs(read_published_runs(reference, "900"))
        if run.model == "bert-large"
    ][:3]
    judged = figures.judge_runs(runs, figures.PUBLISHED_GPU, "three of them")
    latency = judged.percent_errors("latency")
    power = judged.percent_errors("power")
    for row, run in enumerate(judged.runs):
        assert run.power_w is not None
        assert abs(judged.predicted_s[row] - run.latency_s) == pytest.approx(
            latency[row] * run.latency_s / 100.0
        )
        assert abs(judged.predicted_w[row] - run.power_w) == pytest.approx(
            power[row] * run.power_w / 100.0
        )
    assert (latency < 40.0).all()


def test_the_paper_prints_errors_with_their_places() -> None:
    printed = figures.read_printed_errors()
    of_others = [error for error in printed if "NeuSight" in error.predictor]
    assert [(error.rows, error.latency) for error in of_others] == [
        ("kernels, products bf16", "18")
    ]
    assert all(error.where for error in printed)


def test_bf16_is_faster_than_fp32_and_fused_attention_faster_still(
    formats: list[figures.FormatRow],
) -> None:
    for workload in figures.FORMAT_RUNS:
        seconds = {row.kind: row.predicted_s for row in formats if row.workload == workload}
        assert seconds["fp32", "eager"] > 2.0 * seconds["bf16", "eager"]
        assert seconds["bf16", "eager"] > seconds["bf16", "flash"]
    measured = {row.kind for row in formats if row.measured_s is not None}
    assert measured == {("fp32", "eager"), ("bf16", "eager")}


def test_the_artifacts_own_errors_are_of_the_rows_that_it_reports(reference: Path) -> None:
    """It reports 65 rows over clocks; ours are compared on those."""
    runs = read_published_runs(reference, "clocks")
    chosen = [*clean_runs(runs), *fp32_runs(runs)]
    reported, percents = figures.read_report(reference, chosen)
    assert reported.sum() == 65
    assert percents["latency"] == pytest.approx(17.2, abs=0.05)
    assert percents["power"] == pytest.approx(7.7, abs=0.05)


def test_without_measurements_the_command_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["energaizer_figures", str(tmp_path)])
    monkeypatch.setenv("WATTCAST_REFERENCE", "/nowhere")
    with pytest.raises(WattcastError, match="WATTCAST_REFERENCE"):
        figures.main()
    with pytest.raises(WattcastError, match="no published row"):
        figures.judge_runs([], figures.PUBLISHED_GPU, "nothing")


@pytest.mark.slow
def test_every_figure_is_drawn(
    reference: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["energaizer_figures", str(tmp_path)])
    monkeypatch.setenv("WATTCAST_REFERENCE", str(reference))
    figures.main()
    assert len(list(tmp_path.glob("*.png"))) == 11
    out = capsys.readouterr().out
    for words in ("a10 fp32", "Li et al. and NeuSight", "rows of its report"):
        assert words in out
