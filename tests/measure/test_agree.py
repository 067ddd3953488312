"""Campaign, window and ``measure run`` show the same power of the same load."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_gpu import FakeGpu

from standin import StandIn, undisturbed
from wattcast.lab.campaigns import measuring_agreement as module
from wattcast.lab.campaigns.operator_rows import CampaignGpu


def test_three_ways_of_measuring_agree(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a card that draws 300 W throughout; the child leaves its marks without a GPU."""
    monkeypatch.setattr(CampaignGpu, "open", classmethod(lambda cls: FakeGpu()))
    monkeypatch.setattr(module, "SETTLE_S", 0.3)
    real = module.run_command

    def with_marks(command: list[str], source: str):
        marks = Path(command[command.index("--marks") + 1])
        began_s = time.monotonic() + 1.6
        marks.write_text(json.dumps([[began_s, began_s + 1.2]] * 3))
        return real(["sleep", "3"], source)

    monkeypatch.setattr(module, "run_command", with_marks)

    def measure() -> SimpleNamespace:
        rows = module.compare_methods(0.9)
        return SimpleNamespace(
            rows=rows, flags=[flag for row in rows[:-1] for flag in row["flags"]]
        )

    *found, last = undisturbed(measure).rows
    assert len(found) == 3
    for entry in found:
        for way in ("campaign_w", "window_w", "run_w"):
            assert entry[way] == pytest.approx(300.0, rel=0.02), way
        assert entry["flags"] == []
    assert last["exit_code"] == 0
    assert last["overhead"] < 0.02


def test_a_load_marks_when_it_was_busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(CampaignGpu, "open", classmethod(lambda cls: FakeGpu()))
    monkeypatch.setattr(module.time, "sleep", lambda length_s: None)
    module.run_known_loads(0.05, tmp_path / "marks.json")
    times = json.loads((tmp_path / "marks.json").read_text())
    assert len(times) == 3
    assert all(end > begin for begin, end in times)
