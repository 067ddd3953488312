"""Many configurations: which clock, GPU, design, options. The package can be called:
``wattcast.explore(...)``.
"""

import sys

from wattcast import VerbPackage
from wattcast.explore.explorations import (
    Exploration,
    ExploreObjective,
    explore,
    explore_designs,
)
from wattcast.explore.fleet import assign_fleet, read_fleet
from wattcast.explore.sweep import SweepResult

__all__ = [
    "Exploration",
    "ExploreObjective",
    "SweepResult",
    "assign_fleet",
    "explore",
    "explore_designs",
    "read_fleet",
]

sys.modules[__name__].__class__ = VerbPackage
