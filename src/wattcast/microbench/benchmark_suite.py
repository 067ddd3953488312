"""List every microbenchmark in the order in which it is measured when time is short.

Mixes of units are built like a pyramid: pairs first, then three and four units at once (papers 000 and 002).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from wattcast.core.errors import unknown_name
from wattcast.microbench import arithmetic_units, memory_units, tensor_units
from wattcast.microbench.arithmetic_units import (
    conversion,
    division,
    float_units,
    int_units,
    multiply_adds,
    register_fmas,
)
from wattcast.microbench.memory_units import cached, shared, stream
from wattcast.microbench.tensor_units import mma
from wattcast.microbench.unit_source import Benchmark, BenchUnit

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


def make_mixes() -> list[Benchmark]:
    """Return all mixes; rates are reported for the first unit."""
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


def _unit(part: str) -> BenchUnit:
    made: dict[str, BenchUnit] = {
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


CONFLICTS = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31)
COALESCENCE = (1, 2, 4, 8, 16, 32)
ACCESS_BYTE = (1, 2, 4, 8, 16)
WAYS = (1, 2, 3, 4, 8, 16, 32)
WARPS = (1, 2, 4, 8, 16, 32, 64)
ACTIVE = (0.001, 0.06, 0.125, 0.25, 0.5, 0.75, 1.0)
ICACHE_STEPS = (2048, 8192, 12288)
RATES = {  # of DRAM, bytes a cycle and SM: blocks of an SM, loads an iteration; 1 of 132 SMs at 1.98 GHz is 0.26 TB/s
    **{0.4: (1, 1), 1.2: (2, 2), 2.8: (2, 4), 5.6: (2, 8)}
}
COPY_RATES = {1.6: (1, 2), 4.8: (2, 4)}  # read and written
STEPS = {  # of a loop body: long where the unit is fast, so that the loop itself weighs under one percent
    **{"fp32_add": 512, "fp32_mul": 512, "fp32_fma": 512, "fp16x2_fma": 512, "bf16x2_fma": 512, "int32_add": 512},
    **{"int32_mad": 512, "int32_shift": 512, "int32_bit": 512, "int32_minmax": 512, "int32_compare": 480},
}
SPECIFIED = {
    **dict.fromkeys(("fp32_add", "fp32_mul", "fp32_fma"), "fp32"),
    **dict.fromkeys(("fp64_add", "fp64_mul", "fp64_fma"), "fp64"),
    **{"fp16x2_fma": "fp16x2", "bf16x2_fma": "bf16x2", "int32_add": "int32", "int32_mad": "int32_mul"},
    **{"int32_shift": "shift", "int32_bit": "logic", "int32_minmax": "compare", "int32_compare": "compare"},
    **{"int32_popc": "popc", "int32_clz": "clz", "int32_brev": "brev", "misc_shuffle": "shuffle"},
    **{"fp32_rcp": "sfu", "fp32_exp2_log2": "sfu_pair", "fp32_sin": "sfu"},
}
MENDED = {"fp32_fma", "fp64_fma", "fp32_add", "fp64_add", "int64_mul", "fp32_sin"}  # version 2
IEEE = (
    (r"MUFU\.RCP", 1.0),
    (r"FFMA", 5.0),
    (r"FCHK", 1.0),
    (r"BSSY.*|BSYNC.*|BRA|CALL.*", 4.0),
    (r"MOV|IMAD\.MOV.*", 3.0),
)
FAST = ((r"MUFU\.RCP", 1.0), (r"FMUL", 2.0), (r"FSETP.*", 1.0), (r"FSEL", 1.0))


Settings = dict[str, Any]


@cache
def list_benchmarks() -> tuple[Benchmark, ...]:
    """List every benchmark once, most important first; names are unique."""
    made = (*_arithmetic(), *_tensor(), *_memory(), *_curves(), *_rates(), *_structure(), *make_mixes())
    return tuple(sorted(made, key=lambda b: b.weight))


def find_benchmarks(names: list[str]) -> list[Benchmark]:
    """Find benchmarks by name, group or curve."""
    known = (
        {b.name for b in list_benchmarks()}
        | {b.group for b in list_benchmarks()}
        | {b.curve for b in list_benchmarks() if b.curve}
    )
    for name in names:
        if name not in known:
            raise unknown_name("microbenchmark", name, known, "`--list` names them all.")
    return [b for b in list_benchmarks() if not names or {b.name, b.group, b.curve} & set(names)]


def _one(unit: BenchUnit, group: str, steps: int, **settings: Any) -> Benchmark:
    return Benchmark(unit.name, group, ((unit, steps),), **settings)


def _arithmetic() -> list[Benchmark]:
    found = []
    first = {"fp32_fma", "fp64_fma", "int32_add", "fp32_exp2_log2"}
    for unit in (*int_units().values(), *float_units().values()):
        steps = STEPS.get(unit.name, 256 if unit.name.startswith(("fp64", "int64", "dp4a", "misc")) else 128)
        weight = 0 if unit.name in first else 2
        settings = {"specification": SPECIFIED.get(unit.name, ""), "weight": weight}
        settings["version"] = 2 if unit.name in MENDED else 1
        found.append(_one(unit, "arithmetic", steps, **settings))
    return [*found, *_divisions(), *_conversions(), *_miscellaneous()]


def _divisions() -> list[Benchmark]:
    ieee, fast = "div.rn.f32 %0, %1, %0;", "div.approx.f32 %0, %1, %0;"
    forms = {
        "div_ieee_normal": (ieee, IEEE, False),
        "div_ieee_denormal": (ieee, IEEE, True),
        "div_fast_normal": (fast, FAST, False),
        "div_fast_denormal": (fast, FAST, True),
    }
    return [
        _one(division(name, text, opcodes, denormal), "arithmetic", 32, weight=3, extra=((r"NOP", 32.0),))
        for name, (text, opcodes, denormal) in forms.items()
    ]


def _conversions() -> list[Benchmark]:
    turning = arithmetic_units.turning_conversion
    units = {
        "convert_int32": arithmetic_units.integer_conversion("convert_int32", ((r"F2I.*", 1), (r"I2FP?.*", 1))),
        "convert_fp64": turning("convert_fp64", "cvt.f64.f32", "cvt.rn.f32.f64", "f64", ((r"F2F.*", 2),)),
        "convert_fp16": turning(
            "convert_fp16", "cvt.rn.f16.f32", "cvt.f32.f16", "b16", ((r"F2FP.*", 0.5), (r"HADD2.*", 1))
        ),
        "convert_bf16": turning(
            "convert_bf16", "cvt.rn.bf16.f32", "cvt.f32.bf16", "b16", ((r"F2FP?.*", 1), (r"IMAD\.U32|SHF.*|PRMT", 1))
        ),
    }
    return [
        _one(unit, "arithmetic", 128, weight=3, version=2, least=90 if name == "convert_bf16" else 80)
        for name, unit in units.items()
    ]


def _miscellaneous() -> list[Benchmark]:
    return [
        _one(arithmetic_units.moves(64), "arithmetic", 73, threads=256, weight=3),
        _one(arithmetic_units.branches(), "arithmetic", 1, weight=3),
    ]


def _tensor() -> list[Benchmark]:
    shape: Settings = {
        **{"threads": 256, "blocks_per_sm": 1},
        **{"shared_byte": tensor_units.wgmma_shared_byte(256, 2), "only": ("sm_90a",)},
    }
    found = [
        _one(
            tensor_units.wgmma(precision),
            "tensor",
            tensor_units.WGMMA_STEPS,
            specification=f"tensor_{precision}",
            weight=0 if precision == "bf16" else 2,
            check="wgmma",
            **shape,
        )
        for precision in tensor_units.WGMMA_TYPES
    ]
    zeros = tensor_units.wgmma("bf16", zeros=True)
    found.append(Benchmark("wgmma_bf16_zeros", "tensor", ((zeros, tensor_units.WGMMA_STEPS),), weight=4, **shape))
    for share in (0.25, 0.5):  # below the power cap, which all multiprocessors together meet
        name, parts = (
            f"tensor_active_{round(1000 * share)}",
            ((tensor_units.wgmma("bf16"), tensor_units.WGMMA_STEPS),),
        )
        place: Settings = {"curve": "tensor_active", "at": share, "share": share}
        found.append(Benchmark(name, "tensor", parts, weight=4, **shape, **place))
    narrow = tensor_units.wgmma("bf16", columns=128, groups=4)
    shape |= {"threads": 512, "shared_byte": tensor_units.wgmma_shared_byte(128, 4), "specification": "tensor_bf16"}
    found.append(Benchmark("wgmma_bf16_n128", "tensor", ((narrow, tensor_units.WGMMA_STEPS),), weight=3, **shape))
    for precision in tensor_units.MMA:
        wide = precision == "fp64"
        found.append(
            _one(
                tensor_units.mma(precision),
                "tensor",
                16 if wide else 64,
                weight=2,
                threads=256 if wide else 512,
                only=("sm_90", "sm_90a") if wide else (),
                specification=f"tensor_{precision.removesuffix('_884')}",
            )
        )
    return found


def _memory() -> list[Benchmark]:
    m = memory_units
    large = {"shared_byte": 65536}
    return [
        _one(m.stream("dram_read", 8), "memory", 8, working_set="dram", check="fold", weight=1),
        _one(m.store("dram_write", 16), "memory", 16, working_set="dram", weight=1),
        _one(
            memory_units.copy("dram_copy", 8),
            "memory",
            16,
            working_set="dram",
            interleave=False,
            check="copy",
            weight=0,
        ),
        *_copies(),
        _one(
            m.stream("l2_read", 8, read="ld.global.cg"),
            "memory",
            8,
            working_set="l2",
            check="fold",
            weight=1,
            version=3,
        ),
        _one(
            m.store("l2_write", 8),
            "memory",
            8,
            working_set="l2",
            weight=1,
            version=3,
            extra=((r"LOP3.*|IMAD.*|SEL|ISETP.*|IADD3.*", 4.0),),  # changing what is stored
        ),
        _one(m.cached("l1_read", 4), "memory", 4, working_set="l1", weight=1),
        _one(m.local("l1_write", 32), "memory", 32, weight=1, version=2),
        _one(m.shared("shared_read", 8, 16), "memory", 8, weight=1, specification="shared", **large),
        _one(m.shared("shared_write", 8, 16, write=True), "memory", 8, weight=1, specification="shared", **large),
        _one(m.constant("constant_read", 64), "memory", 64, weight=1),
        _one(m.texture("texture_read", 4), "memory", 4, working_set="texture", weight=3),
        *(
            _one(
                memory_units.async_copy(f"async_copy_{where}", 4),
                "memory",
                4,
                working_set=where,
                check="fold",
                weight=4,
                version=3 if where == "l2" else 2,
                **large,
            )
            for where in ("l2", "dram")
        ),
        *(
            _one(
                tensor_units.bulk(f"bulk_copy_{where}"),
                "memory",
                tensor_units.BULK_STAGES,
                threads=32,
                blocks_per_sm=4,
                shared_byte=tensor_units.BULK_BYTE * tensor_units.BULK_STAGES + 64,
                working_set=where,
                least=90,
                weight=4,
                version=2 if where == "l2" else 1,
                note="one thread of a block copies",
            )
            for where in ("l2", "dram")
        ),
        _one(m.atomic("atomic_shared", 64, "shared"), "memory", 64, shared_byte=2048, weight=4),
        _one(m.atomic("atomic_own", 64, "own"), "memory", 64, working_set="l2", check="count", weight=4, version=2),
        _one(m.atomic("atomic_same", 64, "same"), "memory", 64, working_set="l2", weight=4, version=2),
    ]


def _thin_copies(short: Settings) -> dict[str, tuple[BenchUnit, int, Settings]]:
    """A block for every few KiB, a load or two for a thread: what elementwise operators launch."""
    shapes = {"thin": (1, 128), "thin_two": (2, 128), "thin_four": (4, 128), "thin_wide": (1, 512)}
    return {
        name: (
            memory_units.block_copy(f"dram_copy_{name}", steps, threads),
            2 * steps,
            {"threads": threads, "blocks_per_sm": 2048 // threads, "whole": True, "stamped": 32} | short,
        )
        for name, (steps, threads) in shapes.items()
    }


def _copies() -> list[Benchmark]:
    """Further ways to copy DRAM: which of them comes nearest to the driver's own is measured, not known.

    ``whole`` ones give every chunk a block of its own, as elementwise operators do, which reach 4.2 TB/s on an H200.
    """
    place = {"working_set": "dram", "check": "copy", "weight": 1, "once": True}
    nc = "ld.global.nc.L1::no_allocate"
    short = {"extra": ((r"U?IADD.*|ULDC|S2R|LOP3.*|VIADDMNMX.*|PLOP3.*", 4.0),)}  # a short body: addresses weigh more
    ways: dict[str, tuple[BenchUnit, int, Settings]] = {
        "streaming": (memory_units.copy("dram_copy_streaming", 8, read="ld.global.cs", write="st.global.cs"), 16, {}),
        "prefetch": (memory_units.copy("dram_copy_prefetch", 8, read=f"{nc}.L2::256B"), 16, {}),
        "warps": (memory_units.copy("dram_copy_warps", 4), 8, {"blocks_per_sm": 4} | short),
        "rows": (memory_units.copy("dram_copy_rows", 8, threads=1024), 16, {"threads": 1024, "blocks_per_sm": 1}),
        "few": (
            memory_units.copy("dram_copy_few", 4, threads=1024),
            8,
            {"threads": 1024, "blocks_per_sm": 1} | short,
        ),
        "claimed": (memory_units.claimed_copy("dram_copy_claimed", 8), 16, {"shared_byte": 16}),
        "whole": (memory_units.copy("dram_copy_whole", 4), 8, {"blocks_per_sm": 4, "whole": True} | short),
        "whole_few": (
            memory_units.copy("dram_copy_whole_few", 2, threads=256),
            4,
            {"threads": 256, "blocks_per_sm": 8, "whole": True} | short,
        ),
        **_thin_copies(short),
    }
    found = [_one(unit, "memory", steps, interleave=False, **(place | shape)) for unit, steps, shape in ways.values()]
    through = tensor_units.bulk_there_and_back("dram_copy_bulk")
    shape: Settings = {"threads": 32, "blocks_per_sm": 4, "least": 90, "note": "one thread of a block copies"}
    shape["shared_byte"] = tensor_units.BULK_BYTE * tensor_units.THROUGH_STAGES + 64
    return [*found, _one(through, "memory", tensor_units.THROUGH_STAGES, **(place | shape))]


def _curves() -> list[Benchmark]:
    m = memory_units
    found = [
        _one(m.shared(f"conflicts_{c}", 8, 4, c), "memory", 8, shared_byte=65536, curve="conflicts", at=c, weight=1)
        for c in CONFLICTS
    ]
    found += [
        _one(
            m.stream(f"coalescence_{n}", 8, 4, lanes=n),
            "memory",
            8,
            working_set="dram",
            curve="coalescence",
            at=n,
            weight=1,
        )
        for n in COALESCENCE
    ]
    found += [
        _one(
            memory_units.copy(f"access_{n}", 8, n),
            "memory",
            16,
            working_set="dram",
            interleave=False,
            check="copy",
            curve="access",
            at=n,
            weight=3,
        )
        for n in ACCESS_BYTE
    ]
    found += [
        _one(multiply_adds(f"icache_{n}"), "memory", n, curve="icache", at=16 * n, weight=6, version=2)
        for n in ICACHE_STEPS
    ]
    return found


def _rates() -> list[Benchmark]:
    """DRAM at a part of its rate: reads and copies by the clock, and reads among multiply-adds that set the pace."""
    found, m = [], memory_units
    place: Settings = {"working_set": "dram", "weight": 3}
    for rate, (blocks, steps) in RATES.items():
        name = f"dram_rate_{round(10 * rate):02d}"
        unit = m.paced(m.stream(name, steps), round(blocks * 512 * 16 * steps / rate))
        shape: Settings = place | {"blocks_per_sm": blocks, "curve": "dram_rate", "at": rate, "check": "fold"}
        found.append(_one(unit, "structure", steps, **shape))
    for rate, (blocks, steps) in COPY_RATES.items():
        name = f"dram_rate_copy_{round(10 * rate):02d}"
        unit = m.paced(memory_units.copy(name, steps), round(blocks * 512 * 16 * 2 * steps / rate))
        shape = place | {"blocks_per_sm": blocks, "curve": "dram_rate_copy", "at": rate, "check": "copy"}
        found.append(_one(unit, "structure", 2 * steps, interleave=False, **shape))
    fma = arithmetic_units.register_fmas()["fp32_fma"]
    for steps in (1, 2):
        parts = ((m.stream("dram", steps), steps), (fma, 1024))
        found.append(Benchmark(f"dram_fma_{steps}", "structure", parts, **place))
    return found


def _structure() -> list[Benchmark]:
    place: Settings = {"curve": "divergence", "weight": 1, "version": 2}
    found = [_one(tensor_units.divergence(w), "structure", 1, at=w, **place) for w in WAYS]
    for warps in WARPS:
        unit = multiply_adds(f"occupancy_{warps}", chains=1)
        shape: Settings = {"threads": 32 * min(warps, 32), "blocks_per_sm": 1 if warps <= 32 else 2, "version": 2}
        found.append(_one(unit, "structure", 512, curve="occupancy", at=warps, weight=4, **shape))
    for chains in (2, 4, 8):
        unit = multiply_adds(f"ilp_{chains}", chains=chains)
        shape = {"threads": 128, "blocks_per_sm": 1, "version": 2}
        found.append(_one(unit, "structure", 512, curve="ilp", at=chains, weight=5, **shape))
    for share in ACTIVE:
        unit = multiply_adds(f"active_{round(1000 * share)}")
        shape = {"threads": 1024, "blocks_per_sm": 1, "share": share, "version": 2}
        found.append(_one(unit, "structure", 512, curve="active", at=share, weight=4, **shape))
    for share in (0.125, 0.25, 0.5):
        unit = memory_units.stream(f"dram_active_{round(1000 * share)}", 8, threads=1024)
        shape = {"threads": 1024, "blocks_per_sm": 1, "share": share, "working_set": "dram"}
        found.append(_one(unit, "structure", 8, curve="dram_active", at=share, weight=5, **shape))
    for threads in (64, 256, 1024):
        unit = tensor_units.barrier(f"sync_barrier_{threads}")
        found.append(_one(unit, "structure", 64, threads=threads, blocks_per_sm=min(2048 // threads, 16), weight=4))
    found.append(_one(tensor_units.fence(), "structure", 16, weight=6))
    found.append(_one(tensor_units.sleep("sleep_resident"), "structure", 16, weight=4))
    return found
