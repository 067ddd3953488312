"""Tables of measurements: what is read, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattcast.control import policy_comparison
from wattcast.core.errors import BadInput

ROW = "{m},{c},{t},{p},{e}"


def block(name: str, slow: float = 1.0) -> str:
    rows = [
        f"{m},{c},{slow * 1e4 / c},{50 + c / 20 + m / 100},{(slow * 1e4 / c) * (50 + c / 20 + m / 100)}"
        for m in (810, 3505)
        for c in (595, 747, 899, 1050, 1164)
    ]
    return "\n".join([name, *rows])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    path.write_text(
        block("one") + "\n" + block("two", 2.0) + "\n" + block("two", 3.0).split("\n", 1)[1] + "\n"
    )
    return path


def test_blocks_are_applications_and_a_block_without_a_name_is_one_too(table: Path) -> None:
    (tables,) = policy_comparison.read_replay_tables(table, default="1164/3505")
    assert list(tables.applications) == ["one", "two", "two#2"]
    assert tables.lattice.shape == (5, 2)
    assert tables.lattice.level_values(tables.default) == (1164e6, 3505e6)
    at = tables.lattice.flat_index(tables.lattice.nearest_settings(899e6, 810e6))
    assert tables.time_s[1, at] == pytest.approx(2e4 / 899 * 1e-3)
    assert tables.power_w[0, at] == pytest.approx(50 + 899 / 20 + 8.1)


@pytest.mark.parametrize(
    "default", ["1164/3505", "3505/1164", "1164 MHz/3505 MHz", "1.164GHz/3.505GHz"]
)
def test_the_default_may_be_written_in_any_order_and_unit(table: Path, default: str) -> None:
    (tables,) = policy_comparison.read_replay_tables(table, default=default)
    assert tables.default == tables.lattice.top


@pytest.mark.parametrize("default", ["1200/3505", "x", "1/2/3", ""])
def test_a_default_that_is_not_in_the_table_is_refused(table: Path, default: str) -> None:
    with pytest.raises(BadInput, match="default"):
        policy_comparison.read_replay_tables(table, default=default)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "application"),
        ("1,2,3,4,12\n", "name before"),
        ("app\n", "rows below"),
        ("app\n810,595,1,2\n3505,700,1,2\n", "two core clocks"),
        ("app\n810,595,nan,2,3\n", "finite"),
        ("app\n810,595,-1,2,3\n", "above zero"),
        ("app\n810,595,1,2,99\n", "power times time"),
        ("app\n810,595,1\n", "memory MHz"),
        ("app\n810,595,x,2,3\n", "memory MHz"),
        ("1234\n810,595,1,2,2\n", "name"),
        ("workload,energy\nx,1\n", "columns"),
        ("workload,energy,time\nx,1,1\n", "freq"),
        ("workload,energy,time\na_freq900_iter1.csv,nan,1\n", "finite"),
        ("workload,energy,time\na_freq900_iter1.csv,1,1\na_freq900_iter2.csv,1,1\n", "one row"),
    ],
)
def test_broken_tables_are_refused_with_a_reason(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(BadInput, match=words):
        policy_comparison.read_replay_tables(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(BadInput, match="UTF-8"):
        policy_comparison.read_replay_tables(path)


def test_runs_with_the_clock_in_their_names(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    rows = [
        f"net_b1_freq{c}_iter10.csv,{0.5 + c / 2000},{1e4 / c},{c},60" for c in (510, 900, 1410)
    ]
    path.write_text("workload,energy,time,avg_freq,temp\n" + "\n".join(rows) + "\n")
    (tables,) = policy_comparison.read_replay_tables(path)
    assert tables.lattice.shape == (3,)
    assert list(tables.applications) == ["net_b1"]
    assert tables.power_w[0, 1] == pytest.approx((0.5 + 0.45) / (1e4 / 900 * 1e-3))


def test_a_core_clock_without_all_memory_clocks_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("\n".join(block("app").splitlines()[:-1]) + "\n")
    (tables,) = policy_comparison.read_replay_tables(path)
    assert tables.lattice.shape == (4, 2)


def test_applications_measured_at_other_clocks_are_plants_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    rows = [
        f"{n}_freq{c}_iter1.csv,1,{1e4 / c},{c},60"
        for n, cs in (("a", (500, 700, 900)), ("b", (700, 900)))
        for c in cs
    ]
    path.write_text("workload,energy,time,avg_freq,temp\n" + "\n".join(rows) + "\n")
    assert [t.lattice.count for t in policy_comparison.read_replay_tables(path)] == [3, 2]


def test_leaving_out_what_is_not_there_is_a_mistake(table: Path) -> None:
    plants = policy_comparison.read_replay_tables(table)
    assert [
        list(t.applications) for t in policy_comparison.leave_out_applications(plants, ["two"])
    ] == [["one"]]
    with pytest.raises(BadInput, match="Closest"):
        policy_comparison.leave_out_applications(plants, ["onee"])
    with pytest.raises(BadInput, match="left"):
        policy_comparison.leave_out_applications(plants, ["one", "two"])
