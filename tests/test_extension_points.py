"""What docs/architecture.md says under "to add something" and no other test proves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_architecture import FILES, SOURCE, own_modules
from wattcast.control.hd7970 import load_tables
from wattcast.control.plants import Observation, Settings, play_application
from wattcast.measure.energy_sources import DeviceIdentity, SlowReadings
from wattcast.web.metrics_exporter import WatchedCard

ROOT = Path(__file__).resolve().parent.parent
READERS = sorted((SOURCE / "workload" / "readers").glob("from_*.py"))


@pytest.mark.parametrize("reader", READERS, ids=lambda path: path.stem)
def test_a_reader_is_known_to_one_other_file(reader: Path) -> None:
    """Only ``load_workload`` calls a reader by name; the page, which refuses some uploads, names
    three of them.
    """
    module = f"wattcast.workload.readers.{reader.stem}"
    naming = [path for path in FILES if reader.stem in path.read_text(encoding="utf-8")]
    users = {path.stem for path in naming if module in own_modules(path)}
    shared = {
        "from_json",
        "from_huggingface",
        "from_profiler",
    }  # which write files or check uploads too
    assert "load_workload" in users or reader.stem == "from_torch"  # a program is no file
    assert users <= {"load_workload"} or reader.stem in shared


class Lowest:
    """A policy that always takes the lowest settings."""

    def __init__(self, lowest: Settings) -> None:
        self.lowest = lowest

    def start(self) -> int:
        return 0

    def settings(self, state: int, kernel: str) -> Settings:
        return self.lowest

    def step(self, state: int, observation: Observation) -> tuple[Any, Settings]:
        return state + 1, self.lowest


def test_a_made_up_policy_plays() -> None:
    tables = load_tables()
    application = next(iter(tables.applications))
    lowest = tables.lattice.bottom
    played, runs = play_application(tables, application, Lowest(lowest))
    assert runs == len(tables.applications[application])
    assert (played.chosen == tables.lattice.flat_index(lowest)).all()
    assert np.isfinite(played.energy_j).all()


class Meter:
    """An energy source that gains 300 J at every reading."""

    energy_range_j: float | None = None

    def __init__(self) -> None:
        self.joules = 0.0

    def open(self) -> DeviceIdentity:
        return DeviceIdentity(name="a meter")

    def energy_j(self) -> float:
        self.joules += 300.0
        return self.joules

    def sm_clock_hz(self) -> float:
        return 1.5e9

    def slow(self) -> SlowReadings:
        return SlowReadings(instant_w=300.0)

    def close(self) -> None: ...


def test_a_made_up_energy_source_is_read() -> None:
    source, now = Meter(), [0.0]
    card = WatchedCard(0, source, source.open(), now=lambda: now[0])
    first = card.look()
    now[0] = 100.0
    assert card.look().energy_j - first.energy_j == 300.0
    assert first.power_w == 300.0


def test_the_table_names_files_and_tests_that_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page[page.index("## To add something") : page.index("## Rules")]
    counts = [int(row.split("|")[3]) for row in table.splitlines() if re.match(r"\| an? ", row)]
    assert len(counts) >= 7
    assert max(counts) <= 2
    for name in re.findall(r"`((?:tests|examples)/[\w./]+)", table):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\btest_\w+(?=`)", table):
        assert any(
            f"def {name}(" in path.read_text(encoding="utf-8")
            for path in (ROOT / "tests").rglob("test_*.py")
        )
