"""Predicted DRAM, L2 and shared-memory bytes against the profiler's counters of the same operators."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.arrays import Array
from wattcast.fit import kernels_data
from wattcast.fitted import bundle_for
from wattcast.kernels import kernels_of
from wattcast.kernels.work import COUNTED
from wattcast.records import COUNTERS_FILE, database_folder, read_table
from wattcast.timeline.phases import counts
from wattcast.validate.rows import Row, row

_BANK_BYTE = 4.0  # a bank of shared memory and L1 is 4 bytes wide
_LEAST_BYTE = 1e5  # less than this is noise of the profiler and of what L2 happened to hold


def counter_rows(gpu: str) -> list[Row]:
    """Median ratio and correlation of logarithms at each level of memory."""
    measured = _measured(gpu)
    rows = kernels_data.load(gpu)
    first = {spec: i for i, spec in reversed(list(enumerate(rows.spec)))}
    specs = [spec for spec in measured if spec in first]
    chip = hardware.load(gpu)
    ops = tuple(rows.ops[first[s]] for s in specs)
    conditions = [replace(rows.conditions[first[s]], rotated=COUNTED) for s in specs]
    kernels = kernels_of(ops, conditions, chip, bundle_for(chip).reference, ())
    events, value = counts(kernels)
    dram = value[:, events.index("dram_read_byte")] + value[:, events.index("dram_write_byte")]
    predicted = {
        "DRAM": dram,
        "L2": value[:, events.index("l2_byte")],
        "shared": value[:, events.index("shared_byte")],
    }
    return [_row(gpu, name, found, np.array([measured[s][name] for s in specs])) for name, found in predicted.items()]


def _measured(gpu: str) -> dict[str, dict[str, float]]:
    """Bytes of each operator: the sum over the kernels of one call."""
    total: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for kernel in read_table(database_folder(gpu) / COUNTERS_FILE):
        of = total[kernel["spec"]]
        of["DRAM"] += kernel["dram__bytes_read_sum"] + kernel["dram__bytes_write_sum"]
        # what crosses between SMs and L2; the L2's own count also has what its two halves send one another
        of["L2"] += kernel["l1tex__m_xbar2l1tex_read_bytes_sum"] + kernel["l1tex__m_l1tex2xbar_write_bytes_sum"]
        banks = kernel["l1tex__data_bank_reads_sum"] + kernel["l1tex__data_bank_writes_sum"]
        of["shared"] += _BANK_BYTE * banks
    return total


def _row(gpu: str, name: str, predicted: Array, measured: Array) -> Row:
    at = (measured > _LEAST_BYTE) & (predicted > _LEAST_BYTE)
    ratio = predicted[at] / measured[at]
    r = float(np.corrcoef(np.log(predicted[at]), np.log(measured[at]))[0, 1]) if at.sum() > 2 else float("nan")
    more: dict[str, Any] = {
        "median_ratio": round(float(np.median(ratio)), 3),
        "r_of_logs": round(r, 4),
        "wanted": [0.95, 1.05],
        "left_out": int((~at).sum()),
    }
    error = float(100 * np.mean(np.abs(ratio - 1)))
    return row(f"{gpu} counters", f"{name} bytes", int(at.sum()), error, **more)
