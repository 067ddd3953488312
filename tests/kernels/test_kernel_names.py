"""Kernel names as the libraries write them -> tile parameters; real names from profiles,
expectations by hand.
"""

from __future__ import annotations

import pytest

from wattcast.core.errors import UnknownName
from wattcast.kernels.kernel_names import ParsedKernelName, parse_kernel_name

KNOWN: dict[str, dict[str, object]] = {
    # Hopper's cuBLAS
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": {
        "family": "gemm",
        "library": "cublas",
        "architecture": "sm90",
        "tile_m": 256,
        "tile_n": 128,
        "split_k": False,
    },
    "nvjet_sm90_hsh_128x16_64x11_4x1_v_bz_splitK_bias_NNT": {
        "tile_m": 128,
        "tile_n": 16,
        "split_k": True,
    },
    "nvjet_sm90_qqtst_64x32_128x16_4x1_v_bz_algo2_splitK_TNT": {"split_k": True},
    "nvjet_hsh_64x8_64x16_4x1_v_bz_TNN": {
        "architecture": "sm90",
        "tile_n": 8,
    },
    # cuBLAS before Hopper
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn": {
        "family": "gemm",
        "architecture": "sm80",
        "tile_m": 128,
        "tile_n": 128,
    },
    "ampere_fp16_s16816gemm_fp16_64x64_sliced1x2_ldg8_f2f_stages_64x5_tn": {
        "tile_m": 64,
        "tile_n": 64,
    },
    "ampere_sgemm_128x64_tn": {
        "tile_m": 128,
        "tile_n": 64,
    },
    "volta_sgemm_32x128_nn": {"architecture": "sm70", "tile_n": 128},
    "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize32x32x64_stage6_warpsize2x2x1_tensor16x8x16_kernel": {
        "family": "gemm",
        "library": "cublas",
    },
    # CUTLASS, in cuBLAS and in cuDNN
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_32x6_nn_align4>"
    "(cutlass_80_tensorop_s1688gemm_64x64_32x6_nn_align4::Params)": {
        "family": "gemm",
        "library": "cutlass",
        "tile_m": 64,
    },
    "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x64_tn_align1>"
    "(cutlass_75_tensorop_bf16_s1688gemm_bf16_128x64_tn_align1::Params)": {
        "architecture": "sm75",
        "tile_m": 128,
        "tile_n": 64,
    },
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(x)": {
        "tile_m": 16,
    },
    "cutlass_80_simt_sgemm_128x32_8x5_tn_align1": {
        "tile_m": 128,
        "tile_n": 32,
    },
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8>(x)": {
        "family": "convolution",
        "library": "cudnn",
        "tile_m": 256,
        "tile_n": 64,
    },
    # cuDNN convolution
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1"
    "_g1_execute_segment_k_off_kernel__5x_cudnn": {
        "family": "convolution",
        "library": "cudnn",
        "architecture": "sm90",
        "tile_m": 128,
    },
    "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize128x32x8_stage3_warpsize2x2x1_g1_ffma"
    "_aligna4_alignc4_execute_kernel__5x_cudnn": {
        "tile_n": 32,
    },
    "conv2d_c1_k1_nhwc_specialized": {"family": "convolution_depthwise", "library": "cudnn"},
    "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float, false, true, x>": {
        "family": "layout",
    },
    # attention
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0": {
        "family": "attention",
        "library": "cudnn",
    },
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, "
    "cutlass::bfloat16_t, pytorch_flash::Flash_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t> >, false, true, "
    "false, false, false, true, false, false>(pytorch_flash::Flash_fwd_params)": {
        "family": "attention",
        "library": "flash",
    },
    "void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<96, 64, 128, 4, false, false, "
    "cutlass::half_t, Flash_kernel_traits<96, 64, 128, 4, cutlass::half_t> >, false, false, false, "
    "false, true, false, true, false>(pytorch_flash::Flash_fwd_params)": {
        "family": "attention",
    },
    "void pytorch_flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<64, 64, 256, 4, x> >": {
        "family": "attention_combine"
    },
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)": {
        "family": "attention",
        "library": "cutlass",
    },
    # PyTorch's own
    "void at::native::(anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(x)": {
        "family": "softmax",
    },
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::Half, float, c10::Half, x>(c10::Half*)": {
        "family": "softmax",
    },
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>(int)": {
        "family": "norm",
    },
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, true>(int)": {
        "family": "norm"
    },
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, x>(int)": {
        "family": "elementwise",
    },
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<"
    "c10::BFloat16, c10::BFloat16, c10::BFloat16, at::native::binary_internal::MulFunctor<float> > >(x)>(int)": {
        "family": "elementwise"
    },
    "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float, float, "
    "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int)": {
        "family": "elementwise"
    },
    "void at::native::vectorized_elementwise_kernel<8, at::native::(anonymous namespace)::launch_clamp_scalar("
    "at::TensorIteratorBase&, c10::Scalar)::{lambda(c10::BFloat16)#1}, x>(int)": {
        "family": "elementwise"
    },
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)"
    "::{lambda()#3}::operator()() const::{lambda(float)#1}, std::array<char*, 2ul>, 4, x>(int)": {
        "family": "elementwise",
    },
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16, at::native::MeanOps<x>, y> >(z)": {
        "family": "reduction",
    },
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true>(x)": {
        "family": "splitk_reduce",
        "library": "cublas",
    },
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<x, unsigned int, 2, 128, 1, 16, 8>": {
        "family": "cat"
    },
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long)": {
        "family": "gather"
    },
    "Memcpy DtoD (Device -> Device)": {"family": "copy", "library": "cuda"},
}


@pytest.mark.parametrize("name", KNOWN, ids=lambda name: name[:60])
def test_a_name_says_its_tile(name: str) -> None:
    found = parse_kernel_name(name)
    assert {field: getattr(found, field) for field in KNOWN[name]} == KNOWN[name]
    assert found.name == name
    assert found.family != "other"


def test_an_unknown_name_is_returned_with_nothing_guessed() -> None:
    assert parse_kernel_name("my_own_kernel_64x64") == ParsedKernelName("my_own_kernel_64x64")
    assert not parse_kernel_name("my_own_kernel_64x64").tiled


def test_hostile_names_do_no_harm() -> None:
    for name in (
        "",
        "x" * 100_000,
        "nvjet_" * 5_000,
        "a" * 50 + "\x00\n",
        "cutlass_80_tensorop_" + "_a" * 20_000,
    ):
        assert parse_kernel_name(name).name == name


def test_nearly_every_kernel_of_the_h200_database_is_known() -> None:
    pytest.importorskip("polars")
    from wattcast.core.row_tables import database_folder, read_table

    try:
        rows = read_table(database_folder("h200") / "rows.parquet")
    except UnknownName:
        pytest.skip("the H200 database is not in this checkout")
    names = [name for row in rows for name in row["kernel_names"]]
    assert len(names) > 2500
    assert sum(parse_kernel_name(name).family != "other" for name in names) / len(names) >= 0.995
    products = [
        parse_kernel_name(n)
        for row in rows
        if row["family"] in ("linear", "bmm")
        for n in row["kernel_names"]
    ]
    tiled = [kernel.tiled for kernel in products if kernel.family == "gemm"]
    assert sum(tiled) / len(tiled) >= 0.97
