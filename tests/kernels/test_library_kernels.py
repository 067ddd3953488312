"""Kernels that libraries launch for one operator, beside the names of those kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wattcast.core.units import Dtype
from wattcast.hardware import load_gpu
from wattcast.kernels import Kernels, RunCondition, build_kernels, reference_chip
from wattcast.workload.adapter_operators import AdapterProduct
from wattcast.workload.engine_operators import FusedExperts, WeightOnlyProduct
from wattcast.workload.engine_row_operators import AlignTokens
from wattcast.workload.operator_base import Operator
from wattcast.workload.scan_operators import StateScan

# vLLM's names of the kernels of one operator
CHUNK_SCAN = ("chunk_cumsum", "chunk_state", "state_passing", "bmm_chunk", "chunk_scan")
DELTA_SCAN = ("cumsum", "scaled_dot_kkt", "solve_tril", "recompute_w_u", "delta_h", "fwd_o")
ADAPTERS = ("zeros", "lora_shrink", "lora_expand")


def lowered(op: Operator) -> Kernels:
    gpu = load_gpu("h200")
    return build_kernels((op,), (RunCondition("", "", ""),), gpu, reference_chip(gpu), ())


def count_launches(op: Operator) -> float:
    return float(lowered(op).work.launches[0])


@pytest.mark.parametrize(("rule", "names"), [("mamba2", CHUNK_SCAN), ("delta", DELTA_SCAN)])
def test_a_scan_by_chunks_launches_a_kernel_for_each_of_its_stages(
    rule: str, names: tuple[str, ...]
) -> None:
    scan = StateScan(1, 4096, 64, 8, 64, 64, 256, rule=rule, dtype=Dtype.BF16)
    assert count_launches(scan) == len(names)


def test_adapters_clear_their_sums_shrink_and_expand() -> None:
    assert count_launches(AdapterProduct(16, 4096, 4096, 16)) == len(ADAPTERS)


def test_one_block_sorts_the_choices_of_sixty_experts_and_not_of_seventy_two() -> None:
    """``moe_align_block_size`` of vLLM has a kernel for Qwen1.5's 60 experts, and not for 72."""
    few, many = (AlignTokens(16, 4, experts=experts, top_k=4) for experts in (60, 72))
    assert count_launches(few) == 1.0
    assert count_launches(many) == 2.0


def test_machete_launches_a_second_kernel_where_a_tile_has_more_than_half_a_thousand_inputs() -> (
    None
):
    """A tile of 640 inputs has ten steps of 64, of which two blocks take a part each; 448 have
    seven, which one block takes.
    """
    deep, flat = (WeightOnlyProduct(16, 4096, k) for k in (640, 448))
    assert count_launches(deep) > count_launches(flat)


def test_marlins_tiles_are_those_of_half_as_many_outputs_as_of_openais() -> None:
    op = FusedExperts(64, 32, 4, 2880, 2880, weights="fp4", scales="mx")
    units = [float(lowered(replace(op, kernel=name)).work.units[0]) for name in ("marlin", "oai")]
    assert 1.8 < units[0] / units[1] < 2.4
