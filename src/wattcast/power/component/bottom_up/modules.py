"""Chip -> joules per event of the module model: flops, bytes, cycles, as a fitted bundle has them.

A flop or a byte is more than its unit: operands come from registers, an instruction is fetched, scheduled and issued,
a byte of L2 crosses the chip. Each event sums what it sets in motion.
"""

from __future__ import annotations

from wattcast.hardware import Gpu
from wattcast.power.component.bottom_up.catalogue import assumed
from wattcast.power.component.bottom_up.chip import Chip
from wattcast.power.component.bottom_up.events import energies
from wattcast.power.component.bottom_up.logic import unit_cost
from wattcast.power.component.bottom_up.memory_controller import dram

_WIDTH_BIT = {"tensor_tf32_flop": 32, "tensor_fp16_flop": 16, "tensor_fp8_flop": 8, "tensor_int8_op": 8}
_FP16_BIT = 16
_FLOP_PER_FMA = 2.0


def module_energies(chip: Chip, gpu: Gpu) -> dict[str, float]:
    """Joules per event at the design's voltage, for random data; an event without a source is left out."""
    d = chip.design
    counts = energies(chip)
    lane = 1.0 / d.warp_size
    issue_j = lane * (counts["TOT_INST"] + counts["FP_INT"] + counts["IC_H"])  # an instruction's share of one thread
    reads, word_byte = assumed("fma_reads"), 4.0
    fma_j = counts["FPU_ACC"] + reads * counts["REG_RD"] + counts["REG_WR"] + issue_j
    register_j_per_byte = (counts["REG_RD"] + counts["REG_WR"]) / 2.0 / word_byte
    sector = assumed("sector_byte")
    access_byte = d.words_of_access * 4.0
    found = {
        "cuda_fp32_flop": fma_j / _FLOP_PER_FMA,
        "cuda_fp64_flop": (2.0 * fma_j - issue_j) / _FLOP_PER_FMA,  # two lanes and two registers, one instruction
        "int32_op": counts["SP_ACC"] + 2.0 * counts["REG_RD"] + counts["REG_WR"] + issue_j,
        # with the multiply that brings its argument to base two
        "sfu_op": counts["SFU_ACC"]
        + counts["REG_RD"]
        + counts["REG_WR"]
        + issue_j
        + assumed("sfu_multiplies") * fma_j,
        "shared_byte": counts["SHRD_ACC"] / access_byte,
        "l2_byte": (counts["L2_RH"] / (d.l2.block_byte / 2.0) if d.l2 else 0.0) + counts["NOC_A"] / sector,
        "busy_sm_cycle": chip.latches * chip.latch.energy_j * d.pipelines,
    }
    if gpu.pipes.tensor_flop_per_cycle:
        flop_j = unit_cost(chip.tech, "tensor_fp16").energy_j
        operand_j = assumed("tensor_register_byte_per_flop") * register_j_per_byte
        found |= {name: (flop_j + operand_j) * bits / _FP16_BIT for name, bits in _WIDTH_BIT.items()}
    memory = dram(gpu.memory.kind)
    if memory.read_j_per_byte is not None and memory.write_j_per_byte is not None:
        block = d.controller.block_byte
        found["dram_read_byte"] = memory.read_j_per_byte + chip.controller.read_j / block
        found["dram_write_byte"] = memory.write_j_per_byte + chip.controller.write_j / block
    return found
