"""Ledger rows of collectives against public tables of NCCL timings, which stay outside the project.

A table is a CSV file in the public form of aiconfigurator: ``op_name``, ``nccl_dtype``,
``num_gpus``, ``message_size`` in elements, ``latency`` in milliseconds. Run: ``wattcast lab
validate`` in the repository (WATTCAST_REFERENCE names the measurements)."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.calibrate.scoring import LedgerRow, make_ledger_row
from wattcast.core import Dtype
from wattcast.core.arrays import Array
from wattcast.core.errors import bad_value
from wattcast.hardware import Gpu, load_gpu
from wattcast.lab.validate.public_checks.published_commands import (
    AMD,
    ask_amd_rows,
    list_errors,
)
from wattcast.lab.validate.typed_commands import judge_rows
from wattcast.predictor.link_laws import (
    CollectiveRows,
    LinkLaw,
    collective_s,
    load_laws,
    mean_law,
    nccl_protocol_s,
)
from wattcast.workload.operator_types import Collective

SET = "collectives, public tables"
CARDS = {
    "a100_sxm": "a100-sxm-80gb",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "l40s": "l40s",
}
KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
} | {"alltoall": "all_to_all"}
_ELEMENT_BYTE = {"half": 2, "int8": 1}
_NUMBER_FORMATS = {"half": Dtype.FP16, "int8": Dtype.INT8}
_SMALLEST = 1024
_LARGEST = 2**30
# what stood here before: 5 us to start, 5 us a message of a ring, bytes over the link's rate
_RING_START_S = _RING_STEP_S = 5e-6


@dataclass(frozen=True)
class CollectiveTiming:
    """One measured collective: its buffer as nccl-tests counts it, and seconds a call."""

    kind: str
    byte: int
    gpus: int
    dtype: str
    latency_s: float

    def crc(self, salt: str = "") -> int:
        """Return the hash of the shape, the same on every card and in every number format."""
        return zlib.crc32(f"{salt}{self.kind},{self.gpus},{self.byte}".encode())

    @property
    def held_out(self) -> bool:
        """Whether the row judges and never fits: the crc32 of ``kind,gpus,byte`` is odd."""
        return self.crc() % 2 == 1

    @property
    def judged(self) -> bool:
        """Whether the size is one that users' collectives have: 1 KiB to 1 GiB."""
        return _SMALLEST <= self.byte <= _LARGEST


def read_collective_table(path: Path) -> list[CollectiveTiming]:
    """Return the rows of a table of collectives."""
    rows = []
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            kind = KINDS.get(line["op_name"])
            dtype = line["nccl_dtype"]
            if kind is None or dtype not in _ELEMENT_BYTE:
                raise bad_value(
                    path.name, f"ops {', '.join(KINDS)} in {', '.join(_ELEMENT_BYTE)}", f"{line}"
                )
            byte = int(line["message_size"]) * _ELEMENT_BYTE[dtype]
            rows.append(
                CollectiveTiming(
                    kind,
                    byte,
                    int(line["num_gpus"]),
                    dtype,
                    float(line["latency"]) * 1e-3,
                )
            )
    return rows


def as_rows(timings: Sequence[CollectiveTiming], multicast: bool) -> CollectiveRows:
    """Return the shapes of timings as columns; NVLS adds up floating-point numbers alone."""
    kind = np.array([row.kind for row in timings])
    return CollectiveRows(
        np.array([row.byte for row in timings], dtype=np.float64),
        np.array([row.gpus for row in timings], dtype=np.float64),
        kind == "all_reduce",
        kind == "all_to_all",
        np.array([multicast and row.dtype == "half" for row in timings]),
    )


def collective_rows(reference: Path) -> list[LedgerRow]:
    """Return errors on held-out rows of each card, with its own law and with a law carried over
    from other cards.
    """
    laws = load_laws()
    rows = []
    for stem, name in CARDS.items():
        paths = sorted((reference / "aiconfigurator").glob(f"{stem}.nccl-*.csv"))
        if not paths:
            continue
        timings = [row for row in read_collective_table(paths[-1]) if row.held_out and row.judged]
        gpu = load_gpu(name)
        own_law = laws.links.get(gpu.architecture, laws.pcie)
        other_laws = [
            law for architecture, law in laws.links.items() if architecture != gpu.architecture
        ]
        carried = mean_law(other_laws)
        if own_law.nvls_share is None:
            carried = replace(carried, nvls_share=None, nvls_start_s=None)
        true_s = np.array([row.latency_s for row in timings])
        floor = _errors(_ring_s(timings, gpu), true_s)
        for label, law, goals in (
            ("held-out shapes", own_law, (15.0, 8.0)),
            ("card left out, law of the other cards", carried, (None, None)),
        ):
            error = _errors(_law_s(law, timings, gpu), true_s)
            rows.append(
                make_ledger_row(
                    SET,
                    f"{name}, {label}, median",
                    len(timings),
                    float(np.median(error)),
                    float(np.median(floor)),
                    None,
                    *goals,
                    p90=round(float(np.quantile(error, 0.9)), 1),
                    p90_floor=round(float(np.quantile(floor, 0.9)), 1),
                )
            )
    return rows


# cards with tables of their own whose laws were fitted to another card of their architecture
CARRIED = {"h100_sxm": "h100-sxm", "gb200": "gb200"}


def judge_carried_laws(reference: Path) -> dict[str, tuple[int, float, float]]:
    """Return rows, median and 90th percentile of errors on cards that no law was fitted to.

    Every row judges: the H100 takes the law of the H200, the GB200 that of the B200.
    """
    errors = {}
    for stem, name in CARRIED.items():
        paths = sorted((reference / "aiconfigurator").glob(f"{stem}.nccl-*.csv*"))
        if not paths:
            continue
        timings = [row for row in read_collective_table(paths[-1]) if row.judged]
        ops = [
            Collective(row.kind, row.byte, row.gpus, dtype=_NUMBER_FORMATS[row.dtype])
            for row in timings
        ]
        true_s = np.array([row.latency_s for row in timings])
        error = _errors(collective_s(ops, load_gpu(name)), true_s)
        errors[name] = len(timings), float(np.median(error)), float(np.quantile(error, 0.9))
    return errors


def public_rows() -> list[LedgerRow]:
    """Return errors on figures that people published, none of which was used in fitting:
    collectives, then AMD.
    """
    rows = []
    with (
        Path(__file__)
        .with_name("public_collectives.csv")
        .open(encoding="utf-8", newline="") as file
    ):
        lines = list(csv.DictReader(file))
    for name in dict.fromkeys(line["set"] for line in lines):
        some = [line for line in lines if line["set"] == name]
        ops = [
            Collective(
                line["kind"], int(line["byte"]), int(line["gpus"]), software=line["software"]
            )
            for line in some
        ]
        error = _errors(
            collective_s(ops, load_gpu(some[0]["gpu"])),
            np.array([float(o["latency_us"]) for o in some]) * 1e-6,
        )
        more: dict[str, Any] = {"p90": round(float(np.quantile(error, 0.9)), 1)}
        rows.append(
            make_ledger_row(
                "collectives, published",
                name,
                len(some),
                float(np.median(error)),
                **more,
            )
        )
    amd_rows = ask_amd_rows()
    error = np.array(list_errors(amd_rows, judge_rows(amd_rows), "latency"))
    what = "MI300X, Llama 3.1 70B fp8 over 8 GPUs, 128 tokens in, 2048 out, batch 1 to 4: latency"
    return [*rows, make_ledger_row(AMD, what, len(amd_rows), float(np.mean(error)))]


def _link_rate(gpu: Gpu) -> Array:
    both_ways = gpu.links.nvlink_byte_per_s
    return 0.5 * np.asarray(gpu.need("links.pcie_byte_per_s") if both_ways is None else both_ways)


def _law_s(
    law: LinkLaw,
    timings: Sequence[CollectiveTiming],
    gpu: Gpu,
) -> Array:
    return np.asarray(nccl_protocol_s(law, as_rows(timings, True), _link_rate(gpu)).min(axis=0))


def _ring_s(timings: Sequence[CollectiveTiming], gpu: Gpu) -> Array:
    """Return the floor: rings that wait as long for every message as nobody does."""
    rows = as_rows(timings, multicast=False)
    sent_s = rows.byte / rows.gpus * rows.steps / _link_rate(gpu)
    return np.asarray(_RING_START_S + rows.steps * _RING_STEP_S + sent_s)


def _errors(found_s: Array, true_s: Array) -> Array:
    return np.asarray(100.0 * np.abs(found_s / true_s - 1.0))
