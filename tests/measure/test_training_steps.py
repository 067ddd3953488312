"""The study of training steps without a GPU: every variant trains, and a row comes out whole."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from standin import StandIn
from wattcast.core.measured_rows import ModelRow, row_from_plain
from wattcast.core.row_journals import read_lines
from wattcast.lab.campaigns.campaign_engine import Campaign, OperatorBench
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import SettlingRule

VARIANTS = ("qlora-llama3", "selective", "accumulate-qwen3", "adamw8bit-llama3", "fp8-llama3")


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The study, imported by the worker that needs it: PyTorch and transformers take seconds."""
    pytest.importorskip("torch", reason="PyTorch (CPU build) is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "studies" / "training_rows")
    return importlib.import_module("measure_training_rows")


@pytest.fixture
def campaign(standin: StandIn, tmp_path: Path) -> Iterator[Campaign]:
    from test_whole_models import CpuDevice

    with Sampler("nvml") as sampler:
        bench = OperatorBench(CpuDevice(), sampler, "run-1", rule=SettlingRule(longest_s=3.0))
        yield Campaign(bench, tmp_path, float("inf"))


@pytest.mark.slow
def test_every_variant_takes_steps(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name in VARIANTS:
        study.run_dry(study.read_training_plan(only=name)[:1])
    lines = [line for line in capsys.readouterr().err.splitlines() if "losses" in line]
    assert len(lines) == len(VARIANTS)
    assert not any("nan" in line for line in lines)


def test_a_row_comes_out_whole_with_a_launched_one(
    study: Any, campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = next(
        spec for spec in study.read_training_plan() if spec.id.startswith("accumulate-qwen3")
    )
    small = replace(spec, batch=1, seq=16)
    real = study.build_step
    tiny = {
        "layers": 1,
        "hidden": 32,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "intermediate": 32,
        "vocab": 100,
    }
    monkeypatch.setattr(
        study, "build_step", lambda s, device, dims: real(s, "cpu", replace(dims, **tiny))
    )
    row = study.measure_row(campaign.bench, small, campaign)
    assert row.graph
    assert row.latency_s > 0.0
    assert row.power_w == pytest.approx(300.0, rel=0.05)
    (launched,) = (
        row_from_plain(line, ModelRow) for line in read_lines(campaign.out / "models.jsonl")
    )
    assert launched.id == f"{spec.id}-launched"
    assert not launched.graph
