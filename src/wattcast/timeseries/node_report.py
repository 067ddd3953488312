"""What a server draws at its plug, part by part, from the least to the most that is plausible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from wattcast.core import bad_value, units
from wattcast.hardware.catalogue_reader import load_gpu
from wattcast.hardware.node_systems import NodeSystem
from wattcast.report.text_tables import new_table
from wattcast.timeseries.node_power import (
    NODE,
    PARTS,
    node_parts_w,
)

LEVELS = (0.0, 0.5, 1.0)
_MOST_OVER_LIMIT = 1.2  # of a card's limit


@dataclass(frozen=True)
class NodeDraw:
    """Watts of a node while all of its GPUs work: least, middle and most."""

    system: NodeSystem
    gpu_w: float  # of each GPU
    inlet_c: float
    part_w: dict[str, tuple[float, ...]]

    @property
    def wall_w(self) -> tuple[float, ...]:
        """Watts at the plug."""
        gpus_w = self.system.gpu_count * self.gpu_w
        watts = [gpus_w + sum(part) for part in zip(*self.part_w.values(), strict=True)]
        return tuple(watts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        system = self.system
        return {
            "name": system.name,
            "title": system.title,
            "gpus": system.gpus,
            "gpu_count": system.gpu_count,
            "gpu_power_w": self.gpu_w,
            "inlet_c": self.inlet_c,
            "wall_power_w": self.wall_w,
            "part_power_w": self.part_w,
            "published_limit_w": system.wall_limit_w,
            "sources": {key: claim.source for key, claim in system.claims.items()},
            "unknown": system.unknown,
        }


def describe_node(
    system: NodeSystem,
    gpu_w: float | None = None,
    inlet_c: float | None = None,
) -> NodeDraw:
    """Return what a node draws while all of its GPUs work at ``gpu_w``; without it, their limit."""
    limit_w = float(np.max(load_gpu(system.gpus[0]).power.limit_w))
    each_w = limit_w if gpu_w is None else gpu_w
    if each_w > _MOST_OVER_LIMIT * limit_w:
        expected = f"about the limit of a {system.gpus[0]} ({limit_w:g} W) at most"
        raise bad_value("gpu_power", expected, f"{each_w:g} W")
    air_c = NODE.inlet_c if inlet_c is None else inlet_c
    all_w = np.array(system.gpu_count * each_w)
    at_levels = [
        node_parts_w(
            system,
            all_w,
            np.ones(()),
            air_c,
            level,
        )
        for level in LEVELS
    ]
    part_w = {part: tuple(float(parts[part]) for parts in at_levels) for part in PARTS}
    return NodeDraw(system, each_w, air_c, part_w)


def print_nodes(console: Console, nodes: Sequence[NodeDraw]) -> None:
    """Print a line for each node."""
    table = new_table(
        "system",
        "GPUs",
        "GPUs draw",
        "at the plug",
        "least to most",
        "published",
    )
    for node in nodes:
        system = node.system
        low_w, middle_w, high_w = node.wall_w
        published = "unknown"
        if system.wall_limit_w is not None:
            published = f"at most {units.show(system.wall_limit_w, 'W', 3)}"
        table.add_row(
            system.name,
            f"{system.gpu_count} {system.gpus[0]}",
            units.show(system.gpu_count * node.gpu_w, "W", 3),
            units.show(middle_w, "W", 3),
            f"{units.show(low_w, 'W', 3)} to {units.show(high_w, 'W', 3)}",
            published,
        )
    console.print(table)


def print_node(console: Console, node: NodeDraw) -> None:
    """Print the parts of a node, and what is not known of it."""
    table = new_table("part", "least", "middle", "most")
    gpus_w = node.system.gpu_count * node.gpu_w
    table.add_row("GPUs", *[units.show(gpus_w, "W", 4)] * len(LEVELS))
    for part, watts in [*node.part_w.items(), ("at the plug", node.wall_w)]:
        table.add_row(part, *(units.show(value, "W", 3) for value in watts))
    console.print(f"{node.system.title}, air of {node.inlet_c:g} °C, every GPU working")
    console.print(table)
    for key, reason in node.system.unknown.items():
        console.print(f"{key.replace('_', ' ')}: {reason}")
