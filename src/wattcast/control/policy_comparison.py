"""Compare policies with the vendor's default and the oracle, per application and in the mean, on
measured tables too.

Two forms of tables are read as plants:

- *Blocks*: an application's name on a line of its own, then rows of memory MHz, core MHz, time ms,
  power W and, where known, energy mJ (``real_time_power_by_clock.csv``), which must be power times
  time. A block that starts over without a name is an application of its own, called ``name#2``. A
  core clock that lacks a memory clock is left out.
- *Runs*: EnergAIzer's ``workload,energy,time,avg_freq,temp`` with the set clock in the workload's
  name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast import __version__
from wattcast.control import clock_forecast, hd7970
from wattcast.control.plants import (
    Knob,
    KnobRole,
    Lattice,
    PlantTables,
    PlayedRun,
    Settings,
    run_at_settings,
)
from wattcast.control.policies import (
    PolicyName,
    PolicyRun,
    PolicySetup,
    run_policy,
)
from wattcast.control.program_blocks import parse_program_blocks
from wattcast.control.search_problem import Goal, Objective
from wattcast.control.sensitivity_model import (
    SensitivityModel,
    load_shipped_model,
    read_sensitivity_model,
)
from wattcast.core import (
    bad_value,
    clip_text,
    units,
    unknown_name,
)
from wattcast.core.errors import fold_name
from wattcast.core.strict_files import (
    decode_text,
    encode_csv,
    read_bytes,
)
from wattcast.core.whole_files import write_whole
from wattcast.predictor import api

if TYPE_CHECKING:
    from rich.console import Console

HD7970 = "hd-7970"
# Perturbed plants that results are reported on; the controller was tuned on seeds below 100.
FIRST_SEED = 1000
ITERATIONS = 100
ENDINGS = ("", "_with_probing")  # of shares: at the settings converged to, and of the whole run
WORSE = 0.01  # a run whose product is larger than the default's by more than this share is worse
_RUN = re.compile(r"(?P<name>.+)_freq(?P<mhz>\d{2,5})_iter(?P<count>\d+)(?:\.csv)?")


@dataclass(frozen=True)
class PolicyOutcome:
    """Hold what one policy brought on one application, as shares: 0.02 is two percent.

    ``shares`` are ``ed2_gain_over_default``, ``ed2_over_oracle``, the same of ``objective``,
    ``slowdown``, ``power_saving`` and ``energy_saving`` at the settings a policy has converged to,
    and each ``_with_probing``, for the whole run. Gains and savings are 1 - ratio; ``over_oracle``
    and ``slowdown`` are ratio - 1. ``objective`` scores the goal that was asked for, ``ed2`` always
    ED²."""

    policy: PolicyName
    application: str
    settings: Settings | None  # where one setting serves all phases
    shares: Mapping[str, float]


@dataclass(frozen=True)
class PolicyComparison:
    """Hold all policies on all applications of some plants."""

    objective: Objective
    outcomes: tuple[PolicyOutcome, ...]
    runs: Mapping[tuple[PolicyName, str], PolicyRun]

    def for_policy(self, policy: PolicyName) -> list[PolicyOutcome]:
        """Return the outcomes of one policy, by application."""
        return [o for o in self.outcomes if o.policy is policy]

    def mean(self, policy: PolicyName) -> dict[str, float]:
        """Return the arithmetic means over applications of every share."""
        rows = [o.shares for o in self.for_policy(policy)]
        return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def compare_policies(
    plants: Sequence[PlantTables],
    setup: PolicySetup,
    policies: Sequence[PolicyName] = tuple(PolicyName),
) -> PolicyComparison:
    """Run every application of every plant under every policy that the plant allows."""
    outcomes: list[PolicyOutcome] = []
    runs: dict[tuple[PolicyName, str], PolicyRun] = {}
    needed = {*policies, PolicyName.DEFAULT, PolicyName.ORACLE}
    for tables in plants:
        for application in tables.applications:
            for policy in PolicyName:
                run = None
                if policy in needed:
                    run = run_policy(tables, application, policy, setup)
                if run is not None:
                    runs[policy, application] = run
            base = runs[PolicyName.DEFAULT, application].played
            best = runs[PolicyName.ORACLE, application].played
            for policy in PolicyName:
                run = runs.get((policy, application))
                if run is not None and policy in policies:
                    outcomes.append(
                        _judge_run(
                            tables,
                            run,
                            base,
                            best,
                            setup.objective,
                        )
                    )
    return PolicyComparison(setup.objective, tuple(outcomes), runs)


def _judge_run(
    tables: PlantTables,
    run: PolicyRun,
    base: PlayedRun,
    best: PlayedRun,
    objective: Objective,
) -> PolicyOutcome:
    """Compare a run with the vendor's default (``base``) and the oracle (``best``)."""
    application = run.played.application
    order = tables.order(application)
    powers = {"ed2": Goal.ED2.delay_power, "objective": objective.goal.delay_power}

    def judge(played: PlayedRun) -> dict[str, float]:
        time_s = played.total_s
        energy_j = played.total_j + run.idle_j
        shares = {}
        for name, power in powers.items():
            total = energy_j * time_s**power
            shares[f"{name}_gain_over_default"] = 1 - total / (base.total_j * base.total_s**power)
            shares[f"{name}_over_oracle"] = total / (best.total_j * best.total_s**power) - 1
        shares["slowdown"] = time_s / base.total_s - 1
        shares["power_saving"] = 1 - energy_j / time_s / (base.total_j / base.total_s)
        shares["energy_saving"] = 1 - energy_j / base.total_j
        return shares

    converged = judge(run_at_settings(tables, application, run.converged[order]))
    whole = judge(run.played)
    shares = {}
    for name in converged:
        for ending, judged in zip(ENDINGS, (converged, whole), strict=True):
            shares[name + ending] = judged[name]
    used = np.unique(run.converged[np.unique(order)])
    settings = tables.lattice.settings_at(int(used[0])) if len(used) == 1 else None
    return PolicyOutcome(run.policy, application, settings, shares)


def geometric_mean_gain(
    outcomes: Sequence[PolicyOutcome],
    without: Sequence[str] = (),
    share: str = "ed2_gain_over_default_with_probing",
) -> float:
    """Return the paper's mean: geometric over applications, of the ratios behind a gain, a saving
    or a slowdown.

    ``without`` leaves applications out, as the second mean of the paper's figures leaves out the
    stress benchmarks."""
    is_excess = "slowdown" in share or "over_oracle" in share
    sign = 1.0 if is_excess else -1.0
    included = [outcome for outcome in outcomes if outcome.application not in without]
    ratios = [1.0 + sign * outcome.shares[share] for outcome in included]
    mean = float(np.exp(np.mean(np.log(ratios))))
    return mean - 1.0 if is_excess else 1.0 - mean


def count_worse_runs(
    plants: Sequence[PlantTables],
    setup: PolicySetup,
    repeats: int,
) -> dict[str, float]:
    """Return the share of noisy runs of the controller that are worse than the default by more than
    a percent.
    """
    outcomes: list[PolicyOutcome] = []
    for repeat in range(repeats):
        repeated = replace(setup, seed=setup.seed + repeat)
        outcomes += compare_policies(plants, repeated, [PolicyName.HARMONIA]).outcomes
    figures = {"runs": float(len(outcomes))}
    for ending in ENDINGS:
        gains = [outcome.shares[f"objective_gain_over_default{ending}"] for outcome in outcomes]
        figures[f"share_over_1_percent_worse{ending}"] = fmean(gain < -WORSE for gain in gains)
    for ending in ENDINGS:
        name = f"ed2_over_oracle{ending}"
        figures[name] = fmean(outcome.shares[name] for outcome in outcomes)
    return figures


def comparison_json(
    comparison: PolicyComparison,
    plants: Sequence[PlantTables],
    notes: Sequence[str] = (),
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """Return one comparison as plain mappings, per application and in the mean; fields are never
    renamed.
    """
    mean = {}
    for policy in PolicyName:
        outcomes = comparison.for_policy(policy)
        if outcomes:
            mean[str(policy)] = _mean_json(comparison.mean(policy), outcomes, without)
    objective = comparison.objective
    objective_json: dict[str, Any] = {"goal": str(objective.goal)}
    for name in ("slowdown", "latency_s", "cap_w"):
        bound = getattr(objective, name)
        if bound is not None:
            objective_json[name] = bound
    return {
        "wattcast": __version__,
        "objective": objective_json,
        "plants": [_plant_json(tables) for tables in plants],
        "applications": _applications_json(comparison, plants),
        "mean": mean,
        "notes": list(notes),
    }


def _mean_json(
    means: Mapping[str, float],
    outcomes: Sequence[PolicyOutcome],
    without: Sequence[str],
) -> dict[str, Any]:
    """Return the means of a policy over applications, and its worst application."""
    gains = [outcome.shares["ed2_gain_over_default"] for outcome in outcomes]
    slowdowns = [outcome.shares["slowdown"] for outcome in outcomes]
    worst = {
        "worst_ed2_gain_over_default": min(gains),
        "worst_slowdown": max(slowdowns),
        "ed2_gain_geometric_mean_with_probing": geometric_mean_gain(outcomes),
    }
    if without:
        second_mean = geometric_mean_gain(outcomes, without)
        worst["ed2_gain_geometric_mean_2_with_probing"] = second_mean
    rounded_means = {name: _round_off(value) for name, value in means.items()}
    rounded_worst = {name: _round_off(value) for name, value in worst.items()}
    return {
        **rounded_means,
        "applications": len(outcomes),
        **rounded_worst,
    }


def _plant_json(tables: PlantTables) -> dict[str, Any]:
    return {
        "name": tables.name,
        "source": tables.source,
        "settings": tables.lattice.count,
        "knobs": {str(knob.role): list(knob.levels) for knob in tables.lattice.knobs},
        "default": _settings_json(tables, tables.default),
        "applications": len(tables.applications),
        "iterations": max(len(order) for order in tables.applications.values()),
    }


def _applications_json(
    comparison: PolicyComparison, plants: Sequence[PlantTables]
) -> list[dict[str, Any]]:
    """Return the outcomes of each application by policy."""
    plant_of: dict[str, PlantTables] = {}
    for tables in plants:
        plant_of |= dict.fromkeys(tables.applications, tables)
    applications: dict[str, dict[str, Any]] = {}
    for outcome in comparison.outcomes:
        application = outcome.application
        plain: dict[str, Any] = {n: _round_off(value) for n, value in outcome.shares.items()}
        plain["settings"] = None
        if outcome.settings is not None:
            plain["settings"] = _settings_json(plant_of[application], outcome.settings)
        applications.setdefault(application, {})[str(outcome.policy)] = plain
    return [{"name": name, "policies": policies} for name, policies in applications.items()]


def _settings_json(tables: PlantTables, settings: Settings) -> dict[str, float]:
    values = tables.lattice.level_values(settings)
    roles = [str(knob.role) for knob in tables.lattice.knobs]
    return dict(zip(roles, values, strict=True))


_COLUMNS = {
    "objective_gain_over_default": "{goal} gain",
    "objective_gain_over_default_with_probing": "with probing",
    "objective_over_oracle": "over oracle",
    "objective_over_oracle_with_probing": "with probing",
    "slowdown": "slowdown",
    "power_saving": "power saved",
    "energy_saving": "energy saved",
}


def _round_off(value: float) -> float:
    assert np.isfinite(value), "a comparison is not a finite number: this is a bug in Wattcast"
    return float(np.round(value, 9))


def print_comparison(
    console: Console,
    comparison: PolicyComparison,
    title: str,
    without: Sequence[str] = (),
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Print the controller by application, then all policies in the mean, then ``more``. Gains are
    in the goal.
    """
    from wattcast.report.text_tables import new_table

    goal = comparison.objective.goal.label
    headings = [heading.format(goal=goal) for heading in _COLUMNS.values()]
    title = f"{title}: {PolicyName.HARMONIA}"
    by_application = new_table("application", *headings, title=title)
    for outcome in comparison.for_policy(PolicyName.HARMONIA):
        by_application.add_row(outcome.application, *_format_shares(outcome.shares))

    geometric = f"geometric mean of {goal} gain, with probing"
    means = new_table("policy", *headings, geometric, title="mean of applications")
    share = "objective_gain_over_default_with_probing"
    for policy in PolicyName:
        outcomes = comparison.for_policy(policy)
        if not outcomes:
            continue
        gains = [geometric_mean_gain(outcomes, (), share)]
        if without:
            gains.append(geometric_mean_gain(outcomes, without, share))
        shown_gains = " / ".join(f"{gain:.2%}" for gain in gains)
        means.add_row(policy, *_format_shares(comparison.mean(policy)), shown_gains)
    console.print(by_application)
    console.print(means)
    for what, figures in (more or {}).items():
        for name, value in figures.items():
            console.print(f"{what}: {name}: {_format_figure(value)}")


def _format_shares(shares: Mapping[str, float]) -> list[str]:
    return [f"{shares[name]:.2%}" for name in _COLUMNS]


def _format_figure(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"median {value['median']:.2%} of {value['plants']} plants"
    return f"{value:.6g}"


def choose_plant(
    gpu: str,
    workloads: Sequence[str],
    sensitivity: Path | None,
    options: Mapping[str, object] | None = None,
    roles: Sequence[KnobRole] = (KnobRole.CORE_CLOCK,),
) -> tuple[PlantTables, SensitivityModel | None]:
    """Return a simulated card and the sensitivity model its controller uses.

    ``options`` say what the workloads of a catalogue GPU are, as ``predict`` takes them (batch,
    seq, phase), and ``roles`` which of its knobs are turned."""
    model = read_sensitivity_model(sensitivity) if sensitivity is not None else None
    if fold_name(gpu) == fold_name(HD7970):
        _refuse_options(workloads, options, roles)
        return hd7970.load_tables(), model or load_shipped_model("hd7970_simulated")
    if not workloads:
        form = f"one or more to run on {gpu}"
        raise bad_value("workloads", form, "none", "Name a model or a workload file.")
    named = {workload: workload for workload in workloads}
    card = api.find_gpu(gpu)
    return clock_forecast.build_predicted_plant(named, card, options, roles=roles), model


def _refuse_options(
    workloads: Sequence[str],
    options: Mapping[str, object] | None,
    roles: Sequence[KnobRole],
) -> None:
    """Raise an error for options that the simulated card has no use for."""
    if workloads:
        form = f"none with {HD7970}, which has its own 14 applications"
        raise bad_value("workloads", form, workloads[0])
    if options or set(roles) != {KnobRole.CORE_CLOCK}:
        form = f"none of a workload or its knobs with {HD7970}, which has its own"
        option = f"--{next(iter(options))}" if options else "--knobs"
        raise bad_value("options", form, option)


def sweep_perturbed_cards(
    count: int,
    setup: PolicySetup,
    seed: int = 0,
) -> dict[str, Any]:
    """Run the controller on perturbed HD 7970s; return percentiles of the distance from each one's
    own oracle.
    """
    means = []
    for number in range(count):
        simulation = hd7970.load_simulation()
        tables = hd7970.perturb_simulation(simulation, FIRST_SEED + seed + number)
        comparison = compare_policies([tables], setup, [PolicyName.HARMONIA])
        means.append(comparison.mean(PolicyName.HARMONIA))
    figures = {}
    for quantity in ("ed2_over_oracle", "slowdown"):
        for name in (f"{quantity}_with_probing", quantity):
            median, low, high = np.percentile([mean[name] for mean in means], (50, 10, 90))
            figures[name] = {
                "median": _round_off(median),
                "p10": _round_off(low),
                "p90": _round_off(high),
                "plants": count,
            }
    return figures


def export_tables(tables: PlantTables, path: Path) -> None:
    """Save time, power and counters of every phase at every setting as CSV, which ``lab
    sensitivity`` reads.
    """
    roles = [knob.role for knob in tables.lattice.knobs]
    columns = [tables.lattice.knob_values(role) for role in roles]
    quantities = [tables.time_s, tables.power_w, *tables.counters.values()]
    lines = [["kernel", "phase", *map(str, roles), "time_s", "power_w", *tables.counters]]
    for phase, kernel in enumerate(tables.kernels):
        for setting in range(tables.lattice.count):
            knobs = [repr(float(column[setting])) for column in columns]
            values = [f"{table[phase, setting]:.9g}" for table in quantities]
            lines.append([kernel, str(phase), *knobs, *values])
    write_whole(path, encode_csv(lines))


# By memory and core Hz: seconds, watts, and the Hz it ran at on average.
Rows = dict[tuple[float, float], tuple[float, float, float]]
Clocks = tuple[float, ...]


def read_replay_tables(
    path: Path,
    iterations: int = ITERATIONS,
    default: str | None = None,
) -> list[PlantTables]:
    """Read the plants of a file: one per lattice, as applications may have been measured at
    different clocks.

    ``default`` is ``CORE/MEM`` in MHz or with units (``1164/3505``, ``1410 MHz``); without it the
    highest clocks."""
    text = decode_text(read_bytes(path), path.name)
    blocks: dict[str, Rows] = {}
    if text.lstrip().startswith("workload,"):
        blocks = _parse_runs(text, path.name)
    else:
        for name, block in parse_program_blocks(text, path.name).items():
            blocks[name] = {at: (*row, math.nan) for at, row in block.items()}
    if not blocks:
        raise bad_value(path.name, "one application at least", "none")
    groups: dict[tuple[Clocks, Clocks], dict[str, Rows]] = {}
    for name, rows in blocks.items():
        clocks = _find_complete_clocks(rows, f"{path.name}: {name}")
        groups.setdefault(clocks, {})[name] = rows

    plants = []
    for clocks, applications in groups.items():
        plants.append(
            _make_replay(
                path.name,
                clocks,
                default,
                applications,
                iterations,
            )
        )
    return plants


def _find_complete_clocks(rows: Rows, where: str) -> tuple[Clocks, Clocks]:
    """Return the memory clocks of an application, and the core clocks that all of them have."""
    memory_hz = tuple(sorted({memory for memory, _ in rows}))
    core_hz = {core for _, core in rows}
    for memory in memory_hz:
        core_hz &= {core for row_memory, core in rows if row_memory == memory}
    if len(core_hz) < 2:
        shared = f"{len(rows)} rows that share {len(core_hz)} core clock"
        raise bad_value(where, "two core clocks or more at every memory clock", shared)
    return memory_hz, tuple(sorted(core_hz))


def _make_replay(
    name: str,
    clocks: tuple[Clocks, Clocks],
    default: str | None,
    applications: Mapping[str, Rows],
    iterations: int,
) -> PlantTables:
    """Return the plant that replays the rows of applications with the same clocks."""
    memory_hz, core_hz = clocks
    knobs = [Knob(KnobRole.CORE_CLOCK, core_hz)]
    if len(memory_hz) > 1:
        knobs.append(Knob(KnobRole.MEMORY_CLOCK, memory_hz))
    lattice = Lattice(tuple(knobs))

    # Flat tables, in which the last knob varies fastest.
    settings = [(memory, core) for core, memory in product(core_hz, memory_hz)]
    table = np.array([_order_rows(rows, settings) for rows in applications.values()])
    time_s, power_w, mean_hz = np.moveaxis(table, -1, 0)
    orders = {}
    for phase, application in enumerate(applications):
        orders[application] = np.full(iterations, phase, dtype=np.int64)
    return PlantTables(
        name=name,
        lattice=lattice,
        default=_parse_default(lattice, default, name),
        kernels=tuple(applications),
        time_s=time_s,
        power_w=power_w,
        applications=orders,
        clock_hz=mean_hz if np.isfinite(mean_hz).all() else None,
        source=f"measurements replayed from {name}",
    )


def _order_rows(
    rows: Rows, settings: Sequence[tuple[float, float]]
) -> list[tuple[float, float, float]]:
    return [rows[clocks] for clocks in settings]


def leave_out_applications(
    plants: Sequence[PlantTables], starts: Sequence[str]
) -> list[PlantTables]:
    """Drop the applications whose names start with one of ``starts``; each must match something."""
    names = [name for tables in plants for name in tables.applications]
    for start in starts:
        if not any(name.startswith(start) for name in names):
            raise unknown_name("application to leave out", start, names)
    remaining = []
    for tables in plants:
        dropped = [name for name in tables.applications if name.startswith(tuple(starts))]
        applications = {n: o for n, o in tables.applications.items() if n not in dropped}
        if applications:
            remaining.append(replace(tables, applications=applications))
    if not remaining:
        raise bad_value("--leave-out", "some applications left", "none")
    return remaining


def _parse_default(
    lattice: Lattice,
    default: str | None,
    where: str,
) -> Settings:
    """Return ``CORE/MEM`` as a setting; the other order is taken too where only that one exists."""
    if default is None:
        return lattice.top
    clocks_hz = []
    for part in default.split("/"):
        unit = "" if re.search(r"[A-Za-z]", part) else " MHz"
        clocks_hz.append(units.parse(f"{part.strip()}{unit}", "Hz", "--default"))
    if len(clocks_hz) > 2:
        raise bad_value("--default", "CORE/MEM, such as 1164/3505", default)
    for values in (clocks_hz, clocks_hz[::-1]):
        settings = _find_exact_settings(lattice, values)
        if settings is not None:
            return settings
    descriptions = []
    for knob in lattice.knobs:
        levels = ", ".join(f"{level / 1e6:g}" for level in knob.levels)
        descriptions.append(f"{knob.role}: {levels} MHz")
    clocks = clip_text("; ".join(descriptions), 400)
    raise bad_value("--default", f"clocks of {where} ({clocks})", default)


def _find_exact_settings(lattice: Lattice, values: Sequence[float]) -> Settings | None:
    """Return the setting with these values of its first knobs, other knobs at their highest."""
    wished = [knob.levels[-1] for knob in lattice.knobs]
    for place, value in enumerate(values[: len(wished)]):
        wished[place] = value
    settings = lattice.nearest_settings(*wished)
    for nearest, value in zip(lattice.level_values(settings), values, strict=False):
        if not math.isclose(nearest, value, rel_tol=1e-6):
            return None
    return settings


def _parse_runs(text: str, where: str) -> dict[str, Rows]:
    header, *lines = text.strip().splitlines()
    columns = header.split(",")
    if not {"workload", "energy", "time"} <= set(columns):
        raise bad_value(f"{where}: line 1", "columns workload, energy and time", header)
    blocks: dict[str, Rows] = {}
    for number, line in enumerate(lines, start=2):
        cells = dict(zip(columns, line.strip().split(","), strict=False))
        match = _RUN.fullmatch(cells.get("workload", ""))
        try:
            energy_j = float(cells["energy"])
            time_ms = float(cells["time"])
            ran_mhz = float(cells.get("avg_freq", "nan"))
        except (KeyError, ValueError):
            raise bad_value(
                f"{where}: line {number}", "a workload, joules and milliseconds", line
            ) from None
        if match is None:
            raise bad_value(
                f"{where}: line {number}", "a workload named ..._freq<MHz>_iter<n>", line
            )
        if not (0 < energy_j < math.inf and 0 < time_ms < math.inf) or ran_mhz <= 0:
            raise bad_value(f"{where}: line {number}", "finite numbers above zero", line)
        clocks = (1.0, float(match["mhz"]) * 1e6)  # the memory clock is not known, and one for all
        rows = blocks.setdefault(match["name"], {})
        if clocks in rows:
            raise bad_value(f"{where}: line {number}", "one row per workload and clock", line)
        rows[clocks] = time_ms * 1e-3, energy_j / (time_ms * 1e-3), ran_mhz * 1e6
    return blocks
