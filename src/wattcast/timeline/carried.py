"""Learned factors carried to a chip they were not fitted on.

A kernel that is the same program on both chips keeps what the scaffold left over on the first. Trees and
processes are asked about the shape as it looked there (its fill of the last wave, its share of L2), so they
answer inside what they were fitted on; families without a model keep the scaffold's word.

A kernel that was slower there than the scaffold says is so on the chip: a factor above 1 scales its cycles, and is no
business of another chip's memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from wattcast.arrays import Array
from wattcast.kernels import Kernels
from wattcast.kernels.lower import work_of
from wattcast.kernels.table import Memo
from wattcast.timeline.residual import Residuals


@dataclass(frozen=True)
class Carried(Residuals):
    """Learned factors of another chip, ``reference``; only the families it has models for are looked at."""

    def factors(self, kernels: Kernels, corrections: Array) -> tuple[Array, Array, Array]:
        """Factor on time and on energy of each kernel, ``(kernel,)``, and nearness."""
        known, learners = {*self.time, *self.energy}, kernels.work.learner
        rows = [i for i, name in enumerate(learners) if name in known and self._has(kernels.pipe_event[i])]
        time, energy = np.ones(len(kernels.ops)), np.ones(len(kernels.ops))
        near = np.full((2, len(kernels.ops)), np.nan)
        if not rows:
            return time, energy, near
        ops = tuple(kernels.ops[i] for i in rows)
        kept = self._kept.get(Memo(ops, tuple(kernels.conditions[i] for i in rows)))
        if kept is not None:
            time[rows], energy[rows], near[:, rows] = kept
            return time, energy, near
        some = kernels.at(np.array(rows), ops)
        some = replace(some, work=work_of(some.ops, some.conditions, some.pipe_event, self.reference))
        time[rows], energy[rows], near[:, rows] = super().factors(some, corrections[rows])
        return time, energy, near

    def off_chip(self, time: Array) -> Array:
        """Seconds of device memory are scaled down by what was learned, never up."""
        return np.minimum(time, 1.0)

    def _has(self, event: str) -> bool:
        return event in self.reference.per_cycle
