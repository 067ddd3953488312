"""Many configurations: which clock, which GPU, which design, which algorithm, how many."""

from wattcast.explore.api import designs
from wattcast.explore.sweep import Swept

__all__ = ["Swept", "designs"]
