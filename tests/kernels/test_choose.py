"""The kernel choice: labels from names, a fitted logit, the oracle and the fallback."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast.dtypes import Dtype
from wattcast.errors import WattcastError
from wattcast.fit.kernels_choice import chosen_for, fit_choice, labels_of, parts_of
from wattcast.fit.kernels_data import Rows, load
from wattcast.fitted import bundle_for
from wattcast.hardware import load as load_gpu
from wattcast.kernels import Condition, Reference, kernels_of, reference_of
from wattcast.kernels.candidates import candidate_terms
from wattcast.kernels.choose import Label, from_arrays, label_of, to_arrays
from wattcast.workload.graph import Linear

GPU = load_gpu("h200")
NVJET = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Products in bf16 and fp16 whose sizes are whole powers of two and the like: a part that is quick to fit."""
    database = load("h200")
    kept = database.is_kind("burst") & np.array(
        [isinstance(op, Linear) and op.dtype.byte == 2 and op.k % 8 == 0 and op.n % 8 == 0 for op in database.ops]
    )
    return database.where(kept)


@pytest.fixture(scope="module")
def reference(rows: Rows) -> Reference:
    half = np.arange(len(rows)) % 2 == 0
    plain = reference_of(GPU)
    return replace(plain, choice=fit_choice(rows.where(half), plain))


@pytest.mark.parametrize(
    ("names", "label"),
    [
        ([NVJET], Label("hopper", 256, 128, False)),
        (
            ["nvjet_sm90_tst_96x64_64x10_1x2_h_bz_splitK_TNN", "splitKreduce_kernel<32>"],
            Label("hopper", 96, 64, True),
        ),
        (
            [
                "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x32x8_stage3_warpsize2x2x1_ffma_execute_kernel__5x_cublas"
            ],
            Label("simt", 32, 128, False),
        ),
        (
            ["cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_nn_align1>(Params)"],
            Label("turing", 256, 128, False),
        ),
        (["void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true>"], Label("vector", 64, 8, False)),
        (
            ["void precomputed_convolve_sgemm<__nv_bfloat16, 128, 6, 7, 3, 3, 5, 1, false>(int)"],
            Label("plain", 128, 64, False),
        ),
        (
            [
                "sm80_xmma_fprop_implicit_gemm_indexed_wo_smem_f16f16_f16f32_f32_nhwckrsc_nhwc_"
                "tilesize128x32x16_stage1_warpsize4x1x1_g1_tensor16x8x16_aligna2_alignc8_execute_kernel__5x_cudnn"
            ],
            Label("direct", 32, 128, False),
        ),
    ],
)
def test_names_say_which_kernel_ran(names: list[str], label: Label) -> None:
    assert label_of(names) == label


def test_no_product_has_no_label() -> None:
    assert label_of(["void at::native::vectorized_elementwise_kernel<4, x>(int)"]) is None


def test_the_choice_finds_kernels_of_shapes_it_has_not_seen(rows: Rows, reference: Reference) -> None:
    """Half of the rows fit it, the other half test it; the fastest tile of the scaffold agrees in about 30 %."""
    half = np.arange(len(rows)) % 2 == 1
    ran, took = labels_of(rows.where(half)), chosen_for(rows.where(half), reference)
    exact = np.mean([a == b for a, b in zip(ran, took, strict=True) if a is not None])
    assert exact > 0.4


def test_parts_of_k_are_those_of_the_products_own_grid() -> None:
    """Blocks of layout kernels were once taken for the product's: convolutions that never split K were said to, and
    products split without a kernel that adds up were said not to."""
    database = load("h200")
    named = np.array([bool(names) for names in database.names]) & database.is_kind("burst")
    of = database.where(named & np.isin(database.family, ("gemm", "conv2d")))
    parts, labels = np.array(parts_of(of)), labels_of(of)
    turned = np.array([any("nchwToNhwc" in name for name in names) for names in of.names])
    known = turned & np.array([label is not None and label.kind in ("ampere", "simt") for label in labels])
    assert known.sum() > 30
    assert (parts[known] == 1).mean() > 0.7
    apart = [
        i
        for i, (label, names) in enumerate(zip(labels, of.names, strict=True))
        if label is not None and label.split and parts[i] > 1 and not any("reduce" in n.lower() for n in names)
    ]
    assert len(apart) > 10


def test_a_known_number_of_parts_is_taken(reference: Reference) -> None:
    name = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize2x2x1_ffma_execute_kernel__5x_cublas"
    op = (Linear(128, 768, 768, dtype=Dtype.FP32),)
    split = kernels_of(op, (Condition(kernels=(name,), parts=7),), GPU, reference, ()).work
    whole = kernels_of(op, (Condition(kernels=(name,)),), GPU, reference, ()).work
    assert split.units[0] == 7 * whole.units[0]
    assert split.between_byte[0] > whole.between_byte[0] == 0.0


def test_the_oracle_takes_the_kernel_that_ran(reference: Reference) -> None:
    op = (Linear(4096, 4096, 4096),)
    kernels = kernels_of(op, (Condition(kernels=(NVJET,)),), GPU, reference, ())
    assert kernels.work.features["tile_n"][0] == pytest.approx(256)
    assert kernels.work.features["tile_m"][0] == pytest.approx(128)
    assert kernels.work.units[0] == pytest.approx(16 * 32)


def test_a_batch_of_products_is_chosen_as_its_members(reference: Reference) -> None:
    ops = (Linear(100, 1000, 768), Linear(4096, 11008, 4096), Linear(1, 4096, 4096))
    together = kernels_of(ops, (Condition(),) * 3, GPU, reference, ()).work
    for i, op in enumerate(ops):
        alone = kernels_of((op,), (Condition(),), GPU, reference, ()).work
        assert alone.group[0] == together.group[i]
        assert_allclose(alone.units[0], together.units[i], rtol=1e-12)


def test_without_a_choice_the_fastest_tile_is_taken() -> None:
    kernels = kernels_of((Linear(8192, 8192, 8192),), (Condition(),), GPU, reference_of(GPU), ())
    assert kernels.work.group == ("gemm.tensor",)
    assert kernels.work.features["tile_n"][0] * kernels.work.features["tile_m"][0] >= 128 * 128


def test_it_survives_being_saved(reference: Reference) -> None:
    assert reference.choice is not None
    back = from_arrays(to_arrays(reference.choice, "choice"), "choice")
    ops = (Linear(300, 5000, 768),)
    first = kernels_of(ops, (Condition(),), GPU, reference, ()).work
    second = kernels_of(ops, (Condition(),), GPU, replace(reference, choice=back), ()).work
    assert first.units[0] == second.units[0]


def test_weights_that_do_not_fit_are_refused(reference: Reference) -> None:
    assert reference.choice is not None
    chooser = next(iter(reference.choice.values()))
    with pytest.raises(WattcastError):
        replace(chooser, own=chooser.own[:, :-1])


def test_a_kind_that_is_not_known_is_named(reference: Reference) -> None:
    assert reference.choice is not None
    chooser = next(iter(reference.choice.values()))
    with pytest.raises(WattcastError, match="indexed"):
        replace(chooser, kind=np.full(len(chooser.kind), "indexed"))


def test_scores_are_weights_times_what_candidates_would_do() -> None:
    """Scores are added up in another order than while fitting, and leave out what all candidates of a row share."""
    reference = bundle_for(GPU).reference
    rng = np.random.default_rng(5)
    sizes = tuple(2.0 ** rng.integers(0, 13, 9) for _ in range(4))
    for chooser in reference.choice.values():
        shape = rng.normal(size=(9, len(chooser.names)))
        of = chooser.kind, chooser.tile_n, chooser.tile_m, chooser.split
        own = chooser.own[:, 0] + ((shape - chooser.mean) / chooser.spread) @ chooser.own[:, 1:].T
        plain = candidate_terms(*sizes, *of, reference.sm_count) @ chooser.weight + own
        score = chooser.score(*sizes, shape, reference.sm_count)
        assert_allclose(score - score[:, :1], plain - plain[:, :1], rtol=1e-12, atol=1e-12)
