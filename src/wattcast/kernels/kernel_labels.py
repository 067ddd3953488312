"""The kinds of kernels that multiply, what their names say, and what their tiles can do.

A kernel is described by its kind (how it loads, and which generation it was written for), the sides
of its tile, and whether it splits K. ``kernel_kinds.csv`` has, for each kind:

- ``step_byte``: bytes of K that a block takes at a time; 0: there is no tile;
- ``split_blocks``: blocks on an SM that a split of K aims at, from grids;
- ``least_parts``: parts of a split K at least; 0: by its length;
- ``on_cuda_cores``: 1 where it runs on CUDA cores, whatever the format;
- ``feed_exponent``: how the share of the pipe's rate that a tile feeds falls with its area,
  (128²/area)^x, measured on an H200;
- ``crossings``: how often a loaded byte crosses shared memory over what a Hopper kernel of the same
  tile does, from profiler counters (warps before Hopper load operands each for themselves).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Array, Mask
from wattcast.core.strict_files import read_shipped_table
from wattcast.kernels.kernel_names import ParsedKernelName, parse_kernel_name


class TileCoefficients(Coefficients):
    """What tiles of products cost, and which of them a library without a fitted choice takes."""

    least_feed: float  # share of the pipe's rate that the smallest tile feeds
    step_cycles: float  # a step of K costs no less: its latency over the stages in flight
    reduce_cycles: float  # of a split of K: another pass through L2
    tf32_reduce_cycles: float  # the same in tf32: another launch
    least_steps: float  # of one part of a split K
    split_k: float  # the most of K that a split leaves to a block
    reread_limit: float  # operands that are read again at most, over all of them
    reread_tiles: float  # tiles along the shorter side until most of that is read again
    large_tiles: float  # exponent of the area by which large tiles seem faster before Hopper
    large_cuda_tiles: float  # the same on CUDA cores
    shared_crossings: float  # of a loaded byte, for each 64 rows of the longer side of a tile
    slim_tokens: float  # up to which Hopper products have corrections of their own
    largest_ampere_area: float  # outputs of the largest tile that registers hold
    slim_side: int  # below which tiles exist for a few tokens only
    vector_outputs: float  # of a block of kernels without a tile
    vector_step: float  # elements of K that such a block loads at a time
    cuda_thread_area: float  # of a tile over the standard one, whose threads compute 8 x 8
    cluster_loads: float  # share of a tile's loads in a Hopper cluster of two
    slot_areas: tuple[float, ...]  # outputs of a tile below which an SM holds more of them
    tiles_of_area: tuple[float, ...]  # that an SM holds, by slot_areas
    vector_slots: float  # blocks without a tile that an SM holds
    standard_side: float  # of a tile that feeds the tensor cores of an SM
    odd_image_channels: int  # input times output, from which odd images are turned
    most_parts: float  # bytes of sums for each image, over the images
    most_log_tokens: float  # beyond which the choice of kernels takes all sizes alike
    most_log_outputs: float  # as most_log_tokens, of results


TILES = load_coefficients("product_tiles", TileCoefficients)

KERNEL_KINDS = ("hopper", "ampere", "turing", "wmma", "direct", "simt", "plain", "vector")
HOPPER_KIND = KERNEL_KINDS.index("hopper")
SIMT_KIND = KERNEL_KINDS.index("simt")
VECTOR_KIND = KERNEL_KINDS.index("vector")


class KernelLabel(NamedTuple):
    """A kernel as the choice sees it."""

    kind: str  # one of KERNEL_KINDS
    tile_n: int  # along outputs (channels of a convolution)
    tile_m: int  # along tokens (pixels)
    split: bool  # of K over blocks, followed by a reduction

    def __str__(self) -> str:
        return f"{self.kind} {self.tile_n}x{self.tile_m}{' split' if self.split else ''}"


VECTOR_LABEL = KernelLabel("vector", 64, 8, False)  # kernels without a tile, for a few rows
# Names of the kernels that ran, none: unknown; parts of K, 0: as the names say
KernelsRun = tuple[Sequence[str], int]
NOT_RUN: KernelsRun = ((), 0)


class TileConstants(NamedTuple):
    """What follows from a kind of kernel and the sides of its tile, whatever the product."""

    step_byte: Array  # the first four are columns of ``kernel_kinds.csv``
    split_blocks: Array
    least_parts: Array
    on_cuda_cores: Array
    slots: Array  # tiles that an SM holds
    feed: Array  # arithmetic over that of a tile that feeds the pipe
    crossings: Array  # bytes through shared memory over those loaded


@cache
def kind_columns() -> Array:
    """Read the numbers of ``kernel_kinds.csv``, ``(column, kind)``."""
    rows = read_shipped_table("wattcast.kernels", "kernel_kinds.csv")
    by_kind = {row.pop("kind"): [float(value) for value in row.values()] for row in rows}
    return np.array([by_kind[kind] for kind in KERNEL_KINDS]).T.copy()


def tile_constants(
    kind: npt.NDArray[np.int64],
    tile_n: Array,
    tile_m: Array,
) -> Array:
    """Return the fields of ``TileConstants``, ``(field, ...)``."""
    step_byte, blocks, fewest, cuda, exponent, crossings = kind_columns()[:, kind]
    area = tile_n * tile_m
    slots = np.where(
        kind == VECTOR_KIND, TILES.vector_slots, tiles_per_sm(kind == HOPPER_KIND, area)
    )
    feed = (TILES.standard_side**2 / area) ** exponent
    # A byte is written once; then each warpgroup of 64 rows reads its own rows and most of the
    # columns of the tile.
    groups = np.maximum(tile_n, tile_m) / WARPGROUP_ROWS
    shared = (1.0 + TILES.shared_crossings * groups) * crossings
    return np.array([step_byte, blocks, fewest, cuda, slots, feed, shared])


def tiles_per_sm(is_hopper: Mask, area: Array) -> Array:
    """Return the tiles an SM works on at a time: one of Hopper's, more of small ones before."""
    place = np.searchsorted(TILES.slot_areas, area, side="right")
    return np.where(is_hopper, 1.0, np.array(TILES.tiles_of_area)[place])


def feed_share(area: Array) -> Array:
    """Return the share of the tensor cores' rate that a tile can feed, by its area over 128²."""
    growth = 1.0 - TILES.least_feed
    return np.minimum(1.0, TILES.least_feed + growth * np.sqrt(area))


def find_label(names: Sequence[str]) -> KernelLabel | None:
    """Return the kernel of an operator's product among the names of all its kernels.

    None: there is no product among them. cuBLAS and CUTLASS name the side along outputs first, the
    xmma kernels and convolutions the other.

    >>> find_label(["nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT"])
    KernelLabel(kind='hopper', tile_n=64, tile_m=8, split=True)
    """
    place = find_product_kernel(names)
    if place is None:
        return None
    parsed_names = [parse_kernel_name(name) for name in names]
    main = parsed_names[place]
    kind = _kernel_kind(main)
    if kind == "vector":
        return VECTOR_LABEL
    if kind == "plain":
        return _label_plain_convolution(main.name)
    first = int(main.tile_m or 0)
    second = int(main.tile_n or 0)
    names_tokens_first = "xmma" in main.name or main.family == "convolution"
    tile_n, tile_m = (second, first) if names_tokens_first else (first, second)
    is_split = any(_splits_k(name) for name in parsed_names)
    return KernelLabel(kind, tile_n, tile_m, is_split)


def find_product_kernel(names: Sequence[str]) -> int | None:
    """Return the place of the kernel of the product itself among the kernels of an operator."""
    for place, name in enumerate(names):
        if parse_kernel_name(name).family in ("gemm", "gemv", "convolution"):
            return place
    return None


def _kernel_kind(name: ParsedKernelName) -> str:
    """Return the kind of a product's kernel: by the generation it was written for and how it loads.

    Direct ones load operands past shared memory, an element at a time, and are slow by factors.
    """
    if not name.tiled:
        return "plain" if name.family == "convolution" else "vector"
    if name.architecture == "sm90":
        return "hopper"
    if "wo_smem" in name.name:
        return "direct"
    if "wmma" in name.name:
        return "wmma"
    if any(word in name.name for word in ("simt", "ffma", "sgemm")):
        return "simt"
    return "turing" if name.architecture == "sm75" else "ampere"


def _splits_k(name: ParsedKernelName) -> bool:
    return name.split_k or name.family == "splitk_reduce" or "splitK" in name.name


WARPGROUP_ROWS = 64.0  # of a tile, that four warps multiply together
_PLAIN_SIDE = 32  # of a tile whose kernel names no other
# cuDNN's convolutions on CUDA cores say the logarithms of their sides: ..._sgemm<float, float,
# 1024, 5, 5, ...>
_PLAIN_SIDES = re.compile(r"convolve\w*<(?:[^<>,]+, )+?(?:128|256|512|1024), (\d), (\d),")


def _label_plain_convolution(name: str) -> KernelLabel:
    """Return the label of a convolution on CUDA cores that takes the image as it lies."""
    sides = _PLAIN_SIDES.search(name)
    if sides is None:
        return KernelLabel("plain", _PLAIN_SIDE, _PLAIN_SIDE, False)
    tile_m = 2 ** int(sides[1])
    tile_n = 2 ** int(sides[2])
    return KernelLabel("plain", tile_n, tile_m, False)
