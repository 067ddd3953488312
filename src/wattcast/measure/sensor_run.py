"""Put a step of load on the device and watch the sensor answer; without PyTorch, watch it idle."""

from __future__ import annotations

import time
from typing import Any

from wattcast.errors import MissingTool
from wattcast.measure.sampler import Sampler
from wattcast.measure.samples import Samples
from wattcast.measure.sensor import Sensor, describe

IDLE_S, LOAD_S = 2.5, 3.0


def probe(source: str = "auto", index: int = 0) -> tuple[Sensor, Samples]:
    """Idle, then a steady copy of random data; returns what the sensor showed and all samples."""
    with Sampler(source, index) as sampler:
        load = _copy_load()
        mark = sampler.head
        time.sleep(IDLE_S)
        step_s = time.monotonic() if load is not None else None
        if load is not None:
            load(LOAD_S)
        samples = sampler.since(mark)
    return describe(samples, step_s), samples


def _copy_load() -> Any:
    """A function that copies random data for a number of seconds; None where PyTorch or CUDA is missing."""
    try:
        import torch

        if not torch.cuda.is_available():
            raise MissingTool("no CUDA device")
    except (ImportError, MissingTool):
        return None
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()

    def load(length_s: float) -> None:
        end_s = time.monotonic() + length_s
        while time.monotonic() < end_s:
            for _ in range(40):
                target.copy_(source)
            torch.cuda.synchronize()

    return load
