"""The experts of a mixture layer in an engine: grouped products of the tokens that visit each.

The tokens of each visited expert are padded to whole blocks. vLLM runs its own Triton kernels, or
on other chips and formats TensorRT-LLM's, Marlin's, or OpenAI's Triton kernels (``oai``).
"""

from __future__ import annotations

from functools import cache
from math import ceil, expm1
from typing import NamedTuple

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import Dtype
from wattcast.core.strict_files import read_shipped_table
from wattcast.kernels.families import register_kernels
from wattcast.kernels.families.engine.engine_counts import (
    CountedKernel,
    EngineWork,
    OperatorRun,
    count_each,
    fill_slots,
)
from wattcast.kernels.kernel_table import (
    ENGINE_OF_2025,
    LibraryStyle,
    ReferenceChip,
    streamed_share,
)
from wattcast.kernels.tile_rules import choose_tile
from wattcast.workload.engine_operators import (
    EXPERT_LIBRARIES,
    RANK_EXPONENTS,
    SMALL_TILES,
    FusedExperts,
)


class EngineExpertCoefficients(Coefficients):
    """What kernels of experts do besides multiplying."""

    marlin_flop_per_cycle: float  # of padded tiles, that an SM gets through in Marlin's kernels
    marlin_byte_per_cycle: float  # of weights
    oai_weights_per_cycle: float  # that an SM widens in OpenAI's kernels before it multiplies
    layer_launches: float  # of a layer: routing, padding, two products, the gate and the sum
    fp8_launches: float  # further ones, which find the scales of fp8 inputs
    block_scale_launches: float  # the same, of blocks
    oai_launches: float  # kernels of a layer
    oai_sharing_launches: float  # further ones where GPUs share the experts
    oai_steps: float  # dependent steps of a tile
    oai_widening_byte: float  # of shared memory that draw as much as widening a weight
    zero_steps: float  # that a tile of zeros takes
    # rate of Triton's kernels over the usual one, with block scales on Blackwell (vLLM of 2025)
    scaled_triton_rate: float
    padded_rate: float  # of the tensor cores, that DeepGEMM's padded tiles reach on Blackwell
    padded_toggling: float  # energy of multiplying a row that holds no token, over that of one
    padded_launches: float  # kernels of a layer around DeepGEMM's two products
    crossings: float  # how often a loaded byte crosses shared memory
    slots: float  # tiles that an SM runs at once
    step_k: float  # weights along k of a dependent step
    marlin_fill: float  # of a block, below which vLLM takes it
    marlin_rows: tuple[float, ...]  # of blocks of tokens of Marlin, of which the smallest is taken
    marlin_outputs: float  # of a tile of Marlin
    oai_rows: tuple[float, float]  # of the smallest and the largest block of OpenAI's kernels
    oai_outputs: float  # of a tile of OpenAI's kernels
    padded_rows: float  # of a tile of DeepGEMM's, and its outputs
    most_resident: float  # weights over L2's capacity, beyond which learned corrections see no more


ENGINE_EXPERTS = load_coefficients("engine_experts", EngineExpertCoefficients)

_BF16_BYTE = float(Dtype.BF16.byte)
_HANDED_ON_BYTE = 2.0 * _BF16_BYTE  # of a value that is written and read again
_QUANTIZED_BYTE = _BF16_BYTE + Dtype.FP8.byte  # read in bf16, written in fp8
_GATED_BYTE = 3.0 * _BF16_BYTE  # a gate and a value are read, their product written
_FLOP_PER_WEIGHT = 6.0  # of a row and a hidden and an inner size: three multiply-adds
_MATRICES = 3.0  # of an expert: a gate, a value and the way back
_FP8_HANDED_ON_BYTE = 2.0 * Dtype.FP8.byte  # of an fp8 value that is written and read again


class ExpertTile(NamedTuple):
    """The sides of a tile."""

    rows: int  # of a block of tokens
    outputs: float


class _Layer(NamedTuple):
    """A layer of experts, the library that runs it, and its tiles."""

    op: FusedExperts
    library: str
    tile: ExpertTile

    @property
    def is_fp8(self) -> bool:
        return self.op.dtype is Dtype.FP8

    @property
    def is_narrow(self) -> bool:
        return self.op.weights in ("int4", "fp4")

    @property
    def multiplies_fp4(self) -> bool:
        """Whether tensor cores multiply fp4 by fp4, rather than weights that were widened."""
        return self.op.dtype is Dtype.FP4

    @property
    def is_triton(self) -> bool:
        """Whether vLLM's own kernels run it."""
        return self.library.startswith("triton")

    @property
    def format(self) -> str:
        """The format that decides which kernels there are."""
        if self.multiplies_fp4:
            return "fp4"
        if self.is_narrow:
            return "narrow"
        if self.op.scales == "block":
            return "block"
        return "fp8" if self.is_fp8 else "half"


class _TileCosts(NamedTuple):
    """Totals of the tiles of both products of a layer.

    ``unit_flop`` and ``steps`` are of one tile, ``slots`` of one SM.
    """

    units: float  # tiles
    unit_flop: float
    steps: float  # dependent ones
    slots: float  # tiles that an SM holds
    l2_byte: float  # that tiles load from L2
    shared_byte: float  # that cross shared memory
    padded_tokens: float  # rows of all blocks, whether they hold a token or not


def count_experts(op: FusedExperts, run: OperatorRun) -> CountedKernel:
    """Return the kernel and the work of fused experts."""
    chip = run.chip
    if _pads_experts(op, chip):
        return _count_padded_experts(op, run)
    library = op.kernel or _choose_library(op, chip)
    layer = _Layer(op, library, choose_expert_tile(op, library))
    tiles = _cost_tiles(layer, run)

    # Weights stream from device memory unless they are warm; tokens pass through L2.
    weights_byte = op.active * op.expert_byte
    missing = run.missing_share(weights_byte, streams=True)
    token_byte = _HANDED_ON_BYTE * op.tokens * op.hidden
    evicted_byte = token_byte * (1.0 - float(streamed_share(token_byte, chip.l2_byte)))
    work = EngineWork(
        units=tiles.units,
        unit_flop=tiles.unit_flop,
        steps=tiles.steps,
        launches=_count_launches(layer),
        l2_byte=tiles.l2_byte,
        shared_byte=tiles.shared_byte,
        dram_read_byte=weights_byte * missing + 0.5 * evicted_byte,
        dram_write_byte=0.5 * evicted_byte,
        between_byte=_between_byte(layer),
        slots=tiles.slots,
    )

    plain, logs = _describe_layer(layer, tiles.units, tiles.padded_tokens, run)
    return CountedKernel(f"gemm.engine.experts.{layer.format}", work, plain, logs)


def _describe_layer(
    layer: _Layer,
    units: float,
    padded_tokens: float,
    run: OperatorRun,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the features of a layer: plain ones, and those of which the logarithm is taken later."""
    op = layer.op
    weights_byte = op.active * op.expert_byte
    plain = {
        "top_k": op.top_k,
        "fp8": layer.is_fp8,
        "blockwise": op.scales == "block",
        "narrow": layer.is_narrow,
        "fp4": layer.multiplies_fp4,
        # of the H200 on every chip: tiles tuned there, on which the corrections were learned
        "tuned": has_tuned_tiles(op.experts, op.intermediate, layer.format),
        # only one of the two is ever set: models set a skew, rows of kernels a routing
        "skewed": RANK_EXPONENTS.get(op.routing, 0.0) + op.skew,
        "fill": fill_slots(units, run.chip.sm_count),
        # share of the rows that hold a token, 1 without padding: files have it by this name
        "padding": op.picks / padded_tokens,
        "active_share": op.active / op.experts,
        "block_m": layer.tile.rows,
        "held": min(weights_byte / run.chip.l2_byte, ENGINE_EXPERTS.most_resident),
    }
    plain |= {name: name in layer.library for name in EXPERT_LIBRARIES}
    logs = {
        "log_tokens": op.tokens,
        "log_experts": op.experts,
        "log_hidden": op.hidden,
        "log_inner": op.intermediate,
        "log_active": op.active,
        "log_each": op.picks / op.active,
        "log_units": units,
        "log_elsewhere": 1.0 + op.elsewhere,
    }
    return plain, logs


def _pads_experts(op: FusedExperts, chip: ReferenceChip) -> bool:
    """Tell whether vLLM runs DeepGEMM, as it did in 2025 on Blackwell (``vllm-2025``).

    ``all_picks`` is 0 where eight or more GPUs share a layer.
    """
    return _is_block_scaled_blackwell_2025(op, chip) and not op.kernel and op.all_picks > 0


def _count_padded_experts(op: FusedExperts, run: OperatorRun) -> CountedKernel:
    """Return the work of DeepGEMM's experts as vLLM of 2025 ran them on Blackwell.

    The rows of every expert begin a tile of 128, so that there is room for all visits and 127 rows
    more for each expert (``compute_aligned_M``), whichever of them hold tokens. Tensor cores
    multiply all of them, since the host does not know how many do. The gate and the quantising of
    its results are kernels of their own, over all rows.
    """
    side = ENGINE_EXPERTS.padded_rows
    hidden = float(op.hidden)
    inner = float(op.intermediate)
    blocks = ceil((op.all_picks + op.experts * (side - 1.0)) / side)
    rows = blocks * side
    inner_tiles = ceil(2.0 * inner / side)
    hidden_tiles = ceil(hidden / side)
    units = blocks * (inner_tiles + hidden_tiles)
    flop = _FLOP_PER_WEIGHT * rows * hidden * inner
    # a step along k loads a byte of each row and one of each output: tokens and weights are fp8
    load_byte = 2.0 * side * blocks * (inner_tiles * hidden + hidden_tiles * inner)

    weights_byte = op.active * op.expert_byte
    missing = run.missing_share(weights_byte, streams=True)
    # a tile waits for its expert's weights, which no other tile shares, before it multiplies
    chip = run.chip
    loading_cycles = weights_byte * missing / chip.dram_byte_per_cycle
    multiplying = flop / ENGINE_EXPERTS.padded_rate
    loading = run.flop_per_cycle * chip.sm_count * loading_cycles
    # what kernels hand one another: results of the first product, of the gate, quantised, and of
    # the second product
    first_byte = 2.0 * _HANDED_ON_BYTE * inner  # gates and values
    gated_byte = _HANDED_ON_BYTE * inner
    second_byte = _BF16_BYTE * hidden
    row_byte = rows * (first_byte + gated_byte + _FP8_HANDED_ON_BYTE * inner + second_byte)
    token_byte = _QUANTIZED_BYTE * op.picks * hidden + _BF16_BYTE * op.picks * hidden
    work = EngineWork(
        units=units,
        unit_flop=(multiplying + loading) / units,
        steps=(hidden + inner) / ENGINE_EXPERTS.step_k,
        launches=ENGINE_EXPERTS.padded_launches,
        l2_byte=load_byte,
        shared_byte=ENGINE_EXPERTS.crossings * load_byte,
        dram_read_byte=weights_byte * missing,
        dram_write_byte=0.0,
        between_byte=row_byte + token_byte,
        padded_flop=ENGINE_EXPERTS.padded_toggling * max(flop - op.flop, 0.0),
    )
    layer = _Layer(op, "deepgemm", ExpertTile(int(side), side))
    plain, logs = _describe_layer(layer, units, rows, run)
    return CountedKernel("gemm.engine.padded_experts", work, plain, logs)


def _cost_tiles(layer: _Layer, run: OperatorRun) -> _TileCosts:
    """Return the tiles of a layer and what one of them costs in its library."""
    op = layer.op
    hidden = float(op.hidden)
    inner = float(op.intermediate)
    rows, outputs = layer.tile

    # Tiles: blocks of tokens of all visited experts, by outputs of the first product and the second
    blocks = max(op.count_blocks(rows), 1.0)
    inner_tiles = ceil(2.0 * inner / outputs)
    hidden_tiles = ceil(hidden / outputs)
    across = inner_tiles + hidden_tiles
    units = blocks * across
    unit_flop = _FLOP_PER_WEIGHT * blocks * rows * hidden * inner / units

    # Bytes: each step along k loads the tokens of a block and a weight of each output
    loaded_k = blocks * (inner_tiles * hidden + hidden_tiles * inner)
    byte_per_weight = op.expert_byte / (_MATRICES * hidden * inner)
    load_byte = loaded_k * (rows * op.dtype.byte + outputs * byte_per_weight)
    tiles = _TileCosts(
        units=units,
        unit_flop=unit_flop,
        steps=(hidden + inner) / ENGINE_EXPERTS.step_k,
        slots=ENGINE_EXPERTS.slots,
        l2_byte=load_byte,
        shared_byte=ENGINE_EXPERTS.crossings * load_byte,
        padded_tokens=blocks * rows,
    )
    if _is_block_scaled_blackwell_2025(op, run.chip) and layer.is_triton:
        # shared_byte stays: it draws power and takes no time
        slower = 1.0 / ENGINE_EXPERTS.scaled_triton_rate
        tiles = tiles._replace(
            unit_flop=slower * tiles.unit_flop,
            l2_byte=slower * tiles.l2_byte,
        )
    if layer.is_triton:
        return _add_zero_tiles(tiles, _count_zero_blocks(layer) * across, run)
    if layer.library == "oai":
        return _widen_weights(tiles, loaded_k * outputs, run)
    if layer.library == "marlin":
        return _limit_to_marlin(tiles, op.expert_byte / across, run)
    return tiles


def _add_zero_tiles(
    tiles: _TileCosts,
    zero_tiles: float,
    run: OperatorRun,
) -> _TileCosts:
    """Add the steps of Triton's tiles for experts on other GPUs, which write zeros."""
    slots_of_chip = ENGINE_EXPERTS.slots * run.chip.sm_count
    zero_steps = ENGINE_EXPERTS.zero_steps * zero_tiles / max(tiles.units, slots_of_chip)
    return tiles._replace(steps=tiles.steps + zero_steps)


def _widen_weights(
    tiles: _TileCosts,
    widened: float,
    run: OperatorRun,
) -> _TileCosts:
    """Add what it takes OpenAI's kernels to widen so many weights before they multiply."""
    widening_cycles = widened / (tiles.units * ENGINE_EXPERTS.oai_weights_per_cycle)
    return tiles._replace(
        slots=1.0,
        steps=ENGINE_EXPERTS.oai_steps,
        unit_flop=tiles.unit_flop + run.flop_per_cycle * widening_cycles,
        shared_byte=tiles.shared_byte + ENGINE_EXPERTS.oai_widening_byte * widened,
    )


def _limit_to_marlin(
    tiles: _TileCosts,
    tile_weight_byte: float,
    run: OperatorRun,
) -> _TileCosts:
    """Slow tiles to the rates at which Marlin multiplies, and loads the weights of each."""
    flop_cycles = tiles.unit_flop / ENGINE_EXPERTS.marlin_flop_per_cycle
    byte_cycles = tile_weight_byte / ENGINE_EXPERTS.marlin_byte_per_cycle
    unit_flop = max(tiles.unit_flop, run.flop_per_cycle * max(flop_cycles, byte_cycles))
    return tiles._replace(unit_flop=unit_flop)


def _is_block_scaled_blackwell_2025(op: FusedExperts, chip: ReferenceChip) -> bool:
    """Tell whether experts with scales of blocks run on Blackwell in vLLM of 2025."""
    return chip.engine == ENGINE_OF_2025 and chip.is_blackwell and op.scales == "block"


def _choose_library(op: FusedExperts, chip: ReferenceChip) -> str:
    """Return the library that an engine takes for the weights on a chip.

    TensorRT-LLM's generated kernels (``trtllm``) are its own choice on Blackwell and vLLM's. On
    Hopper it runs CUTLASS's, but gpt-oss by OpenAI's.
    """
    if _is_block_scaled_blackwell_2025(op, chip):
        return "triton"  # where eight GPUs share a layer; DeepGEMM's elsewhere
    is_narrow = op.weights in ("int4", "fp4")
    if chip.engine == "trtllm" and not chip.is_blackwell and not is_narrow:
        return "cutlass"
    if chip.is_blackwell and op.weights != "int4":
        return "trtllm"
    if op.weights == "fp4" and chip.style is LibraryStyle.HOPPER:
        return "oai"
    return "marlin" if op.weights in ("int4", "fp4") else "triton"


def choose_expert_tile(op: FusedExperts, library: str = "triton") -> ExpertTile:
    """Return the tile that vLLM chooses without a tuned table (``get_default_config``).

    It looks at the tokens of all GPUs that share the experts. Marlin's and OpenAI's tiles follow
    the visits of all GPUs over the experts of this one, as vLLM has them.
    """
    visits = op.picks + op.elsewhere
    if library == "marlin":
        mean_tokens = visits / op.experts
        *smaller_rows, most_rows = ENGINE_EXPERTS.marlin_rows
        for rows in smaller_rows:
            if mean_tokens < ENGINE_EXPERTS.marlin_fill * rows:
                return ExpertTile(int(rows), ENGINE_EXPERTS.marlin_outputs)
        return ExpertTile(int(most_rows), ENGINE_EXPERTS.marlin_outputs)
    if library == "oai":
        # The power of two at or above the mean tokens of an expert
        whole_tokens = max(visits // op.experts, 1)
        power = 1 << (whole_tokens - 1).bit_length()
        least_rows, most_rows = ENGINE_EXPERTS.oai_rows
        rows = min(max(power, least_rows), most_rows)
        return ExpertTile(int(rows), ENGINE_EXPERTS.oai_outputs)
    tokens = op.all_tokens or op.tokens
    if op.scales == "block":
        kernel = "experts.block"
    elif library == SMALL_TILES:
        kernel = "experts.few_small" if tokens <= op.experts else "experts.small"
    else:
        kernel = "experts"
    tile = choose_tile(kernel, tokens)
    return ExpertTile(int(tile.rows), tile.outputs)


def _count_launches(layer: _Layer) -> float:
    """Return the kernels of a layer; scales of fp8 inputs are found by kernels of their own."""
    has_block_scales = layer.op.scales == "block"
    if layer.library == "oai":
        shared = ENGINE_EXPERTS.oai_sharing_launches * (layer.op.gpus > 1)
        return ENGINE_EXPERTS.oai_launches + shared
    if layer.library == "trtllm":
        return ENGINE_EXPERTS.layer_launches + layer.is_fp8 + has_block_scales
    if has_block_scales:
        return ENGINE_EXPERTS.layer_launches + ENGINE_EXPERTS.block_scale_launches
    return ENGINE_EXPERTS.layer_launches + ENGINE_EXPERTS.fp8_launches * layer.is_fp8


def _between_byte(layer: _Layer) -> float:
    """Return the bytes that the kernels of a layer hand one another, each written and read again.

    They are results of the first product, of the gate and of the second. TensorRT-LLM gates in its
    first product unless scales are of blocks, and knows a tensor's scales before; OpenAI's kernels
    gate there too. Visits to experts of other GPUs are zeros, which vLLM's own kernels and Marlin's
    write, gate and sum up.
    """
    op = layer.op
    picks = float(op.picks)
    hidden = float(op.hidden)
    inner = float(op.intermediate)
    width = op.dtype.byte
    if layer.library == "oai":
        return _HANDED_ON_BYTE * picks * (hidden + inner)
    # To quantise an input, its halves are read and written in a byte each.
    quantized_byte = _QUANTIZED_BYTE * layer.is_fp8
    if layer.library == "trtllm":
        gate_byte = 2.0 * _HANDED_ON_BYTE if op.scales == "block" else 0.0
        results = picks * (_HANDED_ON_BYTE * hidden + (2.0 * width + gate_byte) * inner)
        return results + quantized_byte * op.tokens * hidden

    # The first product has a gate and a value for each input of the second.
    products = _HANDED_ON_BYTE * picks * (2.0 * inner + hidden)
    gates = (_BF16_BYTE + width) * picks * inner
    quantized = quantized_byte * (picks * inner + op.tokens * hidden)
    between = products + gates + quantized
    if layer.is_triton or layer.library == "marlin":
        inner_byte = _GATED_BYTE + _HANDED_ON_BYTE * layer.is_triton + quantized_byte
        between += op.elsewhere * (_HANDED_ON_BYTE * hidden + inner_byte * inner)
    return between


def _count_zero_blocks(layer: _Layer) -> float:
    """Return the blocks of zeros that vLLM's Triton kernels write for experts of other GPUs.

    ``moe_align_block_size`` pads the tokens of those experts to whole blocks too.
    """
    op = layer.op
    experts_elsewhere = float(op.experts * (op.gpus - 1))
    if not (experts_elsewhere and op.elsewhere):
        return 0.0
    visited = experts_elsewhere * -expm1(-op.elsewhere / experts_elsewhere)
    return max(visited, op.elsewhere / layer.tile.rows + 0.5 * visited)


def has_tuned_tiles(
    experts: int,
    intermediate: int,
    kind: str,
    gpu: str = "h200",
) -> bool:
    """Tell whether vLLM ships tiles of its Triton kernels that were tuned on a GPU for the experts.

    ``kind`` is half, fp8 (scales of a tensor) or block. Names are those of vLLM 0.25.1 on the
    H200, of vLLM 0.27.1 on the A100.
    """
    return (gpu, experts, intermediate, kind) in _tuned_experts()


@cache
def _tuned_experts() -> frozenset[tuple[str, int, int, str]]:
    rows = read_shipped_table("wattcast.kernels.families.engine", "tuned_experts.csv")
    return frozenset(
        (row["gpu"], int(row["experts"]), int(row["intermediate"]), row["kind"]) for row in rows
    )


register_kernels(FusedExperts, mapping=count_each(count_experts))
