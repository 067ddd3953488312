"""The published explorations: rows read right, errors by their definition, figures drawn."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from wattcast.core.errors import WattcastError

STUDY = Path(__file__).resolve().parents[2] / "studies" / "published_explorations.py"
spec = importlib.util.spec_from_file_location("published_explorations", STUDY)
published = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = published  # where dataclasses look their annotations up
spec.loader.exec_module(published)
HEADER = "workload,energy,time,avg_freq,temp\n"


def folder(tmp_path: Path, dvfs: str) -> Path:
    place = tmp_path / "energaizer" / "measurements"
    place.mkdir(parents=True)
    (place / "a100_pcie_40gb_dvfs.csv").write_text(HEADER + dvfs)
    (place / "a100_pcie_40gb_900mhz.csv").write_text(HEADER)
    return tmp_path


def test_a_row_is_read_with_its_units(tmp_path: Path) -> None:
    name = "gpt2model_gpt2_pbf16_b32_s128_modeprefill_attneager_freq870_iter1993.csv"
    (row,) = published.measured(folder(tmp_path, f"{name},2.4,16,870,66\nsomething_else,1,1,1,1\n"))
    assert row == published.Measured("gpt2", "bf16", 32, 128, 870e6, 66.0, 0.016, 150.0)


def test_errors_by_their_definition() -> None:
    one, two = np.array([1.0, 1.0]), np.array([1.1, 0.8])
    curve = published.Curve("gpt2", 1, 1, one, one, one, two, one)
    assert curve.mape() == pytest.approx({"latency": 0.15, "power": 0.0, "energy": 0.15})


def test_missing_data_is_said(tmp_path: Path) -> None:
    with pytest.raises(WattcastError, match="WATTCAST_REFERENCE"):
        published.measured(None)
    with pytest.raises(WattcastError, match="cannot be read"):
        published.measured(tmp_path)
    with pytest.raises(WattcastError, match="no published row"):
        published.dvfs(published.measured(folder(tmp_path, "")))


def test_the_study_draws_and_tells(capsys, reference: Path, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("WATTCAST_REFERENCE", str(reference))
    published.main(["--figures", str(tmp_path), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [row["n"] >= 10 for row in told["dvfs"]] == [True] * 6
    eager = [row for row in told["formats"] if row["attention"] == "eager"]
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in eager)
    speedup = {row["dtype"]: row["predicted_s"] for row in eager if row["batch"] == 8}
    assert speedup["fp32"] > 2 * speedup["bf16"]
    assert {row["gpu"] for row in told["forecasts"]} == set(published.FORECAST)
    assert sorted(p.name for p in tmp_path.glob("*.png")) == [
        "explore-dvfs.png",
        "explore-forecasts.png",
        "explore-formats.png",
    ]
    published.main([])
    assert "Clocks of the a100-pcie-40gb" in capsys.readouterr().out
