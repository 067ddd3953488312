"""Remember what each setting of a kernel gave, what is believed of the kernel, and what keeps to a power cap.

A ``RunMemory`` never changes: recording an observation makes a new one. Times are per unit of work and everything is
in logarithms, so a mean is a geometric mean and a difference is a ratio. The levels tried along each knob are kept
sorted (``KnobHistory``), so that a decision looks neighbours up instead of searching for them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import add, itemgetter, le
from types import MappingProxyType
from typing import Any, NamedTuple

from wattcast.manage.plants import KnobRole, Lattice, Observation, Settings

LogLevels = tuple[tuple[float, ...], ...]  # [knob][level]
_EMPTY: Mapping[Any, Any] = MappingProxyType({})


class SettingRecord(NamedTuple):
    """Hold the mean log time and log power over the runs of one setting."""

    runs: int
    log_time: float
    log_power: float


class KnobHistory(NamedTuple):
    """List the levels of one knob that were tried, by the levels of all other knobs.

    Under a cap it also keeps how fast log power rises with the log level between neighbours: the steepest and the
    flattest rise on each line, and over all lines.
    """

    levels: Mapping[Settings, tuple[int, ...]]
    pairs: Mapping[Settings, tuple[int, ...]]  # lines with two levels or more
    slopes: Mapping[Settings, tuple[float, float]] = _EMPTY  # steepest and flattest, by line
    steepest: float = -math.inf
    flattest: float = math.inf


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
        self, observation: Observation, effective: Settings | None = None, log_levels: LogLevels | None = None
    ) -> RunMemory:
        """Return the memory with one more run.

        ``effective`` is the setting the card really ran at, where a governor held it below the one asked for. Both
        are then one state and share a record. With ``log_levels`` the histories learn how power rises.
        """
        log_time = log_time_per_work(observation)
        log_power = math.log(observation.power_w)
        held, settings = self.held, observation.settings
        if effective is not None and effective != settings:
            held = {**held, settings: effective}
            settings = effective
        elif settings in held:  # the governor let go: the old record belongs to another state
            held = {asked: got for asked, got in held.items() if asked != settings}
        old = self.seen.get(settings) if settings not in self.held else None
        if old is None:
            new, share, off_time, off_power = SettingRecord(1, log_time, log_power), 0.0, 0.0, 0.0
        else:
            n = old.runs + 1
            off_time, off_power = log_time - old.log_time, log_power - old.log_power
            new = SettingRecord(n, old.log_time + off_time / n, old.log_power + off_power / n)
            share = (n - 1) / n  # Welford's update of the sum of squares
        seen, knobs, changed = {**self.seen, settings: new}, self.knobs, [settings]
        if settings not in self.seen:
            knobs = _add_levels(knobs, settings)
        if held:
            same = [asked for asked, got in held.items() if got == settings]
            for asked in same:
                knobs = knobs if asked in seen else _add_levels(knobs, asked)
            seen.update(dict.fromkeys(same, new))
            changed = [settings, *same]
        if log_levels is not None and (old is None or held or new.log_power != old.log_power):
            for one in changed:
                knobs = _update_slopes(knobs, seen, one, log_levels)
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
        return abs(off_time) < within and abs(math.log(observation.power_w) - old.log_power) < within

    def surprise(self, observation: Observation, prior: float) -> float:
        """Return how far, in log time, a run lies off its setting's mean; 0 where scatter explains it."""
        old = self.seen.get(observation.settings)
        if old is None:
            return 0.0
        off = abs(log_time_per_work(observation) - old.log_time)
        return off if off > 6.0 * self.time_sigma(prior) else 0.0


def log_time_per_work(observation: Observation) -> float:
    """Return the log of time per unit of work, as a difference of logs: a ratio of extreme numbers may overflow."""
    return math.log(observation.duration_s) - math.log(observation.work)


def _add_levels(knobs: tuple[KnobHistory, ...], settings: Settings) -> tuple[KnobHistory, ...]:
    """Return the histories with one more setting tried."""
    found = []
    for i, history in enumerate(knobs or (KnobHistory({}, {}),) * len(settings)):
        levels, pairs, slopes, steepest, flattest = history
        others, level = settings[:i] + settings[i + 1 :], settings[i]
        known = levels.get(others)
        if known is None:
            found.append(KnobHistory({**levels, others: (level,)}, pairs, slopes, steepest, flattest))
        else:
            more = tuple(sorted((*known, level)))
            found.append(KnobHistory({**levels, others: more}, {**pairs, others: more}, slopes, steepest, flattest))
    return tuple(found)


def _update_slopes(
    knobs: tuple[KnobHistory, ...],
    seen: Mapping[Settings, SettingRecord],
    settings: Settings,
    log_levels: LogLevels,
) -> tuple[KnobHistory, ...]:
    """Return the histories with new slopes of power on the lines through a setting whose power changed."""
    found = []
    for i, history in enumerate(knobs):
        ahead, behind = settings[:i], settings[i + 1 :]
        others = ahead + behind
        levels = history.pairs.get(others)
        if levels is not None:
            between, logs = [], log_levels[i]
            low, low_power = levels[0], seen[(*ahead, levels[0], *behind)].log_power
            for high in levels[1:]:
                high_power = seen[(*ahead, high, *behind)].log_power
                between.append((high_power - low_power) / (logs[high] - logs[low]))
                low, low_power = high, high_power
            new, old = (max(between), min(between)), history.slopes.get(others)
            if old != new:
                slopes = {**history.slopes, others: new}
                if old is None or (new[0] >= old[0] and new[1] <= old[1]):
                    steepest, flattest = max(history.steepest, new[0]), min(history.flattest, new[1])
                else:  # the line may have lost an extreme of all lines
                    all_steep, all_flat = zip(*slopes.values(), strict=True)
                    steepest, flattest = max(all_steep), min(all_flat)
                history = KnobHistory(history.levels, history.pairs, slopes, steepest, flattest)
        found.append(history)
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

        Compute sensitivity is the mean of the sensitivities to units and to the clock. A kernel follows the clock at
        least as much as the units, because what runs on all units runs on the clock. So the clock's sensitivity lies
        between the mean and 1, and the units' between 2·mean - 1 and the mean.
        """
        mean = self.sensitivity_to(role)
        if mean is None:
            return 0.0, 1.0
        low = high = mean
        if role is KnobRole.COMPUTE_UNITS:
            low = 2.0 * mean - 1.0
        elif role is KnobRole.CORE_CLOCK and has_units:
            high = 2.0 * mean
        return max(low - self.margin, 0.0), min(high + self.margin, 1.0)


# Exponents of board power over a knob before anything was measured: the steepest rise to expect going up, and the
# flattest fall to count on going down. HD 7970, Titan X and A100 tables lie between, but for the A100's top clocks.
# A power limit is power where it binds and nothing where it does not.
POWER_EXPONENT_UP = {
    KnobRole.COMPUTE_UNITS: 0.8,
    KnobRole.CORE_CLOCK: 1.4,
    KnobRole.MEMORY_CLOCK: 0.5,
    KnobRole.POWER_LIMIT: 1.0,
}
POWER_EXPONENT_DOWN = {
    KnobRole.COMPUTE_UNITS: 0.15,
    KnobRole.CORE_CLOCK: 0.4,
    KnobRole.MEMORY_CLOCK: 0.08,
    KnobRole.POWER_LIMIT: 0.0,
}
STEEPER_RISE, LEAST_EXPONENT = 1.1, 0.02  # the next rise may be this much steeper than the steepest seen
FALL_CREDIT = 0.9  # share of the flattest fall seen that a knob going down is credited with
OVERSHOOT = 1.1  # going down, aim this much below the cap, in logs
PARTS = 16  # steps from the present setting to the lowest, when looking for one below the cap
ROUNDING = 1e-9
FAR = 1e300  # more than any share, less than infinity


@dataclass(frozen=True)
class CapTables:
    """Hold what power is estimated along, worked out once for a lattice."""

    lattice: Lattice
    log_levels: LogLevels
    gaps: tuple[tuple[tuple[float, ...], ...], ...]  # [knob][to][from], differences of log levels
    _shares: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)

    def share_row(self, which: int, to: int, top: int) -> list[float]:
        """Return how far ``to`` lies from each level of a knob towards ``top``; infinite from levels above ``to``."""
        found = self._shares.get((which, to, top))
        if found is None:
            levels = self.lattice.knobs[which].levels
            below = [(levels[to] - low) / (levels[top] - low) for low in levels[:to]]
            found = self._shares[which, to, top] = [*below, 0.0, *[math.inf] * (len(levels) - to - 1)]
        return found


def build_cap_tables(lattice: Lattice) -> CapTables:
    """Work out the tables of a lattice."""
    logs = tuple(tuple(math.log(v) for v in knob.levels) for knob in lattice.knobs)
    return CapTables(lattice, logs, tuple(tuple(tuple(to - x for x in row) for to in row) for row in logs))


class PowerCapCheck:
    """Judge whether settings that were not run yet would keep to the power cap, from every setting that was.

    A *column* has an entry for every run setting, in the order of the memory: the log power that one level of one
    knob adds on the way from there. Columns are worked out when first needed; a setting is judged by adding one
    column per knob.
    """

    def __init__(self, tables: CapTables, memory: RunMemory, log_cap: float) -> None:
        self._tables, self._knobs, self._seen, self._log_cap = tables, memory.knobs, memory.seen, log_cap
        self._log_powers: list[float] = []
        self._levels: list[Settings] = []  # by knob, columns
        self._exponents: list[tuple[float, float]] = []  # by knob: going up, going down
        self._columns: dict[tuple[int, int], list[float]] = {}  # by knob and level: change of log power
        self._unknown = False  # whether some knob was never changed alone
        self._top: Settings = ()  # the setting of the most power
        self._watts: list[tuple[float, float]] = []  # power, and what is missing to the most
        self._limits: list[float] = []  # of shares, beyond which the cap is surely broken
        self._shares: dict[tuple[int, int], list[float]] = {}  # by knob and level: how far it lies towards the top

    def permits(self, settings: Settings) -> bool:
        """Tell whether a setting keeps to the cap: it was run and did, or it is expected to from any run."""
        known = self._seen.get(settings)
        if known is not None:
            return known.log_power <= self._log_cap
        columns, expected = self._columns, iter(self._log_powers or self._prepare())
        for key in enumerate(settings):
            expected = map(add, expected, columns.get(key) or self._column(key))
        return min(expected) <= self._log_cap or (self._unknown and self._keeps_in_watts(settings))

    def highest_level(self, settings: Settings, which: int) -> int:
        """Return the highest level of one knob that is expected to keep to the cap, from a setting that was run."""
        if not self._exponents:
            self._prepare()
        logs, (up, _) = self._tables.log_levels[which], self._exponents[which]
        return bisect_right(logs, logs[settings[which]] + (self._log_cap - self._seen[settings].log_power) / up) - 1

    def _prepare(self) -> list[float]:
        self._levels = list(zip(*self._seen, strict=True))
        for knob, history in zip(self._tables.lattice.knobs, self._knobs, strict=True):
            if history.slopes:
                up = STEEPER_RISE * max(history.steepest, 0.0) + LEAST_EXPONENT
                self._exponents.append((up, FALL_CREDIT * max(history.flattest, 0.0)))
            else:
                self._unknown = True
                self._exponents.append((POWER_EXPONENT_UP[knob.role], 0.0))
        self._log_powers = list(map(itemgetter(2), self._seen.values()))
        return self._log_powers

    def _column(self, key: tuple[int, int]) -> list[float]:
        """Return the change of log power on the way from the level of each run setting to this one."""
        which, to = key
        gaps, (up, down) = self._tables.gaps[which][to], self._exponents[which]
        found = self._columns[key] = [(up if level < to else down) * gaps[level] for level in self._levels[which]]
        return found

    def _keeps_in_watts(self, settings: Settings) -> bool:
        """Judge in watts from the best run below, where several knobs rose at once and no exponent is known yet.

        Power never falls when a knob rises, and rises the faster the higher the knob is (units in proportion, clocks
        with V² f). So between two runs, one above the other in every knob, no knob adds more watts per level than if
        all the difference were its own and even.
        """
        if not self._limits:
            highest = max(self._log_powers)
            self._top = list(self._seen)[self._log_powers.index(highest)]
            most_w, cap_w = math.exp(highest), math.exp(self._log_cap) * (1.0 + ROUNDING)
            watts = list(map(math.exp, self._log_powers))
            self._watts = [(w, most_w - w) for w in watts]
            at_most = FAR if most_w <= cap_w else -1.0
            self._limits = [(cap_w - w) / (most_w - w) if w < most_w else at_most for w in watts]
        if not all(map(le, settings, self._top)):
            return False
        shares, added = self._shares, [0.0] * len(self._limits)
        for key in enumerate(settings):
            added = list(map(add, added, shares.get(key) or self._share(key)))
        if not any(map(le, added, self._limits)):
            return False
        each = zip(self._watts, added, strict=True)
        return any(math.log(w + share * more) <= self._log_cap for (w, more), share in each if share < math.inf)

    def _share(self, key: tuple[int, int]) -> list[float]:
        """Return how far a level lies from that of each run setting towards the top's; infinite where it is below."""
        which, to = key
        row = self._tables.share_row(which, to, self._top[which])
        found = self._shares[key] = list(map(row.__getitem__, self._levels[which]))
        return found


def lower_below_cap(
    lattice: Lattice, seen: Mapping[Settings, SettingRecord], beliefs: SensitivityBeliefs | None, log_cap: float
) -> Settings | None:
    """Choose the next try when every setting so far broke the cap; None when one keeps to it or nothing is left.

    All knobs go down together from the setting of least power, the farther the less they matter to the kernel.
    """
    start = min(seen, key=lambda s: seen[s].log_power)
    missing = seen[start].log_power - log_cap
    if missing <= 0 or start == lattice.bottom:
        return None
    known = [beliefs.sensitivity_to(knob.role) if beliefs else None for knob in lattice.knobs]
    loose = [1.1 - (0.5 if s is None else s) for s in known]
    weights = [w / max(loose) for w in loose]
    to = start
    for part in range(1, PARTS + 1):
        to = tuple(level - math.ceil(level * w * part / PARTS) for level, w in zip(start, weights, strict=True))
        fall = sum(
            POWER_EXPONENT_DOWN[knob.role] * math.log(knob.levels[a] / knob.levels[b])
            for knob, a, b in zip(lattice.knobs, start, to, strict=True)
        )
        if fall >= OVERSHOOT * missing and to != start:
            return to
    return to if to != start else lattice.bottom
