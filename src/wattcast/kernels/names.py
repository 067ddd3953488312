"""Kernel names -> tile parameters.

Vendors write into a kernel's name how it cuts the work: cuBLAS on Ampere and Hopper, CUTLASS, cuDNN,
FlashAttention, and PyTorch's own templates each have their own grammar. A name that no grammar knows
is returned with ``family`` ``other`` and nothing guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from wattcast.kernels.kernel_name import KernelName
from wattcast.kernels.names_pytorch import elementwise, first_dtype, norm, reduction, softmax
from wattcast.kernels.names_tiled import attention, classic, cutlass, mangled, nvjet, xmma

__all__ = ["KernelName", "parse_kernel_name", "share_parsed"]


@lru_cache(maxsize=8192)
def parse_kernel_name(name: str) -> KernelName:
    """The tile parameters in ``name``.

    >>> tile = parse_kernel_name("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT")
    >>> tile.tile_m, tile.tile_n, tile.tile_k, tile.stages, tile.schedule, tile.layout
    (256, 128, 64, 4, 'coopA', 'nnt')
    """
    for grammar in _GRAMMARS:
        found = grammar(name)
        if found is not None:
            return replace(found, name=name)
    return KernelName(name)


def share_parsed(names: list[str]) -> float:
    """Share of names that a grammar knew; 1.0 for an empty list."""
    return sum(parse_kernel_name(name).parsed for name in names) / len(names) if names else 1.0


_WORDS: tuple[tuple[str, str, str], ...] = (
    (r"splitKreduce", "splitk_reduce", "cublas"),
    (r"cudnn::(bn_(fw|bw)_|batchnorm_(fw|bw)tr_)", "norm", "cudnn"),
    (r"convert_dq_to_16bits|compute_dot_do_o|fmha_reduce_head|philox::unpack_cudnn", "attention_part", "cudnn"),
    (r"multi_tensor_apply_kernel", "optimizer", "pytorch"),
    (r"fused_dropout_kernel", "dropout", "pytorch"),
    (r"max_pool_(forward|backward)|avg_pool", "pool", "pytorch"),
    (r"radix_sort::|unique_by_key::|scan::Device", "sort", "cub"),
    (
        r"embedding_backward|compute_grad_weight|sum_and_scatter|krn_partial|compute_num_of_partial_segments",
        "scatter",
        "pytorch",
    ),
    (r"gemmSN_|gemmk1_|sgemm_largek|magma_\w*gemm", "gemm", "cublas"),
    (r"gemvx|gemv2|gemvN|dot_kernel|reduce_1Block", "gemv", "cublas"),
    (r"scal_kernel", "scale", "cublas"),
    (r"cublasLt::epilogue", "epilogue", "cublas"),
    (r"CatArrayBatchedCopy", "cat", "pytorch"),
    (
        r"vectorized_gather_kernel|indexSelect|index_elementwise_kernel|gather_kernel|scatter_gather",
        "gather",
        "pytorch",
    ),
    (r"nchwToNhwc|nhwcToNchw|tensorTransform|convertTensor|nchwAddPadding|nhwcAddPadding", "layout", "cudnn"),
    (
        r"flip_filter|init_device_workspace|computeOffsets|kern_precompute|dgrad_indexed::kernel_helper|scalePacked",
        "prepare",
        "cudnn",
    ),
    (r"conv2d_c1_k1|(conv|grad)2d_grouped_direct|[dw]grad2d_c1_k1", "convolution_depthwise", "cudnn"),
    (r"conv_depthwise|DepthwiseConv|depthwise", "convolution_depthwise", "pytorch"),
    (r"dgrad_engine|image_first_layer", "convolution_direct", "cudnn"),
    (r"reduction::kernel::ReduceSplitK", "splitk_reduce", "cudnn"),
    (r"reduce_wgrad", "convolution_sum", "cudnn"),
    (r"[Ww]inograd", "convolution_winograd", "cudnn"),
    (r"implicit_convolve|implicit_gemm|convolve|scudnn|cudnn_generated\w*conv", "convolution", "cudnn"),
    (r"fft\w*(2d|1d)|_fft\b|_fft_|fft2d|pointwise_mult_and_sum_complex", "convolution_fft", "cudnn"),
    (r"[Mm]em(set|cpy)", "copy", "cuda"),
    (r"triton_", "elementwise", "triton"),
    (r"FillFunctor", "fill", "pytorch"),
)


def _word(name: str) -> KernelName | None:
    for pattern, family, library in _WORDS:
        if re.search(pattern, name):
            return KernelName(name, family, library, dtype=first_dtype(name))
    return None


_GRAMMARS: tuple[Callable[[str], KernelName | None], ...] = (
    nvjet,
    attention,
    xmma,
    cutlass,
    mangled,
    classic,
    softmax,
    norm,
    elementwise,
    reduction,
    _word,
)
