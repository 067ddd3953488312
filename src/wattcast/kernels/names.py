"""Kernel names -> tile parameters.

Vendors write into a kernel's name how it cuts the work: cuBLAS on Ampere and Hopper, CUTLASS, cuDNN,
FlashAttention, and PyTorch's own templates each have their own grammar. A name that no grammar knows
is returned with ``family`` ``other`` and nothing guessed.

Hopper's cuBLAS, for instance, calls a kernel ``nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT``: tile
256x128, K tile 64 in 4 stages, cluster 1x2, raster order h, cooperative warps, layout NNT. The operand
code before the tile says which formats (``tst`` bf16, ``hsh`` fp16).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True)
class KernelName:
    """What a kernel's name says. ``None`` and empty text mean: the name does not say."""

    name: str
    family: str = "other"  # gemm gemv convolution attention softmax norm elementwise reduction copy gather ...
    library: str = ""  # cublas cutlass cudnn pytorch flash triton
    architecture: str = ""  # sm80, sm90 ...: what it was written for, not where it ran
    dtype: str = ""  # of the operands, where the name has it
    tile_m: int | None = None
    tile_n: int | None = None
    tile_k: int | None = None
    stages: int | None = None
    warps_m: int | None = None
    warps_n: int | None = None
    instruction: tuple[int, int, int] | None = None  # of the tensor core
    cluster_m: int | None = None
    cluster_n: int | None = None
    layout: str = ""
    schedule: str = ""  # coopA, coopB, persistent, segment_k ...
    raster: str = ""
    split_k: bool = False
    bias: bool = False
    vector: int | None = None  # elements per access of an elementwise or reduction kernel
    function: str = ""  # what an elementwise or reduction kernel computes
    head_dim: int | None = None
    causal: bool | None = None

    @property
    def parsed(self) -> bool:
        """Whether a grammar knew the name."""
        return self.family != "other"

    @property
    def tiled(self) -> bool:
        """Whether the tile of a matrix product is known."""
        return self.tile_m is not None and self.tile_n is not None


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


_LETTERS = {"t": "bf16", "h": "fp16", "s": "fp32", "q": "fp8", "d": "fp64", "i": "int8", "o": "fp8", "z": "fp64"}
_NVJET = re.compile(
    r"nvjet_(?:(sm\d+)_)?([a-z0-9]+)_(\d+)x(\d+)_(\d+)x(\d+)_(\d+)x(\d+)_([hv])((?:_[A-Za-z0-9]+)*?)_([NT]{3})(?:_|$|\W)"
)


def _nvjet(name: str) -> KernelName | None:
    found = _NVJET.search(name)
    if not found:
        return None
    words = [word for word in found[10].split("_") if word]
    schedule = next((word for word in words if word.startswith("coop")), "")
    lower = {word.lower() for word in words}
    code = found[2]
    return KernelName(
        name,
        "gemm",
        "cublas",
        found[1] or "sm90",
        _LETTERS.get(code[0], ""),
        int(found[3]),
        int(found[4]),
        int(found[5]),
        int(found[6]),
        cluster_m=int(found[7]),
        cluster_n=int(found[8]),
        layout=found[11].lower(),
        schedule=schedule,
        raster=found[9],
        split_k=any("splitk" in word for word in lower),
        bias=any("bias" in word for word in lower),
    )


_XMMA_DTYPE = {
    "bf16": "bf16",
    "f16": "fp16",
    "tf32": "tf32",
    "f32": "fp32",
    "e4m3": "fp8",
    "e5m2": "fp8",
    "i8": "int8",
}
_XMMA = re.compile(r"(sm\d+)_xmma_(gemm|fprop|dgrad|wgrad)_(\w*?)tilesize(\d+)x(\d+)x(\d+)_(\w+)")


def _xmma(name: str) -> KernelName | None:
    found = _XMMA.search(name)
    if not found:
        return None
    rest = found[7]
    kinds = re.findall(r"tf32|bf16|f16|f32|e4m3|e5m2|i8", found[3])
    operand = "tf32" if "tf32" in kinds else (kinds[0] if kinds else "")
    layout = re.search(r"_([tn]{2})_[tn]_", f"_{found[3]}")
    image = re.search(r"(nhwc|nchw)", found[3])
    return KernelName(
        name,
        "gemm" if found[2] == "gemm" else "convolution",
        "cudnn" if "cudnn" in rest else "cublas",
        found[1],
        _XMMA_DTYPE.get(operand, ""),
        int(found[4]),
        int(found[5]),
        int(found[6]),
        stages=_first_int(r"stage(\d+)", rest),
        warps_m=_first_int(r"warp(?:group)?size(\d+)x", rest),
        warps_n=_first_int(r"warp(?:group)?size\d+x(\d+)", rest),
        instruction=_triple(r"tensor(\d+)x(\d+)x(\d+)", rest),
        layout=layout[1] if layout else (image[1] if image else ""),
        schedule="segment_k" if "segment_k_on" in rest else "",
        split_k="split" in rest,
        bias="bias" in rest,
    )


_ARCH = {"volta": "sm70", "turing": "sm75", "ampere": "sm80", "maxwell": "sm50", "hopper": "sm90"}
_CLASSIC = re.compile(
    r"(volta|turing|ampere|maxwell|hopper)_(?:(fp16|bf16|int8|fp32|h|s|d)_)?"
    r"(?:([a-z]*\d*(?:h|s|i|d|c|z)?\d*)gemm)\w*?_(\d+)x(\d+)(\w*)"
)


def _classic(name: str) -> KernelName | None:
    """cuBLAS before Hopper: ``ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn``."""
    found = _CLASSIC.search(name)
    if not found:
        return None
    rest, shape = found[6], re.search(r"(\d{3,6})$", found[3])
    kind = found[2] or {"s": "fp32", "d": "fp64", "h": "fp16"}.get(found[3][:1], "")
    k_and_stages = re.search(r"stages_(\d+)x(\d+)", rest)
    layout = re.search(r"_([tn]{2})(?:_|$)", rest)
    return KernelName(
        name,
        "gemm",
        "cublas",
        _ARCH[found[1]],
        kind if kind not in ("h", "s", "d") else {"h": "fp16", "s": "fp32", "d": "fp64"}[kind],
        int(found[4]),
        int(found[5]),
        int(k_and_stages[1]) if k_and_stages else None,
        int(k_and_stages[2]) if k_and_stages else None,
        instruction=_instruction(shape[1]) if shape else None,
        layout=layout[1] if layout else "",
        split_k="splitK" in rest,
    )


_CUTLASS = re.compile(
    r"cutlass_(?:(\d+)_)?(wmma_)?(tensorop|simt)_([a-z0-9_]*?)(gemm|fprop|dgrad|wgrad)((?:_[a-z0-9]+?)*?)"
    r"_(\d+)x(\d+)(?:_(\d+)x(\d+))?_([a-z]{2,4})(?:_|\W|$)"
)


def _cutlass(name: str) -> KernelName | None:
    """``cutlass_80_tensorop_s1688gemm_128x256_16x3_tn_align4`` and its relatives, cuDNN's among them."""
    found = _CUTLASS.search(name)
    if not found:
        return None
    before, after = found[4], found[6]
    shape = re.search(r"(\d{3,6})$", before)
    return KernelName(
        name,
        "gemm" if found[5] == "gemm" else "convolution",
        "cudnn" if "cudnn" in name else "cutlass",
        f"sm{found[1] or 80}",
        _cutlass_dtype(f"{before} {after}", found[3], shape[1] if shape else ""),
        int(found[7]),
        int(found[8]),
        int(found[9]) if found[9] else None,
        int(found[10]) if found[10] else None,
        instruction=_instruction(shape[1]) if shape else None,
        layout=found[11],
        schedule="wmma" if found[2] else "",
        bias="_bias" in name,
    )


_MANGLED = re.compile(r"^_ZN\d+cutlass\w*?(ImplicitGemm|Gemm)\w*?GemmShapeILi(\d+)ELi(\d+)ELi(\d+)E")


def _mangled(name: str) -> KernelName | None:
    """A CUTLASS kernel under its C++ name: the first shape is the tile's."""
    found = _MANGLED.search(name)
    if not found:
        return None
    return KernelName(
        name,
        "convolution" if found[1] == "ImplicitGemm" else "gemm",
        "cudnn" if "cudnn" in name else "cutlass",
        "sm80",
        next(
            (dtype for word, dtype in (("bfloat16", "bf16"), ("tfloat32", "tf32"), ("half", "fp16")) if word in name),
            "",
        ),
        int(found[2]),
        int(found[3]),
        int(found[4]),
    )


def _cutlass_dtype(text: str, unit: str, shape: str) -> str:
    for word, dtype in (("bf16", "bf16"), ("tf32", "tf32"), ("f16", "fp16"), ("e4m3", "fp8"), ("i8", "int8")):
        if word in text:
            return dtype
    if unit == "tensorop":
        return "tf32" if shape == "1688" else ""
    return {"s": "fp32", "d": "fp64", "h": "fp16"}.get(text[:1], "")


_CUDNN_SDPA = re.compile(
    r"cudnn_generated_\w*sdpa_(sm\d+)_flash_(fprop|bprop)_\w*?_(\d+)x(\d+)x(\d+)_(\d+)x(\d+)x(\d+)"
)
_FLASH = re.compile(
    r"flash_(fwd|bwd)\w*?_kernel<.*?Flash_(?:fwd|bwd)_kernel_traits<\s*(?:\(int\))?(\d+), (?:\(int\))?(\d+), "
    r"(?:\(int\))?(\d+), (?:\(int\))?(\d+)"
)
_FMHA = re.compile(r"fmha_cutlassF_(f16|bf16|f32)_\w*?(\d+)x(\d+)_\w*?(sm\d+)")


def _attention(name: str) -> KernelName | None:
    if "lean_reduction_kernel" in name or "splitkv_combine" in name:
        return KernelName(name, "attention_combine", "cudnn" if "cudnn" in name else "flash")
    if found := _CUDNN_SDPA.search(name):
        q, kv, dim, warps = (int(found[place]) for place in (3, 4, 5, 6))
        # its f16 means 16 bits wide: bf16 runs under the same name
        return KernelName(name, "attention", "cudnn", found[1], "", q, kv, warps_m=warps, head_dim=dim)
    if found := _FLASH.search(name):
        return _flash(name, found)
    if found := _FMHA.search(name):
        dtype = {"f16": "fp16", "bf16": "bf16", "f32": "fp32"}[found[1]]
        return KernelName(name, "attention", "cutlass", found[4], dtype, int(found[2]), int(found[3]))
    return None


def _flash(name: str, found: re.Match[str]) -> KernelName:
    """FlashAttention 2's traits: head size, tile of queries, tile of keys, warps; then flags."""
    dim, q, kv, warps = (int(found[place]) for place in (2, 3, 4, 5))
    dtype = "bf16" if "bfloat16" in name else ("fp16" if "half" in name else "")
    split = "splitkv" in name
    after = re.search(r"> ?>, ((?:(?:true|false|\(bool\)[01])(?:, |>))+)", name)
    flags = re.findall(r"true|false|[01]", after[1]) if after else []
    place = 0 if split else 1  # the plain kernel has dropout before causal
    causal = flags[place] in ("true", "1") if len(flags) > place else None
    return KernelName(
        name, "attention", "flash", "sm80", dtype, q, kv, warps_m=warps, head_dim=dim, split_k=split, causal=causal
    )


_DTYPES = (
    ("c10::BFloat16", "bf16"),
    ("__nv_bfloat16", "bf16"),
    ("c10::Half", "fp16"),
    ("__half", "fp16"),
    ("float", "fp32"),
    ("double", "fp64"),
)


def _dtype(text: str) -> str:
    """The format that stands first in a template's arguments."""
    places = {text.find(word): dtype for word, dtype in _DTYPES if word in text}
    return places[min(places)] if places else ""


_SOFTMAX = re.compile(
    r"(softmax_warp_forward|cunn_SoftMaxForward\w*|cunn_SpatialSoftMaxForward|softmax_warp_backward"
    r"|cunn_SoftMaxBackward\w*)<(.*)"
)
_NORM = re.compile(
    r"(vectorized_layer_norm_kernel|RowwiseMomentsCUDAKernel|LayerNormForwardCUDAKernel|ComputeFusedParams\w*"
    r"|batch_norm\w*|rms_norm\w*|layer_norm\w*|GroupNorm\w*|GammaBetaBackward\w*)"
)


def _softmax(name: str) -> KernelName | None:
    found = _SOFTMAX.search(name)
    if not found:
        return None
    vector = re.match(r"(?:\(int\))?(\d+),", found[2])
    return KernelName(
        name,
        "softmax",
        "pytorch",
        dtype=_dtype(found[2]),
        vector=int(vector[1]) if vector else None,
        function=found[1],
    )


def _norm(name: str) -> KernelName | None:
    found = _NORM.search(name)
    if not found:
        return None
    rms = re.search(r"vectorized_layer_norm_kernel<[^>]*, (?:true|\(bool\)1)>", name)
    return KernelName(name, "norm", "pytorch", dtype=_dtype(name[found.end() :]), function="rms" if rms else found[1])


_ELEMENTWISE = re.compile(
    r"(vectorized_elementwise_kernel|unrolled_elementwise_kernel\w*|vectorized_templated_elementwise_kernel"
    r"|elementwise_kernel_with_index|elementwise_kernel)<(.*)"
)
_REDUCE = re.compile(r"(?<![A-Za-z])reduce_kernel<(?:\(int\))?(\d+), (?:\(int\))?(\d+), (.*)")


def _elementwise(name: str) -> KernelName | None:
    """PyTorch's pointwise kernels: the vectorised ones name their width first, the strided ones second."""
    found = _ELEMENTWISE.search(name)
    if not found or "scatter_gather" in name:
        return None
    kind, rest = found[1], found[2]
    numbers = re.match(r"(?:\(int\))?(\d+), (?:(?:\(int\))?(\d+), )?", rest)
    vector = None
    if numbers and kind.startswith("vectorized"):
        vector = int(numbers[1])
    elif numbers and kind == "elementwise_kernel" and numbers[2]:
        vector = int(numbers[2])
    return KernelName(
        name,
        "elementwise",
        "pytorch",
        dtype=_dtype(rest),
        vector=vector,
        function=_function_of(rest),
        schedule=kind.removesuffix("_kernel"),
    )


_FUNCTIONS = (
    (r"direct_copy_kernel|float16_copy_kernel|bfloat16_copy_kernel|copy_kernel", "copy"),
    (r"UnaryFunctor<.*?MulFunctor", "scale"),
    (r"UnaryFunctor<.*?AddFunctor|CUDAFunctorOnSelf_add", "shift"),
    (r"binary_internal::(\w+?)Functor", ""),
    (r"CUDAFunctor_(\w+)", ""),
    (r"(maximum|minimum|masked_fill|where)_kernel", ""),
    (r"(\w+?)_kernel_cuda\b", ""),
    (r"(?<!gpu)(?<!\w)(?!gpu_)(\w+?)_kernel_impl\b", ""),
    (r"(?<!\w)(?!gpu_|elementwise)(\w+?)_kernel\(", ""),
    (r"FillFunctor", "fill"),
    (r"launch_clamp", "relu"),
)


def _function_of(text: str) -> str:
    """What a pointwise kernel computes, by the functor in its template."""
    for pattern, said in _FUNCTIONS:
        if found := re.search(pattern, text):
            word = said or found[1]
            return (
                word.removesuffix("_functor").removeprefix("Gelu").lower() if word != "GeluCUDAKernelImpl" else "gelu"
            )
    return "gelu" if "Gelu" in text else ""


def _reduction(name: str) -> KernelName | None:
    found = _REDUCE.search(name)
    if not found:
        return None
    word = re.search(r"(sum|mean|Mean|max|Max|min|Min|prod|norm|and|or)\w*", found[3])
    function = word[1].lower() if word else ""
    return KernelName(name, "reduction", "pytorch", dtype=_dtype(found[3]), vector=int(found[2]), function=function)


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
            return KernelName(name, family, library, dtype=_dtype(name))
    return None


_GRAMMARS: tuple[Callable[[str], KernelName | None], ...] = (
    _nvjet,
    _attention,
    _xmma,
    _cutlass,
    _mangled,
    _classic,
    _softmax,
    _norm,
    _elementwise,
    _reduction,
    _word,
)


def _instruction(digits: str) -> tuple[int, int, int] | None:
    """``16816`` is 16x8x16, ``1688`` 16x8x8, ``884`` 8x8x4, ``161616`` 16x16x16."""
    known = {
        "16816": (16, 8, 16),
        "1688": (16, 8, 8),
        "884": (8, 8, 4),
        "161616": (16, 16, 16),
        "16832": (16, 8, 32),
        "168128": (16, 8, 128),
    }
    return known.get(digits)


def _first_int(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


def _triple(pattern: str, text: str) -> tuple[int, int, int] | None:
    found = re.search(pattern, text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None
