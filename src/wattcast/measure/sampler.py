"""Start the polling process, read its ring of samples, and find out how fast a device's power
sensor is.

Polling happens in a process of its own (``polling_process``), so that a driver call of a
millisecond never stalls the measured program. A process that hangs inside the driver is noticed by
its silence.

A counter that changes every 100 ms cannot tell two kernels of 10 ms apart, and an average over a
second still shows the time before a short run. ``probe_sensor`` measures both instead of assuming
them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from wattcast.core import (
    BadInput,
    MissingTool,
    Refused,
)
from wattcast.measure import sample_ring as layout
from wattcast.measure.counter_ticks import find_ticks
from wattcast.measure.energy_samples import COLUMNS, EnergySamples
from wattcast.measure.energy_sources import DeviceIdentity, find_source_makers
from wattcast.measure.sample_ring import SampleRing
from wattcast.measure.window_summary import WINDOWS

SILENCE_S = 3.0  # a healthy sampler is never silent this long
START_POLL_S = 0.005  # between looks for the first sample
STOP_S = 1.0  # that the polling process gets to end before it is killed

# What describes a sensor.
LONG_AVERAGE_S = 0.3  # power readings that look back further are of no use for short runs
BEFORE_S = 0.4  # before a load begins, over which a reading is averaged
AFTER_S = 0.3  # at the end of a load
LEAST_RISE = 1.1  # of a reading, for its rise to be timed
# A boxcar average rises linearly: the time between these shares of it is their difference.
RISE_SHARES = (0.1, 0.9)

# The load that a sensor is probed with.
IDLE_S = 2.5
LOAD_S = 3.0
LOAD_ELEMENTS = 2**28  # copied again and again
COPIES_A_WAIT = 40


def make_child_environment() -> dict[str, str]:
    """Return this process's environment with Wattcast's own folder first on ``PYTHONPATH``."""
    environment = dict(os.environ)
    folders = [str(Path(__file__).parents[2])]
    inherited = environment.get("PYTHONPATH")
    if inherited:
        folders.append(inherited)
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    return environment


class Sampler:
    """The reading side. Use as a context manager; starting and stopping are explicit."""

    def __init__(
        self,
        source: str = "auto",
        index: int | None = None,
        period_s: float = 0.0015,
        relaxed: bool = False,
    ) -> None:
        self._order: dict[str, Any] = {
            "source": source,
            "index": index,
            "period_s": period_s,
            "relaxed": relaxed,
        }
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ring: SampleRing | None = None
        self._header = np.zeros(layout.HEADER, np.int64)  # the ring's, once there is one
        self.identity = DeviceIdentity("")

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self, timeout_s: float = 20.0) -> None:
        """Start polling; returns once the first sample is there."""
        # An unknown name is an error before a process is started.
        find_source_makers(self._order["source"])
        self._folder = tempfile.TemporaryDirectory(prefix="wattcast-")
        path = Path(self._folder.name) / "samples"
        self._ring = SampleRing.create(path)
        self._header = self._ring.header
        order = json.dumps(self._order | {"ring": str(path)})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "wattcast.measure.polling_process", order],
            env=make_child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        deadline = time.monotonic() + timeout_s
        assert self._process.stdout is not None
        while self.head == 0:
            has_ended = self._process.poll() is not None
            if has_ended or time.monotonic() > deadline:
                answer = self._process.stdout.readline() if has_ended else ""
                self.stop()
                self._raise_refusal(answer, timeout_s)
            time.sleep(START_POLL_S)
        self.identity = DeviceIdentity(**json.loads(self._process.stdout.readline()))

    @staticmethod
    def _raise_refusal(answer: str, timeout_s: float) -> NoReturn:
        """Raise the error that the polling process ended with, or that it did not answer."""
        reason = ""
        is_users = False
        with contextlib.suppress(ValueError):
            refusal = json.loads(answer)
            reason = str(refusal.get("missing", ""))
            is_users = bool(refusal.get("is_users"))
        if is_users:
            raise BadInput(reason)
        raise MissingTool(reason or f"the sampler gave no reading within {timeout_s:.0f} s.")

    def stop(self) -> None:
        """End the polling process; kills it when it does not listen."""
        self._header[layout.STOP] = 1
        if self._process is not None:
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_S)
            if self._process.stdout is not None:
                self._process.stdout.close()
        self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def restart(self) -> None:
        """Start a fresh process after one that hung or died."""
        self.stop()
        self.start()

    @property
    def healthy(self) -> bool:
        """Whether samples still come in and the device is there."""
        if self._process is None or self._process.poll() is not None:
            return False
        return self.silence_s < SILENCE_S and int(self._header[layout.STATUS]) == layout.SAMPLING

    @property
    def lost(self) -> bool:
        """Whether the device has vanished."""
        return int(self._header[layout.STATUS]) == layout.LOST

    @property
    def silence_s(self) -> float:
        """Age of the latest sample."""
        latest_s = self.since(self.head - 1).last("time_s")
        return math.inf if latest_s is None else time.monotonic() - latest_s

    @property
    def errors(self) -> int:
        """Readings that failed so far."""
        return int(self._header[layout.ERRORS])

    def quick(self, is_quick: bool) -> None:
        """Read the counter as quickly as it goes, around a moment that matters; costs processor
        time.
        """
        self._header[layout.QUICK] = int(is_quick)

    @property
    def processor_s(self) -> float:
        """Processor time the polling process has used since its first reading."""
        return float(self._header[layout.PROCESSOR_NS]) * 1e-9

    @property
    def head(self) -> int:
        """Number of samples so far; give it to ``since`` later."""
        return int(self._header[layout.HEAD])

    def since(self, mark: int) -> EnergySamples:
        """Return the samples from number ``mark`` on."""
        if self._ring is None:
            return EnergySamples(np.empty((0, len(COLUMNS))))
        return EnergySamples(self._ring.read(mark))

    def check(self) -> None:
        """Raise ``Refused`` with the reason when samples can no longer be trusted."""
        if self.lost:
            raise Refused(
                "the device has vanished (NVML: GPU is lost); what was measured before is kept."
            )
        if not self.healthy:
            raise Refused(
                f"the sampler has been silent for {self.silence_s:.1f} s; the driver may hang."
            )


@dataclass(frozen=True)
class PowerSensor:
    """Update periods and averaging windows in seconds; None where there was nothing to see."""

    energy_period_s: float | None
    instant_period_s: float | None
    average_period_s: float | None
    instant_window_s: float | None
    average_window_s: float | None
    memory_window_s: float | None
    poll_period_s: float
    clock_period_s: float | None

    @property
    def implies(self) -> tuple[str, ...]:
        """What follows for anyone who measures with it."""
        consequences = []
        if self.energy_period_s is None:
            consequences.append(
                "no energy counter: power comes from readings, and its maximum is the maximum of "
                "those."
            )
        else:
            shortest_s = WINDOWS.least_ticks * self.energy_period_s
            consequences.append(
                f"the energy counter steps every {1e3 * self.energy_period_s:.0f} ms: "
                f"power needs {shortest_s:.1f} s of steady load."
            )
        if self.average_window_s is not None and self.average_window_s > LONG_AVERAGE_S:
            consequences.append(
                f"average power looks back {self.average_window_s:.1f} s: useless for shorter runs."
            )
        if self.instant_window_s is not None and self.instant_period_s is not None:
            longest_s = max(self.instant_window_s, self.instant_period_s)
            consequences.append(
                f"instant power answers within {1e3 * longest_s:.0f} ms; its maximum is one of "
                "those readings."
            )
        return tuple(consequences)

    def plain(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return asdict(self) | {"implies": list(self.implies)}


def describe_sensor(samples: EnergySamples, step_s: float | None = None) -> PowerSensor:
    """Return periods, by how often values change, and windows, by how long a load from ``step_s``
    takes to show.
    """
    poll_s = float("nan")
    if len(samples) > 1:
        poll_s = float(np.median(np.diff(samples["time_s"])))
    return PowerSensor(
        energy_period_s=_median_or_none(np.diff(find_ticks(samples).time_s)),
        instant_period_s=find_change_period_s(samples, "instant_w"),
        average_period_s=find_change_period_s(samples, "average_w"),
        instant_window_s=find_rise_s(samples, "instant_w", step_s),
        average_window_s=find_rise_s(samples, "average_w", step_s),
        memory_window_s=find_rise_s(samples, "memory_w", step_s),
        poll_period_s=poll_s,
        clock_period_s=find_change_period_s(samples, "sm_clock_hz"),
    )


def find_change_period_s(samples: EnergySamples, column: str) -> float | None:
    """Return the median time between changes of a column."""
    readings = samples.read_column(column)
    changes = np.flatnonzero(np.diff(readings.values) != 0.0) + 1
    return _median_or_none(np.diff(readings.time_s[changes]))


def find_rise_s(
    samples: EnergySamples,
    column: str,
    step_s: float | None,
) -> float | None:
    """Return the length of the boxcar whose answer to a step at ``step_s`` climbs as seen: 10 % to
    90 % over 0.8.

    None when the load did not raise the reading by a tenth. A sensor faster than its own updates
    shows one update period at most.
    """
    if step_s is None:
        return None
    readings = samples.read_column(column)
    time_s = readings.time_s
    values = readings.values
    before = values[(time_s > step_s - BEFORE_S) & (time_s < step_s)]
    if not len(before):
        return None
    after = values[time_s > time_s[-1] - AFTER_S]
    if not len(after) or after.mean() < LEAST_RISE * before.mean():
        return None

    share = (values - before.mean()) / (after.mean() - before.mean())
    low, high = RISE_SHARES
    is_late = time_s >= step_s
    low_s = time_s[is_late & (share >= low)]
    high_s = time_s[is_late & (share >= high)]
    if not len(low_s) or not len(high_s):
        return None
    return float((high_s[0] - low_s[0]) / (high - low))


def _median_or_none(values: np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) else None


def probe_sensor(
    source: str = "auto", index: int | None = None
) -> tuple[PowerSensor, EnergySamples]:
    """Idle, then copy random data steadily; return what the sensor showed and all samples."""
    with Sampler(source, index) as sampler:
        torch = _import_cuda_torch()
        step_s = None
        if torch is not None:
            original = torch.randn(LOAD_ELEMENTS, device="cuda")
            copy = original.clone()
            torch.cuda.synchronize()
        mark = sampler.head
        time.sleep(IDLE_S)
        if torch is not None:
            step_s = time.monotonic()
            while time.monotonic() < step_s + LOAD_S:
                for _ in range(COPIES_A_WAIT):
                    copy.copy_(original)
                torch.cuda.synchronize()
        samples = sampler.since(mark)
    return describe_sensor(samples, step_s), samples


def _import_cuda_torch() -> Any:
    """Return PyTorch where it is installed and has a GPU, else None."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")
    return torch if torch.cuda.is_available() else None
