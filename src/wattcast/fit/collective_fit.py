"""Fit the laws of collectives to public tables of measured ones.

A table is a CSV file of NCCL timings in the public form of aiconfigurator: ``op_name``, ``nccl_dtype``, ``num_gpus``,
``message_size`` in elements, ``latency`` in milliseconds. Tables stay outside the project.
"""

from __future__ import annotations

import csv
import zlib
from dataclasses import dataclass
from pathlib import Path

from wattcast.core.errors import bad_value

KINDS = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter"} | {
    "alltoall": "all_to_all"
}
_ELEMENT_BYTE = {"half": 2, "int8": 1}


@dataclass(frozen=True)
class CollectiveTiming:
    """One measured collective: its buffer as nccl-tests counts it, and seconds a call."""

    kind: str
    byte: int
    gpus: int
    dtype: str
    latency_s: float

    @property
    def held_out(self) -> bool:
        """Whether the row judges and never fits: the crc32 of ``kind,gpus,byte`` is odd, on every card and format."""
        return zlib.crc32(f"{self.kind},{self.gpus},{self.byte}".encode()) % 2 == 1


def read_collective_table(path: Path) -> list[CollectiveTiming]:
    """Return the rows of a table of collectives."""
    rows = []
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            kind, dtype = KINDS.get(line["op_name"]), line["nccl_dtype"]
            if kind is None or dtype not in _ELEMENT_BYTE:
                raise bad_value(path.name, f"ops {', '.join(KINDS)} in {', '.join(_ELEMENT_BYTE)}", f"{line}")
            byte = int(line["message_size"]) * _ELEMENT_BYTE[dtype]
            rows.append(CollectiveTiming(kind, byte, int(line["num_gpus"]), dtype, float(line["latency"]) * 1e-3))
    return rows
