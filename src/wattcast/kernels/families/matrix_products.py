"""Matrix products, and point convolutions, which libraries run as products too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import attrgetter

import numpy as np

from wattcast.core import Dtype
from wattcast.core.arrays import (
    Array,
    CodedColumn,
    map_distinct,
)
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.families.product_shapes import (
    CUDA_CORE_FORMATS,
    ProductShapes,
    choice_columns,
    collect_shapes,
    product_features,
)
from wattcast.kernels.families.product_tiles import (
    LibraryRules,
    fastest_tile,
    reread_byte,
    tile_columns,
)
from wattcast.kernels.kernel_choice import (
    TF32_CODE,
    ProductSizes,
    pick_kernels,
)
from wattcast.kernels.kernel_labels import (
    KERNEL_KINDS,
    TILES,
    KernelLabel,
)
from wattcast.kernels.kernel_picks import KernelPicks, blend_families
from wattcast.kernels.kernel_table import (
    SUM_BYTE,
    Columns,
    ConditionColumns,
    FamilyColumns,
    LibraryStyle,
    ReferenceChip,
    RunCondition,
    resident_share,
)
from wattcast.workload.operator_base import Operator, index_words
from wattcast.workload.operator_types import Bmm, Linear

_SHAPE_FEATURES = (
    "linear",
    "straight",
    "left_turned",
    "warm",
    "odd",
    "half",
    "bias",
    "dtype",
    "weight_width",
)

_CUT = 1.01  # parts of k, averaged over kernels, above which a product is cut
_FORMS = 4  # of a format: slim or not, fast or not


def product_work(
    ops: Sequence[Operator],
    conditions: ConditionColumns,
    rate: Array,
    reference: ReferenceChip,
) -> FamilyColumns:
    """Return kernel families, work columns and features of products."""
    shapes = collect_shapes(ops)
    columns = _describe_shapes(conditions, shapes)
    picks = _pick_kernels(
        ops,
        conditions,
        shapes,
        columns,
        rate,
        reference,
    )
    least_feed = 1.0 if reference.style is LibraryStyle.AMPERE else 0.0
    tile = tile_columns(
        shapes.sizes,
        shapes.width,
        shapes.out_width,
        rate,
        picks,
        reference,
        least_feed,
    )
    read_byte, write_byte = _dram_byte(shapes, conditions, tile, reference)

    # A sum of a filter's gradient for each image, and sums of a split K
    launches = 1.0 + (shapes.parts_byte > 0).astype(np.float64)
    between_byte = shapes.parts_byte
    split = tile["split"]
    if (split > 1.0).any():
        launches = launches + np.minimum(split - 1.0, 1.0)
        split_byte = SUM_BYTE * split * shapes.b * shapes.m * shapes.n
        between_byte = np.where(split > _CUT, split_byte, 0.0) + between_byte
    work = {
        "units": tile["units"],
        "unit_flop": tile["unit_flop"],
        "steps": tile["steps"],
        "launches": launches,
        "l2_byte": tile["load_byte"],
        "store_byte": tile["out_byte"],
        "between_byte": between_byte,
        "shared_byte": tile["shared_byte"] + tile["out_byte"],
        "dram_read_byte": read_byte,
        "dram_write_byte": write_byte,
        "slots": tile["slots"],
    }
    families, likelihoods = _name_families(ops, shapes, picks, reference)
    plain, logs, aligned = product_features(shapes.sizes, tile, reference)
    plain |= {name: columns[name] for name in _SHAPE_FEATURES}
    return FamilyColumns(
        families,
        work,
        plain | likelihoods,
        logs,
        aligned,
    )


def _dram_byte(
    shapes: ProductShapes,
    conditions: ConditionColumns,
    tile: Columns,
    reference: ReferenceChip,
) -> tuple[Array, Array]:
    """Return the bytes that products read from device memory and write to it.

    Weights come from there unless they were measured warm; activations only where they outgrow L2.
    """
    right = shapes.b * shapes.n * shapes.k * shapes.weight_width
    # A filter that all images share counts once.
    lefts = np.where(shapes.shares_left > 0, 1.0, shapes.b)
    left_byte = lefts * shapes.m * shapes.k * shapes.width
    operands = left_byte + right
    out = tile["out_byte"]

    working_sets = np.array([operands, left_byte]) + out
    resident, resident_activations = (
        resident_share(working_sets, reference.l2_byte) * ~conditions.cold
    )
    streams = (shapes.linear > 0) & ~conditions.warm
    activation_share = np.where(streams, resident_activations, resident)
    weight_share = np.where(streams, 0.0, resident)
    read = right * (1.0 - weight_share) + left_byte * (1.0 - activation_share)
    read += (
        reread_byte(
            shapes.m,
            shapes.n,
            operands,
            resident,
            tile,
        )
        + shapes.bias_byte
    )
    return read, out * (1.0 - activation_share)


def product_choice_inputs(
    ops: Sequence[Operator], conditions: ConditionColumns
) -> tuple[Sequence[str], ProductSizes, Columns]:
    """Return what the kernel choice sees of products: their choosers, sizes and shapes."""
    shapes = collect_shapes(ops)
    return _name_choosers(ops, shapes), shapes.sizes, _describe_shapes(conditions, shapes)


def _describe_shapes(conditions: ConditionColumns, shapes: ProductShapes) -> Columns:
    straight = shapes.straight
    if not conditions.usual:
        straight = np.maximum(straight, conditions.straight)
    return choice_columns(*shapes.sizes) | {
        "linear": shapes.linear,
        "straight": straight,
        "left_turned": shapes.left_turned,
        "warm": shapes.linear * conditions.warm,
        "odd": shapes.odd,
        "half": shapes.half,
        "bias": (shapes.bias_byte > 0).astype(np.float64),
        "dtype": shapes.code,
        "weight_width": shapes.weight_width,
    }


def _name_choosers(ops: Sequence[Operator], shapes: ProductShapes) -> CodedColumn[str]:
    """Return the chooser of each product.

    Products for which a library chooses among the same kernels share one.
    """
    dtypes = index_words(ops, attrgetter("dtype"))
    aligned_names = [_CHOOSERS.get(dtype, "half") for dtype in dtypes.values]
    unaligned_names = [
        name if name in ("fp32", "tf32") else f"{name}-unaligned" for name in aligned_names
    ]
    unaligned_place = dtypes.place + len(aligned_names)
    place = np.where(shapes.aligned > 0, dtypes.place, unaligned_place)
    return CodedColumn(aligned_names + unaligned_names, place)


_CHOOSERS = {
    Dtype.FP8: "fp8",
    Dtype.INT8: "fp8",
    Dtype.TF32: "tf32",
    Dtype.FP32: "fp32",
    Dtype.FP64: "fp64",
}


def _pick_kernels(
    ops: Sequence[Operator],
    conditions: ConditionColumns,
    shapes: ProductShapes,
    columns: Columns,
    rate: Array,
    reference: ReferenceChip,
) -> KernelPicks:
    return pick_kernels(
        reference.choice,
        _name_choosers(ops, shapes),
        conditions.ran,
        shapes.sizes,
        columns,
        lambda: _choose_fastest(ops, shapes, rate, reference),
        reference.sm_count,
    )


def pick_products(
    op: Operator,
    condition: RunCondition,
    rate: float,
    reference: ReferenceChip,
) -> list[tuple[KernelLabel, float]]:
    """Return the kernels that one product may run and how likely each is, the likeliest first.

    ``rate`` is the arithmetic of an SM per cycle on the product's pipe.
    """
    conditions = ConditionColumns.from_conditions([condition])
    shapes = collect_shapes([op])
    columns = _describe_shapes(conditions, shapes)
    picks = _pick_kernels(
        [op],
        conditions,
        shapes,
        columns,
        np.array([rate]),
        reference,
    )
    likely = []
    for place in np.argsort(-picks.share[0], kind="stable").tolist():
        share = float(picks.share[0, place])
        if share > 0:
            kind = KERNEL_KINDS[int(picks.kind[0, place])]
            sides = int(picks.tile_n[0, place]), int(picks.tile_m[0, place])
            label = KernelLabel(kind, *sides, split=bool(picks.split[0, place] != 1.0))
            likely.append((label, share))
    return likely


def _choose_fastest(
    ops: Sequence[Operator],
    shapes: ProductShapes,
    rate: Array,
    reference: ReferenceChip,
) -> list[KernelLabel]:
    """Return the kernels that a library takes where no choice was fitted."""
    dtypes = index_words(ops, attrgetter("dtype"))
    is_simt = map_distinct(CUDA_CORE_FORMATS.__contains__, dtypes)
    is_aligned = shapes.aligned > 0
    # Other products in tf32 take long over each step of K, so that a split pays.
    is_fast_tf32 = (shapes.code == TF32_CODE) & is_aligned
    rules = LibraryRules(
        slim=is_aligned & ~is_simt,
        whole=is_simt,
        cuda=is_simt,
        reduce_cycles=np.where(is_fast_tf32, TILES.tf32_reduce_cycles, TILES.reduce_cycles),
        large_tiles=TILES.large_tiles if reference.style is LibraryStyle.AMPERE else 0.0,
    )
    tile = fastest_tile(
        shapes.sizes,
        shapes.width,
        rate,
        rules,
        reference,
    )

    labels = []
    for row, (n, m, split) in enumerate(zip(*tile, strict=True)):
        kind = _choose_kind(
            bool(is_simt[row]),
            bool(is_aligned[row]),
            bool(shapes.odd[row] > 0),
            float(shapes.m[row]),
            reference.style,
        )
        labels.append(KernelLabel(kind, int(n), int(m), bool(split > 1)))
    return labels


def _choose_kind(
    simt: bool,
    aligned: bool,
    odd: bool,
    rows: float,
    style: LibraryStyle,
) -> str:
    """Return the kind of kernel where no choice was fitted.

    Hopper's kernels need 16-byte rows of both operands and of the result; odd sizes fall back
    furthest. Libraries before Hopper have Ampere's kernels as their fast ones.
    """
    if rows <= 1 and (simt or not aligned):
        return "vector"
    if simt:
        return "simt"
    if aligned:
        return "ampere" if style is LibraryStyle.AMPERE else "hopper"
    return "turing" if odd else "ampere"


def _name_families(
    ops: Sequence[Operator],
    shapes: ProductShapes,
    picks: KernelPicks,
    reference: ReferenceChip,
) -> tuple[CodedColumn[str], Columns]:
    """Return the likeliest kernel family of each row, and how likely each family is."""
    dtypes = index_words(ops, attrgetter("dtype"))
    forms = []
    for dtype in dtypes.values:
        forms += [(dtype, slim, fast) for slim in (False, True) for fast in (False, True)]
    is_slim = shapes.m <= TILES.slim_tokens
    is_fast = (shapes.aligned > 0) & (reference.style is LibraryStyle.AMPERE)
    form_of_row = CodedColumn(forms, _FORMS * dtypes.place + 2 * is_slim + is_fast)
    return blend_families(_kernel_family, form_of_row, picks)


@cache
def _kernel_family(form: tuple[Dtype, bool, bool], kind: str) -> str:
    """Return the kernel family: by the kind of kernel and its pipe.

    ``form`` is the number format, whether tokens are few, and whether Ampere's kernels are the
    library's fast ones. Products of a few tokens have their own family.
    """
    dtype, is_slim, is_fast = form
    if kind == "hopper" and is_slim and dtype is not Dtype.TF32:  # in tf32 no tile is slim
        return "gemm.row"
    if kind == "hopper" or (is_fast and kind == "ampere"):
        return f"gemm.{_PIPES.get(dtype, 'tensor')}"
    is_wide = dtype in (Dtype.FP32, Dtype.FP64, Dtype.TF32)
    if is_wide and kind in ("ampere", "vector"):
        return f"gemm.{kind}.wide"
    return f"gemm.{kind}"


_PIPES = {
    Dtype.FP8: "fp8",
    Dtype.INT8: "fp8",
    Dtype.TF32: "tf32",
}

PRODUCT_KERNELS = KernelMapping(
    product_work, tensor_cores=True, choice_inputs=product_choice_inputs
)
register_kernels(Linear, Bmm, mapping=PRODUCT_KERNELS)
