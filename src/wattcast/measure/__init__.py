"""Measure time, energy and clocks on a GPU. Only ``device_control`` ever changes a clock or a limit."""

from __future__ import annotations

from wattcast.measure.measured_run import Measurement, window

__all__ = ["Measurement", "window"]
