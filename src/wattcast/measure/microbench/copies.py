"""Copies: from one buffer to the other through registers, in several ways, and asynchronously into shared memory."""

from __future__ import annotations

from dataclasses import replace

from wattcast.measure.microbench.memory import ADDRESS, REGISTERS, go, walk
from wattcast.measure.microbench.unit import SINK_WORDS, Unit, asm, into


def copy(
    name: str,
    steps: int,
    width: int = 16,
    threads: int = 512,
    read: str = "ld.global.nc.L1::no_allocate",
    write: str = "st.global",
) -> Unit:
    """A load from one buffer and a store to the same place of the other."""
    p, (kind, _, words) = name, REGISTERS[width]
    row = threads * width
    chunk = steps * row
    declare = walk(p, "a", chunk, f"threadIdx.x * {width}u") + f" const long long {p}_apart = b - a;"
    declare += " " + " ".join(f"unsigned {p}{i}_{w};" for i in range(steps) for w in range(words))
    shown = "{" + ", ".join(f"%{w}" for w in range(words)) + "}" if words > 1 else "%0"
    given = "{" + ", ".join(f"%{w + 1}" for w in range(words)) + "}" if words > 1 else "%1"

    def step(i: int) -> str:
        names = [f"{p}{i % steps}_{w}" for w in range(words)]
        if i < steps:
            outs = ", ".join(f'"=r"({n})' for n in names)
            return asm(f"{read}.{kind} {shown}, [%{words} + {i * row}];", outs, into("l", f"{p}_at"))
        ins = f"{into('l', f'({p}_at + {p}_apart)')}, {into('r', *names)}"
        return asm(f"{write}.{kind} [%0 + {(i - steps) * row}], {given};", "", ins)

    return Unit(
        p,
        declare,
        step,
        "0u",
        ((r"LDG.*|STG.*", 1),),
        advance=go(p, chunk),
        around=ADDRESS,
        operation="load or store",
        byte=float(width),
        chunk=chunk,
    )


def block_copy(name: str, steps: int, threads: int) -> Unit:
    """The same copy of the chunk that has the block's number: little code before the loads are on their way.

    Plain loads: the address never changes, so a load that promises constant data would be taken out of the loop.
    """
    p, plain = name, copy(name, steps, threads=threads, read="ld.global")
    registers = " ".join(f"unsigned {p}{i}_{w};" for i in range(steps) for w in range(4))
    declare = f"unsigned char *const {p}_at = a + (u64)blockIdx.x * {plain.chunk}ull + threadIdx.x * 16u;"
    return replace(plain, declare=f"{declare} const long long {p}_apart = b - a; {registers}", advance="")


def claimed_copy(name: str, steps: int, threads: int = 512) -> Unit:
    """The same copy, but a block takes the next chunk that nobody has: all blocks stay close together in the buffer.

    The chunk after this one is claimed while this one is on its way. The counter is the sink's last word, which
    no launch reaches; it starts anywhere and is never reset.
    """
    p, plain = name, copy(name, steps, threads=threads)
    claim = f"atomicAdd(sink + {SINK_WORDS - 1}u, 1u) % {p}_chunks"
    declare = (
        f"{plain.declare} unsigned *const {p}_next = (unsigned *)pool; unsigned {p}_mine = 0u; "
        f"if (threadIdx.x == 0u) {p}_next[0] = {claim}; __syncthreads();"
    )
    before = (
        f"{p}_at = {p}_base + (u64){p}_next[0] * {plain.chunk}ull; "
        f"if (threadIdx.x == 0u && iteration + 1 < iterations) {p}_mine = {claim};"
    )
    around = (  # the remainder, and the warp's threads added up before the atomic
        *ADDRESS,
        (r"IMAD.*|I2F.*|F2I.*|MUFU.*|U?IADD.*|VIADD|ISETP.*|LOP3.*|MOV|U?LDCU?.*|HFMA2.*|USHF.*", 24.0),
        (r"BAR.*|BSSY.*|BSYNC.*|ATOMG.*|LDS.*|STS.*|BRA.*|S2.*|NOP|U?LEA.*|R2UR.*|VOTEU.*|FLO.*|POPC|SHFL.*", 20.0),
    )
    advance = f"__syncthreads(); if (threadIdx.x == 0u) {p}_next[0] = {p}_mine; __syncthreads();"
    return replace(plain, declare=declare, before=before, advance=advance, around=around)


def async_copy(name: str, steps: int, threads: int = 512) -> Unit:
    """16-byte asynchronous copies from global to shared memory (cp.async), into two halves in turn.

    The halves matter: with one place for all, copies to a place that an earlier copy had yet to fill were not all
    made; 11 of 16 sectors of a request were fetched (H200, ncu), and DRAM seemed to deliver 6.5 TB/s.
    """
    p, row = name, threads * 16
    chunk = steps * row
    declare = walk(p, "a", chunk)
    declare += f" unsigned {p}_to = (unsigned)__cvta_generic_to_shared(pool) + threadIdx.x * 16u;"
    declare += f" unsigned {p}_half = {chunk}u, {p}_s = 0u;"

    def step(i: int) -> str:
        text = f"cp.async.cg.shared.global [%0 + {i * row}], [%1 + {i * row}], 16;"
        return asm(text, "", f'"r"({p}_to), "l"({p}_at)')

    taken = (  # what the last two iterations brought, for the check
        f"for (unsigned i = 0u; i < {2 * steps}u; ++i) {{ "
        f"const uint4 w = *(const uint4 *)(pool + i * {row}u + threadIdx.x * 16u); {p}_s ^= w.x ^ w.y ^ w.z ^ w.w; }}"
    )
    wait = asm("cp.async.commit_group;") + " " + asm("cp.async.wait_group 1;")
    return Unit(
        p,
        declare,
        step,
        f"{p}_s",
        ((r"LDGSTS.*", 1),),
        advance=f"{wait} {p}_to += {p}_half; {p}_half = 0u - {p}_half; {go(p, chunk)}",
        finish=f"{asm('cp.async.wait_all;')} {taken}",
        around=((r"IADD3.*|IMAD.*|LOP3.*", 2.0 * steps + 4), *ADDRESS, (r"LDGDEPBAR|DEPBAR.*", 2.0), (r"LDS", 4.0)),
        operation="copy",
        byte=16.0,
        chunk=chunk,
    )
