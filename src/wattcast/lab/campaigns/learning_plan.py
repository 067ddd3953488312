"""Write a plan of kernels to learn energies from: measured in bursts, not yet sustained, and below
the power limit.

Run: ``python -m wattcast.lab.campaigns.learning_plan FILE [COUNT]``. A kernel that the limit holds
tells little of its energy and takes three times as long to measure. Since the plan is not a sample
of what the campaign draws, its rows are marked ``learning``: they are fitted to and never judged.
They come in the order of their ids, families mixed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from wattcast import hardware
from wattcast.calibrate.kernel_rows import parse_operators, read_plain_rows
from wattcast.core.measured_rows import Plain
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.kernels import RunCondition, build_kernels
from wattcast.kernels.kernel_table import IssueSegment
from wattcast.lab.campaigns.kernel_campaign import choose_sustained, write_listed
from wattcast.lab.campaigns.kernel_plan import OperatorSpec
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.governor import run_governed
from wattcast.predictor.pipeline import analyse_kernels

# in parts of the error of power that a family has, from held-out rows before this plan
SHARE = {
    "linear": 26,
    "bmm": 6,
    "conv2d": 21,
    "elementwise": 21,
    "attention": 9,
    "softmax": 8,
    "rmsnorm": 5,
}
SHARE |= {"layernorm": 4}
BELOW_W = 620.0


def main(to: str, count: int = 1500) -> None:
    """Write the plan."""
    gpu = hardware.load_gpu("h200")
    bundle = bundle_for(gpu)
    bundle = replace(bundle, launch=replace(bundle.launch, host_s_per_operator=0.0))
    plain = [row for row in read_plain_rows("h200") if row["kind"] in ("burst", "sustained")]
    measured_ids = {row["spec"] for row in plain if row["kind"] == "sustained"}
    specs = {}
    for row in plain:
        if row["error"] or row["spec"] in measured_ids:
            continue
        spec = _read_spec(row)
        if spec.id not in measured_ids:
            specs[spec.id] = spec
    places: dict[tuple[float, str], OperatorSpec] = {}  # by share of the family before it
    for family, share in SHARE.items():
        most = count * share // 100
        chosen = list[OperatorSpec]()
        for _, spec in sorted(specs.items()):
            if len(chosen) == most:
                break
            is_candidate = spec.family == family and choose_sustained(spec)
            if is_candidate and predict_power_w(spec, gpu, bundle) < BELOW_W:
                chosen.append(spec)
        for place, spec in enumerate(chosen):
            places[(place + 0.5) / len(chosen), family] = spec
        print(family, len(chosen))
    write_listed(Path(to), [(places[place], {}) for place in sorted(places)])


def _read_spec(row: Plain) -> OperatorSpec:
    operator = row["operator"]
    if row["family"] == "elementwise":
        operator = {
            **operator,
            "op": "elementwise",
            "function": operator["op"],
        }
    return OperatorSpec(
        row["family"],
        operator,
        row["layout"],
        row["rotated"],
        row["detail"] or {},
        "learning",
    )


def predict_power_w(
    spec: OperatorSpec,
    gpu: Gpu,
    bundle: Bundle,
) -> float:
    """Predict the power of an operator that runs without pause."""
    (op,) = parse_operators([spec.operator])
    condition = RunCondition(spec.layout, spec.rotated, str(spec.detail.get("backend") or ""))
    kernels = build_kernels(
        (op,),
        (condition,),
        gpu,
        bundle.reference,
        (IssueSegment(np.array([0]), np.ones(1), 1),),
    )
    timeline = analyse_kernels(kernels, gpu, bundle)
    return float(run_governed(timeline, gpu, OperatingPoint(), bundle)[0].asked_w)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
