"""Compare what ``wattcast lab tune`` predicts from kernels before a change with what the change
did.

Run: ``python studies/tune_pairs/judge_tune_pairs.py`` for what was measured on an H200 (``h200/``),
or with ``--rows tune_pairs.jsonl --profiles tune_pairs_ncu.csv`` of ``measure_tune_pairs.py``.
``--use mending`` shows the pairs that `tune` was first changed by, ``held-out`` the 38 that it was
judged on then (and later mended by), ``second held-out`` to ``sixth held-out`` those of later sets.

A change is measured by the time of the kernels themselves, as the profiler took it of both
versions; where it has not counted one of them, by the sustained load if both versions held one
clock, else by bursts. Bursts alone, by which the first three sets were judged, hold 50 to 90 us of
waking up after each rest: two versions of one call a burst that take the same 388 us under load
differed by 11 %. A change below 3 %, or below the difference between profiler and sustained load at
one clock, has no sign; then the interval has to hold zero, or the prediction to be below 3 %. Any
other change has the sign right where the prediction, however small, goes the same way. ``--bursts``
counts by the older rule: bursts, and a sign is right where both changes are below 3 %, or both
above it the same way."""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from measure_tune_pairs import HERE, ProgramVersion, read_versions
from wattcast import hardware
from wattcast.core.row_journals import read_lines
from wattcast.hardware import OperatingPoint
from wattcast.lab.counter_models.profiler_counters import read_ncu, read_ncu_metrics
from wattcast.lab.microbench.microbench_results import MicroRow, read_shipped_results
from wattcast.lab.microbench.tuning import MOST_WARPS, TuningAdvice, TuningReport, tune_export
from wattcast.lab.microbench.unit_work import TIME, KernelProfile
from wattcast.power.activity import Activity, ActivitySource
from wattcast.power.power_model import load_saved_model

SAME_CLOCK = 0.01  # of two sustained loads, as a share
NO_CHANGE = 0.03  # a change of time below this counts as none
ALIAS = {"shared memory": "caching"}  # `tune` names both ways of keeping data near by one word
LATER_ADVICE = ("register tiles",)  # that `tune` learned after these sets, which measure none
NEAR = 0.20  # points of percent, as a share


LATER = ("second", "third", "fourth", "fifth", "sixth")
USES = ("mending", "held-out", *(f"{which} held-out" for which in LATER))


def find_files(use: str) -> tuple[Path, Path]:
    """Return the measured rows and the profiles of a use."""
    which = use.split()[0] if use.endswith(" held-out") else "first"
    return HERE / "h200" / f"{which}_rows.jsonl", HERE / "h200" / f"{which}_profiles.csv"


def read_profiles(profiles: Path, versions: list[ProgramVersion]) -> dict[str, list[list[str]]]:
    """Return the head and the units of a profile under "", and the lines of every version counted
    whole.
    """
    content = profiles.read_bytes()
    content = gzip.decompress(content) if profiles.suffix == ".gz" else content
    lines = content.decode(errors="replace").splitlines()
    table = list(csv.reader(line for line in lines if line.startswith('"')))
    name, grid = table[0].index("Kernel Name"), table[0].index("launch__grid_size")
    found = {"": table[:2]}
    for version in versions:
        kept = []
        for kernel in version.kernels:
            same = [row for row in table[2:] if row[name].split("(")[0] == kernel]
            same = [row for row in same if int(float(row[grid].replace(",", ""))) == version.blocks]
            kept += (
                same[:1] if version.change == "before" else same[-1:]
            )  # those before a change were counted first
        if len(kept) == len(version.kernels):
            found[version.id] = kept
    return found


def read_reports(
    counted: dict[str, list[list[str]]], results: tuple[MicroRow, ...]
) -> dict[str, TuningReport]:
    """Return what `tune` says of each program before any change, from the profile of that program's
    kernels alone.
    """
    reports = {}
    for program in (name.removesuffix(": before") for name in counted if name.endswith(": before")):
        with NamedTemporaryFile("w", newline="", suffix=".csv") as stream:
            csv.writer(stream, quoting=csv.QUOTE_ALL).writerows(
                [*counted[""], *counted[f"{program}: before"]]
            )
            stream.flush()
            reports[program] = tune_export(Path(stream.name), results)
    return reports


def measure_change(
    before: dict[str, Any], after: dict[str, Any], bursts: bool
) -> tuple[float, float]:
    """Return the relative change of time, and the change below which it has no sign."""
    names = [name for name in ("profiled_s", "sustained_s", "burst_s") if name in after]
    by = {name: after[name] / before[name] - 1.0 for name in names}
    clocks_hz = [row.get("sm_clock_hz", 0.0) for row in (before, after)]
    held = "sustained_s" in by and abs(clocks_hz[1] / clocks_hz[0] - 1.0) <= SAME_CLOCK
    if bursts or not (held or "profiled_s" in by):
        return by["burst_s"], NO_CHANGE
    if "profiled_s" not in by:
        return by["sustained_s"], NO_CHANGE
    return by["profiled_s"], max(
        NO_CHANGE, abs(by["profiled_s"] - by["sustained_s"]) if held else 0.0
    )


def judge_pair(
    version: ProgramVersion, report: TuningReport, rows: dict[str, dict[str, Any]], bursts: bool
) -> dict[str, Any]:
    """Return predicted and measured time of one change."""
    before, after = rows[f"{version.program}: before"], rows[version.id]
    measured, least = measure_change(before, after, bursts)
    wanted = {ALIAS.get(change, change) for change in version.change.split(" + ")}
    found = [
        a for a in (*report.advice, *report.combined) if set(a.bottleneck.split(" + ")) == wanted
    ]
    told = found[0] if found else None
    predicted, between = (told.time, told.time_range) if told else (0.0, (0.0, 0.0))
    energy = after["energy_j"] / before["energy_j"] - 1.0
    none = abs(predicted) < NO_CHANGE
    right = (
        none or between[0] <= 0.0 <= between[1]
        if abs(measured) < least
        else predicted * measured > 0.0
    )
    if bursts:
        right = none if abs(measured) < NO_CHANGE else predicted * measured > 0.0 and not none
    return {
        "pair": version.id,
        "advised": told is not None,
        "predicted": predicted,
        "between": list(between),
        "measured": measured,
        "energy": told.energy if told else 0.0,
        "measured_energy": energy,
        "sign": right,
        "near": abs(predicted - measured) <= NEAR,
    }


def judge_first_advice(
    program: str,
    report: TuningReport,
    versions: list[ProgramVersion],
    rows: dict[str, dict[str, Any]],
    bursts: bool,
) -> dict[str, Any]:
    """Return whether the first advice is one of the two single changes of the program that saved
    most time; advice that no set measures cannot be judged and is passed over.
    """
    single = [
        v for v in versions if v.program == program and v.change != "before" and "+" not in v.change
    ]
    before, single = rows[f"{program}: before"], [v for v in single if v.id in rows]
    best = sorted(single, key=lambda v: measure_change(before, rows[v.id], bursts)[0])[:2]
    known = [line.bottleneck for line in report.advice if line.bottleneck not in LATER_ADVICE]
    first = known[0] if known else "nothing"
    return {
        "program": program,
        "first": first,
        "best": [v.change for v in best],
        "right": first in [ALIAS.get(v.change, v.change) for v in best],
    }


def judge_pairs(
    use: str,
    gpu: str = "h200",
    rows_file: Path | None = None,
    profiles: Path | None = None,
    bursts: bool = False,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, TuningReport]]:
    """Judge every measured pair of a use, and the first advice of every program; from ``h200/``
    without files.
    """
    ours = find_files(use)
    versions = [v for v in read_versions() if v.use == use]
    rows = {str(r["id"]): r for r in read_lines(rows_file or ours[0]) if not r.get("error")}
    counted = read_profiles(profiles or ours[1], versions)
    column = counted[""][0].index(TIME)
    for name in rows.keys() & counted.keys():
        rows[name]["profiled_s"] = sum(
            float(line[column].replace(",", "")) * 1e-9 for line in counted[name]
        )
    reports = read_reports(counted, read_shipped_results(hardware.load_gpu(gpu)))
    changed = [
        v for v in versions if v.change != "before" and v.program in reports and v.id in rows
    ]
    pairs = [judge_pair(v, reports[v.program], rows, bursts) for v in changed]
    firsts = [
        judge_first_advice(program, report, versions, rows, bursts)
        for program, report in reports.items()
    ]
    return pairs, firsts, reports


def judge_power(use: str) -> list[dict[str, Any]]:
    """Return the watts of every program of one kernel, measured and by the counter model that ships
    for the H200.
    """
    measured, profiles = find_files(use)
    model = load_saved_model(Path("h200")).model
    launches, activity = read_ncu(profiles, float(hardware.load_gpu("h200").sm_count))
    blocks = read_ncu_metrics(profiles)[1]["launch__grid_size"]
    rows = {str(r["id"]): r for r in read_lines(measured)}
    found = []
    for version in (v for v in read_versions() if v.id in rows and len(v.kernels) == 1):
        same = [
            i
            for i, x in enumerate(launches)
            if x.kernel == version.kernels[0] and blocks[i] == version.blocks
        ]
        if not same:
            continue
        counts = np.array([[activity.event_values(e)[same[-1]] for e in model.required_events]])
        row = rows[version.id]
        at = OperatingPoint(clock_hz=row["sm_clock_hz"], memory_clock_hz=3201e6)
        seconds = np.array([row["sustained_s"]])
        power = model.power(
            Activity(seconds, counts, model.required_events, at, ActivitySource.PROFILED)
        )
        found.append(
            {"id": version.id, "measured_w": row["power_w"], "predicted_w": float(power.total_w[0])}
        )
    return found


def show_profile(profile: KernelProfile, advice: list[TuningAdvice]) -> None:
    """Print a kernel's units and all advice, for mending."""
    shares = {unit: round(w.seconds / profile.time_s, 2) for unit, w in profile.work.items()}
    warps = MOST_WARPS * profile.counters["warps"]
    print(f"  {profile.name}: {1e6 * profile.time_s:.1f} us, {warps:.0f} warps, {shares}")
    for a in advice:
        print(f"    {a.bottleneck:16} {a.time:+.1%} {a.seen}")


def main() -> None:
    """Print one line a pair and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--use", default="held-out", choices=USES)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bursts", action="store_true", help="by the rule of the first three sets")
    parser.add_argument("--power", action="store_true", help="watts by the counter model instead")
    options = parser.parse_args()
    if options.power:
        watts = judge_power(options.use)
        for row in watts:
            print(f"{row['id']:44} {row['measured_w']:6.0f} {row['predicted_w']:6.0f} W")
        off = np.array([row["predicted_w"] / row["measured_w"] - 1.0 for row in watts])
        size = np.abs(off)
        print(
            f"{len(watts)} kernels: {size.mean():.1%} off, bias {off.mean():+.1%}, worst {size.max():.1%}"
        )
        return
    pairs, firsts, reports = judge_pairs(
        options.use, options.gpu, options.rows, options.profiles, options.bursts
    )
    if options.json:
        print(json.dumps({"pairs": pairs, "first_advice": firsts}, indent=1))
        return
    for report in reports.values() if options.use == "mending" else ():
        for profile in report.profiles:
            show_profile(profile, [a for a in report.advice if a.kernel == profile.name])
    print(f"{'pair':44} {'time':>7} {'between':>14} {'measured':>8}  {'energy':>7} {'measured':>8}")
    for p in pairs:
        marks = {"wrong sign": not p["sign"], "far": not p["near"], "not advised": not p["advised"]}
        time = "{:+7.1%} {:>14} {:+8.1%}".format(
            p["predicted"], "{:+.0%} {:+.0%}".format(*p["between"]), p["measured"]
        )
        energy = f"{p['energy']:+7.1%} {p['measured_energy']:+8.1%}"
        print(
            f"{p['pair']:44} {time}  {energy} {', '.join(mark for mark, on in marks.items() if on)}"
        )
    for f in firsts:
        print(
            f"{f['program']:20} first: {f['first']:16} best: {', '.join(f['best'])}{'' if f['right'] else '  wrong'}"
        )
    inside = sum(p["between"][0] <= p["measured"] <= p["between"][1] for p in pairs)
    counts = [sum(p[what] for p in pairs) for what in ("sign", "near")]
    print(
        f"of {len(pairs)} pairs: sign {counts[0]}, within 20 points {counts[1]}, inside the interval {inside}"
    )
    print(
        f"first advice among the two best: {sum(f['right'] for f in firsts)} of {len(firsts)} programs"
    )


if __name__ == "__main__":
    main()
