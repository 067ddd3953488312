"""Static power of active SMs by instruction mix, active lanes and active SMs, after AccelWattch.

P = (P_first(mix) + (lanes − 1) · P_more(mix)) · (N − idle) / N. The mix is which kinds of units worked in the
interval. Without any, memory alone is at work (L1, shared memory or L2, in that order), or almost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.activity import Activity
from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.power.component.architecture import STATIC_NAMES

_INT_ADD = ("int_access",)
_INT_MUL = ("int_mul24_access", "int_mul32_access", "int_mul_access", "int_div_access")
_FP = ("fpu_access", "fp_mul_access", "fp_div_access")
_DP = ("dpu_access", "dp_mul_access", "dp_div_access")
_SFU = ("fp_sqrt_access", "fp_log_access", "fp_sin_access", "fp_exp_access")
_TENSOR, _TEXTURE = ("tensor_access",), ("texture_access",)
_L1 = ("l1_read_hit", "l1_read_miss", "l1_write_hit", "l1_write_miss")
_SHARED = ("shared_access",)
_L2 = ("l2_read_hit", "l2_read_miss", "l2_write_hit", "l2_write_miss")
EVENTS = (*_INT_ADD, *_INT_MUL, *_FP, *_DP, *_SFU, *_TENSOR, *_TEXTURE, *_L1, *_SHARED, *_L2, "idle_sm")
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LaneStatic:
    """AccelWattch's static powers and the number of SMs they are shared over."""

    power_w: Mapping[str, float]  # static_cat1_flane ...
    sm_count: float
    full_warp: float = 32.0  # lanes of an executing warp where the activity does not say
    compat: bool = False  # AccelWattch asks which energies are not zero instead of which counts

    def __post_init__(self) -> None:
        if lost := [name for name in STATIC_NAMES if name not in self.power_w]:
            raise bad_value("static power", "all of AccelWattch's static powers", f"none for {', '.join(lost)}")
        if not self.sm_count > 0:
            raise bad_value("static power: SMs", "a number above zero", self.sm_count)

    def at(self, activity: Activity) -> Array:
        """Watts in each interval, at the reference voltage."""
        seen = _Seen(activity)
        lanes = np.ceil(self.lanes(activity))  # the original counts in whole lanes, upwards
        first, more = self._mix(seen)
        asleep = lanes <= 0
        first = np.where(asleep, self._memory(seen), first)
        active = (self.sm_count - np.clip(activity.of("idle_sm"), 0.0, self.sm_count)) / self.sm_count
        return np.asarray((first + np.where(asleep, 0.0, (lanes - 1.0) * more)) * active)

    def lanes(self, activity: Activity) -> Array:
        """Active threads of an executing warp: as the activity says, or full warps wherever a unit worked."""
        if activity.has("active_thread"):
            return activity.of("active_thread")
        works = _Seen(activity).any(*_INT_ADD, *_INT_MUL, *_FP, *_DP, *_SFU, *_TENSOR, *_TEXTURE)
        return np.asarray(works * self.full_warp)

    def _mix(self, seen: _Seen) -> tuple[Array, Array]:
        """Power of the first lane and of each further one, by which units worked."""
        always = np.ones(seen.shape, dtype=np.bool_)
        add = always if self.compat else seen.any(*_INT_ADD)  # the energy of an addition is never zero
        mul = seen.any(*_INT_MUL)
        fp, dp, sfu = seen.any(*_FP), seen.any(*_DP), seen.any(*_SFU)
        tensor, texture = seen.any(*_TENSOR), seen.any(*_TEXTURE)
        integer = add | mul
        others = [dp, sfu, tensor, texture]
        alone = [m & ~np.any([o for o in others if o is not m], axis=0) for m in others]
        none = ~np.any(others, axis=0)
        both = integer & fp
        table: list[tuple[Mask, str]] = [
            (both & alone[0], "cat3"),
            (both & alone[2], "cat6"),
            (both & alone[1], "cat4"),
            (both & alone[3], "cat5"),
            (both & none, "cat2"),
            (integer & ~fp & none & add & ~mul, "intadd"),
            (integer & ~fp & none & ~add & mul, "intmul"),
            (integer & ~fp & none & add & mul, "cat1"),
        ]
        masks = [mask for mask, _ in table]
        first = np.select(masks, [self.power_w[f"static_{m}_flane"] for _, m in table], self._default("flane"))
        more = np.select(masks, [self.power_w[f"static_{m}_addlane"] for _, m in table], self._default("addlane"))
        nothing = ~(integer | fp) & none  # threads were active, but no unit: memory alone
        first = np.where(nothing, self._memory(seen), first)
        light = self.power_w["static_light_addlane"]
        idle_memory = ~seen.any(*_L1, *_SHARED, *_L2)
        return first, np.where(nothing, np.where(idle_memory, light, 0.0), more)

    def _default(self, lane: str) -> float:
        return self.power_w[f"static_geomean_{lane}"]

    def _memory(self, seen: _Seen) -> Array:
        if self.compat:  # the energy of an L1 access is never zero
            return np.full(seen.shape, self.power_w["static_l1_flane"])
        masks = [seen.any(*_L1), seen.any(*_SHARED), seen.any(*_L2)]
        choice = [self.power_w[f"static_{m}_flane"] for m in ("l1", "shared", "l2")]
        return np.asarray(np.select(masks, choice, self.power_w["static_light_flane"]))

    def to_plain(self) -> dict[str, Any]:
        """For YAML."""
        return {
            "power_w": dict(self.power_w),
            "sm_count": self.sm_count,
            "full_warp": self.full_warp,
            "compat": self.compat,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> LaneStatic:
        """From YAML."""
        return cls(dict(plain["power_w"]), float(plain["sm_count"]), float(plain["full_warp"]), bool(plain["compat"]))


class _Seen:
    """Which events happened at all in an interval."""

    def __init__(self, activity: Activity) -> None:
        self.activity = activity
        self.shape = np.broadcast_shapes(activity.duration_s.shape, activity.value.shape[:-1])

    def any(self, *events: str) -> Mask:
        found = np.zeros(self.shape, dtype=np.bool_)
        for event in events:
            if self.activity.has(event):
                found |= self.activity.of(event) > 0
        return found
