"""How long a counter is watched around a run, and when a card is idle, in imagined time."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from synthetic import synthetic

from wattcast.core.errors import Refused
from wattcast.measure import measured_run
from wattcast.measure.energy_samples import EnergySamples


class ImaginedTime:
    """A clock that sleeping moves on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def monotonic(self) -> float:
        return self.now_s


class ImaginedSampler:
    """A sampler of a card whose power alternates from step to step of its counter."""

    lost = False

    def __init__(self, time: ImaginedTime, power_w: float, spread_w: float, steps: bool = True):
        self._time = time
        self._steps = steps
        self.quick_s: list[float] = []
        self.samples = synthetic(
            12.0, power_w=lambda t: power_w + spread_w * (1.0 - 2.0 * (int(t / 0.1 + 1e-6) % 2))
        )
        self.identity = SimpleNamespace(power_limit_w=700.0, name="imagined GPU")
        self.head = 0

    def __enter__(self) -> ImaginedSampler:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start(self) -> None:
        pass

    def check(self) -> None:
        pass

    def quick(self, is_quick: bool = True) -> None:
        self.quick_s.append(self._time.now_s)

    def since(self, mark: int) -> EnergySamples:
        if self._steps:
            return self.samples
        rows = self.samples.rows[:100].copy()
        rows[:, 1] = 5.0
        return EnergySamples(rows)


def imagine(
    monkeypatch: pytest.MonkeyPatch, power_w: float, spread_w: float, steps: bool = True
) -> tuple[ImaginedTime, ImaginedSampler]:
    """Put an imagined clock and sampler in the place of the real ones."""
    time = ImaginedTime()
    sampler = ImaginedSampler(time, power_w, spread_w, steps)
    monkeypatch.setattr(measured_run, "time", time)
    monkeypatch.setattr(measured_run, "Sampler", lambda *arguments, **options: sampler)
    return time, sampler


@pytest.mark.parametrize(
    ("power_w", "spread_w", "is_idle"),
    [(300.0, 28.0, True), (300.0, 36.0, False), (10.0, 2.7, True), (10.0, 3.4, False)],
)
def test_an_idle_card_spreads_by_two_watts_and_a_tenth(
    monkeypatch: pytest.MonkeyPatch, power_w: float, spread_w: float, is_idle: bool
) -> None:
    imagine(monkeypatch, power_w, spread_w)
    if is_idle:
        assert measured_run.measure_idle()[0].power_w == pytest.approx(power_w, rel=0.1)
        return
    with pytest.raises(Refused, match="something else"):
        measured_run.measure_idle()


def test_a_card_is_watched_for_a_second_before_and_two_steps_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten steps of 100 ms tell the counter's period; two and a half end what the window began."""
    time, sampler = imagine(monkeypatch, 100.0, 0.0)
    window, _ = measured_run.measure_idle(length_s=3.0)
    assert window.duration_s == pytest.approx(3.0)
    before_s = sampler.quick_s[0] - 3.0
    after_s = time.now_s - sampler.quick_s[0]
    assert 1.0 < before_s < 1.4
    assert 0.2 < after_s < 0.3


def test_a_counter_that_does_not_step_is_awaited_for_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time, sampler = imagine(monkeypatch, 100.0, 0.0, steps=False)
    measured_run._await_step(sampler)
    assert 0.8 < time.now_s < 1.2
    assert np.diff(sampler.quick_s).sum() == 0.0
