"""The controller's memory of one kernel: what each setting gave, and how much two runs of the same setting differ.

Nothing in it changes; recording an observation makes a new ledger (tuples, as that happens at every decision).
Times are per unit of work and everything is in logarithms, so that a mean is a geometric mean and a difference is
a ratio. What was tried along each knob is kept sorted (``lanes``), so that a decision looks neighbours up instead
of searching for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from wattcast.manage.knobs import Settings
from wattcast.manage.observation import Observation

NOTHING: Mapping[Settings, Seen] = MappingProxyType({})
Levels = tuple[int, ...]  # of one knob, ascending
NOWHERE: Mapping[Settings, Settings] = MappingProxyType({})


class Seen(NamedTuple):
    """Mean log time and log power over the runs of one setting."""

    runs: int
    log_time: float
    log_power: float


class Lane(NamedTuple):
    """What was tried along one knob: levels by the settings of all other knobs, and those of two levels or more."""

    levels: Mapping[Settings, Levels]
    pairs: Mapping[Settings, Levels]

    def tried(self, others: Settings, level: int) -> Lane:
        """The lane with one more setting."""
        known = self.levels.get(others)
        if known is None:
            return Lane({**self.levels, others: (level,)}, self.pairs)
        more = tuple(sorted((*known, level)))
        return Lane({**self.levels, others: more}, {**self.pairs, others: more})


class Ledger(NamedTuple):
    """All settings tried so far, with the scatter of repeated runs."""

    seen: Mapping[Settings, Seen] = NOTHING
    runs: int = 0
    freedom: int = 0  # repeats: degrees of freedom of the scatter
    time_scatter: float = 0.0  # sum of squares about the means, of log time
    power_scatter: float = 0.0
    lanes: tuple[Lane, ...] = ()  # by knob
    held: Mapping[Settings, Settings] = NOWHERE  # setting -> what the card made of it

    def record(self, observation: Observation, effective: Settings | None = None) -> Ledger:
        """The ledger with one more run.

        ``effective`` are the settings the card really ran at where a governor held it below those asked for:
        both are one state, and share what is known of it.
        """
        log_time = log_time_of(observation)
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

    def confirms(self, observation: Observation, within: float) -> bool:
        """Whether a run gave the time and power, in logs, that its setting gave before."""
        old = self.seen.get(observation.settings)
        if old is None:
            return False
        off_time = log_time_of(observation) - old.log_time
        return abs(off_time) < within and abs(math.log(observation.power_w) - old.log_power) < within

    def surprise(self, observation: Observation, prior: float) -> float:
        """How far, in log time, a run is off the mean of its setting; 0 where the setting is new."""
        old = self.seen.get(observation.settings)
        if old is None:
            return 0.0
        off = abs(log_time_of(observation) - old.log_time)
        return off if off > 6.0 * self.time_sigma(prior) else 0.0


def _with(lanes: tuple[Lane, ...], at: Settings) -> tuple[Lane, ...]:
    """The lanes with one more setting."""
    known = lanes or (Lane({}, {}),) * len(at)
    return tuple([lane.tried(at[:i] + at[i + 1 :], at[i]) for i, lane in enumerate(known)])


def log_time_of(observation: Observation) -> float:
    """Log of time per unit of work; a difference of logs, as a ratio of extreme numbers may not be one."""
    return math.log(observation.duration_s) - math.log(observation.work)
