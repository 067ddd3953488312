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


def _row_gradient(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    """Compute the gradient of softmax, layer norm or RMS norm over rows; of the norms with those of their weights."""
    o = spec.operator
    rows, dim, width = o["rows"], o["dim"], torch_dtype(builder.torch, o["dtype"]).itemsize
    byte = 3 * rows * dim * width
    sets = builder.sets(spec, byte, spec.rotated == "all")
    torch, take = builder.torch, builder.operands.take
    aten, dtype = torch.ops.aten, o["dtype"]

    def make() -> Callable[[], Any]:
        grad, x = (take(dtype, rows, dim) for _ in range(2))
        if o["op"] == "softmax":
            of = torch_dtype(torch, o.get("out_dtype", dtype))
            return lambda: aten._softmax_backward_data(grad, x, -1, of)
        weight = take(dtype, dim)
        if o["op"] == "rmsnorm":
            _, rstd = aten._fused_rms_norm(x, [dim], weight, 1e-6)
            return lambda: aten._fused_rms_norm_backward(grad, x, [dim], rstd, weight, [True, True])
        bias, every = take(dtype, dim), [True, True, True]
        _, mean, rstd = aten.native_layer_norm(x, [dim], weight, bias, 1e-5)
        return lambda: aten.native_layer_norm_backward(grad, x, [dim], mean, rstd, weight, bias, every)

    runs = [make() for _ in range(sets)]
    return OperatorCall(lambda i: runs[i % sets](), sets, 0, byte)


def _attention_gradient(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    """Compute the gradients of queries, keys and values, by cuDNN unless the row says otherwise, as on Hopper."""
    o = spec.operator
    batch, heads, kv_heads, q_len, kv_len, dim = (
        o[name] for name in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
    )
    q, grad = (builder.heads(spec, batch, heads, q_len, dim) for _ in range(2))
    k, v = (builder.heads(spec, batch, kv_heads, kv_len, dim) for _ in range(2))
    chance, causal = DROPPED if o.get("dropout") else 0.0, bool(o["causal"])
    width = torch_dtype(builder.torch, o["dtype"]).itemsize
    byte = 4 * batch * dim * (heads * q_len + kv_heads * kv_len) * width
    aten, qkv = builder.torch.ops.aten, (q, k, v)
    backend = "cpu" if q.device.type == "cpu" else spec.detail.get("backend", "default")
    if backend == "cpu":
        given = aten._scaled_dot_product_flash_attention_for_cpu(*qkv, chance, causal)
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return OperatorCall(lambda i: back(grad, *qkv, *given, chance, causal), 1, byte, 0)
    if backend == "flash":
        out, lse, *places, seed, offset, _ = aten._scaled_dot_product_flash_attention(*qkv, chance, causal, False)
        back = aten._scaled_dot_product_flash_attention_backward
        rest = *places, chance, causal, seed, offset
    else:
        cudnn = aten._scaled_dot_product_cudnn_attention
        out, lse, *places, seed, offset, _ = cudnn(*qkv, None, True, chance, causal, False)
        back = aten._scaled_dot_product_cudnn_attention_backward
        rest = seed, offset, None, *places, chance, causal
    return OperatorCall(lambda i: back(grad, *qkv, out, lse, *rest), 1, byte, 0)


def _convolution_gradient(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    """Compute the gradient of the image (``dgrad``) or of the weight (``wgrad``)."""
    o, torch = spec.operator, builder.torch
    n, c, k, h, w, r, s, groups = (o[name] for name in ("n", "c", "k", "h", "w", "r", "s", "groups"))
    stride, padding, dilation, (p, q) = builder.places(o)
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

    return OperatorCall(run, sets, (image.numel() + grad.numel()) * width, weight * width)


def build_call(builder: CallBuilder, spec: OperatorSpec, *, fresh: bool = True) -> OperatorCall:
    """Build the call of ``spec``; without ``fresh`` its operands lie behind those handed out before."""
    if fresh:
        builder.operands.reset()
    wide = spec.operator["dtype"] == "tf32"  # only where the row says so; plain fp32 otherwise
    builder.torch.backends.cuda.matmul.allow_tf32 = wide
    builder.torch.backends.cudnn.allow_tf32 = wide
    if spec.operator["op"] not in MAKERS:
        return _build_registered(builder, spec)
    if spec.operator.get("backward") and spec.operator["op"] == "attention":
        return _attention_gradient(builder, spec)
    if spec.operator.get("backward"):
        return _row_gradient(builder, spec)
    if spec.operator.get("direction", "forward") != "forward":
        return _convolution_gradient(builder, spec)
    return MAKERS[spec.operator["op"]](builder, spec)


def _build_registered(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    """Build the call of an operator that registered how it is called; all copies share its operands."""
    kind = spec.operator["op"]
    registered = find_measured_call(kind)
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
    left = builder.operands.take(dtype, b, m, k)
    right = builder.operands.take(dtype, *((b, n, k) if spec.layout == "nt" else (b, k, n)))
    right = right.transpose(1, 2) if spec.layout == "nt" else right
    footprint = (left.numel() + right.numel() + b * m * n) * left.element_size()
    return OperatorCall(lambda i: torch.bmm(left, right), 1, footprint, 0)


def _call_conv2d(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    torch, o, dtype = builder.torch, spec.operator, spec.operator["dtype"]
    n, c, k, h, w, r, s, groups = (o[name] for name in ("n", "c", "k", "h", "w", "r", "s", "groups"))
    weight = k * (c // groups) * r * s
    width = torch_dtype(torch, dtype).itemsize
    sets = builder.sets(spec, weight * width, spec.rotated != "none")
    image = builder.image(dtype, n, c, h, w, o["channels_last"])
    filters = [builder.image(dtype, k, c // groups, r, s, o["channels_last"]) for _ in range(sets)]
    stride, padding, dilation, (p, q) = builder.places(o)
    places = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    byte = (n * c * h * w + n * k * p * q) * width, weight * width
    return OperatorCall(lambda i: torch.nn.functional.conv2d(image, filters[i % sets], **places), sets, *byte)


def _over_rows(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    """Run softmax, layer norm or RMS norm over the last dimension."""
    o, functional = spec.operator, builder.torch.nn.functional
    dim, dtype = o["dim"], torch_dtype(builder.torch, o["dtype"])
    out = torch_dtype(builder.torch, o["out_dtype"]) if "out_dtype" in o else dtype
    weight, bias = (builder.operands.take(o["dtype"], dim) for _ in range(2))
    applied: dict[str, Callable[[Any], Any]] = {
        "softmax": lambda x: functional.softmax(x, dim=-1, dtype=None if out is dtype else out),
        "layernorm": lambda x: functional.layer_norm(x, (dim,), weight, bias, 1e-5),
        "rmsnorm": lambda x: functional.rms_norm(x, (dim,), weight, 1e-6),
    }
    apply, byte = applied[o["op"]], o["rows"] * dim * (dtype.itemsize + out.itemsize)
    sets = builder.sets(spec, byte, spec.rotated == "all")
    xs = [builder.operands.take(o["dtype"], o["rows"], dim) for _ in range(sets)]
    return OperatorCall(lambda i: apply(xs[i % sets]), sets, 0, byte)


def _call_attention(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    o = spec.operator
    batch, heads, kv_heads, q_len, kv_len, dim = (
        o[name] for name in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
    )
    width = torch_dtype(builder.torch, o["dtype"]).itemsize
    cache_byte = 2 * batch * kv_heads * kv_len * dim * width
    sets = builder.sets(spec, cache_byte, spec.rotated == "all")
    q = builder.heads(spec, batch, heads, q_len, dim)
    kvs = [[builder.heads(spec, batch, kv_heads, kv_len, dim) for _ in "kv"] for _ in range(sets)]
    fixed_byte = 2 * batch * heads * q_len * dim * width
    sdpa = builder.torch.nn.functional.scaled_dot_product_attention
    options: dict[str, Any] = {"is_causal": o["causal"], "enable_gqa": heads != kv_heads}
    options["dropout_p"] = DROPPED if o.get("dropout") else 0.0
    run = _with_backend(spec, lambda i: sdpa(q, *kvs[i % sets], **options))
    return OperatorCall(run, sets, fixed_byte, cache_byte)


def _with_backend(spec: OperatorSpec, run: Callable[[int], Any]) -> Callable[[int], Any]:
    backend = spec.detail.get("backend", "default")
    if backend == "default":
        return run
    from torch.nn.attention import SDPBackend, sdpa_kernel

    wanted = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[backend]

    def forced(i: int) -> Any:
        with sdpa_kernel(wanted):
            return run(i)

    return forced


MAKERS: dict[str, Callable[[CallBuilder, OperatorSpec], OperatorCall]] = {  # of an operator; studies add their own
    "linear": _call_linear,
    "bmm": _call_bmm,
    "conv2d": _call_conv2d,
    **dict.fromkeys(("softmax", "layernorm", "rmsnorm"), _over_rows),
    "attention": _call_attention,
    "elementwise": elementwise_calls.build_elementwise,
}
