"""Activity -> Power."""

from wattcast.power.power_model import (
    Power,
    PowerModel,
    power_model_kind,
    power_model_kinds,
)

__all__ = ["Power", "PowerModel", "power_model_kind", "power_model_kinds"]
