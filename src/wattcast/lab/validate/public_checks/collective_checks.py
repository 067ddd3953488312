"""Judge predicted times of collectives (all-reduce and others) by what others measured.

Two sources give rows of the accuracy ledger (the table that ``wattcast lab validate`` writes to
docs/accuracy.md):

- ``collective_rows``: tables of NCCL timings that NVIDIA publishes with aiconfigurator. They lie
  outside the project, in ``aiconfigurator/`` of the folder that the environment variable
  WATTCAST_REFERENCE names, one CSV file a card: ``op_name``, ``nccl_dtype``, ``num_gpus``,
  ``message_size`` in elements, ``latency`` in milliseconds. Half of the rows of four cards fitted
  the laws of links (``collective_laws.py``); the other half, chosen by a hash, judges them here.
- ``published_collective_rows``: single figures that people published, in
  ``public_collectives.csv`` beside this file. Nothing was fitted to them.

Cards whose tables came after the laws are judged in ``newer_tables.py``. An error is the absolute
difference from the measured time in percent of it."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wattcast.calibrate.scoring import LedgerRow, make_ledger_row
from wattcast.core import Dtype
from wattcast.core.arrays import Array
from wattcast.core.errors import bad_value
from wattcast.hardware import Gpu, load_gpu
from wattcast.predictor.link_laws import (
    CollectiveRows,
    LinkLaw,
    collective_s,
    load_laws,
    mean_law,
    nccl_protocol_s,
)
from wattcast.workload.operator_types import Collective

TABLE_SET = "collectives, public tables"  # the ledger's name of what the tables judge
PUBLISHED_SET = "collectives, published"
# beginning of a table's file name -> the card in the catalogue; a law was fitted to each of them
CARDS = {
    "a100_sxm": "a100-sxm-80gb",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "l40s": "l40s",
}
# a table's name of a collective -> ours
KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
# a table's name of a number format -> ours; other formats are refused
NUMBER_FORMATS = {"half": Dtype.FP16, "int8": Dtype.INT8}
# inference moves an activation or a part of it at a time, KiB to MiB; training gradients up to GiB
_SMALLEST_BYTE = 1024
_LARGEST_BYTE = 2**30
# The predictor's first model, a ring whose start and whose every step take 5 us (a guess of ours,
# never measured), is kept as what the laws have to beat.
_RING_START_S = 5e-6
_RING_STEP_S = 5e-6
_MEDIAN_GOAL_PERCENT = 15.0  # "must" of the ledger for cards that a law was fitted to
_MEDIAN_AIM_PERCENT = 8.0


@dataclass(frozen=True)
class CollectiveTiming:
    """One measured collective: the bytes of its buffer, and seconds a call.

    The buffer is what nccl-tests calls the size: the larger one of what a GPU gives and what it
    gets. In an all-gather it is the whole of all GPUs' parts, in a reduce-scatter too.
    """

    kind: str
    byte: int
    gpus: int
    dtype: Dtype
    latency_s: float

    def crc(self, salt: str = "") -> int:
        """Return the hash of the shape, the same on every card and in every number format.

        Another ``salt`` gives another division of the rows: the fit makes its folds by one.
        """
        return zlib.crc32(f"{salt}{self.kind},{self.gpus},{self.byte}".encode())

    @property
    def held_out(self) -> bool:
        """Whether the row judges and was never fitted to: the crc32 of ``kind,gpus,byte`` is odd.

        The fit (``collective_laws.py``) takes the rows where it is even.
        """
        return self.crc() % 2 == 1

    @property
    def judged(self) -> bool:
        """Whether the buffer has 1 KiB to 1 GiB, the sizes that the laws are for."""
        return _SMALLEST_BYTE <= self.byte <= _LARGEST_BYTE


def newest_table(folder: Path, stem: str) -> Path | None:
    """Return the table of a card by the latest version of NCCL, or None where there is none.

    Names are ``STEM.nccl-VERSION.csv`` or ``.csv.gz``; 2.27 is later than 2.9.
    """
    tables = list(folder.glob(f"{stem}.nccl-*.csv*"))
    return max(tables, key=_read_version, default=None)


def _read_version(table: Path) -> tuple[int, ...]:
    version = table.name.partition(".nccl-")[2].partition(".csv")[0]
    return tuple(int(part) for part in version.split("."))


def read_collective_table(path: Path) -> list[CollectiveTiming]:
    """Return the rows of a table of collectives, which may be compressed (``.gz``)."""
    rows = []
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            kind = KINDS.get(line["op_name"])
            dtype = NUMBER_FORMATS.get(line["nccl_dtype"])
            if kind is None or dtype is None:
                raise bad_value(
                    path.name, f"ops {', '.join(KINDS)} in {', '.join(NUMBER_FORMATS)}", f"{line}"
                )
            byte = int(line["message_size"]) * dtype.byte
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


def as_rows(timings: Sequence[CollectiveTiming]) -> CollectiveRows:
    """Return the shapes of timings as columns.

    A switch that adds up (NVLS) does so for floating-point numbers alone, so rows of integers may
    not take it; a law without NVLS does not look at that column.
    """
    kind = np.array([row.kind for row in timings])
    return CollectiveRows(
        byte=np.array([row.byte for row in timings], dtype=np.float64),
        gpus=np.array([row.gpus for row in timings], dtype=np.float64),
        all_reduce=kind == "all_reduce",
        peers=kind == "all_to_all",
        multicast=np.array([row.dtype is Dtype.FP16 for row in timings]),
    )


def as_operators(timings: Sequence[CollectiveTiming]) -> list[Collective]:
    """Return timings as operators, as a prediction of a model has them."""
    return [Collective(row.kind, row.byte, row.gpus, dtype=row.dtype) for row in timings]


def collective_rows(reference: Path) -> list[LedgerRow]:
    """Return two ledger rows of each card whose table is here: errors of the law that was fitted to
    the card's other rows, and of a law that saw nothing of the card.

    Both are errors on held-out shapes, beside those of the first model, the column ``floor``.
    """
    rows = []
    for stem, name in CARDS.items():
        table = newest_table(reference / "aiconfigurator", stem)
        if table is None:
            continue
        timings = [row for row in read_collective_table(table) if row.held_out and row.judged]
        gpu = load_gpu(name)
        own_law, carried_law = _choose_laws(gpu)
        measured_s = np.array([row.latency_s for row in timings])
        floor = percent_errors(_ring_s(timings, gpu), measured_s)
        rows.append(
            _make_row(
                f"{name}, held-out shapes, median",
                percent_errors(_law_s(own_law, timings, gpu), measured_s),
                floor,
                must=_MEDIAN_GOAL_PERCENT,
                aim=_MEDIAN_AIM_PERCENT,
            )
        )
        rows.append(
            _make_row(
                f"{name}, card left out, law of the other cards, median",
                percent_errors(_law_s(carried_law, timings, gpu), measured_s),
                floor,
            )
        )
    return rows


def _choose_laws(gpu: Gpu) -> tuple[LinkLaw, LinkLaw]:
    """Return the law of a card's links, and the law it would have if it had never been timed.

    There is a law of NVLink for each architecture, and one of PCIe, fitted to the L40S alone. The
    second law is the geometric mean of all NVLink laws but the card's own. The L40S, which has no
    NVLink, is the only card with PCIe here, so the NVLink laws are all that is left for it, and
    they are far off. Whether the switch adds up is a property of the card, not of what was timed:
    a card without NVLS gets none from the mean.
    """
    laws = load_laws()
    own = laws.links.get(gpu.architecture, laws.pcie)
    carried = mean_law(
        [law for architecture, law in laws.links.items() if architecture != gpu.architecture]
    )
    if own.nvls_share is None:
        carried = replace(carried, nvls_share=None, nvls_start_s=None)
    return own, carried


def _make_row(
    quantity: str,
    error: Array,
    floor: Array,
    must: float | None = None,
    aim: float | None = None,
) -> LedgerRow:
    """Return a ledger row of errors in percent: their median and 90th percentile."""
    return make_ledger_row(
        TABLE_SET,
        quantity,
        n=len(error),
        mape=float(np.median(error)),
        floor=float(np.median(floor)),
        must=must,
        aim=aim,
        p90=round(float(np.quantile(error, 0.9)), 1),
        p90_floor=round(float(np.quantile(floor, 0.9)), 1),
    )


def published_collective_rows() -> list[LedgerRow]:
    """Return a ledger row of each set of published figures, predicted as a model's collectives are.

    ``software`` says whose kernel ran: ``nccl``, or ``engine`` for a serving engine's own.
    """
    with (
        Path(__file__)
        .with_name("public_collectives.csv")
        .open(encoding="utf-8", newline="") as file
    ):
        lines = list(csv.DictReader(file))
    rows = []
    for name in dict.fromkeys(line["set"] for line in lines):
        of_set = [line for line in lines if line["set"] == name]
        ops = [
            Collective(
                line["kind"],
                int(line["byte"]),
                int(line["gpus"]),
                software=line["software"],
            )
            for line in of_set
        ]
        measured_s = np.array([float(line["latency_us"]) for line in of_set]) * 1e-6
        error = percent_errors(collective_s(ops, load_gpu(of_set[0]["gpu"])), measured_s)
        rows.append(
            make_ledger_row(
                PUBLISHED_SET,
                name,
                n=len(of_set),
                mape=float(np.median(error)),
                p90=round(float(np.quantile(error, 0.9)), 1),
            )
        )
    return rows


def _link_rate(gpu: Gpu) -> Array:
    """Return bytes a second of a card's links in one direction.

    The catalogue adds up both directions, of NVLink and of PCIe.
    """
    both_ways = gpu.links.nvlink_byte_per_s
    if both_ways is None:
        both_ways = gpu.need("links.pcie_byte_per_s")
    return 0.5 * np.asarray(both_ways)


def _law_s(
    law: LinkLaw,
    timings: Sequence[CollectiveTiming],
    gpu: Gpu,
) -> Array:
    """Return the seconds by a law: those of the protocol that is fastest for each row."""
    protocol_s = nccl_protocol_s(law, as_rows(timings), _link_rate(gpu))  # (protocol, row)
    return np.asarray(protocol_s.min(axis=0))


def _ring_s(timings: Sequence[CollectiveTiming], gpu: Gpu) -> Array:
    """Return the seconds by the first model: t = 5 us + s * 5 us + (S / n) * s / B.

    s is the number of steps of a ring over n GPUs, S the buffer, B the rate of the links. NCCL
    takes about 1 us a step over NVLink, so small collectives come out far too slow.
    """
    rows = as_rows(timings)
    sent_s = rows.byte / rows.gpus * rows.steps / _link_rate(gpu)
    return np.asarray(_RING_START_S + rows.steps * _RING_STEP_S + sent_s)


def percent_errors(predicted_s: Array, measured_s: Array) -> Array:
    """Return the absolute error of each time in percent of the measured one."""
    return np.asarray(100.0 * np.abs(predicted_s / measured_s - 1.0))
