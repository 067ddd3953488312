"""Slow the cards of a job that wait for others, until they just arrive in time.

In each step of a job, ranks wait for the slowest, and pipeline stages for the busiest. A card that
is busy for a time t of a step, where the busiest is busy for T, may run slower until t reaches T:
it then draws less and nobody waits for it [Perseus, SOSP 2024; Zeus team]. Every rank reports how
long it was busy (``program_files.BusyFolder``), waiting for others left out.

The clock of a card is its *share* of the job's clock. A program follows the clock at most in
proportion, so that t / T is a share that makes no card late. What is left of the slack then,
because the program follows the clock less, is used up in the periods after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattcast.coefficients import load_coefficients
from wattcast.core.arrays import Array


@dataclass(frozen=True)
class SlackClockCoefficients:
    """How cards that wait for others are slowed."""

    arrival: float  # share of the busiest card's time in which the others are to be done
    lowest: float  # share of the job's clock that a card gets at least
    late: float  # excess over the busiest card's time, which gives a card the job's clock back
    gain: float  # part of a correction that is made after each period
    trial_periods: int  # at a share, after which it is not given again if the card was late in them


@dataclass
class _LevelShares:
    """Hold what was learned at one level of the job's clock, by card."""

    shares: Array
    lowest: Array  # shares that are enough: lower ones made the card late
    had: Array  # share that was in force last
    used: Array  # sum over the periods with that share of the part of the time that was used
    periods: Array

    @classmethod
    def begin(cls, shares: Array) -> _LevelShares:
        """Begin with shares that are safe at any level."""
        zeros = np.zeros(len(shares))
        return cls(
            shares.copy(),
            zeros + SLACK.lowest,
            zeros,
            zeros.copy(),
            zeros.copy(),
        )

    def watch(
        self,
        used: Array,
        had: Array,
    ) -> None:
        """Note how much of the time cards used at shares in force, and which of these are too
        low.
        """
        is_same = had == self.had
        self.used = np.where(is_same, self.used, 0.0) + used
        self.periods = np.where(is_same, self.periods, 0.0) + 1.0
        self.had = had
        is_tried = (self.periods >= SLACK.trial_periods) & (had < 1.0)
        is_late = is_tried & (self.used > self.periods)
        self.lowest[is_late] = np.maximum(self.lowest, 1.001 * had)[is_late]


SLACK = load_coefficients("slack_clocks", SlackClockCoefficients)
LEVELS = (SLACK.lowest, 1.0)  # of the knob: the lowest share that a card may get


class SlackShares:
    """Hold the share of the job's clock that each card gets, learned from how long each is busy.

    Shares are kept by the level of the job's clock: how far a program follows the clock depends on
    it. A new level begins with what periods tell in which all cards have the job's clock."""

    def __init__(self, count: int) -> None:
        self._even: Array = np.ones(count)  # learned while all have the job's clock
        self._is_begun = False
        self._by_level: dict[int, _LevelShares] = {}

    def find_shares(self, level: int) -> tuple[float, ...]:
        """Return the share of each card at a level of the job's clock."""
        learned = self._by_level.get(level)
        return tuple((self._even if learned is None else learned.shares).tolist())

    def learn(
        self,
        level: int,
        busy_s: Sequence[float],
        in_force: Sequence[float],
    ) -> None:
        """Take the seconds that each card was busy in a step, at the shares that were in force."""
        busy = np.asarray(busy_s, dtype=np.float64)
        had = np.asarray(in_force, dtype=np.float64)
        is_full = had == 1.0
        if not (np.isfinite(busy) & (busy > 0)).all():
            return
        if not is_full.any():  # nobody sets the pace
            self._by_level[level] = _LevelShares.begin(np.ones(len(busy)))
            return

        # The busiest of those that nobody slows sets the pace.
        pace_s = busy[is_full].max()
        used = busy / pace_s
        if is_full.all():
            aim = np.clip(used / SLACK.arrival, SLACK.lowest, 1.0)
            self._even = _correct(self._even, aim) if self._is_begun else aim
            self._is_begun = True
            return
        aim = np.clip(self._aim_at(used, had), SLACK.lowest, 1.0)
        learned = self._by_level.setdefault(level, _LevelShares.begin(self._even))
        learned.watch(used, had)
        shares = np.maximum(_correct(learned.shares, aim), learned.lowest)
        is_late = used > 1.0 + SLACK.late
        is_lost = is_late & (had >= self._even)  # late even at a share that was safe
        self._even[is_lost] = 1.0
        shares[is_late] = self._even[is_late]
        learned.lowest[is_late] = 1.001 * had[is_late]
        learned.lowest[is_lost] = SLACK.lowest  # its load has changed
        learned.shares = shares

    def _aim_at(
        self,
        used: Array,
        had: Array,
    ) -> Array:
        """Return the shares at which cards just arrive, from the part of the time that they used.

        Busy time follows the clock as f^-s, with s from the difference to periods at the job's
        clock. At lower clocks it follows more, so that s is taken half way to 1."""
        slowing = np.maximum(-np.log(had), 1e-9)
        risen = np.log(used / (SLACK.arrival * self._even))
        follows = np.clip(risen / slowing, 0.0, 1.0)
        exponent = np.where(had < 1.0, 0.5 * (1.0 + follows), 1.0)
        return np.asarray(had * (used / SLACK.arrival) ** (1.0 / exponent))


def _correct(shares: Array, aim: Array) -> Array:
    """Move shares towards an aim by part of the way, in logarithms."""
    return np.asarray(np.exp((1.0 - SLACK.gain) * np.log(shares) + SLACK.gain * np.log(aim)))


def choose_clocks_hz(
    levels_hz: Sequence[float],
    job_hz: float | None,
    shares: Sequence[float],
) -> list[float | None]:
    """Return the clock of each card: the lowest level that is its share of the job's clock or more.

    ``job_hz`` None is a job without a lock, which runs at the highest level; so do then the cards
    that are not slowed."""
    base_hz = levels_hz[-1] if job_hz is None else job_hz
    clocks_hz: list[float | None] = []
    for share in shares:
        enough = [level for level in levels_hz if level >= share * base_hz * (1.0 - 1e-6)]
        clock_hz = enough[0] if enough else base_hz
        clocks_hz.append(clock_hz if clock_hz < base_hz * (1.0 - 1e-6) else job_hz)
    return clocks_hz
