"""Types and ranges of the columns of measured rows, wherever these are packed, written and read."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from wattcast.core.column_ranges import find_range
from wattcast.core.errors import BadInput
from wattcast.core.measured_rows import RECORDS, row_from_plain
from wattcast.core.row_tables import read_table, write_table

ROW: dict[str, Any] = {
    "record": "row",
    "id": "burst-1",
    "run": "r1",
    "kind": "burst",
    "family": "linear",
    "latency_s": 1e-5,
    "operator": {"op": "linear", "m": 8, "n": 8, "k": 8},
}
MODEL = {"record": "model", "id": "m", "model": "gpt2", "phase": "prefill", "batch": 1}
MODEL |= {"dtype": "bf16", "attention": "flash", "stack": "eager", "graph": False}
RUN = {"record": "run", "run": "r1", "date": "2026-11-16T00:00:00+00:00"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"latency_s": -5},
        {"latency_s": "abc"},
        {"latency_s": 0},
        {"latency_s": 1e300},
        {"latency_s": True},
        {"power_w": 1e300},
        {"power_w": -1.0},
        {"power_w": [1.0]},
        {"temperature_c": 1e4},
        {"sm_clock_hz": -1},
        {"kind": "nonsense"},
        {"kind": 3},
        {"repeat": 2**53},
        {"repeat": -1},
        {"repeat": 0.5},
        {"repeat": 10**400},
        {"duty": 1.5},
        {"ticks": -1},
        {"copies": 1e300},
        {"footprint_byte": -8},
        {"flags": "clock_drift"},
        {"flags": [1]},
        {"operator": "linear"},
        {"family": 7},
        {"id": None},
    ],
    ids=str,
)
def test_pack_refuses_nonsense_with_its_line(wrong: dict[str, Any], tmp_path: Path, call) -> None:
    """``lab pack`` took latencies of -5 and "abc", 1e300 W, rows of a kind "nonsense", repeat 2^53."""
    lines = [RUN, ROW, ROW | {"id": "burst-2"} | wrong]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    done = call("lab", "pack", str(tmp_path), "--out", str(tmp_path / "out"))
    assert done.code == 2, done.err
    assert "line 3" in done.err
    assert next(iter(wrong)) in done.err
    assert not (tmp_path / "out" / "rows.parquet").exists()


def test_pack_takes_a_good_row(tmp_path: Path, call) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(RUN)}\n{json.dumps(ROW)}\n")
    done = call("lab", "pack", str(tmp_path), "--out", str(tmp_path / "out"))
    assert done.code == 0, done.err
    (row,) = read_table(tmp_path / "out" / "rows.parquet")
    assert row["latency_s"] == 1e-5


@pytest.mark.parametrize("value", ["-5 ms", "0 ms", "1e300 s"])
def test_a_host_is_not_fitted_to_nonsense(value: str, tmp_path: Path, call) -> None:
    """``lab fit host`` took a latency of -5 ms and fitted a cost to it."""
    table = tmp_path / "mine.csv"
    table.write_text(f"model,batch,seq,phase,latency_s\ngpt2,1,64,prefill,{value}\n")
    done = call("lab", "fit", "host", str(table), "--gpu", "h200")
    assert done.code == 2
    assert "latency_s" in done.err


@pytest.mark.parametrize(
    "wrong", [{"batch": -1}, {"seq": 2**60}, {"graph": "no"}, {"energy_j": -1.0}], ids=str
)
def test_whole_models_are_checked_alike(wrong: dict[str, Any]) -> None:
    row_from_plain(MODEL, RECORDS["model"])
    with pytest.raises(BadInput, match=next(iter(wrong))):
        row_from_plain(MODEL | wrong, RECORDS["model"])


@pytest.mark.parametrize(
    "column",
    [
        {"latency_s": [1.0, -5.0]},
        {"power_w": [1.0, 1e300]},
        {"latency_s": ["abc", "x"]},
        {"kernel_s": [[1.0], [2.0, float("nan")]]},
        {"ttft_s.p90": [-1.0, 0.0]},
    ],
    ids=str,
)
def test_tables_are_checked_as_they_are_written_and_read(
    column: dict[str, list[Any]], tmp_path: Path
) -> None:
    polars = pytest.importorskip("polars", reason="no polars: pip install 'wattcast[lab]'")
    ((name, values),) = column.items()
    path = tmp_path / "rows.parquet"
    with pytest.raises(BadInput, match=name):
        write_table(path, [{name: value} for value in values])
    assert not path.exists()
    polars.DataFrame(column).write_parquet(path)  # by somebody else
    with pytest.raises(BadInput, match=name):
        read_table(path)


def test_every_number_of_a_record_has_a_range() -> None:
    """A column of floats without a unit in its name would be unbounded."""
    for kind in RECORDS.values():
        for item in fields(kind):
            if "float" in str(item.type):
                assert find_range(item.name) is not None, f"{kind.__name__}.{item.name}"
