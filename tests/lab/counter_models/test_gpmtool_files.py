"""Files in the form of micro_gtxtitanx.csv, and how activity scales to other clocks."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from wattcast.core.errors import BadInput
from wattcast.lab.counter_models import gpmtool_files
from wattcast.lab.counter_models.gpmtool_files import (
    UtilisationFile,
    application_activity,
    make_utilisation_table,
    read_applications,
    read_measured_programs,
    read_utilisations,
    relative_pace,
)


def parse_utilisations(text: str, name: str) -> UtilisationFile:
    with TemporaryDirectory() as folder:
        (Path(folder) / name).write_text(text)
        return read_utilisations(Path(folder) / name)


HEAD = "2\n1000,3000\n2,1\nINT,L2,DRAM\n"
ROWS = "".join(
    f"{50 + 30 * i + 5 * c + 2 * m},{f},{g},{u}\n"
    for i, u in enumerate(("0,0,0", "0.5,0.1,0.2", "0.1,0.4,0.7", "0.3,0.3,0.05"))
    for c, f in enumerate((800, 1000))
    for m, g in enumerate((1000, 3000))
)


def test_rows_with_equal_utilisations_are_one_benchmark() -> None:
    file = parse_utilisations(HEAD + ROWS, "x.csv")
    made = make_utilisation_table(file, 0.8)
    assert made.benchmarks == 4
    assert made.rows == 16
    assert [p.rail for p in made.predictors] == ["core", "core", "memory"]
    assert "80% of the memory bandwidth" in made.notes[0]
    assert "follow the core clock and memory rates" in make_utilisation_table(file, None).notes[0]


def test_at_the_default_clocks_nothing_is_scaled() -> None:
    file = parse_utilisations(HEAD + ROWS, "x.csv")
    for saturation in (None, 0.5, 0.9):
        made = make_utilisation_table(file, saturation)
        rows = made.at_default()
        assert_allclose(made.occurrence[rows] / [1e9, 1e9, 3e9], file.share[rows], rtol=1e-9)


@given(
    clock=st.floats(0.3, 2.0),
    memory=st.floats(0.1, 2.0),
    traffic=st.floats(0.0, 0.79),
    saturation=st.floats(0.8, 1.0),
)
def test_work_follows_the_slower_of_core_and_memory(
    clock: float, memory: float, traffic: float, saturation: float
) -> None:
    """Within the rounding of the corner: two equal terms in a norm of order 30 exceed the larger by
    2.4 %.
    """
    found = float(
        relative_pace(np.float64(clock), np.float64(memory), np.float64(traffic), saturation)
    )
    limit = min(clock, memory * saturation / traffic) if traffic else clock
    assert 0.97 * limit <= found <= 1.03 * limit
    faster = float(
        relative_pace(np.float64(1.01 * clock), np.float64(memory), np.float64(traffic), saturation)
    )
    assert faster >= found * (1 - 1e-12)


def test_activity_of_applications_equals_the_table(tmp_path: Path) -> None:
    file = parse_utilisations(HEAD + ROWS, "x.csv")
    made = make_utilisation_table(file, 0.8)
    apps = tmp_path / "apps.csv"
    apps.write_text(HEAD + "idle,0,0,0\na,0.5,0.1,0.2\nb,0.1,0.4,0.7\nc,0.3,0.3,0.05\n")
    work = read_applications(apps)
    assert work.names == ("idle", "a", "b", "c")
    clocks = np.array([0.8e9, 0.8e9, 1e9, 1e9]), np.array([1e9, 3e9, 1e9, 3e9])
    found = application_activity(work, made.scaling, *clocks)
    assert_allclose(found.value[..., 0, 1:4].reshape(16, 3), made.occurrence, rtol=1e-12)
    for rail in ("core", "memory"):
        assert_allclose(
            found.event_values(f"{rail}_busy_share")[..., 0].ravel(), made.share(rail), rtol=1e-12
        )
    assert_allclose(found.event_values("active_cycle")[..., 0].ravel(), made.busy() * made.clock_hz)


def test_watts_of_programs_by_clock(tmp_path: Path) -> None:
    """A program with the same clocks twice is two programs whose second name is missing."""
    path = tmp_path / "real.csv"
    path.write_text(
        "2mm\n810,595,22.5,82.9,1866\n810,633,21.3,85.4,1826\ntwice\n810,595,1,2,2\n810,595,1,2,2\n"
    )
    found = read_measured_programs(path)
    assert found.names == ("2mm", "2mm")
    assert_allclose(found.power_w, [82.9, 85.4])
    assert_allclose((found.clock_hz[0], found.memory_clock_hz[0]), (595e6, 810e6))
    for text in ("810,595,1,2,3\n", "2mm\n810,595\n", "2mm\n810,x,1,2,3\n", "2mm\n"):
        path.write_text(text)
        with pytest.raises(BadInput):
            read_measured_programs(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2\n", "4 header lines"),
        (HEAD.replace("2\n", "3\n", 1) + ROWS, "2 clock domains"),
        (HEAD.replace("INT,", "IMT,") + ROWS, "IMT"),
        (HEAD.replace("2,1", "2,2") + ROWS, "that many names"),
        (HEAD + ROWS + "1,2\n", "line 21: expected 6 cells, got '2'"),
        (HEAD + ROWS + "50,800,1000,0.1,x,0\n", "line 21, cell 5: expected a number"),
        (HEAD + ROWS + "50,800,1000,0.1,nan,0\n", "line 21, cell 5"),
        (
            HEAD + ROWS + "50,800,1000,10,40,0\n",
            "INT, line 21: expected a share of the peak, 0 to 1",
        ),
    ],
)
def test_broken_files_name_line_and_cell(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        parse_utilisations(text, "x.csv")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("-5,800,1000,0.2,0.2,0.2\n", "power, row 17: expected watts above zero"),
        ("75000,800,1000,0.2,0.2,0.2\n", "mW"),
        ("50,800000000,1000,0.2,0.2,0.2\n", "one unit throughout"),
    ],
)
def test_rows_no_card_could_give_are_refused(row: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        make_utilisation_table(parse_utilisations(HEAD + ROWS + row, "x.csv"), None)


def test_a_component_that_nothing_uses_is_named() -> None:
    text = HEAD + ROWS.replace(",0.1,", ",0,").replace(",0.4,", ",0,").replace(
        ",0.3,0.05", ",0,0.05"
    )
    with pytest.raises(BadInput, match=r"l2_busy_cycle \(L2\): expected values that differ"):
        make_utilisation_table(parse_utilisations(text, "x.csv"), None)


def test_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="UTF-8"):
        gpmtool_files.read_utilisations(path)
