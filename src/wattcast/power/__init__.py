"""Activity -> Power."""

from wattcast.power.interface import Power, PowerModel, kind_of, kinds

__all__ = ["Power", "PowerModel", "kind_of", "kinds"]
