"""Measuring: the only place that touches a GPU. Reads sensors and runs kernels; never sets a clock or a limit."""

from __future__ import annotations

from wattcast.measure.measurement import Measurement
from wattcast.measure.window import window

__all__ = ["Measurement", "window"]
