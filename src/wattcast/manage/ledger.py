"""The controller's memory of one kernel: what each setting gave, and how much two runs of the same setting differ.

Frozen values only; recording an observation makes a new ledger. Times are per unit of work and everything is
in logarithms, so that a mean is a geometric mean and a difference is a ratio. What was tried along each knob is
kept sorted (``lanes``), so that a decision looks neighbours up instead of searching for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from wattcast.manage.knobs import Settings
from wattcast.manage.observation import Observation

NOTHING: Mapping[Settings, Seen] = MappingProxyType({})
Lanes = tuple[Mapping[Settings, tuple[int, ...]], ...]  # [knob][settings of all other knobs] -> levels tried
NOWHERE: Mapping[Settings, Settings] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Seen:
    """Mean log time and log power over the runs of one setting."""

    runs: int
    log_time: float
    log_power: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """All settings tried so far, with the scatter of repeated runs."""

    seen: Mapping[Settings, Seen] = field(default_factory=lambda: NOTHING)
    runs: int = 0
    freedom: int = 0  # repeats: degrees of freedom of the scatter
    time_scatter: float = 0.0  # sum of squares about the means, of log time
    power_scatter: float = 0.0
    lanes: Lanes = ()
    held: Mapping[Settings, Settings] = field(default_factory=lambda: NOWHERE)  # setting -> what the card made of it

    def record(self, observation: Observation, effective: Settings | None = None) -> Ledger:
        """The ledger with one more run.

        ``effective`` are the settings the card really ran at where a governor held it below those asked for:
        both are one state, and share what is known of it.
        """
        log_time = math.log(observation.duration_s / observation.work)
        log_power = math.log(observation.power_w)
        held, at = self.held, observation.settings
        if effective is not None and effective != at:
            held = {**held, at: effective}
            at = effective
        elif at in held:  # no longer: what was known of it belongs to another state
            held = {asked: got for asked, got in held.items() if asked != at}
        old = self.seen.get(at) if at not in self.held else None
        if old is None:
            new, share, off_time, off_power = Seen(1, log_time, log_power), 0.0, 0.0, 0.0
        else:
            n = old.runs + 1
            off_time, off_power = log_time - old.log_time, log_power - old.log_power
            new = Seen(n, old.log_time + off_time / n, old.log_power + off_power / n)
            share = (n - 1) / n  # Welford's update of the sum of squares
        seen, lanes = {**self.seen, at: new}, self.lanes
        if at not in self.seen:
            lanes = _with(lanes, at)
        if held:
            same = [asked for asked, got in held.items() if got == at]
            for asked in same:
                lanes = lanes if asked in seen else _with(lanes, asked)
            seen.update(dict.fromkeys(same, new))
        return Ledger(
            seen,
            self.runs + 1,
            self.freedom + (old is not None),
            self.time_scatter + off_time * off_time * share,
            self.power_scatter + off_power * off_power * share,
            lanes,
            held,
        )

    def sigma(self, time_weight: float, prior: float) -> float:
        """Standard deviation of one run's score; ``prior`` counts as one repeat."""
        squares = prior * prior + time_weight * time_weight * self.time_scatter + self.power_scatter
        return math.sqrt(squares / (1 + self.freedom))

    def time_sigma(self, prior: float) -> float:
        """Standard deviation of one run's log time."""
        return math.sqrt((prior * prior + self.time_scatter) / (1 + self.freedom))

    def surprise(self, observation: Observation, prior: float) -> float:
        """How far, in log time, a run is off the mean of its setting; 0 where the setting is new."""
        old = self.seen.get(observation.settings)
        if old is None:
            return 0.0
        off = abs(math.log(observation.duration_s / observation.work) - old.log_time)
        return off if off > 6.0 * self.time_sigma(prior) else 0.0


def _with(lanes: Lanes, at: Settings) -> Lanes:
    """The lanes with one more setting."""
    found = []
    for which, lane in enumerate(lanes or ({},) * len(at)):
        others = at[:which] + at[which + 1 :]
        found.append({**lane, others: tuple(sorted((*lane.get(others, ()), at[which])))})
    return tuple(found)
