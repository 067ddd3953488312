"""Rows on file: appended one by one, read back strictly, never lost to a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wattcast.core.errors import BadInput, UnknownName
from wattcast.core.measured_rows import KernelRow, NameRow, RunInfo, row_from_plain, row_to_plain
from wattcast.core.row_journals import Journal, read_lines
from wattcast.core.row_tables import database_folder, read_table, write_table

ROW = KernelRow(
    "burst-1",
    "burst",
    "linear",
    {"op": "linear", "m": 8, "n": 8, "k": 8},
    latency_s=1e-5,
    flags=("x",),
)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "burst.jsonl")
    journal.append(ROW)
    (plain,) = read_lines(tmp_path / "burst.jsonl")
    assert row_from_plain(plain, KernelRow) == ROW


def test_names_and_runs_come_back_too() -> None:
    names = NameRow(
        "abc", ("k1", "k2"), ((1, 2, 3), (4, 5, 6)), ((128, 1, 1), (64, 1, 1)), (1e-6, 2e-6)
    )
    run = RunInfo("r1", "2026-11-15T00:00:00+00:00", card_uuid="GPU-1", power_limit_w=700.0)
    for row in (names, run):
        assert row_from_plain(json.loads(json.dumps(row_to_plain(row))), type(row)) == row


def test_a_re_run_knows_what_is_done_and_retries_what_failed(tmp_path: Path) -> None:
    path = tmp_path / "burst.jsonl"
    Journal(path).append(ROW)
    Journal(path).append(KernelRow("burst-2", "burst", "linear", {}, error="CUDA out of memory"))
    assert Journal(path).ids == {"burst-1"}


def test_a_torn_last_line_is_passed_over_and_not_glued_to_the_next(tmp_path: Path) -> None:
    """A process killed while writing leaves half a line; the rows before it and after it must
    survive.
    """
    path = tmp_path / "burst.jsonl"
    Journal(path).append(ROW)
    with path.open("ab") as stream:
        stream.write(b'{"id": "burst-2", "kind": "bu')
    Journal(path).append(KernelRow("burst-3", "burst", "linear", {}))
    assert [row["id"] for row in read_lines(path)] == ["burst-1", "burst-3"]


def test_damage_inside_a_file_is_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "burst.jsonl"
    path.write_text('{"id": "a"}\n{"id": "b" "kind": 3}\n{"id": "c"}\n')
    with pytest.raises(BadInput, match="line 2"):
        list(read_lines(path))
    path.write_text("[1, 2]\n")
    with pytest.raises(BadInput, match="expected an object"):
        list(read_lines(path))


def test_not_a_number_is_absent_and_refused_when_read(tmp_path: Path) -> None:
    assert "latency_s" not in row_to_plain(
        KernelRow("a", "burst", "linear", {}, latency_s=float("nan"))
    )
    path = tmp_path / "burst.jsonl"
    path.write_text('{"id": "a", "latency_s": NaN}\n')
    with pytest.raises(BadInput, match="line 1"):
        list(read_lines(path))


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(UnknownName, match="latency_s"):
        row_from_plain({"id": "a", "latencys": 1}, KernelRow)
    with pytest.raises(BadInput, match="missing"):
        row_from_plain({"id": "a"}, KernelRow)


def test_tables_keep_nested_values(tmp_path: Path) -> None:
    pytest.importorskip("polars")
    rows = [
        {
            "id": "a",
            "operator": {"op": "linear", "m": 8},
            "names": ["k"],
            "latency_s": None,
            "grid": [[1, 2]],
        }
    ]
    write_table(tmp_path / "t.parquet", [*rows, rows[0] | {"latency_s": 1.5}])
    assert read_table(tmp_path / "t.parquet")[1] == rows[0] | {"latency_s": 1.5}


def test_rows_of_one_kind_are_those_of_the_whole_table(tmp_path: Path) -> None:
    pytest.importorskip("polars")
    path = tmp_path / "rows.parquet"
    kinds = ("burst", "sustained", None, "burst", "idle")
    write_table(path, [{"id": str(i), "kind": kind} for i, kind in enumerate(kinds)])
    for kind in ("burst", "idle", "chain"):
        assert read_table(path, kind) == [row for row in read_table(path) if row["kind"] == kind]
    write_table(path, [{"id": "a"}])
    with pytest.raises(BadInput, match="cannot be read as a table"):
        read_table(path, "burst")


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("polars")
    (tmp_path / "t.parquet").write_text("no table")
    with pytest.raises(BadInput, match="cannot be read as a table"):
        read_table(tmp_path / "t.parquet")


def test_an_unknown_database_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="kernel database"):
        database_folder("h20")
