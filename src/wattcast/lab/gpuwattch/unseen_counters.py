"""Estimate the power of parts whose counters a simulator's log or a profiler does not show.

A sum of the parts that are seen is a lower bound. What the other parts draw follows from how many
warp instructions were issued: directly where a log counts them, or from the pipeline duty, of which
an instruction takes one slot of a scheduler. The operands and units of an instruction are typical
ones, with the least and the most that kernels of a reference run had
(``coefficients/simulator_activity.yaml``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Array, Mask
from wattcast.lab.gpuwattch.component_build import DUTY_CAP
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect
from wattcast.power.activity import Activity
from wattcast.power.component_power import ComponentPower

_WARP_LANES = 32.0
_STATIC = "STATICP"
# Parts of AccelWattch that the estimate takes together: static power and arithmetic units
_ESTIMATED_PARTS = (
    _STATIC,
    *("INTP", "FPUP", "DPUP", "INT_MUL24P", "INT_MUL32P", "INT_MULP", "INT_DIVP", "FP_MULP"),
    *("FP_DIVP", "FP_SQRTP", "FP_LGP", "FP_SINP", "FP_EXP", "DP_MULP", "DP_DIVP", "TENSORP"),
)
_OPERAND_EVENTS = ("register_read", "register_write", "other_operand")
_PIPE_EVENTS = ("int_access", "sfu_access", "fpu_access")
_LEAST, _TYPICAL, _MOST = range(3)
# Names of kernels that use tensor cores: of instructions, of libraries' operators and of samples
_TENSOR_NAME = re.compile(
    r"wmma|[hi]?mma_|gmma|_mma|tensor_?(core|op)|_(884|1688|16816)gemm|compute_gemm"
)
_PICO = 1e-12
# Where no configuration of the simulator gives the schedulers of an SM: Fermi has two, Volta four.
_SCHEDULERS = {SimulatorDialect.GPUWATTCH: 2, SimulatorDialect.ACCELWATTCH: 4}

Range = tuple[float, float, float]


class TypicalActivity(Coefficients):
    """Counts per warp instruction: the least, the typical and the most."""

    scheduled_share: Range
    register_read: Range
    register_write: Range
    other_operand: Range
    int_access: Range
    sfu_access: Range
    fpu_access: Range
    duty_of_issue: Range
    issue_of_duty: Range
    tensor_issue_of_duty: Range
    unit_energy_pj: Range
    tensor_unit_energy_pj: Range
    static_share: Range
    tensor_static_share: Range


TYPICAL = load_coefficients("simulator_activity", TypicalActivity)


@dataclass(frozen=True)
class IssueWidth:
    """How many warp instructions the chip can issue in a cycle."""

    sm_count: float
    schedulers: int

    @property
    def warps_per_cycle(self) -> float:
        """Return the instructions of all SMs in a cycle in which every scheduler issues."""
        return self.sm_count * self.schedulers

    @classmethod
    def of(
        cls,
        dialect: SimulatorDialect,
        sm_count: float | None,
        schedulers: int | None,
    ) -> IssueWidth | None:
        """Return the width of a chip, None where the number of its SMs is not known."""
        if sm_count is None:
            return None
        return cls(float(sm_count), schedulers or _SCHEDULERS[dialect])


@dataclass(frozen=True)
class PowerRange:
    """Watts of kernels with the unseen parts estimated: the least, the typical and the most."""

    low_w: Array
    about_w: Array
    high_w: Array
    unseen: tuple[str, ...]  # parts that are not even estimated


def estimate_unseen_power(
    model: ComponentPower,
    activity: Activity,
    dialect: SimulatorDialect,
    width: IssueWidth | None,
    given_w: Mapping[str, Array],
    names: Sequence[str],
) -> PowerRange | None:
    """Estimate the whole power from what is seen, or return None where nothing tells it.

    ``given_w`` holds the watts of parts that the counters do not determine but the file prints.
    ``names`` are those of the kernels, which say whether tensor cores are used.
    """
    if width is None:
        return None
    is_tensor = np.array([_TENSOR_NAME.search(name.lower()) is not None for name in names])
    if not (activity.has("warp_instruction") or activity.has("pipe_duty")):
        return None
    unseen: tuple[str, ...] = ()

    def total_w(level: int, busiest: str = "") -> Array:
        nonlocal unseen
        filled = _fill_counters(
            activity,
            dialect,
            width,
            level,
            busiest,
            is_tensor,
        )
        seen_model, unseen, _ = model.seen_by(filled.events)
        power = seen_model.power(filled)
        watts = power.total_w
        for part, part_w in given_w.items():
            if part in power.parts:
                watts = watts - power.part_power_w(part) + part_w
        if _STATIC in unseen and model.static is not None:
            watts = watts + _unknown_mix_w(model, filled, _pick("static_share", is_tensor, level))
            joules = _PICO * _pick("unit_energy_pj", is_tensor, level)
            watts = watts + joules * filled.event_values("warp_instruction") / filled.duration_s
            unseen = tuple(part for part in unseen if part not in _ESTIMATED_PARTS)
        return np.asarray(watts)

    # An instruction goes to one pipe: the most is the dearest pipe at its most.
    highest_w = np.max([total_w(_MOST, pipe) for pipe in _PIPE_EVENTS], axis=0)
    lowest_w = total_w(_LEAST)
    return PowerRange(lowest_w, total_w(_TYPICAL), highest_w, unseen)


def _fill_counters(
    activity: Activity,
    dialect: SimulatorDialect,
    width: IssueWidth,
    level: int,
    busiest: str,
    is_tensor: Mask,
) -> Activity:
    """Return the activity with the counters that its instructions imply at one level of a range.

    Of the pipes only the ``busiest`` is at the highest level, where the others are at the lowest.
    """
    counts: dict[str, Array] = {}
    cycles = activity.duration_s * np.asarray(activity.at.clock_hz)
    slots = cycles * width.warps_per_cycle
    if activity.has("warp_instruction"):
        warps = activity.event_values("warp_instruction")
        share = np.divide(warps, slots, out=np.zeros_like(slots), where=slots > 0)
        counts["pipe_duty"] = np.minimum(share * TYPICAL.duty_of_issue[level], DUTY_CAP)
    else:
        # A scheduler issues at most one instruction a cycle.
        issue_of_duty = _pick("issue_of_duty", is_tensor, level)
        share = activity.event_values("pipe_duty") * issue_of_duty
        warps = np.minimum(share, 1.0) * slots
        counts["warp_instruction"] = warps
    counts["scheduled_instruction"] = warps * TYPICAL.scheduled_share[level]
    counts["idle_sm"] = np.zeros_like(warps)
    if dialect is SimulatorDialect.GPUWATTCH:
        for event in (*_OPERAND_EVENTS, *_PIPE_EVENTS):
            per_lane: Range = getattr(TYPICAL, event)
            is_idle_pipe = level == _MOST and event in _PIPE_EVENTS and event != busiest
            counts[event] = warps * _WARP_LANES * per_lane[_LEAST if is_idle_pipe else level]
    missing = {name: value for name, value in counts.items() if not activity.has(name)}
    shape = activity.value.shape[:-1]
    columns = [np.broadcast_to(value, shape)[..., np.newaxis] for value in missing.values()]
    value = np.concatenate([activity.value, *columns], axis=-1)
    return replace(activity, value=value, events=(*activity.events, *missing))


def _pick(
    name: str,
    is_tensor: Mask,
    level: int,
) -> Array:
    """Return a typical number of each kernel, another one where tensor cores are used."""
    plain: Range = getattr(TYPICAL, name)
    tensor: Range = getattr(TYPICAL, f"tensor_{name}")
    return np.where(is_tensor, tensor[level], plain[level])


def _unknown_mix_w(
    model: ComponentPower,
    activity: Activity,
    share: Array,
) -> Array:
    """Return AccelWattch's static power of a mix of units that is not known, its geometric mean."""
    static = model.static
    assert static is not None
    lanes = np.asarray(static.full_warp)
    if activity.has("active_thread"):
        lanes = activity.event_values("active_thread")
    first_w = static.power_w["static_geomean_flane"]
    lane_w = static.power_w["static_geomean_addlane"]
    idle = np.clip(activity.event_values("idle_sm"), 0.0, static.sm_count)
    awake = (static.sm_count - idle) / static.sm_count
    return np.asarray(share * (first_w + (lanes - 1.0) * lane_w) * awake)
