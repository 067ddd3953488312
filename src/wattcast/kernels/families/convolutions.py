"""Convolutions as cuDNN runs them: implicit matrix products, and kernels that turn or pad operands.

Kernels walk over one tap of the filter at a time and pad its channels. Tensor-core kernels want
channels innermost, CUDA-core kernels channels outermost: other layouts are turned first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import Dtype
from wattcast.core.arrays import (
    Array,
    CodedColumn,
    Mask,
    index_distinct,
)
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.families.convolution_shapes import (
    ConvolutionShapes,
    collect_shapes,
    describe_shapes,
    shape_features,
)
from wattcast.kernels.families.depthwise_convolutions import (
    DepthwiseWork,
    depthwise_kind,
    depthwise_work,
)
from wattcast.kernels.families.matrix_products import PRODUCT_KERNELS
from wattcast.kernels.families.product_shapes import is_point_convolution, product_features
from wattcast.kernels.families.product_tiles import (
    LibraryRules,
    fastest_tile,
    tile_columns,
)
from wattcast.kernels.kernel_choice import ProductSizes, pick_kernels
from wattcast.kernels.kernel_labels import (
    HOPPER_KIND,
    KERNEL_KINDS,
    NOT_RUN,
    VECTOR_LABEL,
    KernelLabel,
)
from wattcast.kernels.kernel_picks import KernelPicks, blend_families
from wattcast.kernels.kernel_table import (
    Columns,
    ConditionColumns,
    FamilyColumns,
    LibraryStyle,
    ReferenceChip,
    as_columns,
    resident_share,
)
from wattcast.workload.operator_types import Conv2d


class ConvolutionCoefficients(Coefficients):
    """What kernels cost that turn or pad operands, and when Hopper's split K."""

    slow_pad: float  # to pad an element, over turning one
    slow_transform: float  # to turn and pad an element of a filter at once
    start: float  # fixed time of a layout kernel, over that of the product's kernel
    transform_start: float  # the same of a kernel that turns and pads a filter
    many_pixels: float  # beyond which few tiles of a filter's gradient share K
    split_blocks: float  # of an SM, that a split of K aims at before Hopper
    turn_side: float  # of what a block of a layout kernel turns
    tap_byte: float  # of a filter tap that an implicit product takes at a time
    many_channels: int  # beyond which Hopper's kernels take twice as many
    least_tap_channels: float  # that Hopper's kernels take at a time at least
    winograd_saving: float  # how much less work Winograd's kernels do than direct ones


CONVOLUTIONS = load_coefficients("convolutions", ConvolutionCoefficients)

_SQUARE_SIDE = 3  # taps of the usual filter, which has kernels of its own

_SAVED_BY_WINOGRAD = ("unit_flop", "steps", "load_byte", "shared_byte")
_WHOLE_TAPS = np.array([kind in ("direct", "simt", "plain") for kind in KERNEL_KINDS])


class _Layouts(NamedTuple):
    """How likely operands of each row are turned or padded, and the work of doing so,
    ``(row,)``.
    """

    turned: Array
    padded_in: Array
    padded_out: Array
    byte: Array  # read and written by layout kernels
    elements: Array  # that they turn, in whole blocks
    launches: Array  # of all kernels; a layout kernel starts in part of the product's time


def convolution_work(
    ops: Sequence[Conv2d],
    conditions: ConditionColumns,
    rate: Array,
    reference: ReferenceChip,
) -> FamilyColumns:
    """Return kernel families, work and features of convolutions that are not point convolutions."""
    shapes = collect_shapes(ops)
    picks = _pick_kernels(
        ops,
        conditions,
        shapes,
        rate,
        reference,
    )
    padded_k = _pad_taps(shapes, picks)
    groups, product_m, product_n, product_k = shapes.product
    tile = tile_columns(
        (groups, product_m, product_n, padded_k),
        shapes.width,
        shapes.width,
        rate,
        picks,
        reference,
    )
    saved_share = _save_by_winograd(ops, shapes, reference)
    tile |= {name: tile[name] * (1.0 - saved_share) for name in _SAVED_BY_WINOGRAD}
    layouts = _choose_layouts(shapes, picks)

    read_byte = _count_read_byte(shapes)
    work = _count_work(
        shapes,
        tile,
        layouts,
        read_byte,
        reference,
    )
    work["padded_flop"] = -saved_share * np.array([op.flop for op in ops], dtype=np.float64)
    depthwise_kinds = _name_depthwise(ops, shapes)
    work = _with_depthwise(work, ops, depthwise_kinds, read_byte + shapes.write_byte)

    families, likelihoods = blend_families(_kernel_family, _find_forms(ops, depthwise_kinds), picks)
    plain, logs, aligned = _describe_rows(shapes, tile, layouts, reference)
    plain["tap_padding"] = padded_k[:, 0] / product_k * (1.0 - shapes.depthwise)
    plain |= likelihoods
    return FamilyColumns(
        families,
        work,
        plain,
        logs,
        aligned,
    )


def _count_read_byte(shapes: ConvolutionShapes) -> Array:
    """Return the bytes that are read, without the pixels that a stride passes over."""
    untouched_byte = shapes.image_byte * (1.0 - shapes.touched_share) * (shapes.dgrad == 0)
    return np.asarray(shapes.read_byte - untouched_byte)


def _find_forms(
    ops: Sequence[Conv2d],
    depthwise_kinds: Sequence[str],
) -> CodedColumn[tuple[bool, str]]:
    """Return whether each convolution has groups, and as which depthwise kind it runs."""
    has_groups = [op.groups > 1 for op in ops]
    return CodedColumn(*index_distinct(zip(has_groups, depthwise_kinds, strict=True)))


def _save_by_winograd(
    ops: Sequence[Conv2d],
    shapes: ConvolutionShapes,
    reference: ReferenceChip,
) -> Array:
    """Return the share of each convolution's work that Winograd's algorithm saves [Lavin2016].

    Where a chip has no TF32, convolutions in fp32 run on CUDA cores, and cuDNN's kernels of 3 x 3
    filters transform tiles of the image so as to multiply less. Elsewhere fp32 convolutions run on
    tensor cores, or by direct kernels, as nearly all did that were measured on an H200.
    """
    if reference.has_tf32 or not np.any(shapes.simt):
        return np.zeros(len(ops))
    is_square = np.array([op.r == op.s == _SQUARE_SIDE for op in ops])
    has_unit_stride = shapes.stride == 1.0
    has_filters = (shapes.groups == 1.0) & (shapes.simt > 0)
    return np.where(
        is_square & has_unit_stride & has_filters,
        1.0 - 1.0 / CONVOLUTIONS.winograd_saving,
        0.0,
    )


def _count_work(
    shapes: ConvolutionShapes,
    tile: Mapping[str, Array],
    layouts: _Layouts,
    read_byte: Array,
    reference: ReferenceChip,
) -> dict[str, Array]:
    """Return the work columns of products and of the kernels that lay their operands out."""
    write_byte = shapes.write_byte
    resident = resident_share(read_byte + write_byte + layouts.byte, reference.l2_byte)
    return {
        "units": tile["units"],
        "unit_flop": tile["unit_flop"],
        "steps": tile["steps"],
        "launches": layouts.launches,
        "l2_byte": tile["load_byte"],
        "store_byte": write_byte,
        "between_byte": layouts.byte,
        "turn_element": layouts.elements,
        "shared_byte": tile["shared_byte"] + write_byte,
        "dram_read_byte": read_byte * (1.0 - resident) + shapes.weight_byte * resident,
        "dram_write_byte": write_byte * (1.0 - resident),
        "slots": tile["slots"],
    }


def _pad_taps(shapes: ConvolutionShapes, picks: KernelPicks) -> Array:
    """Return K of each product, ``(row, pick)``; kernels that walk tap by tap pad its channels."""
    has_many_channels = (shapes.product_c > CONVOLUTIONS.many_channels)[:, np.newaxis]
    hopper_byte = np.where(has_many_channels, 2.0 * CONVOLUTIONS.tap_byte, CONVOLUTIONS.tap_byte)
    tap_byte = np.where(picks.kind == HOPPER_KIND, hopper_byte, CONVOLUTIONS.tap_byte)
    tap_channels = np.maximum(
        tap_byte / shapes.width[:, np.newaxis], CONVOLUTIONS.least_tap_channels
    )
    channels = shapes.product_c[:, np.newaxis]
    padded_channels = np.ceil(channels / tap_channels) * tap_channels
    takes_whole_taps = _WHOLE_TAPS.take(picks.kind)
    taps = shapes.product_taps[:, np.newaxis]
    return taps * np.where(takes_whole_taps, channels, padded_channels)


def _choose_layouts(shapes: ConvolutionShapes, picks: KernelPicks) -> _Layouts:
    """Return how likely each kind of layout kernel runs, and the work of all of them."""
    not_plain = 1.0 - picks.of_kind("plain")
    half_direct = np.where(shapes.width <= 2, picks.of_kind("direct"), 0.0)
    has_product = 1.0 - shapes.depthwise
    wrong_layout = np.where(shapes.simt > 0, shapes.channels_last, 1.0 - shapes.channels_last)
    turned = has_product * wrong_layout * not_plain
    pads = has_product * (1.0 - shapes.simt) * shapes.channels_last * (not_plain - half_direct)
    padded_in = pads * (shapes.inputs % shapes.fast_step != 0)
    padded_out = pads * (shapes.outputs % shapes.fast_step != 0)
    padded = np.maximum(padded_in, padded_out)

    turned_filters = turned * (shapes.taps > 1)
    outputs = shapes.outputs * shapes.groups
    is_ragged = (shapes.simt == 0) & (outputs % shapes.fast_step != 0)

    # Bytes that are padded or turned
    pad_byte = padded_in * shapes.image_byte + padded_out * shapes.out_byte
    pad_byte += padded * shapes.weight_byte
    byte = turned * (shapes.image_byte + shapes.out_byte)
    byte += turned_filters * shapes.weight_byte + pad_byte

    # Starts, each as long as that of a kernel that turns
    transform_start = CONVOLUTIONS.transform_start / CONVOLUTIONS.start
    starts = 2.0 * turned + turned_filters * np.where(is_ragged, transform_start, 1.0)
    starts += padded_in + padded_out + padded
    turned_elements = _count_turned_elements(shapes, turned, turned_filters, is_ragged)
    return _Layouts(
        turned=turned,
        padded_in=padded_in,
        padded_out=padded_out,
        byte=2.0 * byte,
        elements=turned_elements + CONVOLUTIONS.slow_pad * pad_byte / shapes.width,
        launches=1.0 + CONVOLUTIONS.start * starts,
    )


def _count_turned_elements(
    shapes: ConvolutionShapes,
    turned: Array,
    turned_filters: Array,
    is_ragged: Mask,
) -> Array:
    """Return the elements of images, results and filters that are turned, in whole blocks."""
    inputs = shapes.inputs * shapes.groups
    outputs = shapes.outputs * shapes.groups
    image_elements = _count_turned(shapes.batch, shapes.pixels, inputs)
    out_elements = _count_turned(shapes.batch, shapes.out_pixels, outputs)
    ragged_elements = CONVOLUTIONS.slow_transform * shapes.weight_byte / shapes.width
    filter_elements = _count_turned(outputs, shapes.taps, shapes.inputs)
    elements = turned * (image_elements + out_elements)
    elements += turned_filters * np.where(is_ragged, ragged_elements, filter_elements)
    return elements


def _count_turned(
    batch: Array,
    pixels: Array,
    channels: Array,
) -> Array:
    """Return the elements of the whole blocks that turn ``batch`` images."""
    pixel_blocks = np.ceil(pixels / CONVOLUTIONS.turn_side)
    channel_blocks = np.ceil(channels / CONVOLUTIONS.turn_side)
    return np.asarray(batch * pixel_blocks * channel_blocks * CONVOLUTIONS.turn_side**2)


def _name_depthwise(ops: Sequence[Conv2d], shapes: ConvolutionShapes) -> list[str]:
    """Return the kernel of each depthwise convolution; of others nothing."""
    kinds = []
    for op, is_depthwise in zip(ops, shapes.depthwise.tolist(), strict=True):
        kinds.append(depthwise_kind(op) if is_depthwise else "")
    return kinds


def _with_depthwise(
    work: Columns,
    ops: Sequence[Conv2d],
    kinds: Sequence[str],
    moved_byte: Array,
) -> Columns:
    """Return work with the rows of depthwise convolutions replaced."""
    rows = [row for row, kind in enumerate(kinds) if kind]
    if not rows:
        return work
    work = {name: values.copy() for name, values in work.items()}
    depthwise = DepthwiseWork(*as_columns([depthwise_work(ops[row], kinds[row]) for row in rows]))
    work["units"][rows] = depthwise.units
    work["unit_flop"][rows] = depthwise.unit_flop
    work["slots"][rows] = depthwise.slots
    work["steps"][rows] = depthwise.steps
    work["shared_byte"][rows] = depthwise.shared_byte
    work["l2_byte"][rows] = moved_byte[rows] + depthwise.reread_byte
    work["store_byte"][rows] = 0.0
    work["launches"][rows] += depthwise.launches
    return work


def _describe_rows(
    shapes: ConvolutionShapes,
    tile: Columns,
    layouts: _Layouts,
    reference: ReferenceChip,
) -> tuple[Columns, Columns, Columns]:
    """Return features of the learned residual: plain, in logs, and by alignment."""
    plain, logs, aligned = product_features(shapes.product, tile, reference)
    shape_plain, shape_logs, shape_aligned = shape_features(shapes)
    logs |= {
        "log_turns": layouts.elements,
        "log_moved": layouts.byte,
        "log_groups": shapes.groups,
        "log_image": shapes.image_byte,
        "log_out": shapes.out_byte,
    }
    plain |= shape_plain
    plain |= {
        "turned": layouts.turned,
        "padded_in": layouts.padded_in,
        "padded_out": layouts.padded_out,
    }
    aligned |= {"align_side": shapes.pixels} | shape_aligned
    return plain, logs | shape_logs, aligned


def convolution_choice_inputs(
    ops: Sequence[Conv2d], conditions: ConditionColumns
) -> tuple[list[str], ProductSizes, Columns]:
    """Return what the kernel choice sees: choosers (none for depthwise ones), sizes and shapes."""
    shapes = collect_shapes(ops)
    return _name_choosers(ops, shapes), shapes.product, describe_shapes(shapes)


def _name_choosers(ops: Sequence[Conv2d], shapes: ConvolutionShapes) -> list[str]:
    """Return the chooser of each convolution.

    Convolutions for which cuDNN chooses among the same kernels share one.
    """
    names = []
    for op, is_depthwise in zip(ops, shapes.depthwise.tolist(), strict=True):
        names.append("" if is_depthwise else _CHOOSERS.get(op.dtype, "conv2d-half"))
    return names


_CHOOSERS = {
    Dtype.TF32: "conv2d-tf32",
    Dtype.FP32: "conv2d-fp32",
    Dtype.FP64: "conv2d-fp32",
}


def _pick_kernels(
    ops: Sequence[Conv2d],
    conditions: ConditionColumns,
    shapes: ConvolutionShapes,
    rate: Array,
    reference: ReferenceChip,
) -> KernelPicks:
    choosers = _name_choosers(ops, shapes)
    kernels_run = conditions.ran
    if not conditions.usual:
        # No tile is read off the names of depthwise kernels.
        kernels_run = [
            NOT_RUN if is_depthwise else run
            for run, is_depthwise in zip(conditions.ran, shapes.depthwise.tolist(), strict=True)
        ]
    picks = pick_kernels(
        reference.choice,
        choosers,
        kernels_run,
        shapes.product,
        describe_shapes(shapes),
        lambda: _choose_fastest(choosers, shapes, rate, reference),
        reference.sm_count,
    )
    if not shapes.wgrad.any():
        return picks
    return replace(picks, split=_split_filter_gradients(shapes, picks, reference))


def _choose_fastest(
    choosers: Sequence[str],
    shapes: ConvolutionShapes,
    rate: Array,
    reference: ReferenceChip,
) -> list[KernelLabel]:
    """Return labels of convolutions without a fitted choice; nobody looks at those of others."""
    fitted = reference.choice or ()
    rows = np.array([row for row, name in enumerate(choosers) if name not in fitted])
    b, m, n, k = (size[rows] for size in shapes.product)
    is_simt = shapes.simt[rows] > 0
    never = np.zeros(len(rows), dtype=bool)
    rules = LibraryRules(
        slim=never,
        whole=~never,
        cuda=is_simt,
    )
    tile = fastest_tile(
        (b, m, n, k),
        shapes.width[rows],
        rate[rows],
        rules,
        reference,
    )

    fast_kind = "ampere" if reference.style is LibraryStyle.AMPERE else "hopper"
    labels = [VECTOR_LABEL] * len(choosers)
    for row, tile_n, tile_m in zip(rows.tolist(), tile.n.tolist(), tile.m.tolist(), strict=True):
        kind = "simt" if shapes.simt[row] else fast_kind
        labels[row] = KernelLabel(kind, int(tile_n), int(tile_m), False)
    return labels


def _split_filter_gradients(
    shapes: ConvolutionShapes,
    picks: KernelPicks,
    reference: ReferenceChip,
) -> Array:
    """Return the parts of K of all picks, ``(row, pick)``.

    Hopper's kernels of a filter's gradient share K among blocks for few tiles and many pixels (a
    workspace is prepared for those), which their names do not say.
    """
    groups, m, n, k = (size[:, np.newaxis] for size in shapes.product)
    tiles = groups * np.ceil(n / picks.tile_n) * np.ceil(m / picks.tile_m)
    is_hopper = picks.kind == HOPPER_KIND
    has_many_pixels = (shapes.wgrad[:, np.newaxis] > 0) & (k > CONVOLUTIONS.many_pixels)
    has_few_tiles = is_hopper & (tiles <= reference.sm_count / 2.0)
    split = np.where(has_few_tiles & has_many_pixels, 0.0, picks.split)
    if reference.choice is not None:
        return split
    # So do the kernels of every library: without, a filter of 64 x 64 would keep one SM busy.
    filling = np.floor(CONVOLUTIONS.split_blocks * reference.sm_count / tiles)
    return np.where(has_many_pixels & ~is_hopper, np.maximum(filling, 1.0), split)


@cache
def _kernel_family(form: tuple[bool, str], kind: str) -> str:
    """Return the kernel family: by the kind of kernel that cuDNN or PyTorch has."""
    is_grouped, depthwise = form
    if depthwise:
        return f"conv2d.depthwise.{depthwise}"
    return "conv2d.grouped" if is_grouped else f"conv2d.{kind}"


_DENSE = KernelMapping(convolution_work, tensor_cores=True, choice_inputs=convolution_choice_inputs)
_DEPTHWISE = KernelMapping(
    convolution_work, tensor_cores=False, choice_inputs=convolution_choice_inputs
)


def _convolution_kernels(op: Conv2d) -> KernelMapping:
    """Choose the kernels of a convolution.

    A point convolution is a matrix product. A depthwise one has none and uses CUDA cores.
    """
    if is_point_convolution(op):
        return PRODUCT_KERNELS
    return _DEPTHWISE if op.groups > 1 and op.c == op.groups else _DENSE


register_kernels(Conv2d, mapping=_convolution_kernels)
