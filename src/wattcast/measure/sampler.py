"""A separate process that polls the energy source, so that the measured program is never stalled.

``Sampler`` starts ``python -m wattcast.measure.sampler`` and reads its ring of samples. The polling
process outlives errors of the driver (a failed reading is NaN and counted), says when the device is
gone, and ends with its parent. A process that hangs inside the driver is noticed by its silence.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from wattcast.errors import MissingTool, Refused
from wattcast.measure import ring as layout
from wattcast.measure.ring import COLUMNS, Ring
from wattcast.measure.samples import Samples, unwrap
from wattcast.measure.source import EnergySource, Identity, ReadError, Slow, open_source

CLOCK_EVERY = 3  # polls of the counter per reading of the clock
SLOW_EVERY = 12  # and per reading of everything else
SILENCE_S = 3.0  # a healthy sampler is never silent this long


class Sampler:
    """The reading side. Use as a context manager; starting and stopping are explicit."""

    def __init__(self, source: str = "auto", index: int = 0, period_s: float = 0.0015) -> None:
        self._wanted = source, index, period_s
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ring: Ring | None = None
        self.identity = Identity("")

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self, timeout_s: float = 20.0) -> None:
        """Start polling; returns once the first sample is there."""
        source, index, period_s = self._wanted
        self._folder = tempfile.TemporaryDirectory(prefix="wattcast-")
        path = Path(self._folder.name) / "samples"
        self._ring = Ring.create(path)
        command = [sys.executable, "-m", "wattcast.measure.sampler", str(path), source, str(index), str(period_s)]
        package = str(Path(__file__).parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            command,
            env=environment,
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
        """A fresh process, after one that hung or died."""
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

    @property
    def head(self) -> int:
        """Number of samples so far; give it to :meth:`since` later."""
        return int(self._ring.header[layout.HEAD]) if self._ring is not None else 0

    def since(self, mark: int) -> Samples:
        """Samples from number ``mark`` on."""
        return Samples(self._rows(mark)[0])

    def check(self) -> None:
        """Raise :class:`~wattcast.errors.Refused` with the reason when samples can no longer be trusted."""
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
        self.identity = Identity(**{**plain, "notes": tuple(plain["notes"])})


def _reason(said: str) -> str:
    try:
        return str(json.loads(said).get("missing", ""))
    except ValueError:
        return ""


def poll(source: EnergySource, ring: Ring, period_s: float, parent: int) -> None:
    """Read until told to stop or orphaned; never raises for what the driver does."""
    offset_j, previous_j, loop = 0.0, 0.0, 0
    clock_hz, slow = math.nan, Slow()
    while not ring.header[layout.STOP] and os.getppid() == parent:
        began = time.monotonic()
        energy_j = math.nan
        try:
            energy_j = source.energy_j()
            read_s = 0.5 * (began + time.monotonic())
            clock_hz = source.sm_clock_hz() if loop % CLOCK_EVERY == 0 else math.nan
            slow = source.slow() if loop % SLOW_EVERY == 0 else Slow()
            ring.header[layout.STATUS] = layout.SAMPLING
        except ReadError as error:
            ring.header[layout.ERRORS] += 1
            ring.header[layout.LAST_ERROR] = error.code
            ring.header[layout.STATUS] = layout.LOST if error.lost else layout.SAMPLING
            clock_hz, slow, read_s = math.nan, Slow(), began
            time.sleep(0.05 if error.lost else 0.0)
        if math.isfinite(energy_j):
            offset_j, reset = unwrap(previous_j, energy_j, offset_j, source.energy_range_j)
            previous_j = energy_j
            energy_j += offset_j
            ring.header[layout.RESETS] += reset
        ring.write(np.array([read_s, energy_j, clock_hz, *asdict(slow).values()]))
        loop += 1
        time.sleep(max(period_s - (time.monotonic() - began), 0.0))
    ring.header[layout.STATUS] = layout.STOPPED


def main(arguments: list[str] | None = None) -> int:
    """Entry of the polling process: ring file, source, device number, period."""
    parser = argparse.ArgumentParser(prog="wattcast.measure.sampler")
    parser.add_argument("ring", type=Path)
    parser.add_argument("source")
    parser.add_argument("index", type=int)
    parser.add_argument("period_s", type=float)
    options = parser.parse_args(arguments)
    parent = os.getppid()
    ring = Ring.attach(options.ring)
    try:
        source, identity = open_source(options.source, options.index)
    except MissingTool as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return int(error.exit_code)
    print(json.dumps(asdict(identity)), flush=True)
    try:
        poll(source, ring, options.period_s, parent)
    finally:
        source.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
