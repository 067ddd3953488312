"""Names of kernels that cut their work into tiles: products, convolutions, fused attention.

Hopper's cuBLAS, for instance, calls a kernel ``nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT``: tile
256x128, K tile 64 in 4 stages, cluster 1x2, raster order h, cooperative warps, layout NNT. The operand
code before the tile says which formats (``tst`` bf16, ``hsh`` fp16).
"""

from __future__ import annotations

import re

from wattcast.kernels.kernel_name import KernelName

_LETTERS = {"t": "bf16", "h": "fp16", "s": "fp32", "q": "fp8", "d": "fp64", "i": "int8", "o": "fp8", "z": "fp64"}
_NVJET = re.compile(
    r"nvjet_(?:(sm\d+)_)?([a-z0-9]+)_(\d+)x(\d+)_(\d+)x(\d+)_(\d+)x(\d+)_([hv])((?:_[A-Za-z0-9]+)*?)_([NT]{3})(?:_|$|\W)"
)


def nvjet(name: str) -> KernelName | None:
    """cuBLAS on Hopper: the grammar explained above."""
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


def xmma(name: str) -> KernelName | None:
    """cuBLAS and cuDNN: ``sm80_xmma_gemm_bf16bf16_..._tilesize128x128x64_stage3_warpsize2x2x1_tensor16x8x16``."""
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


def classic(name: str) -> KernelName | None:
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


def cutlass(name: str) -> KernelName | None:
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


def mangled(name: str) -> KernelName | None:
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


def attention(name: str) -> KernelName | None:
    """Fused attention of cuDNN, FlashAttention and CUTLASS, and what adds up its parts."""
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
