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
NO_SLOPES: Mapping[Settings, tuple[float, float]] = MappingProxyType({})
LogLevels = tuple[tuple[float, ...], ...]  # [knob][level]
NOWHERE: Mapping[Settings, Settings] = MappingProxyType({})


class Seen(NamedTuple):
    """Mean log time and log power over the runs of one setting."""

    runs: int
    log_time: float
    log_power: float


class Lane(NamedTuple):
    """What was tried along one knob, by the settings of all other knobs.

    Under a cap also how fast power rises between neighbours, in logs: on each line at most and at least, and on all.
    """

    levels: Mapping[Settings, Levels]
    pairs: Mapping[Settings, Levels]  # of two levels or more
    slopes: Mapping[Settings, tuple[float, float]] = NO_SLOPES  # of pairs
    steepest: float = -math.inf
    flattest: float = math.inf


class Ledger(NamedTuple):
    """All settings tried so far, with the scatter of repeated runs."""

    seen: Mapping[Settings, Seen] = NOTHING
    runs: int = 0
    freedom: int = 0  # repeats: degrees of freedom of the scatter
    time_scatter: float = 0.0  # sum of squares about the means, of log time
    power_scatter: float = 0.0
    lanes: tuple[Lane, ...] = ()  # by knob
    held: Mapping[Settings, Settings] = NOWHERE  # setting -> what the card made of it

    def record(
        self, observation: Observation, effective: Settings | None = None, log_levels: LogLevels | None = None
    ) -> Ledger:
        """The ledger with one more run.

        ``effective`` are the settings the card really ran at where a governor held it below those asked for:
        both are one state, and share what is known of it. With ``log_levels`` the lanes know how power rises.
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
        seen, lanes, changed = {**self.seen, at: new}, self.lanes, [at]
        if at not in self.seen:
            lanes = _with(lanes, at)
        if held:
            same = [asked for asked, got in held.items() if got == at]
            for asked in same:
                lanes = lanes if asked in seen else _with(lanes, asked)
            seen.update(dict.fromkeys(same, new))
            changed = [at, *same]
        if log_levels is not None and (old is None or held or new.log_power != old.log_power):
            for one in changed:
                lanes = _rising(lanes, seen, one, log_levels)
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
    found = []
    for i, (levels, pairs, slopes, steepest, flattest) in enumerate(lanes or (Lane({}, {}),) * len(at)):
        others, level = at[:i] + at[i + 1 :], at[i]
        known = levels.get(others)
        if known is None:
            found.append(Lane({**levels, others: (level,)}, pairs, slopes, steepest, flattest))
        else:
            more = tuple(sorted((*known, level)))
            found.append(Lane({**levels, others: more}, {**pairs, others: more}, slopes, steepest, flattest))
    return tuple(found)


def _rising(
    lanes: tuple[Lane, ...], seen: Mapping[Settings, Seen], at: Settings, log_levels: LogLevels
) -> tuple[Lane, ...]:
    """The lanes with the exponents of power on the lines through a setting, whose power is new."""
    found = []
    for i, lane in enumerate(lanes):
        ahead, behind = at[:i], at[i + 1 :]
        others = ahead + behind
        levels = lane.pairs.get(others)
        if levels is not None:
            slopes, logs = [], log_levels[i]
            low, p = levels[0], seen[(*ahead, levels[0], *behind)].log_power
            for high in levels[1:]:
                q = seen[(*ahead, high, *behind)].log_power
                slopes.append((q - p) / (logs[high] - logs[low]))
                low, p = high, q
            lane = _with_slopes(lane, others, (max(slopes), min(slopes)))
        found.append(lane)
    return tuple(found)


def _with_slopes(lane: Lane, others: Settings, new: tuple[float, float]) -> Lane:
    """The lane with the slopes of one line; all are looked through only where it may have lost an extreme."""
    old = lane.slopes.get(others)
    if old == new:
        return lane
    slopes = {**lane.slopes, others: new}
    if old is None or (new[0] >= old[0] and new[1] <= old[1]):
        return Lane(lane.levels, lane.pairs, slopes, max(lane.steepest, new[0]), min(lane.flattest, new[1]))
    steep, flat = zip(*slopes.values(), strict=True)
    return Lane(lane.levels, lane.pairs, slopes, max(steep), min(flat))


def log_time_of(observation: Observation) -> float:
    """Log of time per unit of work; a difference of logs, as a ratio of extreme numbers may not be one."""
    return math.log(observation.duration_s) - math.log(observation.work)
