"""Names of PyTorch's own kernels: C++ templates, with formats and functors among their arguments."""

from __future__ import annotations

import re

from wattcast.kernels.kernel_name import KernelName

_DTYPES = (
    ("c10::BFloat16", "bf16"),
    ("__nv_bfloat16", "bf16"),
    ("c10::Half", "fp16"),
    ("__half", "fp16"),
    ("float", "fp32"),
    ("double", "fp64"),
)


def first_dtype(text: str) -> str:
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


def softmax(name: str) -> KernelName | None:
    """Softmax over rows, in a warp or in a block."""
    found = _SOFTMAX.search(name)
    if not found:
        return None
    vector = re.match(r"(?:\(int\))?(\d+),", found[2])
    return KernelName(
        name,
        "softmax",
        "pytorch",
        dtype=first_dtype(found[2]),
        vector=int(vector[1]) if vector else None,
        function=found[1],
    )


def norm(name: str) -> KernelName | None:
    """Norms of layers, groups and batches."""
    found = _NORM.search(name)
    if not found:
        return None
    rms = re.search(r"vectorized_layer_norm_kernel<[^>]*, (?:true|\(bool\)1)>", name)
    return KernelName(
        name, "norm", "pytorch", dtype=first_dtype(name[found.end() :]), function="rms" if rms else found[1]
    )


_ELEMENTWISE = re.compile(
    r"(vectorized_elementwise_kernel|unrolled_elementwise_kernel\w*|vectorized_templated_elementwise_kernel"
    r"|elementwise_kernel_with_index|elementwise_kernel)<(.*)"
)
_REDUCE = re.compile(r"(?<![A-Za-z])reduce_kernel<(?:\(int\))?(\d+), (?:\(int\))?(\d+), (.*)")


def elementwise(name: str) -> KernelName | None:
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
        dtype=first_dtype(rest),
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


def reduction(name: str) -> KernelName | None:
    """Sums, means and extremes over dimensions."""
    found = _REDUCE.search(name)
    if not found:
        return None
    word = re.search(r"(sum|mean|Mean|max|Max|min|Min|prod|norm|and|or)\w*", found[3])
    function = word[1].lower() if word else ""
    return KernelName(
        name, "reduction", "pytorch", dtype=first_dtype(found[3]), vector=int(found[2]), function=function
    )
