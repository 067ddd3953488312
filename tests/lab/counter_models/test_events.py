"""The table of events itself."""

from __future__ import annotations

import csv
from importlib.resources import files


def test_every_event_stands_once_with_all_its_cells() -> None:
    """Marks of an unsettled merge once stood in the table and were read as three events called
    ``=======``.
    """
    text = files("wattcast.power").joinpath("events.csv").read_text(encoding="utf-8")
    rows = list(csv.reader(text.splitlines()))
    assert rows[0] == ["event", "unit", "kind", "module", "meaning"]
    assert all(len(row) == 5 for row in rows)
    names = [row[0] for row in rows[1:]]
    assert len(set(names)) == len(names)
    for name, _, kind, module, meaning in rows[1:]:
        assert name.isidentifier()
        assert kind in ("count", "mean")
        assert module
        assert meaning
