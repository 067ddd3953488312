"""Gates, drivers and wires: capacitance, delay, leakage and area from widths, after CACTI (HPL-2008-20).

Widths and lengths are in microns. Functions take scalars or arrays, so that one call serves every partition of a
memory array that a search looks at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array, Scalar
from wattcast.power.component.bottom_up.technology import Technology, Wire

_VACUUM_F_PER_UM = 8.854e-18
_FRINGE_F_PER_UM = 0.115e-15  # of a wire, at every node (CACTI 6.5)
_MILLER = 1.5  # neighbours that switch the other way half the time
_FAN_OUT = 4.0  # per stage of a driver chain: near the optimum of logical effort (Sutherland 1999)
_STACK_LEAKAGE = 0.2  # of a second transistor in series (McPAT 0.8)
_SHORT_CIRCUIT_A_PER_UM = 65e-6  # of a repeater while it switches (Banerjee, IEEE TED 2002)
_STEP = 0.69  # ln 2: to half the swing


@dataclass(frozen=True)
class Cost:
    """What a circuit takes. Energies per use; leakage in watts at the technology's voltage and temperature."""

    energy_j: Scalar = 0.0
    delay_s: Scalar = 0.0
    subthreshold_w: Scalar = 0.0
    gate_w: Scalar = 0.0
    area_um2: Scalar = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.energy_j + other.energy_j,
            self.delay_s + other.delay_s,
            self.subthreshold_w + other.subthreshold_w,
            self.gate_w + other.gate_w,
            self.area_um2 + other.area_um2,
        )

    def times(self, used: Scalar, built: Scalar) -> Cost:
        """``used`` of them switch at once, ``built`` of them leak and take area; delay is of one."""
        return Cost(
            self.energy_j * used,
            self.delay_s,
            self.subthreshold_w * built,
            self.gate_w * built,
            self.area_um2 * built,
        )


def gate_f(tech: Technology, width_um: Scalar) -> Scalar:
    """Input capacitance of a transistor."""
    return tech.gate_f_per_um * width_um


def drain_f(tech: Technology, width_um: Scalar, stack: int = 1, fold_um: Scalar | None = None) -> Scalar:
    """Drain capacitance: junction, its sidewall, and overlap; wide transistors are folded in fingers.

    A drain is three features long, and one and a half more for each further transistor in series.
    """
    fold = 27.7 * tech.feature_um if fold_um is None else fold_um  # fingers of a cell 50 features high
    fingers = np.maximum(np.ceil(width_um / fold), 1.0)
    finger_um = width_um / fingers
    length_um = (3.0 + 1.5 * (stack - 1)) * tech.feature_um * np.maximum(fingers / 2.0, 1.0)
    side_um = np.where(fingers > 1, 0.0, finger_um) + 2.0 * length_um
    facing_um = width_um * (1 + 2 * (stack - 1))
    area_f = tech.junction_f_per_um2 * length_um * finger_um
    found = area_f + tech.sidewall_f_per_um * side_um + 2.0 * tech.overlap_f_per_um * facing_um
    return found if np.ndim(found) else float(found)


def inverter_leakage_w(tech: Technology, n_width_um: Scalar) -> tuple[Scalar, Scalar]:
    """Subthreshold and gate leakage of an inverter whose p transistor drives like its n transistor.

    One of the two is off, the other has its full gate voltage.
    """
    both_um = 0.5 * n_width_um * (1.0 + tech.p_to_n)
    return tech.off_a_per_um * both_um * tech.voltage_v, tech.gate_leak_a_per_um * both_um * tech.voltage_v


def nand_leakage_w(tech: Technology, n_width_um: Scalar, inputs: int) -> tuple[Scalar, Scalar]:
    """Leakage of a NAND gate, averaged over its inputs."""
    states = 2.0**inputs
    stacked = ((1 + _STACK_LEAKAGE) ** inputs - 1) / _STACK_LEAKAGE / states
    off_um = n_width_um * stacked + inputs * n_width_um * tech.p_to_n / states
    on_um = 0.5 * inputs * n_width_um * (1.0 + tech.p_to_n) / 2.0
    return tech.off_a_per_um * off_um * tech.voltage_v, tech.gate_leak_a_per_um * on_um * tech.voltage_v


def gate_area_um2(tech: Technology, n_width_um: Scalar, inputs: int = 1) -> Scalar:
    """Layout of a gate: fingers between two power rails, at most 50 features high, a contact on each side of one."""
    feature = tech.feature_um
    wide_um = n_width_um * (1.0 + tech.p_to_n)
    room_um = 41.0 * feature  # of 50, less two rails and the gap between the wells
    fingers = np.maximum(np.ceil(wide_um / room_um), 1.0) * inputs
    width_um = (7.0 + np.maximum(7.0 * fingers - 13.0, 0.0)) * feature
    height_um = np.minimum(wide_um + 9.0 * feature, 50.0 * feature)
    return width_um * height_um


def chain(tech: Technology, load_f: Scalar, wire_ohm: Scalar = 0.0, inputs: int = 1) -> Cost:
    """A minimum gate of ``inputs`` inputs and the inverters behind it that drive a load, sized by logical effort.

    Stages of equal effort f = F^(1/N), with F = g·C_load / C_in; an even number of them, at least two. Energy is
    C·V² of the load and of every stage in between: a line goes up and down once in an access.
    """
    min_um = tech.min_width_um
    p_to_n = tech.p_to_n
    effort = (inputs + p_to_n) / (1 + p_to_n)
    first_f = gate_f(tech, min_um * (inputs + p_to_n))
    whole = np.maximum(effort * load_f / first_f, 1.0)
    stages = np.maximum(2.0 * np.ceil(np.log(whole) / np.log(_FAN_OUT) / 2.0), 2.0)
    step = whole ** (1.0 / stages)
    # widths of the n transistors behind the first gate: the last drives the load, each before it 1/step of that
    last_um = np.maximum(load_f / step / gate_f(tech, 1.0 + p_to_n), min_um)
    n_um = last_um * _geometric(1.0 / step, stages - 1.0) + min_um * inputs
    self_f = _drain_share(tech) * n_um * (1.0 + p_to_n)
    input_f = gate_f(tech, (n_um - min_um * inputs) * (1.0 + p_to_n))
    tau_s = tech.n_resistance_ohm_um * (tech.gate_f_per_um + _drain_share(tech)) * (1.0 + p_to_n)
    delay_s = _STEP * (stages * (step + 1.0) * tau_s / 2.0 + wire_ohm * load_f / 2.0)
    sub_w, gate_w = inverter_leakage_w(tech, n_um)
    return Cost(
        (load_f + self_f + input_f) * tech.vdd2,
        delay_s,
        sub_w,
        gate_w,
        gate_area_um2(tech, last_um) * 1.4 + gate_area_um2(tech, min_um, inputs),
    )


def _geometric(ratio: Scalar, terms: Scalar) -> Scalar:
    """1 + r + r² ..., ``terms`` of them."""
    near_one = np.abs(ratio - 1.0) < 1e-9
    safe = np.where(near_one, 0.5, ratio)
    return np.where(near_one, terms, (1.0 - safe**terms) / (1.0 - safe))


def _drain_share(tech: Technology) -> float:
    """Drain capacitance per micron of a transistor of middling width, ten features."""
    width_um = 10.0 * tech.feature_um
    return float(drain_f(tech, width_um)) / width_um


def wire_f_per_um(tech: Technology, wire: Wire, width_scale: float = 1.0, gap_scale: float = 1.0) -> float:
    """Capacitance of a wire between two neighbours and two layers, each a plate, with a fringe.

    C = 2·ε·(m·k_side·thickness/gap + k_vertical·width/layer gap) + fringe (CACTI 6.5). ``width_scale`` and
    ``gap_scale`` widen wire and gap beyond half a pitch.
    """
    half_um = wire.pitch_um / 2.0
    side = _MILLER * wire.side_permittivity * wire.aspect_ratio / gap_scale
    vertical = wire.vertical_permittivity * half_um * width_scale / wire.layer_gap_um
    return 2.0 * _VACUUM_F_PER_UM * (side + vertical) + _FRINGE_F_PER_UM


def wire_ohm_per_um(wire: Wire, width_scale: float = 1.0) -> float:
    """Resistance: barrier and dishing thin the copper, scattering adds to its resistivity."""
    width_um = wire.pitch_um / 2.0 * width_scale
    thick_um = wire.aspect_ratio * wire.pitch_um / 2.0
    copper_um2 = (thick_um * (1.0 - wire.dishing_share) - wire.barrier_um) * (width_um - 2.0 * wire.barrier_um)
    return wire.scatter * wire.resistivity_ohm_um / copper_um2


@dataclass(frozen=True)
class RepeatedWire:
    """A long wire with repeaters of the size and spacing that make it fastest (Bakoglu 1990)."""

    energy_j_per_um: float
    delay_s_per_um: float
    subthreshold_w_per_um: float
    gate_w_per_um: float
    repeater: float  # n width in minimum widths
    spacing_um: float
    input_f: float  # of one repeater

    def cost(self, length_um: Scalar, bits: Scalar = 1.0, built: Scalar | None = None) -> Cost:
        """A bundle of them: ``bits`` switch, ``built`` lie there."""
        wires = bits if built is None else built
        return Cost(
            self.energy_j_per_um * length_um * bits,
            self.delay_s_per_um * length_um,
            self.subthreshold_w_per_um * length_um * wires,
            self.gate_w_per_um * length_um * wires,
        )


def repeated_wire(tech: Technology, scale: float = 1.0) -> RepeatedWire:
    """The global level with repeaters; ``scale`` widens wire and gap alike.

    Repeaters of neighbouring wires are staggered, so that a neighbour couples along half the length only: the side
    capacitance counts once, not twice.
    """
    wire = tech.wide
    half_um = wire.pitch_um / 2.0
    side = _MILLER * wire.side_permittivity * wire.aspect_ratio / scale
    vertical = _MILLER * wire.vertical_permittivity * half_um * scale / wire.layer_gap_um
    c_f = _VACUUM_F_PER_UM * (side + vertical) + _FRINGE_F_PER_UM
    r_ohm = wire_ohm_per_um(wire, scale)
    min_um = tech.min_width_um
    input_f = float(gate_f(tech, min_um * (1.0 + tech.p_to_n)))
    output_f = float(drain_f(tech, min_um) + drain_f(tech, min_um * tech.p_to_n))
    drive_ohm = tech.n_resistance_ohm_um / min_um
    size = (drive_ohm * c_f / (r_ohm * input_f)) ** 0.5
    spacing_um = (2.0 * drive_ohm * (output_f + input_f) / (r_ohm * c_f)) ** 0.5
    tau_s = (
        drive_ohm * (input_f + output_f)
        + drive_ohm * c_f * spacing_um / size
        + r_ohm * spacing_um * output_f * size
        + 0.5 * r_ohm * c_f * spacing_um**2
    )
    switched_j = (size * (input_f + output_f) + spacing_um * c_f) * tech.vdd2
    crossing_j = tech.voltage_v * min_um * _SHORT_CIRCUIT_A_PER_UM * 1.0986 * size * tau_s
    sub_w, gate_w = inverter_leakage_w(tech, min_um * size)
    return RepeatedWire(
        (switched_j + crossing_j) / spacing_um,
        _STEP * tau_s / spacing_um,
        float(sub_w) / spacing_um,
        float(gate_w) / spacing_um,
        size,
        spacing_um,
        size * input_f,
    )


def as_float(value: Scalar | Array) -> float:
    """A scalar as a plain float."""
    return float(np.asarray(value).item())
