"""What hosts take to launch a layer, by model and over time."""

from __future__ import annotations

import pytest

from wattcast.lab.fit.engine_records import EngineRecords, load_engine_records
from wattcast.lab.fit.host_states import group_traffic_runs, measure_layer_launches

QUIET, MIDDLE = 0, 1


@pytest.fixture(scope="module")
def records() -> EngineRecords:
    return load_engine_records("h200")


def test_layers_with_windows_are_launched_as_others(records: EngineRecords) -> None:
    """gemma-3-4b served 22 % slower per token than predicted, and its four norms and its windows
    were blamed. In quiet moments of one host the same layers of gemma-3-12b took as long as those
    of two models that have neither.
    """
    runs = group_traffic_runs(records)
    card = next(card for card, model in runs if model == "gemma-3-12b")
    launches = {
        model: measure_layer_launches(runs[card, model], records)
        for model in ("gemma-3-12b", "yi-1.5-9b-32k", "qwen3-8b-fp8-kv8")
    }
    windows = launches.pop("gemma-3-12b")
    plain_loose_s = [plain.loose_s[QUIET] for plain in launches.values()]
    plain_pieces_s = [plain.pieces_s[QUIET] for plain in launches.values()]
    assert 0.99 * min(plain_loose_s) < windows.loose_s[QUIET] < max(plain_loose_s)
    assert min(plain_pieces_s) < windows.pieces_s[QUIET] < max(plain_pieces_s)


def test_a_host_is_twice_as_slow_minutes_later(records: EngineRecords) -> None:
    """One engine served yi-1.5-9b-32k twice. All that it launches layer by layer was slower by the
    same factor, as it is for gemma-3-4b, so that it was the machine and no kind of step.
    """
    by_load = {
        row["load"]: measure_layer_launches([row], records)
        for row in records.select_kind("traffic")
        if row["model"] == "yi-1.5-9b-32k"
    }
    fast, slow = by_load[0.5], by_load[0.8]
    assert slow.loose_s[MIDDLE] / fast.loose_s[MIDDLE] == pytest.approx(1.9, abs=0.1)
    assert slow.pieces_s[MIDDLE] / fast.pieces_s[MIDDLE] == pytest.approx(2.0, abs=0.15)
