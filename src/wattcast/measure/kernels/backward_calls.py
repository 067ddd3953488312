"""Gradients -> PyTorch calls, through ATen's own functions: autograd would launch on another stream than the capture.

What a gradient needs from its forward (statistics, a result, random state) is computed once, when the call is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wattcast.measure.kernels.operands import torch_dtype
from wattcast.measure.kernels.spec import Spec

if TYPE_CHECKING:
    from wattcast.measure.kernels.operators import Builder, Call

DROPPED = 0.1  # share of weights or activations, as models train


def row_gradient(builder: Builder, spec: Spec) -> Call:
    """Gradient of softmax, layer norm or RMS norm over rows; of the norms with those of their weights."""
    from wattcast.measure.kernels.operators import Call

    o = spec.operator
    rows, dim, width = o["rows"], o["dim"], torch_dtype(builder.torch, o["dtype"]).itemsize
    byte = 3 * rows * dim * width
    sets = builder.sets(spec, byte, spec.rotated == "all")
    maker = {"softmax": _softmax, "layernorm": _layernorm, "rmsnorm": _rmsnorm}[o["op"]]
    runs = [maker(builder, o, rows, dim) for _ in range(sets)]
    return Call(lambda i: runs[i % sets](), sets, 0, byte)


def _softmax(builder: Builder, o: dict[str, Any], rows: int, dim: int) -> Callable[[], Any]:
    torch = builder.torch
    grad, out = (builder.operands.take(o["dtype"], rows, dim) for _ in range(2))
    of = torch_dtype(torch, o.get("out_dtype", o["dtype"]))
    return lambda: torch.ops.aten._softmax_backward_data(grad, out, -1, of)


def _layernorm(builder: Builder, o: dict[str, Any], rows: int, dim: int) -> Callable[[], Any]:
    aten = builder.torch.ops.aten
    grad, x = (builder.operands.take(o["dtype"], rows, dim) for _ in range(2))
    weight, bias = (builder.operands.take(o["dtype"], dim) for _ in range(2))
    _, mean, rstd = aten.native_layer_norm(x, [dim], weight, bias, 1e-5)
    every = [True, True, True]
    return lambda: aten.native_layer_norm_backward(grad, x, [dim], mean, rstd, weight, bias, every)


def _rmsnorm(builder: Builder, o: dict[str, Any], rows: int, dim: int) -> Callable[[], Any]:
    aten = builder.torch.ops.aten
    grad, x = (builder.operands.take(o["dtype"], rows, dim) for _ in range(2))
    weight = builder.operands.take(o["dtype"], dim)
    _, rstd = aten._fused_rms_norm(x, [dim], weight, 1e-6)
    return lambda: aten._fused_rms_norm_backward(grad, x, [dim], rstd, weight, [True, True])


def attention_gradient(builder: Builder, spec: Spec) -> Call:
    """Gradients of queries, keys and values; by cuDNN unless told otherwise, as PyTorch chooses on Hopper."""
    from wattcast.measure.kernels.operators import Call

    o = spec.operator
    batch, heads, kv_heads, q_len, kv_len, dim = (
        o[name] for name in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
    )
    q, grad = (builder.heads(spec, batch, heads, q_len, dim) for _ in range(2))
    k, v = (builder.heads(spec, batch, kv_heads, kv_len, dim) for _ in range(2))
    chance, causal = DROPPED if o.get("dropout") else 0.0, bool(o["causal"])
    backend = "cpu" if q.device.type == "cpu" else spec.detail.get("backend", "default")
    maker = {"cpu": _on_cpu, "flash": _flash}.get(backend, _cudnn)
    run = maker(builder.torch.ops.aten, grad, (q, k, v), chance, causal)
    width = torch_dtype(builder.torch, o["dtype"]).itemsize
    byte = 4 * batch * dim * (heads * q_len + kv_heads * kv_len) * width
    return Call(lambda i: run(), 1, byte, 0)


def _on_cpu(aten: Any, grad: Any, qkv: tuple[Any, ...], chance: float, causal: bool) -> Callable[[], Any]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*qkv, chance, causal)
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return lambda: back(grad, *qkv, out, lse, chance, causal)


def _flash(aten: Any, grad: Any, qkv: tuple[Any, ...], chance: float, causal: bool) -> Callable[[], Any]:
    out, lse, q_at, k_at, q_most, k_most, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        *qkv, chance, causal, False
    )
    back = aten._scaled_dot_product_flash_attention_backward
    return lambda: back(grad, *qkv, out, lse, q_at, k_at, q_most, k_most, chance, causal, seed, offset)


def _cudnn(aten: Any, grad: Any, qkv: tuple[Any, ...], chance: float, causal: bool) -> Callable[[], Any]:
    out, lse, q_at, k_at, q_most, k_most, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        *qkv, None, True, chance, causal, False
    )
    back = aten._scaled_dot_product_cudnn_attention_backward
    return lambda: back(grad, *qkv, out, lse, seed, offset, None, q_at, k_at, q_most, k_most, chance, causal)


def convolution_gradient(builder: Builder, spec: Spec) -> Call:
    """Gradient of the image (``dgrad``) or of the weight (``wgrad``)."""
    from wattcast.measure.kernels.operators import Call

    o, torch = spec.operator, builder.torch
    n, c, k, h, w, r, s, groups = (o[name] for name in ("n", "c", "k", "h", "w", "r", "s", "groups"))
    stride, padding, dilation = builder.places(o)
    p, q = (
        (side + 2 * pad - reach * (taps - 1) - 1) // step + 1
        for side, pad, reach, taps, step in zip((h, w), padding, dilation, (r, s), stride, strict=True)
    )
    of_image, last = o["direction"] == "dgrad", o["channels_last"]
    width = torch_dtype(torch, o["dtype"]).itemsize
    weight = k * (c // groups) * r * s
    sets = builder.sets(spec, weight * width, of_image and spec.rotated != "none")
    image = builder.image(o["dtype"], n, c, h, w, last)
    grad = builder.image(o["dtype"], n, k, p, q, last)
    filters = [builder.image(o["dtype"], k, c // groups, r, s, last) for _ in range(sets)]
    back = torch.ops.aten.convolution_backward
    mask = [of_image, not of_image, False]

    def run(i: int) -> Any:
        given = grad, image, filters[i % sets], None, stride, padding, dilation, False, [0, 0], groups, mask
        return back(*given)[0 if of_image else 1]

    return Call(run, sets, (image.numel() + grad.numel()) * width, weight * width)
