"""Wattcast: how fast a GPU workload runs and how many watts and joules it takes."""

__version__ = "0.1.0.dev0"
