"""Measure twenty programs before and after a change, predicted from ``ncu --set full`` alone.

Run ``python studies/tune_pairs/measure_full_set.py --out FOLDER`` on a machine with a GPU and Nsight
Compute, from the repository's root. The steps come in this order, each with a limit of its own:

1. ``ncu --set full`` of every program before its change (``before_full.csv.gz``);
2. what ``wattcast lab tune`` says of these (``predictions.json``);
4. the kernels' own times, before and after, by the profiler (``times.csv``);
3. time and power of all programs before and after the change (``tune_pairs.jsonl``);
5. the instructions of the first step's profile (``before_source.csv.gz``).

Nothing of a program after its change is seen before it was predicted: on a machine that has no
package to predict with, step 2 is left out, and ``--steps 2`` follows elsewhere on the first step's
profile alone, before any time is read. ``full_set_pairs.csv`` names
the programs, with the advice that an expert would give first; two of them are as good as they can
be, so that none is due. ``eighth_set_pairs.csv`` to ``tenth_set_pairs.csv`` have other programs, each
written when `tune` had been mended by those before; the tenth is measured unless ``--set`` says
otherwise.
``judge_full_set.py`` has the rule. ``--dry-run`` compiles the kernels and measures nothing;
``--steps 43`` runs some of the steps. Clocks are never set.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

import measure_tune_pairs
from measure_tune_pairs import (
    HERE,
    ProgramVersion,
    count_pairs,
    measure_pairs,
    read_versions,
)
from wattcast.lab.campaigns.nsight_counters import find_ncu
from wattcast.measure.cuda_device import compile_cubin
from wattcast.measure.sampler import make_child_environment
from wattcast.measure.steady_state import SettlingRule, say

PAIRS = {
    "seventh": HERE / "full_set_pairs.csv",
    "eighth": HERE / "eighth_set_pairs.csv",
    "ninth": HERE / "ninth_set_pairs.csv",
    "tenth": HERE / "tenth_set_pairs.csv",
}
KERNELS = {
    "seventh": HERE / "full_set_kernels.cu",
    "eighth": HERE / "eighth_set_kernels.cu",
    "ninth": HERE / "ninth_set_kernels.cu",
    "tenth": HERE / "tenth_set_kernels.cu",
}
LIMITS_S = {"full": 60.0, "measure": 70.0, "times": 20.0}
BURSTS = 9
WARM_S = 2.0
WRITE_S = 15.0  # ncu writes its report after the program has ended
RULE = SettlingRule(
    settle_s=0.2, least_ticks=4, longest_s=1.0, least_s=0.5, linger_s=0.15, look_s=0.04
)
TIMES = (
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.max",
    "sm__cycles_elapsed.sum",
    "launch__grid_size",
    "launch__block_size",
)


def read_cubin(
    out: Path,
    which_set: str,
    architecture: str = "sm_90",
) -> bytes:
    """Compile the kernels, or read what was compiled for this folder before."""
    source = KERNELS[which_set]
    kept = Path(gettempdir()) / f"full_set_{out.resolve().name}_{source.stat().st_size}.cubin"
    if not kept.exists():
        kept.write_bytes(compile_cubin(source.read_text(), architecture, source.name))
    return kept.read_bytes()


@dataclass(frozen=True)
class StudyRun:
    """One run of the study: where its files go, and which set of programs it measures."""

    out: Path
    which_set: str

    @property
    def versions(self) -> list[ProgramVersion]:
        """Every program of the set, before and after its change."""
        return read_versions(PAIRS[self.which_set])


def run_profiler(
    run: StudyRun,
    options: list[str],
    which: str,
    limit_s: float,
) -> None:
    """Run the programs of this study under ``ncu``."""
    command = [
        find_ncu(),
        *"--clock-control none --cache-control none --profile-from-start off".split(),
        *options,
        sys.executable,
        __file__,
        *("--out", str(run.out), "--set", run.which_set),
        *("--target", which, "--budget", f"{limit_s:.0f}"),
    ]
    try:
        subprocess.run(
            command,
            timeout=limit_s + WRITE_S,
            check=False,
            env=make_child_environment(),
            stdout=2,
        )
    except subprocess.TimeoutExpired:
        say("ncu did not end in time.")


def profile_before(run: StudyRun) -> None:
    """Collect the full set of every program before its change, and export it as users do."""
    options = ["--set", "full", "-f", "-o", str(find_report(run))]
    run_profiler(run, options, "before", LIMITS_S["full"])
    export_page(run, "before_full.csv.gz", ["--page", "raw", "--print-units", "base"])


def find_report(run: StudyRun) -> Path:
    """Return where the profiler's own report lies, which is too large to be kept."""
    return Path(gettempdir()) / f"full_set_{run.out.resolve().name}.ncu-rep"


def export_page(
    run: StudyRun,
    name: str,
    options: list[str],
) -> None:
    """Export a page of the report as a packed CSV."""
    export = [find_ncu(), "--import", str(find_report(run)), "--csv", *options]
    page = subprocess.run(export, stdout=subprocess.PIPE, check=False, timeout=40.0)
    packed = gzip.compress(page.stdout)
    (run.out / name).write_bytes(packed)
    say(f"{name}: {len(page.stdout)} bytes, {len(packed)} packed")


def predict_changes(run: StudyRun) -> None:
    """Write what `tune` says of every program before its change."""
    from judge_full_set import predict_programs  # needs the whole package, measuring does not

    predictions = predict_programs(run.out / "before_full.csv.gz", run.versions)
    (run.out / "predictions.json").write_text(json.dumps(predictions, indent=1))
    say(f"{len(predictions)} programs predicted")


def profile_times(run: StudyRun) -> None:
    """Have the profiler take the time of all kernels, before and after."""
    options = ["--csv", "--page", "raw", "--print-units", "base"]
    options += ["--metrics", ",".join(TIMES), "--log-file", str(run.out / "times.csv")]
    run_profiler(run, options, "all", LIMITS_S["times"])


def run_steps(run: StudyRun, steps: str) -> int:
    """Run the steps in order; one that fails is told and the next ones run."""
    measure_tune_pairs.RULE = RULE
    measure_tune_pairs.BURSTS = BURSTS
    measure_tune_pairs.WARM_S = WARM_S
    cubin = read_cubin(run.out, run.which_set)
    failed = 0
    work: dict[str, Callable[[], object]] = {
        "1": lambda: profile_before(run),
        "2": lambda: predict_changes(run),
        "3": lambda: measure_pairs(run.out, run.versions, LIMITS_S["measure"], cubin),
        "4": lambda: profile_times(run),
        "5": lambda: export_page(run, "before_source.csv.gz", ["--page", "source"]),
    }
    for step in steps:
        began_s = time.monotonic()
        try:
            work[step]()
        except Exception:
            failed += 1
            say(traceback.format_exc())
        say(f"step {step}: {time.monotonic() - began_s:.0f} s")
    return failed


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", choices=list(PAIRS), default="tenth", dest="which_set")
    parser.add_argument("--steps", default="12435")
    parser.add_argument("--target", choices=["before", "all"], help="the process under ncu")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--budget", type=float, default=75.0, help="seconds, of --target")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    run = StudyRun(options.out, options.which_set)
    versions = run.versions
    cubin = read_cubin(run.out, run.which_set)
    if options.target:
        chosen = [v for v in versions if options.target == "all" or v.change == "before"]
        count_pairs(chosen, options.budget, cubin)
        return 0
    if options.dry_run:
        needed = {name for v in versions for name in (*v.kernels, v.prepare) if name}
        lacking = sorted(name for name in needed if name.encode() not in cubin)
        print(f"{len(versions)} versions, {len(needed)} kernels; lacking: {lacking}")
        return 4 if lacking else 0
    return 4 if run_steps(run, options.steps) else 0


if __name__ == "__main__":
    sys.exit(main())
