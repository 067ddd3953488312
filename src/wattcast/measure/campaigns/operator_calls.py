"""Build the PyTorch call of an operator over views of the operand pools.

Operands rotate: weights of linear layers and convolutions, and the key-value cache of decode attention, differ from
layer to layer in a model and come from DRAM. Copies of a call therefore walk through several sets of them until
these exceed three times the L2. Activations stay, because a model's next operator finds them in L2 when they fit.
Some rows do otherwise on purpose; ``rotated`` says which.

Gradients call ATen's own functions, because autograd would launch on another stream than the captured one. What a
gradient needs from its forward pass is computed once, when the call is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wattcast.core.errors import unknown_name
from wattcast.core.measured_rows import find_measured_call
from wattcast.measure.campaigns import elementwise_calls
from wattcast.measure.campaigns.elementwise_calls import DROPPED, CallBuilder, OperatorCall, torch_dtype
from wattcast.measure.campaigns.kernel_plan import OperatorSpec


def build_call(builder: CallBuilder, spec: OperatorSpec, *, fresh: bool = True) -> OperatorCall:
    """Build the call of ``spec``; without ``fresh`` its operands lie behind those handed out before."""
    if fresh:
        builder.operands.reset()
    wide = spec.operator["dtype"] == "tf32"  # only where the row says so; plain fp32 otherwise
    builder.torch.backends.cuda.matmul.allow_tf32 = wide
    builder.torch.backends.cudnn.allow_tf32 = wide
    kind = spec.operator["op"]
    if kind in MAKERS:
        return MAKERS[kind](builder, spec)
    registered = find_measured_call(kind)  # by the operator's own file; all copies share its operands
    if registered is None:
        raise unknown_name("operator", kind, MAKERS)
    taken: list[Any] = []

    def take(dtype: str, *shape: int) -> Any:
        taken.append(builder.operands.take(dtype, *shape))
        return taken[-1]

    run = registered(builder.torch, take, spec.operator)
    return OperatorCall(lambda i: run(), 1, sum(tensor.numel() * tensor.element_size() for tensor in taken), 0)


def _call_linear(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    torch, o, dtype = builder.torch, spec.operator, spec.operator["dtype"]
    m, n, k, bias = o["m"], o["n"], o["k"], o["bias"]
    width = torch_dtype(torch, dtype).itemsize
    if o.get("turned"):  # the gradient of a weight: both operands have k outermost
        left, right = builder.operands.take(dtype, k, m), builder.operands.take(dtype, k, n)
        return OperatorCall(lambda i: torch.mm(left.t(), right), 1, (m * k + n * k + m * n) * width, 0)
    sets = builder.sets(spec, n * k * width, spec.rotated != "none")
    x = builder.operands.take(dtype, m, k)
    b = builder.operands.take("bf16" if dtype == "fp8" else dtype, n) if bias else None
    ws = [builder.operands.take(dtype, *((k, n) if spec.layout == "nn" else (n, k))) for _ in range(sets)]
    byte = m * k * width + m * n * (2 if dtype == "fp8" else width), n * k * width
    if dtype == "fp8":
        one = torch.ones((), dtype=torch.float32, device=x.device)

        def run(i: int) -> Any:
            w = ws[i % sets].t()
            return torch._scaled_mm(x, w, scale_a=one, scale_b=one, bias=b, out_dtype=torch.bfloat16)

        return OperatorCall(run, sets, *byte)
    if spec.layout == "nn":
        return OperatorCall(lambda i: torch.addmm(b, x, ws[i % sets]), sets, *byte)
    return OperatorCall(lambda i: torch.nn.functional.linear(x, ws[i % sets], b), sets, *byte)


def _call_bmm(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    torch, o, dtype = builder.torch, spec.operator, spec.operator["dtype"]
    b, m, n, k = o["b"], o["m"], o["n"], o["k"]
    left = builder.operands.take(dtype, *((b, k, m) if spec.layout == "tn" else (b, m, k)))
    left = left.transpose(1, 2) if spec.layout == "tn" else left
    right = builder.operands.take(dtype, *((b, n, k) if spec.layout == "nt" else (b, k, n)))
    right = right.transpose(1, 2) if spec.layout == "nt" else right
    footprint = (left.numel() + right.numel() + b * m * n) * left.element_size()
    return OperatorCall(lambda i: torch.bmm(left, right), 1, footprint, 0)


def _call_conv2d(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    """Convolve, or compute the gradient of the image (``dgrad``) or of the weight (``wgrad``)."""
    torch, o, dtype = builder.torch, spec.operator, spec.operator["dtype"]
    n, c, k, h, w, r, s, groups = (o[name] for name in ("n", "c", "k", "h", "w", "r", "s", "groups"))
    stride, padding, dilation, (p, q) = builder.places(o)
    direction, last, weight = o.get("direction", "forward"), o["channels_last"], k * (c // groups) * r * s
    width = torch_dtype(torch, dtype).itemsize
    byte = (n * c * h * w + n * k * p * q) * width, weight * width
    sets = builder.sets(spec, weight * width, direction != "wgrad" and spec.rotated != "none")
    image = builder.image(dtype, n, c, h, w, last)
    grad = builder.image(dtype, n, k, p, q, last) if direction != "forward" else None
    filters = [builder.image(dtype, k, c // groups, r, s, last) for _ in range(sets)]
    places = stride, padding, dilation
    if grad is None:
        convolve = torch.nn.functional.conv2d
        return OperatorCall(lambda i: convolve(image, filters[i % sets], None, *places, groups), sets, *byte)
    back, of_image = torch.ops.aten.convolution_backward, direction == "dgrad"
    rest = *places, False, [0, 0], groups, [of_image, not of_image, False]
    return OperatorCall(lambda i: back(grad, image, filters[i % sets], None, *rest)[not of_image], sets, *byte)


def _over_rows(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    """Run softmax, layer norm or RMS norm over the last dimension, or its gradient, a norm's with its weights'."""
    o, torch, take = spec.operator, builder.torch, builder.operands.take
    rows, dim, kind, dtype = o["rows"], o["dim"], o["op"], torch_dtype(torch, o["dtype"])
    out = torch_dtype(torch, o.get("out_dtype", o["dtype"]))
    byte = rows * dim * (3 * dtype.itemsize if o.get("backward") else dtype.itemsize + out.itemsize)
    sets = builder.sets(spec, byte, spec.rotated == "all")
    aten, functional = torch.ops.aten, torch.nn.functional
    weight, bias = (None, None) if o.get("backward") else (take(o["dtype"], dim) for _ in range(2))

    def apply() -> Callable[[], Any]:
        x = take(o["dtype"], rows, dim)
        if kind == "softmax":
            return lambda: functional.softmax(x, dim=-1, dtype=None if out is dtype else out)
        if kind == "rmsnorm":
            return lambda: functional.rms_norm(x, (dim,), weight, 1e-6)
        return lambda: functional.layer_norm(x, (dim,), weight, bias, 1e-5)

    def turn_back() -> Callable[[], Any]:
        grad, x = (take(o["dtype"], rows, dim) for _ in range(2))
        if kind == "softmax":
            return lambda: aten._softmax_backward_data(grad, x, -1, out)
        weight = take(o["dtype"], dim)
        if kind == "rmsnorm":
            _, rstd = aten._fused_rms_norm(x, [dim], weight, 1e-6)
            return lambda: aten._fused_rms_norm_backward(grad, x, [dim], rstd, weight, [True, True])
        bias, every = take(o["dtype"], dim), [True, True, True]
        _, mean, rstd = aten.native_layer_norm(x, [dim], weight, bias, 1e-5)
        return lambda: aten.native_layer_norm_backward(grad, x, [dim], mean, rstd, weight, bias, every)

    runs = [(turn_back if o.get("backward") else apply)() for _ in range(sets)]
    return OperatorCall(lambda i: runs[i % sets](), sets, 0, byte)


def _call_attention(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    """Attend, or compute the gradients of queries, keys and values."""
    o, torch = spec.operator, builder.torch
    names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
    batch, heads, kv_heads, q_len, kv_len, dim = (o[name] for name in names)
    width = torch_dtype(torch, o["dtype"]).itemsize
    query_byte, cache_byte = (2 * batch * dim * n * width for n in (heads * q_len, kv_heads * kv_len))
    chance, backend = DROPPED if o.get("dropout") else 0.0, spec.detail.get("backend", "default")
    q = builder.heads(spec, batch, heads, q_len, dim)
    if o.get("backward"):
        grad = builder.heads(spec, batch, heads, q_len, dim)
        k, v = (builder.heads(spec, batch, kv_heads, kv_len, dim) for _ in "kv")
        run = _make_attention_gradient(torch, grad, (q, k, v), chance, bool(o["causal"]), backend)
        return OperatorCall(lambda i: run(), 1, 2 * (query_byte + cache_byte), 0)
    sets = builder.sets(spec, cache_byte, spec.rotated == "all")
    kvs = [[builder.heads(spec, batch, kv_heads, kv_len, dim) for _ in "kv"] for _ in range(sets)]
    options: dict[str, Any] = {"is_causal": o["causal"], "enable_gqa": heads != kv_heads, "dropout_p": chance}
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def attend(i: int) -> Any:
        return sdpa(q, *kvs[i % sets], **options)

    if backend == "default":
        return OperatorCall(attend, sets, query_byte, cache_byte)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    wanted = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[backend]

    def force_backend(i: int) -> Any:
        with sdpa_kernel(wanted):
            return attend(i)

    return OperatorCall(force_backend, sets, query_byte, cache_byte)


def _make_attention_gradient(
    torch: Any, grad: Any, qkv: tuple[Any, ...], chance: float, causal: bool, backend: str
) -> Callable[[], Any]:
    """Return the gradient, by cuDNN unless the row says otherwise, as on Hopper."""
    aten = torch.ops.aten
    if grad.device.type == "cpu":
        given = aten._scaled_dot_product_flash_attention_for_cpu(*qkv, chance, causal)
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return lambda: back(grad, *qkv, *given, chance, causal)
    if backend == "flash":
        out, lse, *places, seed, offset, _ = aten._scaled_dot_product_flash_attention(*qkv, chance, causal, False)
        back = aten._scaled_dot_product_flash_attention_backward
        rest = *places, chance, causal, seed, offset
    else:
        cudnn = aten._scaled_dot_product_cudnn_attention
        out, lse, *places, seed, offset, _ = cudnn(*qkv, None, True, chance, causal, False)
        back = aten._scaled_dot_product_cudnn_attention_backward
        rest = seed, offset, None, *places, chance, causal
    return lambda: back(grad, *qkv, out, lse, *rest)


MAKERS: dict[str, Callable[[CallBuilder, OperatorSpec], OperatorCall]] = {  # of an operator; studies add their own
    "linear": _call_linear,
    "bmm": _call_bmm,
    "conv2d": _call_conv2d,
    **dict.fromkeys(("softmax", "layernorm", "rmsnorm"), _over_rows),
    "attention": _call_attention,
    "elementwise": elementwise_calls.build_elementwise,
}
