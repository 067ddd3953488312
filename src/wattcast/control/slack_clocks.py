"""Slow the cards of a job that wait for others, until they just arrive in time.

In each step of a job, ranks wait for the slowest, and pipeline stages for the busiest. A card that
is busy for a time t of a step, where the busiest is busy for T, may run slower until t reaches T:
it then draws less and nobody waits for it [Perseus, "Reducing energy bloat in large model
training", SOSP 2024]. Every rank writes how many seconds it was busy in each step, waiting for
others left out (``program_files.BusyFolder``). A *period* is the time between two decisions of the
controller (``live_plant.py``); its busy time of a rank is the mean over the steps in it.

A card's *share* r is its core clock over that of the job, at most 1. At a share r a program is busy
for at most t / r, which it reaches where it follows the clock in proportion. So r = t / T makes no
card late. Where the program follows the clock less, slack is left then, and the periods after use
it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Array

# What excludes a share: its next clock is more than 0.1 % higher (levels are 15 MHz or more apart).
NEXT_SHARE = 1.001
ROUNDING = 1e-6  # by which a share times a clock may miss a level, as floats do
LEAST_SLOWING = 1e-9  # of ln(1 / share), to divide by for cards that are not slowed


class SlackClockCoefficients(Coefficients):
    """How cards that wait for others are slowed; values and reasons are in ``slack_clocks.yaml``.

    The busiest card's time is that of the busiest card at the full clock of the job."""

    arrival: float  # part of the busiest card's time after which the others are to be done: 0.99
    lowest: float  # lowest share that a card gets
    # A card whose busy time is longer than the busiest card's by more than this part loses its
    # share at once, and gets the one of periods in which nobody was slowed (``safe_shares``). If it
    # was late at that one, it gets the full clock of the job.
    late: float
    gain: float  # part of the way to its aim that a share goes in a period: 0 to 1
    # Periods in a row at the same share, after which a mean busy time longer than the busiest
    # card's excludes the share: it was too low, if by less than ``late``.
    trial_periods: int


@dataclass
class _LevelShares:
    """Hold what was learned at one level of the job's clock. Each array has a value per card."""

    shares: Array  # that cards are to have in the next period
    lowest: Array  # share that is enough, where lower ones made the card late
    in_force: Array  # share that was in force in the last period
    used_sum: Array  # of ``used`` (see ``SlackShares.learn``) in the periods at that share
    periods: Array  # how many of them there were in a row

    @classmethod
    def begin(cls, shares: Array) -> _LevelShares:
        """Begin with given shares, and with no periods watched."""
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
        in_force: Array,
    ) -> None:
        """Note a period, and exclude shares that have made their card late in the mean of
        ``trial_periods``. Shares in force are ratios of two clocks of a card's list, so that the
        same clock gives exactly the same share.
        """
        is_same = in_force == self.in_force
        self.used_sum = np.where(is_same, self.used_sum, 0.0) + used
        self.periods = np.where(is_same, self.periods, 0.0) + 1.0
        self.in_force = in_force
        is_tried = (self.periods >= SLACK.trial_periods) & (in_force < 1.0)
        is_late = is_tried & (self.used_sum > self.periods)
        self.lowest[is_late] = np.maximum(self.lowest, NEXT_SHARE * in_force)[is_late]


SLACK = load_coefficients("slack_clocks", SlackClockCoefficients)
# Levels of the controller's knob ``KnobRole.SLACK_CLOCK``: the lowest share that a card may get. At
# the first, cards are slowed down to that; at the second none is.
KNOB_LEVELS = (SLACK.lowest, 1.0)


class SlackShares:
    """Hold the share of the job's clock that each card gets, learned from how long each is busy.

    Shares are kept for each ``job_level``: the place of the job's core clock among the levels of
    its knob (``KnobRole.CORE_CLOCK``), as a program follows the clock differently at each. A level
    that no card was slowed at yet begins with the safe shares."""

    def __init__(self, count: int) -> None:
        # t / (arrival T), from periods at any level in which no card was slowed. They make no card
        # late at any level, as they take busy time to follow the clock in proportion.
        self._safe_shares: Array = np.ones(count)
        self._has_safe_shares = False  # whether there was such a period
        self._by_job_level: dict[int, _LevelShares] = {}

    def find_shares(self, job_level: int) -> tuple[float, ...]:
        """Return the share of each card at a level of the job's clock."""
        learned = self._by_job_level.get(job_level)
        return tuple((self._safe_shares if learned is None else learned.shares).tolist())

    def learn(
        self,
        job_level: int,
        busy_s: Sequence[float],
        shares_in_force: Sequence[float],
    ) -> None:
        """Learn from a period: each card's mean busy seconds in a step, and the shares in force.

        Shares in force are those of the clocks that the cards had, exactly 1 for the job's clock;
        clocks come in steps, so that they may be higher than ``find_shares`` said. A period in
        which a rank reported nonsense (zero, NaN, infinite) is left out for all cards."""
        busy = np.asarray(busy_s, dtype=np.float64)
        in_force = np.asarray(shares_in_force, dtype=np.float64)
        is_full = in_force == 1.0
        if not (np.isfinite(busy) & (busy > 0)).all():
            return
        if not is_full.any():
            # All cards are slowed, and so is the job. This comes where the busiest card is now this
            # one, now that one: in the mean over periods each then has a share below 1.
            self._by_job_level[job_level] = _LevelShares.begin(np.ones(len(busy)))
            return

        # The busiest of the cards that are not slowed sets the pace. Slowed cards with ``used``
        # above 1 make it wait.
        pace_s = busy[is_full].max()
        used = busy / pace_s
        if is_full.all():
            aim = np.clip(used / SLACK.arrival, SLACK.lowest, 1.0)
            self._safe_shares = _correct(self._safe_shares, aim) if self._has_safe_shares else aim
            self._has_safe_shares = True
            return
        aim = np.clip(self._aim_at(used, in_force), SLACK.lowest, 1.0)
        learned = self._by_job_level.setdefault(job_level, _LevelShares.begin(self._safe_shares))
        learned.watch(used, in_force)
        learned.shares = np.maximum(_correct(learned.shares, aim), learned.lowest)
        self._mend_late_shares(learned, used > 1.0 + SLACK.late, in_force)

    def _mend_late_shares(
        self,
        learned: _LevelShares,
        is_late: NDArray[np.bool_],
        in_force: Array,
    ) -> None:
        """Give late cards their safe share; those that were late at it or above, the full clock.

        A card that is late at its safe share has more to do than in the periods that the safe share
        is from. What was learned of it is then forgotten."""
        has_more_to_do = is_late & (in_force >= self._safe_shares)
        self._safe_shares[has_more_to_do] = 1.0
        learned.shares[is_late] = self._safe_shares[is_late]
        learned.lowest[is_late] = NEXT_SHARE * in_force[is_late]
        learned.lowest[has_more_to_do] = SLACK.lowest

    def _aim_at(
        self,
        used: Array,
        in_force: Array,
    ) -> Array:
        """Return the shares at which cards just arrive, from the part of the time that they used.

        Busy time follows the clock as clock^-s. At share r a card used u, and at the full clock
        u0 = arrival * safe share, from which it was made, so that

            s = ln(u / u0) / ln(1 / r)                  clipped to 0 ... 1
            aim = r * (u / arrival)^(1 / e)             e = (1 + s) / 2

        At lower clocks busy time follows more, as more of it is computing. So e is half way from s
        to 1, which corrects too little rather than too much. For cards at the full clock e is 1.
        A safe share that was clipped gives no u0. Where it is the lowest, the aim is at most that
        too; where it is 1, s is too high, which again corrects too little."""
        slowing = np.maximum(-np.log(in_force), LEAST_SLOWING)
        rise = np.log(used / (SLACK.arrival * self._safe_shares))
        follows = np.clip(rise / slowing, 0.0, 1.0)
        exponent = np.where(in_force < 1.0, 0.5 * (1.0 + follows), 1.0)
        return np.asarray(in_force * (used / SLACK.arrival) ** (1.0 / exponent))


def _correct(shares: Array, aim: Array) -> Array:
    """Move shares towards an aim by part of the way, in logarithms, as shares are ratios."""
    return np.asarray(np.exp((1.0 - SLACK.gain) * np.log(shares) + SLACK.gain * np.log(aim)))


def choose_clocks_hz(
    levels_hz: Sequence[float],
    job_hz: float | None,
    shares: Sequence[float],
) -> list[float | None]:
    """Return the clock of each card: the lowest level that is its share of the job's clock or more.

    ``levels_hz`` are the core clocks of a card, ascending. ``job_hz`` None is a job whose cards are
    not locked: its clock is the highest level, and cards that are not slowed get None, no lock."""
    base_hz = levels_hz[-1] if job_hz is None else job_hz
    clocks_hz: list[float | None] = []
    for share in shares:
        enough = [level for level in levels_hz if level >= share * base_hz * (1.0 - ROUNDING)]
        clock_hz = enough[0] if enough else base_hz
        clocks_hz.append(clock_hz if clock_hz < base_hz * (1.0 - ROUNDING) else job_hz)
    return clocks_hz
