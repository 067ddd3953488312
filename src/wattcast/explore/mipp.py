"""The MIPP paper's tables (GTX 660 and Jetson TK1), with their errata applied."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from wattcast.records import Plain


@dataclass(frozen=True)
class Published:
    """A benchmark of the MIPP paper on an older device, errata applied."""

    device: str
    table: str
    benchmark: str
    ours: str  # the benchmark of ours that is nearest
    sm_count: int
    operations: float
    time_s: float
    spec_per_cycle_sm: float | None
    real_per_cycle_sm: float
    power_w: float
    max_power_w: float
    energy_j: float
    nj_printed: float
    erratum: str

    @property
    def operation_j(self) -> float:
        """Energy of an operation of the whole chip, from power and time."""
        return self.power_w * self.time_s / self.operations


@cache
def published() -> tuple[Published, ...]:
    """Tables I to IV of the MIPP paper."""
    path = Path(str(files("wattcast"))) / "database" / "published" / "mipp.csv"
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    text = {"device", "table", "benchmark", "ours", "erratum"}
    rows = []
    for row in csv.DictReader(lines):
        values: Plain = {k: v if k in text else (float(v) if v else None) for k, v in row.items()}
        rows.append(Published(**values | {"sm_count": int(row["sm_count"])}))
    return tuple(rows)
