"""Many configurations: which clock, which GPU, which design, which algorithm, how many."""

from wattcast.explore.api import designs
from wattcast.explore.choices import algorithms, gpus
from wattcast.explore.dvfs import clocks
from wattcast.explore.money import prices
from wattcast.explore.sweep import Swept

__all__ = ["Swept", "algorithms", "clocks", "designs", "gpus", "prices"]
