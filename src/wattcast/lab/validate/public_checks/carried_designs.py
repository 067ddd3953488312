"""Judge the H200's physics on chips of other designs, by their published architecture alone.

A chip is forecast from the H200 with nothing fitted to it, and compared with public kernel tables.
Errors are by what differs: products, attention with many queries (prefill) and with one (decode).
Bursts of dense products that were throttled as they were measured are named and not judged.
Chips are ranked by the mean logarithm of time ratios over the shapes that two of them share;
Kendall's tau counts the pairs of chips in the right order less those in the wrong one, over all
pairs.
"""

from __future__ import annotations

import csv
import gzip
import itertools
from collections.abc import (
    Callable,
    Hashable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.calibrate.table_fit import (
    describe_work,
    forecast_tables_s,
    predict_tables_s,
)
from wattcast.calibrate.table_rows import read_tables
from wattcast.core import Dtype
from wattcast.core.arrays import Array
from wattcast.core.errors import BadInput
from wattcast.kernels import build_kernels
from wattcast.kernels.kernel_table import RunCondition
from wattcast.lab.validate.public_checks.throttled_bursts import find_throttled
from wattcast.predictor.bundle import bundle_for, forecast_bundle
from wattcast.predictor.pipeline import analyse_kernels
from wattcast.predictor.timeline import compute_effective_hz, compute_kernel_s
from wattcast.workload.engine_operators import BlockProduct

PARENT = "h200"
CARRIED_CHIPS = (
    "a100-sxm-80gb",
    "l40s",
    "b200",
    "h100-sxm",
    "b300",
    "gb200",
    "gb300",
    "rtx-pro-6000",
)
AMD_CHIP = "mi300x"
LONG_S = 1e-4  # of a kernel, from which on it is the chip that is judged and not a start
_LEAST_COMMON = 20  # shapes, from which on two chips are compared
_BF16 = ("products bf16", "attention prefill over bf16", "attention decode over bf16")


@dataclass(frozen=True)
class CarriedSet:
    """Kernels of one kind on one chip, predicted and measured."""

    chip: str
    work: str
    shapes: tuple[Hashable, ...]
    predicted_s: Array
    measured_s: Array

    def percent_error(self, least_s: float = 0.0) -> tuple[int, float, float, float]:
        """Return rows, mean and median absolute error and bias in percent, of kernels that long."""
        is_long = self.measured_s >= least_s
        ratio = self.predicted_s[is_long] / self.measured_s[is_long]
        error = 100.0 * np.abs(ratio - 1.0)
        bias = 100.0 * float(np.median(np.log(ratio)))
        return int(is_long.sum()), float(error.mean()), float(np.median(error)), bias


@dataclass(frozen=True)
class CarriedDesigns:
    """The errors of every chip and the ranking of all."""

    sets: tuple[CarriedSet, ...]
    pairs: tuple[dict[str, Any], ...]  # of chips: shapes, log ratios predicted and measured
    missing: tuple[str, ...]

    @property
    def tau(self) -> float | None:
        """Kendall's tau of the ranking; None where no two chips share shapes."""
        return find_tau(self.pairs)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each chip, kind of work and least length, all attention together
        last."""
        rows = []
        for some in (*self.sets, *pool_attention(self.sets)):
            for least_s in (0.0, LONG_S):
                if not (some.measured_s >= least_s).any():
                    continue
                count, mean, median, bias = some.percent_error(least_s)
                rows.append(
                    {
                        "chip": some.chip,
                        "work": some.work,
                        "least_s": least_s,
                        "rows": count,
                        "error_percent": mean,
                        "median_percent": median,
                        "bias_percent": bias,
                    }
                )
        return rows

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "parent": PARENT,
            "tau": self.tau,
            "errors": self.rows(),
            "pairs": list(self.pairs),
            "missing": list(self.missing),
        }


def pool_attention(sets: Sequence[CarriedSet]) -> list[CarriedSet]:
    """Return a set of all attention for each chip that has attention of several kinds."""
    pooled = []
    for chip in dict.fromkeys(some.chip for some in sets):
        attention = [x for x in sets if x.chip == chip and x.work.startswith("attention")]
        if len(attention) < 2:
            continue
        pooled.append(
            CarriedSet(
                chip,
                "attention, all of it",
                sum((x.shapes for x in attention), ()),
                np.concatenate([x.predicted_s for x in attention]),
                np.concatenate([x.measured_s for x in attention]),
            )
        )
    return pooled


def judge_carried_designs(folder: Path, tell: Callable[[str], None]) -> CarriedDesigns:
    """Judge every chip that the reference data has tables of."""
    sets: list[CarriedSet] = []
    missing = []
    for name in (*CARRIED_CHIPS, PARENT):
        tell(f"{name}: kernel tables")
        try:
            of_chip, note = _judge_chip(folder / "aiconfigurator", name)
        except BadInput as error:
            missing.append(f"{name}: {error}")
            continue
        sets += of_chip
        if note:
            missing.append(note)
    amd_table = folder / "aiter" / f"{AMD_CHIP}.gemm.csv.gz"
    if amd_table.is_file():
        sets.append(_judge_amd(amd_table))
    else:
        missing.append(f"{AMD_CHIP}: {amd_table.name} not found")
    missing.append("a10: no kernel table is public; its whole models are in `lab validate`")
    return CarriedDesigns(tuple(sets), tuple(compare_chips(sets)), tuple(missing))


def _judge_chip(folder: Path, name: str) -> tuple[list[CarriedSet], str]:
    """Judge the rows of one chip, without those that were throttled; return them and a note on the
    latter, empty where there are none.
    """
    chip = hardware.load_gpu(name)
    table = read_tables([folder], chip)
    work = np.array([describe_work(op) for op in table.rows.ops])
    table = table.select_rows(np.isin(work, _BF16))
    is_burst = table.rows.is_kind("burst")
    is_throttled = find_throttled(table)[is_burst]
    table = table.select_rows(is_burst)
    if name == PARENT:
        predicted_s = predict_tables_s(table, chip, bundle_for(chip))
    else:
        predicted_s = forecast_tables_s(table, chip, forecast_bundle(chip))
    measured_s = table.rows.column("latency_s")
    work = np.array([describe_work(op) for op in table.rows.ops])
    sets = []
    for kind in dict.fromkeys(work.tolist()):
        rows = np.flatnonzero((work == kind) & ~is_throttled)
        shapes = tuple((table.rows.ops[row], table.engine[row]) for row in rows.tolist())
        sets.append(
            CarriedSet(
                name,
                kind,
                shapes,
                predicted_s[rows],
                measured_s[rows],
            )
        )
    if not is_throttled.any():
        return sets, ""
    long = (work == work[is_throttled][0]) & (measured_s >= LONG_S)
    with_them = 100.0 * np.abs(predicted_s[long] / measured_s[long] - 1.0).mean()
    return sets, (
        f"{name}: {is_throttled.sum()} dense products whose bursts are slower than runs of a "
        f"second on a card of that name; with them those of 0.1 ms and longer are "
        f"{with_them:.1f} % off"
    )


def _judge_amd(path: Path) -> CarriedSet:
    """Judge the products in blocks of fp8 that AMD tuned, nearly all that its table of the MI300X
    has.

    They are the best of many kernels, where a forecast means what a library chooses by itself.
    """
    chip = hardware.load_gpu(AMD_CHIP)
    bundle = forecast_bundle(chip)
    ops = []
    seconds = []
    with gzip.open(path, "rt", encoding="utf-8", newline="") as stream:
        for line in csv.DictReader(stream):
            if line["format"] == "fp8_block" and line["b"] == "1":
                sizes = int(line["M"]), int(line["N"]), int(line["K"])
                ops.append(BlockProduct(*sizes, dtype=Dtype.FP8))
                seconds.append(1e-6 * float(line["us"]))
    conditions = (RunCondition(),) * len(ops)
    kernels = build_kernels(
        tuple(ops),
        conditions,
        chip,
        bundle.reference,
        (),
    )
    timeline = analyse_kernels(kernels, chip, bundle.for_bursts())
    top_hz = np.asarray(float(np.ravel(chip.clocks.max_hz)[0]))
    running_hz = compute_effective_hz(timeline, top_hz, bundle.for_bursts().clock_law)
    predicted_s = compute_kernel_s(timeline.phases, running_hz)
    work = "products fp8 in blocks"
    return CarriedSet(
        AMD_CHIP,
        work,
        tuple(ops),
        predicted_s,
        np.array(seconds),
    )


def compare_chips(sets: Sequence[CarriedSet]) -> list[dict[str, Any]]:
    """Compare every two chips on the shapes they share, products and attention apart."""
    by_kind: dict[str, dict[str, dict[Hashable, tuple[float, float]]]] = {}
    for some in sets:
        kind = some.work.split()[0]
        times = by_kind.setdefault(kind, {}).setdefault(some.chip, {})
        pairs = zip(some.predicted_s.tolist(), some.measured_s.tolist(), strict=True)
        for shape, pair in zip(some.shapes, pairs, strict=True):
            times.setdefault(shape, pair)
    compared = []
    for kind, chips in by_kind.items():
        for one, other in itertools.combinations(chips, 2):
            common = [shape for shape in chips[one] if shape in chips[other]]
            if len(common) < _LEAST_COMMON:
                continue
            ratios = np.array([_log_ratios(chips[one], chips[other], s) for s in common])
            predicted, measured = ratios.mean(axis=0).tolist()
            compared.append(
                {
                    "work": kind,
                    "chips": [one, other],
                    "shapes": len(common),
                    "predicted_log_ratio": predicted,
                    "measured_log_ratio": measured,
                }
            )
    return compared


def _log_ratios(
    one: Mapping[Hashable, tuple[float, float]],
    other: Mapping[Hashable, tuple[float, float]],
    shape: Hashable,
) -> tuple[float, float]:
    predicted = np.log(one[shape][0] / other[shape][0])
    measured = np.log(one[shape][1] / other[shape][1])
    return float(predicted), float(measured)


def find_tau(pairs: Sequence[Mapping[str, Any]]) -> float | None:
    """Return Kendall's tau of pairs of chips: right orders less wrong ones, over all.

    >>> find_tau([{"predicted_log_ratio": 0.1, "measured_log_ratio": 0.3}])
    1.0
    """
    if not pairs:
        return None
    products = [pair["predicted_log_ratio"] * pair["measured_log_ratio"] for pair in pairs]
    return float(np.mean(np.sign(products)))
