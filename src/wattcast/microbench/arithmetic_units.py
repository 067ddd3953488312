"""Define units of arithmetic (numbers, special functions, conversions, moves, control flow) and of latency.

Chains are coupled in rings (each result is used by two or more later operations) where the assembler would fold a
lone chain of additions or permutations, and multiplied by a and -1/a in turn where a lone chain would overflow, so
that operands stay as random as they began.

In a latency unit one warp runs, and every operation waits for the one before it. Instructions alternate between two
registers, so that each reads the result of the last (``latency_chains.csv``). Memory is walked along a ring of
addresses, each of which holds the next: in the device's memory in random order, so that nothing can be fetched ahead,
over sizes that show the caches or over pages that show address translation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

from wattcast.core.measured_rows import read_shipped_table
from wattcast.microbench.unit_source import CLUSTER_SYNC, BenchUnit, OpcodeCounts, asm, inout, into, read_opcodes

CHAINS = 8
HELD = 128  # steps with one multiplier
ADDENDS = {  # about 1.414 and its negative: what fits into an instruction
    "f64": ("0d3FF6A09E00000000", "0dBFF6A09E00000000"),
    "f32": ("0f3FB504F3", "0fBFB504F3"),
}
ADD32 = r"IADD3|IADD|VIADD|IMAD\.IADD"
RING_FACTOR, RING_STEP = 12 * 138707 + 1, 1013904223  # a full period for 2^n and 3·2^n nodes [Knuth, TAOCP 3.2.1.2]
LINE_BYTE, PAGE_BYTE = 128, 2 << 20
WARM_HOPS = 1 << 14  # along a ring before the first stamp, and between the stamps
SHARED_NODES = 512
ATOMIC_STEPS = 64
TYPES = {"r": "unsigned", "f": "float", "d": "double"}


def integer_unit(name: str, text: str, opcodes: OpcodeCounts, operands: str = "", **more: Any) -> BenchUnit:
    """Run chains of 32-bit registers.

    ``operands`` names the further ones of a step: ``+1`` is the next chain, ``k`` one of a thread's four constants by
    turns, ``k0`` always the first.
    """
    p = name
    declare = " ".join(f"unsigned {p}{i} = mixed(state + {i + 1}u);" for i in range(CHAINS))
    declare += " " + " ".join(f"unsigned {p}_k{i} = mixed(state + {i + 101}u) | 1u;" for i in range(4))

    def step(i: int) -> str:
        by_turns = {"k": f"_k{i // CHAINS % 4}", "k0": "_k0"}
        names = [by_turns.get(word) or str((i + int(word)) % CHAINS) for word in operands.split()]
        return asm(text, inout("r", f"{p}{i % CHAINS}"), into("r", *(p + n for n in names)))

    return BenchUnit(name, declare, step, " ^ ".join(f"{p}{i}" for i in range(CHAINS)), opcodes, **more)


@cache
def arithmetic_units() -> dict[str, BenchUnit]:
    """Return units of integers, floats, packed halves and special functions, as ``arithmetic.csv`` lists them."""
    added: OpcodeCounts = ((ADD32, 1), (r"IADD3\.X|IMAD\.X|UIADD3\.X|IADD\.?X?64?", 1))
    multiplied: OpcodeCounts = ((r"IMAD(\.WIDE.*)?", 3), (r"IADD3.*|IMAD\.IADD|VIADD", 1))
    made = (
        *(minimum_unit(), compare_unit(), select_unit()),
        int64_unit("int64_add", "add.s64 %0, %0, %1;", added),
        int64_unit("int64_mul", "mul.lo.s64 %0, %0, %1;", multiplied, odd=True),
        *(sum_unit("fp32_add", "f32", r"FADD"), sum_unit("fp64_add", "f64", r"DADD")),
        *(multiply_adds("fp32_fma"), multiply_adds("fp64_fma", "f64")),
    )
    found = {unit.name: unit for unit in made}
    for row in read_shipped_table("wattcast.microbench", "arithmetic.csv"):
        name, text, operands = row["name"], row["ptx"], row["operands"]
        if text:
            opcodes, more = read_opcodes(row["opcodes"]), {"flop": float(row["flop"]), "operation": row["operation"]}
            whole = row["kind"] == "u32"
            unit = integer_unit if whole else partial(float_unit, row["kind"])
            found[name] = unit(name, text, opcodes, operands, **more)
    return found


def minimum_unit() -> BenchUnit:
    """Take the smaller and the larger of two neighbours in turn."""
    p = "int32_minmax"

    def step(i: int) -> str:
        op = "max" if (i // CHAINS) % 2 else "min"
        return asm(f"{op}.s32 %0, %0, %1;", inout("r", f"{p}{i % CHAINS}"), into("r", f"{p}{(i + 1) % CHAINS}"))

    return replace(integer_unit(p, "", ((r"V?IMNMX3?.*", 1),)), step=step)


def dpx_units() -> Iterator[BenchUnit]:
    """Yield units of fused additions and maxima (DPX): one instruction on sm_90, several elsewhere."""
    forms = {"": "add.s32 t, %0, %1; max.s32 %0, t, %2;", "_16": "add.s16x2 t, %0, %1; max.s16x2 %0, t, %2;"}
    forms["_relu"] = "add.s32 t, %0, %1; max.s32 t, t, %2; max.s32 %0, t, 0;"
    for suffix, text in forms.items():
        name, opcodes = f"dpx_add_max{suffix}", ((r"VIADDMNMX.*", 1.0),)
        yield integer_unit(name, f"{{.reg .b32 t; {text}}}", opcodes, "+1 k")


def select_unit() -> BenchUnit:
    """Select by three conditions in turn."""
    p = "misc_select"
    base = integer_unit(p, "", ((r"F?SEL", 1),))

    def step(i: int) -> str:
        text = "{.reg .pred q; setp.ne.u32 q, %2, 0; selp.b32 %0, %0, %1, q;}"
        return asm(text, inout("r", f"{p}{i % CHAINS}"), into("r", f"{p}{(i + 1) % CHAINS}", f"{p}_q{i % 3}"))

    flags = " ".join(f"const unsigned {p}_q{n} = state & {1 << n}u;" for n in range(3))
    return replace(base, declare=f"{base.declare} {flags}", step=step)


def compare_unit() -> BenchUnit:
    """Compare into predicates, which go back to a register at once because they cannot leave a statement."""
    p, preds = "int32_compare", 6
    base = integer_unit(p, "", ((r"ISETP.*", 1),))
    pairs = [(i, j) for i in range(CHAINS) for j in range(CHAINS) if i != j]

    def step(i: int) -> str:
        x, y = pairs[(i * 5) % len(pairs)]
        text = "{.reg .pred q; setp.ne.u32 q, %0, 0; setp.lt.xor.s32 q, %1, %2, q; selp.u32 %0, 1, 0, q;}"
        return asm(text, inout("r", f"{p}_q{i % preds}"), into("r", f"{p}{x}", f"{p}{y}"))

    declare = f"{base.declare} " + " ".join(f"unsigned {p}_q{n} = 0u;" for n in range(preds))
    fold = f"{base.fold} ^ " + " ^ ".join(f"({p}_q{n} << {n})" for n in range(preds))
    return replace(base, declare=declare, step=step, fold=fold, around=((r"SEL|ISETP.*", 2.0 * preds),))


def int64_unit(name: str, text: str, opcodes: OpcodeCounts, odd: bool = False) -> BenchUnit:
    """Run chains of 64-bit integers in a ring; ``odd`` ones have products that stay odd and never become zero."""
    p = name
    declare = " ".join(
        f"u64 {p}{i} = ((u64)mixed(state + {i + 1}u) << 32) | mixed(state + {i + 51}u){' | 1u' * odd};"
        for i in range(CHAINS)
    )
    return BenchUnit(
        p,
        declare,
        lambda i: asm(text, inout("l", f"{p}{i % CHAINS}"), into("l", f"{p}{(i + 1) % CHAINS}")),
        " ^ ".join(f"(unsigned)({p}{i} ^ ({p}{i} >> 32))" for i in range(CHAINS)),
        opcodes,
        operation="operation",
        around=((r"MOV|CALL.*", 8.0),),
    )


def float_unit(kind: str, name: str, text: str, opcodes: OpcodeCounts, form: str = "fma", **more: Any) -> BenchUnit:
    """Run chains of floating-point registers.

    ``form``: fma (x·a+b, x·c+d, with a·c near -1), mul (x·a, x/a), add (x+a, x-a), turn (by a) or own (x alone).
    A sine is 7.5 sin x + b, which is chaotic; the sine alone goes to zero.
    """
    p = name
    declare, letter, fold = _declare_floats(p, kind, CHAINS)
    operands = {"fma": ("ab", "cd"), "mul": ("a", "r"), "add": ("b", "m"), "turn": ("b", "b"), "own": ("", "")}[form]

    def step(i: int) -> str:
        names = [f"{p}_{n}" for n in operands[i // CHAINS % 2]]
        return asm(text, inout(letter, f"{p}{i % CHAINS}"), into(letter, *names))

    return BenchUnit(p, declare, step, fold, opcodes, **more)


def sum_unit(name: str, kind: str, opcode: str) -> BenchUnit:
    """Add two registers that both change: x + y, then y - x, in pairs of chains.

    (x, y) -> (x + y, -x) comes back after six rounds but for rounding, so values stay bounded, and no operand is
    held as a constant addend would be.
    """
    p = name
    declare, letter, fold = _declare_floats(p, kind, CHAINS)

    def step(i: int) -> str:
        to, way = _turn_pair(i)
        return asm(f"{way}.rn.{kind} %0, %0, %1;", inout(letter, f"{p}{to}"), into(letter, f"{p}{to ^ 1}"))

    return BenchUnit(p, declare, step, fold, ((opcode, 1),), flop=1.0)


def _turn_pair(i: int) -> tuple[int, str]:
    """Return the chain of step i and what it does: x0 + x1, x2 + x3, ..., then x1 - x0, x3 - x2, ..."""
    half = i // (CHAINS // 2) % 2
    return i % (CHAINS // 2) * 2 + half, "sub" if half else "add"


def multiply_adds(name: str, kind: str = "f32", chains: int = CHAINS) -> BenchUnit:
    """Multiply and add without waiting for a register bank: x·a+b for ``HELD`` steps, then x·r-b, r near 1/a.

    The multiplier changes rarely, so the assembler holds it; the last round with r is negated, so chains go
    back and forth and stay bounded. Where the assembler lets go of what it holds (doubles every few
    instructions, few chains at every one) the addend is part of the instruction: two registers are read.
    """
    p, wide = name, kind == "f64"
    stated = wide or chains < CHAINS
    type_ = "double" if wide else "float"
    declare, letter, fold = _declare_floats(p, kind, chains)
    declare += f" const {type_} {p}_g = ({type_})1 + ({p}_a - ({type_})1) * ({type_})0.0625;"
    declare += f" const {type_} {p}_i = ({type_})0.99999 / {p}_g;"

    def step(i: int) -> str:
        shrinks = i // HELD % 2 == 1
        last = shrinks and i % HELD >= HELD - chains
        multiplier = f"{'-' if last else ''}{p}_{'i' if shrinks else 'g'}"
        own = inout(letter, f"{p}{i % chains}")
        if stated:
            return asm(f"fma.rn.{kind} %0, %0, %1, {ADDENDS[kind][shrinks]};", own, into(letter, multiplier))
        return asm("fma.rn.f32 %0, %0, %1, %2;", own, into(letter, multiplier, f"{p}_{'d' if shrinks else 'b'}"))

    return BenchUnit(p, declare, step, fold, ((r"DFMA" if wide else r"FFMA", 1),), flop=2.0)


def _declare_floats(p: str, kind: str, chains: int) -> tuple[str, str, str]:
    """Return declarations, constraint letter and folding expression of a kind of register.

    Packed pairs lie between 1 and 2 (random mantissa); their a is such a pair, and c about -1/a of it.
    """
    if kind in ("f16x2", "bf16x2"):
        one, mask, a, minus = {  # a is about 1.39 and 1.41, c about -0.71 and -0.70: a times c is above -1
            "f16x2": ("0x3c003c00u", "0x03ff03ffu", "0x3d8e3d8eu", "0xb9b0b9b0u"),
            "bf16x2": ("0x3f803f80u", "0x007f007fu", "0x3fb43fb4u", "0xbf33bf33u"),
        }[kind]
        lines = [f"unsigned {p}{i} = {one} | (mixed(state + {i + 1}u) & {mask});" for i in range(chains)]
        lines += [f"const unsigned {p}_a = {a} ^ (seed == 7u), {p}_b = {one} | (mixed(state + 78u) & {mask});"]
        lines += [f"const unsigned {p}_c = {minus} ^ (seed == 7u), {p}_d = {p}_b ^ 0x80008000u;"]
        return " ".join(lines), "r", " ^ ".join(f"{p}{i}" for i in range(chains))
    type_, letter = ("double", "d") if kind == "f64" else ("float", "f")
    lines = [f"{type_} {p}{i} = unit_float(mixed(state + {i + 1}u));" for i in range(chains)]
    lines += [f"const {type_} {p}_{n} = unit_float(mixed(state + {m}u));" for n, m in (("a", 77), ("b", 78))]
    lines += [f"const {type_} {p}_r = ({type_})0.99999 / {p}_a, {p}_c = -{p}_r, {p}_d = -{p}_b, {p}_m = -{p}_b;"]
    bits = "__float_as_uint({0})"
    if kind == "f64":
        bits = "(unsigned)__double_as_longlong({0}) ^ (unsigned)(__double_as_longlong({0}) >> 32)"
    fold = " ^ ".join(bits.format(f"{p}{i}") for i in range(chains))
    return " ".join(lines) + f" (void){p}_d; (void){p}_m; (void){p}_r; (void){p}_c;", letter, fold


def register_fmas() -> dict[str, BenchUnit]:
    """Return multiply-adds of three registers whose multiplier changes every round: they meet bank conflicts."""
    return {
        "fp32_fma": float_unit("f32", "fp32_fma", "fma.rn.f32 %0, %0, %1, %2;", ((r"FFMA", 1),), flop=2.0),
        "fp64_fma": float_unit("f64", "fp64_fma", "fma.rn.f64 %0, %0, %1, %2;", ((r"DFMA", 1),), flop=2.0),
    }


def division_unit(name: str, text: str, opcodes: OpcodeCounts, denormal: bool) -> BenchUnit:
    """Compute x = a / x, back and forth between x and a / x; a denormal a makes every other result denormal."""
    p, chains = name, 4
    small = "__uint_as_float(0x00200000u | (mixed(state + 90u) >> 12))"
    declare = " ".join(f"float {p}{i} = unit_float(mixed(state + {i + 1}u));" for i in range(chains))
    declare += f" const float {p}_n = {small if denormal else 'unit_float(mixed(state + 90u))'};"
    return BenchUnit(
        p,
        declare,
        lambda i: asm(text, inout("f", f"{p}{i % chains}"), into("f", f"{p}_n")),
        " ^ ".join(f"__float_as_uint({p}{i})" for i in range(chains)),
        opcodes,
        operation="division",
        around=((r"MOV|IMAD\.MOV.*", 4.0),),
    )


def conversion_unit(name: str, text: str, opcodes: OpcodeCounts) -> BenchUnit:
    """Convert a float to another format and back."""
    p = name
    return BenchUnit(
        p,
        " ".join(f"float {p}{i} = 1.0e3f * unit_float(mixed(state + {i + 1}u));" for i in range(CHAINS)),
        lambda i: asm(text, inout("f", f"{p}{i % CHAINS}")),
        " ^ ".join(f"__float_as_uint({p}{i})" for i in range(CHAINS)),
        opcodes,
        per_step=2,
        operation="conversion",
    )


def turning_conversion_unit(name: str, there: str, back: str, register: str, opcodes: OpcodeCounts) -> BenchUnit:
    """Convert a float there and back, then add it to its neighbour as ``sum_unit`` does: no value comes twice."""

    def step(i: int) -> str:
        to, way = _turn_pair(i)
        text = f"{{.reg .{register} t; .reg .f32 u; {there} t, %0; {back} u, t; {way}.rn.f32 %0, u, %1;}}"
        return asm(text, inout("f", f"{name}{to}"), into("f", f"{name}{to ^ 1}"))

    return replace(conversion_unit(name, "", (*opcodes, (r"FADD", 1))), step=step)


def integer_conversion_unit(name: str, opcodes: OpcodeCounts) -> BenchUnit:
    """Convert a float to 32 bits, take a linear congruential step, and convert back: all bits are random."""
    plain = conversion_unit(name, "", (*opcodes, (r"IMAD", 1)))
    text = "{.reg .s32 t; cvt.rzi.s32.f32 t, %0; mad.lo.s32 t, t, %1, %2; cvt.rn.f32.s32 %0, t;}"
    declare = f" const unsigned {name}_k = (mixed(state + 77u) & ~7u) | 5u, {name}_c = mixed(state + 78u) | 1u;"
    return replace(
        plain,
        declare=plain.declare + declare,
        step=lambda i: asm(text, inout("f", f"{name}{i % CHAINS}"), into("r", f"{name}_k", f"{name}_c")),
    )


def move_unit(count: int) -> BenchUnit:
    """Let registers change places at the end of each iteration: only moves can do that across a loop.

    A rotation of 64 registers takes 73 of them, as the disassembly shows.
    """
    p = "misc_move"
    rotated = f"{{ const unsigned t = {p}0; " + " ".join(f"{p}{i} = {p}{i + 1};" for i in range(count - 1))
    return BenchUnit(
        p,
        " ".join(f"unsigned {p}{i} = mixed(state + {i + 1}u);" for i in range(count)),
        lambda i: "",
        " ^ ".join(f"{p}{i} * {2 * i + 1}u" for i in range(count)),
        ((r"MOV|IMAD\.MOV.*|UMOV", 1.0),),
        advance=f"{rotated} {p}{count - 1} = t; }}",
        operation="move",
    )


def branch_unit() -> BenchUnit:
    """Loop with one multiply-add in it: an addition, a comparison and a taken branch for each."""
    p = "control_branch"
    return BenchUnit(
        p,
        f"unsigned {p} = state; const unsigned {p}_k = mixed(state) | 1u;",
        lambda i: asm("mad.lo.u32 %0, %0, %1, %1;", inout("r", p), into("r", f"{p}_k")),
        p,
        ((r"IMAD", 1), (r"BRA.*", 1)),
        operation="branch",
    )


def chain_unit(key: str, letter: str, text: str, opcodes: str) -> BenchUnit:
    """Run a row of ``latency_chains.csv``: PTX that makes %0 from %1, the result before, and %2, a constant.

    A pair of conversions is one operation.
    """
    p = f"latency_{key}"
    value = "mixed(state + {0}u)" if letter == "r" else "unit_float(mixed(state + {0}u))"
    names = (f"{p}0", f"{p}1", f"{p}_k")
    bits = {"r": "{0}", "f": "__float_as_uint({0})", "d": "(unsigned)__double_as_longlong({0})"}[letter]
    return BenchUnit(
        p,
        " ".join(f"{TYPES[letter]} {name} = {value.format(n)};" for n, name in enumerate(names, 1)),
        lambda i: asm(text, inout(letter, names[i % 2]), into(letter, names[1 - i % 2], names[2])),
        f"{bits.format(names[0])} ^ {bits.format(names[1])}",
        read_opcodes(opcodes),
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
