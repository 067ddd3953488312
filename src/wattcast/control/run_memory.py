"""Remember what each setting of a kernel gave, what is believed of the kernel, and what keeps to a
power cap.

A ``RunMemory`` never changes: recording an observation makes a new one. Times are per unit of work
and everything is in logarithms, so a mean is a geometric mean and a difference is a ratio. The
levels tried along each knob are kept sorted (``KnobHistory``), so that a decision looks neighbours
up instead of searching for them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from operator import add, itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from wattcast.control.plants import KnobRole, Lattice, Observation, Settings, read_knob_facts

LogLevels = tuple[tuple[float, ...], ...]  # [knob][level]
_EMPTY: Mapping[Any, Any] = MappingProxyType({})


class SettingRecord(NamedTuple):
    """Hold the mean log time and log power over the runs of one setting."""

    runs: int
    log_time: float
    log_power: float


class KnobHistory(NamedTuple):
    """List the levels of one knob that were tried, by the levels of all other knobs.

    Under a cap it also keeps the exponents by which ``PowerCapCheck`` estimates power, from
    neighbours on any line."""

    levels: Mapping[Settings, tuple[int, ...]]
    pairs: Mapping[Settings, tuple[int, ...]]  # lines with two levels or more
    up: float = 0.0
    down: float = math.inf


class RunMemory(NamedTuple):
    """Hold all settings of one kernel tried so far, with the scatter of repeated runs."""

    seen: Mapping[Settings, SettingRecord] = _EMPTY
    runs: int = 0
    freedom: int = 0  # repeats, which are the degrees of freedom of the scatter
    time_scatter: float = 0.0  # sum of squares about the means, of log time
    power_scatter: float = 0.0
    knobs: tuple[KnobHistory, ...] = ()
    held: Mapping[Settings, Settings] = _EMPTY  # setting asked for -> setting a governor made of it

    def record(
        self,
        observation: Observation,
        effective: Settings | None = None,
        log_levels: LogLevels | None = None,
    ) -> RunMemory:
        """Return the memory with one more run.

        ``effective`` is the setting the card really ran at, where a governor held it below the one
        asked for. Both are then one state and share a record. With ``log_levels`` the histories
        learn how power rises."""
        log_time = log_time_per_work(observation)
        log_power = math.log(observation.power_w)
        held = self.held
        settings = observation.settings
        if effective is not None and effective != settings:
            held = {**held, settings: effective}
            settings = effective
        elif settings in held:  # the governor let go: the old record belongs to another state
            held = {asked: got for asked, got in held.items() if asked != settings}
        old = self.seen.get(settings) if settings not in self.held else None
        if old is None:
            new = SettingRecord(1, log_time, log_power)
            share = 0.0
            off_time = 0.0
            off_power = 0.0
        else:
            n = old.runs + 1
            off_time = log_time - old.log_time
            off_power = log_power - old.log_power
            new = SettingRecord(n, old.log_time + off_time / n, old.log_power + off_power / n)
            share = (n - 1) / n  # Welford's update of the sum of squares
        seen = {**self.seen, settings: new}
        knobs = self.knobs
        changed = [settings]
        if held:
            changed += [asked for asked, got in held.items() if got == settings]
            seen.update(dict.fromkeys(changed, new))
        for one in changed:
            was = self.seen.get(one)
            if was is None or (log_levels is not None and was.log_power != new.log_power):
                knobs = _note_setting(knobs, seen, one, log_levels)
        return RunMemory(
            seen,
            self.runs + 1,
            self.freedom + (old is not None),
            self.time_scatter + off_time * off_time * share,
            self.power_scatter + off_power * off_power * share,
            knobs,
            held,
        )

    def score_sigma(self, time_weight: float, prior: float) -> float:
        """Return the standard deviation of one run's score; ``prior`` counts as one repeat."""
        squares = prior * prior + time_weight * time_weight * self.time_scatter + self.power_scatter
        return math.sqrt(squares / (1 + self.freedom))

    def time_sigma(self, prior: float) -> float:
        """Return the standard deviation of one run's log time; ``prior`` counts as one repeat."""
        return math.sqrt((prior * prior + self.time_scatter) / (1 + self.freedom))

    def confirms(self, observation: Observation, within: float) -> bool:
        """Tell whether a run gave the time and power, in logs, that its setting gave before."""
        old = self.seen.get(observation.settings)
        if old is None:
            return False
        off_time = log_time_per_work(observation) - old.log_time
        return (
            abs(off_time) < within and abs(math.log(observation.power_w) - old.log_power) < within
        )

    def surprise(self, observation: Observation, prior: float) -> float:
        """Return how far, in log time, a run lies off its setting's mean; 0 where scatter explains
        it.
        """
        old = self.seen.get(observation.settings)
        if old is None:
            return 0.0
        off = abs(log_time_per_work(observation) - old.log_time)
        return off if off > 6.0 * self.time_sigma(prior) else 0.0


def log_time_per_work(observation: Observation) -> float:
    """Return the log of time per unit of work, as a difference of logs: a ratio of extreme numbers
    may overflow.
    """
    return math.log(observation.duration_s) - math.log(observation.work)


def _note_setting(
    knobs: tuple[KnobHistory, ...],
    seen: Mapping[Settings, SettingRecord],
    settings: Settings,
    log_levels: LogLevels | None,
) -> tuple[KnobHistory, ...]:
    """Return the histories with a setting that is new or whose power changed."""
    found = []
    for i, history in enumerate(knobs or (KnobHistory({}, {}),) * len(settings)):
        levels, pairs, up, down = history
        ahead = settings[:i]
        level = settings[i]
        behind = settings[i + 1 :]
        others = ahead + behind
        line = levels.get(others, ())
        if level not in line:
            line = (*line, level) if not line or level > line[-1] else tuple(sorted((*line, level)))
            levels = {**levels, others: line}
            if len(line) > 1:
                pairs = {**pairs, others: line}
        if log_levels is not None and len(line) > 1:
            logs = log_levels[i]
            power = seen[settings].log_power
            at = line.index(level)
            for near in (*line[max(at - 1, 0) : at], *line[at + 1 : at + 2]):
                slope = (seen[(*ahead, near, *behind)].log_power - power) / (
                    logs[near] - logs[level]
                )
                rise = max(slope, 0.0)
                up = max(up, STEEPER_RISE * rise + LEAST_EXPONENT)
                down = min(down, FALL_CREDIT * rise)
        found.append(KnobHistory(levels, pairs, up, down))
    return tuple(found)


class SensitivityBeliefs(NamedTuple):
    """Hold compute and bandwidth sensitivity, None where unknown, and how far they may be off."""

    compute: float | None
    bandwidth: float | None
    margin: float

    def sensitivity_to(self, role: KnobRole) -> float | None:
        """Return the sensitivity that covers a knob."""
        return self.compute if role.is_compute else self.bandwidth

    def bounds(self, role: KnobRole, has_units: bool) -> tuple[float, float]:
        """Return the lowest and highest sensitivity to a knob that the beliefs allow.

        Compute sensitivity is the mean of the sensitivities to units and to the clock. A kernel
        follows the clock at least as much as the units, because what runs on all units runs on the
        clock. So the clock's sensitivity lies between the mean and 1, and the units' between 2·mean
        - 1 and the mean."""
        mean = self.sensitivity_to(role)
        if mean is None:
            return 0.0, 1.0
        low = high = mean
        if role is KnobRole.COMPUTE_UNITS:
            low = 2.0 * mean - 1.0
        elif role is KnobRole.CORE_CLOCK and has_units:
            high = 2.0 * mean
        return max(low - self.margin, 0.0), min(high + self.margin, 1.0)


# Exponents of board power over a knob before anything was measured: the steepest rise to expect
# going up, and the flattest fall to count on going down. HD 7970, Titan X and A100 tables lie
# between, but for the A100's top clocks. A power limit is power where it binds and nothing where it
# does not.
_RISES = read_knob_facts("power_up")
_FALLS = read_knob_facts("power_down")
POWER_EXPONENTS = {role: (_RISES[role], _FALLS[role]) for role in KnobRole}
# the next rise may be this much steeper than the steepest seen
STEEPER_RISE = 1.1
LEAST_EXPONENT = 0.02
FALL_CREDIT = 0.9  # share of the flattest fall seen that a knob going down is credited with
OVERSHOOT = 1.1  # going down, aim this much below the cap, in logs
PARTS = 16  # steps from the present setting to the lowest, when looking for one below the cap


class PowerCapCheck:
    """Judge whether settings that were not run yet would keep to the power cap, from every setting
    that was.

    From a run setting, log power changes by an exponent times the change of each knob's log level.
    Going up, the exponent is a little more than the steepest rise seen along the knob; going down,
    a little less than the flattest. A *column* has an entry for every run setting, in the order of
    the memory: the log power that one level of one knob adds on the way from there. A setting is
    judged by adding one column per knob."""

    def __init__(self, lattice: Lattice, memory: RunMemory, log_cap: float) -> None:
        self._logs = lattice.log_levels
        self._seen = memory.seen
        self._log_cap = log_cap
        each = zip(memory.knobs, lattice.knobs, strict=True)
        self._exponents = [
            (h.up, h.down) if h.pairs else POWER_EXPONENTS[knob.role] for h, knob in each
        ]
        self._log_powers: list[float] = []
        self._levels: list[Settings] = []  # by knob: the level of every run setting
        self._columns: dict[tuple[int, int], list[float]] = {}  # by knob and level

    def permits(self, settings: Settings) -> bool:
        """Tell whether a setting keeps to the cap: it was run and did, or it is expected to from
        any run.
        """
        known = self._seen.get(settings)
        if known is not None:
            return known.log_power <= self._log_cap
        if not self._levels:
            self._levels = list(zip(*self._seen, strict=True))
            self._log_powers = list(map(itemgetter(2), self._seen.values()))
        columns = self._columns
        expected = iter(self._log_powers)
        for key in enumerate(settings):
            column = columns.get(key)
            if column is None:
                which, to = key
                logs, (up, down) = self._logs[which], self._exponents[which]
                column = [
                    (up if level < to else down) * (logs[to] - logs[level])
                    for level in self._levels[which]
                ]
                columns[key] = column
            expected = map(add, expected, column)
        return min(expected) <= self._log_cap

    def highest_level(self, settings: Settings, which: int) -> int:
        """Return the highest level of one knob that is expected to keep to the cap, from a setting
        that was run.
        """
        logs = self._logs[which]
        room = self._log_cap - self._seen[settings].log_power
        return bisect_right(logs, logs[settings[which]] + room / self._exponents[which][0]) - 1


def lower_below_cap(
    lattice: Lattice,
    seen: Mapping[Settings, SettingRecord],
    beliefs: SensitivityBeliefs | None,
    log_cap: float,
) -> Settings | None:
    """Choose the next try when every setting so far broke the cap; None when one keeps to it or
    nothing is left.

    All knobs go down together from the setting of least power, the farther the less they matter to
    the kernel."""
    start = min(seen, key=lambda s: seen[s].log_power)
    missing = seen[start].log_power - log_cap
    if missing <= 0 or start == lattice.bottom:
        return None
    known = [beliefs.sensitivity_to(knob.role) if beliefs else None for knob in lattice.knobs]
    loose = [1.1 - (0.5 if s is None else s) for s in known]
    weights = [w / max(loose) for w in loose]

    def lower_all(part: int) -> Settings:
        return tuple(
            [
                level - math.ceil(level * w * part / PARTS)
                for level, w in zip(start, weights, strict=True)
            ]
        )

    def is_enough(part: int) -> bool:
        to = lower_all(part)
        each = zip(lattice.knobs, lattice.log_levels, start, to, strict=True)
        fall = sum(
            [POWER_EXPONENTS[knob.role][1] * (logs[a] - logs[b]) for knob, logs, a, b in each]
        )
        return to != start and fall >= OVERSHOOT * missing

    to = lower_all(min(bisect_left(range(1, PARTS), True, key=is_enough) + 1, PARTS))
    return to if to != start else lattice.bottom
