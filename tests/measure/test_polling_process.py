"""The polling loop in imagined time: what a lost device, a hanging driver and failing readings cost and leave."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from wattcast.measure import energy_samples as layout
from wattcast.measure import polling_process
from wattcast.measure.energy_samples import EnergySamples, SampleRing
from wattcast.measure.energy_sources import ReadError, SlowReadings


class ImaginedGpu:
    """A counter at 300 W whose calls take ``call_s(now)``; it can be lost, or fail, from a moment on."""

    energy_range_j = None

    def __init__(self, call_s: Callable[[float], float], fails_s: float = math.inf, lost: bool = True) -> None:
        self.now_s, self.calls, self._call_s, self._fails_s, self._lost = 0.0, 0, call_s, fails_s, lost

    def energy_j(self) -> float:
        self._pass()
        return 300.0 * math.floor(self.now_s / 0.1) * 0.1

    def sm_clock_hz(self) -> float:
        self._pass()
        return 1.98e9

    def slow(self) -> SlowReadings:
        self._pass()
        return SlowReadings()

    def _pass(self) -> None:
        self.calls += 1
        self.now_s += self._call_s(self.now_s)
        if self.now_s >= self._fails_s:
            raise ReadError("stand-in", 15, lost=self._lost)


def poll_until(
    gpu: ImaginedGpu, end_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path, relaxed: bool = True
) -> EnergySamples:
    """What the loop writes until ``end_s``; sleeping costs nothing."""
    ring = SampleRing.create(tmp_path / "ring", 2**17)

    def sleep(seconds: float) -> None:
        gpu.now_s += seconds
        if gpu.now_s >= end_s:
            ring.header[layout.STOP] = 1

    def monotonic() -> float:
        gpu.now_s += 1e-5  # a loop that never sleeps still ends
        if gpu.now_s >= end_s:
            ring.header[layout.STOP] = 1
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
