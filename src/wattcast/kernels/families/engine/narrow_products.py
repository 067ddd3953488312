"""Products of an engine with weights narrower than their bf16 results.

fp8 products run CUTLASS or DeepGEMM. Weights in int4, fp4 or fp8 with tokens in bf16 are widened on
the chip by Machete on Hopper, by Marlin elsewhere, and before Hopper by TensorRT-LLM's CUTLASS.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import Dtype
from wattcast.kernels.families import register_kernels
from wattcast.kernels.families.engine.engine_counts import (
    CountedKernel,
    EngineWork,
    OperatorRun,
    count_each,
    fill_slots,
)
from wattcast.kernels.kernel_table import (
    MOVED_SUM_BYTE,
    LibraryStyle,
    ReferenceChip,
    resident_share,
)
from wattcast.kernels.machete_kernels import (
    MACHETE,
    MACHETE_FAMILY,
    runs_machete,
    shares_steps,
)
from wattcast.kernels.tile_rules import choose_tile
from wattcast.workload.engine_operators import (
    BlockProduct,
    NarrowProduct,
    ScaledProduct,
    WeightOnlyProduct,
)


class EngineProductCoefficients(Coefficients):
    """What products of an engine do besides multiplying."""

    slice_steps: float  # of Marlin, until a slice of a tile has added its sums to those before it
    most_slices: float  # of a tile whose sums meet in memory, at most
    crossings: float  # how often a loaded byte crosses shared memory
    weights_per_cycle: float  # that an SM widens in TensorRT-LLM's kernels before Hopper
    widening_slots: float  # tiles of such a kernel that an SM holds
    widening_rows: tuple[float, ...]  # tokens of such a tile
    widening_outputs: float  # of such a tile
    widening_step: float  # of k, that such a tile multiplies at a time
    widening_parts: int  # of k, up to which TensorRT-LLM tries such kernels
    lone_rows: int  # tokens up to which tiles of CUTLASS's scaled products run alone, not in pairs
    marlin_rows: int  # that one kernel of Marlin takes
    marlin_narrow_rows: int  # likewise of a product with few outputs
    marlin_narrow_outputs: int  # up to which a product has few
    marlin_tile_rows: int  # of a full tile of Marlin; the rows that remain take another kernel


ENGINE_PRODUCTS = load_coefficients("engine_products", EngineProductCoefficients)

# Tiles of which features of the learned corrections say how they fill the SMs.
_FEATURE_ROWS = (128, 256)
_FEATURE_OUTPUTS = 128.0


class _Tile(NamedTuple):
    """The kernel of a product, and the sides of its tile."""

    kernel: str
    m: float  # tokens
    n: float  # outputs
    k: float  # of a step
    split: int = 1  # parts of k


class _Blocks(NamedTuple):
    """How a kernel spreads the steps of all tiles over its blocks."""

    units: float
    steps: float
    unit_flop: float
    launches: float = 1.0
    between_byte: float = 0.0
    slots: float = 1.0


def count_narrow_product(op: NarrowProduct, run: OperatorRun) -> CountedKernel:
    """Return the kernel and the work of a product with narrow weights."""
    chip = run.chip
    if op.kernel == "machete" and not runs_machete(chip):
        op = replace(op, kernel="marlin")
    m = float(op.m)
    n = float(op.n)
    k = float(op.k)
    tile = _choose_tile(op, run)

    # Tiles along tokens run in pairs in CUTLASS's clusters.
    pair = 2 if isinstance(op, ScaledProduct) and m > ENGINE_PRODUCTS.lone_rows else 1
    rows = pair * ceil(m / (pair * tile.m))
    tiles = rows * ceil(n / tile.n)
    blocks = _spread_tiles(op, tile, tiles, run)

    # Bytes: activations stay in L2 as far as they fit, weights come from memory unless warm
    weight_byte = op.weight_byte
    input_byte = m * k * op.dtype.byte
    out_byte = op.write_byte
    missing_weights = 1.0
    if run.is_warm:
        all_byte = weight_byte + input_byte + out_byte
        missing_weights = 1.0 - float(resident_share(all_byte, chip.l2_byte))
    missing_activations = 1.0 - float(resident_share(input_byte + out_byte, chip.l2_byte))
    load_byte = tiles * k * (tile.m * op.dtype.byte + tile.n * weight_byte / (n * k))
    work = EngineWork(
        units=blocks.units,
        unit_flop=blocks.unit_flop,
        steps=blocks.steps,
        launches=blocks.launches,
        l2_byte=load_byte,
        shared_byte=ENGINE_PRODUCTS.crossings * load_byte + out_byte,
        dram_read_byte=weight_byte * missing_weights + input_byte * missing_activations,
        dram_write_byte=out_byte * missing_activations,
        store_byte=out_byte,
        between_byte=blocks.between_byte,
        slots=blocks.slots,
    )

    plain = {
        "tile_m": tile.m,
        "tile_n": tile.n,
        "fill": fill_slots(tiles, chip.sm_count),
        "pad_m": m / (rows * tile.m),
        "scaled_tensor": isinstance(op, ScaledProduct) and op.scales == "tensor",
        "zero_points": isinstance(op, WeightOnlyProduct) and op.zero_points,
        "narrow": isinstance(op, WeightOnlyProduct) and op.weights in ("int4", "fp4"),
        "fill_128": _fill_with_tiles(m, n, _FEATURE_ROWS[0], chip),
        "fill_256": _fill_with_tiles(m, n, _FEATURE_ROWS[1], chip),
    }
    logs = {
        "log_m": m,
        "log_n": n,
        "log_k": k,
        "log_units": tiles,
    }
    return CountedKernel(f"gemm.engine.{tile.kernel}", work, plain, logs)


def _fill_with_tiles(
    m: float,
    n: float,
    rows: int,
    chip: ReferenceChip,
) -> float:
    """Return the share of SMs that have work with tiles of so many rows by 128 outputs."""
    return fill_slots(ceil(m / rows) * ceil(n / _FEATURE_OUTPUTS), chip.sm_count)


def _spread_tiles(
    op: NarrowProduct,
    tile: _Tile,
    tiles: int,
    run: OperatorRun,
) -> _Blocks:
    """Return the blocks of a kernel: one a tile, unless they share out the steps of all tiles."""
    unit_flop = 2.0 * tile.m * tile.n * op.k
    steps = op.k / tile.k
    if tile.kernel.startswith(_WIDENING):
        unit_flop += run.flop_per_cycle * tile.n * op.k / ENGINE_PRODUCTS.weights_per_cycle
        parts = float(tile.split)
        sums_byte = MOVED_SUM_BYTE * op.m * op.n * parts if tile.split > 1 else 0.0
        return _Blocks(
            tiles * parts,
            ceil(steps / parts),
            unit_flop / parts,
            between_byte=sums_byte,
            slots=ENGINE_PRODUCTS.widening_slots,
        )
    if op.kernel == "marlin":
        return _share_by_marlin(
            op,
            tiles,
            steps,
            unit_flop,
            run.chip.sm_count,
        )
    if op.kernel == "machete":
        # The warps that widen the weights of a tile also issue its products, one after the other.
        unit_flop += run.flop_per_cycle * tile.n * op.k / MACHETE.weights_per_cycle
        if shares_steps(tiles, run.chip.sm_count):
            return _share_by_machete(
                op,
                tiles,
                steps,
                unit_flop,
                run.chip.sm_count,
            )
    return _Blocks(float(tiles), steps, unit_flop)


def _share_by_machete(
    op: NarrowProduct,
    tiles: int,
    steps: float,
    unit_flop: float,
    sm_count: float,
) -> _Blocks:
    """Return the blocks of Machete, each of at least ``least_steps`` along k.

    A kernel that splits tiles clears a workspace first, which is a second launch.
    """
    units = min(sm_count, max(tiles * steps / MACHETE.least_steps, 1.0))
    launches = 2.0 if steps > MACHETE.least_steps else 1.0
    return _Blocks(
        units,
        steps * tiles / units,
        unit_flop * tiles / units,
        launches,
        _slice_byte(op, tiles, sm_count),
    )


def _share_by_marlin(
    op: NarrowProduct,
    tiles: int,
    steps: float,
    unit_flop: float,
    sm_count: float,
) -> _Blocks:
    """Return the blocks of Marlin: one an SM, and slices of a tile add up in turn.

    A kernel takes 16 tiles of rows, or 128 of narrow products; further kernels take the remainder.
    """
    slice_steps = ENGINE_PRODUCTS.slice_steps * sm_count / tiles
    is_narrow = op.n <= ENGINE_PRODUCTS.marlin_narrow_outputs
    most_rows = ENGINE_PRODUCTS.marlin_narrow_rows if is_narrow else ENGINE_PRODUCTS.marlin_rows
    tile_rows = ENGINE_PRODUCTS.marlin_tile_rows
    full_kernels, remainder = divmod(op.m, most_rows)
    launches = full_kernels + (remainder >= tile_rows) + (remainder % tile_rows > 0)
    return _Blocks(
        sm_count,
        steps * tiles / sm_count + slice_steps,
        unit_flop * tiles / sm_count,
        float(launches),
        _slice_byte(op, tiles, sm_count),
    )


def _slice_byte(
    op: NarrowProduct,
    tiles: int,
    sm_count: float,
) -> float:
    """Return the bytes of sums in fp32 that slices of a tile write and read again."""
    if tiles >= sm_count:
        return 0.0
    return MOVED_SUM_BYTE * op.m * op.n * min(sm_count / tiles, ENGINE_PRODUCTS.most_slices)


_WIDENING = "weight_only.cutlass"


def _choose_widening_tile(op: WeightOnlyProduct, run: OperatorRun) -> _Tile:
    """Return the tile and the split of k that TensorRT-LLM finds fastest before Hopper.

    It times its tiles of up to 128 tokens and up to seven parts of k (``fpA_intB_gemm``). Here the
    fastest is the one with least rounds times the cycles of a round.
    """
    chip = run.chip
    slots = ENGINE_PRODUCTS.widening_slots
    outputs = ENGINE_PRODUCTS.widening_outputs
    step_k = ENGINE_PRODUCTS.widening_step
    steps = ceil(op.k / step_k)
    best = _Tile(_WIDENING, ENGINE_PRODUCTS.widening_rows[-1], outputs, step_k)
    least_cycles = float("inf")
    for rows in ENGINE_PRODUCTS.widening_rows:
        step_cycles = 2.0 * rows * outputs * step_k / run.flop_per_cycle
        step_cycles += outputs * step_k / ENGINE_PRODUCTS.weights_per_cycle
        tiles = ceil(op.m / rows) * ceil(op.n / outputs)
        for parts in range(1, ENGINE_PRODUCTS.widening_parts + 1):
            rounds = ceil(tiles * parts / (slots * chip.sm_count))
            cycles = slots * rounds * (ceil(steps / parts) * step_cycles)
            cycles += (parts > 1) * MOVED_SUM_BYTE * op.m * op.n * parts / chip.l2_byte_per_cycle
            if cycles < least_cycles:
                least_cycles = cycles
                best = _Tile(_WIDENING, rows, outputs, step_k, split=parts)
    weights = "int4" if op.weights == "int4" else "int8"
    return best._replace(kernel=f"{_WIDENING}.{weights}")


def _choose_tile(op: NarrowProduct, run: OperatorRun) -> _Tile:
    """Return the kernel of a product and its tile.

    Blackwell's tensor cores apply scales of fp4 themselves, so that nothing is promoted between
    steps. Its tile is the part of an SM in a tile that two share.
    """
    if isinstance(op, ScaledProduct):
        kernel = "scaled.fp8"
    elif isinstance(op, BlockProduct):
        library = "deepgemm" if op.kernel == "deepgemm" else "cutlass"
        kernel = "block.fp4" if op.dtype is Dtype.FP4 else f"block.{library}"
    elif op.kernel == "cutlass" and run.chip.style is LibraryStyle.AMPERE:
        assert isinstance(op, WeightOnlyProduct)
        return _choose_widening_tile(op, run)
    elif op.kernel == "marlin":
        assert isinstance(op, WeightOnlyProduct)
        weights = "fp8" if op.weights == "fp8" else "int4"
        return _Tile(f"weight_only.marlin.{weights}", *choose_tile("weight_only.marlin", op.m))
    else:
        kernel = MACHETE_FAMILY
    return _Tile(kernel, *choose_tile(kernel, op.m, op.n, op.k))


register_kernels(*NarrowProduct.__subclasses__(), mapping=count_each(count_narrow_product))
