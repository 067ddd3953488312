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

from wattcast.control.controller_coefficients import CONTROLLER
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
        held = self._note_effective(observation.settings, effective)
        settings = held.get(observation.settings, observation.settings)

        # Welford's update of the means and of the sums of squares about them. A setting that a
        # governor held until now has a record that belongs to another state.
        old = self.seen.get(settings) if settings not in self.held else None
        if old is None:
            new = SettingRecord(1, log_time, log_power)
            share = 0.0
            off_time = 0.0
            off_power = 0.0
        else:
            runs = old.runs + 1
            share = old.runs / runs
            off_time = log_time - old.log_time
            off_power = log_power - old.log_power
            new_time = old.log_time + off_time / runs
            new = SettingRecord(runs, new_time, old.log_power + off_power / runs)

        # All settings of one state share the record.
        changed = [settings]
        if held:
            changed += [asked for asked, state in held.items() if state == settings]
        seen = {**self.seen, **dict.fromkeys(changed, new)}
        knobs = self.knobs
        for each_settings in changed:
            before = self.seen.get(each_settings)
            has_new_power = before is None or before.log_power != new.log_power
            if before is None or (log_levels is not None and has_new_power):
                knobs = _note_setting(knobs, seen, each_settings, log_levels)
        return RunMemory(
            seen,
            self.runs + 1,
            self.freedom + (old is not None),
            self.time_scatter + off_time * off_time * share,
            self.power_scatter + off_power * off_power * share,
            knobs,
            held,
        )

    def _note_effective(
        self, settings: Settings, effective: Settings | None
    ) -> Mapping[Settings, Settings]:
        """Return which settings a governor makes of others, with those of the latest run."""
        if effective is not None and effective != settings:
            return {**self.held, settings: effective}
        if settings in self.held:  # the governor let go
            return {asked: state for asked, state in self.held.items() if asked != settings}
        return self.held

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
        off_time = abs(log_time_per_work(observation) - old.log_time)
        off_power = abs(math.log(observation.power_w) - old.log_power)
        return off_time < within and off_power < within

    def surprise(self, observation: Observation, prior: float) -> float:
        """Return how far, in log time, a run lies off its setting's mean; 0 where scatter explains
        it.
        """
        old = self.seen.get(observation.settings)
        if old is None:
            return 0.0
        off_time = abs(log_time_per_work(observation) - old.log_time)
        return off_time if off_time > CONTROLLER.surprise_sigmas * self.time_sigma(prior) else 0.0


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
    histories = []
    for which, history in enumerate(knobs or (KnobHistory({}, {}),) * len(settings)):
        levels, pairs, up, down = history
        level = settings[which]
        others = settings[:which] + settings[which + 1 :]
        line = levels.get(others, ())
        if level not in line:
            line = tuple(sorted((*line, level)))
            levels = {**levels, others: line}
            if len(line) > 1:
                pairs = {**pairs, others: line}
        if log_levels is not None and len(line) > 1:
            for slope in _list_slopes(seen, settings, which, line, log_levels[which]):
                rise = max(slope, 0.0)
                up = max(up, CONTROLLER.steeper_rise * rise + CONTROLLER.least_exponent)
                down = min(down, CONTROLLER.fall_credit * rise)
        histories.append(KnobHistory(levels, pairs, up, down))
    return tuple(histories)


def _list_slopes(
    seen: Mapping[Settings, SettingRecord],
    settings: Settings,
    which: int,
    line: tuple[int, ...],
    logs: tuple[float, ...],
) -> list[float]:
    """Return how log power rises between a setting and its neighbours on a line."""
    ahead = settings[:which]
    level = settings[which]
    behind = settings[which + 1 :]
    log_power = seen[settings].log_power
    place = line.index(level)
    slopes = []
    for near in (*line[max(place - 1, 0) : place], *line[place + 1 : place + 2]):
        near_power = seen[(*ahead, near, *behind)].log_power
        slopes.append((near_power - log_power) / (logs[near] - logs[level]))
    return slopes


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
        low = mean
        high = mean
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
        self._exponents = []
        for history, knob in zip(memory.knobs, lattice.knobs, strict=True):
            measured = (history.up, history.down)
            self._exponents.append(measured if history.pairs else POWER_EXPONENTS[knob.role])
        self._log_powers: list[float] = []
        self._levels: list[Settings] = []  # by knob: the level of every run setting
        self._columns: dict[tuple[int, int], list[float]] = {}  # by knob and level

    def permits(self, settings: Settings) -> bool:
        """Tell whether a setting keeps to the cap: it was run and did, or it is expected to from
        any run.
        """
        record = self._seen.get(settings)
        if record is not None:
            return record.log_power <= self._log_cap
        if not self._levels:
            self._levels = list(zip(*self._seen, strict=True))
            self._log_powers = list(map(itemgetter(2), self._seen.values()))
        columns = self._columns
        expected = iter(self._log_powers)
        for key in enumerate(settings):
            column = columns.get(key)
            if column is None:
                column = self._make_column(*key)
                columns[key] = column
            expected = map(add, expected, column)
        return min(expected) <= self._log_cap

    def _make_column(self, which: int, to: int) -> list[float]:
        """Return the log power that a level of a knob adds on the way from every run setting."""
        logs = self._logs[which]
        log_to = logs[to]
        up, down = self._exponents[which]
        return [
            (up if level < to else down) * (log_to - logs[level]) for level in self._levels[which]
        ]

    def highest_level(self, settings: Settings, which: int) -> int:
        """Return the highest level of one knob that is expected to keep to the cap, from a setting
        that was run.
        """
        logs = self._logs[which]
        up, _ = self._exponents[which]
        room = self._log_cap - self._seen[settings].log_power
        return bisect_right(logs, logs[settings[which]] + room / up) - 1


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
    start = min(seen, key=lambda settings: seen[settings].log_power)
    missing = seen[start].log_power - log_cap
    if missing <= 0 or start == lattice.bottom:
        return None
    weights = _weigh_knobs(lattice, beliefs)

    def lower_all(part: int) -> Settings:
        levels = zip(start, weights, strict=True)
        return tuple(level - math.ceil(level * weight * part / PARTS) for level, weight in levels)

    def is_enough(part: int) -> bool:
        settings = lower_all(part)
        fall = 0.0
        for which, knob in enumerate(lattice.knobs):
            _, exponent = POWER_EXPONENTS[knob.role]
            logs = lattice.log_levels[which]
            fall += exponent * (logs[start[which]] - logs[settings[which]])
        return settings != start and fall >= CONTROLLER.overshoot * missing

    part = bisect_left(range(1, PARTS), True, key=is_enough) + 1
    lowered = lower_all(min(part, PARTS))
    return lowered if lowered != start else lattice.bottom


def _weigh_knobs(lattice: Lattice, beliefs: SensitivityBeliefs | None) -> list[float]:
    """Return how far each knob goes down, relative to the one that matters least."""
    loose = []
    for knob in lattice.knobs:
        sensitivity = None if beliefs is None else beliefs.sensitivity_to(knob.role)
        loose.append(
            CONTROLLER.looseness
            - (CONTROLLER.unknown_sensitivity if sensitivity is None else sensitivity)
        )
    loosest = max(loose)
    return [looseness / loosest for looseness in loose]
