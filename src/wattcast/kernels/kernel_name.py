"""What a kernel's name says of it, whoever wrote the name."""

from __future__ import annotations

from dataclasses import dataclass


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
