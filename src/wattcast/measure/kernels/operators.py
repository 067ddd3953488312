"""A :class:`~wattcast.measure.kernels.spec.Spec` -> a PyTorch call over views of the operand pools.

``Call.run(i)`` runs copy ``i``. Rotation: weights of linear layers and convolutions, and the key-value
cache of decode attention, differ from layer to layer in a model and come from DRAM, so copies walk
through several sets until these pass three times the L2; activations stay, as a model's next operator
finds them in L2 when they fit. Some rows do otherwise on purpose; ``rotated`` says which.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wattcast.errors import unknown_name
from wattcast.measure.kernels.backward_calls import DROPPED
from wattcast.measure.kernels.operands import Operands, torch_dtype
from wattcast.measure.kernels.spec import Spec

L2_TIMES = 3.0
MOST_SETS = 256


@dataclass(frozen=True)
class Call:
    """One operator, ready to run; outputs are returned and may be dropped."""

    run: Callable[[int], Any]
    sets: int  # operand sets that ``run`` cycles through
    fixed_byte: int  # operands and outputs all copies share
    set_byte: int  # what each set adds

    def footprint_byte(self, copies: int) -> int:
        """Bytes that ``copies`` copies touch."""
        return self.fixed_byte + self.set_byte * min(self.sets, copies)


@dataclass(frozen=True)
class Builder:
    """What building a call needs: PyTorch, the pools and the size of the L2."""

    torch: Any
    operands: Operands
    l2_byte: float

    def build(self, spec: Spec, *, fresh: bool = True) -> Call:
        """Views for ``spec`` and the call over them; not ``fresh``: beside those handed out before."""
        from wattcast.measure.kernels import backward_calls, elementwise_calls

        if fresh:
            self.operands.reset()
        self._precision(spec)
        makers: dict[str, Callable[[Spec], Call]] = {
            "linear": self._linear,
            "bmm": self._bmm,
            "conv2d": self._conv2d,
            "softmax": self._softmax,
            "layernorm": self._layernorm,
            "rmsnorm": self._rmsnorm,
            "attention": self._attention,
            "elementwise": lambda s: elementwise_calls.build(self, s),
            "chain": self._chain,
            "stack": self._stack,
        }
        if spec.operator["op"] not in makers:
            raise unknown_name("operator", spec.operator["op"], makers)
        if spec.operator.get("backward") and spec.operator["op"] == "attention":
            return backward_calls.attention_gradient(self, spec)
        if spec.operator.get("backward"):
            return backward_calls.row_gradient(self, spec)
        if spec.operator.get("direction", "forward") != "forward":
            return backward_calls.convolution_gradient(self, spec)
        return makers[spec.operator["op"]](spec)

    def _chain(self, spec: Spec) -> Call:
        """Calls of several operators, one after another; each has operands of its own."""
        calls = [self.build(Spec(**member), fresh=False) for member in spec.detail["members"]]

        def run(i: int) -> list[Any]:
            return [call.run(i) for call in calls]

        fixed, each = (sum(getattr(call, name) for call in calls) for name in ("fixed_byte", "set_byte"))
        return Call(run, max(call.sets for call in calls), fixed, each)

    def _stack(self, spec: Spec) -> Call:
        """A model of made-up sizes: its layers hand on their results, and each has weights of its own."""
        from wattcast.measure.models.build import build, iteration
        from wattcast.measure.models.device import as_in_eager
        from wattcast.measure.models.plan import Dims, ModelSpec

        given, device = spec.detail, self.operands.device
        dims = Dims(**given["dims"])
        row = ModelSpec(dims.model, given["phase"], given["batch"], given["seq"])
        built = build(row, self.torch, device, dims)
        step = iteration(built, row, self.torch, device, dims)

        def run(i: int) -> Any:
            with as_in_eager(self.torch), self.torch.set_grad_enabled(row.phase == "train"):
                return step()

        return Call(run, 1, built.parameters * self.torch.bfloat16.itemsize, 0)

    def sets(self, spec: Spec, byte: float, rotate: bool) -> int:
        """Operand sets so that ``byte`` each pass three times the L2; one when not rotating."""
        if not rotate:
            return 1
        return max(1, min(math.ceil(L2_TIMES * self.l2_byte / max(byte, 1.0)), MOST_SETS))

    def _precision(self, spec: Spec) -> None:
        """TF32 only where the row says so; plain fp32 otherwise."""
        allow = spec.operator["dtype"] == "tf32"
        self.torch.backends.cuda.matmul.allow_tf32 = allow
        self.torch.backends.cudnn.allow_tf32 = allow

    def _linear(self, spec: Spec) -> Call:
        torch, o, dtype = self.torch, spec.operator, spec.operator["dtype"]
        m, n, k, bias = o["m"], o["n"], o["k"], o["bias"]
        width = torch_dtype(torch, dtype).itemsize
        if o.get("turned"):  # the gradient of a weight: both operands have k outermost
            left, right = self.operands.take(dtype, k, m), self.operands.take(dtype, k, n)
            return Call(lambda i: torch.mm(left.t(), right), 1, (m * k + n * k + m * n) * width, 0)
        sets = self.sets(spec, n * k * width, spec.rotated != "none")
        x = self.operands.take(dtype, m, k)
        b = self.operands.take("bf16" if dtype == "fp8" else dtype, n) if bias else None
        ws = [self.operands.take(dtype, *((k, n) if spec.layout == "nn" else (n, k))) for _ in range(sets)]
        byte = m * k * width + m * n * (2 if dtype == "fp8" else width), n * k * width
        if dtype == "fp8":
            one = torch.ones((), dtype=torch.float32, device=x.device)

            def run(i: int) -> Any:
                w = ws[i % sets].t()
                return torch._scaled_mm(x, w, scale_a=one, scale_b=one, bias=b, out_dtype=torch.bfloat16)

            return Call(run, sets, *byte)
        if spec.layout == "nn":
            return Call(lambda i: torch.addmm(b, x, ws[i % sets]), sets, *byte)
        return Call(lambda i: torch.nn.functional.linear(x, ws[i % sets], b), sets, *byte)

    def _bmm(self, spec: Spec) -> Call:
        torch, o, dtype = self.torch, spec.operator, spec.operator["dtype"]
        b, m, n, k = o["b"], o["m"], o["n"], o["k"]
        left = self.operands.take(dtype, b, m, k)
        right = self.operands.take(dtype, *((b, n, k) if spec.layout == "nt" else (b, k, n)))
        right = right.transpose(1, 2) if spec.layout == "nt" else right
        footprint = (left.numel() + right.numel() + b * m * n) * left.element_size()
        return Call(lambda i: torch.bmm(left, right), 1, footprint, 0)

    def _conv2d(self, spec: Spec) -> Call:
        torch, o, dtype = self.torch, spec.operator, spec.operator["dtype"]
        n, c, k, h, w, r, s, groups = (o[name] for name in ("n", "c", "k", "h", "w", "r", "s", "groups"))
        weight = k * (c // groups) * r * s
        width = torch_dtype(torch, dtype).itemsize
        sets = self.sets(spec, weight * width, spec.rotated != "none")
        image = self.image(dtype, n, c, h, w, o["channels_last"])
        filters = [self.image(dtype, k, c // groups, r, s, o["channels_last"]) for _ in range(sets)]
        stride, padding, dilation = self.places(o)
        places = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        p = (h + 2 * padding[0] - dilation[0] * (r - 1) - 1) // stride[0] + 1
        q = (w + 2 * padding[1] - dilation[1] * (s - 1) - 1) // stride[1] + 1
        byte = (n * c * h * w + n * k * p * q) * width, weight * width
        return Call(lambda i: torch.nn.functional.conv2d(image, filters[i % sets], **places), sets, *byte)

    def places(self, o: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
        """Stride, padding and dilation of rows and columns."""
        stride = [o["stride"], o.get("stride_w") or o["stride"]]
        wide = o.get("padding_w")
        return stride, [o["padding"], o["padding"] if wide is None else wide], 2 * [o.get("dilation", 1)]

    def image(self, dtype: str, n: int, c: int, h: int, w: int, channels_last: bool) -> Any:
        """(pictures, channels, rows, columns), channels outermost or innermost in memory."""
        if channels_last:
            return self.operands.take(dtype, n, h, w, c).permute(0, 3, 1, 2)
        return self.operands.take(dtype, n, c, h, w)

    def _over_rows(self, spec: Spec, apply: Callable[[Any], Any]) -> Call:
        o = spec.operator
        width = torch_dtype(self.torch, o["dtype"]).itemsize
        out = torch_dtype(self.torch, o.get("out_dtype", o["dtype"])).itemsize
        byte = o["rows"] * o["dim"] * (width + out)
        sets = self.sets(spec, byte, spec.rotated == "all")
        xs = [self.operands.take(o["dtype"], o["rows"], o["dim"]) for _ in range(sets)]
        return Call(lambda i: apply(xs[i % sets]), sets, 0, byte)

    def _softmax(self, spec: Spec) -> Call:
        out = spec.operator.get("out_dtype")
        dtype = torch_dtype(self.torch, out) if out else None
        softmax = self.torch.nn.functional.softmax
        return self._over_rows(spec, lambda x: softmax(x, dim=-1, dtype=dtype))

    def _layernorm(self, spec: Spec) -> Call:
        dim, norm = spec.operator["dim"], self.torch.nn.functional.layer_norm
        weight, bias = (self.operands.take(spec.operator["dtype"], dim) for _ in range(2))
        return self._over_rows(spec, lambda x: norm(x, (dim,), weight, bias, 1e-5))

    def _rmsnorm(self, spec: Spec) -> Call:
        dim, norm = spec.operator["dim"], self.torch.nn.functional.rms_norm
        weight = self.operands.take(spec.operator["dtype"], dim)
        return self._over_rows(spec, lambda x: norm(x, (dim,), weight, 1e-6))

    def _attention(self, spec: Spec) -> Call:
        o = spec.operator
        batch, heads, kv_heads, q_len, kv_len, dim = (
            o[name] for name in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
        )
        width = torch_dtype(self.torch, o["dtype"]).itemsize
        cache_byte = 2 * batch * kv_heads * kv_len * dim * width
        sets = self.sets(spec, cache_byte, spec.rotated == "all")
        q = self.heads(spec, batch, heads, q_len, dim)
        kvs = [[self.heads(spec, batch, kv_heads, kv_len, dim) for _ in "kv"] for _ in range(sets)]
        fixed_byte = 2 * batch * heads * q_len * dim * width
        sdpa = self.torch.nn.functional.scaled_dot_product_attention
        options: dict[str, Any] = {"is_causal": o["causal"], "enable_gqa": heads != kv_heads}
        options["dropout_p"] = DROPPED if o.get("dropout") else 0.0
        run = self._with_backend(spec, lambda i: sdpa(q, *kvs[i % sets], **options))
        return Call(run, sets, fixed_byte, cache_byte)

    def heads(self, spec: Spec, batch: int, heads: int, length: int, dim: int) -> Any:
        """(batch, heads, length, dim): from a projection (bshd in memory) or a cache (bhsd)."""
        if spec.layout == "bhsd":
            return self.operands.take(spec.operator["dtype"], batch, heads, length, dim)
        return self.operands.take(spec.operator["dtype"], batch, length, heads, dim).transpose(1, 2)

    def _with_backend(self, spec: Spec, run: Callable[[int], Any]) -> Callable[[int], Any]:
        backend = spec.detail.get("backend", "default")
        if backend == "default":
            return run
        from torch.nn.attention import SDPBackend, sdpa_kernel

        wanted = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[backend]

        def forced(i: int) -> Any:
            with sdpa_kernel(wanted):
                return run(i)

        return forced
