"""Compare twenty operators, as ``wattcast lab kernel`` shows them, with what Nsight Compute counted.

Run ``python studies/kernel_phases/judge_kernel_phases.py`` for what was measured on an H200
(``h200/``), or on another folder of ``measure_kernel_phases.py``. The rule was written before
anything was measured:

- Bytes of DRAM, of the L2 (between it and the SMs) and of shared memory and L1 (banks read and
  written, 4 bytes each), summed over the kernels of an operator, against the predicted
  ones: the median over all operators and levels of the relative error has to be below 10 %. Levels
  with less than 64 KiB are left out. DRAM is predicted in the state in which a profiler counts it,
  which runs a kernel again for each of its passes.
- Tiles of products against the kernel's name: both sides have to agree, in their order. Waves: tiles of the named
  shape (times the parts of K that its grid makes) over the SMs, rounded up, against those predicted.
  85 % have to be exact.
- The phases of a kernel have to add up to its time, to 1e-9.

Time is shown, not judged: the profiler's is of each kernel alone.

One unit was mended after the rows were judged: a read or write of a bank was taken for one of all
32 banks, 128 bytes, while the profiler counts each bank by itself. Elementwise operators tell: SiLU
of 9,437,184 numbers of 2 bytes reads and writes 37.7 MB, and 9,437,184 reads of banks are counted.
By the first unit the median error over all was 8.6 %, and 96.8 % for shared memory.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from measure_kernel_phases import read_operators
from wattcast import hardware
from wattcast.kernels.kernel_labels import find_label, find_product_kernel
from wattcast.kernels.kernel_names import parse_kernel_name
from wattcast.lab.campaigns.kernel_plan import OperatorSpec
from wattcast.lab.campaigns.nsight_counters import read_counter_table
from wattcast.lab.validate.profiled_kernel import BANK_BYTE, LEVELS, count_predicted_bytes
from wattcast.predictor import api
from wattcast.predictor.kernel_view import KernelView
from wattcast.report.kernel_report import view_numbered_kernel
from wattcast.workload.readers.from_json import parse_workload

GPU = "h200"
MEASURED = Path(__file__).parent / "h200"
LEAST_BYTE = 65536.0
ASKED_ERROR = 0.10
ASKED_EXACT = 0.85
SAME_TIME = 1e-9


def read_counts(lines: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return bytes by level, kernels and time of every operator, by its id."""
    counts: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"byte": dict.fromkeys(LEVELS, 0.0), "kernels": [], "time_s": 0.0}
    )
    for row in read_counter_table(lines):
        metrics = row["metrics"]
        count = counts[row["spec"]]
        for level, names in LEVELS.items():
            scale = BANK_BYTE if level == "shared" else 1.0
            count["byte"][level] += scale * sum(metrics.get(name, 0.0) for name in names)
        count["time_s"] += 1e-9 * metrics["gpu__time_duration.sum"]
        count["kernels"].append(
            {"name": row["kernel"], "grid": metrics.get("launch__grid_size", 0.0)}
        )
    return dict(counts)


def predict_view(spec: OperatorSpec) -> KernelView:
    """Look into an operator as ``lab kernel`` does."""
    operator = dict(spec.operator)
    if spec.family == "elementwise":
        operator["op"] = operator.pop("function")
    data = json.dumps({"name": "one", "ops": [operator]}).encode()
    graph = parse_workload(data, "one")
    return view_numbered_kernel(api.predict(graph, GPU, host_launch="0us"), 1)


def judge_tile(
    spec: OperatorSpec,
    view: KernelView,
    kernels: list[dict[str, Any]],
    sm_count: float,
) -> dict[str, Any] | None:
    """Compare tile and waves of a product with the kernel's name; None where it does not say."""
    names = [kernel["name"] for kernel in kernels]
    label = find_label(names)
    place = find_product_kernel(names)
    if spec.family != "linear" or view.chosen is None or label is None or place is None:
        return None
    if not parse_kernel_name(names[place]).tiled:
        return None
    sides = [int(word) for word in view.chosen.label.split()[1].split("x")]
    tiles = np.ceil(spec.operator["n"] / label.tile_n) * np.ceil(spec.operator["m"] / label.tile_m)
    parts = max(round(kernels[place]["grid"] / tiles), 1) if label.split else 1
    waves = float(np.ceil(tiles * parts / sm_count))
    named = [label.tile_n, label.tile_m]
    return {
        "named": named,
        "predicted": sides,
        "tile": named == sides,
        "named_waves": waves,
        "predicted_waves": float(np.ceil(view.waves)),
        "waves": waves == float(np.ceil(view.waves)),
    }


def judge_operator(spec: OperatorSpec, count: dict[str, Any]) -> dict[str, Any]:
    """Compare one operator with what was counted."""
    view = predict_view(spec)
    predicted = count_predicted_bytes(view, hardware.load_gpu(GPU))
    errors = {}
    for level, counted in count["byte"].items():
        if min(counted, predicted[level]) >= LEAST_BYTE:
            errors[level] = predicted[level] / counted - 1.0
    phase_s = sum(phase.seconds for phase in view.phases)
    sm_count = float(np.ravel(hardware.load_gpu(GPU).sm_count)[0])
    return {
        "operator": str(view.op),
        "errors": errors,
        "tile": judge_tile(spec, view, count["kernels"], sm_count),
        "adds_up": abs(phase_s / view.seconds - 1.0) <= SAME_TIME,
        "time": view.seconds / count["time_s"] - 1.0,
        "kernels": [kernel["name"] for kernel in count["kernels"]],
    }


def judge_table(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Judge every operator of the study that was counted."""
    counts = read_counts(lines)
    return [judge_operator(spec, counts[spec.id]) for spec in read_operators() if spec.id in counts]


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that the study is judged by."""
    errors = [abs(error) for row in rows for error in row["errors"].values()]
    tiles = [row["tile"] for row in rows if row["tile"] is not None]
    exact = [tile[what] for tile in tiles for what in ("tile", "waves")]
    by_level = {}
    for level in LEVELS:
        of_level = [abs(row["errors"][level]) for row in rows if level in row["errors"]]
        by_level[level] = float(np.median(of_level)) if of_level else None
    return {
        "operators": len(rows),
        "median_error": float(np.median(errors)) if errors else None,
        "median_error_by_level": by_level,
        "named": len(tiles),
        "tile_exact": sum(tile["tile"] for tile in tiles),
        "waves_exact": sum(tile["waves"] for tile in tiles),
        "exact_share": float(np.mean(exact)) if exact else None,
        "adds_up": sum(row["adds_up"] for row in rows),
    }


def main() -> None:
    """Print one line an operator and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=MEASURED)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    text = (options.folder / "kernel_counters.csv").read_text(errors="replace")
    rows = judge_table(text.splitlines())
    figures = summarize(rows)
    if options.json:
        print(json.dumps({"operators": rows, "figures": figures}, indent=1))
        return
    for row in rows:
        bytes_text = " ".join(f"{level} {error:+.0%}" for level, error in row["errors"].items())
        tile = row["tile"]
        said = ""
        if tile is not None:
            said = (
                f"tile {tile['named']} predicted {tile['predicted']}, "
                f"waves {tile['named_waves']:.0f} predicted {tile['predicted_waves']:.0f}"
            )
        print(f"{row['operator'][:70]:70} {bytes_text}; time {row['time']:+.0%}; {said}")
    print(json.dumps(figures, indent=1))
    print(f"asked: median error below {ASKED_ERROR:.0%}, {ASKED_EXACT:.0%} exact, all add up")


if __name__ == "__main__":
    main()
