"""Chip -> joules per counter of a simulator, as an energy table with its provenance."""

from __future__ import annotations

from wattcast.power.component.bottom_up.chip import CacheCost, Chip

_WORD_BIT = 32
_UNITS_OF_PIPELINE = 4.0  # a core's latches belong to fetch, load-store, memory management and execution
_BUSY_UNITS = 3.0  # of which three work for a duty of one (GPUWattch)


def energies(chip: Chip) -> dict[str, float]:
    """Joules per count, by GPUWattch's counters; device memory included where the design knows it."""
    d = chip.design
    operand_j = d.clock_ratio * (
        chip.register_crossbar.energy_j / d.registers.operands
        + chip.register_arbiter.energy_j / d.registers.operands
        + chip.collector.read_j
    )
    per_operand = d.clock_ratio * d.registers.read_share * _WORD_BIT / d.registers.bank_bit
    read, write = chip.coalescer_read_j, chip.coalescer_write_j
    switch = chip.shared_crossbar.energy_j * d.words_of_access
    buffer, crossbar, arbiter = (part.energy_j for part in chip.router)
    crossbar *= d.toggle
    table = {
        "TOT_INST": chip.buffer.read_j + chip.buffer.write_j,
        "FP_INT": chip.window.read_j + 2.0 * chip.window.search_j + chip.window.write_j + chip.selection.energy_j,
        "IC_H": chip.instruction.array.read_j,
        "IC_M": chip.instruction.array.read_j + chip.instruction.array.write_j + chip.instruction.missed_j,
        "DC_RH": chip.data.array.read_j + switch + read,
        "DC_RM": _read_miss_j(chip.data, d.data.write_back) + read,
        "DC_WH": chip.data.array.write_j + switch + write,
        "DC_WM": _write_miss_j(chip.data, d.data.write_back) + write,
        "TC_H": chip.texture.array.read_j + switch + read,
        "TC_M": _read_miss_j(chip.texture, d.data.write_back) + read,
        "CC_H": chip.constant.array.read_j + switch + read,
        "CC_M": _read_miss_j(chip.constant, d.data.write_back) + read,
        "SHRD_ACC": chip.shared.read_j * d.words_of_access + switch,
        "REG_RD": per_operand * chip.registers.read_j + operand_j,
        "REG_WR": per_operand * chip.registers.write_j,
        "NON_REG_OPs": operand_j,
        "SP_ACC": d.clock_ratio * chip.alu.energy_j,
        "SFU_ACC": chip.sfu.energy_j,
        "FPU_ACC": chip.fpu.energy_j,
        "MEM_RD": chip.controller.read_j + (d.dram_read_j or 0.0),
        "MEM_WR": chip.controller.write_j + (d.dram_write_j or 0.0),
        "MEM_PRE": d.dram_precharge_j or 0.0,
        "L2_RH": 0.0,
        "L2_RM": 0.0,
        "L2_WH": 0.0,
        "L2_WM": 0.0,
        "NOC_A": buffer + crossbar + arbiter + chip.link_j,
    }
    if chip.l2 is not None:
        l2 = chip.l2
        table |= {
            "L2_RH": l2.array.read_j,
            "L2_RM": l2.array.tag_read_j,
            "L2_WH": l2.array.write_j,
            "L2_WM": l2.array.write_j + l2.array.tag_write_j + l2.missed_j + l2.written_back_j,
        }
    return table


def duty_w(chip: Chip) -> float:
    """Watts of all SMs' pipelines at duty one: their latches, three quarters of them at work."""
    d = chip.design
    cycle_j = chip.latches * chip.latch.energy_j * d.pipelines
    return cycle_j * d.sm_count * _BUSY_UNITS / _UNITS_OF_PIPELINE * d.clock_hz


def _read_miss_j(cost: CacheCost, write_back: bool) -> float:
    return cost.array.read_j + (0.0 if write_back else cost.missed_j)


def _write_miss_j(cost: CacheCost, write_back: bool) -> float:
    found = cost.array.write_j + cost.array.tag_read_j
    return found + (cost.array.write_j + cost.missed_j + cost.written_back_j if write_back else 0.0)
