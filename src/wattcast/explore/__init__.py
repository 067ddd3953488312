"""Many configurations: which clock, which GPU, which design, which algorithm, how many."""

from wattcast.explore.api import designs
from wattcast.explore.choices import algorithms, gpus
from wattcast.explore.dvfs import clocks
from wattcast.explore.fleet import assign
from wattcast.explore.fleet import read as read_fleet
from wattcast.explore.money import prices
from wattcast.explore.serving import plan, service
from wattcast.explore.sweep import Swept

__all__ = [
    "Swept",
    "algorithms",
    "assign",
    "clocks",
    "designs",
    "gpus",
    "plan",
    "prices",
    "read_fleet",
    "service",
]
