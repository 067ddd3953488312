"""Collectives: bytes over links and messages in sequence, by the ring algorithms NCCL uses.

Unverified: no multi-GPU run has been measured yet, and the predictions say so.
"""

from __future__ import annotations

from wattcast.workload.graph import Collective


def link_work(op: Collective) -> tuple[float, float]:
    """Bytes each GPU sends and the number of messages in sequence.

    Ring algorithms over p GPUs on a buffer of S bytes [Thakur2005]: all-reduce sends 2·S·(p-1)/p in
    2·(p-1) steps; all-gather, reduce-scatter and all-to-all S·(p-1)/p in p-1 steps (S is the whole
    buffer); a send moves S in one.

    >>> link_work(Collective("all_reduce", 800, 8))
    (1400.0, 14.0)
    """
    size, gpus = float(op.bytes), op.gpus
    if op.collective == "send":
        return size, 1.0
    share = size * (gpus - 1) / gpus
    steps = float(gpus - 1)
    return (2.0 * share, 2.0 * steps) if op.collective == "all_reduce" else (share, steps)
