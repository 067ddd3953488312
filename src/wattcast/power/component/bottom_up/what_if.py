"""What becomes of the energies when the register file, a cache or the number of SMs changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, sqrt

from wattcast.errors import bad_value, unknown_name
from wattcast.power.component.bottom_up.chip import Chip, build_chip
from wattcast.power.component.bottom_up.design import Cache, Design, changed
from wattcast.power.component.bottom_up.events import duty_w, energies
from wattcast.power.component.bottom_up.parts import area_mm2, leakage

KNOBS = {
    "registers": "registers of an SM, in as many banks as before",
    "l1": "bytes of the L1 data cache",
    "shared": "bytes of shared memory",
    "l2": "bytes of every L2 slice",
    "sms": "SMs, and the ports of the network with them",
}
LEAKAGE, AREA, PIPELINES = "leakage", "area", "pipelines"


@dataclass(frozen=True)
class Change:
    """One figure before and after."""

    name: str
    unit: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """After over before."""
        return self.after / self.before


def with_changes(design: Design, factors: Mapping[str, float]) -> Design:
    """The design with some of its sizes multiplied; what does not come out whole is refused."""
    for name, factor in factors.items():
        if name not in KNOBS:
            raise unknown_name("part to change", name, KNOBS)
        if not factor > 0.0:
            raise bad_value(f"{name}: factor", "above zero", factor)
    found = design
    if "registers" in factors:
        count = _whole("registers", design.registers.registers, factors["registers"])
        found = changed(found, registers=replace(design.registers, registers=count))
    for name, field in (("l1", "data"), ("shared", "shared"), ("l2", "l2")):
        old: Cache | None = getattr(design, field)
        if name in factors and old is None:
            raise bad_value("l2", "a design with an L2 cache", f"{design.name}, which has none")
        if name in factors and old is not None:
            size = _whole(name, old.capacity_byte, factors[name])
            found = changed(found, **{field: replace(old, capacity_byte=size)})
    if "sms" in factors:
        count = _whole("sms", design.sm_count, factors["sms"])
        ports = ceil(design.router.inputs * count / design.sm_count)
        found = changed(found, sm_count=count, router=replace(design.router, inputs=ports))
    if found.link_um:
        grown = area_mm2(build_chip(found)) / area_mm2(build_chip(design))
        found = changed(found, link_um=design.link_um * sqrt(grown))  # the die's side
    return found


def compare(before: Chip, after: Chip) -> tuple[Change, ...]:
    """Every counter's joules, the pipelines' watts, leakage and area of two chips."""
    old, new = energies(before), energies(after)
    rows = [Change(name, "J", joule, new[name]) for name, joule in old.items() if joule > 0.0]
    leak = [leakage(chip).cores_w + leakage(chip).rest_w for chip in (before, after)]
    rows += [
        Change(PIPELINES, "W", duty_w(before), duty_w(after)),
        Change(LEAKAGE, "W", leak[0], leak[1]),
        Change(AREA, "mm2", area_mm2(before), area_mm2(after)),
    ]
    return tuple(rows)


def _whole(name: str, size: int, factor: float) -> int:
    found = size * factor
    if abs(found - round(found)) > 1e-9 * found:
        raise bad_value(f"{name} times {factor:g}", "a whole number", found)
    return round(found)
