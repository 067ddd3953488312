"""Mixes of units, in pyramid fashion: pairs first, then three and four units at once (papers 000 and 002)."""

from __future__ import annotations

from wattcast.measure.microbench.arithmetic import conversion, float_units, int_units, register_fmas
from wattcast.measure.microbench.memory import cached, shared, stream
from wattcast.measure.microbench.tensor import mma
from wattcast.measure.microbench.unit import Benchmark, Unit

_FLOAT, _INT, _FMA = float_units(), int_units(), register_fmas()
_CONVERT = conversion(
    "convert", "{.reg .s32 t; cvt.rzi.s32.f32 t, %0; cvt.rn.f32.s32 %0, t;}", ((r"F2I.*", 1), (r"I2FP?.*", 1))
)
# name: units and steps; a streaming unit always has eight loads
MIXES: dict[str, dict[str, int]] = {
    "fma_int": {"fma": 256, "int": 256},
    "fma_sfu": {"fma": 256, "sfu": 16},
    "fma_fp64": {"fma": 256, "fp64": 64},
    "int_sfu": {"int": 256, "sfu": 32},
    "fp64_int": {"fp64": 128, "int": 128},
    "fma_int_sfu": {"fma": 192, "int": 96, "sfu": 8},
    "fma_convert": {"fma": 256, "convert": 16},
    "half_int": {"half": 256, "int": 128},
    "fma_shared": {"fma": 64, "shared": 8},
    "int_shared": {"int": 32, "shared": 8},
    "sfu_shared": {"sfu": 8, "shared": 8},
    "fp64_shared": {"fp64": 32, "shared": 8},
    "tensor_shared": {"tensor": 16, "shared": 8},
    "fma_l1": {"fma": 64, "l1": 4},
    "fma_l2": {"fma": 64, "l2": 8},
    "int_l2": {"int": 64, "l2": 8},
    "fp64_l2": {"fp64": 64, "l2": 8},
    "shared_l2": {"shared": 8, "l2": 8},
    "fma_dram_low": {"fma": 512, "dram": 8},
    "fma_dram_high": {"fma": 64, "dram": 8},
    "int_dram": {"int": 128, "dram": 8},
    "fp64_dram": {"fp64": 128, "dram": 8},
    "sfu_dram": {"sfu": 32, "dram": 8},
    "convert_dram": {"convert": 32, "dram": 8},
    "shared_dram": {"shared": 8, "dram": 8},
    "tensor_dram": {"tensor": 64, "dram": 8},
    "fma_int_shared_dram": {"fma": 128, "int": 64, "shared": 8, "dram": 8},
    "everything": {"fma": 96, "int": 48, "sfu": 4, "fp64": 8, "shared": 8, "dram": 8},
}


def mixes() -> list[Benchmark]:
    """All mixes; what is reported is the first unit."""
    return [_mix(name, parts) for name, parts in MIXES.items()]


def _mix(name: str, parts: dict[str, int]) -> Benchmark:
    where = next((place for place in ("l1", "l2", "dram") if place in parts), "")
    return Benchmark(
        f"mix_{name}",
        "mix",
        tuple((_unit(part), steps) for part, steps in parts.items()),
        blocks_per_sm=1 if "tensor" in parts or len(parts) > 3 else 2,
        shared_byte=16384 if "shared" in parts else 0,
        working_set=where,
        weight=5,
        version=3 if where == "l2" else 1,
    )


def _unit(part: str) -> Unit:
    made: dict[str, Unit] = {
        "fma": _FMA["fp32_fma"],
        "int": _INT["int32_add"],
        "sfu": _FLOAT["fp32_exp2_log2"],
        "fp64": _FMA["fp64_fma"],
        "half": _FLOAT["fp16x2_fma"],
        "convert": _CONVERT,
        "tensor": mma("bf16"),
        "shared": shared("shared", 8, 16),
        "l1": cached("l1", 4),
        "l2": stream("l2", 8, read="ld.global.cg"),
        "dram": stream("dram", 8),
    }
    return made[part]
