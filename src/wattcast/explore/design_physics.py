"""How a chip's area, idle power and energies follow the sizes that a design changes.

Areas are relative to the base's die, which is 1:

    A = a_SM·(S/S₀)·sm + a_L2·C/C₀ + a_mem·β/β₀ + rest
    sm = 1 - 4·s + s·(tensor + lanes + registers + shared), each relative to the base's

Idle power at the lowest clock is the board's, the memory's, which goes with its bandwidth, and the
chip's leakage, which goes with area and voltage; what a higher clock adds goes with area and the
square of the voltage. A byte of L2 crosses wires as long as the root of the area. An SM's energy
goes with its lanes and tensor cores as between real chips (``predictor/bundle/forecast.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core import Dtype, bad_value
from wattcast.core.arrays import (
    Array,
    Sweepable,
    as_sweep,
    sweep_values,
)
from wattcast.explore.design_coefficients import DESIGNS
from wattcast.explore.design_programs import DesignAxes
from wattcast.hardware import Gpu
from wattcast.power.power_model import DesignEnergies
from wattcast.predictor.bundle.forecast import FORECAST, forecast_rule

Columns = Mapping[str, npt.NDArray[Any]]

# NVIDIA states 10 TB/s between the two dies of a Blackwell GPU (architecture technical brief,
# 2024).
DIE_LINK_BYTE_PER_S = 10e12
_EQUAL_PARTS = 4.0  # of an SM: tensor cores, lanes, registers, shared memory


def read_axes(gpu: Gpu, columns: Columns) -> DesignAxes:
    """Return what designs have over the base."""

    def ratio(column: str, base: Sweepable | None) -> Sweepable:
        if column not in columns or base is None:
            return 1.0
        return as_sweep(columns[column] / float(sweep_values(base)))

    sm_count: Sweepable = float(sweep_values(gpu.sm_count))
    if "sm_count" in columns:
        sm_count = as_sweep(columns["sm_count"])
    l2_byte = None
    if "l2.capacity_byte" in columns:
        l2_byte = as_sweep(columns["l2.capacity_byte"])
    dies: Sweepable = 1.0
    link_s: Sweepable = 0.0
    if "dies" in columns:
        dies = as_sweep(columns["dies"])
        rate = as_sweep(columns.get("die_link_byte_per_s", np.array(DIE_LINK_BYTE_PER_S)))
        link_s = (1.0 - 1.0 / dies) / (rate * dies)
    return DesignAxes(
        sm_count=sm_count,
        l2_byte=l2_byte,
        l2_port=ratio("l2.byte_per_cycle", gpu.l2.byte_per_cycle),
        registers=ratio("sm.register_count", gpu.sm.register_count),
        threads=ratio("sm.thread_count", gpu.sm.thread_count),
        shared=ratio("sm.shared_byte", gpu.sm.shared_byte),
        shared_rate=ratio("sm.shared_byte_per_cycle", gpu.sm.shared_byte_per_cycle),
        integer_rate=ratio("pipes.int32_op_per_cycle", gpu.pipes.int32_op_per_cycle),
        weight_sparsity=as_sweep(columns.get("weight_sparsity", np.array(1.0))),
        die_link_s_per_byte=link_s,
        dies=dies,
    )


def follow_sms(
    gpu: Gpu,
    columns: Columns,
    l2_byte_per_cycle: float,
) -> dict[str, Array]:
    """Return the fields that grow with the SMs where no axis sets them: the width of L2."""
    if "sm_count" not in columns or "l2.byte_per_cycle" in columns:
        return {}
    base_rate = gpu.l2.byte_per_cycle
    rate = l2_byte_per_cycle if base_rate is None else float(sweep_values(base_rate))
    return {"l2.byte_per_cycle": rate * columns["sm_count"] / float(sweep_values(gpu.sm_count))}


def relative_area(gpu: Gpu, columns: Columns) -> Array:
    """Return the area of designs over the base's, ``(*sweep,)``."""
    sm_area = _relative_sm_area(gpu, columns)
    other_share = other_area(gpu, columns)
    sms = _ratio(columns, "sm_count", gpu.sm_count)
    return np.asarray(DESIGNS.sm_area_share * sms * sm_area + other_share)


def other_area(gpu: Gpu, columns: Columns) -> Array:
    """Return the area of designs outside of their SMs, over the base's die."""
    l2 = _ratio(columns, "l2.capacity_byte", gpu.l2.capacity_byte)
    memory = _ratio(columns, "memory.byte_per_s", gpu.memory.byte_per_s)
    modelled_share = DESIGNS.sm_area_share + DESIGNS.l2_area_share + DESIGNS.memory_area_share
    area = (1.0 - modelled_share) + DESIGNS.l2_area_share * l2 + DESIGNS.memory_area_share * memory
    return np.asarray(area)


def _relative_sm_area(gpu: Gpu, columns: Columns) -> Array:
    part = DESIGNS.tensor_of_sm
    tensor, lanes = compare_pipes(gpu, columns)
    registers = _ratio(columns, "sm.register_count", gpu.sm.register_count)
    shared = _ratio(columns, "sm.shared_byte", gpu.sm.shared_byte)
    return np.asarray(1.0 - _EQUAL_PARTS * part + part * (tensor + lanes + registers + shared))


def sms_at_equal_area(gpu: Gpu, columns: Columns) -> Array:
    """Return the SMs of designs whose die is as large as the base's, ``(*sweep,)``."""
    room = (1.0 - other_area(gpu, columns)) / DESIGNS.sm_area_share
    sms = float(sweep_values(gpu.sm_count)) * room / _relative_sm_area(gpu, columns)
    if (sms < 1.0).any():
        do = "Take smaller caches or less bandwidth, or leave out --hold area."
        raise bad_value("hold area", "room for an SM beside L2 and memory interfaces", "none", do)
    return np.floor(sms + 1e-9)


def compare_pipes(gpu: Gpu, columns: Columns) -> tuple[Array, Array]:
    """Return the tensor rate and the fp32 lanes of an SM over the base's, each ``(*sweep,)``.

    Of several formats whose rates vary, the widest tensor core counts.
    """
    tensor = np.asarray(columns.get("tensor_scale", np.array(1.0)), dtype=np.float64)
    for dtype, rate in gpu.pipes.tensor_flop_per_cycle.items():
        path = f"pipes.tensor_flop_per_cycle.{dtype}"
        if path in columns:
            tensor = np.maximum(tensor, columns[path] / float(sweep_values(rate)))
    lanes_path = f"pipes.cuda_flop_per_cycle.{Dtype.FP32}"
    return tensor, _ratio(columns, lanes_path, gpu.pipes.cuda_flop_per_cycle.get(Dtype.FP32))


def _ratio(
    columns: Columns,
    column: str,
    base: Sweepable | None,
) -> Array:
    if column not in columns or base is None:
        return np.asarray(1.0)
    return np.asarray(columns[column] / float(sweep_values(base)))


def design_energies(gpu: Gpu, columns: Columns) -> DesignEnergies:
    """Return the factors by which designs' energies and idle power differ from the base's."""
    area = relative_area(gpu, columns)
    tensor, lanes = compare_pipes(gpu, columns)
    alike = FORECAST.sm_alike
    sm = alike + (1.0 - alike) * 0.5 * (tensor + lanes)
    # Of a byte of L2 the drivers' share shrinks with a process; wires as long as the die take the
    # rest.
    wire = 1.0 - forecast_rule().classes["l2"]
    l2 = (1.0 - wire) + wire * np.sqrt(area)
    core = {"sm": as_sweep(sm), "l2": as_sweep(l2)}
    other_energies: dict[str, Sweepable] = {}
    if "memory_kind" in columns:
        core["dram"], other_energies["dram"] = _compare_memory(gpu, columns["memory_kind"])

    volts = np.asarray(columns.get("voltage_scale", np.array(1.0)), dtype=np.float64)
    memory = _ratio(columns, "memory.byte_per_s", gpu.memory.byte_per_s)
    memory_share = DESIGNS.static_memory_share
    chip_share = DESIGNS.static_chip_share
    static = (1.0 - memory_share - chip_share) + memory_share * memory + chip_share * area * volts
    link_j = FORECAST.link_energy_j_per_byte if "dies" in columns else None
    return DesignEnergies(
        core,
        other_energies,
        as_sweep(static),
        as_sweep(area * volts**2),
        link_j,
    )


def memory_kinds() -> tuple[str, ...]:
    """Return the kinds of device memory whose energies are known."""
    return tuple(forecast_rule().memory)


def _compare_memory(gpu: Gpu, kinds: npt.NDArray[Any]) -> tuple[Sweepable, Sweepable]:
    """Return the energy of a byte at the interface and on the memory's rail over the base's."""
    rules = forecast_rule().memory
    rule_of_kind = {name.lower(): rule for name, rule in rules.items()}
    own_rule = rule_of_kind[gpu.memory.kind.lower()]
    interface = np.array([rule.interface / own_rule.interface for rule in rules.values()])
    rail = np.array([rule.factor / own_rule.factor for rule in rules.values()])
    places = kinds.astype(np.intp)
    return as_sweep(interface[places]), as_sweep(rail[places])
