"""Leakage and area of a chip, part by part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from wattcast.power.component.bottom_up.chip import CacheCost, Chip, long_channel
from wattcast.power.component.bottom_up.network import Block
from wattcast.power.component.bottom_up.organise import ArrayCost
from wattcast.power.component.leakage import Leakage

_UM2_PER_MM2 = 1e6


@dataclass(frozen=True)
class Part:
    """One structure; figures are of one, ``count`` of them are on the chip."""

    name: str
    group: str  # sm, l2, noc, memory controller
    count: int
    subthreshold_w: float
    gate_w: float
    area_mm2: float

    @property
    def leakage_w(self) -> float:
        """Of one."""
        return self.subthreshold_w + self.gate_w


def parts(chip: Chip) -> tuple[Part, ...]:
    """Every structure of the chip."""
    return tuple(_all(chip))


def leakage(chip: Chip) -> Leakage:
    """What the SMs and the rest leak, for a component model."""
    found = parts(chip)
    sms = sum(part.count * part.leakage_w for part in found if part.group == "sm")
    whole = sum(part.count * part.leakage_w for part in found)
    return Leakage(sms, whole - sms, float(chip.design.sm_count))


def area_mm2(chip: Chip) -> float:
    """Area of all parts."""
    return sum(part.count * part.area_mm2 for part in parts(chip))


def _all(chip: Chip) -> Iterator[Part]:
    design = chip.design
    core = long_channel(design, chip.tech, "core")
    uncore = long_channel(design, chip.tech, "uncore")
    last = long_channel(design, chip.tech, "cache")

    def part(
        name: str, group: str, cost: Block | ArrayCost | CacheCost, share: float, each: float = 1.0, count: int = 1
    ) -> Part:
        return Part(
            name,
            group,
            count,
            cost.subthreshold_w * share * each,
            cost.gate_w * each,
            cost.area_um2 * each / _UM2_PER_MM2,
        )

    sms = design.sm_count
    for name, memory in (
        ("instruction cache", chip.instruction),
        ("L1 data cache", chip.data),
        ("constant cache", chip.constant),
        ("texture cache", chip.texture),
    ):
        if not (design.one_l1 and name in ("L1 data cache", "texture cache")):
            yield part(name, "sm", memory, core, count=sms)
    inside: tuple[tuple[str, Block | ArrayCost, float], ...] = (
        ("shared memory", chip.shared, float(design.words_of_access)),
        ("shared-memory crossbar", chip.shared_crossbar, 1.0),
        ("register-file banks", chip.registers, float(design.registers.arrays)),
        ("register-file crossbar", chip.register_crossbar, float(design.registers.arrays)),
        ("operand collectors", chip.collector, float(design.registers.collectors * design.warp_size)),
        ("instruction buffer", chip.buffer, 1.0),
        ("instruction decoders", chip.decoders, 1.0),
        ("scheduler window", chip.window, 1.0),
        ("scheduler selection", chip.selection, 1.0),
        ("pipeline latches", chip.latch, chip.latches * design.pipelines),
        ("integer units", chip.alu, float(design.integer_lanes)),
        ("floating-point units", chip.fpu, float(design.lanes)),
        ("special-function units", chip.sfu, float(design.sfu_lanes)),
        ("memory coalescing logic", chip.coalescer, 1.0),
        ("rest of the SM", chip.rest, 1.0),
    )
    for name, cost, each in inside:
        yield part(name, "sm", cost, core, each, sms)
    if chip.l2 is not None:
        yield part("L2 cache", "l2", chip.l2, last, count=design.l2_count)
    for name, block in zip(("router buffers", "router crossbar", "router arbiters"), chip.router, strict=True):
        yield part(name, "noc", block, uncore, count=design.router_count)
    controller = chip.controller
    for name, block in (
        ("controller front end", controller.front),
        ("transaction engine", controller.engine),
        ("memory PHY", controller.phy),
    ):
        yield part(name, "memory controller", block, uncore, count=design.controller.controllers)
