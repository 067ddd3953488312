"""Start the polling process, read its ring of samples, and notice when it fails.

Polling happens in a process of its own (``polling_process``), so that a driver call of a millisecond never stalls the
measured program. A process that hangs inside the driver is noticed by its silence.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from wattcast.core.errors import MissingTool, Refused
from wattcast.measure import energy_samples as layout
from wattcast.measure.energy_samples import COLUMNS, EnergySamples, SampleRing
from wattcast.measure.energy_sources import DeviceIdentity, find_source_makers

SILENCE_S = 3.0  # a healthy sampler is never silent this long


def make_child_environment() -> dict[str, str]:
    """Return this process's environment with Wattcast's own folder first on ``PYTHONPATH``."""
    package = str(Path(__file__).parents[2])
    return dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    }


class Sampler:
    """The reading side. Use as a context manager; starting and stopping are explicit."""

    def __init__(self, source: str = "auto", index: int = 0, period_s: float = 0.0015, relaxed: bool = False) -> None:
        self._wanted = source, index, period_s
        self._relaxed = relaxed
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ring: SampleRing | None = None
        self.identity = DeviceIdentity("")

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self, timeout_s: float = 20.0) -> None:
        """Start polling; returns once the first sample is there."""
        source, index, period_s = self._wanted
        find_source_makers(source)  # an unknown name is told before a process is started
        self._folder = tempfile.TemporaryDirectory(prefix="wattcast-")
        path = Path(self._folder.name) / "samples"
        self._ring = SampleRing.create(path)
        command = [sys.executable, "-m", "wattcast.measure.polling_process", str(path), source, str(index)]
        command += [str(period_s), *(["--relaxed"] if self._relaxed else [])]
        self._process = subprocess.Popen(
            command,
            env=make_child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._await_first(timeout_s)

    def stop(self) -> None:
        """End the polling process; kills it when it does not listen."""
        if self._ring is not None:
            self._ring.header[layout.STOP] = 1
        if self._process is not None:
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)
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
        if self._ring is None or self._process is None or self._process.poll() is not None:
            return False
        return self.silence_s < SILENCE_S and int(self._ring.header[layout.STATUS]) == layout.SAMPLING

    @property
    def lost(self) -> bool:
        """Whether the device has vanished."""
        return self._ring is not None and int(self._ring.header[layout.STATUS]) == layout.LOST

    @property
    def silence_s(self) -> float:
        """Age of the latest sample."""
        rows, _ = self._rows(self.head - 1)
        return time.monotonic() - float(rows[-1, 0]) if len(rows) else math.inf

    @property
    def errors(self) -> int:
        """Readings that failed so far."""
        return int(self._ring.header[layout.ERRORS]) if self._ring is not None else 0

    def quick(self, wanted: bool) -> None:
        """Read the counter as quickly as it goes, around a moment that matters; costs processor time."""
        if self._ring is not None:
            self._ring.header[layout.QUICK] = int(wanted)

    @property
    def processor_s(self) -> float:
        """Processor time the polling process has used since its first reading."""
        return float(self._ring.header[layout.PROCESSOR_NS]) * 1e-9 if self._ring is not None else 0.0

    @property
    def head(self) -> int:
        """Number of samples so far; give it to ``since`` later."""
        return int(self._ring.header[layout.HEAD]) if self._ring is not None else 0

    def since(self, mark: int) -> EnergySamples:
        """Return the samples from number ``mark`` on."""
        return EnergySamples(self._rows(mark)[0])

    def check(self) -> None:
        """Raise ``Refused`` with the reason when samples can no longer be trusted."""
        if self.lost:
            raise Refused("the device has vanished (NVML: GPU is lost); what was measured before is kept.")
        if not self.healthy:
            raise Refused(f"the sampler has been silent for {self.silence_s:.1f} s; the driver may hang.")

    def _rows(self, mark: int) -> tuple[np.ndarray, int]:
        if self._ring is None:
            return np.empty((0, len(COLUMNS))), 0
        return self._ring.read(max(mark, 0))

    def _await_first(self, timeout_s: float) -> None:
        assert self._process is not None
        assert self._ring is not None
        deadline = time.monotonic() + timeout_s
        while self.head == 0:
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                said = self._process.stdout.readline() if ended and self._process.stdout else ""
                self.stop()
                raise MissingTool(_reason(said) or f"the sampler gave no reading within {timeout_s:.0f} s.")
            time.sleep(0.005)
        assert self._process.stdout is not None
        plain = json.loads(self._process.stdout.readline())
        self.identity = DeviceIdentity(**{**plain, "notes": tuple(plain["notes"])})


def _reason(said: str) -> str:
    try:
        return str(json.loads(said).get("missing", ""))
    except ValueError:
        return ""
