"""What a kernel's name says about it: its family, its library and, for matrix products, its tile.

Products name their tile, each library in a grammar of its own. cuBLAS on Hopper, for example, writes
``nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT``: architecture, letters of the operands' formats, tile, elements
of K in a step and stages, cluster, raster order, words such as ``splitK``, and how the operands lie. Other kernels
are known by words in their names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class ParsedKernelName:
    """What a kernel's name says. ``None`` and empty text mean that the name does not say."""

    name: str
    family: str = "other"  # gemm gemv convolution attention softmax norm elementwise reduction copy gather ...
    library: str = ""  # cublas cutlass cudnn pytorch flash triton
    architecture: str = ""  # sm80, sm90 ...: what it was written for, not where it ran
    tile_m: int | None = None  # sides of a product's tile, in the order of the name
    tile_n: int | None = None
    split_k: bool = False

    @property
    def tiled(self) -> bool:
        """Whether the tile of a matrix product is known."""
        return self.tile_m is not None and self.tile_n is not None


# library (cuDNN's kernels say so in their names), the architecture where a name does not say, and the grammar
_GRAMMARS = tuple(
    (library, usual, re.compile(pattern))
    for library, usual, pattern in (
        (
            "cublas",
            "sm90",
            r"nvjet_(?:(?P<arch>sm\d+)_)?[a-z0-9]+_(?P<m>\d+)x(?P<n>\d+)_\d+x\d+_\d+x\d+_[hv]"
            r"(?P<rest>(?:_[A-Za-z0-9]+)*?)_[NT]{3}(?:_|$|\W)",
        ),
        (
            "cublas",
            "sm80",
            r"(?P<arch>sm\d+)_xmma_(?:gemm|(?P<conv>fprop|dgrad|wgrad))_\w*?tilesize(?P<m>\d+)x(?P<n>\d+)x\d+_"
            r"(?P<rest>\w+)",
        ),
        (
            "cutlass",
            "sm80",
            r"cutlass_(?:(?P<arch>\d+)_)?(?:wmma_)?(?:tensorop|simt)_[a-z0-9_]*?"
            r"(?:gemm|(?P<conv>fprop|dgrad|wgrad))(?:_[a-z0-9]+?)*?_(?P<m>\d+)x(?P<n>\d+)(?:_\d+x\d+)?"
            r"_[a-z]{2,4}(?:_|\W|$)",
        ),
        (  # a C++ name: the first shape is the tile's
            "cutlass",
            "sm80",
            r"^_ZN\d+cutlass\w*?(?:(?P<conv>ImplicitGemm)|Gemm)\w*?GemmShapeILi(?P<m>\d+)ELi(?P<n>\d+)ELi\d+E",
        ),
        (  # cuBLAS before Hopper: ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn
            "cublas",
            "sm80",
            r"(?P<arch>volta|turing|ampere|maxwell|hopper)_(?:(?:fp16|bf16|int8|fp32|h|s|d)_)?"
            r"(?:[a-z]*\d*(?:h|s|i|d|c|z)?\d*gemm)\w*?_(?P<m>\d+)x(?P<n>\d+)(?P<rest>\w*)",
        ),
    )
)
_GENERATION = {"volta": "sm70", "turing": "sm75", "ampere": "sm80", "maxwell": "sm50", "hopper": "sm90"}
# words of other kernels, the first that is found: pattern, family, library
_WORDS = tuple(
    (re.compile(pattern), family, library)
    for pattern, family, library in (
        (r"^(?=.*cudnn).*(lean_reduction_kernel|splitkv_combine)", "attention_combine", "cudnn"),
        (r"lean_reduction_kernel|splitkv_combine", "attention_combine", "flash"),
        (r"cudnn_generated_\w*sdpa_sm\d+_flash_(fprop|bprop)_", "attention", "cudnn"),
        (r"flash_(fwd|bwd)\w*?_kernel<.*?Flash_(fwd|bwd)_kernel_traits<", "attention", "flash"),
        (r"fmha_cutlassF_(f16|bf16|f32)_", "attention", "cutlass"),
        (
            r"(softmax_warp_|cunn_SoftMax|cunn_SpatialSoftMax)(forward|Forward|backward|Backward)\w*<",
            "softmax",
            "pytorch",
        ),
        (
            r"vectorized_layer_norm_kernel|RowwiseMomentsCUDAKernel|LayerNormForwardCUDAKernel|ComputeFusedParams"
            r"|batch_norm|rms_norm|layer_norm|GroupNorm|GammaBetaBackward",
            "norm",
            "pytorch",
        ),
        (
            r"^(?!.*scatter_gather).*(vectorized_(templated_)?elementwise_kernel|unrolled_elementwise_kernel\w*"
            r"|elementwise_kernel_with_index|elementwise_kernel)<",
            "elementwise",
            "pytorch",
        ),
        (r"(?<![A-Za-z])reduce_kernel<", "reduction", "pytorch"),
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
            r"flip_filter|init_device_workspace|computeOffsets|kern_precompute|dgrad_indexed::kernel_helper"
            r"|scalePacked",
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
)


@lru_cache(maxsize=8192)
def parse_kernel_name(name: str) -> ParsedKernelName:
    """Return what ``name`` says; a name that nobody knows says nothing.

    >>> kernel = parse_kernel_name("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT")
    >>> kernel.family, kernel.architecture, kernel.tile_m, kernel.tile_n, kernel.split_k
    ('gemm', 'sm90', 256, 128, False)
    """
    for library, usual, grammar in _GRAMMARS:
        if found := grammar.search(name):
            said = found.groupdict()
            generation = said.get("arch") or usual
            return ParsedKernelName(
                name,
                "convolution" if said.get("conv") else "gemm",
                "cudnn" if "cudnn" in name else library,
                _GENERATION.get(generation, f"sm{generation.removeprefix('sm')}"),
                int(found["m"]),
                int(found["n"]),
                "split" in (said.get("rest") or "").lower(),
            )
    for pattern, family, library in _WORDS:
        if pattern.search(name):
            return ParsedKernelName(name, family, library)
    return ParsedKernelName(name)
