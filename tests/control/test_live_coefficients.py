"""What single coefficients of controlling and watching a real card mean, on a card that is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from test_live_control import FakeCard, Seen

from wattcast.control.clock_forecast import ClockCurves, estimate_card_behaviour, list_core_clocks
from wattcast.control.live_control import control_plant
from wattcast.control.live_plant import LivePlant
from wattcast.control.plants import Lattice, Observation, Settings, build_card_lattice
from wattcast.control.policies import Harmonia
from wattcast.control.program_files import ProgressFile
from wattcast.control.savings import ReferencePairs
from wattcast.control.search_problem import Goal, Objective
from wattcast.control.watch_card import advise_clock
from wattcast.hardware import load_gpu

CORE_HZ = tuple(60e6 * step for step in range(10, 34))  # 600 MHz to 1.98 GHz


@dataclass
class PlainCard(FakeCard):
    """A card at 300 W whose clock stands still until somebody waits."""

    memory_busy: float = 0.9
    issue_share: float = math.nan
    applied_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)

    def power(self) -> float:
        return 300.0

    def read(self) -> Seen:
        self.read_s.append(self.now_s)
        work_per_s = self.issue_share * CORE_HZ[-1]
        return Seen(
            self.now_s,
            self.energy_j,
            300.0,
            CORE_HZ[-1],
            work_per_s=work_per_s,
            memory_busy=self.memory_busy,
        )

    def apply(self, core_hz: float | None, memory_hz: float | None, limit_w: float | None) -> None:
        super().apply(core_hz, memory_hz, limit_w)
        self.applied_s.append(self.now_s)


class SteadyProgress(ProgressFile):
    """A program that does a hundred units of work a second."""

    def __init__(self, card: PlainCard) -> None:
        self._card = card

    def count(self) -> float:
        return 100.0 * self._card.now_s


def make_plant(
    card: PlainCard,
    period_s: float = 1.0,
    until_s: float = 1e6,
    reports: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> LivePlant:
    lattice = build_card_lattice(CORE_HZ, (3.2e9,))
    progress = SteadyProgress(card) if reports else None
    return LivePlant(
        card,
        lattice,
        period_s,
        lambda: card.now_s < until_s,
        card.pass_time,
        progress,
        say,
    )


@pytest.mark.parametrize(
    ("memory_busy", "issue_share", "is_busy"),
    [(0.4, 0.4, False), (0.4, 0.6, True), (0.6, 0.4, True)],
)
def test_a_card_works_whose_memory_or_pipes_are_busy_half_of_the_time(
    memory_busy: float, issue_share: float, is_busy: bool
) -> None:
    plant = make_plant(PlainCard(memory_busy=memory_busy, issue_share=issue_share), reports=False)
    plant.run(plant.default)
    assert plant.saturated is is_busy


def test_a_user_hears_of_a_program_without_work_after_five_periods() -> None:
    sentences: list[str] = []
    plant = make_plant(PlainCard(), reports=False, say=sentences.append)
    for _ in range(4):
        plant.run(plant.default)
    assert sentences == []
    for _ in range(2):
        plant.run(plant.default)
    assert "no work seen" in sentences[0]


@pytest.mark.parametrize(("period_s", "least_s", "most_s"), [(2.0, 0.16, 0.24), (0.5, 0.08, 0.12)])
def test_a_new_clock_gets_twice_the_time_of_a_governor_or_a_fifth_of_a_period(
    period_s: float, least_s: float, most_s: float
) -> None:
    """The governor of an H200 answers 80 to 95 ms after a change (docs/method/measuring.md)."""
    card = PlainCard()
    make_plant(card, period_s).run((0,))
    (applied_s,) = card.applied_s
    assert least_s < card.read_s[0] - applied_s < most_s


@pytest.mark.parametrize(("period_s", "waited_s"), [(2.0, 0.3), (0.5, 0.15)])
def test_a_counter_that_stands_still_is_waited_for_three_steps_or_a_third_of_a_period(
    period_s: float, waited_s: float
) -> None:
    """Counters of an H200 step every 100 ms. The last wait comes after the end of the period."""
    card = PlainCard(frozen=True)
    plant = make_plant(card, period_s)
    plant.run(plant.default)
    assert card.now_s - period_s == pytest.approx(waited_s, abs=0.02)


def test_advice_comes_after_two_periods_in_which_a_program_starts() -> None:
    card = PlainCard()
    advised_s: list[float] = []

    def note_advice(reading: Any, lattice: Lattice) -> Settings | None:
        advised_s.append(card.now_s)
        return None

    control_plant(make_plant(card, until_s=10.5), Objective(), note_advice)
    assert advised_s == [pytest.approx(2.0, abs=0.3)]


def test_a_search_is_interrupted_after_twenty_periods_to_see_what_it_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = PlainCard()
    chosen_s: list[float] = []
    choose = ReferencePairs.choose

    def note_choice(pairs: ReferencePairs, settings: Settings, default: Settings) -> Settings:
        chosen_s.append(card.now_s)
        return choose(pairs, settings, default)

    monkeypatch.setattr(Harmonia, "is_settled", lambda *arguments: False)
    monkeypatch.setattr(ReferencePairs, "choose", note_choice)
    control_plant(make_plant(card, until_s=40.0), Objective())
    assert 20.0 <= chosen_s[0] <= 25.0


def test_one_period_in_twenty_is_a_reference_once_a_saving_is_known() -> None:
    pairs = ReferencePairs()
    references = 0
    for period in range(600):
        settings = pairs.choose((0,), (1,))
        pairs.record(Observation("program", settings, 1.0, 200.0 + settings[0]))
        references += period >= 200 and settings == (1,)
    assert 0.045 < references / 400 < 0.055


def test_a_card_at_its_limit_draws_a_little_less() -> None:
    """Four cards under limits held 0.92 to 0.98 of them in the mean (Zeus' training epochs)."""
    clock_hz = np.linspace(1e9, 2e9, 50)
    curves = ClockCurves(
        clock_hz,
        time_s=1e9 / clock_hz,
        power_w=800.0 * clock_hz / 2e9,
        idle_w=np.full(50, 80.0),
        limit_w=700.0,
    )
    _, power_w = estimate_card_behaviour(curves, np.array([1e9, 2e9]))
    assert 0.92 * 700.0 < power_w[1] < 0.99 * 700.0


def test_nothing_is_forecast_below_three_tenths_of_the_top_clock() -> None:
    """The H200's table begins at 345 MHz, a sixth of its top clock, where nobody runs anything."""
    gpu = load_gpu("h200")
    lowest_hz = list_core_clocks(gpu)[0]
    assert float(np.min(gpu.clocks.lowest_hz)) < 0.2 * 1980e6
    assert 0.28 * 1980e6 < lowest_hz < 0.32 * 1980e6


def measure_advised_power(core_hz: float, power_w: float) -> float:
    """Return the power that an unknown card is expected to draw at a clock, for all it computes."""
    levels_hz = np.array([core_hz, 1410e6])
    advice = advise_clock(power_w, 1410e6, 0.0, levels_hz, Objective(Goal.ENERGY))
    assert advice is not None
    assert advice["core_hz"] == core_hz
    return float(power_w * (1.0 - advice["power_saving"]))


# The published voltages of an A100-PCIE: 0.694 V to 1,020 MHz, 0.894 V at 1,410 MHz.
SWITCHED_SHARE = (0.694 / 0.894) ** 2 * 1020 / 1410


def test_an_unknown_card_has_the_voltages_of_an_a100() -> None:
    saved_w = 250.0 - measure_advised_power(1020e6, 250.0)
    idle_share = 0.2
    assert saved_w == pytest.approx(250.0 * (1.0 - idle_share) * (1.0 - SWITCHED_SHARE), rel=0.03)


def test_an_unknown_card_idles_as_published_cards_do() -> None:
    """At the top clock an idle A100-PCIE, A100-SXM and H100 draw 17 to 27 % of their limit."""
    idle_shares = []
    for name in ("a100-pcie-40gb", "a100-sxm-80gb", "h100-sxm"):
        power = load_gpu(name).power
        assert power.idle_w is not None
        idle_shares.append(float(power.idle_w.value.max() / np.mean(power.limit_w)))
    drawn_w = measure_advised_power(1020e6, 250.0)
    idle_w = (drawn_w - 250.0 * SWITCHED_SHARE) / (1.0 - SWITCHED_SHARE)
    assert min(idle_shares) < idle_w / 250.0 < max(idle_shares) - 0.01
