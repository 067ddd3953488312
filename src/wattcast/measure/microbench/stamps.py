"""Cycles and the true clock of a launch, from what every block wrote down at its begin and end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wattcast.errors import Refused
from wattcast.measure.microbench.unit import STAMP_WORDS


@dataclass(frozen=True)
class Cycles:
    """Of one launch."""

    per_sm: float  # median over multiprocessors: from its first block's begin to its last one's end
    clock_hz: float  # median over blocks: cycles over nanoseconds
    active_sms: int
    blocks_per_sm: float  # mean over the multiprocessors that had any


def read_stamps(words: npt.NDArray[np.uint64]) -> Cycles:
    """Stamps of all blocks; refused when some block did not run to its end."""
    table = words.reshape(-1, STAMP_WORDS).astype(np.int64)
    sm, begin, end, begin_ns, end_ns = table.T
    if not ((end > begin) & (end_ns > begin_ns)).all():
        raise Refused(f"{int((end <= begin).sum())} of {len(table)} blocks did not write their begin and end.")
    order = np.unique(sm)
    spans = np.array([end[sm == s].max() - begin[sm == s].min() for s in order], dtype=float)
    counts = np.array([(sm == s).sum() for s in order], dtype=float)
    clock_hz = np.median((end - begin) / (end_ns - begin_ns)) * 1e9
    return Cycles(float(np.median(spans)), float(clock_hz), len(order), float(counts.mean()))
