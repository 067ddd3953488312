"""The controller's own constants, in one place, with what each was chosen on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wattcast.manage.knobs import Knob, Lattice, Role, Settings
from wattcast.manage.sensitivity import Bin

# Coarse step: level of each knob by bin (low, medium, high), as a share of its highest level. The paper calls
# its own values "empirically fixed" and does not print them.
COARSE = {
    Role.COMPUTE_UNITS: (0.625, 0.875, 1.0),
    Role.CORE_CLOCK: (1.0, 1.0, 1.0),
    Role.MEMORY_CLOCK: (0.6, 0.85, 1.0),
}
COARSE_CLOCK_ALONE = (0.85, 0.95, 1.0)  # of the core clock on a card without a unit knob


@dataclass(frozen=True)
class Tuning:
    """Constants of the controller. Docs (method/manage.md) say what they were tuned on."""

    probe_change: float = 0.08  # a fine step changes a knob by about this much
    sense_change: float = 0.09  # the sensing step changes the core clock by at least this much
    resolution: float = 0.02  # settings closer than this are not told apart
    worth: float = 0.003  # a step must promise this much of the score
    polish: float = 0.05  # the smallest step is tried where it cannot cost more than this
    margin: float = 0.15  # predicted sensitivities may be off by this
    measured_margin: float = 0.20  # sensitivity to memory inferred from that to the core clock, likewise
    prior_sigma: float = 0.002  # scatter of a score before any repeat is seen
    confident: float = 1.5  # standard errors at which two settings are told apart
    quick_runs: int = 2  # runs of a close rival before the search goes on
    rival_runs: int = 4  # runs of a close rival at most
    default_runs: int = 10  # runs of the default settings at most, while a gain over them is in doubt
    verified: float = 1.3  # standard errors by which a setting must beat the default to replace it
    risky_ratio: float = 1.5  # a knob lowered by more than this in one step may cost more than it can save
    budget: float = 0.01  # share of the objective that risky probes may cost
    surprise: float = 0.10  # log change of time at unchanged settings that is taken for a new phase
    patience: int = 2  # surprises, or unusable observations, in a row before acting on them
    rest: int = 8  # runs a settled kernel is left alone between two looks at the ledger
    coarse: Mapping[Role, tuple[float, float, float]] = field(default_factory=lambda: COARSE)

    def stride(self, knob: Knob, level: int, down: bool) -> int:
        """Levels of a fine step: the fewest that change the knob by about ``probe_change``."""
        return _levels(knob, level, down, 0.75 * self.probe_change)

    def sense(self, knob: Knob, level: int) -> int:
        """Levels of the sensing step, downwards."""
        return _levels(knob, level, True, self.sense_change)

    def finest(self, knob: Knob, level: int, down: bool) -> int:
        """Levels of the smallest step worth telling apart."""
        return _levels(knob, level, down, self.resolution)

    def coarse_target(self, lattice: Lattice, compute: Bin, bandwidth: Bin) -> Settings:
        """SetCU_Freq_MemBW of Algorithm 1: all knobs at once, by bin."""
        alone = lattice.index(Role.COMPUTE_UNITS) is None
        levels = []
        for knob in lattice.knobs:
            shares = COARSE_CLOCK_ALONE if alone and knob.role is Role.CORE_CLOCK else self.coarse[knob.role]
            wanted = shares[compute if knob.role.is_compute else bandwidth] * knob.levels[-1]
            levels.append(next(i for i, v in enumerate(knob.levels) if v >= wanted * (1 - 1e-9)))
        return tuple(levels)


def _levels(knob: Knob, level: int, down: bool, change: float) -> int:
    here, step = knob.levels[level], -1 if down else 1
    to = level + step
    while 0 < to < len(knob.levels) - 1 and abs(knob.levels[to] / here - 1.0) < change:
        to += step
    return abs(to - level)
