"""Control the cards of one job as one plant.

Ranks of a collective wait for the slowest, so that a job has one speed: all its cards get one
decision, and energy and work are those of all of them together. ``JobCards`` has the methods of
``daemon_client.DaemonCard``. A decision counts as made when all cards have taken it. When one of
them refuses, the others get back the decision before.
"""

from __future__ import annotations

import math
import re
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from concurrent.futures import (
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextlib import suppress
from typing import Any, TypeVar

from wattcast.control.daemon_client import DaemonCard
from wattcast.control.slack_clocks import choose_clocks_hz
from wattcast.core import (
    MissingTool,
    Refused,
    bad_value,
)
from wattcast.measure.device_control import NvmlReading

MOST_CARDS = 64  # of a job, on one node
_PART = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")

T = TypeVar("T")
Decision = tuple[float | None, float | None, float | None]  # core clock, memory clock, limit


def parse_devices(text: str) -> tuple[int, ...]:
    """Return the NVML indices that ``0-3,6`` names, in the order of the job's ranks.

    >>> parse_devices("0-3,6")
    (0, 1, 2, 3, 6)
    """
    form = "cards by NVML index, such as 0-7 or 0,1,4"
    devices: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise bad_value("--devices", form, text)
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        devices += range(first, last + 1)
    if not devices or len(set(devices)) < len(devices) or len(devices) > MOST_CARDS:
        raise bad_value("--devices", f"{form}, each once", text)
    return tuple(devices)


def combine_readings(readings: Sequence[Any]) -> Any:
    """Return the readings of a job's cards as one: energy, power and work of all, the clock of the
    slowest and the use of the busiest.

    A rank that waits for another may idle, while the job as a whole does not wait for work."""
    if len(readings) == 1:
        return readings[0]
    return NvmlReading(
        at_s=max(reading.at_s for reading in readings),
        energy_j=math.fsum(reading.energy_j for reading in readings),
        power_w=math.fsum(reading.power_w for reading in readings),
        core_hz=min(reading.core_hz for reading in readings),
        memory_hz=min(reading.memory_hz for reading in readings),
        busy=max(reading.busy for reading in readings),
        memory_busy=max(reading.memory_busy for reading in readings),
        work_per_s=math.fsum(reading.work_per_s for reading in readings),
        counters=_average_counters([reading.counters for reading in readings]),
    )


def _average_counters(
    by_card: Sequence[Mapping[str, float] | None],
) -> dict[str, float] | None:
    """Return the mean of each counter over the cards of a job; None where a card tells none."""
    known = [counters for counters in by_card if counters is not None]
    if len(known) < len(by_card):
        return None
    return {name: math.fsum(each[name] for each in known) / len(known) for name in known[0]}


class JobCards:
    """Hold all cards of a job and make every decision for all of them at once."""

    def __init__(self, cards: Sequence[DaemonCard]) -> None:
        self._cards = tuple(cards)
        self._decisions: list[Decision] = [(None, None, None)] * len(self._cards)
        # Of the job's core clock: what each card is to have at least, and what it has.
        self.shares: tuple[float, ...] = (1.0,) * len(self._cards)
        self.shares_in_force = self.shares
        self._levels_hz: tuple[float, ...] = ()
        self._threads = ThreadPoolExecutor(len(self._cards))
        names = dict.fromkeys(card.name for card in self._cards)
        self.name = f"{len(self._cards)} × {', '.join(names)}"
        self.uuid = ", ".join(card.uuid for card in self._cards)

    @property
    def count(self) -> int:
        """Count the cards."""
        return len(self._cards)

    @property
    def losses(self) -> int:
        """Count how often a card has lost its daemon."""
        return sum(card.losses for card in self._cards)

    @property
    def is_adrift(self) -> bool:
        """Tell whether the daemon of any card is lost."""
        return any(card.is_adrift for card in self._cards)

    def clocks_hz(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the core and memory clocks that all cards have."""
        clocks = self._ask_all(lambda card: card.clocks_hz())
        core_hz = set.intersection(*(set(core) for core, _ in clocks))
        memory_hz = set.intersection(*(set(memory) for _, memory in clocks))
        return tuple(sorted(core_hz)), tuple(sorted(memory_hz))

    def limits_w(self) -> tuple[float, float, float] | None:
        """Return the power limit that every card has, and the range that all of them can be set
        in; None where a card does not tell.
        """
        limits_w = []
        for limits_of_card_w in self._ask_all(lambda card: card.limits_w()):
            if limits_of_card_w is None:
                return None
            limits_w.append(limits_of_card_w)
        now_w, lowest_w, highest_w = zip(*limits_w, strict=True)
        return min(now_w), max(lowest_w), min(highest_w)

    def read_each(self) -> tuple[Any, ...]:
        """Return the reading of every card."""
        return tuple(self._ask_all(lambda card: card.read()))

    def read(self) -> Any:
        """Return the readings of all cards as one."""
        return combine_readings(self.read_each())

    def beat(self) -> None:
        """Be heard about every card, when it is time."""
        for card in self._cards:
            card.beat()

    def apply(
        self,
        core_hz: float | None,
        memory_hz: float | None,
        limit_w: float | None,
    ) -> None:
        """Set all cards at once; None leaves a knob as it was before. Cards whose share of the core
        clock is below 1 run slower.

        Where one of them refuses, all get the decision before, and the refusal is raised."""
        clocks_hz = self.choose_clocks(core_hz, self.shares)
        decisions = [(clock_hz, memory_hz, limit_w) for clock_hz in clocks_hz]
        try:
            self._decide(decisions)
        except (Refused, MissingTool):
            with suppress(Refused, MissingTool):
                self._decide(self._decisions)
            raise
        self._decisions = decisions
        in_force = []
        for clock_hz in clocks_hz:
            if clock_hz is None or clock_hz == core_hz:
                in_force.append(1.0)
            else:
                in_force.append(clock_hz / (core_hz or self._levels_hz[-1]))
        self.shares_in_force = tuple(in_force)

    def choose_clocks(
        self,
        core_hz: float | None,
        shares: Sequence[float],
    ) -> tuple[float | None, ...]:
        """Return the core clock that each card gets by its share of the job's."""
        if min(shares) >= 1.0:
            return (core_hz,) * len(self._cards)
        if not self._levels_hz:
            self._levels_hz = self.clocks_hz()[0]
        return tuple(choose_clocks_hz(self._levels_hz, core_hz, shares))

    def _decide(self, decisions: Sequence[Decision]) -> None:
        chosen = dict(zip(map(id, self._cards), decisions, strict=True))
        self._ask_all(lambda card: card.apply(*chosen[id(card)]))

    def give_back(self) -> None:
        """Give every card what it had before. ``Refused`` names those that did not take it."""
        self._decisions = [(None, None, None)] * len(self._cards)
        self._ask_all(lambda card: card.give_back())

    def _ask_all(self, question: Callable[[DaemonCard], T]) -> list[T]:
        """Ask all cards at once and return their answers, or raise what went wrong first."""
        answers: list[Future[T]] = [self._threads.submit(question, card) for card in self._cards]
        wait(answers)
        troubles = [answer.exception() for answer in answers]
        errors = [error for error in troubles if error is not None]
        if not errors:
            return [answer.result() for answer in answers]
        refusals = [error for error in errors if type(error) is Refused]
        if len(refusals) > 1:
            raise Refused(" ".join(dict.fromkeys(map(str, refusals))))
        raise errors[0]
