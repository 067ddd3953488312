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
from wattcast.control.policies import PolicyName, PolicyRun, PolicySetup, run_policy
from wattcast.control.program_blocks import parse_program_blocks
from wattcast.control.search_problem import Goal, Objective
from wattcast.control.sensitivity_model import (
    SensitivityModel,
    load_shipped_model,
    read_sensitivity_model,
)
from wattcast.core import bad_value, clip_text, units, unknown_name
from wattcast.core.errors import fold_name
from wattcast.core.strict_files import decode_text, encode_csv, read_bytes
from wattcast.core.whole_files import write_whole
from wattcast.predictor import api

if TYPE_CHECKING:
    from rich.console import Console

HD7970 = "hd-7970"
# perturbed plants that results are reported on; the controller was tuned on seeds below 100
FIRST_SEED = 1000
ITERATIONS = 100
ENDINGS = ("", "_with_probing")  # of shares: at the settings converged to, and of the whole run
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
            found = {
                p: run_policy(tables, application, p, setup) for p in PolicyName if p in needed
            }
            done = {p: r for p, r in found.items() if r is not None}
            runs |= {(p, application): r for p, r in done.items()}
            base = done[PolicyName.DEFAULT].played
            best = done[PolicyName.ORACLE].played
            outcomes += [
                _judge_run(tables, r, base, best, setup.objective)
                for p, r in done.items()
                if p in policies
            ]
    return PolicyComparison(setup.objective, tuple(outcomes), runs)


def _judge_run(
    tables: PlantTables, run: PolicyRun, base: PlayedRun, best: PlayedRun, objective: Objective
) -> PolicyOutcome:
    application = run.played.application
    order = tables.order(application)

    def judge(played: PlayedRun) -> dict[str, float]:
        time_s = played.total_s
        energy_j = played.total_j + run.idle_j
        found = {}
        for name, power in (
            ("ed2", Goal.ED2.delay_power),
            ("objective", objective.goal.delay_power),
        ):
            total = energy_j * time_s**power
            found[f"{name}_gain_over_default"] = 1 - total / (base.total_j * base.total_s**power)
            found[f"{name}_over_oracle"] = total / (best.total_j * best.total_s**power) - 1
        found["slowdown"] = time_s / base.total_s - 1
        found["power_saving"] = 1 - energy_j / time_s / (base.total_j / base.total_s)
        return found | {"energy_saving": 1 - energy_j / base.total_j}

    both = judge(run_at_settings(tables, application, run.converged[order])), judge(run.played)
    shares = {
        name + end: found[name]
        for name in both[0]
        for end, found in zip(ENDINGS, both, strict=True)
    }
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
    sign = 1.0 if "slowdown" in share or "over_oracle" in share else -1.0
    ratios = [1.0 + sign * o.shares[share] for o in outcomes if o.application not in without]
    mean = float(np.exp(np.mean(np.log(ratios))))
    return mean - 1.0 if sign > 0 else 1.0 - mean


def count_worse_runs(
    plants: Sequence[PlantTables], setup: PolicySetup, repeats: int
) -> dict[str, float]:
    """Return the share of noisy runs of the controller that are worse than the default by more than
    a percent.
    """
    rows: list[PolicyOutcome] = []
    for seed in range(repeats):
        rows += compare_policies(
            plants, replace(setup, seed=setup.seed + seed), [PolicyName.HARMONIA]
        ).outcomes
    gain = "objective_gain_over_default"
    over = "ed2_over_oracle"
    found = {"runs": float(len(rows))}
    found |= {
        f"share_over_1_percent_worse{e}": fmean(o.shares[gain + e] < -0.01 for o in rows)
        for e in ENDINGS
    }
    return found | {over + e: fmean(o.shares[over + e] for o in rows) for e in ENDINGS}


def comparison_json(
    comparison: PolicyComparison,
    plants: Sequence[PlantTables],
    notes: Sequence[str] = (),
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """Return one comparison as plain mappings, per application and in the mean; fields are never
    renamed.
    """
    plant_of = {application: tables for tables in plants for application in tables.applications}
    applications: dict[str, dict[str, Any]] = {}
    for o in comparison.outcomes:
        at = None if o.settings is None else _settings_json(plant_of[o.application], o.settings)
        shares = {name: _round_off(value) for name, value in o.shares.items()}
        applications.setdefault(o.application, {})[str(o.policy)] = {**shares, "settings": at}
    mean = {}
    for policy in PolicyName:
        if not (rows := comparison.for_policy(policy)):
            continue
        worst = {
            "worst_ed2_gain_over_default": min(o.shares["ed2_gain_over_default"] for o in rows),
            "worst_slowdown": max(o.shares["slowdown"] for o in rows),
            "ed2_gain_geometric_mean_with_probing": geometric_mean_gain(rows),
        }
        if without:
            worst["ed2_gain_geometric_mean_2_with_probing"] = geometric_mean_gain(rows, without)
        means, worst = (
            {k: _round_off(v) for k, v in each.items()} for each in (comparison.mean(policy), worst)
        )
        mean[str(policy)] = {**means, "applications": len(rows), **worst}
    objective = comparison.objective
    bounds = {
        "slowdown": objective.slowdown,
        "latency_s": objective.latency_s,
        "cap_w": objective.cap_w,
    }
    return {
        "wattcast": __version__,
        "objective": {
            "goal": str(objective.goal),
            **{k: v for k, v in bounds.items() if v is not None},
        },
        "plants": [
            {
                "name": tables.name,
                "source": tables.source,
                "settings": tables.lattice.count,
                "knobs": {str(k.role): list(k.levels) for k in tables.lattice.knobs},
                "default": _settings_json(tables, tables.default),
                "applications": len(tables.applications),
                "iterations": max(len(order) for order in tables.applications.values()),
            }
            for tables in plants
        ],
        "applications": [
            {"name": name, "policies": policies} for name, policies in applications.items()
        ],
        "mean": mean,
        "notes": list(notes),
    }


def _settings_json(tables: PlantTables, settings: Settings) -> dict[str, float]:
    return {
        str(k.role): v
        for k, v in zip(tables.lattice.knobs, tables.lattice.level_values(settings), strict=True)
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
    columns = {
        "objective_gain_over_default": f"{goal} gain",
        "objective_gain_over_default_with_probing": "with probing",
        "objective_over_oracle": "over oracle",
        "objective_over_oracle_with_probing": "with probing",
        "slowdown": "slowdown",
        "power_saving": "power saved",
        "energy_saving": "energy saved",
    }
    by_application = new_table(
        "application", *columns.values(), title=f"{title}: {PolicyName.HARMONIA}"
    )
    geometric = f"geometric mean of {goal} gain, with probing"
    means = new_table("policy", *columns.values(), geometric, title="mean of applications")
    for o in comparison.for_policy(PolicyName.HARMONIA):
        by_application.add_row(o.application, *(f"{o.shares[name]:.2%}" for name in columns))
    for policy in PolicyName:
        rows = comparison.for_policy(policy)
        if rows:
            mean = comparison.mean(policy)
            share = "objective_gain_over_default_with_probing"
            both = [
                geometric_mean_gain(rows, left_out, share)
                for left_out in ([(), without] if without else [()])
            ]
            means.add_row(
                policy,
                *(f"{mean[name]:.2%}" for name in columns),
                " / ".join(f"{g:.2%}" for g in both),
            )
    console.print(by_application)
    console.print(means)
    for what, found in (more or {}).items():
        for key, value in found.items():
            is_swept = isinstance(value, Mapping)
            said = (
                f"median {value['median']:.2%} of {value['plants']} plants"
                if is_swept
                else f"{value:.6g}"
            )
            console.print(f"{what}: {key}: {said}")


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
        if workloads:
            raise bad_value(
                "workloads", f"none with {HD7970}, which has its own 14 applications", workloads[0]
            )
        if options or set(roles) != {KnobRole.CORE_CLOCK}:
            found = f"--{next(iter(options))}" if options else "--knobs"
            raise bad_value(
                "options",
                f"none of a workload or its knobs with {HD7970}, which has its own",
                found,
            )
        return hd7970.load_tables(), model or load_shipped_model("hd7970_simulated")
    if not workloads:
        raise bad_value(
            "workloads", f"one or more to run on {gpu}", "none", "Name a model or a workload file."
        )
    named = {w: w for w in workloads}
    return clock_forecast.build_predicted_plant(
        named, api.find_gpu(gpu), options, roles=roles
    ), model


def sweep_perturbed_cards(count: int, setup: PolicySetup, seed: int = 0) -> dict[str, Any]:
    """Run the controller on perturbed HD 7970s; return percentiles of the distance from each one's
    own oracle.
    """
    means = []
    for i in range(count):
        tables = hd7970.perturb_simulation(hd7970.load_simulation(), FIRST_SEED + seed + i)
        means.append(
            compare_policies([tables], setup, [PolicyName.HARMONIA]).mean(PolicyName.HARMONIA)
        )
    found = {}
    for name in (
        "ed2_over_oracle_with_probing",
        "ed2_over_oracle",
        "slowdown_with_probing",
        "slowdown",
    ):
        figures = map(_round_off, np.percentile([mean[name] for mean in means], (50, 10, 90)))
        found[name] = dict(zip(("median", "p10", "p90"), figures, strict=True)) | {"plants": count}
    return found


def export_tables(tables: PlantTables, path: Path) -> None:
    """Save time, power and counters of every phase at every setting as CSV, which ``lab
    sensitivity`` reads.
    """
    roles = [str(knob.role) for knob in tables.lattice.knobs]
    columns = [tables.lattice.knob_values(knob.role) for knob in tables.lattice.knobs]
    lines = [["kernel", "phase", *roles, "time_s", "power_w", *tables.counters]]
    for row, kernel in enumerate(tables.kernels):
        for setting in range(tables.lattice.count):
            knobs = [repr(float(column[setting])) for column in columns]
            seen = [tables.time_s[row, setting], tables.power_w[row, setting]]
            counters = [table[row, setting] for table in tables.counters.values()]
            lines.append(
                [kernel, str(row), *knobs, *(f"{value:.9g}" for value in [*seen, *counters])]
            )
    write_whole(path, encode_csv(lines))


Rows = dict[
    tuple[float, float], tuple[float, float, float]
]  # by memory and core Hz: s, W, Hz it ran at on average


def read_replay_tables(
    path: Path, iterations: int = ITERATIONS, default: str | None = None
) -> list[PlantTables]:
    """Read the plants of a file: one per lattice, as applications may have been measured at
    different clocks.

    ``default`` is ``CORE/MEM`` in MHz or with units (``1164/3505``, ``1410 MHz``); without it the
    highest clocks."""
    text = decode_text(read_bytes(path), path.name)
    if text.lstrip().startswith("workload,"):
        blocks = _parse_runs(text, path.name)
    else:
        programs = parse_program_blocks(text, path.name)
        blocks = {
            name: {at: (*row, math.nan) for at, row in rows.items()}
            for name, rows in programs.items()
        }
    if not blocks:
        raise bad_value(path.name, "one application at least", "none")
    groups: dict[tuple[tuple[float, ...], tuple[float, ...]], dict[str, Rows]] = {}
    for name, rows in blocks.items():
        memory = tuple(sorted({m for m, _ in rows}))
        core = tuple(c for c in sorted({c for _, c in rows}) if all((m, c) in rows for m in memory))
        if len(core) < 2:
            found = f"{len(rows)} rows that share {len(core)} core clock"
            raise bad_value(
                f"{path.name}: {name}", "two core clocks or more at every memory clock", found
            )
        groups.setdefault((memory, core), {})[name] = rows
    plants = []
    for (memory, core), apps in groups.items():
        knobs = [(KnobRole.CORE_CLOCK, core), (KnobRole.MEMORY_CLOCK, memory)][
            : 1 + (len(memory) > 1)
        ]
        lattice = Lattice(tuple(Knob(*knob) for knob in knobs))
        order = [(m, c) for c in core for m in memory]
        table = np.array(
            [[rows[key] for key in order] for rows in apps.values()]
        )  # (application, setting, quantity)
        time_s, power_w, ran_hz = np.moveaxis(table, -1, 0)
        tables = PlantTables(
            name=path.name,
            lattice=lattice,
            default=_parse_default(lattice, default, path.name),
            kernels=tuple(apps),
            time_s=time_s,
            power_w=power_w,
            applications={
                app: np.full(iterations, i, dtype=np.int64) for i, app in enumerate(apps)
            },
            clock_hz=ran_hz if np.isfinite(ran_hz).all() else None,
            source=f"measurements replayed from {path.name}",
        )
        plants.append(tables)
    return plants


def leave_out_applications(
    plants: Sequence[PlantTables], starts: Sequence[str]
) -> list[PlantTables]:
    """Drop the applications whose names start with one of ``starts``; each must match something."""
    names = [name for tables in plants for name in tables.applications]
    for start in starts:
        if not any(name.startswith(start) for name in names):
            raise unknown_name("application to leave out", start, names)
    kept = [
        {n: o for n, o in tables.applications.items() if not n.startswith(tuple(starts))}
        for tables in plants
    ]
    left = [
        replace(tables, applications=some)
        for tables, some in zip(plants, kept, strict=True)
        if some
    ]
    if not left:
        raise bad_value("--leave-out", "some applications left", "none")
    return left


def _parse_default(lattice: Lattice, wanted: str | None, where: str) -> Settings:
    """Return ``CORE/MEM`` as a setting; the other order is taken too where only that one exists."""
    if wanted is None:
        return lattice.top
    given = []
    for part in wanted.split("/"):
        unit = "" if re.search(r"[A-Za-z]", part) else " MHz"
        given.append(units.parse(f"{part.strip()}{unit}", "Hz", "--default"))
    if len(given) > 2:
        raise bad_value("--default", "CORE/MEM, such as 1164/3505", wanted)
    for values in (given, given[::-1]):
        full = [
            values[i] if i < len(values) else knob.levels[-1]
            for i, knob in enumerate(lattice.knobs)
        ]
        found = lattice.nearest_settings(*full)
        if all(
            math.isclose(a, b, rel_tol=1e-6)
            for a, b in zip(lattice.level_values(found), values, strict=False)
        ):
            return found
    clocks = "; ".join(
        f"{k.role}: {', '.join(f'{v / 1e6:g}' for v in k.levels)} MHz" for k in lattice.knobs
    )
    raise bad_value("--default", f"clocks of {where} ({clip_text(clocks, 400)})", wanted)


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
