"""The polling loop in imagined time: what a lost device, a hanging driver and failing readings cost and leave."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from wattcast.measure import energy_samples as layout
from wattcast.measure import polling_process
from wattcast.measure.energy_samples import EnergySamples, SampleRing
from wattcast.measure.energy_sources import ReadError, SlowReadings
from wattcast.measure.measured_run import summarise_window


class ImaginedGpu:
    """A counter whose calls take ``call_s(now)``; it can be lost, or fail, from a moment until another.

    ``steps`` are moments and the watts that are drawn from then on.
    """

    energy_range_j = None

    def __init__(
        self,
        call_s: Callable[[float], float],
        fails_s: float = math.inf,
        lost: bool = True,
        back_s: float = math.inf,
        steps: Sequence[tuple[float, float]] = ((0.0, 300.0),),
    ) -> None:
        self.now_s, self.calls, self._call_s, self._steps = 0.0, 0, call_s, steps
        self._fails_s, self._back_s, self._lost = fails_s, back_s, lost

    def drawn_j(self, until_s: float) -> float:
        ends_s = [begin_s for begin_s, _ in self._steps[1:]] + [math.inf]
        return sum(
            watts * max(min(end_s, until_s) - begin_s, 0.0)
            for (begin_s, watts), end_s in zip(self._steps, ends_s, strict=True)
        )

    def energy_j(self) -> float:
        self._pass()
        return self.drawn_j(math.floor(self.now_s / 0.1 + 1e-9) * 0.1)

    def sm_clock_hz(self) -> float:
        self._pass()
        return 1.98e9

    def slow(self) -> SlowReadings:
        self._pass()
        return SlowReadings()

    def _pass(self) -> None:
        self.calls += 1
        self.now_s += self._call_s(self.now_s)
        if self._fails_s <= self.now_s < self._back_s:
            raise ReadError("stand-in", 15, lost=self._lost)


def poll_until(
    gpu: ImaginedGpu,
    end_s: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path,
    relaxed: bool = True,
    quick_s: float = math.inf,
) -> EnergySamples:
    """What the loop writes until ``end_s``, told to be quick from ``quick_s`` on; sleeping costs nothing."""
    ring = SampleRing.create(tmp_path / "ring", 2**17)

    def sleep(seconds: float) -> None:
        gpu.now_s += seconds
        ring.header[layout.QUICK] = int(gpu.now_s >= quick_s)
        if gpu.now_s >= end_s:
            ring.header[layout.STOP] = 1

    def monotonic() -> float:
        sleep(1e-5)  # a loop that never sleeps still ends
        return gpu.now_s

    clock = SimpleNamespace(monotonic=monotonic, sleep=sleep, process_time_ns=lambda: 0)
    monkeypatch.setattr(polling_process, "time", clock)
    polling_process.poll_source(gpu, ring, 0.05, os.getppid(), relaxed)
    return EnergySamples(ring.read()[0])


@pytest.mark.parametrize("relaxed", [True, False])
def test_a_lost_device_is_asked_ever_more_rarely(relaxed: bool, monkeypatch, tmp_path) -> None:
    """The loop asked a lost device 50,000 times a second: the times of its other readings had passed for good."""
    gpu = ImaginedGpu(lambda now_s: 1e-4, fails_s=2.0)
    poll_until(gpu, 2.0, monkeypatch, tmp_path, relaxed)
    before = gpu.calls
    poll_until(gpu, 62.0, monkeypatch, tmp_path, relaxed)
    assert gpu.calls - before < 80


def test_readings_that_fail_one_after_another_are_tried_ever_more_rarely(monkeypatch, tmp_path) -> None:
    gpu = ImaginedGpu(lambda now_s: 1e-4, fails_s=0.0, lost=False)
    poll_until(gpu, 10.0, monkeypatch, tmp_path)
    assert gpu.calls < 300


def test_a_reading_that_took_long_has_no_time_and_is_not_used(monkeypatch, tmp_path) -> None:
    """A call of 0.4 s was dated to its middle: its energy lay 0.2 s beside the truth, and nothing said so."""
    gpu = ImaginedGpu(lambda now_s: 0.4 if now_s > 2.0 else 0.003)
    samples = poll_until(gpu, 6.0, monkeypatch, tmp_path)
    late = samples.between(2.5, 6.0)
    assert len(late) > 2
    assert len(late.known("energy_j")) == 0
    slow = poll_until(ImaginedGpu(lambda now_s: 0.03), 3.0, monkeypatch, tmp_path)  # a driver that is always slow
    assert len(slow.known("energy_j")) > 10


@pytest.mark.parametrize("fault", ["lost", "hanging", "failing"])
def test_a_device_away_at_any_moment_gives_no_unflagged_error_over_a_percent(fault, monkeypatch, tmp_path) -> None:
    """Steps seconds apart, around the beginning or end of a run, were joined by a line, and nothing said so."""
    chance, plain = random.Random(fault), 0
    for _ in range(34):
        start_s, length_s = 1.1 + 0.1 * chance.random(), chance.choice([1.5, 3.0, 8.0])
        end_s = start_s + length_s
        begin_s = chance.uniform(0.0, end_s + 0.3)
        back_s = math.inf if chance.random() < 0.3 else begin_s + 10.0 ** chance.uniform(-1.5, 1.0)
        steps = [(0.0, 300.0)] + [(0.1 * i, chance.choice([100.0, 300.0, 700.0])) for i in range(15, 95, 7)]
        steps = [(at_s, watts) for at_s, watts in steps if at_s < end_s - 0.3]  # not amid the counter's last step

        def hang_s(now_s: float, begin_s: float = begin_s, back_s: float = back_s) -> float:
            return min(back_s, 60.0) - now_s if begin_s <= now_s < back_s else 3e-3

        moments = (math.inf, math.inf) if fault == "hanging" else (begin_s, back_s)
        gpu = ImaginedGpu(
            hang_s if fault == "hanging" else lambda _: 3e-3, moments[0], fault == "lost", moments[1], steps
        )
        samples = poll_until(gpu, end_s + 1.0, monkeypatch, tmp_path, quick_s=end_s)
        found = summarise_window("run", samples, start_s, end_s)
        (tmp_path / "ring").unlink()
        assert found.flags or found.energy_j is not None
        if not found.flags:
            plain += 1
            assert found.energy_j == pytest.approx(gpu.drawn_j(end_s) - gpu.drawn_j(start_s), rel=0.01)
    assert 4 < plain < 30
