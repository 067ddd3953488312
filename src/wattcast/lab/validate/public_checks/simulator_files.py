"""Judge the AccelWattch files of ``lab accelwattch`` by measured watts, one card after another.

A file holds energies of AccelWattch's counters. Its watts are compared with measured ones at the
measured time, so that errors of time stay out:

- **Quadro GV100**: 25 kernels of AccelWattch's public validation. Accesses to memories are hardware
  counters; instructions and units follow from the watts that AccelWattch published of them, over
  its public energies. An access of a tensor core is a step of 8 x 8 x 4 there and a product of
  16 x 8 x 16 here, so that the four kernels with tensor cores are left out.
- **A100, A10**: published whole models (EnergAIzer).
- **B200**: served models of ML.ENERGY that moved no energy of the card.

Public runs of whole models have no counters. Theirs are predicted: events by ``predict``, and the
counters of an event as 128 counted operators of the H200 have them (least squares on relative
watts). ``predicted_counts_control`` says how far off the H200's own file is that way, on operators
that were held out.

No row decides anything in a file that it judges. Run:
``python -m wattcast.lab.validate.public_checks.simulator_files --reference FOLDER``; ``--write``
renews ``gpuwattch/judged_files.yaml``, which the files' headers quote.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from wattcast.calibrate.kernel_rows import parse_operators, read_condition
from wattcast.core.arrays import Array, Mask
from wattcast.core.row_tables import database_folder
from wattcast.core.whole_files import write_whole
from wattcast.hardware import load_gpu
from wattcast.kernels import build_kernels
from wattcast.kernels.kernel_table import IssueSegment
from wattcast.lab.fit.served_evidence import served_evidence
from wattcast.lab.fit.served_rows import GPU as SERVED_GPU
from wattcast.lab.fit.served_rows import read_served_rows, select_half
from wattcast.lab.gpuwattch import measured_energies
from wattcast.lab.gpuwattch.judged_files import FileJudgement, format_judgements
from wattcast.lab.gpuwattch.measured_energies import (
    ACTIVE,
    CONSTANT,
    PARENT,
    TERMS,
    MeasuredChip,
    is_held_out,
    judge_held_out,
    measured_chip,
)
from wattcast.lab.module_commands import require_measurements, run_module
from wattcast.lab.validate.public_checks.published_runs import (
    PUBLISHED_GPU,
    PublishedRun,
    clean_runs,
    read_other_gpus,
    read_published_runs,
)
from wattcast.power.module_power import as_module_power
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.kernel_phases import count_events
from wattcast.predictor.pipeline import analyse_graph

VOLTA = "quadro-gv100"
VOLTA_HZ = 1447e6  # at which AccelWattch's authors measured
_VOLTA_SMS = 80.0
# Events of a prediction from which counters follow. Tensor flop are those of 16 bits.
EVENTS = (
    *("cuda_fp32_flop", "sfu_op", "shared_byte", "l2_byte"),
    *("tensor_fp16_flop", "dram_read_byte", "dram_write_byte"),
)
# Time of other formats on tensor cores over that of 16 bits
_FORMATS = {"tensor_tf32_flop": 2.0, "tensor_fp8_flop": 0.5, "tensor_fp4_flop": 0.25}
_ON_CHIP = EVENTS[:5]
# Which events a counter follows; the others follow all work on the chip
_CAUSES: dict[str, Sequence[str]] = {
    "DPU_ACC": (),
    "FP_EXP_ACC": ("sfu_op",),
    "TENSOR_ACC": ("tensor_fp16_flop",),
    "SHRD_ACC": ("shared_byte",),
    "NOC_A": ("l2_byte",),
    "L2_RH": ("l2_byte",),
    "MEM_RD": ("dram_read_byte",),
    "MEM_WR": ("dram_write_byte",),
}
# Units of AccelWattch whose published watts tell accesses, by our term: component and counter
_VOLTA_UNITS = {
    "TOT_INST": (("IBP", "TOT_INST"),),
    "INT_ACC": (("INTP", "INT_ACC"),),
    "FPU_ACC": (("FPUP", "FPU_ACC"), ("INT_MULP", "INT_MUL_ACC"), ("FP_MULP", "FP_MUL_ACC")),
    "DPU_ACC": (("DPUP", "DPU_ACC"), ("DP_MULP", "DP_MUL_ACC")),
    "FP_EXP_ACC": (
        *(("FP_SQRTP", "FP_SQRT_ACC"), ("FP_LGP", "FP_LG_ACC")),
        *(("FP_SINP", "FP_SIN_ACC"), ("FP_EXP", "FP_EXP_ACC")),
    ),
    "TENSOR_ACC": (("TENSORP", "TENSOR_ACC"),),
}
_VOLTA_COUNTERS = {
    "SHRD_ACC": ("SHRD_ACC",),
    "DC_RH": ("L1_RH", "L1_RM", "L1_WH", "L1_WM", "CC_ACC"),
    "NOC_A": ("NOC",),
    "L2_RH": ("L2_RH", "L2_RM", "L2_WH", "L2_WM"),
    "MEM_RD": ("DRAM_Rd",),
    "MEM_WR": ("DRAM_Wr",),
}


@dataclass(frozen=True)
class JudgedRates:
    """Measured runs with the rate of each term's counter, ``(row, term)`` per second."""

    power_w: Array
    rate: Array
    active: Array  # share of SMs at work
    relative_voltage: Array

    def file_power_w(self, chip: MeasuredChip) -> Array:
        """Return the watts of each run by a card's file."""
        energy_j = np.array([chip.values[name].value for name in TERMS])
        exponent = np.array([term.exponent for term in TERMS.values()])
        voltage = self.relative_voltage[:, np.newaxis]
        counted_w = (energy_j * voltage**exponent * self.rate).sum(axis=1)
        active_w = chip.values[ACTIVE].value * self.active * self.relative_voltage
        return np.asarray(chip.values[CONSTANT].value + active_w + counted_w)

    def judge(
        self,
        chip: MeasuredChip,
        label: FileJudgement,
    ) -> FileJudgement:
        """Return the label with the error of the card's file on these runs."""
        off = 100.0 * (self.file_power_w(chip) / self.power_w - 1.0)
        return replace(
            label,
            rows=len(off),
            mape=round(float(np.abs(off).mean()), 1),
            bias=round(float(off.mean()), 1),
        )


def judge_files(reference: Path) -> Iterator[FileJudgement]:
    """Yield the error of every file that measured watts can judge."""
    held_out = judge_held_out(database_folder(PARENT))
    assert held_out.mape is not None
    yield FileJudgement(
        gpu=PARENT,
        card="H200",
        rows_of=f"{held_out.operators} operators of this card that no fit saw",
        counts="counted by Nsight Compute",
        rows=held_out.rows,
        mape=round(held_out.mape, 1),
        bias=round(held_out.bias, 1),
        has_own_watts=True,
    )
    yield read_volta_kernels(reference).judge(
        measured_chip(VOLTA),
        FileJudgement(
            gpu=VOLTA,
            card="Quadro GV100",
            rows_of="kernels without tensor cores of AccelWattch's public validation",
            counts="hardware counters, and units by AccelWattch's published watts",
        ),
    )
    yield from _judge_whole_models(reference)
    yield from _judge_b200(reference)


def read_volta_kernels(reference: Path, with_tensor_cores: bool = False) -> JudgedRates:
    """Return AccelWattch's public kernels on a Quadro GV100, those with tensor cores or others."""
    folder = require_measurements(reference / "accelwattch")
    energies = {
        row["counter"]: float(row["effective_energy_J_per_count"] or 0.0)
        for row in _read_rows(folder / "coefficients" / "accelwattch_sass_hw.csv")
    }
    rows = _read_rows(folder / "volta_hw_counters_power_components.csv")

    def column(name: str) -> Array:
        return np.array([float(row[name]) for row in rows])

    seconds = column("hw_Elapsed_Cycles") / VOLTA_HZ
    rate_of = {
        term: sum(column(f"accelwattch_HW_{part}") / energies[counter] for part, counter in units)
        for term, units in _VOLTA_UNITS.items()
    }
    for term, counters in _VOLTA_COUNTERS.items():
        rate_of[term] = sum(column(f"hw_{name}") for name in counters) / seconds
    uses_tensor = np.asarray(rate_of["TENSOR_ACC"]) > 0.0
    chosen = uses_tensor == with_tensor_cores
    voltage = float(np.squeeze(measured_chip(VOLTA).voltage.level_at(VOLTA_HZ)))
    return JudgedRates(
        power_w=column("hw_total_W")[chosen],
        rate=np.stack([rate_of[name] for name in TERMS], axis=1)[chosen],
        active=(1.0 - column("hw_Num_Idle_SMs") / _VOLTA_SMS)[chosen],
        relative_voltage=np.full(int(chosen.sum()), voltage),
    )


def _read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def _judge_whole_models(reference: Path) -> Iterator[FileJudgement]:
    """Yield the errors of the A100's and the A10's file on published whole models."""
    require_measurements(reference / "energaizer")
    a100 = FileJudgement(
        gpu=PUBLISHED_GPU,
        card="A100 PCIe 40 GB",
        rows_of="published whole models (EnergAIzer) at 900 MHz",
        counts="predicted",
    )
    at_900 = clean_runs(read_published_runs(reference, "900"))
    clocks = clean_runs(read_published_runs(reference, "clocks"))
    judged = {
        a100: at_900,
        replace(a100, rows_of="published whole models (EnergAIzer) at other clocks"): clocks,
        replace(a100, gpu="a10", card="A10"): read_other_gpus(reference)["a10"],
    }
    for label, runs in judged.items():
        chip = measured_chip(label.gpu)
        yield _predict_rates(runs, chip).judge(chip, label)


def _predict_rates(runs: Sequence[PublishedRun], chip: MeasuredChip) -> JudgedRates:
    """Return published runs with predicted counters, at their measured time."""
    gpu = load_gpu(chip.name)
    bundle = bundle_for(gpu)
    counters = fit_counters_of_events()
    counts_of_graph: dict[int, Array] = {}
    rates = []
    for run in runs:
        key = id(run.graph)
        if key not in counts_of_graph:
            timeline = analyse_graph(run.graph, gpu, bundle)
            events = dict(zip(timeline.events, timeline.total.tolist(), strict=True))
            counts_of_graph[key] = counters @ _list_events(events)
        rates.append(counts_of_graph[key] / run.latency_s)
    clock_hz = np.array([run.clock_hz for run in runs], dtype=np.float64)
    return JudgedRates(
        power_w=np.array([run.power_w for run in runs], dtype=np.float64),
        rate=np.array(rates),
        active=np.ones(len(runs)),
        relative_voltage=np.asarray(chip.voltage.level_at(clock_hz)),
    )


def _judge_b200(reference: Path) -> Iterator[FileJudgement]:
    """Yield the errors of the B200's file on served models, and without any watt of the card."""
    require_measurements(reference / "mlenergy")
    gpu = load_gpu(SERVED_GPU)
    bundle = bundle_for(gpu)
    rows = select_half(read_served_rows(reference), False)
    evidence = served_evidence(rows, gpu, bundle)
    energy_j = as_module_power(bundle.power).energy_j
    counters = fit_counters_of_events()
    rates = []
    for item in evidence:
        watts = item.module_w
        # a step's joules by module; tensor cores at 16 bits, device memory at reads
        events = {
            "cuda_fp32_flop": watts["cuda"] / energy_j["cuda_fp32_flop"],
            "sfu_op": watts["sfu"] / energy_j["sfu_op"],
            "shared_byte": watts["shared"] / energy_j["shared_byte"],
            "l2_byte": watts["l2"] / energy_j["l2_byte"],
            "tensor_fp16_flop": watts["tensor"] / energy_j["tensor_fp16_flop"],
            "dram_read_byte": watts["dram"] / energy_j["dram_read_byte"],
        }
        rates.append(counters @ _list_events(events))
    judged = JudgedRates(
        power_w=np.array([item.measured_w for item in evidence]),
        rate=np.array(rates),
        active=np.ones(len(evidence)),
        relative_voltage=np.ones(len(evidence)),
    )
    label = FileJudgement(
        gpu=SERVED_GPU,
        card="B200",
        rows_of="runs of served models (ML.ENERGY) that moved no energy of the card",
        counts="predicted",
        has_own_watts=True,
    )
    yield judged.judge(measured_chip(SERVED_GPU), label)
    without = replace(label, card="B200 without its own watts", has_own_watts=False)
    yield judged.judge(measured_energies.forecast_chip(SERVED_GPU), without)


def _list_events(events: Mapping[str, float]) -> Array:
    """Return the events that counters follow, in their order."""
    tensor = events.get("tensor_fp16_flop", 0.0)
    for name, weight in _FORMATS.items():
        tensor += weight * events.get(name, 0.0)
    values = {name: events.get(name, 0.0) for name in EVENTS} | {"tensor_fp16_flop": tensor}
    return np.array(list(values.values()))


@dataclass(frozen=True)
class _CountedOperators:
    """Operators of the H200 with their counters, and the events that ``predict`` gives them."""

    launches: measured_energies.CountedLaunches
    events: Array  # (row, event)
    usual: Mask  # whether products, if it has any, are of 16 bits on tensor cores
    held_out: Mask


@cache
def _read_counted_operators() -> _CountedOperators:
    """Read the counted operators of the H200's database."""
    folder = database_folder(PARENT)
    gpu = load_gpu(PARENT)
    reference = bundle_for(gpu).reference
    segment = IssueSegment(np.array([0]), np.array([1.0]), 1)
    events, usual = [], []
    for row, _ in measured_energies.counted_rows(folder):
        (op,) = parse_operators([row["operator"]])
        kernels = build_kernels((op,), (read_condition(row),), gpu, reference, (segment,))
        names, value = count_events(kernels)
        counts = dict(zip(names, value.sum(axis=0).tolist(), strict=True))
        events.append(_list_events(counts))
        is_product = op.kind in ("linear", "bmm", "conv2d", "attention")
        in_other_format = any(counts.get(name, 0.0) > 0.0 for name in _FORMATS)
        on_tensor_cores = counts["tensor_fp16_flop"] > 0.0
        usual.append(not in_other_format and (on_tensor_cores or not is_product))
    launches = measured_energies.read_operators(folder)
    held_out = np.array([is_held_out(name) for name in launches.names])
    return _CountedOperators(launches, np.array(events), np.array(usual), held_out)


@cache
def fit_counters_of_events() -> Array:
    """Return the counts of each term for an event, ``(term, event)``, of the H200's operators.

    Least squares on the watts of the counter over those of the operator, coefficients of zero or
    more, on operators that the energies were fitted to. A sector of device memory is 32 bytes."""
    from scipy.optimize import nnls

    operators = _read_counted_operators()
    training = ~operators.held_out & operators.usual
    launches = operators.launches.select(training)
    events = operators.events[training]
    chip = measured_chip(PARENT)
    counts_per_event = np.zeros((len(TERMS), len(EVENTS)))
    for place, name in enumerate(TERMS):
        causes = [EVENTS.index(event) for event in _CAUSES.get(name, _ON_CHIP)]
        if not causes:
            continue
        watts_share = chip.values[name].value / launches.duration_s / launches.power_w
        design = events[:, causes] * watts_share[:, np.newaxis]
        scale = design.max(axis=0)
        scale[scale <= 0.0] = 1.0
        solved = nnls(design / scale, launches.counts[:, place] * watts_share)[0]
        counts_per_event[place, causes] = solved / scale
    return counts_per_event


def predicted_counts_control() -> FileJudgement:
    """Judge the H200's own file with predicted counters, on operators that no fit saw."""
    operators = _read_counted_operators()
    chosen = operators.held_out & operators.usual
    launches = operators.launches.select(chosen)
    counts = operators.events[chosen] @ fit_counters_of_events().T
    rates = JudgedRates(
        power_w=launches.power_w,
        rate=counts / launches.duration_s[:, np.newaxis],
        active=launches.active,
        relative_voltage=launches.relative_voltage,
    )
    label = FileJudgement(
        gpu=PARENT,
        card="H200 with predicted counters",
        rows_of="operators of 16 bits of this card that no fit saw",
        counts="predicted",
        has_own_watts=True,
    )
    return rates.judge(measured_chip(PARENT), label)


def main() -> None:
    """Print a line for each judgement, and write them where asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reference", type=Path, required=True, help="folder of public rows")
    parser.add_argument("--write", action="store_true", help="renew gpuwattch/judged_files.yaml")
    options = parser.parse_args()
    judgements = [*judge_files(options.reference), predicted_counts_control()]
    for item in judgements:
        print(
            f"{item.card:30} {item.rows:4} {item.mape:5.1f} % (bias {item.bias:+.1f} %) {item.rows_of}"
        )
    if options.write:
        folder = Path(measured_energies.__file__).parent
        write_whole(folder / "judged_files.yaml", format_judgements(judgements).encode())


if __name__ == "__main__":
    run_module(main)
