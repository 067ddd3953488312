"""Remember what each setting of a kernel gave, and what is believed of the kernel.

A ``RunMemory`` never changes: recording an observation makes a new one. Times are per unit of work
and everything is in logarithms, so a mean is a geometric mean and a difference is a ratio. The
levels tried along each knob are kept sorted (``KnobHistory``), so that a decision looks neighbours
up instead of searching for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from wattcast.control.controller_coefficients import CONTROLLER
from wattcast.control.plants import (
    KnobRole,
    Observation,
    Settings,
)

_EMPTY: Mapping[Any, Any] = MappingProxyType({})


class SettingRecord(NamedTuple):
    """Hold the mean log time and log power over the runs of one setting."""

    runs: int
    log_time: float
    log_power: float


class KnobHistory(NamedTuple):
    """List the levels of one knob that were tried, by the levels of all other knobs."""

    levels: Mapping[Settings, tuple[int, ...]]
    pairs: Mapping[Settings, tuple[int, ...]]  # lines with two levels or more


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
    ) -> RunMemory:
        """Return the memory with one more run.

        ``effective`` is the setting the card really ran at, where a governor held it below the one
        asked for. Both are then one state and share a record."""
        log_time = log_time_per_work(observation)
        log_power = math.log(observation.power_w)
        settings_held = self._note_effective(observation.settings, effective)
        settings = settings_held.get(observation.settings, observation.settings)

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
        if settings_held:
            changed += [
                asked_settings
                for asked_settings, state in settings_held.items()
                if state == settings
            ]
        seen = {**self.seen, **dict.fromkeys(changed, new)}
        knobs = self.knobs
        for each_settings in changed:
            if each_settings not in self.seen:
                knobs = _note_setting(knobs, each_settings)
        return RunMemory(
            seen,
            self.runs + 1,
            self.freedom + (old is not None),
            self.time_scatter + off_time * off_time * share,
            self.power_scatter + off_power * off_power * share,
            knobs,
            settings_held,
        )

    def _note_effective(
        self,
        settings: Settings,
        effective: Settings | None,
    ) -> Mapping[Settings, Settings]:
        """Return which settings a governor makes of others, with those of the latest run."""
        if effective is not None and effective != settings:
            return {**self.held, settings: effective}
        if settings in self.held:  # the governor let go
            return {
                asked_settings: state
                for asked_settings, state in self.held.items()
                if asked_settings != settings
            }
        return self.held

    def score_sigma(
        self,
        time_weight: float,
        prior: float,
    ) -> float:
        """Return the standard deviation of one run's score; ``prior`` counts as one repeat."""
        squares = prior * prior + time_weight * time_weight * self.time_scatter + self.power_scatter
        return math.sqrt(squares / (1 + self.freedom))

    def time_sigma(self, prior: float) -> float:
        """Return the standard deviation of one run's log time; ``prior`` counts as one repeat."""
        return math.sqrt((prior * prior + self.time_scatter) / (1 + self.freedom))

    def find_state(self, settings: Settings) -> Settings:
        """Return what a governor made of a setting, or the setting itself."""
        return self.held.get(settings, settings)

    @property
    def time_variance(self) -> float:
        """Return the variance of one run's log time, as repeats show it."""
        return self.time_scatter / max(self.freedom, 1)

    @property
    def power_variance(self) -> float:
        """Return the variance of one run's log power, as repeats show it."""
        return self.power_scatter / max(self.freedom, 1)

    def confirms(
        self,
        observation: Observation,
        within: float,
    ) -> bool:
        """Tell whether a run gave the time and power, in logs, that its setting gave before."""
        old = self.seen.get(observation.settings)
        if old is None:
            return False
        off_time = abs(log_time_per_work(observation) - old.log_time)
        off_power = abs(math.log(observation.power_w) - old.log_power)
        return off_time < within and off_power < within

    def surprise(
        self,
        observation: Observation,
        prior: float,
    ) -> float:
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


def _note_setting(knobs: tuple[KnobHistory, ...], settings: Settings) -> tuple[KnobHistory, ...]:
    """Return the histories with a setting that is new."""
    histories = []
    for which, history in enumerate(knobs or (KnobHistory({}, {}),) * len(settings)):
        levels, pairs = history
        level = settings[which]
        other_levels = settings[:which] + settings[which + 1 :]
        line = levels.get(other_levels, ())
        if level not in line:
            line = tuple(sorted((*line, level)))
            levels = {**levels, other_levels: line}
            if len(line) > 1:
                pairs = {**pairs, other_levels: line}
        histories.append(KnobHistory(levels, pairs))
    return tuple(histories)


class SensitivityBeliefs(NamedTuple):
    """Hold compute and bandwidth sensitivity, None where unknown, and how far they may be off."""

    compute: float | None
    bandwidth: float | None
    margin: float

    def sensitivity_to(self, role: KnobRole) -> float | None:
        """Return the sensitivity that covers a knob."""
        if role is KnobRole.SLACK_CLOCK:
            return 0.0  # cards are slowed until they just arrive in time
        return self.compute if role.is_compute else self.bandwidth

    def bounds(
        self,
        role: KnobRole,
        has_units: bool,
    ) -> tuple[float, float]:
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
