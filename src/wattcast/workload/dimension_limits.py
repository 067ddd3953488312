"""Check the dimensions of a model before anything is built from them.

Files of strangers name these sizes. A layer count decides how much memory a reader takes, a size of
zero ends as a division by zero in a template, and heads that do not divide a width give a model
that no framework runs. One function checks them all, for the catalogue, for Hugging Face
configurations and for uploads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import (
    MISSING,
    fields,
    is_dataclass,
)
from typing import Any

from wattcast.core import bad_value

# The deepest model we know of has 1,000 layers (DeepNet, arXiv:2203.00555); those that people serve
# have at most 126.
MOST_LAYERS = 4096
# Layers of networks that are traced one by one, not once with a repeat count: a U-Net has 10 at
# most.
MOST_TRACED_LAYERS = 64
MOST_EXPERTS = 4096  # Switch-C has 2,048 (arXiv:2101.03961)
# Attention is walked tile by tile, and a tile holds rows of several heads. DeepSeek-V3 has 128
# heads, Mamba a state for each channel: 8,192 in Jamba.
MOST_HEADS = 1 << 16
MOST_STAGES = 16  # levels of a network of pictures; published ones have 4 or 5
MOST_WIDTH = 1 << 24  # of any other dimension; the widest published are vocabularies of 2^18
MOST_POSITIONS = 1 << 31  # "no limit" is often written as a very large number
MOST_RATIO = 1024.0

_TRACED = ("unet", "mobilevit", "vae_decoder")
_SMALL_COUNTS = {"rotary_tables": 2, "parallel_norms": 2}
_POSITIONS = ("max_positions", "window", "chunk")
_SHARES = ("dropout", "rotary_share")
# Sizes that are there and may still be zero: T5 encoders have no decoder, some DeepSeek models
# full-rank queries, and some scans no convolution before them.
_MAY_BE_ZERO = ("decoder_layers", "q_rank", "kernel")
# Dimensions with a number for each stage, and how many stages the template has where that is fixed.
_STAGES: dict[str, tuple[tuple[tuple[str, ...], int | None], ...]] = {
    "resnet": ((("blocks", "widths"), None),),
    "convnext": ((("depths", "widths"), None),),
    "swin": ((("depths", "heads"), None),),
    "unet": ((("widths", "depths"), None),),
    "vae_decoder": ((("widths",), None),),
    "mobilevit": ((("hidden", "depths"), 3), (("widths",), 5)),
}
_GROUPS = 32  # of the norms of a U-Net and of a VAE's decoder
# Heads, and the width that they share evenly; each head of the others has a size of its own.
_HEAD_WIDTHS = (
    ("heads", "hidden"),
    ("vision_heads", "vision_hidden"),
    ("text_heads", "text_hidden"),
)


def check_dimensions(
    architecture: str,
    dims: Any,
    where: str,
) -> None:
    """Raise an error that names the first dimension of a model that is out of range."""
    for path, value, may_be_zero in _walk_numbers(dims, ""):
        name = path.split(".")[-1].partition("[")[0]
        if isinstance(value, float):
            _check_ratio(name, value, f"{where}: {path}")
        else:
            least = 0 if may_be_zero else 1
            most = _find_limit(architecture, name)
            if not least <= value <= most:
                raise bad_value(f"{where}: {path}", f"a whole number from {least} to {most}", value)
    _check_stages(architecture, dims, where)
    _check_heads(architecture, dims, where)


def check_layer_count(count: int, where: str) -> None:
    """Raise an error for a number of layers that no list of layers should be made of."""
    if not 0 < count <= MOST_LAYERS:
        raise bad_value(where, f"from 1 to {MOST_LAYERS} layers", count)


def _walk_numbers(dims: Any, path: str) -> Iterator[tuple[str, int | float, bool]]:
    """Yield the path and value of each number, and whether it may be zero because it is
    optional.
    """
    for item in fields(dims):
        value = getattr(dims, item.name)
        here = f"{path}.{item.name}" if path else item.name
        is_needed = item.default is MISSING or _is_size(item.default)
        if is_dataclass(value):
            yield from _walk_numbers(value, here)
        elif isinstance(value, tuple):
            yield from _walk_tuple(value, here)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield here, value, not is_needed or item.name in _MAY_BE_ZERO


def _walk_tuple(values: tuple[Any, ...], path: str) -> Iterator[tuple[str, int | float, bool]]:
    for index, value in enumerate(values):
        here = f"{path}[{index}]"
        if is_dataclass(value):
            yield from _walk_numbers(value, here)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            # a stage without attention has a depth of 0, but no stage has a width of 0
            yield here, value, path.endswith("depths")


def _is_size(default: object) -> bool:
    """Tell whether the default of a dimension is a size: then the dimension is always there."""
    return isinstance(default, int) and not isinstance(default, bool) and default > 0


def _find_limit(architecture: str, name: str) -> int:
    is_layer_count = name.endswith("layers") or name in ("blocks", "depths", "middle")
    if is_layer_count:
        return MOST_TRACED_LAYERS if architecture in _TRACED else MOST_LAYERS
    if name in ("experts", "experts_chosen"):
        return MOST_EXPERTS
    if name.endswith("heads"):
        return MOST_HEADS
    if name in _POSITIONS:
        return MOST_POSITIONS
    return _SMALL_COUNTS.get(name, MOST_WIDTH)


def _check_ratio(
    name: str,
    value: float,
    where: str,
) -> None:
    most = 1.0 if name in _SHARES else MOST_RATIO
    is_optional = name in (*_SHARES, "softcap")
    if not 0.0 <= value <= most or (value == 0.0 and not is_optional):
        raise bad_value(where, f"a number from 0 to {most:g}", value)


def _check_stages(
    architecture: str,
    dims: Any,
    where: str,
) -> None:
    """Check the tuples with one number for each stage of a network of pictures: few, and of one
    length.
    """
    for names, expected in _STAGES.get(architecture, ()):
        lengths = {name: len(getattr(dims, name)) for name in names}
        first = next(iter(lengths.values()))
        for name, length in lengths.items():
            if not 1 <= length <= MOST_STAGES:
                raise bad_value(f"{where}: {name}", f"from 1 to {MOST_STAGES} stages", length)
            if length != (expected or first):
                stages = expected or f"as many as {names[0]} has"
                raise bad_value(f"{where}: {name}", f"a number for each stage ({stages})", length)


def _check_heads(
    architecture: str,
    dims: Any,
    where: str,
) -> None:
    """Check that heads share a width evenly, and that rotary embeddings find pairs of elements."""
    _check_video(dims, where)
    if architecture == "unet":
        _check_unet_heads(dims, where)
    elif architecture == "vae_decoder":
        _check_group_widths(dims.widths, where)
    elif not hasattr(dims, "head_dim"):
        for name, width_name in _HEAD_WIDTHS:
            heads = getattr(dims, name, None)
            width = getattr(dims, width_name, None)
            if isinstance(heads, int) and isinstance(width, int) and width % heads:
                expected = f"a divisor of {width_name}, which is {width}"
                raise bad_value(f"{where}: {name}", expected, heads)
        _check_staged_heads(dims, where)
    if hasattr(dims, "kv_heads"):
        _check_decoder_heads(dims, where)
    elif architecture == "modernbert":
        _check_pairs(dims.hidden // dims.heads, where)


def _check_staged_heads(dims: Any, where: str) -> None:
    """Check Swin, whose stages double the width, and MobileViT, whose stages have widths of their
    own.
    """
    heads = getattr(dims, "heads", None)
    hidden = getattr(dims, "hidden", None)
    if isinstance(heads, tuple) and isinstance(hidden, int):
        pairs = [(count, hidden << stage) for stage, count in enumerate(heads)]
    elif isinstance(heads, int) and isinstance(hidden, tuple):
        pairs = [(heads, width) for width in hidden]
    else:
        return
    for count, width in pairs:
        if width % count:
            expected = f"a divisor of the stage's width, which is {width}"
            raise bad_value(f"{where}: heads", expected, count)


def _check_unet_heads(dims: Any, where: str) -> None:
    """Check a U-Net, which has a number of heads, or heads of one size; groups of norms have 32
    members.
    """
    _check_group_widths(dims.widths, where)
    for width in dims.widths:
        if width % (dims.heads or dims.head_dim or 1):
            name = "heads" if dims.heads else "head_dim"
            expected = f"a divisor of the stage's width, which is {width}"
            raise bad_value(f"{where}: {name}", expected, dims.heads or dims.head_dim)


def _check_group_widths(widths: tuple[int, ...], where: str) -> None:
    for width in widths:
        if width % _GROUPS:
            raise bad_value(f"{where}: widths", f"multiples of {_GROUPS}", width)


def _check_video(dims: Any, where: str) -> None:
    """Check that the frames of a video make whole patches, and pools of a text whole heads."""
    for name, divisor in (("frames", "patch_frames"), ("second_hidden", "pool_heads")):
        size = getattr(dims, name, None)
        part = getattr(dims, divisor, None)
        if isinstance(size, int) and isinstance(part, int) and size % part:
            raise bad_value(f"{where}: {name}", f"a multiple of {divisor}, which is {part}", size)


def _check_decoder_heads(dims: Any, where: str) -> None:
    if dims.heads % dims.kv_heads:
        expected = f"a divisor of heads, which is {dims.heads}"
        raise bad_value(f"{where}: kv_heads", expected, dims.kv_heads)
    if not dims.head_dim and dims.heads > dims.hidden:
        expected = f"at most hidden, which is {dims.hidden}"
        raise bad_value(f"{where}: heads", expected, dims.heads)
    _check_pairs(dims.rotated, where)


def _check_pairs(rotated: int, where: str) -> None:
    if rotated % 2:
        expected = "an even number of rotated elements in a head"
        raise bad_value(f"{where}: head_dim", expected, rotated, "Rotary embeddings turn pairs.")
