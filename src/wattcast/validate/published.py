"""Counter and component models against the measurements and simulator runs of others.

The data stay outside the project (``wattcast.reference``); where they are not there, a row says so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from wattcast.fit.component_runs import published_errors
from wattcast.fit.component_validation import refinement, simulator_runs
from wattcast.fit.counters import Options, fit_counters, read
from wattcast.fit.terms import Model
from wattcast.validate.rows import Row, absent, row

Tell = Callable[[str], None]
TITANX, V100, TRACES = "Titan X clock plane", "V100 counters", "simulator power traces"
_MISSING = "no reference data: set WATTCAST_REFERENCE to their folder"


def component_rows(reference: Path | None, tell: Tell) -> list[Row]:
    """Worst error of our power traces against the simulators' own, and of refining AccelWattch's components."""
    del tell
    runs = simulator_runs(reference) if reference else []
    if not runs:
        return [absent(TRACES, "worst component, W", _MISSING, 2e-5, 1e-5)]
    rows = []
    for run in runs:
        name, worst = max(run.worst_w.items(), key=lambda item: item[1])
        goals = (2e-5, 1e-5) if "gpuwattch" in run.run else (None, None)
        more: dict[str, Any] = {"worst_w": float(f"{worst:.2g}"), "component": name}
        rows.append(row(TRACES, f"{run.run}, worst component, W", run.samples, None, None, None, *goals, **more))
    return rows + _refined(reference)


def _refined(reference: Path | None) -> list[Row]:
    found = refinement(reference) if reference else None
    if found is None or reference is None:
        return []
    kernels, score = found
    more: dict[str, Any] = {"in_sample": round(score.in_sample, 2), "before": round(score.start, 2)}
    where = "V100 components of AccelWattch"
    one_out = row(where, "power, leave one kernel out", kernels, score.leave_one_out, score.constant, **more)
    by_application = row(where, "power, leave one application out", kernels, score.leave_application_out)
    path = reference / "accelwattch" / "accelwattch_validation_tidy.csv"
    theirs = published_errors(path) if path.is_file() else []
    others = [row("AccelWattch's own watts", str(e["config"]), int(e["n"]), float(e["mape"])) for e in theirs]
    return [one_out, by_application, *others]


def v100_rows(reference: Path | None, tell: Tell) -> list[Row]:
    """25 kernels with hardware counters, one left out at a time."""
    table = reference / "accelwattch" / "volta_hw_counters_power_components.csv" if reference else None
    if table is None or not table.is_file():
        return [absent(V100, "power, leave one kernel out", _MISSING, 10.0, 9.0)]
    columns = Path(__file__).with_name("volta.yaml")
    options = Options(models=(Model.HYBRID,), advice=False)
    found = fit_counters(read(table, "table", columns), options, tell)
    held = found.kinds[Model.HYBRID].held_out
    rows = found.table.power_w
    floor = float(100 * abs((rows.sum() - rows) / (len(rows) - 1) / rows - 1).mean())
    n = len(rows)
    name = "power, leave one kernel out"
    out = [row(V100, name, n, held["benchmark"].score.mape, floor, "7.5 in sample", 10.0, 9.0)]
    if "group" in held:
        out.append(row(V100, "power, leave one application out", n, held["group"].score.mape, floor))
    return out


def titanx_rows(reference: Path | None, tell: Tell) -> list[Row]:
    """102 microbenchmarks over 64 clock pairs, one benchmark left out at a time; takes about a minute and a half."""
    path = reference / "titanx" / "micro_gtxtitanx.csv" if reference else None
    if path is None or not path.is_file():
        return [
            absent(TITANX, "power, leave one benchmark out, V inferred", _MISSING, 6.5, 5.8),
            absent(TITANX, "the same, power at the default clocks known", _MISSING, 3.5, 3.0),
        ]
    options = Options(
        models=(Model.HYBRID, Model.RATE, Model.ALPHA_C, Model.LINEAR), advice=False, hold=("benchmark",)
    )
    found = fit_counters(read(path, "gpmtool", None), options, tell)
    held = {model: kind.held_out["benchmark"] for model, kind in found.kinds.items()}
    main, floor = held[Model.HYBRID], held[Model.LINEAR].score
    n = main.score.rows
    name = "power, leave one benchmark out, V inferred"
    rows = [row(TITANX, name, n, main.score.mape, floor.mape, "6-7", 6.5, 5.8)]
    if main.anchored is not None:
        rows.append(
            row(TITANX, "the same, power at the default clocks known", n, main.anchored.mape, None, None, 3.5, 3.0)
        )
    others = ((Model.RATE, "rate-based"), (Model.ALPHA_C, "alpha-C"))
    return rows + [row(TITANX, f"the same, {label} power", n, held[model].score.mape) for model, label in others]
