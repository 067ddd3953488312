"""Define arithmetic units: integers, floating point, special functions, divisions, conversions, moves, control flow.

Chains are coupled in rings (each result is used by two or more later operations) where the assembler would fold a
lone chain of additions or permutations, and multiplied by a and -1/a in turn where a lone chain would overflow, so
that operands stay as random as they began.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from wattcast.microbench.unit_source import BenchUnit, OpcodeCounts, asm, inout, into

CHAINS = 8
HELD = 128  # steps with one multiplier
ADDENDS = {  # about 1.414 and its negative: what fits into an instruction
    "f64": ("0d3FF6A09E00000000", "0dBFF6A09E00000000"),
    "f32": ("0f3FB504F3", "0fBFB504F3"),
}
ADD32 = r"IADD3|IADD|VIADD|IMAD\.IADD"


def integer(
    name: str,
    text: str,
    opcodes: OpcodeCounts,
    inputs: Callable[[int], tuple[str, ...]] = lambda i: (),
    chains: int = CHAINS,
    operation: str = "instruction",
) -> BenchUnit:
    """Chains of 32-bit registers ``x``; ``inputs(i)`` names further operands of step i."""
    p = name
    declare = " ".join(f"unsigned {p}{i} = mixed(state + {i + 1}u);" for i in range(chains))
    declare += " " + " ".join(f"unsigned {p}_k{i} = mixed(state + {i + 101}u) | 1u;" for i in range(4))
    return BenchUnit(
        name,
        declare,
        lambda i: asm(text, inout("r", f"{p}{i % chains}"), into("r", *(n.format(p=p) for n in inputs(i)))),
        fold_of([f"{p}{i}" for i in range(chains)]),
        opcodes,
        operation=operation,
    )


def fold_of(names: list[str]) -> str:
    """All of ``names`` in one unsigned expression."""
    return " ^ ".join(names)


def ring(*steps: int, chains: int = CHAINS) -> Callable[[int], tuple[str, ...]]:
    """Names of the chains that lie ``steps`` after the one of step i."""
    return lambda i: tuple("{p}" + str((i + step) % chains) for step in steps)


def constants(count: int = 1) -> Callable[[int], tuple[str, ...]]:
    """One of four constants a thread has, by turns."""
    return lambda i: tuple("{p}_k" + str((i // CHAINS + n) % 4) for n in range(count))


def int_units() -> dict[str, BenchUnit]:
    """32-bit and 64-bit integers."""
    pair = "{{.reg .u32 t; {op}.b32 t, %0; xor.b32 %0, t, %1;}}"
    units = [
        integer("int32_add", "{.reg .s32 t; add.s32 t, %0, %1; add.s32 %0, t, %2;}", ((r"IADD3.*", 1),), ring(1, 3)),
        integer("int32_mad", "mad.lo.s32 %0, %0, %1, %2;", ((r"IMAD", 1),), _mad_inputs),
        integer("int32_mulhi", "mul.hi.u32 %0, %0, %1;", ((r"IMAD\.HI.*", 1),), constants()),
        integer("int32_shift", "shf.l.wrap.b32 %0, %0, %1, %2;", ((r"SHF.*", 1),), _shift_inputs),
        integer("int32_bit", "lop3.b32 %0, %0, %1, %2, 0x96;", ((r"LOP3.*", 1),), ring(1, 3)),
        integer("int32_minmax", "", ((r"V?IMNMX3?.*", 1),), ring(1)),
        integer("int32_popc", pair.format(op="popc"), ((r"POPC", 1), (r"LOP3.*", 1)), constants()),
        integer(
            "int32_clz",
            "{.reg .u32 t; bfind.u32 t, %0; xor.b32 %0, t, %1;}",
            ((r"FLO.*", 1), (r"LOP3.*", 1)),
            constants(),
        ),
        integer("int32_brev", pair.format(op="brev"), ((r"BREV", 1), (r"LOP3.*", 1)), constants()),
        integer("dp4a", "dp4a.s32.s32 %0, %1, %2, %0;", ((r"IDP.*", 1),), ring(1, 3), operation="dp4a"),
        integer("misc_prmt", "prmt.b32 %0, %0, %1, %2;", ((r"PRMT", 1),), _prmt_inputs),
        integer("misc_shuffle", "shfl.sync.bfly.b32 %0, %0, 5, 31, 0xffffffff;", ((r"SHFL.*", 1),)),
    ]
    found = {unit.name: unit for unit in units}
    found["int32_minmax"] = _minmax(found["int32_minmax"])
    found["int32_compare"] = compare()
    found["misc_select"] = select()
    found["int64_add"] = int64(
        "int64_add", "add.s64 %0, %0, %1;", ((ADD32, 1), (r"IADD3\.X|IMAD\.X|UIADD3\.X|IADD\.?X?64?", 1))
    )
    found["int64_mul"] = int64(
        "int64_mul", "mul.lo.s64 %0, %0, %1;", ((r"IMAD(\.WIDE.*)?", 3), (r"IADD3.*|IMAD\.IADD|VIADD", 1)), odd=True
    )
    return found


def _mad_inputs(i: int) -> tuple[str, ...]:
    return (*constants()(i), *ring(1)(i))


def _shift_inputs(i: int) -> tuple[str, ...]:
    return (*ring(1)(i), *constants()(i))


def _prmt_inputs(i: int) -> tuple[str, ...]:
    return (*ring(1)(i), "{p}_k0")


def _minmax(unit: BenchUnit) -> BenchUnit:
    p = unit.name

    def step(i: int) -> str:
        op = "max" if (i // CHAINS) % 2 else "min"
        return asm(f"{op}.s32 %0, %0, %1;", inout("r", f"{p}{i % CHAINS}"), into("r", f"{p}{(i + 1) % CHAINS}"))

    return BenchUnit(p, unit.declare, step, unit.fold, unit.opcodes)


def select() -> BenchUnit:
    """Selections by two conditions in turn."""
    p = "misc_select"
    base = integer(p, "", ())

    def step(i: int) -> str:
        text = "{.reg .pred q; setp.ne.u32 q, %2, 0; selp.b32 %0, %0, %1, q;}"
        return asm(text, inout("r", f"{p}{i % CHAINS}"), into("r", f"{p}{(i + 1) % CHAINS}", f"{p}_q{i % 3}"))

    declare = base.declare + " " + " ".join(f"const unsigned {p}_q{n} = state & {1 << n}u;" for n in range(3))
    return BenchUnit(p, declare, step, base.fold, ((r"F?SEL", 1),))


def compare() -> BenchUnit:
    """Comparisons into predicates; all of a loop body in one statement, because predicates cannot leave one."""
    p, preds = "int32_compare", 6
    base = integer(p, "", ())
    pairs = [(i, j) for i in range(CHAINS) for j in range(CHAINS) if i != j]

    def step(i: int) -> str:
        x, y = pairs[(i * 5) % len(pairs)]
        q = i % preds
        return (
            'asm volatile("{.reg .pred q; setp.ne.u32 q, %0, 0; setp.lt.xor.s32 q, %1, %2, q; selp.u32 %0, 1, 0, q;}"'
            f' : "+r"({p}_q{q}) : "r"({p}{x}), "r"({p}{y}));'
        )

    declare = base.declare + " " + " ".join(f"unsigned {p}_q{n} = 0u;" for n in range(preds))
    fold = base.fold + " ^ " + fold_of([f"({p}_q{n} << {n})" for n in range(preds)])
    return BenchUnit(p, declare, step, fold, ((r"ISETP.*", 1),), around=((r"SEL|ISETP.*", 2.0 * preds),))


def int64(name: str, text: str, opcodes: OpcodeCounts, inputs: int = 1, odd: bool = False) -> BenchUnit:
    """Chains of 64-bit integers in a ring; ``odd`` ones have products that stay odd and never become zero."""
    p = name
    declare = " ".join(
        f"u64 {p}{i} = ((u64)mixed(state + {i + 1}u) << 32) | mixed(state + {i + 51}u){' | 1u' * odd};"
        for i in range(CHAINS)
    )

    def step(i: int) -> str:
        others = [f"{p}{(i + 1 + 2 * n) % CHAINS}" for n in range(inputs)]
        return asm(text, inout("l", f"{p}{i % CHAINS}"), into("l", *others))

    fold = " ^ ".join(f"(unsigned)({p}{i} ^ ({p}{i} >> 32))" for i in range(CHAINS))
    return BenchUnit(p, declare, step, fold, opcodes, operation="operation", around=((r"MOV|CALL.*", 8.0),))


def floating(
    name: str,
    kind: str,
    text: str,
    opcodes: OpcodeCounts,
    form: str = "fma",
    chains: int = CHAINS,
    flop: float = 1.0,
    operation: str = "instruction",
) -> BenchUnit:
    """Chains of floating-point registers. ``form``: fma (x·a+b, x·c+d, with a·c near -1), mul (x·a, x/a),
    add (x+a, x-a), turn (by a) or own (x alone)."""
    p = name
    declare, constraint, fold = _float_registers(p, kind, chains)

    def step(i: int) -> str:
        odd = (i // chains) % 2
        names = {
            "fma": ([f"{p}_c", f"{p}_d"] if odd else [f"{p}_a", f"{p}_b"]),
            "mul": [f"{p}_r" if odd else f"{p}_a"],
            "add": [f"{p}_m" if odd else f"{p}_b"],
            "turn": [f"{p}_b"],
            "own": [],
        }[form]
        return asm(text, inout(constraint, f"{p}{i % chains}"), into(constraint, *names))

    return BenchUnit(p, declare, step, fold, opcodes, flop=flop, operation=operation)


def sums(name: str, kind: str, opcode: str) -> BenchUnit:
    """Additions of two registers that both change: x + y, then y - x, in pairs of chains.

    (x, y) -> (x + y, -x) comes back after six rounds but for rounding, so values stay bounded, and no operand is
    held as a constant addend would be.
    """
    p = name
    declare, letter, fold = _float_registers(p, kind, CHAINS)

    def step(i: int) -> str:
        to, sign = turned(i)
        return asm(
            f"{'sub' if sign < 0 else 'add'}.rn.{kind} %0, %0, %1;",
            inout(letter, f"{p}{to}"),
            into(letter, f"{p}{to ^ 1}"),
        )

    return BenchUnit(p, declare, step, fold, ((opcode, 1),), flop=1.0)


def turned(i: int, chains: int = CHAINS) -> tuple[int, float]:
    """The chain of step i and the sign of its neighbour: x0 + x1, x2 + x3, ..., then x1 - x0, x3 - x2, ..."""
    half = i // (chains // 2) % 2
    return i % (chains // 2) * 2 + half, -1.0 if half else 1.0


def multiply_adds(name: str, kind: str = "f32", chains: int = CHAINS) -> BenchUnit:
    """Multiply-adds that wait for no register bank: x·a+b for ``HELD`` steps, then x·r-b, r near 1/a.

    The multiplier changes rarely, so the assembler holds it; the last round with r is negated, so chains go
    back and forth and stay bounded. Where the assembler lets go of what it holds (doubles every few
    instructions, few chains at every one) the addend is part of the instruction: two registers are read.
    """
    p, wide = name, kind == "f64"
    stated = wide or chains < CHAINS
    type_, letter = ("double", "d") if wide else ("float", "f")
    declare, _, fold = _float_registers(p, kind, chains)
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


def _float_registers(p: str, kind: str, chains: int) -> tuple[str, str, str]:
    """Declarations, constraint letter and folding expression of a kind of register."""
    if kind in ("f16x2", "bf16x2"):
        return _half_registers(p, kind, chains)
    wide = kind == "f64"
    type_, letter = ("double", "d") if wide else ("float", "f")
    lines = [f"{type_} {p}{i} = unit_float(mixed(state + {i + 1}u));" for i in range(chains)]
    lines += [
        f"const {type_} {p}_a = unit_float(mixed(state + 77u));",
        f"const {type_} {p}_b = unit_float(mixed(state + 78u));",
        f"const {type_} {p}_r = ({type_})0.99999 / {p}_a, {p}_c = -{p}_r, {p}_d = -{p}_b, {p}_m = -{p}_b;",
    ]
    bits = (
        "(unsigned)__double_as_longlong({0}) ^ (unsigned)(__double_as_longlong({0}) >> 32)"
        if wide
        else "__float_as_uint({0})"
    )
    fold = " ^ ".join(bits.format(f"{p}{i}") for i in range(chains))
    return " ".join(lines) + f" (void){p}_d; (void){p}_m; (void){p}_r; (void){p}_c;", letter, fold


def _half_registers(p: str, kind: str, chains: int) -> tuple[str, str, str]:
    """Packed pairs between 1 and 2 (random mantissa); a is such a pair, c about -1/a of it."""
    one, mask = ("0x3c003c00u", "0x03ff03ffu") if kind == "f16x2" else ("0x3f803f80u", "0x007f007fu")
    minus = "0xb9b0b9b0u" if kind == "f16x2" else "0xbf33bf33u"  # about -0.71 and -0.70; a times it is above -1
    a = "0x3d8e3d8eu" if kind == "f16x2" else "0x3fb43fb4u"  # about 1.39 and 1.41
    lines = [f"unsigned {p}{i} = {one} | (mixed(state + {i + 1}u) & {mask});" for i in range(chains)]
    lines += [
        f"const unsigned {p}_a = {a} ^ (seed == 7u), {p}_b = {one} | (mixed(state + 78u) & {mask});",
        f"const unsigned {p}_c = {minus} ^ (seed == 7u), {p}_d = {p}_b ^ 0x80008000u;",
    ]
    return " ".join(lines), "r", " ^ ".join(f"{p}{i}" for i in range(chains))


def float_units() -> dict[str, BenchUnit]:
    """fp32, fp64, packed halves and special functions."""
    units = [
        sums("fp32_add", "f32", r"FADD"),
        floating("fp32_mul", "f32", "mul.rn.f32 %0, %0, %1;", ((r"FMUL", 1),), "mul"),
        multiply_adds("fp32_fma"),
        sums("fp64_add", "f64", r"DADD"),
        floating("fp64_mul", "f64", "mul.rn.f64 %0, %0, %1;", ((r"DMUL", 1),), "mul"),
        multiply_adds("fp64_fma", "f64"),
        floating("fp16x2_fma", "f16x2", "fma.rn.f16x2 %0, %0, %1, %2;", ((r"HFMA2.*", 1),), flop=4.0),
        floating("bf16x2_fma", "bf16x2", "fma.rn.bf16x2 %0, %0, %1, %2;", ((r"HFMA2.*", 1),), flop=4.0),
        floating(
            "fp32_rcp",
            "f32",
            "{.reg .f32 t; rcp.approx.ftz.f32 t, %0; add.rn.ftz.f32 %0, t, %1;}",
            ((r"MUFU\.RCP", 1), (r"FADD.*", 1)),
            "add",
        ),
        floating(
            "fp32_exp2_log2",
            "f32",
            "{.reg .f32 t; lg2.approx.ftz.f32 t, %0; ex2.approx.ftz.f32 %0, t;}",
            ((r"MUFU\.(LG2|EX2)", 2),),
            "own",
            operation="pair",
        ),
        floating(  # 7.5 sin x + b is chaotic; the sine alone goes to zero
            "fp32_sin",
            "f32",
            "{.reg .f32 t; sin.approx.ftz.f32 t, %0; fma.rn.ftz.f32 %0, t, 0f40F00000, %1;}",
            ((r"MUFU\.SIN", 1), (r"FMUL.*", 1), (r"FFMA.*", 1)),
            "turn",
            operation="operation",
        ),
    ]
    return {unit.name: unit for unit in units}


def register_fmas() -> dict[str, BenchUnit]:
    """Multiply-adds of three registers whose multiplier changes every round: they meet bank conflicts."""
    return {
        "fp32_fma": floating("fp32_fma", "f32", "fma.rn.f32 %0, %0, %1, %2;", ((r"FFMA", 1),), flop=2.0),
        "fp64_fma": floating("fp64_fma", "f64", "fma.rn.f64 %0, %0, %1, %2;", ((r"DFMA", 1),), flop=2.0),
    }


def division(name: str, text: str, opcodes: OpcodeCounts, denormal: bool) -> BenchUnit:
    """x = a / x, which goes back and forth between x and a / x; with a denormal a every other result is denormal."""
    p, chains = name, 4
    numerator = (
        "__uint_as_float(0x00200000u | (mixed(state + 90u) >> 12))" if denormal else "unit_float(mixed(state + 90u))"
    )
    declare = " ".join(f"float {p}{i} = unit_float(mixed(state + {i + 1}u));" for i in range(chains))
    declare += f" const float {p}_n = {numerator};"
    fold = " ^ ".join(f"__float_as_uint({p}{i})" for i in range(chains))
    return BenchUnit(
        p,
        declare,
        lambda i: asm(text, inout("f", f"{p}{i % chains}"), into("f", f"{p}_n")),
        fold,
        opcodes,
        operation="division",
        around=((r"MOV|IMAD\.MOV.*", 4.0),),
    )


def conversion(name: str, text: str, opcodes: OpcodeCounts, per_step: int = 2) -> BenchUnit:
    """A float there and back through another format."""
    p = name
    declare = " ".join(f"float {p}{i} = 1.0e3f * unit_float(mixed(state + {i + 1}u));" for i in range(CHAINS))
    fold = " ^ ".join(f"__float_as_uint({p}{i})" for i in range(CHAINS))
    return BenchUnit(
        p,
        declare,
        lambda i: asm(text, inout("f", f"{p}{i % CHAINS}")),
        fold,
        opcodes,
        per_step=per_step,
        operation="conversion",
    )


def turning_conversion(name: str, there: str, back: str, register: str, opcodes: OpcodeCounts) -> BenchUnit:
    """A float there and back, then added to its neighbour as in ``sums``: no value comes twice in a row."""
    plain = conversion(name, "", (*opcodes, (r"FADD", 1)))

    def step(i: int) -> str:
        to, sign = turned(i)
        add = "sub" if sign < 0 else "add"
        text = f"{{.reg .{register} t; .reg .f32 u; {there} t, %0; {back} u, t; {add}.rn.f32 %0, u, %1;}}"
        return asm(text, inout("f", f"{name}{to}"), into("f", f"{name}{to ^ 1}"))

    return replace(plain, step=step)


def integer_conversion(name: str, opcodes: OpcodeCounts) -> BenchUnit:
    """A float to an integer of 32 bits, a linear congruential step, and back to a float: all bits are random."""
    plain = conversion(name, "", (*opcodes, (r"IMAD", 1)))
    text = "{.reg .s32 t; cvt.rzi.s32.f32 t, %0; mad.lo.s32 t, t, %1, %2; cvt.rn.f32.s32 %0, t;}"
    declare = f" const unsigned {name}_k = (mixed(state + 77u) & ~7u) | 5u, {name}_c = mixed(state + 78u) | 1u;"
    return replace(
        plain,
        declare=plain.declare + declare,
        step=lambda i: asm(text, inout("f", f"{name}{i % CHAINS}"), into("r", f"{name}_k", f"{name}_c")),
    )


def moves(count: int) -> BenchUnit:
    """Registers that change places at the end of each iteration: only moves can do that across a loop.

    A rotation of 64 registers takes 73 of them, as the disassembly shows.
    """
    p = "misc_move"
    declare = " ".join(f"unsigned {p}{i} = mixed(state + {i + 1}u);" for i in range(count))
    rotated = f"{{ const unsigned t = {p}0; " + " ".join(f"{p}{i} = {p}{i + 1};" for i in range(count - 1))
    rotated += f" {p}{count - 1} = t; }}"
    return BenchUnit(
        p,
        declare,
        lambda i: "",
        fold_of([f"{p}{i} * {2 * i + 1}u" for i in range(count)]),
        ((r"MOV|IMAD\.MOV.*|UMOV", 1.0),),
        advance=rotated,
        operation="move",
    )


def branches() -> BenchUnit:
    """A loop with one multiply-add in it: an addition, a comparison and a taken branch for each."""
    p = "control_branch"
    return BenchUnit(
        p,
        f"unsigned {p} = state; const unsigned {p}_k = mixed(state) | 1u;",
        lambda i: asm("mad.lo.u32 %0, %0, %1, %1;", inout("r", p), into("r", f"{p}_k")),
        p,
        ((r"IMAD", 1), (r"BRA.*", 1)),
        operation="branch",
    )
