"""Define latency units: one warp in which every operation waits for the one before it.

Instructions alternate between two registers, so that each reads the result of the last (``CHAINS``). Memory is
walked along a ring of addresses, each of which holds the next: in the device's memory in random order, so that
nothing can be fetched ahead, over sizes that show the caches or over pages that show address translation.
"""

from __future__ import annotations

from wattcast.microbench.unit_source import CLUSTER_SYNC, BenchUnit, OpcodeCounts, asm, inout, into

RING_FACTOR, RING_STEP = 12 * 138707 + 1, 1013904223  # a full period for 2^n and 3·2^n nodes [Knuth, TAOCP 3.2.1.2]
LINE_BYTE, PAGE_BYTE = 128, 2 << 20
WARM_HOPS = 1 << 14  # along a ring before the first stamp, and between the stamps
SHARED_NODES = 512
ATOMIC_STEPS = 64
RING_SOURCE = f"""
extern "C" __global__ void link_ring(unsigned char *ring, unsigned long long nodes, unsigned long long stride)
{{
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < nodes; i += step) {{
    const unsigned long long next = (i * {RING_FACTOR}ull + {RING_STEP}ull) % nodes;
    *(unsigned long long *)(ring + i * stride + (i * {LINE_BYTE}ull & (stride - 1ull))) =
      (unsigned long long)(ring + next * stride + (next * {LINE_BYTE}ull & (stride - 1ull)));
  }}
}}
"""

_there_and_back = "{{.reg .{register} t; {there} t, %1; {back} %0, t;}}".format
# name: register, PTX that makes %0 from %1 (the result before) and %2 (a constant), machine instructions
CHAINS: dict[str, tuple[str, str, OpcodeCounts]] = {
    "int32_add": ("r", "{.reg .s32 t; add.s32 t, %0, %1; add.s32 %0, t, %2;}", ((r"IADD3.*", 1),)),
    "int32_mad": ("r", "mad.lo.s32 %0, %1, %2, %0;", ((r"IMAD", 1),)),
    "int32_mulhi": ("r", "mul.hi.u32 %0, %1, %2;", ((r"IMAD\.HI.*", 1),)),
    "int32_shift": ("r", "shf.l.wrap.b32 %0, %1, %0, %2;", ((r"SHF.*", 1),)),
    "int32_bit": ("r", "lop3.b32 %0, %0, %1, %2, 0xE8;", ((r"LOP3.*", 1),)),
    "int32_popc": ("r", "popc.b32 %0, %1;", ((r"POPC", 1),)),
    "int32_clz": ("r", "bfind.u32 %0, %1;", ((r"FLO.*", 1),)),
    "dp4a": ("r", "dp4a.s32.s32 %0, %1, %2, %0;", ((r"IDP.*", 1),)),
    "misc_prmt": ("r", "prmt.b32 %0, %1, %0, %2;", ((r"PRMT", 1),)),
    "misc_shuffle": ("r", "shfl.sync.bfly.b32 %0, %1, 5, 31, 0xffffffff;", ((r"SHFL.*", 1),)),
    "misc_redux": ("r", "redux.sync.add.s32 %0, %1, 0xffffffff;", ((r"REDUX.*", 1), (r"MOV|IMAD.*|R2UR.*", 1))),
    "dpx_add_max": ("r", "{.reg .s32 t; add.s32 t, %0, %1; max.s32 %0, t, %2;}", ((r"VIADDMNMX.*", 1),)),
    "fp32_add": ("f", "add.rn.f32 %0, %1, %2;", ((r"FADD", 1),)),
    "fp32_mul": ("f", "mul.rn.f32 %0, %1, %2;", ((r"FMUL", 1),)),
    "fp32_fma": ("f", "fma.rn.f32 %0, %1, %2, %0;", ((r"FFMA", 1),)),
    "fp64_add": ("d", "add.rn.f64 %0, %1, %2;", ((r"DADD", 1),)),
    "fp64_mul": ("d", "mul.rn.f64 %0, %1, %2;", ((r"DMUL", 1),)),
    "fp64_fma": ("d", "fma.rn.f64 %0, %1, %2, %0;", ((r"DFMA", 1),)),
    "fp16x2_fma": ("r", "fma.rn.f16x2 %0, %1, %2, %0;", ((r"HFMA2.*", 1),)),
    "bf16x2_fma": ("r", "fma.rn.bf16x2 %0, %1, %2, %0;", ((r"HFMA2.*", 1),)),
    "fp32_exp2": ("f", "ex2.approx.ftz.f32 %0, %1;", ((r"MUFU\.EX2", 1),)),
    "fp32_log2": ("f", "lg2.approx.ftz.f32 %0, %1;", ((r"MUFU\.LG2", 1),)),
    "fp32_rsqrt": ("f", "rsqrt.approx.ftz.f32 %0, %1;", ((r"MUFU\.RSQ", 1),)),
    "fp32_tanh": ("f", "tanh.approx.f32 %0, %1;", ((r"MUFU\.TANH", 1),)),
    "convert_int32": (
        "f",
        _there_and_back(register="s32", there="cvt.rzi.s32.f32", back="cvt.rn.f32.s32"),
        ((r"F2I.*", 1), (r"I2FP?.*", 1)),
    ),
    "convert_fp64": (
        "f",
        _there_and_back(register="f64", there="cvt.f64.f32", back="cvt.rn.f32.f64"),
        ((r"F2F.*", 2),),
    ),
    "convert_fp16": (
        "f",
        _there_and_back(register="b16", there="cvt.rn.f16.f32", back="cvt.f32.f16"),
        ((r"F2FP.*", 1), (r"HADD2.*", 1)),
    ),
}
TYPES = {"r": "unsigned", "f": "float", "d": "double"}


def chain_unit(key: str) -> BenchUnit:
    """Run a row of ``CHAINS``; a pair of conversions is one operation."""
    p, (letter, text, opcodes) = f"latency_{key}", CHAINS[key]
    value = "mixed(state + {0}u)" if letter == "r" else "unit_float(mixed(state + {0}u))"
    names = (f"{p}0", f"{p}1", f"{p}_k")
    bits = {"r": "{0}", "f": "__float_as_uint({0})", "d": "(unsigned)__double_as_longlong({0})"}[letter]
    return BenchUnit(
        p,
        " ".join(f"{TYPES[letter]} {name} = {value.format(n)};" for n, name in enumerate(names, 1)),
        lambda i: asm(text, inout(letter, names[i % 2]), into(letter, names[1 - i % 2], names[2])),
        f"{bits.format(names[0])} ^ {bits.format(names[1])}",
        opcodes,
        operation="pair" if key.startswith("convert") else "instruction",
    )


def ring_unit(name: str, nodes: int, stride: int, cached: bool = True) -> BenchUnit:
    """Follow the ring of ``nodes`` addresses that lies at ``b``; past L1 unless ``cached``.

    Each seed begins elsewhere: launches that walk the same stretch of a large ring would find it in the L2.
    """
    p, hop = name, asm(f"ld.global.{'ca' if cached else 'cg'}.u64 %0, [%0];", inout("l", f"{name}_at"))
    warm = f'_Pragma("unroll 1") for (unsigned i = 0u; i < {min(nodes, WARM_HOPS)}u; ++i) {hop}'
    first = f"const u64 {p}_first = ((u64)seed * 0x9e3779b97f4a7c15ull >> 16) % {nodes}ull; "
    first += f"u64 {p}_at = (u64)b + {p}_first * {stride}ull + ({p}_first * {LINE_BYTE}ull & {stride - 1}ull); "
    return BenchUnit(p, first + warm, lambda i: hop, f"(unsigned){p}_at", ((r"LDG.*", 1),), operation="load")


def shared_ring_unit(name: str, cluster: int = 1) -> BenchUnit:
    """Follow a ring in the block's own shared memory, or in that of its neighbour in a cluster."""
    p, far, nodes, kind = name, cluster > 1, SHARED_NODES, "u64" if cluster > 1 else "unsigned"
    if far:  # a block's memory holds addresses of itself as the cluster sees it; its neighbour follows them
        declare = f"u64 {p}_own = (u64)pool, {p}_at = {p}_own; "
        declare += f'unsigned {p}_rank; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"({p}_rank)); '
        for at, rank in (("at", f"({p}_rank + 1u) % {cluster}u"), ("own", f"{p}_rank")):
            declare += f'asm volatile("mapa.u64 %0, %0, %1;" : "+l"({p}_{at}) : "r"({rank})); '
    else:
        declare = f"unsigned {p}_own = (unsigned)__cvta_generic_to_shared(pool), {p}_at = {p}_own; "
    declare += f"for (unsigned i = threadIdx.x; i < {nodes}u; i += blockDim.x) (({kind} *)pool)[i] = {p}_own + "
    declare += f"(i * {RING_FACTOR}u + {RING_STEP}u) % {nodes}u * sizeof({kind}); "
    declare += CLUSTER_SYNC if far else "__syncthreads();"
    hop = (
        asm("ld.u64 %0, [%0];", inout("l", f"{p}_at"))
        if far
        else asm("ld.shared.u32 %0, [%0];", inout("r", f"{p}_at"))
    )
    return BenchUnit(
        p,
        declare,
        lambda i: hop,
        f"(unsigned){p}_at",
        ((r"LDS.*|LD\.E.*", 1),),
        finish=CLUSTER_SYNC if far else "",
        operation="load",
        cluster=cluster,
    )


def atomic_chain_unit(name: str, where: str) -> BenchUnit:
    """Add the result of the last addition to a word of shared memory or of L2."""
    p, shared = name, where == "shared"
    place = "(unsigned)__cvta_generic_to_shared(pool)" if shared else "(u64)b"
    declare = f"{'unsigned' if shared else 'u64'} {p}_at = {place}; unsigned {p}_v = 1u + (seed >> 31);"
    if shared:
        declare += " if (threadIdx.x == 0u) *(unsigned *)pool = 0u; __syncthreads();"
    add = asm(f"atom.{where}.add.u32 %0, [%1], %0;", inout("r", f"{p}_v"), into("r" if shared else "l", f"{p}_at"))
    return BenchUnit(
        p,
        declare,
        lambda i: "",
        f"{p}_v",
        ((r"ATOMS?G?.*", 1),),
        before=f"if (threadIdx.x == 0u) {{ {' '.join([add] * ATOMIC_STEPS)} }}",  # or lanes queue for one word
        around=((r"BRA.*|BSSY.*|BSYNC.*|ISETP.*|S2R|WARPSYNC.*|NOP", 8.0),),
        operation="atomic",
        one_thread=True,
    )


def cluster_barrier_unit(name: str, cluster: int) -> BenchUnit:
    """Wait at barriers of all blocks of a cluster, as ``cluster.sync()`` of CUDA does."""
    sync = 'asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");'
    opcodes: OpcodeCounts = ((r"UCGABAR.*", 2), (r"MEMBAR.*|ERRBAR|CGAERRBAR|CCTL.*", 4))
    return BenchUnit(name, "", lambda i: sync, "0u", opcodes, operation="barrier", cluster=cluster)
