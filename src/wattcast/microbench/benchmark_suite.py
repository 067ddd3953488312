"""List every microbenchmark in the order in which it is measured when time is short.

Mixes of units are built like a pyramid: pairs first, then three and four units at once (papers 000 and 002).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

from wattcast.core.errors import check_names
from wattcast.core.measured_rows import read_shipped_table
from wattcast.microbench import arithmetic_units as arithmetic
from wattcast.microbench import memory_units as memory
from wattcast.microbench import tensor_units as tensor
from wattcast.microbench.unit_source import Benchmark, BenchUnit

CONFLICTS = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31)
COALESCENCE = (1, 2, 4, 8, 16, 32)
ACCESS_BYTE = (1, 2, 4, 8, 16)
WAYS = (1, 2, 3, 4, 8, 16, 32)
WARPS = (1, 2, 4, 8, 16, 32, 64)
ACTIVE = (0.001, 0.06, 0.125, 0.25, 0.5, 0.75, 1.0)
ICACHE_STEPS = (2048, 8192, 12288)
TRANSFERS = ("dram_memcpy", "pcie_to_device", "pcie_to_host", "pcie_both", "peer_copy")  # by the driver
ATOMIC_LINES = (1, 4, 16, 64, 256, 1024, 4096)
MULTICAST, CLUSTERS = (2,), (2, 4, 8)  # sent to four blocks at once, the kernel failed on an H200
# lines of a ring: 16 KiB to 4 GiB, two sizes an octave; pages of another: 16 MiB to 64 GiB
RING_LINES = tuple(sorted([*(1 << n for n in range(7, 26, 1)), *(3 << n for n in range(8, 20))]))
RING_PAGES = tuple(1 << n for n in range(3, 16))
RATES = {  # of DRAM, bytes a cycle and SM: blocks of an SM, loads an iteration; 1 of 132 SMs at 1.98 GHz is 0.26 TB/s
    **{0.4: (1, 1), 1.2: (2, 2), 2.8: (2, 4), 5.6: (2, 8)}
}
COPY_RATES = {1.6: (1, 2), 4.8: (2, 4)}  # read and written
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
    made = (*_list_arithmetic(), *_list_tensor(), *_list_memory(), *_list_curves(), *_list_rates())
    made = (*made, *_list_structure(), *_list_mixes(), *_list_clusters(), *_list_latencies())
    return tuple(sorted(made, key=lambda b: b.weight))


def find_benchmarks(names: list[str]) -> list[Benchmark]:
    """Find benchmarks by name, group or curve; the driver's own copies are known, but have no kernel."""
    known = {name for b in list_benchmarks() for name in (b.name, b.group, b.curve) if name}
    known |= {"transfer", *TRANSFERS}
    check_names("microbenchmark", names, known, "`--list` names them all.")
    return [b for b in list_benchmarks() if not names or {b.name, b.group, b.curve} & set(names)]


def _make_single(group: str, unit: BenchUnit, steps: int, **settings: Any) -> Benchmark:
    """Make a benchmark of one unit, under its name."""
    return Benchmark(unit.name, group, ((unit, steps),), **settings)


def _list_arithmetic() -> list[Benchmark]:
    single, a = partial(_make_single, "arithmetic"), arithmetic
    found = []
    for row in read_shipped_table("wattcast.microbench", "arithmetic.csv"):
        known: Settings = {"specification": row["specification"]} | {n: int(row[n]) for n in ("weight", "version")}
        # a body is long where the unit is fast, so that the loop itself weighs under one percent
        found.append(single(a.arithmetic_units()[row["name"]], int(row["steps"]), **known))
    for kind, text, opcodes in (("ieee", "div.rn.f32", IEEE), ("fast", "div.approx.f32", FAST)):
        for operand in ("normal", "denormal"):
            name = f"div_{kind}_{operand}"
            unit = a.division_unit(name, f"{text} %0, %1, %0;", opcodes, operand == "denormal")
            found.append(single(unit, 32, weight=3, extra=((r"NOP", 32.0),)))
    f16 = ((r"F2FP.*", 0.5), (r"HADD2.*", 1.0))
    bf16 = ((r"F2FP?.*", 1.0), (r"IMAD\.U32|SHF.*|PRMT", 1.0))
    turning, newer = a.turning_conversion_unit, {"weight": 3, "version": 2}
    return [
        *found,
        single(a.integer_conversion_unit("convert_int32", ((r"F2I.*", 1), (r"I2FP?.*", 1))), 128, **newer),
        single(turning("convert_fp64", "cvt.f64.f32", "cvt.rn.f32.f64", "f64", ((r"F2F.*", 2),)), 128, **newer),
        single(turning("convert_fp16", "cvt.rn.f16.f32", "cvt.f32.f16", "b16", f16), 128, **newer),
        single(turning("convert_bf16", "cvt.rn.bf16.f32", "cvt.f32.bf16", "b16", bf16), 128, least=90, **newer),
        single(a.move_unit(64), 73, threads=256, weight=3),
        single(a.branch_unit(), 1, weight=3),
        *(single(unit, 512, only=("sm_90", "sm_90a"), weight=3) for unit in a.dpx_units()),
    ]


def _list_tensor() -> list[Benchmark]:
    steps, single = tensor.WGMMA_STEPS, partial(_make_single, "tensor")
    shape: Settings = {"threads": 256, "blocks_per_sm": 1, "only": ("sm_90a",)}
    shape["shared_byte"] = tensor.wgmma_shared_byte(256, 2)
    found = []
    for precision in tensor.WGMMA_TYPES:
        weight = 0 if precision == "bf16" else 2
        settings: Settings = {"specification": f"tensor_{precision}", "weight": weight, "check": "wgmma"}
        found.append(single(tensor.wgmma_unit(precision), steps, **settings, **shape))
    for precision in ("bf16", "fp8"):
        settings = {"specification": f"tensor_{precision}_sparse", "weight": 3, "check": "wgmma"}
        found.append(single(tensor.wgmma_unit(precision, sparse=True), steps, **settings, **shape))
    zeros = tensor.wgmma_unit("bf16", zeros=True)
    found.append(Benchmark("wgmma_bf16_zeros", "tensor", ((zeros, steps),), weight=4, **shape))
    for share in (0.25, 0.5):  # below the power cap, which all multiprocessors together meet
        parts = ((tensor.wgmma_unit("bf16"), steps),)
        place: Settings = {"curve": "tensor_active", "at": share, "share": share, "weight": 4}
        found.append(Benchmark(f"tensor_active_{round(1000 * share)}", "tensor", parts, **shape, **place))
    narrow = tensor.wgmma_unit("bf16", columns=128, groups=4)
    shape |= {"threads": 512, "shared_byte": tensor.wgmma_shared_byte(128, 4), "specification": "tensor_bf16"}
    found.append(Benchmark("wgmma_bf16_n128", "tensor", ((narrow, steps),), weight=3, **shape))
    for precision in tensor.MMA:
        kind = precision.removesuffix("_884").removeprefix("sparse_")
        settings = {"specification": f"tensor_{kind}{'_sparse' * precision.startswith('sparse')}", "weight": 2}
        if precision == "fp64":
            settings |= {"threads": 256, "only": ("sm_90", "sm_90a")}
        found.append(single(tensor.mma_unit(precision), 16 if precision == "fp64" else 64, **settings))
    return found


def _list_memory() -> list[Benchmark]:
    m, single = memory, partial(_make_single, "memory")
    dram: Settings = {"working_set": "dram"}
    l2: Settings = {"working_set": "l2", "weight": 1, "version": 3}
    large: Settings = {"shared_byte": 65536}
    shared: Settings = large | {"weight": 1, "specification": "shared"}
    changing = ((r"LOP3.*|IMAD.*|SEL|ISETP.*|IADD3.*", 4.0),)  # what is stored
    bulk: Settings = {"threads": 32, "blocks_per_sm": 4, "least": 90, "note": "one thread of a block copies"}
    bulk |= {"shared_byte": tensor.BULK_BYTE * tensor.BULK_STAGES + 64, "weight": 4}
    versions = {"l2": (3, 2), "dram": (2, 1)}  # of asynchronous and of bulk copies
    return [
        single(m.stream_unit("dram_read", 8), 8, check="fold", weight=1, **dram),
        single(m.store_unit("dram_write", 16), 16, weight=1, **dram),
        single(m.copy_unit("dram_copy", 8), 16, interleave=False, check="copy", weight=0, **dram),
        *_list_copies(),
        single(m.stream_unit("l2_read", 8, read="ld.global.cg"), 8, check="fold", **l2),
        single(m.store_unit("l2_write", 8), 8, extra=changing, **l2),
        single(m.cached_unit("l1_read", 4), 4, working_set="l1", weight=1),
        single(m.local_unit("l1_write", 32), 32, weight=1, version=2),
        single(m.shared_unit("shared_read", 8, 16), 8, **shared),
        single(m.shared_unit("shared_write", 8, 16, write=True), 8, **shared),
        single(m.constant_unit("constant_read", 64), 64, weight=1),
        single(m.texture_unit("texture_read", 4), 4, working_set="texture", weight=3),
        *(
            single(unit, 4, working_set=where, check="fold", weight=4, version=versions[where][0], **large)
            for where in versions
            for unit in (m.async_copy_unit(f"async_copy_{where}", 4),)
        ),
        *(
            single(unit, tensor.BULK_STAGES, working_set=where, version=versions[where][1], **bulk)
            for where in versions
            for unit in (tensor.bulk_unit(f"bulk_copy_{where}"),)
        ),
        single(m.atomic_unit("atomic_shared", 64, "shared"), 64, shared_byte=2048, weight=4),
        single(m.atomic_unit("atomic_own", 64, "own"), 64, check="count", **(l2 | {"weight": 4, "version": 2})),
        single(m.atomic_unit("atomic_same", 64, "same"), 64, **(l2 | {"weight": 4, "version": 2})),
        *(
            single(unit, 64, curve="atomic_lines", at=n, **(l2 | {"weight": 4, "version": 1}))
            for n in ATOMIC_LINES
            for unit in (m.atomic_unit(f"atomic_lines_{n}", 64, "lines", n),)
        ),
    ]


def _list_copies() -> list[Benchmark]:
    """List further ways to copy DRAM: which of them comes nearest to the driver's own is measured, not known.

    ``whole`` ones give every chunk a block of its own, as elementwise operators do, which reach 4.2 TB/s on an H200;
    ``thin`` ones have a block for every few KiB, a load or two for a thread.
    """
    place: Settings = {"working_set": "dram", "check": "copy", "weight": 1, "once": True}
    copy, prefetch = memory.copy_unit, f"{memory.READ_ONCE}.L2::256B"
    short: Settings = {"extra": ((r"U?IADD.*|ULDC|S2R|LOP3.*|VIADDMNMX.*|PLOP3.*", 4.0),)}  # addresses weigh more
    wide: Settings = {"threads": 1024, "blocks_per_sm": 1}
    some: Settings = {"threads": 256, "blocks_per_sm": 8, "whole": True}
    ways: list[tuple[BenchUnit, int, Settings]] = [
        (copy("dram_copy_streaming", 8, read="ld.global.cs", write="st.global.cs"), 16, {}),
        (copy("dram_copy_prefetch", 8, read=prefetch), 16, {}),
        (copy("dram_copy_warps", 4), 8, {"blocks_per_sm": 4} | short),
        (copy("dram_copy_rows", 8, threads=1024), 16, wide),
        (copy("dram_copy_few", 4, threads=1024), 8, wide | short),
        (memory.claimed_copy_unit("dram_copy_claimed", 8), 16, {"shared_byte": 16}),
        (copy("dram_copy_whole", 4), 8, {"blocks_per_sm": 4, "whole": True} | short),
        (copy("dram_copy_whole_few", 2, threads=256), 4, some | short),
    ]
    for name, (steps, threads) in {"": (1, 128), "_two": (2, 128), "_four": (4, 128), "_wide": (1, 512)}.items():
        shape: Settings = {"threads": threads, "blocks_per_sm": 2048 // threads, "whole": True, "stamped": 32}
        ways.append((memory.block_copy_unit(f"dram_copy_thin{name}", steps, threads), 2 * steps, shape | short))
    found = [_make_single("memory", unit, steps, interleave=False, **(place | shape)) for unit, steps, shape in ways]
    through = tensor.bulk_there_and_back_unit("dram_copy_bulk")
    shape = {"threads": 32, "blocks_per_sm": 4, "least": 90, "note": "one thread of a block copies"}
    shape["shared_byte"] = tensor.BULK_BYTE * tensor.THROUGH_STAGES + 64
    return [*found, _make_single("memory", through, tensor.THROUGH_STAGES, **(place | shape))]


def _list_curves() -> list[Benchmark]:
    m, single = memory, partial(_make_single, "memory")
    bank: Settings = {"shared_byte": 65536, "curve": "conflicts", "weight": 1}
    lane: Settings = {"working_set": "dram", "curve": "coalescence", "weight": 1}
    size: Settings = {"working_set": "dram", "interleave": False, "check": "copy", "curve": "access", "weight": 3}
    code: Settings = {"curve": "icache", "weight": 6, "version": 2}
    return [
        *(single(m.shared_unit(f"conflicts_{n}", 8, 4, n), 8, at=n, **bank) for n in CONFLICTS),
        *(single(m.stream_unit(f"coalescence_{n}", 8, 4, lanes=n), 8, at=n, **lane) for n in COALESCENCE),
        *(single(m.copy_unit(f"access_{n}", 8, n), 16, at=n, **size) for n in ACCESS_BYTE),
        *(single(arithmetic.multiply_adds(f"icache_{n}"), n, at=16 * n, **code) for n in ICACHE_STEPS),
    ]


def _list_rates() -> list[Benchmark]:
    """List DRAM at a part of its rate: reads and copies by the clock, reads among multiply-adds that set the pace."""
    found, m, single = [], memory, partial(_make_single, "structure")
    place: Settings = {"working_set": "dram", "weight": 3}
    for rate, (blocks, steps) in RATES.items():
        unit = m.stream_unit(f"dram_rate_{round(10 * rate):02d}", steps)
        shape: Settings = place | {"blocks_per_sm": blocks, "curve": "dram_rate", "at": rate, "check": "fold"}
        found.append(single(m.pace_unit(unit, round(blocks * 512 * 16 * steps / rate)), steps, **shape))
    for rate, (blocks, steps) in COPY_RATES.items():
        unit = m.copy_unit(f"dram_rate_copy_{round(10 * rate):02d}", steps)
        unit = m.pace_unit(unit, round(blocks * 512 * 16 * 2 * steps / rate))
        shape = place | {"blocks_per_sm": blocks, "curve": "dram_rate_copy", "at": rate, "check": "copy"}
        found.append(single(unit, 2 * steps, interleave=False, **shape))
    fma = arithmetic.register_fmas()["fp32_fma"]
    for steps in (1, 2):
        parts = ((m.stream_unit("dram", steps), steps), (fma, 1024))
        found.append(Benchmark(f"dram_fma_{steps}", "structure", parts, **place))
    return found


def _list_structure() -> list[Benchmark]:
    single, fmas = partial(_make_single, "structure"), arithmetic.multiply_adds
    place: Settings = {"curve": "divergence", "weight": 1, "version": 2}
    found = [single(tensor.divergence_unit(w), 1, at=w, **place) for w in WAYS]
    for warps in WARPS:
        shape: Settings = {"threads": 32 * min(warps, 32), "blocks_per_sm": 1 if warps <= 32 else 2, "version": 2}
        unit = fmas(f"occupancy_{warps}", chains=1)
        found.append(single(unit, 512, curve="occupancy", at=warps, weight=4, **shape))
    for chains in (2, 4, 8):
        shape = {"threads": 128, "blocks_per_sm": 1, "version": 2}
        found.append(single(fmas(f"ilp_{chains}", chains=chains), 512, curve="ilp", at=chains, weight=5, **shape))
    for share in ACTIVE:
        shape = {"threads": 1024, "blocks_per_sm": 1, "share": share, "version": 2}
        unit = fmas(f"active_{round(1000 * share)}")
        found.append(single(unit, 512, curve="active", at=share, weight=4, **shape))
    for share in (0.125, 0.25, 0.5):
        shape = {"threads": 1024, "blocks_per_sm": 1, "share": share, "working_set": "dram"}
        unit = memory.stream_unit(f"dram_active_{round(1000 * share)}", 8, threads=1024)
        found.append(single(unit, 8, curve="dram_active", at=share, weight=5, **shape))
    for threads in (64, 256, 1024):
        shape = {"threads": threads, "blocks_per_sm": min(2048 // threads, 16)}
        found.append(single(tensor.barrier_unit(f"sync_barrier_{threads}"), 64, weight=4, **shape))
    found.append(single(tensor.fence_unit("sync_fence"), 16, weight=6))
    found.append(single(tensor.sleep_unit("sleep_resident"), 16, weight=4))
    return found


def _list_clusters() -> list[Benchmark]:
    """List tiles by tensor map, copies to all blocks of a cluster, and memory of other blocks."""
    c, single = tensor, partial(_make_single, "memory")
    bulk: Settings = {"threads": 32, "blocks_per_sm": 4, "least": 90, "note": "one thread of a block copies"}
    bulk |= {"shared_byte": c.BULK_BYTE * c.BULK_STAGES + 64, "weight": 3}
    shared: Settings = {"shared_byte": 65536, "least": 90, "weight": 3}
    return [
        single(c.bulk_unit("tile_copy_l2", tile=True), c.BULK_STAGES, working_set="l2", tiles=True, **bulk),
        single(c.bulk_unit("tile_copy_dram", tile=True), c.BULK_STAGES, working_set="dram", tiles=True, **bulk),
        *(
            single(unit, c.BULK_STAGES, working_set="l2", curve="multicast", at=n, **bulk)
            for n in MULTICAST
            for unit in (c.bulk_unit(f"multicast_{n}", cluster=n),)
        ),
        *(
            single(unit, 8, curve="cluster_read", at=n, **shared)
            for n in CLUSTERS
            for unit in (memory.shared_unit(f"cluster_read_{n}", 8, 16, cluster=n),)
        ),
        single(memory.shared_unit("cluster_write_2", 8, 16, write=True, cluster=2), 8, **shared),
    ]


def _list_latencies() -> list[Benchmark]:
    """List latencies: chains of dependent instructions, and walks through memory over sizes and over pages."""
    u = arithmetic
    place: Settings = {"threads": 32, "blocks_per_sm": 1, "share": 0.0, "timed": True, "weight": 3}
    single = partial(_make_single, "latency")
    newer = {"dpx_add_max": ("sm_90", "sm_90a")}
    rows = read_shipped_table("wattcast.microbench", "latency_chains.csv")
    found = [single(u.chain_unit(*row.values()), 256, only=newer.get(row["name"], ()), **place) for row in rows]
    for precision in ("bf16", "tf32", "int8", "fp64_884", "sparse_bf16"):
        unit = replace(
            tensor.mma_unit(precision, 1), name=f"latency_mma_{precision}", per_step=1, flop=0.0, operation="mma"
        )
        found.append(Benchmark(unit.name, "latency", ((unit, 64),), **place))
    for columns in (8, 64, 128, 256):
        unit = tensor.wgmma_unit("bf16", columns=columns, groups=1, apart=True)
        unit = replace(unit, per_step=1, flop=0.0, operation="wgmma")
        byte = tensor.wgmma_shared_byte(columns, 1)
        shape = place | {"threads": 128, "shared_byte": byte, "only": ("sm_90a",), "curve": "wgmma", "at": columns}
        found.append(Benchmark(f"latency_wgmma_{columns}", "latency", ((unit, tensor.WGMMA_STEPS),), **shape))
    small: Settings = place | {"shared_byte": 4096}
    found.append(single(u.shared_ring_unit("latency_shared"), 256, **small))
    found.append(single(u.shared_ring_unit("latency_cluster_shared", 2), 256, least=90, **small))
    found.append(single(u.atomic_chain_unit("latency_atomic_shared", "shared"), u.ATOMIC_STEPS, **small))
    found.append(single(u.atomic_chain_unit("latency_atomic_l2", "global"), u.ATOMIC_STEPS, **place))
    barriers = (u.cluster_barrier_unit(f"latency_cluster_barrier_{n}", n) for n in CLUSTERS)
    found.extend(single(barrier, 64, least=90, **place) for barrier in barriers)
    for size in (16, 1024, tensor.BULK_BYTE):
        unit = tensor.bulk_latency_unit(f"latency_bulk_{size}", size)
        shape = place | {"shared_byte": tensor.BULK_BYTE + 64, "least": 90, "curve": "bulk", "at": size}
        found.append(single(unit, tensor.LATENCY_STEPS, **shape))
    for curve, stride, counts in (("ring", u.LINE_BYTE, RING_LINES), ("pages", u.PAGE_BYTE, RING_PAGES)):
        for nodes in counts:
            unit = u.ring_unit(f"latency_{curve}_{nodes}", nodes, stride, cached=curve == "ring")
            shape = place | {"curve": curve, "at": nodes * stride, "ring": (nodes, stride), "version": 2}
            found.append(single(unit, 64, **shape))
    return found


def _list_mixes() -> list[Benchmark]:
    """List the mixes of ``mixes.csv``: units and their steps, of a streaming unit always eight loads.

    Rates are reported for the first unit.
    """
    plain, fmas = arithmetic.arithmetic_units(), arithmetic.register_fmas()
    there_and_back = "{.reg .s32 t; cvt.rzi.s32.f32 t, %0; cvt.rn.f32.s32 %0, t;}"
    units = {
        "fma": fmas["fp32_fma"],
        "int": plain["int32_add"],
        "sfu": plain["fp32_exp2_log2"],
        "fp64": fmas["fp64_fma"],
        "half": plain["fp16x2_fma"],
        "convert": arithmetic.conversion_unit("convert", there_and_back, ((r"F2I.*", 1), (r"I2FP?.*", 1))),
        "tensor": tensor.mma_unit("bf16"),
        "shared": memory.shared_unit("shared", 8, 16),
        "l1": memory.cached_unit("l1", 4),
        "l2": memory.stream_unit("l2", 8, read="ld.global.cg"),
        "dram": memory.stream_unit("dram", 8),
    }
    found = []
    for row in read_shipped_table("wattcast.microbench", "mixes.csv"):
        parts = {unit: int(steps) for unit, steps in (part.split() for part in row["units"].split("; "))}
        where = next((place for place in ("l1", "l2", "dram") if place in parts), "")
        shape: Settings = {
            "blocks_per_sm": 1 if "tensor" in parts or len(parts) > 3 else 2,
            "shared_byte": 16384 if "shared" in parts else 0,
            "version": 3 if where == "l2" else 1,
        }
        mixed = tuple((units[part], steps) for part, steps in parts.items())
        found.append(Benchmark(f"mix_{row['name']}", "mix", mixed, working_set=where, **shape))
    return found
