"""What makes an operator a work of its own kind for support: its function, its direction, what sets its kernel apart.

Kernels of one group share corrections, so a group says little of whether an operator was measured: ``topk`` runs in
the group of plain passes over data, a gradient of a convolution in that of its forward form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wattcast.workload.graph import Operator


def form_of(op: Operator) -> str:
    """The form of an operator, in words.

    >>> from wattcast.workload.graph import Conv2d, Elementwise
    >>> form_of(Elementwise("topk", 4096)), form_of(Conv2d(8, 64, 64, 56, 56, 3, 3, padding=1, direction="wgrad"))
    ('topk', 'conv2d wgrad')
    """
    own = _OWN.get(op.kind)
    return op.name if own is None else own(op)


def _product(op: Any) -> str:
    form: str = op.kind
    if getattr(op, "turned", False):
        form += " turned"
    if op.weight_dtype is not None and op.weight_dtype != op.dtype:
        form += f" with {op.weight_dtype} weights"
    return form


def _convolution(op: Any) -> str:
    form = "conv2d" if op.direction == "forward" else f"conv2d {op.direction}"
    if op.groups > 1:
        form += " depthwise" if op.groups == op.c else " in groups"
    return form if op.dilation == 1 else f"{form} dilated"


def _attention(op: Any) -> str:
    form = "attention backward" if op.backward else "attention"
    if op.dropout:
        form += " with dropout"
    apart = op.v_head_dim is not None and op.v_head_dim != op.head_dim
    return f"{form} with values of another width" if apart else form


def _rows(op: Any) -> str:
    return f"{op.kind} backward" if op.backward else str(op.kind)


_OWN: dict[str, Callable[[Any], str]] = {
    "linear": _product,
    "bmm": _product,
    "conv2d": _convolution,
    "attention": _attention,
    **dict.fromkeys(("softmax", "layernorm", "rmsnorm"), _rows),
}
