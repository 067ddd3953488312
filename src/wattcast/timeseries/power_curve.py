"""Energy that GPUs have taken up to any moment, by part, and the time spent in each state.

A curve is linear between its moments, so it has exact values at every grid: a series is the
difference of the curve at neighbouring edges, and its sum is the energy of the run whatever the
grid. What repeats (the steps of a training job) is kept once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array

# What GPUs do: prompts, tokens, other work, exchanges, updates of weights, pauses of a job, a wait
# for the host or for other GPUs, and nothing.
STATES = (
    *("prefill", "decode", "compute", "exchange"),
    *("optimiser", "checkpoint", "waiting", "idle"),
)
StateCodes = npt.NDArray[np.int8]


def state_code(state: str) -> int:
    """Return the place of a state in ``STATES``.

    >>> state_code("decode")
    1
    """
    return STATES.index(state)


@dataclass(frozen=True)
class PowerCurve:
    """Joules and states of GPUs that draw alike, from moment 0 on.

    Before the first and after the last moment the GPUs idle.
    """

    moments_s: Array  # (moment,), from 0
    joules: Array  # (moment, part) of one GPU, up to each moment: 0 at the first
    states: StateCodes  # (moment - 1,) of each interval
    parts: tuple[str, ...]  # of the power, such as static and work
    idle_part_w: Array  # (part,) of one GPU
    gpus: int
    repeats: int = 1  # how often the curve is run through

    @property
    def length_s(self) -> float:
        """Seconds until the GPUs are idle for good."""
        return float(self.moments_s[-1]) * self.repeats

    def energy_until(self, times_s: Array) -> Array:
        """Return the joules of all GPUs by part up to each time, ``(time, part)``.

        They are negative for times before 0, so that differences are right there too.
        """
        turns, inside_s, outside_s = self._place(times_s)
        curve_j = turns[:, np.newaxis] * self.joules[-1]
        for place, part_j in enumerate(self.joules.T):
            curve_j[:, place] += np.interp(inside_s, self.moments_s, part_j)
        curve_j[times_s < 0.0] = 0.0  # also where the first piece takes no time
        idle_j = outside_s[:, np.newaxis] * self.idle_part_w
        return np.asarray(self.gpus * (curve_j + idle_j))

    def state_until(self, times_s: Array) -> Array:
        """Return the seconds of one GPU in each of ``STATES`` up to each time, ``(time, state)``."""
        turns, inside_s, outside_s = self._place(times_s)
        seconds = np.zeros((len(times_s), len(STATES)))
        spans_s = np.diff(self.moments_s)
        for code in np.unique(self.states).tolist():
            in_state_s = np.cumsum(np.where(self.states == code, spans_s, 0.0))
            so_far_s = np.concatenate([[0.0], in_state_s])
            here_s = np.interp(inside_s, self.moments_s, so_far_s)
            seconds[:, code] = turns * so_far_s[-1] + here_s
        seconds[:, state_code("idle")] += outside_s
        return seconds

    def _place(self, times_s: Array) -> tuple[Array, Array, Array]:
        """Return whole turns before each time, the time in the turn, and time outside the curve."""
        turn_s = float(self.moments_s[-1])
        within_s = np.clip(times_s, 0.0, self.length_s)
        outside_s = times_s - within_s
        if self.repeats == 1 or turn_s == 0.0:
            # turns that take no time are all run through at moment 0
            return np.full(len(times_s), self.repeats - 1.0), within_s, outside_s
        turns = np.floor(within_s / turn_s)
        inside_s = np.clip(within_s - turns * turn_s, 0.0, turn_s)
        return turns, inside_s, outside_s


def join_pieces(
    spans_s: Array,
    part_j: Array,
    states: StateCodes,
    parts: tuple[str, ...],
    idle_part_w: Array,
    gpus: int,
    repeats: int = 1,
) -> PowerCurve:
    """Return the curve of pieces that follow one another: their seconds and joules of one GPU."""
    moments_s = np.concatenate([[0.0], np.cumsum(spans_s)])
    so_far_j = np.concatenate([np.zeros((1, len(parts))), np.cumsum(part_j, axis=0)])
    return PowerCurve(
        moments_s,
        so_far_j,
        states,
        parts,
        idle_part_w,
        gpus,
        repeats,
    )
