"""Run a real card and a program in periods, as a plant that the controller observes.

One period is one observation: energy comes from the card's counter, work from what the program
reports (``ProgressFile``) or, where the card measures it, from how busy its pipes were. The card is
set through the daemon (``daemon_client.py``), which gives it back whatever happens here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.control.card_settings import RefusedKnob
from wattcast.control.daemon_client import DaemonCard
from wattcast.control.job_cards import JobCards, combine_readings
from wattcast.control.plants import (
    Knob,
    KnobRole,
    Lattice,
    Observation,
    Settings,
    move_knob,
)
from wattcast.control.program_files import (
    BusyFolder,
    ProgressFile,
    SmCountFile,
)
from wattcast.control.slack_clocks import SlackShares
from wattcast.core import MissingTool, Refused
from wattcast.core.arrays import Array
from wattcast.measure.device_control import PHASES
from wattcast.measure.source_check import CHECKS, is_plausible_power


class LiveControlCoefficients(Coefficients):
    """How a real card is observed and controlled in periods."""

    saturated: float  # share of time with a kernel running, below which a card waits for work
    # of memory or issue slots, from which a card without a program's own signal counts as busy
    in_use: float
    blind_periods: int  # without visible work, after which the user is told
    new_setting_s: float  # time that a new setting gets, at most
    new_setting_share: float  # of a period, likewise
    mark_s: float  # wait for a step of the counter, at most
    mark_share: float  # of a period, likewise
    warm_up: int  # periods with work that are not looked at: programs start slowly
    search_periods: int  # of search, after which the saving of the best setting so far is measured
    least_pairs: int  # of periods, before a saving is claimed
    rest_periods: int  # between two pairs, once there are enough


LIVE = load_coefficients("live_control", LiveControlCoefficients)


PROGRAM_KERNEL = "program"
POLL_S = 0.01  # step of waiting
BEAT_POLLS = 5  # of these steps between two signs of life to the daemon
RANGE_SLACK = 0.001  # by which levels may lie outside a range that the daemon allows
ROLES = {
    "core": KnobRole.CORE_CLOCK,
    "memory": KnobRole.MEMORY_CLOCK,
    "limit": KnobRole.POWER_LIMIT,
}


@dataclass(frozen=True)
class _CounterMark:
    """What the cards and the program had counted, each at the moment its counter stepped."""

    readings: tuple[Any, ...]  # of each card
    energy: tuple[tuple[float, float], ...]  # of each card: when its counter stepped, and joules
    work_s: float
    work: float
    counters: Mapping[str, float] | None  # shares since the mark before; None: the card tells none


@dataclass
class LivePlant:
    """Run a card and a program in periods."""

    card: DaemonCard | JobCards
    lattice: Lattice  # of fewer knobs after the driver or the daemon refused some
    period_s: float
    alive: Callable[[], bool]
    wait: Callable[[float], None]
    progress: ProgressFile | None = None
    say: Callable[[str], None] = lambda text: None
    units: SmCountFile | None = None
    busy: BusyFolder | None = None  # for cards that wait for others (``slack_clocks.py``)
    controlled: bool = True
    reading: Any = None  # the last one
    # Seconds, units of work, joules and core cycles at each setting.
    totals: dict[Settings, Array] = field(default_factory=dict)
    _now: Settings | None = None
    _worked: set[KnobRole] = field(default_factory=set)  # knobs that were set at least once
    _busy: deque[float] = field(default_factory=lambda: deque(maxlen=LIVE.blind_periods))
    _reported: bool = False  # whether the program has reported any progress
    _slack: SlackShares | None = None
    _was_adrift: bool = False  # whether the daemon was lost at the end of the last period
    _blind: int = 0  # periods in a row without visible work

    @property
    def default(self) -> Settings:
        return self.lattice.top

    @property
    def saturated(self) -> bool:
        """Tell whether the card is kept busy, as far as it reports that: else its throughput is
        that of the demand.
        """
        return not self._busy or sum(self._busy) / len(self._busy) >= LIVE.saturated

    @property
    def start(self) -> Settings:
        """Return the settings that a search begins at: as before, but that cards which wait for
        others run slower.
        """
        which = self.lattice.find_knob(KnobRole.SLACK_CLOCK)
        return self.default if which is None else move_knob(self.default, which, 0)

    @property
    def free_knobs(self) -> tuple[bool, ...]:
        """Tell which knobs a search may turn."""
        return tuple(knob.role is not KnobRole.SLACK_CLOCK for knob in self.lattice.knobs)

    def stop_slowing(self) -> None:
        """Let all cards of the job have its clock from now on."""
        knobs = [knob for knob in self.lattice.knobs if knob.role is not KnobRole.SLACK_CLOCK]
        self.say("slower clocks for cards that wait do not pay; all get the job's clock")
        self.lattice = Lattice(tuple(knobs))
        self._now = None
        self.totals = {}

    def next_kernel(self) -> str | None:
        return PROGRAM_KERNEL if self.alive() else None

    def run(self, settings: Settings) -> Observation:
        """Run one period. Settings the card refuses are left out from then on; the program runs
        on.
        """
        remaining_s = self.period_s
        losses = self.card.losses
        is_new = settings != self._now or self._needs_new_shares(settings)
        if self.controlled and is_new and self._set_knobs(settings):
            remaining_s -= self.pause_heard(
                min(LIVE.new_setting_s, LIVE.new_setting_share * self.period_s)
            )
        begin, used_s = self._mark_counters()
        self.pause_heard(remaining_s - used_s)
        end, _ = self._mark_counters()
        self._learn_slack(settings)
        was_adrift = self._report_daemon(losses)
        if begin is None or end is None or was_adrift:
            return Observation(
                PROGRAM_KERNEL,
                settings,
                math.nan,
                math.nan,
                stale=True,
            )

        self.reading = combine_readings(end.readings)
        power_w, is_stale = _measure_power_w(begin, end)
        seconds, work = self._measure_work(begin, end)
        self._watch_for_work(work)
        self._watch_saturation(self.reading)
        return Observation(
            PROGRAM_KERNEL,
            settings,
            seconds,
            power_w,
            work,
            counters=end.counters,
            stale=is_stale,
            core_hz=self._read_governed_clock(self.reading),
        )

    def _report_daemon(self, losses: int) -> bool:
        """Tell whether the daemon was lost in this period, whose settings are then not known."""
        is_adrift = self.card.is_adrift
        if is_adrift and not self._was_adrift:
            self.say("the daemon is lost; the card is set again when another one answers")
        is_new_daemon = self.card.losses != losses
        if not is_adrift and (self._was_adrift or is_new_daemon):
            self.say("the daemon is back, control goes on")
        was_adrift = self._was_adrift or is_adrift or is_new_daemon
        self._was_adrift = is_adrift
        return was_adrift

    def _learn_slack(self, settings: Settings) -> None:
        """Learn from the period how long each card of a job was busy."""
        if self.busy is None or isinstance(self.card, DaemonCard):
            return
        busy_s = self.busy.read()
        if busy_s is None:
            return
        if self._slack is None:
            self._slack = SlackShares(self.card.count)
        level = self._find_core_level(settings)
        self._slack.learn(level, busy_s, self.card.shares_in_force)

    def _choose_shares(self, settings: Settings) -> tuple[float, ...]:
        """Return the share of the job's clock that each card gets at some settings."""
        which = self.lattice.find_knob(KnobRole.SLACK_CLOCK)
        is_used = which is not None and settings[which] < self.default[which]
        if self._slack is None or not is_used:
            return (1.0,) * self.card.count
        return self._slack.find_shares(self._find_core_level(settings))

    def _find_core_level(self, settings: Settings) -> int:
        which = self.lattice.find_knob(KnobRole.CORE_CLOCK)
        return 0 if which is None else settings[which]

    def _needs_new_shares(self, settings: Settings) -> bool:
        """Tell whether a card is to run at another share of the job's clock than it does."""
        if isinstance(self.card, DaemonCard) or self.busy is None:
            return False
        which = self.lattice.find_knob(KnobRole.CORE_CLOCK)
        core_hz = None
        if which is not None and settings[which] < self.default[which]:
            core_hz = self.lattice.knobs[which].levels[settings[which]]
        chosen = self.card.choose_clocks(core_hz, self._choose_shares(settings))
        return chosen != self.card.choose_clocks(core_hz, self.card.shares)

    def _measure_work(
        self,
        begin: _CounterMark,
        end: _CounterMark,
    ) -> tuple[float, float]:
        """Return the seconds and the work of a period, by the program's report or by the pipes."""
        work = end.work - begin.work
        self._reported = self._reported or work > 0
        if self._reported:
            return end.work_s - begin.work_s, work
        before = combine_readings(begin.readings)
        after = combine_readings(end.readings)
        seconds = after.at_s - before.at_s
        return seconds, after.work_per_s * seconds

    def _watch_for_work(self, work: float) -> None:
        """Tell the user when no work was seen for several periods."""
        self._blind = 0 if work > 0 else self._blind + 1  # NaN counts as none
        if self._blind == LIVE.blind_periods and self.controlled:
            self.say(
                "no work seen, so nothing is tuned; have the program append to "
                "WATTCAST_PROGRESS (--progress)"
            )

    def _watch_saturation(self, reading: Any) -> None:
        """Remember how busy the card was, and tell the user when it begins to wait for work."""
        busy = float(reading.busy)
        is_memory_used = reading.memory_busy >= LIVE.in_use  # False for NaN
        if not self._reported and math.isfinite(reading.work_per_s) and not is_memory_used:
            # A kernel may run and wait: only pipes that issue show that the card works.
            is_working = reading.work_per_s >= LIVE.in_use * reading.core_hz
            busy = min(busy, float(reading.busy >= LIVE.saturated and is_working))
        if not math.isfinite(busy):
            return
        was_saturated = self.saturated
        self._busy.append(busy)
        if was_saturated and not self.saturated and self.controlled:
            self.say(
                "the card waits for work, so that a lower clock would lengthen response times "
                "unseen; nothing is slowed without a latency signal (--metrics)"
            )

    def _read_governed_clock(self, reading: Any) -> float:
        """Return the clock that a governor allows; NaN while the card idles, whose clock says
        nothing of it.
        """
        first = self.lattice.knobs[0]
        lowest_hz = first.levels[0] if first.role is KnobRole.CORE_CLOCK else 0.0
        is_working = reading.busy >= PHASES.busy and reading.core_hz >= lowest_hz  # False for NaN
        return float(reading.core_hz) if is_working else math.nan

    def _set_knobs(self, settings: Settings) -> bool:
        """Set the knobs; those at their default get back what they had before. Tell whether
        anything changed.
        """
        is_default = settings == self.default
        if is_default and self._now is None and not self._worked:
            self._now = settings
            return False
        values: dict[KnobRole, float | None] = {}
        levels = self.lattice.level_values(settings)
        for which, knob in enumerate(self.lattice.knobs):
            is_top = settings[which] == self.default[which]
            values[knob.role] = None if is_top else levels[which]
        with self.ending_control():
            if self.units is not None:
                self.units.set(values.get(KnobRole.COMPUTE_UNITS) or self.units.total)
            if self.busy is not None and not isinstance(self.card, DaemonCard):
                self.card.shares = self._choose_shares(settings)
            is_told = settings == self._now  # only shares have moved
            try:
                core_hz, memory_hz, limit_w = (values.get(role) for role in ROLES.values())
                self.card.apply(core_hz, memory_hz, limit_w)
            except RefusedKnob as error:
                self._leave_out_refused(error, settings)
                return False
            self._worked |= {role for role, value in values.items() if value is not None}
            self._now = settings
            description = f"{self.lattice.describe(settings)}: set"
            if not is_told:
                self.say("the card as before" if is_default else description)
            return True
        return False

    def _leave_out_refused(
        self,
        error: RefusedKnob,
        settings: Settings,
    ) -> None:
        """Leave refused levels out: those outside the range that is allowed, or the whole knob if
        it never worked.
        """
        role = ROLES[error.knob]
        knobs = []
        for knob, level in zip(self.lattice.knobs, settings, strict=True):
            levels = knob.levels
            if knob.role is role:
                levels = self._list_allowed_levels(error, knob, level)
            if len(levels) > 1:
                knobs.append(Knob(knob.role, levels))
        if not any(knob.role in ROLES.values() for knob in knobs):
            self._end_control(f"nothing is left to set: {error}")
            return
        self.say(f"{error} It is left alone from now on.")
        self.lattice = Lattice(tuple(knobs))
        self._now = None
        self.totals = {}

    def _list_allowed_levels(
        self,
        error: RefusedKnob,
        knob: Knob,
        refused_level: int,
    ) -> tuple[float, ...]:
        """Return the levels of a refused knob that may still be set."""
        if error.allowed is not None:
            lowest, highest = error.allowed
            low = lowest * (1.0 - RANGE_SLACK)
            high = highest * (1.0 + RANGE_SLACK)
            return tuple(value for value in knob.levels if low <= value <= high)
        if knob.role not in self._worked:
            return ()
        return knob.levels[:refused_level] + knob.levels[refused_level + 1 :]

    def _end_control(self, reason: str) -> None:
        """Stop steering: the card gets back what it had, and the program runs on."""
        self.controlled = False
        self.say(f"control ends: {reason}")
        if self.units is not None:
            self.units.reset()
        with suppress(Refused, MissingTool):
            self.card.give_back()

    @contextmanager
    def ending_control(self) -> Iterator[None]:
        """Stop steering where the card, its driver or the daemon refuses what is done in the
        block.
        """
        try:
            yield
        except (Refused, MissingTool) as error:
            if self.controlled:
                self._end_control(str(error))

    def pause_heard(self, seconds: float) -> float:
        """Wait, being heard meanwhile, and return how long."""
        waited_s = 0.0
        while waited_s < seconds - 1e-9 and self.alive():
            step_s = min(seconds - waited_s, BEAT_POLLS * POLL_S)
            self.wait(step_s)
            waited_s += step_s
            if self.controlled:
                with self.ending_control():
                    self.card.beat()
        return waited_s

    def _count_work(self) -> float:
        return self.progress.count() if self.progress else 0.0

    def _mark_counters(self) -> tuple[_CounterMark | None, float]:
        """Read each card just after its energy counter stepped, and the work just after a unit
        ended.

        Counters move in steps; read at any other moment, a step more or less would be noise.
        Return also how long that took."""
        waited_s = 0.0
        most_s = min(LIVE.mark_s, LIVE.mark_share * self.period_s)
        energy: dict[int, tuple[float, float]] = {}  # by card: when its counter stepped, and joules
        work: tuple[float, float] | None = None  # when a unit ended, and units
        with self.ending_control():
            first = self.card.read_each()
            first_work = self._count_work()
            while True:
                waited_s += self.pause_heard(POLL_S)
                readings = self.card.read_each()
                count = self._count_work()
                for place, reading in enumerate(readings):
                    if reading.energy_j != first[place].energy_j:
                        energy.setdefault(place, (reading.at_s, reading.energy_j))
                if work is None and count != first_work:
                    work = (readings[-1].at_s, count)
                has_stepped = len(energy) == len(readings)
                is_complete = has_stepped and (work or self.progress is None)
                if is_complete or waited_s >= most_s or not self.alive():
                    marks = []
                    for place, reading in enumerate(readings):
                        marks.append(energy.get(place, (reading.at_s, reading.energy_j)))
                    work_s, work_count = work or (readings[-1].at_s, count)
                    mark = _CounterMark(
                        readings,
                        tuple(marks),
                        work_s,
                        work_count,
                        combine_readings(first).counters,  # what came later is of this wait alone
                    )
                    return mark, waited_s
        return None, waited_s


def _measure_power_w(begin: _CounterMark, end: _CounterMark) -> tuple[float, bool]:
    """Return the mean power of all cards in a period, and whether a counter cannot be believed."""
    total_w = 0.0
    is_stale = False
    for place in range(len(end.readings)):
        power_w, is_card_stale = _measure_card_power_w(begin, end, place)
        total_w += power_w
        is_stale = is_stale or is_card_stale
    return total_w, is_stale


def _measure_card_power_w(
    begin: _CounterMark,
    end: _CounterMark,
    place: int,
) -> tuple[float, bool]:
    """Return the mean power of one card in a period, and whether its counter cannot be believed."""
    begin_s, begin_j = begin.energy[place]
    end_s, end_j = end.energy[place]
    before = begin.readings[place]
    after = end.readings[place]
    joules = end_j - begin_j
    span_s = end_s - begin_s
    if not math.isfinite(joules):
        return float(after.power_w), False
    if joules <= 0:  # the counter stood still, or was reset
        return float(after.power_w), True
    if span_s <= 0:
        return float(after.power_w), False
    power_w = joules / span_s
    if span_s < CHECKS.average_s:  # power readings are means over a second
        return power_w, False
    ends_w = (before.power_w, after.power_w)
    return power_w, not is_plausible_power(power_w, ends_w, CHECKS.most_w)
