"""ATen calls -> operators: what each launches on a GPU, by name and by the tensors it was given.

Tensors arrive as ``symbolic.Tensor`` (shape, strides, format), so captures and templates share one
rule for bytes and layouts.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from wattcast.workload import torch_norms as norms
from wattcast.workload import torch_pointwise as points
from wattcast.workload import torch_products as products
from wattcast.workload.graph import Elementwise, Operator
from wattcast.workload.torch_call import Call


@dataclass(frozen=True)
class Rule:
    """A row of ``aten.csv``: free, fill, reduction, gather or pointwise, and the function each becomes."""

    kind: str
    one: str  # with one tensor given
    several: str  # with more


@cache
def rules() -> dict[str, Rule]:
    """ATen name -> rule, for all that need no arithmetic on their arguments."""
    text = files("wattcast.workload").joinpath("aten.csv").read_text(encoding="utf-8")
    return {row["aten"]: Rule(row["kind"], row["one"], row["several"]) for row in csv.DictReader(text.splitlines())}


def known(name: str) -> bool:
    """Whether an ATen name has a rule that does work."""
    return name in SPECIAL or (name not in _CALLERS and _kind(name) not in ("", "free"))


def free(name: str) -> bool:
    """Whether an ATen name is known to launch nothing itself."""
    return _kind(name) == "free"


def _kind(name: str) -> str:
    rule = rules().get(name) or rules().get(name.removesuffix("_"))
    return rule.kind if rule else ""


_CALLERS = frozenset(["zeros", "ones", "full", "rand", "randn", "zeros_like", "ones_like", "full_like", "new_zeros"])


def operators(call: Call) -> list[Operator] | None:
    """What ``call`` launches, or None where nobody knows."""
    if call.name in SPECIAL:
        return SPECIAL[call.name](call)
    rule = rules().get(call.name) or rules().get(call.name.removesuffix("_"))
    if rule is None:
        return None
    if rule.kind == "free":
        return []
    if rule.kind == "fill":
        return [Elementwise("fill", max(call.out.numel, 1), dtype=call.out.dtype)]
    if rule.kind == "reduction":
        return [points.reduction(call, rule.one)]
    if rule.kind == "gather":
        return [points.gathered(call)]
    return [points.pointwise(call, rule.one if len(call.inputs) == 1 else rule.several)]


SPECIAL: dict[str, Callable[[Call], list[Operator]]] = {
    "mm": products.mm,
    "addmm": products.mm,
    "bmm": products.bmm,
    "baddbmm": products.bmm,
    "_grouped_mm": products.grouped_mm,
    "grouped_mm": products.grouped_mm,
    "pow": points.power,
    "gelu": points.gelu,
    "gelu_backward": points.gelu,
    "_to_copy": points.cast,
    "copy_": points.copy_into,
    "copy": points.copy_into,
    "cat": points.cat,
    "stack": points.cat,
    "_softmax": norms.softmax,
    "_safe_softmax": norms.softmax,
    "_log_softmax": norms.softmax,
    "_softmax_backward_data": norms.softmax,
    "_log_softmax_backward_data": norms.softmax,
    "native_layer_norm": norms.layer_norm,
    "native_layer_norm_backward": norms.layer_norm,
    "_fused_rms_norm": norms.layer_norm,
    "_fused_rms_norm_backward": norms.layer_norm,
    "native_group_norm": norms.group_norm,
    "native_group_norm_backward": norms.group_norm,
    "scaled_dot_product_attention": products.attention,
    "_scaled_dot_product_flash_attention_for_cpu": products.attention,
    "_scaled_dot_product_flash_attention": products.attention,
    "_scaled_dot_product_flash_attention_backward": products.attention,
    "_scaled_dot_product_efficient_attention": products.attention,
    "_scaled_dot_product_efficient_attention_backward": products.attention,
    "_scaled_dot_product_cudnn_attention": products.attention,
    "_scaled_dot_product_cudnn_attention_backward": products.attention,
    "convolution": products.convolution,
    "_convolution": products.convolution,
    "convolution_backward": products.convolution_backward,
    "_native_batch_norm_legit": norms.batch_norm,
    "_native_batch_norm_legit_no_training": norms.batch_norm,
    "native_batch_norm": norms.batch_norm,
    "native_batch_norm_backward": norms.batch_norm,
    "max_pool2d_with_indices": norms.pool,
    "max_pool2d_with_indices_backward": norms.pool,
    "avg_pool2d": norms.pool,
    "avg_pool2d_backward": norms.pool,
    "_adaptive_avg_pool2d": norms.pool,
    "_adaptive_avg_pool2d_backward": norms.pool,
    "native_dropout": points.dropout,
    "nll_loss_forward": points.nll_loss,
    "nll_loss_backward": points.nll_loss,
    "embedding_dense_backward": points.embedding_backward,
    "constant_pad_nd": points.slice_backward,
    "slice_backward": points.slice_backward,
    "select_backward": points.slice_backward,
    "index_add": points.scatter,
    "index_add_": points.scatter,
    "scatter_add": points.scatter,
    "scatter_add_": points.scatter,
    "scatter": points.scatter,
    "scatter_": points.scatter,
    "index_put": points.scatter,
    "index_put_": points.scatter,
    "_index_put_impl_": points.scatter,
}
