"""Search the best setting under a power cap, from settings that keep to it.

Under a cap, the settings worth having lie along its edge, where a step of one knob breaks it and a
trade of two is too far to see. So the search keeps a model of the whole lattice instead: log time
and log power are quadratic in the logarithms of the knobs, with a smooth remainder. Before anything
ran, slopes are those that cards have; runs correct them, those over the cap too (Gaussian process
regression [Rasmussen2006]). The first setting is expected to keep the cap whatever the kernel.
Each next one is that with the largest expected gain over the best so far, less what it may cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.control.plants import (
    KnobRole,
    Lattice,
    Settings,
    read_knob_facts,
)
from wattcast.control.run_memory import RunMemory, SensitivityBeliefs
from wattcast.core.arrays import Array


class CappedSearchCoefficients(Coefficients):
    """How time and power are expected to follow the knobs, and what a try may cost."""

    overlap: float  # exponent by which compute and memory time overlap
    slope_spread: float  # of log time over a knob, where counters tell sensitivities
    blind_slope_spread: float  # likewise, where nothing is known
    curve_spread: float  # of the quadratic part of log time
    power_curve_spread: float  # of the quadratic part of log power
    top_power: float  # share of its limit that a card is expected to draw at its highest settings
    top_power_spread: float  # of its logarithm
    time_remainder: float  # deviation of log time from a quadratic
    power_remainder: float  # deviation of log power from a quadratic
    unknown_sensitivity: float  # of time to compute and to memory, of a program nothing is known of
    remainder_reach: float  # log ratio of a knob over which a remainder changes
    time_misfit: float  # deviation of log time that no smooth curve follows
    power_misfit: float  # likewise, of log power
    likely: float  # chance of keeping the bounds that a try must have
    sure: float  # standard deviations by which the first setting keeps the cap
    most_risk: float  # excess of the log score that a try may have at one standard deviation
    longest_step: float  # log ratio of a knob to that of a setting that ran, at most
    least_gain: float  # expected gain of the log score below which nothing is tried
    polish: float  # of the log score, that a setting beside the best may be expected to lose
    runs_ahead: float  # runs that are expected to profit from a gain, at least
    runs_per_run: float  # further ones, for each run so far


CAPPED = load_coefficients("capped_search", CappedSearchCoefficients)

_TIME_SHARES = read_knob_facts("time_share")
_POWER_SLOPES = read_knob_facts("power_slope")
_POWER_SPREADS = read_knob_facts("power_spread")
_POWER_CURVES = read_knob_facts("power_curve")
MOST_MOVED = 2  # knobs that differ between the best setting and one beside it
_FREE_CONSTANT = 10.0  # deviation of a constant that is not known at all
_LOGISTIC = 1.702  # 1 / (1 + exp(-1.702 z)) is the normal distribution function within 0.01
_EXCLUDED = -math.inf


class _Quantity(NamedTuple):
    """Hold what is expected of log time or of log power before anything ran."""

    spreads: Array  # (feature,) deviations of the coefficients
    remainder: float


class _Estimate(NamedTuple):
    """Hold a quantity at all settings, ``(setting,)``."""

    mean: Array
    deviation: Array


class CappedSearch:
    """Hold the model of a lattice and choose settings by it. It never changes."""

    def __init__(
        self,
        lattice: Lattice,
        usable: npt.NDArray[np.bool_],
        log_limit: float | None,
    ) -> None:
        """``usable`` marks the settings that the search may choose. ``log_limit`` is the logarithm
        of the board's own power limit, None where it is not known."""
        self._lattice = lattice
        self._usable = usable
        roles = [knob.role for knob in lattice.knobs]
        columns = []
        for role, knob in zip(roles, lattice.knobs, strict=True):
            columns.append(np.log(lattice.knob_values(role) / knob.levels[-1]))
        self._logs = np.stack(columns, axis=1)
        self._levels = np.stack([axis.ravel() for axis in np.indices(lattice.shape)], axis=1)
        self._pairs = [(i, j) for i in range(len(roles)) for j in range(i)]
        self._features = _list_features(self._logs, self._pairs)
        self._strides = _list_strides(lattice.shape)
        self._compute = np.array([role.is_compute for role in roles])
        self._shares = np.array([_TIME_SHARES[role] for role in roles])
        self._top_log_power = 0.0 if log_limit is None else log_limit + math.log(CAPPED.top_power)
        spread = _FREE_CONSTANT if log_limit is None else CAPPED.top_power_spread
        self._power = self._expect_power(roles, spread)
        self._times = {
            is_told: self._expect_time(spread)
            for is_told, spread in ((True, CAPPED.slope_spread), (False, CAPPED.blind_slope_spread))
        }
        slopes = np.array([_POWER_SLOPES[role] for role in roles])
        curves = np.array([_POWER_CURVES[role] for role in roles])
        linear = self._logs @ slopes + self._logs**2 @ curves
        self._power_mean = self._top_log_power + linear
        # By row of the flat tables, filled as settings are run.
        self._covariances: dict[int, dict[int, Array]] = {}
        self._near: dict[int, npt.NDArray[np.bool_]] = {}
        self._variances = {
            id(quantity): self._vary(quantity) for quantity in (self._power, *self._times.values())
        }

    def _expect_power(
        self,
        roles: Sequence[KnobRole],
        constant: float,
    ) -> _Quantity:
        slopes = [_POWER_SPREADS[role] for role in roles]
        curves = [CAPPED.power_curve_spread] * (len(roles) + len(self._pairs))
        return _Quantity(np.array([constant, *slopes, *curves]), CAPPED.power_remainder)

    def _expect_time(self, slope: float) -> _Quantity:
        curves = [CAPPED.curve_spread] * (len(self._compute) + len(self._pairs))
        slopes = [slope] * len(self._compute)
        return _Quantity(np.array([_FREE_CONSTANT, *slopes, *curves]), CAPPED.time_remainder)

    def _expect_time_mean(self, beliefs: SensitivityBeliefs | None) -> Array:
        """Return log time by the sensitivities, ``(setting,)``, relative to the highest settings.

        Compute time C and memory time M overlap as (C^q + M^q)^(1/q); this is the quadratic part
        of its expansion about the highest settings."""
        compute = CAPPED.unknown_sensitivity
        memory = CAPPED.unknown_sensitivity
        if beliefs is not None and beliefs.compute is not None and beliefs.bandwidth is not None:
            compute = beliefs.compute
            memory = beliefs.bandwidth
        scaled = self._logs * self._shares
        of_compute = scaled[:, self._compute].sum(axis=1)
        of_memory = scaled[:, ~self._compute].sum(axis=1)
        bend = 0.5 * CAPPED.overlap * compute * memory
        difference = of_compute - of_memory
        return np.asarray(-compute * of_compute - memory * of_memory + bend * difference**2)

    def find_start(
        self,
        log_cap: float,
        default: Settings,
    ) -> Settings:
        """Return the setting of a kernel's first run: the fastest that is expected to keep the cap
        whatever the kernel; the default where it does.
        """
        deviation = np.sqrt(self._variances[id(self._power)])
        is_within = self._power_mean + CAPPED.sure * deviation <= log_cap
        is_within &= self._usable
        if is_within[np.dot(default, self._strides)]:
            return default
        if not is_within.any():
            power = np.where(self._usable, self._power_mean, math.inf)
            return self._lattice.settings_at(int(power.argmin()))
        score = np.where(is_within, self._expect_time_mean(None), math.inf)
        return self._lattice.settings_at(int(score.argmin()))

    def choose(
        self,
        memory: RunMemory,
        beliefs: SensitivityBeliefs | None,
        limits: tuple[float, float],
        time_weight: float,
        best: Settings | None,
    ) -> Settings | None:
        """Choose the next setting to try; None where none promises enough.

        ``limits`` are the logarithms of the cap and of the longest time, ``best`` is the best
        setting that keeps both, None where none does."""
        seen = memory.seen
        if memory.held:  # of settings that are one state, one counts
            seen = {state: seen[state] for state in map(memory.find_state, seen)}
        rows = np.array(list(seen)) @ self._strides
        repeats, log_times, log_powers = np.array(list(seen.values()), dtype=np.float64).T
        power = self._estimate(
            self._power,
            self._power_mean,
            rows,
            log_powers,
            CAPPED.power_misfit**2 + memory.power_variance / repeats,
        )
        is_told = beliefs is not None and beliefs.compute is not None
        time = self._estimate(
            self._times[is_told],
            self._expect_time_mean(beliefs),
            rows,
            log_times,
            CAPPED.time_misfit**2 + memory.time_variance / repeats,
        )
        chance = _chance_below(limits[0], power) * _chance_below(limits[1], time)
        is_new = self._usable.copy()
        is_new[rows] = False
        is_new[self._list_held(memory)] = False
        if best is None:
            return self._choose_within(
                chance,
                is_new,
                power,
                time,
                time_weight,
            )
        _, best_time, best_power = memory.seen[best]
        best_score = best_power + time_weight * best_time
        utility = _weigh_tries(
            chance,
            power,
            time,
            time_weight,
            best_score,
            memory.runs,
        )
        utility[~(is_new & self._find_near(rows))] = _EXCLUDED
        first = int(utility.argmax())
        if utility[first] > 0.0:
            return self._lattice.settings_at(first)
        is_new &= (chance > CAPPED.likely) & self._find_beside(best)
        score = np.where(is_new, power.mean + time_weight * time.mean, math.inf)
        first = int(score.argmin())
        is_cheap = score[first] <= best_score + CAPPED.polish
        return self._lattice.settings_at(first) if is_cheap else None

    def _choose_within(
        self,
        chance: Array,
        is_new: npt.NDArray[np.bool_],
        power: _Estimate,
        time: _Estimate,
        time_weight: float,
    ) -> Settings | None:
        """Choose a setting that keeps the bounds, where none did so far."""
        if not is_new.any():
            return None
        is_safe = is_new & (chance > 1.0 - CAPPED.likely)
        if is_safe.any():
            score = np.where(is_safe, power.mean + time_weight * time.mean, math.inf)
            return self._lattice.settings_at(int(score.argmin()))
        return self._lattice.settings_at(int(np.where(is_new, chance, -1.0).argmax()))

    def _find_near(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Tell which settings are near enough to one that ran to be judged from it, ``(setting,)``:
        each knob is a level away at most, or not much.
        """
        for row in set(rows.tolist()) - self._near.keys():
            is_near = np.abs(self._logs - self._logs[row]) <= CAPPED.longest_step
            is_near |= np.abs(self._levels - self._levels[row]) <= 1
            self._near[row] = is_near.all(axis=1)
        near = np.array([self._near[row] for row in rows.tolist()])
        return np.asarray(near.any(axis=0))

    def _find_beside(self, settings: Settings) -> npt.NDArray[np.bool_]:
        """Tell which settings lie beside one, a level away in two knobs at most, ``(setting,)``."""
        apart = np.abs(self._levels - np.array(settings))
        return np.asarray((apart <= 1).all(axis=1) & (apart.sum(axis=1) <= MOST_MOVED))

    def _list_held(self, memory: RunMemory) -> list[int]:
        """List the settings from what a governor made of a setting up to that setting."""
        held_levels: list[int] = []
        for asked_settings, state in memory.held.items():
            moved = self._strides[np.not_equal(asked_settings, state)]
            if len(moved) == 1:
                ends = np.array([state, asked_settings]) @ self._strides
                held_levels += range(int(ends[0]), int(ends[1]) + 1, int(moved[0]))
        return held_levels

    def _vary(self, quantity: _Quantity) -> Array:
        """Return the variance of a quantity before anything ran, ``(setting,)``."""
        scaled = self._features * quantity.spreads
        return np.asarray(np.einsum("sf,sf->s", scaled, scaled) + quantity.remainder**2)

    def _covary(
        self,
        quantity: _Quantity,
        rows: npt.NDArray[np.int64],
    ) -> Array:
        """Return the covariance of settings that ran with all, ``(row, setting)``. Rows are
        remembered, as every decision asks for them.
        """
        covariances = self._covariances.setdefault(id(quantity), {})
        for row in set(rows.tolist()) - covariances.keys():
            smooth = (self._features[row] * quantity.spreads**2) @ self._features.T
            apart = (self._logs - self._logs[row]) / CAPPED.remainder_reach
            remainder = np.exp(-0.5 * np.einsum("sk,sk->s", apart, apart))
            covariances[row] = smooth + quantity.remainder**2 * remainder
        return np.array(list(map(covariances.__getitem__, rows.tolist())))

    def _estimate(
        self,
        quantity: _Quantity,
        mean: Array,
        rows: npt.NDArray[np.int64],
        values: Array,
        noise: Array,
    ) -> _Estimate:
        """Return mean and deviation of a quantity at all settings after runs at some
        [Rasmussen2006, algorithm 2.1].

        Where the runs lie farther from what was expected than they should, all deviations grow."""
        covariance = self._covary(quantity, rows)
        among = covariance[:, rows] + np.diag(noise)
        factor = np.linalg.inv(np.linalg.cholesky(among))
        weights = factor @ covariance
        residual = factor @ (values - mean[rows])
        surprise = float(residual @ residual) / len(rows)
        variance = self._variances[id(quantity)] - np.einsum("rs,rs->s", weights, weights)
        deviation = np.sqrt(np.maximum(variance, 1e-12) * max(surprise, 1.0))
        return _Estimate(mean + weights.T @ residual, deviation)


def _list_features(logs: Array, pairs: Sequence[tuple[int, int]]) -> Array:
    """Return 1, the logs of the knobs, their squares and their products, ``(setting, feature)``."""
    products = [logs[:, i] * logs[:, j] for i, j in pairs]
    return np.column_stack([np.ones(len(logs)), logs, logs**2, *products])


def _list_strides(shape: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return how far apart two levels of each knob lie in flat tables."""
    strides = [1]
    for count in reversed(shape[1:]):
        strides.append(strides[-1] * count)
    return np.array(strides[::-1], dtype=np.int64)


def _chance_below(limit: float, estimate: _Estimate) -> Array:
    """Return the chance that a quantity keeps below a limit, ``(setting,)``."""
    if math.isinf(limit):
        return np.ones_like(estimate.mean)
    sigmas = (limit - estimate.mean) / estimate.deviation
    return np.asarray((1.0 + np.tanh(0.5 * _LOGISTIC * sigmas)) / 2.0)


def _weigh_tries(
    chance: Array,
    power: _Estimate,
    time: _Estimate,
    time_weight: float,
    best_score: float,
    runs: int,
) -> Array:
    """Return what a run at each setting is expected to bring all later runs, less what it costs."""
    score = power.mean + time_weight * time.mean
    deviation = np.hypot(power.deviation, time_weight * time.deviation)
    sigmas = (best_score - score) / deviation
    gain = deviation * np.logaddexp(0.0, _LOGISTIC * sigmas) / _LOGISTIC
    cost = gain + score - best_score
    ahead = CAPPED.runs_ahead + CAPPED.runs_per_run * runs
    utility = ahead * gain * chance - cost
    is_worth_it = (chance > CAPPED.likely) & (gain * chance > CAPPED.least_gain)
    is_worth_it &= score + deviation <= best_score + CAPPED.most_risk
    return np.where(is_worth_it, utility, _EXCLUDED)
