"""The kernel choice: labels from names, a fitted logit, the oracle and the fallback."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast.calibrate.kernel_rows import KernelRows, load_kernel_rows
from wattcast.core.errors import WattcastError
from wattcast.core.units import Dtype
from wattcast.hardware import load_gpu
from wattcast.kernels import ReferenceChip, RunCondition, build_kernels, reference_chip
from wattcast.kernels.families.product_tiles import TILES
from wattcast.kernels.kernel_choice import (
    candidate_terms,
    choice_from_arrays,
    choice_to_arrays,
    impossible_candidates,
    pick_kernels,
)
from wattcast.kernels.kernel_labels import NOT_RUN, KernelLabel, find_label
from wattcast.kernels.lowering import kernel_choice_inputs
from wattcast.lab.fit.choice_fit import (
    choose_labels,
    count_k_parts,
    find_labels_run,
    fit_kernel_choice,
)
from wattcast.predictor.bundle import bundle_for
from wattcast.workload.operator_types import Linear

GPU = load_gpu("h200")
NVJET = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"


@pytest.fixture(scope="module")
def rows() -> KernelRows:
    """Products in bf16 and fp16 whose sizes are whole powers of two and the like: a part that is
    quick to fit.
    """
    database = load_kernel_rows("h200")
    kept = database.is_kind("burst") & np.array(
        [
            isinstance(op, Linear) and op.dtype.byte == 2 and op.k % 8 == 0 and op.n % 8 == 0
            for op in database.ops
        ]
    )
    return database.select_rows(kept)


@pytest.fixture(scope="module")
def reference(rows: KernelRows) -> ReferenceChip:
    half = np.arange(len(rows)) % 2 == 0
    plain = reference_chip(GPU)
    return replace(plain, choice=fit_kernel_choice(rows.select_rows(half), plain))


@pytest.mark.parametrize(
    ("names", "label"),
    [
        ([NVJET], KernelLabel("hopper", 256, 128, False)),
        (
            ["nvjet_sm90_tst_96x64_64x10_1x2_h_bz_splitK_TNN", "splitKreduce_kernel<32>"],
            KernelLabel("hopper", 96, 64, True),
        ),
        (
            [
                "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x32x8_stage3_warpsize2x2x1_ffma_execute_kernel__5x_cublas"
            ],
            KernelLabel("simt", 32, 128, False),
        ),
        (
            ["cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_nn_align1>(Params)"],
            KernelLabel("turing", 256, 128, False),
        ),
        (
            ["void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true>"],
            KernelLabel("vector", 64, 8, False),
        ),
        (
            ["void precomputed_convolve_sgemm<__nv_bfloat16, 128, 6, 7, 3, 3, 5, 1, false>(int)"],
            KernelLabel("plain", 128, 64, False),
        ),
        (
            [
                "sm80_xmma_fprop_implicit_gemm_indexed_wo_smem_f16f16_f16f32_f32_nhwckrsc_nhwc_"
                "tilesize128x32x16_stage1_warpsize4x1x1_g1_tensor16x8x16_aligna2_alignc8_execute_kernel__5x_cudnn"
            ],
            KernelLabel("direct", 32, 128, False),
        ),
    ],
)
def test_names_say_which_kernel_ran(names: list[str], label: KernelLabel) -> None:
    assert find_label(names) == label


def test_no_product_has_no_label() -> None:
    assert find_label(["void at::native::vectorized_elementwise_kernel<4, x>(int)"]) is None


def test_the_choice_finds_kernels_of_shapes_it_has_not_seen(
    rows: KernelRows, reference: ReferenceChip
) -> None:
    """Half of the rows fit it, the other half test it; the fastest tile of the scaffold agrees in
    about 30 %.
    """
    half = np.arange(len(rows)) % 2 == 1
    ran, took = (
        find_labels_run(rows.select_rows(half)),
        choose_labels(rows.select_rows(half), reference),
    )
    exact = np.mean([a == b for a, b in zip(ran, took, strict=True) if a is not None])
    assert exact > 0.4


def test_parts_of_k_are_those_of_the_products_own_grid() -> None:
    """Blocks of layout kernels were once taken for the product's: convolutions that never split K
    were said to, and products split without a kernel that adds up were said not to."""
    database = load_kernel_rows("h200")
    named = np.array([bool(names) for names in database.names]) & database.is_kind("burst")
    of = database.select_rows(named & np.isin(database.family, ("gemm", "conv2d")))
    parts, labels = np.array(count_k_parts(of)), find_labels_run(of)
    turned = np.array([any("nchwToNhwc" in name for name in names) for names in of.names])
    known = turned & np.array(
        [label is not None and label.kind in ("ampere", "simt") for label in labels]
    )
    assert known.sum() > 30
    assert (parts[known] == 1).mean() > 0.7
    apart = [
        i
        for i, (label, names) in enumerate(zip(labels, of.names, strict=True))
        if label is not None
        and label.split
        and parts[i] > 1
        and not any("reduce" in n.lower() for n in names)
    ]
    assert len(apart) > 10


def test_a_known_number_of_parts_is_taken(reference: ReferenceChip) -> None:
    name = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize2x2x1_ffma_execute_kernel__5x_cublas"
    op = (Linear(128, 768, 768, dtype=Dtype.FP32),)
    split = build_kernels(op, (RunCondition(kernels=(name,), parts=7),), GPU, reference, ()).work
    whole = build_kernels(op, (RunCondition(kernels=(name,)),), GPU, reference, ()).work
    assert split.units[0] == 7 * whole.units[0]
    assert split.between_byte[0] > whole.between_byte[0] == 0.0


def test_the_oracle_takes_the_kernel_that_ran(reference: ReferenceChip) -> None:
    op = (Linear(4096, 4096, 4096),)
    kernels = build_kernels(op, (RunCondition(kernels=(NVJET,)),), GPU, reference, ())
    assert kernels.work.features["tile_n"][0] == pytest.approx(256)
    assert kernels.work.features["tile_m"][0] == pytest.approx(128)
    assert kernels.work.units[0] == pytest.approx(16 * 32)


def test_a_batch_of_products_is_chosen_as_its_members(reference: ReferenceChip) -> None:
    ops = (Linear(100, 1000, 768), Linear(4096, 11008, 4096), Linear(1, 4096, 4096))
    together = build_kernels(ops, (RunCondition(),) * 3, GPU, reference, ()).work
    for i, op in enumerate(ops):
        alone = build_kernels((op,), (RunCondition(),), GPU, reference, ()).work
        assert alone.kernel_family[0] == together.kernel_family[i]
        assert_allclose(alone.units[0], together.units[i], rtol=1e-12)


def test_products_of_a_long_list_are_chosen_as_those_of_a_short_one() -> None:
    """Every 64 products copied the columns of all: a million took 2 TB of copies, and some formats
    8 GB at once.
    """
    learned = bundle_for(GPU).learned
    assert learned is not None
    choice = learned.reference.choice
    for dtype, count in ((Dtype.FP32, 3000), (Dtype.BF16, 1000)):
        ops = [Linear(1 + i % 4096, 8 * (1 + i // 4096), 640, dtype=dtype) for i in range(count)]
        names, sizes, shape = kernel_choice_inputs(ops, (RunCondition(),) * len(ops))
        asked = [NOT_RUN] * len(ops)
        found = pick_kernels(choice, names, asked, sizes, shape, list, 132.0)
        rows = np.arange(0, len(ops), 97)
        few = {name: values[rows] for name, values in shape.items()}
        names, asked = [names[i] for i in rows], [NOT_RUN] * len(rows)
        some = pick_kernels(choice, names, asked, tuple(x[rows] for x in sizes), few, list, 132.0)
        assert [found.label(int(i)) for i in rows] == [some.label(i) for i in range(len(rows))]
        assert_allclose(found.share[rows], some.share, rtol=1e-9, atol=1e-12)


def test_without_a_choice_the_fastest_tile_is_taken() -> None:
    kernels = build_kernels(
        (Linear(8192, 8192, 8192),), (RunCondition(),), GPU, reference_chip(GPU), ()
    )
    assert kernels.work.kernel_family == ("gemm.tensor",)
    assert kernels.work.features["tile_n"][0] * kernels.work.features["tile_m"][0] >= 128 * 128


def test_it_survives_being_saved(reference: ReferenceChip) -> None:
    assert reference.choice is not None
    back = choice_from_arrays(choice_to_arrays(reference.choice, "choice"), "choice")
    ops = (Linear(300, 5000, 768),)
    first = build_kernels(ops, (RunCondition(),), GPU, reference, ()).work
    second = build_kernels(ops, (RunCondition(),), GPU, replace(reference, choice=back), ()).work
    assert first.units[0] == second.units[0]


def test_weights_that_do_not_fit_are_refused(reference: ReferenceChip) -> None:
    assert reference.choice is not None
    chooser = next(iter(reference.choice.values()))
    with pytest.raises(WattcastError):
        replace(chooser, own=chooser.own[:, :-1])


def test_a_kind_that_is_not_known_is_named(reference: ReferenceChip) -> None:
    assert reference.choice is not None
    chooser = next(iter(reference.choice.values()))
    with pytest.raises(WattcastError, match="indexed"):
        replace(chooser, kind=np.full(len(chooser.kind), "indexed"))


def test_scores_are_weights_times_what_candidates_would_do() -> None:
    """Scores are added up in another order than while fitting, and leave out what all candidates of
    a row share.
    """
    reference = bundle_for(GPU).reference
    rng = np.random.default_rng(5)
    sizes = tuple(2.0 ** rng.integers(0, 13, 9) for _ in range(4))
    for chooser in reference.choice.values():
        shape = rng.normal(size=(9, len(chooser.names)))
        own = chooser.own[:, 0] + ((shape - chooser.mean) / chooser.spread) @ chooser.own[:, 1:].T
        terms = candidate_terms(sizes, chooser.candidates, reference.sm_count)
        plain = np.moveaxis(terms, 0, -1) @ chooser.weight + own
        score = chooser.score(sizes, shape, reference.sm_count)
        assert_allclose(score - score[:, :1], plain - plain[:, :1], rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def products() -> KernelRows:
    """The products of the H200's database whose kernels are known."""
    database = load_kernel_rows("h200")
    is_named = np.array([bool(names) for names in database.names])
    is_product = np.isin(database.family, ("gemm",))
    return database.select_rows(is_named & is_product & database.is_kind("burst"))


def test_products_that_ran_without_a_tile_are_hardly_ever_ruled_out(products: KernelRows) -> None:
    """Of 116, a library that tries its kernels ran 6 on more or larger rows than others do."""
    ran_vector = np.array(
        [label is not None and label.kind == "vector" for label in find_labels_run(products)]
    )
    _, sizes, shape = kernel_choice_inputs(products.ops, products.conditions)
    columns = np.stack(list(shape.values()), axis=1)
    is_impossible = impossible_candidates(np.array(["vector"]), sizes[1], columns, list(shape))
    assert ran_vector.sum() > 100
    assert (is_impossible[:, 0] & ran_vector).sum() <= 6
    # and two thirds of all others are
    assert (is_impossible[:, 0] & ~ran_vector).sum() > 0.84 * (~ran_vector).sum()


def test_the_shipped_choice_names_the_kernel_of_three_products_in_four(
    products: KernelRows,
) -> None:
    """The time of another pass over a split K decides between tiles."""
    ran = find_labels_run(products)
    took = choose_labels(products, bundle_for(GPU).reference)
    is_right = [label == other for label, other in zip(ran, took, strict=True) if label is not None]
    assert np.mean(is_right) > 0.7385


def test_a_split_of_k_in_tf32_costs_the_start_of_another_kernel() -> None:
    """The fitted start of Ampere's products on an H200 is some 7,500 cycles."""
    bundle = bundle_for(GPU)
    start_cycles = bundle.corrections["gemm.ampere"].fixed_s * float(np.mean(GPU.clocks.max_hz))
    assert pytest.approx(start_cycles, rel=0.15) == TILES.tf32_reduce_cycles
