"""Many configurations: which clock, GPU, design, options. The package can be called: ``wattcast.explore(...)``."""

import sys

from wattcast import VerbPackage
from wattcast.explore.explorations import Exploration, ExploreObjective, explore, explore_designs
from wattcast.explore.fleet import assign_fleet, read_fleet
from wattcast.explore.sweep import SweepResult
from wattcast.predictor.prices import parse_prices as prices
from wattcast.serving.capacity_plan import describe_service, plan_serving

__all__ = [
    "Exploration",
    "ExploreObjective",
    "SweepResult",
    "assign_fleet",
    "describe_service",
    "explore",
    "explore_designs",
    "plan_serving",
    "prices",
    "read_fleet",
]

sys.modules[__name__].__class__ = VerbPackage
