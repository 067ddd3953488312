"""What a kernel's name says about it: its family, its library and, for matrix products, its tile.

Products name their tile, each library in a grammar of its own. cuBLAS on Hopper, for example,
writes ``nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT``: architecture, letters of the operands'
formats, tile, elements of K in a step and stages, cluster, raster order, words such as ``splitK``,
and how the operands lie. Other kernels are known by words in their names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache

from wattcast.core.strict_files import read_shipped_table


@dataclass(frozen=True)
class ParsedKernelName:
    """What a kernel's name says. ``None`` and empty text mean that the name does not say."""

    name: str
    # gemm gemv convolution attention softmax norm elementwise reduction copy gather ...
    family: str = "other"
    library: str = ""  # cublas cutlass cudnn pytorch flash triton
    architecture: str = ""  # sm80, sm90 ...: what it was written for, not where it ran
    tile_m: int | None = None  # sides of a product's tile, in the order of the name
    tile_n: int | None = None
    split_k: bool = False

    @property
    def tiled(self) -> bool:
        """Whether the tile of a matrix product is known."""
        return self.tile_m is not None and self.tile_n is not None


# The library (cuDNN's kernels say so in their names), the architecture where a name does not say,
# and the grammar
_GRAMMARS = (
    (
        "cublas",
        "sm90",
        r"nvjet_(?:(?P<arch>sm\d+)_)?[a-z0-9]+_(?P<m>\d+)x(?P<n>\d+)_\d+x\d+_\d+x\d+_[hv]"
        r"(?P<words>(?:_[A-Za-z0-9]+)*?)_[NT]{3}(?:_|$|\W)",
    ),
    (
        "cublas",
        "sm80",
        r"(?P<arch>sm\d+)_xmma_(?:gemm|(?P<conv>fprop|dgrad|wgrad))_\w*?"
        r"tilesize(?P<m>\d+)x(?P<n>\d+)x\d+_"
        r"(?P<words>\w+)",
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
        r"^_ZN\d+cutlass\w*?(?:(?P<conv>ImplicitGemm)|Gemm)\w*?"
        r"GemmShapeILi(?P<m>\d+)ELi(?P<n>\d+)ELi\d+E",
    ),
    (  # cuBLAS before Hopper: ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn
        "cublas",
        "sm80",
        r"(?P<arch>volta|turing|ampere|maxwell|hopper)_(?:(?:fp16|bf16|int8|fp32|h|s|d)_)?"
        r"(?:[a-z]*\d*(?:h|s|i|d|c|z)?\d*gemm)\w*?_(?P<m>\d+)x(?P<n>\d+)(?P<words>\w*)",
    ),
)
_GENERATION = {
    "volta": "sm70",
    "turing": "sm75",
    "ampere": "sm80",
    "maxwell": "sm50",
    "hopper": "sm90",
}


@cache
def _load_words() -> list[tuple[re.Pattern[str], str, str]]:
    """Read ``kernel_words.csv``: patterns of kernels without a tile, in the order of trial."""
    rows = read_shipped_table("wattcast.kernels", "kernel_words.csv")
    return [(re.compile(row["pattern"]), row["family"], row["library"]) for row in rows]


@lru_cache(maxsize=8192)
def parse_kernel_name(name: str) -> ParsedKernelName:
    """Return what ``name`` says; a name that nobody knows says nothing.

    >>> kernel = parse_kernel_name("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT")
    >>> kernel.family, kernel.architecture, kernel.tile_m, kernel.tile_n, kernel.split_k
    ('gemm', 'sm90', 256, 128, False)
    """
    for library, usual_architecture, grammar in _GRAMMARS:
        match = re.search(grammar, name)
        if match is not None:
            return _read_product_name(name, match.groupdict(), library, usual_architecture)
    for pattern, family, library in _load_words():
        if pattern.search(name):
            return ParsedKernelName(name, family, library)
    return ParsedKernelName(name)


def _read_product_name(
    name: str,
    parts: dict[str, str | None],
    library: str,
    usual_architecture: str,
) -> ParsedKernelName:
    """Return what the name of a matrix product says, by the parts that its grammar names."""
    generation = parts.get("arch") or usual_architecture
    words = parts.get("words") or ""
    return ParsedKernelName(
        name,
        family="convolution" if parts.get("conv") else "gemm",
        library="cudnn" if "cudnn" in name else library,
        architecture=_GENERATION.get(generation, f"sm{generation.removeprefix('sm')}"),
        tile_m=int(parts["m"] or 0),
        tile_n=int(parts["n"] or 0),
        split_k="split" in words.lower(),
    )
