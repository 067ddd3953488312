"""Kernels -> Timeline: cycles and seconds, and what a clock makes of them."""

from wattcast.timeline.timeline import Phase, Timeline, kernel_s

__all__ = ["Phase", "Timeline", "kernel_s"]
