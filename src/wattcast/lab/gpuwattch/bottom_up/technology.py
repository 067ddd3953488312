"""Transistors and wires of a technology node, interpolated from published tables, and circuits made
of them.

``data/devices.csv`` (65, 45, 32 and 22 nm of the ITRS in three device types; 7 nm and 5 or 4 nm
class of the IRDS), ``data/wires.csv`` and ``data/nodes.csv`` hold the numbers, each row with its
source. A node is named by its feature size F. For a foundry's process F is not the number in its
name but the size that makes its published SRAM cell 146 F² (``data/processes.csv``), as in the ITRS
rows."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from typing import Any

import numpy as np

from wattcast.core import units
from wattcast.core.arrays import Sweepable
from wattcast.core.errors import (
    MissingSpecification,
    bad_value,
    check_names,
    clip_text,
)
from wattcast.core.strict_files import read_shipped_table

BOTTOM_UP_PACKAGE = "wattcast.lab.gpuwattch.bottom_up"
LOWEST_K = 300.0
HIGHEST_K = 400.0
_OVERLAP_SHARE = 0.2  # of the ideal gate capacitance (CACTI 6.5)
_SIDEWALL_FF_PER_UM = 0.25  # junction sidewall (CACTI 6.5)
_VOLTAGE_RANGE = (
    0.4,
    1.6,
)  # of the nominal voltage: beyond, neither V² nor the currents of the table hold
CELL_AREA_FEATURE2 = 146.0  # six-transistor SRAM cell in F² (CACTI 6.5)
_VACUUM_F_PER_UM = 8.854e-18
_FRINGE_F_PER_UM = 0.115e-15  # of a wire, at every node (CACTI 6.5)
_MILLER = 1.5  # neighbours that switch the other way half the time
_FAN_OUT = 4.0  # per stage of a driver chain: near the optimum of logical effort (Sutherland 1999)
_STACK_LEAKAGE = 0.2  # of a second transistor in series (McPAT 0.8)
_SHORT_CIRCUIT_A_PER_UM = 65e-6  # of a repeater while it switches (Banerjee, IEEE TED 2002)
_SAME_FEATURE = 0.1  # relative difference below which a process's name tells its feature size
_STEP = 0.69  # ln 2: to half the swing


class TransistorType(StrEnum):
    """ITRS device types, in the order an architecture file numbers them."""

    HIGH_PERFORMANCE = "hp"
    LOW_STANDBY = "lstp"
    LOW_OPERATING = "lop"


class WireProjection(StrEnum):
    """The two scenarios of the wire table."""

    AGGRESSIVE = "aggressive"
    CONSERVATIVE = "conservative"


@dataclass(frozen=True)
class MetalWire:
    """Geometry and materials of the wires on one metal level."""

    pitch_um: float
    aspect_ratio: float
    layer_gap_um: float
    side_permittivity: float
    vertical_permittivity: float
    resistivity_ohm_um: float
    barrier_um: float
    dishing_share: float
    scatter: float

    def f_per_um(
        self,
        width_scale: float = 1.0,
        gap_scale: float = 1.0,
    ) -> float:
        """Return the capacitance per micron of a wire between two neighbours and two layers.

        C = 2·ε₀·(m·k_side·thickness/gap + k_vertical·width/layer gap) + fringe (CACTI 6.5), with
        the Miller factor m. ``width_scale`` and ``gap_scale`` widen wire and gap beyond half a
        pitch."""
        side = _MILLER * self.side_permittivity * self.aspect_ratio / gap_scale
        vertical = (
            self.vertical_permittivity * (self.pitch_um / 2.0) * width_scale / self.layer_gap_um
        )
        return 2.0 * _VACUUM_F_PER_UM * (side + vertical) + _FRINGE_F_PER_UM

    def ohm_per_um(self, width_scale: float = 1.0) -> float:
        """Return the resistance per micron s·ρ / A: barrier and dishing thin the copper, scattering
        (s) adds to ρ.
        """
        width_um = self.pitch_um / 2.0 * width_scale
        thick_um = self.aspect_ratio * self.pitch_um / 2.0
        copper_um2 = (thick_um * (1.0 - self.dishing_share) - self.barrier_um) * (
            width_um - 2.0 * self.barrier_um
        )
        return self.scatter * self.resistivity_ohm_um / copper_um2


@dataclass(frozen=True)
class CircuitCost:
    """Energy per use, leakage (at the technology's voltage and temperature), area and delay of a
    circuit.
    """

    energy_j: Sweepable = 0.0
    subthreshold_w: Sweepable = 0.0
    gate_w: Sweepable = 0.0
    area_um2: Sweepable = 0.0
    delay_s: Sweepable = 0.0

    def __add__(self, second: CircuitCost) -> CircuitCost:
        return CircuitCost(
            *(a + b for a, b in zip(vars(self).values(), vars(second).values(), strict=True))
        )

    def times(
        self,
        used: Sweepable,
        built: Sweepable | None = None,
    ) -> CircuitCost:
        """Return the cost of ``built`` circuits (default: ``used``) of which ``used`` switch; the
        delay is of one.
        """
        count = used if built is None else built
        standing = (self.subthreshold_w * count, self.gate_w * count, self.area_um2 * count)
        return CircuitCost(self.energy_j * used, *standing, self.delay_s)


@dataclass(frozen=True)
class RepeatedWire:
    """A long wire with repeaters of the size and spacing that make it fastest [Bakoglu1990]."""

    per_um: CircuitCost
    repeater: float  # n width in minimum widths
    spacing_um: float
    input_f: float  # of one repeater

    def cost(
        self,
        length_um: Sweepable,
        bits: Sweepable = 1.0,
        built: Sweepable | None = None,
    ) -> CircuitCost:
        """Return the cost of a bundle of ``built`` wires (default: ``bits``) of which ``bits``
        switch.
        """
        wires = bits if built is None else built
        one = self.per_um
        leakage_w = one.subthreshold_w * length_um * wires, one.gate_w * length_um * wires
        return CircuitCost(
            one.energy_j * length_um * bits, *leakage_w, 0.0, one.delay_s * length_um
        )


@dataclass(frozen=True)
class Technology:
    """The properties that circuits need, per micron of transistor width where the unit is per
    micron.

    Its methods give capacitance, leakage and area of single gates, and the cost of drivers and long
    wires."""

    feature_um: float
    device: TransistorType
    projection: WireProjection
    voltage_v: float
    nominal_v: float
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
    local: MetalWire
    wide: MetalWire  # the global level
    source: str

    @property
    def min_width_um(self) -> float:
        """Width of the narrowest n transistor."""
        return 1.5 * self.feature_um

    @property
    def vdd2(self) -> float:
        """V², which multiplies every switched capacitance to its energy."""
        return self.voltage_v**2

    def gate_f(self, width_um: float) -> float:
        """Return the input capacitance of a transistor of a width."""
        return self.gate_f_per_um * width_um

    def drain_f(
        self,
        width_um: float,
        stack: int = 1,
    ) -> float:
        """Return the drain capacitance of ``stack`` transistors in series in a cell 50 features
        high.
        """
        return float(self.folded_drain_f(width_um, 27.7 * self.feature_um, stack))

    def folded_drain_f(
        self,
        width_um: float,
        fold_um: Sweepable,
        stack: int = 1,
    ) -> Sweepable:
        """Return the drain capacitance of ``stack`` transistors in series, with fingers of at most
        ``fold_um``.

        C = c_j·A + c_sw·perimeter + 2·c_ov·W (CACTI 6.5): junction, sidewall and overlap. A drain
        is three features long, and one and a half more for each further transistor in series."""
        fingers = np.maximum(np.ceil(width_um / fold_um), 1.0)
        finger_um = width_um / fingers
        length_um = (3.0 + 1.5 * (stack - 1)) * self.feature_um * np.maximum(fingers / 2.0, 1.0)
        side_um = np.where(fingers > 1, 0.0, finger_um) + 2.0 * length_um
        facing_um = width_um * (1 + 2 * (stack - 1))
        area_f = self.junction_f_per_um2 * length_um * finger_um
        return area_f + self.sidewall_f_per_um * side_um + 2.0 * self.overlap_f_per_um * facing_um

    def leakage_w(
        self,
        off_um: Sweepable,
        on_um: Sweepable,
    ) -> tuple[Sweepable, Sweepable]:
        """Return subthreshold and gate leakage of transistors with so much width switched off, and
        on.
        """
        return (
            self.off_a_per_um * off_um * self.voltage_v,
            self.gate_leak_a_per_um * on_um * self.voltage_v,
        )

    def inverter_leakage_w(self, n_width_um: Sweepable) -> tuple[Sweepable, Sweepable]:
        """Return subthreshold and gate leakage of an inverter whose p transistor drives like its n
        transistor.

        P = I·V·(W_n + W_p)/2: one of the two transistors is off, the other has its full gate
        voltage."""
        both_um = 0.5 * n_width_um * (1.0 + self.p_to_n)
        return self.leakage_w(both_um, both_um)

    def nand_leakage_w(
        self,
        n_width_um: Sweepable,
        inputs: int,
    ) -> tuple[Sweepable, Sweepable]:
        """Return subthreshold and gate leakage of a NAND gate, averaged over the states of its
        inputs.

        A second transistor in series leaks a fifth (McPAT 0.8).
        """
        states = 2.0**inputs
        stacked = ((1 + _STACK_LEAKAGE) ** inputs - 1) / _STACK_LEAKAGE / states
        off_um = n_width_um * stacked + inputs * n_width_um * self.p_to_n / states
        return self.leakage_w(off_um, 0.5 * inputs * n_width_um * (1.0 + self.p_to_n) / 2.0)

    def gate_area_um2(
        self,
        n_width_um: Sweepable,
        inputs: int = 1,
    ) -> Sweepable:
        """Return the layout area of a gate: fingers between two power rails, at most 50 features
        high (CACTI 6.5).
        """
        feature = self.feature_um
        wide_um = n_width_um * (1.0 + self.p_to_n)
        room_um = 41.0 * feature  # of 50, less two rails and the gap between the wells
        fingers = np.maximum(np.ceil(wide_um / room_um), 1.0) * inputs
        width_um = (7.0 + np.maximum(7.0 * fingers - 13.0, 0.0)) * feature
        return width_um * np.minimum(wide_um + 9.0 * feature, 50.0 * feature)

    def driver_chain(
        self,
        load_f: Sweepable,
        wire_ohm: Sweepable = 0.0,
        inputs: int = 1,
    ) -> CircuitCost:
        """Return the cost of a minimum gate and the inverters behind it that drive ``load_f``, by
        logical effort.

        N stages of equal effort f = F^(1/N), with F = g·C_load / C_in and N even, at least two
        [Sutherland1999]. Energy is C·V² of the load and of every stage: a line goes up and down
        once in an access. ``wire_ohm`` adds R·C/2 of delay."""
        min_um = self.min_width_um
        p_to_n = self.p_to_n
        effort = (inputs + p_to_n) / (1 + p_to_n)
        whole = np.maximum(effort * load_f / self.gate_f(min_um * (inputs + p_to_n)), 1.0)
        stages = np.maximum(2.0 * np.ceil(np.log(whole) / np.log(_FAN_OUT) / 2.0), 2.0)
        step = whole ** (1.0 / stages)
        # widths of the n transistors behind the first gate: the last drives the load, each before
        # it 1/step of that
        last_um = np.maximum(load_f / step / self.gate_f(1.0 + p_to_n), min_um)
        ratio = 1.0 / step
        near_one = np.abs(ratio - 1.0) < 1e-9
        safe = np.where(near_one, 0.5, ratio)
        all_stages = np.where(
            near_one, stages - 1.0, (1.0 - safe ** (stages - 1.0)) / (1.0 - safe)
        )  # 1 + r + r² ...
        n_um = last_um * all_stages + min_um * inputs
        drain_f_per_um = self.drain_f(10.0 * self.feature_um) / (10.0 * self.feature_um)
        self_f = drain_f_per_um * n_um * (1.0 + p_to_n)
        input_f = self.gate_f_per_um * (n_um - min_um * inputs) * (1.0 + p_to_n)
        tau_s = self.n_resistance_ohm_um * (self.gate_f_per_um + drain_f_per_um) * (1.0 + p_to_n)
        delay_s = _STEP * (stages * (step + 1.0) * tau_s / 2.0 + wire_ohm * load_f / 2.0)
        area_um2 = self.gate_area_um2(last_um) * 1.4 + self.gate_area_um2(min_um, inputs)
        energy_j = (load_f + self_f + input_f) * self.vdd2
        return CircuitCost(energy_j, *self.inverter_leakage_w(n_um), area_um2, delay_s)

    def repeated_wire(self, scale: float = 1.0) -> RepeatedWire:
        """Return the global level with repeaters; ``scale`` widens wire and gap alike.

        With r and c of the wire per micron, R and C of a minimum inverter, size = √(R·c / (r·C))
        and spacing = √(2·R·(C_out + C_in) / (r·c)) minimise the delay [Bakoglu1990]. Repeaters of
        neighbouring wires are staggered, so a neighbour couples along half the length only and the
        side capacitance counts once. The short-circuit current of a switching repeater is that of
        Banerjee (IEEE TED 2002)."""
        wire = self.wide
        side = _MILLER * wire.side_permittivity * wire.aspect_ratio / scale
        vertical = (
            _MILLER * wire.vertical_permittivity * (wire.pitch_um / 2.0) * scale / wire.layer_gap_um
        )
        c_f = _VACUUM_F_PER_UM * (side + vertical) + _FRINGE_F_PER_UM
        r_ohm = wire.ohm_per_um(scale)
        min_um = self.min_width_um
        input_f = self.gate_f(min_um * (1.0 + self.p_to_n))
        output_f = self.drain_f(min_um) + self.drain_f(min_um * self.p_to_n)
        drive_ohm = self.n_resistance_ohm_um / min_um
        size = (drive_ohm * c_f / (r_ohm * input_f)) ** 0.5
        spacing_um = (2.0 * drive_ohm * (output_f + input_f) / (r_ohm * c_f)) ** 0.5
        tau_s = drive_ohm * (input_f + output_f) + drive_ohm * c_f * spacing_um / size
        tau_s += r_ohm * spacing_um * output_f * size + 0.5 * r_ohm * c_f * spacing_um**2
        switched_j = (size * (input_f + output_f) + spacing_um * c_f) * self.vdd2
        crossing_j = self.voltage_v * min_um * _SHORT_CIRCUIT_A_PER_UM * 1.0986 * size * tau_s
        off_w, gate_w = self.inverter_leakage_w(min_um * size)
        every = (switched_j + crossing_j, off_w, gate_w, 0.0, _STEP * tau_s)  # of a spacing
        per_um = CircuitCost(*(value / spacing_um for value in every))
        return RepeatedWire(per_um, size, spacing_um, size * input_f)


@cache
def find_technology(
    feature_nm: float,
    device: TransistorType = TransistorType.HIGH_PERFORMANCE,
    temperature_k: float = 360.0,
    projection: WireProjection = WireProjection.AGGRESSIVE,
    voltage_v: float | None = None,
) -> Technology:
    """Return the technology at a feature size F, linear in F between the rows of the tables.

    Off current is log-linear in temperature between 300 and 400 K. ``voltage_v`` defaults to the
    device type's nominal one and may lie between 0.4 and 1.6 of it. Outside the tables nothing is
    extrapolated: BadInput names the range.

    >>> find_technology(45.0).nominal_v
    1.0
    """
    device_rows = _read_rows("devices.csv", device=device.value)
    row, sources = _interpolate_rows(device_rows, feature_nm, f"{device.value} devices")
    node, _ = _interpolate_rows(_read_rows("nodes.csv"), feature_nm, "nodes")
    if not LOWEST_K <= temperature_k <= HIGHEST_K:
        raise bad_value(
            "temperature", f"{LOWEST_K:g} to {HIGHEST_K:g} K, as tabulated", f"{temperature_k:g} K"
        )
    nominal = row["vdd_v"]
    volts = nominal if voltage_v is None else voltage_v
    low, high = (share * nominal for share in _VOLTAGE_RANGE)
    if not low <= volts <= high:
        raise bad_value(
            "voltage",
            f"{low:.3g} to {high:.3g} V at {feature_nm:g} nm {device.value}",
            f"{volts:g} V",
        )
    kelvin = np.arange(LOWEST_K, HIGHEST_K + 1, 10.0)
    off = np.array([row[f"off_na_per_um_{k:.0f}k"] for k in kelvin])
    ends = [row[f"gate_leak_na_per_um_{k}k"] for k in (300, 400)]
    gate_leak = np.interp(temperature_k, (LOWEST_K, HIGHEST_K), ends)
    ideal = row["ideal_gate_ff_per_um"] * 1e-15
    fringe = row["fringe_ff_per_um"] * 1e-15
    return Technology(
        feature_nm * 1e-3,
        device,
        projection,
        float(volts),
        nominal,
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
        _find_wire("local", projection, feature_nm),
        _find_wire("global", projection, feature_nm),
        sources,
    )


def find_process(name: str) -> tuple[float, dict[str, str]]:
    """Return the feature size in nm of a process by the catalogue's name, such as ``TSMC 4N``, and
    its table's row.

    The size is F = √(A_cell / 146), with A_cell the published SRAM cell. Processes that are unknown
    or have no published cell are refused."""
    processes = {row["process"]: row for row in _read_rows("processes.csv")}
    check_names("process", name, processes, "Give the feature size instead.")
    row = processes[name]
    if not row["cell_um2"]:
        raise MissingSpecification(
            f"process {name}: {row['source']}. Give a node inside the table instead."
        )
    return round(1e3 * (float(row["cell_um2"]) / CELL_AREA_FEATURE2) ** 0.5, 2), row


def read_feature_nm(text: str, where: str) -> float:
    """Return the feature size in nm that a text means: a length, or the name of a process.

    >>> read_feature_nm("TSMC 12 nm FFN", "node"), read_feature_nm("45 nm", "node")
    (21.9, 45.0)
    """
    names = [row["process"] for row in _read_rows("processes.csv")]
    spelled = {_plain_name(name): name for name in names}
    if _plain_name(text) in spelled:
        return find_process(spelled[_plain_name(text)])[0]
    if not re.match(r"\s*[\d.]", text):
        expectation = f"a length such as 45 nm, or a process: {', '.join(names)}"
        raise bad_value(where, expectation, clip_text(text))
    return round(1e9 * units.parse(text, "m", where), 6)


def _plain_name(text: str) -> str:
    return re.sub(r"\s+", "", text).lower()


def explain_feature(feature_nm: float) -> str:
    """Say which process a feature size is not, where it is the number in a process's name.

    >>> explain_feature(12.0).partition(",")[0]
    '12 nm is taken as the feature size'
    >>> explain_feature(45.0)
    ''
    """
    for row in _read_rows("processes.csv"):
        number = re.search(r"\d+", row["process"])
        if number is None or float(number[0]) != feature_nm or not row["cell_um2"]:
            continue
        size_nm = find_process(row["process"])[0]
        if abs(size_nm / feature_nm - 1.0) > _SAME_FEATURE:
            return (
                f"{feature_nm:g} nm is taken as the feature size, not as {row['process']}, "
                "whose cell "
                f"makes it {size_nm:g} nm: name the process if it was meant"
            )
    return ""


@cache
def _read_rows(name: str, **where: str) -> tuple[dict[str, str], ...]:
    rows = read_shipped_table(BOTTOM_UP_PACKAGE, "data", name)
    return tuple(row for row in rows if all(row[key] == value for key, value in where.items()))


def _interpolate_rows(
    rows: tuple[dict[str, str], ...],
    feature_nm: float,
    what: str,
) -> tuple[dict[str, Any], str]:
    """Interpolate every number of a table at a feature size; return them and the sources of the
    rows used.
    """
    sizes = [float(row["feature_nm"]) for row in rows]
    if not min(sizes) <= feature_nm <= max(sizes):
        expectation = f"{min(sizes):g} to {max(sizes):g} nm, the table's ends"
        do = explain_feature(feature_nm)
        do = f"{do[0].upper()}{do[1:]}." if do else ""
        raise bad_value(f"feature size ({what})", expectation, f"{feature_nm:g} nm", do)
    order = np.argsort(sizes)
    grid = np.array(sizes)[order]
    numbers = {}
    for key, value in rows[0].items():
        if key not in ("device", "projection", "level", "source") and value:
            numbers[key] = float(
                np.interp(feature_nm, grid, np.array([float(row[key]) for row in rows])[order])
            )
    at = int(np.clip(np.searchsorted(grid, feature_nm), 1, len(grid) - 1))
    used = {at - 1, at} if feature_nm not in grid else {int(np.flatnonzero(grid == feature_nm)[0])}
    return numbers, "; ".join(
        dict.fromkeys(rows[order[i]]["source"] for i in sorted(used, reverse=True))
    )


def _find_wire(
    level: str,
    projection: WireProjection,
    feature_nm: float,
) -> MetalWire:
    rows = _read_rows("wires.csv", level=level, projection=projection.value)
    row, _ = _interpolate_rows(rows, feature_nm, "wires")
    pitch_um = row.pop("pitch_feature") * feature_nm * 1e-3
    return MetalWire(
        pitch_um, **{f.name: row[f.name] for f in fields(MetalWire) if f.name != "pitch_um"}
    )


def check_at_least_one(where: str, **counts: int) -> None:
    """Refuse a count below one, naming it."""
    for what, value in counts.items():
        if value < 1:
            raise bad_value(f"{where}: {what}", "at least one", value)


def to_float(value: Sweepable) -> float:
    """Return a scalar or an array of one element as a plain float."""
    return float(np.asarray(value).item())
