"""The model of register banks: against what the H200 measured, and what it says of the kernels of
today.
"""

from __future__ import annotations

import pytest
from disassembly import (
    BankUse,
    SassInstruction,
    find_bank_use,
    find_main_loop,
    find_operand_loads,
    list_sources,
    read_declared,
)
from stand_in_machine import disassembled

from wattcast import hardware
from wattcast.core.row_journals import read_lines
from wattcast.lab.counter_models.microbench_lines import OTHER_CARD
from wattcast.lab.microbench.arithmetic_units import register_unit
from wattcast.lab.microbench.benchmark_suite import find_benchmarks
from wattcast.lab.microbench.microbench_results import (
    RESULTS_FILE,
    keep_first_rounds,
    read_shipped_results,
    results_folder,
)
from wattcast.lab.microbench.unit_source import Benchmark

# loops of one pipe, which is what the model is about
MEASURED = ("fp32_add", "fp64_mul", "fp32_fma", "fp64_fma")
MORE = (
    "int32_add",
    "fp16x2_fma",
    "fp32_mul",
    "fp64_add",
    "int32_mad",
    "int32_shift",
    "int32_bit",
    "int32_minmax",
    "bf16x2_fma",
    "dp4a",
)
MORE += ("int32_popc", "fp32_rcp", "fp32_exp2_log2", "int32_compare", "misc_select", "misc_prmt")


def modelled(benchmark: Benchmark) -> tuple[BankUse, float]:
    """The loop's banks, and operations per cycle and SM by the model."""
    body = find_main_loop(
        disassembled(benchmark.source, "sm_90a"), read_declared()[benchmark.name].parts[0][0][0]
    )
    found = find_bank_use(body)
    return found, found.per_cycle_sm(benchmark.operations)


def measured(name: str) -> float:
    return keep_first_rounds(r for r in read_shipped_results(hardware.load_gpu("h200")))[
        name
    ].operations_per_cycle_sm


def lines(*texts: str) -> list[SassInstruction]:
    return [SassInstruction(*text.split(" ", 1)) for text in texts]


def test_sources_keep_their_places() -> None:
    (fma, compare, double) = lines(
        "FFMA R10, R14.reuse, -R10, |R15|",
        "ISETP.GE.U32.AND P0, PT, R29, R25, PT",
        "DFMA R2, R4, c[0x0][0x8], -UR4",
    )
    assert list_sources(fma) == [(14, True), (10, False), (15, False)]
    assert list_sources(compare) == [(29, False), (25, False)]
    assert list_sources(double) == [(4, False), (None, False), (None, False)]


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("FFMA R1, R2, R3, 1.5", 1),
        ("FFMA R1, R2, R4, 1.5", 2),
        ("FFMA R1, R2, R4, R6", 3),
        ("FFMA R1, R2, R2, R3", 1),  # the same register twice is read once
        ("DFMA R2, R4, R6, R8", 3),  # each operand has an even and an odd half
        ("DADD R2, R4, R6", 2),
    ],
)
def test_two_operands_of_one_parity_take_two_cycles(text: str, reads: int) -> None:
    (load,) = find_operand_loads(lines(text))
    assert load.reads == reads
    assert load.waits == max(reads - (2 if text[0] == "D" else 1), 0)


def test_what_is_held_is_not_read_again() -> None:
    body = lines(
        "FFMA R2, R4.reuse, R2, 1", "FFMA R6, R4, R6, 1", "FFMA R8, R4, R8, 1", "FFMA R8, R8, R4, 1"
    )
    assert [load.reads for load in find_operand_loads(body)] == [
        2,
        1,
        2,
        2,
    ]  # the second let go; the last has it elsewhere


@pytest.mark.parametrize(
    ("name", "kind", "steps"), [("fp32_fma", "f32", 512), ("fp64_fma", "f64", 256)]
)
def test_the_model_explains_the_first_rounds_multiply_adds(
    name: str, kind: str, steps: int
) -> None:
    """Card B measured the first kernels: 113.6 of 128 and 59.0 of 64 a cycle and SM."""
    rows = {
        row["id"]: row
        for row in read_lines(results_folder(hardware.load_gpu("h200")) / OTHER_CARD / RESULTS_FILE)
    }
    unit = register_unit(name, kind, f"fma.rn.{kind} %0, %0, %1, %2;", "a|c b|d")
    benchmark = Benchmark(name, "arithmetic", ((unit, steps),))
    found, per_cycle = modelled(benchmark)
    assert found.conflicts > steps / 9
    assert per_cycle == pytest.approx(rows[name]["operations_per_cycle_sm"], rel=0.005)


@pytest.mark.parametrize(
    "name", [*MEASURED, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_the_model_is_within_one_percent_of_what_was_measured(name: str) -> None:
    (benchmark,) = find_benchmarks([name])
    _, per_cycle = modelled(benchmark)
    assert per_cycle == pytest.approx(measured(name), rel=0.01)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("fp32_fma", 128.0),
        ("fp64_fma", 64.0),
        ("occupancy_64", 128.0),
        pytest.param("ilp_2", 128.0, marks=pytest.mark.slow),
    ],
)
def test_multiply_adds_of_today_wait_for_no_bank(name: str, limit: float) -> None:
    """At most one in a hundred waits, and the loop itself costs the rest: within 2 % of the
    specification.
    """
    (benchmark,) = find_benchmarks([name])
    found, per_cycle = modelled(benchmark)
    assert found.conflicts <= 0.01 * found.instructions
    assert per_cycle > 0.98 * limit
