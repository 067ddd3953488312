"""Judge what ``wattcast lab tune`` predicted from ``ncu --set full`` of twenty programs.

Run ``python studies/tune_pairs/judge_full_set.py`` for what was measured on an H200
(``h200/seventh``; its card and versions are in ``runs.jsonl``), with ``--set eighth`` for the set
after it, or on another folder of ``measure_full_set.py``. It takes the predictions that were written there before anything was
measured. ``--again`` predicts with today's version instead, which is no held-out result, since
`tune` was changed by this set.

The rule was written before anything was measured. A change is measured by the kernels' own time, as
the profiler took it of both versions; without it by the sustained load where both held one clock,
else by bursts. A change below 3 %, or below the difference between profiler and sustained load at
one clock, has no sign; then the predicted interval has to hold zero, or the prediction to be below
3 %. Any other change has the sign right where the prediction goes the same way; a change that was
not advised is predicted as none. Near is within 20 points. The first advice is right where it is
the one in the column ``advice`` of ``full_set_pairs.csv``, or one of two ways to the same end there;
programs without one are as good as they can be, and their first advice is printed, not counted.
Asked for were 19 signs of 20, 17 near, and 15 first advices of 18.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from judge_tune_pairs import (
    ALIAS,
    NEAR,
    NO_CHANGE,
    measure_change,
    read_profiles,
)
from measure_tune_pairs import HERE, ProgramVersion, read_versions
from wattcast import hardware
from wattcast.core.row_journals import read_lines
from wattcast.lab.microbench.microbench_results import read_shipped_results
from wattcast.lab.microbench.profile_sets import PipeRates
from wattcast.lab.microbench.tuning import TuningReport, tune_export
from wattcast.lab.microbench.unit_work import TIME

PAIRS = {
    "seventh": HERE / "full_set_pairs.csv",
    "eighth": HERE / "eighth_set_pairs.csv",
    "ninth": HERE / "ninth_set_pairs.csv",
    "tenth": HERE / "tenth_set_pairs.csv",
}
MEASURED = {name: HERE / "h200" / name for name in PAIRS}
ASKED = {"sign": (19, 20), "near": (17, 20), "first": (15, 18)}


def predict_programs(
    profiles: Path,
    versions: list[ProgramVersion],
    gpu_name: str = "h200",
) -> dict[str, dict[str, Any]]:
    """Return what `tune` says of each program, from the full set of its kernels before a change."""
    gpu = hardware.load_gpu(gpu_name)
    results = read_shipped_results(gpu)
    before = [v for v in versions if v.change == "before"]
    counted = read_profiles(profiles, before)
    predictions = {}
    for version in before:
        if version.id not in counted:
            continue
        with NamedTemporaryFile("w", newline="", suffix=".csv") as stream:
            writer = csv.writer(stream, quoting=csv.QUOTE_ALL)
            writer.writerows([*counted[""], *counted[version.id]])
            stream.flush()
            report = tune_export(Path(stream.name), results, PipeRates.of(gpu))
        predictions[version.program] = describe_report(report)
    return predictions


def describe_report(report: TuningReport) -> dict[str, Any]:
    """Return advice, first the one that saves most energy, as plain numbers."""
    advice = [
        {
            "change": line.bottleneck,
            "time": line.time,
            "between": list(line.time_range),
            "energy": line.energy,
            "seen": line.seen,
        }
        for line in report.advice
    ]
    units = [
        {unit: work.seconds / profile.time_s for unit, work in profile.work.items()}
        for profile in report.profiles
    ]
    return {"advice": advice, "missing": sorted(report.missing), "units": units}


def read_rows(folder: Path, versions: list[ProgramVersion]) -> dict[str, dict[str, Any]]:
    """Return the measured rows by version, with the kernels' own time where it was taken."""
    lines = read_lines(folder / "tune_pairs.jsonl")
    rows = {str(row["id"]): row for row in lines if not row.get("error")}
    if not (folder / "times.csv").exists():
        return rows
    counted = read_profiles(folder / "times.csv", versions)
    column = counted[""][0].index(TIME)
    for name in rows.keys() & counted.keys():
        times_s = [1e-9 * float(line[column].replace(",", "")) for line in counted[name]]
        rows[name]["profiled_s"] = sum(times_s)
    return rows


def judge_change(
    version: ProgramVersion,
    prediction: dict[str, Any],
    rows: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Return predicted and measured time of one change."""
    before = rows[f"{version.program}: before"]
    after = rows[version.id]
    measured, least = measure_change(before, after, False)
    wanted = ALIAS.get(version.change, version.change)
    advice = [line for line in prediction["advice"] if line["change"] == wanted]
    predicted = advice[0]["time"] if advice else 0.0
    between = advice[0]["between"] if advice else [0.0, 0.0]
    if abs(measured) < least:
        sign = abs(predicted) < NO_CHANGE or between[0] <= 0.0 <= between[1]
    else:
        sign = predicted * measured > 0.0
    return {
        "pair": version.id,
        "advised": bool(advice),
        "predicted": predicted,
        "between": between,
        "measured": measured,
        "sign": sign,
        "near": abs(predicted - measured) <= NEAR,
        "inside": between[0] <= measured <= between[1],
    }


def judge_first(version: ProgramVersion, prediction: dict[str, Any]) -> dict[str, Any]:
    """Return whether the first advice is what an expert would say first."""
    first = prediction["advice"][0]["change"] if prediction["advice"] else "nothing"
    wanted = [ALIAS.get(name, name) for name in version.advice.split("|") if name]
    return {
        "program": version.program,
        "first": first,
        "wanted": wanted,
        "right": first in wanted,
    }


def judge_folder(
    folder: Path,
    again: bool = False,
    which_set: str = "seventh",
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Judge every measured pair of a folder, and the first advice of every predicted program."""
    versions = read_versions(PAIRS[which_set])
    written = folder / "predictions.json"
    if again or not written.exists():
        plain = folder / "before_full.csv"
        packed = folder / "before_full.csv.gz"
        predictions = predict_programs(plain if plain.exists() else packed, versions)
    else:
        predictions = json.loads(written.read_text())
    rows = read_rows(folder, versions)
    firsts = []
    pairs = []
    for version in versions:
        prediction = predictions.get(version.program)
        if prediction is None:
            continue
        if version.change == "before":
            firsts.append(judge_first(version, prediction))
        elif version.id in rows and f"{version.program}: before" in rows:
            pairs.append(judge_change(version, prediction, rows))
    return pairs, firsts


def main() -> None:
    """Print one line a pair and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--set", choices=list(PAIRS), default="seventh", dest="which_set")
    parser.add_argument("--again", action="store_true", help="predict with today's version")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = options.folder or MEASURED[options.which_set]
    pairs, firsts = judge_folder(folder, options.again, options.which_set)
    if options.json:
        print(json.dumps({"pairs": pairs, "first_advice": firsts}, indent=1))
        return
    print(f"{'pair':30} {'time':>8} {'between':>12} {'measured':>8}")
    for pair in pairs:
        between = "{:+.0%} {:+.0%}".format(*pair["between"])
        marks = {"wrong sign": "sign", "far": "near", "not advised": "advised"}
        faults = ", ".join(mark for mark, name in marks.items() if not pair[name])
        times = f"{pair['predicted']:+8.1%} {between:>12} {pair['measured']:+8.1%}"
        print(f"{pair['pair']:30} {times}  {faults}")
    due = [first for first in firsts if first["wanted"]]
    for first in firsts:
        verdict = "" if first["right"] else "  wrong" if first["wanted"] else "  (none due)"
        wanted = " or ".join(first["wanted"]) or "nothing"
        print(f"{first['program']:14} first: {first['first']:18} expert: {wanted}{verdict}")
    counts = {name: sum(pair[name] for pair in pairs) for name in ("sign", "near", "inside")}
    right = sum(first["right"] for first in due)
    print(
        f"of {len(pairs)} pairs: sign {counts['sign']} (asked {ASKED['sign'][0]}), "
        f"within 20 points {counts['near']} (asked {ASKED['near'][0]}), "
        f"inside the interval {counts['inside']}; "
        f"first advice {right} of {len(due)} (asked {ASKED['first'][0]})"
    )


if __name__ == "__main__":
    main()
