"""Kernels -> Timeline: cycles and seconds, and what a clock makes of them."""

from wattcast.timeline.timeline import Timeline, kernel_s

__all__ = ["Timeline", "kernel_s"]
