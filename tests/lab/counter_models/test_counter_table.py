"""CSV and Parquet with a column map, and every way they can be wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_allclose

from wattcast.core.errors import BadInput, UnitError, UnknownName
from wattcast.lab.counter_models import counter_table

MAP = """
benchmark: kernel
group: {column: kernel, before: "_k"}
power: {column: watts, unit: W}
duration: {column: time, unit: ms}
clock: {column: mhz, unit: MHz}
events:
  l1_read_word: {column: [hits, shared], times: [null, efficiency]}
  active_sm: {column: idle, from: 80}
"""


def frame(**changes: object) -> pl.DataFrame:
    rows = {
        "kernel": ["app_k1", "app_k2", "other_k1", "third_k1", "third_k2"],
        "watts": [100.0, 120.0, 150.0, 90.0, 95.0],
        "time": [1.0, 2.0, 4.0, 1.0, 2.0],
        "mhz": [1000, 1000, 1000, 800, 800],
        "hits": [1e6, 2e6, 3e6, 4e6, 6e6],
        "shared": [1e6, 0.0, 0.0, 2e6, 1e6],
        "efficiency": [0.5, 1.0, 1.0, 0.25, 0.5],
        "idle": [0, 10, 20, 40, 60],
    }
    return pl.DataFrame(rows | changes)


def built(columns: str = MAP, **changes: object):
    mapped = counter_table.decode_yaml(columns.encode(), counter_table.ColumnMap, "map.yaml")
    return counter_table.build_counter_table(frame(**changes), mapped, "t.csv")


def test_columns_become_rates_means_groups_and_clocks() -> None:
    table = built()
    assert_allclose(
        table.occurrence[:, 0], [1.5e9, 1e9, 0.75e9, 4.5e9, 3.25e9]
    )  # Eq. 6, per second
    assert_allclose(table.occurrence[:, 1], [80, 70, 60, 40, 20])
    assert_allclose(table.clock_hz, [1e9, 1e9, 1e9, 0.8e9, 0.8e9])
    assert table.group_names == ("app", "other", "third")
    assert table.group.tolist() == [0, 0, 1, 2, 2]
    assert table.predictors[0].label == "l1_read_word (hits + shared)"


def test_cycles_become_seconds_by_the_clock() -> None:
    columns = MAP.replace("{column: time, unit: ms}", "{column: time, unit: cycle}")
    assert_allclose(built(columns).occurrence[0, 0], 1.5e6 / (1.0 / 1e9))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_csv_and_parquet_say_the_same(tmp_path: Path, ending: str) -> None:
    path, columns = tmp_path / f"t.{ending}", tmp_path / "map.yaml"
    frame().write_csv(path) if ending == "csv" else frame().write_parquet(path)
    columns.write_text(MAP)
    assert_allclose(counter_table.read_counter_table(path, columns).occurrence, built().occurrence)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("column: watts", "column: wats", "missing column 'wats'. Closest: watts"),
        ("unit: W", "unit: V", "power.unit: expected a unit of W"),
        ("l1_read_word", "l1_read_words", "unknown event 'l1_read_words'. Closest: l1_read_word"),
        ("unit: ms", "unit: MHz", "duration.unit"),
        ("idle, from: 80", "idle, frm: 80", "frm"),
        (
            "column: watts",
            "column: kernel",
            "column 'kernel', row 1: expected a finite number, got 'app_k1'",
        ),
        (
            "duration: {column: time, unit: ms}\n",
            "",
            "duration: expected a column, to turn counts of l1_read_word",
        ),
    ],
)
def test_a_bad_map_names_the_key(old: str, new: str, words: str) -> None:
    with pytest.raises((BadInput, UnitError, UnknownName), match=words):
        built(MAP.replace(old, new))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"watts": [100.0, -3.0, 150.0, 90.0, 95.0]},
            "power, row 2: expected watts above zero, got -3.0",
        ),
        ({"watts": [100.0, 1.2e5, 150.0, 90.0, 95.0]}, "mW"),
        (
            {"watts": [100.0, None, 150.0, 90.0, 95.0]},
            "column 'watts', row 2: expected a finite number",
        ),
        ({"mhz": [1000.0, 1000.0, 1000.0, 800.0, 1.2e9]}, "clock: expected one unit throughout"),
        ({"hits": [1e6, -2e6, 3e6, 4e6, 6e6]}, "column 'hits', row 2: expected counts"),
        (
            {"idle": [5, 5, 5, 5, 5]},
            r"active_sm \(idle\): expected values that differ between rows",
        ),
        ({"idle": [0, 10, 90, 40, 60]}, r"active_sm \(idle\), row 3: expected zero or more"),
        ({"time": [1.0, 0.0, 4.0, 1.0, 2.0]}, "column 'time': expected durations above zero"),
    ],
)
def test_a_bad_cell_names_column_and_row(changes: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        built(**changes)


def test_too_few_rows_say_how_many_are_needed() -> None:
    mapped = counter_table.decode_yaml(MAP.encode(), counter_table.ColumnMap, "map.yaml")
    with pytest.raises(BadInput, match="at least 4 rows for 2 counters, got '3 rows'"):
        counter_table.build_counter_table(frame().head(3), mapped, "t.csv")
    with pytest.raises(BadInput, match="expected rows"):
        counter_table.build_counter_table(frame().head(0), mapped, "t.csv")


def test_a_counter_that_wrapped_is_found() -> None:
    """The same work at two clocks counted 5e9 once and 2^32 less the other time."""
    same = {"kernel": ["a", "a", "b", "b", "c"], "hits": [5e9, 5e9 - 2**32, 1e6, 2e6, 3e6]}
    with pytest.raises(BadInput, match="column 'hits' wrapped: rows of 'a' differ by 4294967296"):
        built(**same)


def test_windows_of_one_length_do_not_count_as_wrapped() -> None:
    """Samples of a tenth of a second: what is done in one follows the clock, and may differ by
    2^32.
    """
    counts = {"kernel": ["a", "a", "b", "b", "c"], "hits": [5e9, 5e9 - 2**32, 1e6, 2e6, 3e6]}
    table = built(**counts, time=[100.0, 100.1, 99.9, 100.0, 100.2])
    assert table.rows == 5
    with pytest.raises(BadInput, match="row 2: expected counts"):
        built(kernel=counts["kernel"], hits=[5e9, -1.0, 1e6, 2e6, 3e6], time=[100.0] * 5)


@pytest.mark.parametrize("cell", ["n/a", ""])
def test_a_cell_without_a_number_is_named(tmp_path: Path, cell: str) -> None:
    path, columns = tmp_path / "t.csv", tmp_path / "map.yaml"
    path.write_text(frame().write_csv().replace("2000000.0", cell, 1))
    columns.write_text(MAP)
    with pytest.raises(BadInput, match="column 'hits', row 2: expected a finite number"):
        counter_table.read_counter_table(path, columns)


def test_the_same_event_twice_is_refused() -> None:
    columns = MAP.replace("active_sm: {column: idle, from: 80}", "l2_read_sector: {column: idle}")
    table = built(columns)
    from dataclasses import replace

    twin = (table.predictors[0], table.predictors[0])
    with pytest.raises(BadInput, match="each event once"):
        replace(table, predictors=twin)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    path, columns = tmp_path / "t.parquet", tmp_path / "map.yaml"
    path.write_bytes(b"not parquet")
    columns.write_text(MAP)
    with pytest.raises(BadInput, match=r"t\.parquet: not a readable CSV or Parquet table"):
        counter_table.read_counter_table(path, columns)


def test_a_row_order_does_not_matter() -> None:
    mapped = counter_table.decode_yaml(MAP.encode(), counter_table.ColumnMap, "map.yaml")
    back = counter_table.build_counter_table(frame().reverse(), mapped, "t.csv")
    assert_allclose(np.sort(back.occurrence, axis=0), np.sort(built().occurrence, axis=0))
