"""Power of a server at its plug, from the power of its GPUs.

    P = (P_gpu + P_host + P_fan) + L(P_gpu + P_host + P_fan)

Processors and memory go from idle to busy with the share of GPUs that work. Fans blow what the heat
needs at a fixed temperature of the air that leaves; their power is the cube of the flow (affinity
laws). Supplies lose what their certificate allows, L, linear between its loads.

Nobody publishes what the parts draw, so each has a least and a most; ``level`` is 0 for the least,
1 for the most, and 0.5 for the middle, which a series takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import bad_value
from wattcast.core.arrays import Array
from wattcast.hardware.catalogue_reader import load_gpu, load_node
from wattcast.hardware.gpu import Fabric
from wattcast.hardware.node_systems import (
    NodeSystem,
    SupplyClass,
    load_supply_classes,
)

PARTS = ("processors", "memory", "network", "drives", "boards", "fans", "supplies")
MIDDLE_LEVEL = 0.5  # between the least and the most that published parts draw
_TABLE_POINTS = 257  # of the curves that a series interpolates
_MOST_OVER_LIMIT = 1.2  # of a card's limit, up to which the curves reach
_LEAST_INLET_C = -20.0


class NodeCoefficients(Coefficients):
    """What parts of a server draw, from the least to the most that is plausible."""

    cpu_idle_share: tuple[float, float]
    cpu_busy_share: tuple[float, float]
    dimm_idle_w: tuple[float, float]
    dimm_busy_w: tuple[float, float]
    nic_w: tuple[float, float]
    dpu_w: tuple[float, float]
    drive_w: tuple[float, float]
    switch_per_gpu_w: tuple[float, float]
    board_per_gpu_w: tuple[float, float]
    fan_share_air: tuple[float, float]
    fan_share_liquid: tuple[float, float]
    fan_least_speed: float
    outlet_c: float
    inlet_c: float
    no_load_loss: float


NODE = load_coefficients("node_power", NodeCoefficients)


def node_parts_w(
    system: NodeSystem,
    gpu_w: Array,
    working_share: Array,
    inlet_c: float | None = None,
    level: float = MIDDLE_LEVEL,
) -> dict[str, Array]:
    """Return the watts of each of ``PARTS``, without the GPUs.

    ``gpu_w`` is of all GPUs of the node, ``working_share`` the share of them that work.
    """
    inlet_c = NODE.inlet_c if inlet_c is None else inlet_c
    check_inlet(system, inlet_c)
    parts = _host_parts_w(system, np.asarray(working_share), level)
    heat_w = gpu_w + sum(parts.values())
    parts["fans"] = _fan_w(system, heat_w, inlet_c, level)
    parts["supplies"] = _lost_w(system, heat_w + parts["fans"], level)
    return parts


def wall_power_w(
    system: NodeSystem,
    gpu_w: Array,
    working_share: Array,
    inlet_c: float | None = None,
    level: float = MIDDLE_LEVEL,
) -> Array:
    """Return the watts of a node at its plug."""
    parts = node_parts_w(
        system,
        gpu_w,
        working_share,
        inlet_c,
        level,
    )
    return np.asarray(gpu_w + sum(parts.values()))


def check_inlet(system: NodeSystem, inlet_c: float) -> None:
    """Raise an error where air is warmer than a system may breathe."""
    if not _LEAST_INLET_C <= inlet_c <= system.inlet_limit_c:
        expected = f"air of {_LEAST_INLET_C:g} to {system.inlet_limit_c:g} °C ({system.name})"
        raise bad_value("inlet", expected, f"{inlet_c:g} °C")


def _between(interval: tuple[float, ...], level: float) -> float:
    """Return a value inside an interval."""
    low, high = interval
    return low + level * (high - low)


def _host_parts_w(
    system: NodeSystem,
    working_share: Array,
    level: float,
) -> dict[str, Array]:
    """Return the watts of what a node computes and talks with, besides its GPUs."""
    idle_share = _between(NODE.cpu_idle_share, level)
    busy_share = _between(NODE.cpu_busy_share, level)
    cpu_share = idle_share + working_share * (busy_share - idle_share)
    dimm_idle_w = _between(NODE.dimm_idle_w, level)
    dimm_busy_w = _between(NODE.dimm_busy_w, level)
    dimm_w = dimm_idle_w + working_share * (dimm_busy_w - dimm_idle_w)

    nic_w = system.nic_count * _between(NODE.nic_w, level)
    dpu_w = system.dpu_count * _between(NODE.dpu_w, level)
    drive_w = system.drive_count * _between(NODE.drive_w, level)
    board_w = _between(NODE.board_per_gpu_w, level)
    if load_node(system.node).fabric is Fabric.SWITCH:
        board_w += _between(NODE.switch_per_gpu_w, level)
    same = np.ones_like(cpu_share)
    return {
        "processors": system.cpu_count * system.cpu_limit_w * cpu_share,
        "memory": system.dimm_count * dimm_w,
        "network": (nic_w + dpu_w) * same,
        "drives": drive_w * same,
        "boards": system.gpu_count * board_w * same,
    }


def full_heat_w(system: NodeSystem, level: float = MIDDLE_LEVEL) -> float:
    """Return the heat of a node whose GPUs draw their limit, without fans and supplies."""
    limit_w = float(np.max(load_gpu(system.gpus[0]).power.limit_w))
    parts = _host_parts_w(system, np.ones(()), level)
    return system.gpu_count * limit_w + float(sum(parts.values()))


def _fan_w(
    system: NodeSystem,
    heat_w: Array,
    inlet_c: float,
    level: float,
) -> Array:
    """Return the watts of fans.

    The flow is what carries the heat away, V = P / (ρ c (T_out - T_in)). Fans run at full speed
    when the full heat meets the warmest air, and draw P_full (V / V_full)³, not less than at their
    least speed.
    """
    full_w = full_heat_w(system, level)
    share = _between(NODE.fan_share_liquid if system.is_liquid else NODE.fan_share_air, level)
    tightest_c = NODE.outlet_c - system.inlet_limit_c
    flow = heat_w / full_w * tightest_c / (NODE.outlet_c - inlet_c)
    speed = np.clip(flow, NODE.fan_least_speed, 1.0)
    return np.asarray(share * full_w * speed**3)


def _lost_w(
    system: NodeSystem,
    output_w: Array,
    level: float,
) -> Array:
    """Return what the power supplies lose; all share the load."""
    classes = load_supply_classes()
    worst, best = system.supply_classes
    worst_w = _class_loss_w(classes[worst], output_w, system.supplies_w)
    best_w = _class_loss_w(classes[best], output_w, system.supplies_w)
    return np.asarray(best_w + level * (worst_w - best_w))


def _class_loss_w(
    supply: SupplyClass,
    output_w: Array,
    rating_w: float,
) -> Array:
    """Return the loss that a certificate allows: P (1 / η - 1), linear between its loads.

    Without load it is a share of that at the lowest load; beyond the rating the last slope goes on.
    """
    output_at_w = supply.loads * rating_w
    loss_w = output_at_w * (1.0 / supply.efficiencies - 1.0)
    outputs_w = np.concatenate([[0.0], output_at_w])
    losses_w = np.concatenate([[NODE.no_load_loss * loss_w[0]], loss_w])
    rise_w = losses_w[-1] - losses_w[-2]
    slope = rise_w / (outputs_w[-1] - outputs_w[-2])
    beyond_w = np.maximum(output_w - outputs_w[-1], 0.0) * slope
    return np.asarray(np.interp(output_w, outputs_w, losses_w) + beyond_w)


@dataclass(frozen=True)
class NodeCurve:
    """What a node draws beyond its GPUs, tabulated over their power, idle and working."""

    gpu_w: Array
    idle_w: Array  # beyond the GPUs, while none of them works
    working_w: Array  # while all do

    def added_w(
        self,
        gpu_w: Array,
        working_share: Array,
    ) -> Array:
        """Return the watts beyond the GPUs, linear in the share of them that work."""
        idle_w = np.interp(gpu_w, self.gpu_w, self.idle_w)
        working_w = np.interp(gpu_w, self.gpu_w, self.working_w)
        return np.asarray(idle_w + working_share * (working_w - idle_w))


def tabulate_node(
    system: NodeSystem,
    inlet_c: float | None = None,
    level: float = MIDDLE_LEVEL,
) -> NodeCurve:
    """Return the curve of a node, for series of many nodes."""
    limit_w = float(np.max(load_gpu(system.gpus[0]).power.limit_w))
    most_w = _MOST_OVER_LIMIT * system.gpu_count * limit_w
    gpu_w = np.linspace(0.0, most_w, _TABLE_POINTS)
    curves = []
    for share in (np.zeros_like(gpu_w), np.ones_like(gpu_w)):
        parts = node_parts_w(
            system,
            gpu_w,
            share,
            inlet_c,
            level,
        )
        curves.append(np.asarray(sum(parts.values())))
    return NodeCurve(gpu_w, *curves)
