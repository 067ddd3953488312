"""Measure time, energy and clocks on a GPU. Only ``device_control`` ever changes a clock or a
limit.

The package can be called: ``with wattcast.measure() as run: ...``.
"""

from __future__ import annotations

import sys

from wattcast import VerbPackage
from wattcast.measure.measured_run import measure
from wattcast.measure.window_summary import Measurement

__all__ = ["Measurement", "measure"]

sys.modules[__name__].__class__ = VerbPackage
