"""``measure idle``: what the device draws with nothing to do, over a window of whole counter steps."""

from __future__ import annotations

import time

from wattcast.errors import Refused
from wattcast.measure.measurement import Measurement, measured
from wattcast.measure.sampler import Sampler
from wattcast.measure.source import Identity


def measure_idle(length_s: float = 3.0, source: str = "auto", index: int = 0) -> tuple[Measurement, Identity]:
    """Mean power over ``length_s``; refused when someone else's work made it drift."""
    with Sampler(source, index, period_s=0.02) as sampler:
        time.sleep(1.1)
        began_s = time.monotonic()
        time.sleep(length_s)
        ended_s = time.monotonic()
        time.sleep(0.2)
        sampler.check()
        result = measured("idle", sampler.since(0), began_s, ended_s)
        identity = sampler.identity
    spread_w = result.power_spread_w or 0.0
    if result.power_w is not None and spread_w > 0.1 * result.power_w + 2.0:
        raise Refused(
            f"idle power spread by {spread_w:.0f} W around {result.power_w:.0f} W: something else is running on "
            f"{identity.name}. Stop it, or measure later."
        )
    return result, identity
