"""What a transistor and a wire are at a node: published tables, interpolated, at a voltage and a temperature.

``data/devices.csv`` (65, 45, 32 and 22 nm of the ITRS in three device types; 7 nm and 5 or 4 nm class of the
IRDS), ``data/wires.csv`` and ``data/nodes.csv`` hold the numbers, each row with its source. A node is named by
its feature size F. For a foundry's process F is not the name on the box but the size that makes its published
SRAM cell 146 F² (``data/processes.csv``), the measure the ITRS rows are drawn to.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from wattcast.errors import MissingSpecification, bad_value, unknown_name

PACKAGE = "wattcast.power.component.bottom_up"
LOWEST_K, HIGHEST_K = 300.0, 400.0
_OVERLAP_SHARE = 0.2  # of the ideal gate capacitance (CACTI 6.5)
_SIDEWALL_FF_PER_UM = 0.25  # junction sidewall (CACTI 6.5)
_VOLTAGE_RANGE = (0.4, 1.6)  # of the nominal voltage: beyond, neither V² nor the currents of the table hold


class Device(StrEnum):
    """ITRS device types, in the order an architecture file numbers them."""

    HIGH_PERFORMANCE = "hp"
    LOW_STANDBY = "lstp"
    LOW_OPERATING = "lop"


class Projection(StrEnum):
    """How hopeful the wire table is."""

    AGGRESSIVE = "aggressive"
    CONSERVATIVE = "conservative"


class Level(StrEnum):
    """Metal levels."""

    LOCAL = "local"
    SEMI_GLOBAL = "semi-global"
    GLOBAL = "global"


@dataclass(frozen=True)
class Wire:
    """One metal level."""

    pitch_um: float
    aspect_ratio: float
    layer_gap_um: float
    side_permittivity: float
    vertical_permittivity: float
    resistivity_ohm_um: float
    barrier_um: float
    dishing_share: float
    scatter: float


@dataclass(frozen=True)
class Technology:
    """Everything circuits need to know; per micron of transistor width where the unit says so."""

    feature_um: float
    device: Device
    projection: Projection
    voltage_v: float
    nominal_v: float
    threshold_v: float
    temperature_k: float
    gate_f_per_um: float
    overlap_f_per_um: float  # drain to gate: fringe and overlap of one side
    junction_f_per_um2: float
    sidewall_f_per_um: float
    n_resistance_ohm_um: float
    p_to_n: float  # width of a p transistor that drives like an n transistor of width 1
    off_a_per_um: float
    gate_leak_a_per_um: float
    long_channel_leakage: float  # subthreshold leakage of a long-channel device over a short one's
    short_circuit: float  # switching energy with the short-circuit current over that without
    logic_area_scale: float  # of logic, against 90 nm
    gate_density_per_um2: float
    local: Wire
    semi_global: Wire
    wide: Wire  # the global level
    source: str

    @property
    def min_width_um(self) -> float:
        """The narrowest n transistor."""
        return 1.5 * self.feature_um

    @property
    def vdd2(self) -> float:
        """V², the factor of every switched capacitance."""
        return self.voltage_v**2


@cache
def technology(
    feature_nm: float,
    device: Device = Device.HIGH_PERFORMANCE,
    temperature_k: float = 360.0,
    projection: Projection = Projection.AGGRESSIVE,
    voltage_v: float | None = None,
) -> Technology:
    """The technology at a feature size, linear between the rows of the tables.

    ``voltage_v`` defaults to the nominal one of the device type. Outside the tables nothing is extrapolated.

    >>> technology(45.0).nominal_v
    1.0
    """
    own = _rows("devices.csv", device=device.value)
    row, sources = _between(own, feature_nm, f"{device.value} devices")
    node, _ = _between(_rows("nodes.csv"), feature_nm, "nodes")
    if not LOWEST_K <= temperature_k <= HIGHEST_K:
        raise bad_value("temperature", f"{LOWEST_K:g} to {HIGHEST_K:g} K, as tabulated", f"{temperature_k:g} K")
    nominal = row["vdd_v"]
    volts = nominal if voltage_v is None else voltage_v
    low, high = (share * nominal for share in _VOLTAGE_RANGE)
    if not low <= volts <= high:
        raise bad_value("voltage", f"{low:.3g} to {high:.3g} V at {feature_nm:g} nm {device.value}", f"{volts:g} V")
    kelvin = np.arange(LOWEST_K, HIGHEST_K + 1, 10.0)
    off = np.array([row[f"off_na_per_um_{k:.0f}k"] for k in kelvin])
    gate_leak = np.interp(
        temperature_k, (LOWEST_K, HIGHEST_K), (row["gate_leak_na_per_um_300k"], row["gate_leak_na_per_um_400k"])
    )
    ideal, fringe = row["ideal_gate_ff_per_um"] * 1e-15, row["fringe_ff_per_um"] * 1e-15
    wires = {level: _wire(level, projection, feature_nm) for level in Level}
    return Technology(
        feature_nm * 1e-3,
        device,
        projection,
        float(volts),
        nominal,
        row["vth_v"],
        temperature_k,
        ideal * (1 + _OVERLAP_SHARE) + 3 * fringe,
        ideal * _OVERLAP_SHARE + fringe,
        row["junction_ff_per_um2"] * 1e-15,
        _SIDEWALL_FF_PER_UM * 1e-15,
        row["resistance_multiplier"] * nominal / (row["on_ua_per_um"] * 1e-6),
        row["p_to_n"],
        float(np.exp(np.interp(temperature_k, kelvin, np.log(off)))) * 1e-9,
        float(gate_leak) * 1e-9,
        row["long_channel_leakage"],
        node["short_circuit"],
        node["logic_area_scale"],
        node["gate_density_per_um2"],
        wires[Level.LOCAL],
        wires[Level.SEMI_GLOBAL],
        wires[Level.GLOBAL],
        sources,
    )


@dataclass(frozen=True)
class Process:
    """A foundry's process, and the feature size its SRAM cell stands for."""

    name: str
    feature_nm: float
    cell_um2: float
    top_clock_v: float | None
    source: str


def process(name: str) -> Process:
    """A process by the catalogue's name, such as ``TSMC 4N``; unknown and untabulated ones are refused."""
    known = {row["process"]: row for row in _rows("processes.csv")}
    if name not in known:
        raise unknown_name("process", name, known, "Give the feature size instead.")
    row = known[name]
    if not row["cell_um2"]:
        raise MissingSpecification(f"process {name}: {row['source']}. Give a node inside the table instead.")
    cell = float(row["cell_um2"])
    volts = float(row["top_clock_v"]) if row["top_clock_v"] else None
    return Process(name, round(1e3 * (cell / CELL_AREA_FEATURE2) ** 0.5, 2), cell, volts, row["source"])


CELL_AREA_FEATURE2 = 146.0  # six-transistor SRAM cell in F² (CACTI 6.5)


@cache
def _rows(name: str, **where: str) -> tuple[dict[str, str], ...]:
    text = files(PACKAGE).joinpath("data", name).read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return tuple(row for row in rows if all(row[key] == value for key, value in where.items()))


def _between(rows: tuple[dict[str, str], ...], feature_nm: float, what: str) -> tuple[dict[str, Any], str]:
    """Every number of a table at a feature size, and the sources of the rows it lies between."""
    sizes = [float(row["feature_nm"]) for row in rows]
    if not min(sizes) <= feature_nm <= max(sizes):
        raise bad_value(
            f"feature size ({what})", f"{min(sizes):g} to {max(sizes):g} nm, the table's ends", f"{feature_nm:g} nm"
        )
    order = np.argsort(sizes)
    grid = np.array(sizes)[order]
    found = {}
    for key, value in rows[0].items():
        if key not in ("device", "projection", "level", "source") and value:
            found[key] = float(np.interp(feature_nm, grid, np.array([float(row[key]) for row in rows])[order]))
    at = int(np.clip(np.searchsorted(grid, feature_nm), 1, len(grid) - 1))
    used = {at - 1, at} if feature_nm not in grid else {int(np.flatnonzero(grid == feature_nm)[0])}
    return found, "; ".join(dict.fromkeys(rows[order[i]]["source"] for i in sorted(used, reverse=True)))


def _wire(level: Level, projection: Projection, feature_nm: float) -> Wire:
    row, _ = _between(_rows("wires.csv", level=level.value, projection=projection.value), feature_nm, "wires")
    return Wire(
        row["pitch_feature"] * feature_nm * 1e-3,
        row["aspect_ratio"],
        row["layer_gap_um"],
        row["side_permittivity"],
        row["vertical_permittivity"],
        row["resistivity_ohm_um"],
        row["barrier_um"],
        row["dishing_share"],
        row["scatter"],
    )
