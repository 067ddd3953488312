"""Simulated cards by name, perturbed copies of them, and their tables as files."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wattcast import api
from wattcast.errors import bad_value
from wattcast.files import write_whole
from wattcast.fit.sensitivity import SensitivityModel, read
from wattcast.manage import forecast, hd7970
from wattcast.manage.outcome import compare
from wattcast.manage.perturb import perturbed
from wattcast.manage.plain import sweep_out
from wattcast.manage.plant import Tables
from wattcast.manage.policies import Name, Setup
from wattcast.manage.sensitivity import preset
from wattcast.naming import fold

HD7970 = "hd-7970"
FIRST_SEED = 1000  # perturbed plants that results are reported on; the controller was tuned on seeds below 100


def choose(gpu: str, workloads: Sequence[str], sensitivity: Path | None) -> tuple[Tables, SensitivityModel | None]:
    """A simulated card and the sensitivity model its controller uses."""
    model = read(sensitivity) if sensitivity is not None else None
    if fold(gpu) == fold(HD7970):
        if workloads:
            raise bad_value("workloads", f"none with {HD7970}, which has its own 14 applications", workloads[0])
        return hd7970.tables(), model or preset("hd7970_simulated")
    if not workloads:
        raise bad_value("workloads", f"one or more to run on {gpu}", "none", "Name a model or a workload file.")
    return forecast.plant({w: w for w in workloads}, api.find_gpu(gpu)), model


def sweep(count: int, setup: Setup, seed: int = 0) -> dict[str, Any]:
    """The controller on perturbed HD 7970s: distances from each one's own oracle, whole runs and converged."""
    names = ("ed2_over_oracle_with_probing", "ed2_over_oracle", "slowdown_with_probing", "slowdown")
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in range(count):
        tables = perturbed(hd7970.simulated(), FIRST_SEED + seed + i)
        mean = compare([tables], setup, [Name.HARMONIA]).mean(Name.HARMONIA)
        for name in names:
            found[name].append(mean[name])
    return sweep_out(found)


def export(tables: Tables, path: Path) -> None:
    """Time, power and counters of every phase at every setting as CSV, the form ``fit sensitivity`` reads."""
    roles = [str(knob.role) for knob in tables.lattice.knobs]
    columns = {str(knob.role): tables.lattice.table(knob.role) for knob in tables.lattice.knobs}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["kernel", "phase", *roles, "time_s", "power_w", *tables.counters])
    for row, kernel in enumerate(tables.kernels):
        for setting in range(tables.lattice.count):
            knobs = [repr(float(columns[role][setting])) for role in roles]
            seen = [tables.time_s[row, setting], tables.power_w[row, setting]]
            counters = [table[row, setting] for table in tables.counters.values()]
            writer.writerow([kernel, row, *knobs, *(f"{value:.9g}" for value in [*seen, *counters])])
    write_whole(path, text.getvalue().encode())
