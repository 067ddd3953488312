"""Define memory units: DRAM, L2, L1, shared, constant and texture reads and writes, copies and atomics.

A streaming unit walks a buffer in chunks: a block takes the chunk of its own number, then that number plus the
number of blocks, and so on, round and round. Within a chunk each load covers a whole row of the block, so addresses
differ by constants. Loaded values are folded with exclusive or, so that a check can compare them with the same fold
of the buffer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wattcast.microbench.unit_source import CLUSTER_SYNC, SINK_WORDS, BenchUnit, asm, into, out_of, vector

KINDS = {1: ("u8", 1), 2: ("u16", 1), 4: ("u32", 1), 8: ("v2.u32", 2), 16: ("v4.u32", 4)}  # width: PTX type, words
READ_ONCE = "ld.global.nc.L1::no_allocate"
SPINS = 1 << 12  # naps of a paced unit before it goes on anyway


def declare_walk(p: str, buffer: str, chunk: int, place: str = "threadIdx.x * 16u") -> str:
    """Write the declarations of a walk through ``buffer``."""
    return (
        f"const unsigned {p}_chunks = (unsigned)(bytes / {chunk}ull), {p}_step = gridDim.x % {p}_chunks; "
        f"unsigned {p}_k = blockIdx.x % {p}_chunks; "
        f"unsigned char *const {p}_base = {buffer} + {place}; "
        f"unsigned char *{p}_at = {p}_base + (u64){p}_k * {chunk}ull;"
    )


def advance_walk(p: str, chunk: int) -> str:
    """Go on to the block's next chunk, by the grid's remainder: it may be larger than the buffer has chunks."""
    return (
        f"{p}_k += {p}_step; if ({p}_k >= {p}_chunks) {p}_k -= {p}_chunks; "
        f"{p}_at = {p}_base + (u64){p}_k * {chunk}ull;"
    )


def name_words(p: str, step: int, words: int) -> list[str]:
    """Name the registers that a step loads."""
    return [f"{p}{step}_{w}" for w in range(words)]


def declare_words(p: str, steps: int, words: int) -> str:
    """Declare the registers of all steps."""
    return " ".join(f"unsigned {word};" for i in range(steps) for word in name_words(p, i, words))


def name_quad(p: str, step: int, words: int = 4) -> list[str]:
    """Name the words that a step stores: two sets of four random words, in turn."""
    return [f"{p}q{step % 2}_{w}" for w in range(words)]


def load_unit(
    name: str, declare: str, load: str, row: int, steps: int, width: int, advance: str, letter: str = "l", **more: Any
) -> BenchUnit:
    """Load ``width`` bytes a thread from ``name``_at, ``row`` bytes further in every step, into two sums by turns."""
    p, (kind, words) = name, KINDS[width]
    taken = [word for i in range(steps) for word in name_words(p, i, words)]
    folds = " ".join(f"{p}_s{n // 2 % 2} ^= {' ^ '.join(taken[n : n + 2])};" for n in range(0, len(taken), 2))

    def step(i: int) -> str:
        text = f"{load}.{kind} {vector(words)}, [%{words} + {i * row}];"
        return asm(text, out_of(*name_words(p, i, words)), into(letter, f"{p}_at"))

    return BenchUnit(
        p,
        f"{declare} unsigned {p}_s0 = 0u, {p}_s1 = 0u; {declare_words(p, steps, words)}",
        step,
        f"{p}_s0 ^ {p}_s1",
        advance=f"{folds} {advance}",
        byte=float(width),
        **{"operation": "load"} | more,
    )


def write_unit(
    name: str, declare: str, store: str, row: int, width: int, advance: str, letter: str = "l"
) -> BenchUnit:
    """Store ``width`` bytes a thread, random and different in every iteration, as ``load_unit`` loads them."""
    p, (kind, words) = name, KINDS[width]
    quads = [(n, w) for n in range(2) for w in range(4)]

    def step(i: int) -> str:
        ins = f"{into(letter, f'{p}_at')}, {into('r', *name_quad(p, i, words))}"
        return asm(f"{store}.{kind} [%0 + {i * row}], {vector(words, 1)};", "", ins)

    return BenchUnit(
        p,
        f"{declare} " + " ".join(f"unsigned {p}q{n}_{w} = mixed(state + {4 * n + w + 1}u);" for n, w in quads),
        step,
        " ^ ".join(name_quad(p, 0) + name_quad(p, 1)),
        advance=" ".join(f"{p}q{n}_{w} ^= {p}q{1 - n}_{w} << 1;" for n, w in quads) + f" {advance}",
        operation="store",
        byte=float(width),
    )


def stream_unit(
    name: str, steps: int, width: int = 16, threads: int = 512, read: str = READ_ONCE, lanes: int = 32
) -> BenchUnit:
    """Load ``width`` bytes a thread; groups of ``lanes`` neighbours are contiguous, groups lie 128 bytes apart."""
    row, place = threads * width, f"threadIdx.x * {width}u"
    if lanes < 32:  # a group's place in its own 128-byte line; lines of a warp follow each other
        row = threads // lanes * 128
        place = f"(threadIdx.x / {lanes}u) * 128u + (threadIdx.x % {lanes}u) * {width}u"
    chunk = steps * row
    walk, go_on = declare_walk(name, "a", chunk, place), advance_walk(name, chunk)
    return load_unit(name, walk, read, row, steps, width, go_on, chunk=chunk)


def store_unit(name: str, steps: int, width: int = 16, threads: int = 512) -> BenchUnit:
    """Store ``width`` bytes a thread along a walk."""
    row = threads * width
    walk = declare_walk(name, "b", steps * row, f"threadIdx.x * {width}u")
    return write_unit(name, walk, "st.global", row, width, advance_walk(name, steps * row))


def pace_unit(unit: BenchUnit, period_cycles: int) -> BenchUnit:
    """Let a streaming unit begin an iteration every so many cycles: DRAM at a part of its rate, warps at rest.

    One thread of a block watches the clock, asleep most of the time; the others wait at a barrier.
    Blocks begin spread over half a period, so that their traffic is, too.
    """
    p = unit.name
    declare = f" u64 {p}_next = clock64() + blockIdx.x % 16u * {period_cycles // 32}ull;"
    before = (
        f'if (threadIdx.x == 0u) {{ _Pragma("unroll 1") for (unsigned spin = 0u; '
        f"spin < {SPINS}u && (long long)({p}_next - clock64()) > 0; ++spin) "
        f'asm volatile("nanosleep.u32 200;"); {p}_next += {period_cycles}ull; }} __syncthreads();'
    )
    return replace(unit, declare=unit.declare + declare, before=before)


def cached_unit(name: str, steps: int, threads: int = 512) -> BenchUnit:
    """Load 16 bytes of a region that stays in L1: each block has its own, two halves in turn."""
    p, half = name, steps * threads * 16
    declare = f"const u64 {p}_own = blockIdx.x % (unsigned)(bytes / {2 * half}ull); u64 {p}_step = {half}ull; "
    declare += f"u64 {p}_at = (u64)(a + {p}_own * {2 * half}ull + threadIdx.x * 16u);"
    go_on = f"{p}_at += {p}_step; {p}_step = 0ull - {p}_step;"
    return load_unit(p, declare, "ld.global", threads * 16, steps, 16, go_on)


def local_unit(name: str, slots: int = 4) -> BenchUnit:
    """Store 16 bytes to a thread's own local memory, over and over to ``slots`` places, so few that L1 holds all."""
    p = name
    declare = (
        f"uint4 {p}[{slots}]; u64 {p}_base; "
        f'asm volatile("cvta.to.local.u64 %0, %1;" : "=l"({p}_base) : "l"({p})); '
        f"const unsigned {p}_at = (unsigned){p}_base;"
    )
    unit = write_unit(p, declare, "st.local", 16, 16, "", "r")
    fold = f"{p}[seed % {slots}u].x ^ {p}[seed % {slots}u].y"
    return replace(unit, step=lambda i: unit.step(i % slots), fold=fold)


def words_of_conflict(conflicts: int) -> list[int]:
    """Return the 4-byte word that each lane reads, so that ``conflicts`` + 1 words share the fullest bank.

    Lanes are dealt to banks in groups of ``conflicts`` + 1; the lanes of a group read different rows of
    their bank. A stride of ``conflicts`` + 1 words, as paper 001's figure 4 has it, does not do this: a
    stride of three words has no conflict at all.

    >>> sorted({word % 32 for word in words_of_conflict(31)}), len(set(words_of_conflict(31)))
    ([0], 32)
    """
    ways = conflicts + 1
    return [lane % ways * 32 + lane // ways for lane in range(32)]


def shared_unit(
    name: str, steps: int, width: int = 4, conflicts: int = 0, write: bool = False, cluster: int = 1
) -> BenchUnit:
    """Load or store shared memory, 4 bytes wide with chosen bank conflicts or 16 bytes wide without.

    In a cluster the warps of a block take the memory of all other blocks, by turns.
    """
    p, space = name, "shared::cluster" if cluster > 1 else "shared"
    row, place = (4096, f"{p}_word[lane] * 4u") if width == 4 else (512, "lane * 16u")
    table = ", ".join(str(word) for word in words_of_conflict(conflicts))
    declare = (
        f"const unsigned short {p}_word[32] = {{{table}}};"
        f" unsigned {p}_at = (unsigned)__cvta_generic_to_shared(pool) + {place}; unsigned {p}_step = {steps * row}u; "
        f"for (unsigned i = threadIdx.x; i < {2 * steps * row // 4}u; i += blockDim.x) "
        f"((unsigned *)pool)[i] = mixed(state + i); __syncthreads(); (void){p}_word; "
    )
    go_on = f"{p}_at += {p}_step; {p}_step = 0u - {p}_step;"
    if write:
        unit = write_unit(p, declare, f"st.{space}", row, width, go_on, "r")
    else:
        unit = load_unit(p, declare, f"ld.{space}", row, steps, width, go_on, "r")
    if cluster == 1:
        return unit
    other = f"({p}_rank + 1u + threadIdx.x / 32u % {cluster - 1}u) % {cluster}u"
    declare = f'{unit.declare} unsigned {p}_rank; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"({p}_rank)); '
    declare += f'asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"({p}_at) : "r"({other})); {CLUSTER_SYNC}'
    # no block may go while another reads its memory
    return replace(unit, declare=declare, finish=CLUSTER_SYNC, cluster=cluster)


def constant_unit(name: str, steps: int) -> BenchUnit:
    """Load one constant a warp, from a table that the constant cache holds."""
    p, values, state = name, [], 12345
    for _ in range(512):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        values.append(f"{state}u")
    declare = f"unsigned {p}_at = (seed & 3u) * 4u, {p}_step = {4 * steps}u, {p}_s = 0u; "
    declare += f'u64 {p}_base; asm volatile("cvta.to.const.u64 %0, %1;" : "=l"({p}_base) : "l"({p}_table)); '
    declare += f"{p}_at += (unsigned){p}_base; " + " ".join(f"unsigned {p}{i};" for i in range(steps))
    folds = " ".join(f"{p}_s ^= {p}{i} ^ {p}{i + 1};" for i in range(0, steps, 2))
    return BenchUnit(
        p,
        declare,
        lambda i: asm(f"ld.const.u32 %0, [%1 + {4 * i}];", out_of(f"{p}{i}"), into("r", f"{p}_at")),
        f"{p}_s",
        advance=f"{folds} {p}_at += {p}_step; {p}_step = 0u - {p}_step;",
        operation="load",
        byte=4.0,
        source=f"__constant__ unsigned {p}_table[512] = {{{', '.join(values)}}};",
    )


def texture_unit(name: str, steps: int, threads: int = 512) -> BenchUnit:
    """Fetch four words of a texture; ``b`` is the handle of a texture over the first bytes of ``a``."""
    p = name
    declare = f"const u64 {p}_t = (u64)b; int {p}_x = (int)threadIdx.x, {p}_step = {steps * threads};"
    go_on = f"{p}_x += {p}_step; {p}_step = -{p}_step;"
    unit = load_unit(p, declare, "", 0, steps, 16, go_on, operation="fetch")

    def step(i: int) -> str:
        ins = f'"l"({p}_t), "r"({p}_x + {i * threads})'
        return asm(f"tex.1d.v4.u32.s32 {vector(4)}, [%4, {{%5}}];", out_of(*name_words(p, i, 4)), ins)

    return replace(unit, step=step)


def copy_unit(
    name: str, steps: int, width: int = 16, threads: int = 512, read: str = READ_ONCE, write: str = "st.global"
) -> BenchUnit:
    """Load from one buffer and store to the same place of the other."""
    p, (kind, words), row = name, KINDS[width], threads * width
    declare = declare_walk(p, "a", steps * row, f"threadIdx.x * {width}u") + f" const long long {p}_apart = b - a;"

    def step(i: int) -> str:
        names = name_words(p, i % steps, words)
        if i < steps:
            text = f"{read}.{kind} {vector(words)}, [%{words} + {i * row}];"
            return asm(text, out_of(*names), into("l", f"{p}_at"))
        ins = f"{into('l', f'({p}_at + {p}_apart)')}, {into('r', *names)}"
        return asm(f"{write}.{kind} [%0 + {(i - steps) * row}], {vector(words, 1)};", "", ins)

    return BenchUnit(
        p,
        f"{declare} {declare_words(p, steps, words)}",
        step,
        "0u",
        advance=advance_walk(p, steps * row),
        operation="load or store",
        byte=float(width),
        chunk=steps * row,
    )


def block_copy_unit(name: str, steps: int, threads: int) -> BenchUnit:
    """Copy the chunk that has the block's number: little code before the loads are on their way.

    Plain loads: the address never changes, so a load that promises constant data would be taken out of the loop.
    """
    p, plain = name, copy_unit(name, steps, threads=threads, read="ld.global")
    declare = f"unsigned char *const {p}_at = a + (u64)blockIdx.x * {plain.chunk}ull + threadIdx.x * 16u;"
    declare += f" const long long {p}_apart = b - a; {declare_words(p, steps, 4)}"
    return replace(plain, declare=declare, advance="")


def claimed_copy_unit(name: str, steps: int, threads: int = 512) -> BenchUnit:
    """Copy the next chunk that no block has taken: all blocks stay close together in the buffer.

    The chunk after this one is claimed while this one is on its way. The counter is the sink's last word, which
    no launch reaches; it starts anywhere and is never reset.
    """
    p, plain = name, copy_unit(name, steps, threads=threads)
    claim = f"atomicAdd(sink + {SINK_WORDS - 1}u, 1u) % {p}_chunks"
    declare = (
        f"{plain.declare} unsigned *const {p}_next = (unsigned *)pool; unsigned {p}_mine = 0u; "
        f"if (threadIdx.x == 0u) {p}_next[0] = {claim}; __syncthreads();"
    )
    before = (
        f"{p}_at = {p}_base + (u64){p}_next[0] * {plain.chunk}ull; "
        f"if (threadIdx.x == 0u && iteration + 1 < iterations) {p}_mine = {claim};"
    )
    advance = f"__syncthreads(); if (threadIdx.x == 0u) {p}_next[0] = {p}_mine; __syncthreads();"
    return replace(plain, declare=declare, before=before, advance=advance)


def async_copy_unit(name: str, steps: int, threads: int = 512) -> BenchUnit:
    """Copy 16 bytes asynchronously from global to shared memory (cp.async), into two halves in turn.

    The halves matter: with one place for all, copies to a place that an earlier copy had yet to fill were not all
    made; 11 of 16 sectors of a request were fetched (H200, ncu), and DRAM seemed to deliver 6.5 TB/s.
    """
    p, row = name, threads * 16
    chunk = steps * row
    declare = declare_walk(p, "a", chunk)
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
    return BenchUnit(
        p,
        declare,
        step,
        f"{p}_s",
        advance=f"{wait} {p}_to += {p}_half; {p}_half = 0u - {p}_half; {advance_walk(p, chunk)}",
        finish=f"{asm('cp.async.wait_all;')} {taken}",
        operation="copy",
        byte=16.0,
        chunk=chunk,
    )
