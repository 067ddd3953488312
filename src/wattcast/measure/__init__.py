"""Measure time, energy and clocks on a GPU. Only ``device_control`` ever changes a clock or a
limit.

The package can be called: ``with wattcast.measure() as run: ...``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from wattcast import VerbPackage

if TYPE_CHECKING:
    from wattcast.measure.measured_run import measure
    from wattcast.measure.window_summary import Measurement

__all__ = ["Measurement", "measure"]


def __getattr__(name: str) -> Any:
    """Import what measures when it is asked for: whoever only sets a card needs no NumPy."""
    if name == "measure":
        from wattcast.measure.measured_run import measure

        return measure
    if name == "Measurement":
        from wattcast.measure.window_summary import Measurement

        return Measurement
    raise AttributeError(f"module 'wattcast.measure' has no attribute {name!r}")


sys.modules[__name__].__class__ = VerbPackage
