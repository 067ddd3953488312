"""Every benchmark: its source, its machine code, what it declares. No GPU is needed."""

from __future__ import annotations

import re
from collections import Counter

import disassembly
import pytest
from stand_in_machine import compiled, disassembled

from wattcast.core.errors import UnknownName
from wattcast.lab.microbench.arithmetic_units import RING_FACTOR, RING_STEP
from wattcast.lab.microbench.benchmark_suite import find_benchmarks, list_benchmarks
from wattcast.lab.microbench.memory_units import words_of_conflict
from wattcast.lab.microbench.unit_source import Benchmark, BenchUnit, interleave_steps
from wattcast.measure.cuda_device import CudaError, compile_cubin

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")
FEW = {  # arithmetic, tensor cores, memory, banks, mixes and clusters; every one, on every architecture, with -m slow
    "div_ieee_denormal": "sm_80",
    "wgmma_bf16": "sm_90a",
    "dram_copy": "sm_100",
    "conflicts_5": "sm_90a",
    "mix_everything": "sm_90a",
    "multicast_2": "sm_90a",
    "intensity_8": "sm_80",
    "latency_walk_32": "sm_100",
}
PAIRS = [(b, a) for b in list_benchmarks() for a in ARCHITECTURES if b.supported(a)]


def check(benchmark: Benchmark, architecture: str) -> None:
    found = disassembly.check_agreement(benchmark, disassembled(benchmark.source, architecture))
    assert found.holds, (found.share, found.missing, found.found)


@pytest.mark.parametrize("name", FEW)
def test_the_loop_is_what_the_benchmark_declares(name: str) -> None:
    (benchmark,) = find_benchmarks([name])
    check(benchmark, FEW[name])


@pytest.mark.slow
@pytest.mark.parametrize(("benchmark", "architecture"), PAIRS, ids=lambda v: getattr(v, "name", v))
def test_every_loop_on_every_architecture(benchmark: Benchmark, architecture: str) -> None:
    check(benchmark, architecture)


OLDER = ("fp32_fma", "conflicts_5", "dram_copy", "divergence_3", "int32_popc")
REFUSED = ("mma_bf16", "async_copy_l2", "latency_misc_redux")


@pytest.mark.parametrize("name", [*OLDER, *REFUSED])
def test_turing_runs_what_its_compiler_takes(name: str) -> None:
    """A gate at sm_80 once kept Volta and Turing out, whatever a benchmark needed."""
    (benchmark,) = find_benchmarks([name])
    is_supported = name in OLDER
    assert benchmark.supported("sm_75") is is_supported
    if is_supported:
        assert benchmark.supported("sm_70")
        assert len(compile_cubin(benchmark.source, "sm_75")) > 1000
    else:
        with pytest.raises(CudaError, match="sm_80"):
            compile_cubin(benchmark.source, "sm_75")


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", list_benchmarks(), ids=lambda b: b.name)
def test_what_turing_supports_compiles(benchmark: Benchmark) -> None:
    if benchmark.supported("sm_75"):
        assert len(compile_cubin(benchmark.source, "sm_75")) > 1000


def test_a_loop_that_the_assembler_shortens_is_noticed() -> None:
    """Adding one number again and again is folded into shifted additions: half the instructions are
    gone.
    """
    unit = BenchUnit(
        "folded",
        "unsigned x = state, k = mixed(state);",
        lambda i: 'asm volatile("add.u32 %0, %0, %1;" : "+r"(x) : "r"(k));',
        "x",
    )
    benchmark = Benchmark("folded", "arithmetic", ((unit, 64),))
    declared = disassembly.DeclaredLoop((((r"IADD3|VIADD", 1.0),),))
    found = disassembly.check_agreement(
        benchmark, disassembled(benchmark.source, "sm_90a"), declared
    )
    assert not found.holds


def test_names_are_unique_and_everything_asked_for_is_there() -> None:
    names = [b.name for b in list_benchmarks()]
    assert set(disassembly.read_declared()) == set(names)
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)
    wanted = {
        *(
            "int32_add int32_mad int32_popc int32_shift int32_bit int32_compare int64_add fp32_add fp32_fma"
        ).split(),
        *(
            "fp32_exp2_log2 fp64_fma div_ieee_normal div_ieee_denormal div_fast_normal div_fast_denormal"
        ).split(),
        *(
            "convert_int32 misc_move control_branch fp16x2_fma bf16x2_fma dp4a mma_bf16 wgmma_bf16 wgmma_fp8"
        ).split(),
        *(
            "dram_read dram_write dram_copy l2_read l2_write l1_read l1_write shared_read constant_read"
        ).split(),
        *(
            "texture_read async_copy_dram bulk_copy_dram atomic_shared atomic_own tile_copy_dram"
        ).split(),
        *(
            "dpx_add_max mma_sparse_bf16 wgmma_sparse_fp8 latency_fp32_fma latency_cluster_shared"
        ).split(),
    }
    assert wanted <= set(names)
    curves = Counter(b.curve for b in list_benchmarks() if b.curve)
    assert set(curves) == {
        *(
            "conflicts coalescence access icache divergence occupancy ilp active dram_active tensor_active"
        ).split(),
        *(
            "dram_rate dram_rate_copy atomic_lines multicast cluster_read ring pages wgmma bulk"
        ).split(),
        *("intensity dense walk walk_dram lines ways_16k ways_64k ways_256k").split(),
    }
    assert curves["conflicts"] >= 8
    assert sum(b.group == "mix" for b in list_benchmarks()) >= 22  # as many as GPUWattch's suite
    assert {b.at for b in list_benchmarks() if b.curve == "conflicts"} >= {0, 1, 31}
    assert {b.at for b in list_benchmarks() if b.curve == "divergence"} >= {1, 32}


@pytest.mark.parametrize(
    "nodes", [b.ring[0] for b in list_benchmarks() if 0 < b.ring[0] <= 1 << 16]
)
def test_a_ring_visits_every_node_once(nodes: int) -> None:
    seen, at = set(), 0
    while at not in seen:
        seen.add(at)
        at = (at * RING_FACTOR + RING_STEP) % nodes
    assert (len(seen), at) == (nodes, 0)


def test_the_most_important_come_first() -> None:
    first = [b.name for b in list_benchmarks()][:8]
    assert {"fp32_fma", "fp64_fma", "int32_add", "wgmma_bf16", "dram_copy"} <= set(first)
    places = {b.name: place for place, b in enumerate(list_benchmarks())}
    curves = ("conflicts", "coalescence", "divergence")
    held = [
        b.name for b in list_benchmarks() if b.curve in curves or b.name.startswith("dram_copy")
    ]
    assert (
        max(places[name] for name in held) < places["mma_bf16"]
    )  # what must hold comes before what is only read


@pytest.mark.parametrize("conflicts", range(32))
def test_the_fullest_bank_has_exactly_as_many_words_as_wanted(conflicts: int) -> None:
    words = words_of_conflict(conflicts)
    assert len(set(words)) == 32  # no two lanes share a word, or it would be a broadcast
    assert max(Counter(word % 32 for word in words).values()) == conflicts + 1
    assert max(words) < 1024  # within the 4 KiB of one access


def test_parts_of_a_mix_are_spread_evenly() -> None:
    a = BenchUnit("a", "", lambda i: f"a{i}", "0u")
    b = BenchUnit("b", "", lambda i: f"b{i}", "0u")
    assert interleave_steps(((a, 4), (b, 2))) == ["a0", "b0", "a1", "a2", "b1", "a3"]
    assert interleave_steps(((a, 2), (b, 2)), interleave=False) == ["a0", "a1", "b0", "b1"]


def test_operations_of_a_launch() -> None:
    (fma,) = find_benchmarks(["fp32_fma"])
    assert fma.count(blocks=3, iterations=5) == 512 * 512 * 3 * 5
    (wgmma,) = find_benchmarks(
        ["wgmma_bf16"]
    )  # two warpgroups, sixteen products of m64n256k16 each
    assert wgmma.count(1, 1) == 2 * 16 * 2 * 64 * 256 * 16
    (bulk,) = find_benchmarks(["bulk_copy_l2"])
    assert bulk.count(1, 1) * bulk.unit.byte == 4 * 8192
    (through,) = find_benchmarks(["dram_copy_bulk"])  # six stages, each read and written
    assert through.count(1, 1) * through.unit.byte == 2 * 6 * 8192


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="fp32_fma"):
        find_benchmarks(["fp32_fna"])


def test_an_architecture_without_the_instruction_is_left_out() -> None:
    (wgmma,) = find_benchmarks(["wgmma_bf16"])
    assert [wgmma.supported(a) for a in ("sm_80", "sm_90a", "sm_90", "sm_100")] == [
        False,
        True,
        False,
        False,
    ]


def test_an_architecture_nobody_knows_is_a_sentence() -> None:
    compiled("", "sm_90")
    with pytest.raises(CudaError, match="architecture"):
        compile_cubin("", "sm_12")


def test_a_sweep_does_as_many_flops_a_byte_as_its_place_says() -> None:
    points = [b for b in list_benchmarks() if b.curve == "intensity"]
    assert [b.at for b in points] == [0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256]
    for benchmark in points:
        (dram, loads), (fma, products) = benchmark.parts
        assert dram.byte == 16.0
        assert fma.flop * products / (dram.byte * loads) == benchmark.at


@pytest.mark.parametrize(
    "benchmark", [b for b in list_benchmarks() if b.links != "lines"], ids=lambda b: b.name
)
def test_plain_rings_lie_at_multiples_of_their_stride(benchmark: Benchmark) -> None:
    nodes, stride = benchmark.ring
    assert "& 0ull" in benchmark.source  # no place of its own within the stride
    if benchmark.links == "walk":
        assert benchmark.at == stride
        assert nodes * stride in (4 << 20, 4 << 30)
    elif benchmark.curve == "lines":
        assert (nodes, stride, benchmark.at) == (1, 128, benchmark.line)
    else:
        assert benchmark.at == nodes * stride
