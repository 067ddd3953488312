"""Training steps beyond plain AdamW in bf16: adapters, 4-bit weights, fp8, an 8-bit optimiser,
recomputation.

Only PyTorch, Triton and transformers are needed, so that a bare GPU node can run them. Without a
GPU the same steps run on plain PyTorch operators, for tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.optimization import Adafactor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU
    triton = None

FP8_MOST = 448.0  # largest number of the e4m3 format
STATE_BLOCK = 256  # weights that share a scale in the 8-bit optimiser
WEIGHT_BLOCK = 64  # weights that share a scale in a 4-bit matrix
LEARNING_RATE = 1e-6  # weights hardly move, so that every step sees the same kind of data

if triton is not None:

    @triton.jit
    def _cast_turn_kernel(x, scale, out, turned, rows, cols, BLOCK: tl.constexpr):
        """Scale a tile, and write it as fp8 in both orders."""
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = (i[:, None] < rows) & (j[None, :] < cols)
        at = i[:, None].to(tl.int64) * cols + j[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
        narrow = tl.minimum(tl.maximum(value, -448.0), 448.0).to(tl.float8e4nv)
        tl.store(out + at, narrow, mask=inside)
        at_turned = j[:, None].to(tl.int64) * rows + i[None, :]
        tl.store(
            turned + at_turned, tl.trans(narrow), mask=(j[:, None] < cols) & (i[None, :] < rows)
        )

    @triton.jit
    def _adamw8bit_kernel(p, g, m, v, m_scale, v_scale, n, rate, BLOCK: tl.constexpr):
        """Update a block of weights whose moments are eight bits with one scale a block."""
        block = tl.program_id(0)
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        weight = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        first = tl.load(m + at, mask=inside, other=0).to(tl.float32) * tl.load(m_scale + block)
        root = tl.load(v + at, mask=inside, other=0).to(tl.float32) * tl.load(v_scale + block)
        first = 0.9 * first + 0.1 * grad
        second = 0.999 * root * root + 0.001 * grad * grad
        weight = weight * (1.0 - 0.01 * rate) - rate * first / (tl.sqrt(second) + 1e-8)
        root = tl.sqrt(second)
        top_m, top_v = tl.max(tl.abs(first)) / 127.0 + 1e-30, tl.max(root) / 127.0 + 1e-30
        tl.store(p + at, weight.to(p.dtype.element_ty), mask=inside)
        tl.store(m + at, (first / top_m).to(tl.int8), mask=inside)
        tl.store(v + at, (root / top_v).to(tl.int8), mask=inside)
        tl.store(m_scale + block, top_m)
        tl.store(v_scale + block, top_v)

    @triton.jit
    def _widen_kernel(codes, scale, table, out, n, BLOCK: tl.constexpr, GROUP: tl.constexpr):
        """Look up two 4-bit codes a byte and scale them by block."""
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        code = tl.load(codes + at // 2, mask=inside, other=0).to(tl.int32)
        code = tl.where(at % 2 == 0, code >> 4, code & 15)
        value = tl.load(table + code) * tl.load(scale + at // GROUP, mask=inside, other=0.0)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def cast_fp8(x: Any, scale: Any, into: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """Return a matrix in fp8 in row order, and its transpose in row order."""
    rows, cols = x.shape
    like = {"dtype": torch.float8_e4m3fn, "device": x.device}
    out, turned = into or (torch.empty(rows, cols, **like), torch.empty(cols, rows, **like))
    if x.is_cuda:
        grid = (triton.cdiv(rows, 64), triton.cdiv(cols, 64))
        _cast_turn_kernel[grid](x, scale, out, turned, rows, cols, BLOCK=64)
    else:
        out.copy_((x * scale).clamp(-FP8_MOST, FP8_MOST).to(out.dtype))
        turned.copy_(out.t())
    return out, turned


def _multiply_fp8(a: Any, b_turned: Any, scales: tuple[Any, Any], dtype: Any) -> Any:
    """Return a·b for fp8 matrices, of which ``b_turned`` is the transpose of b in row order."""
    if not a.is_cuda:
        return (a.to(dtype) / scales[0]) @ (b_turned.t().to(dtype) / scales[1])
    inverse = [scale.reciprocal() for scale in scales]
    return torch._scaled_mm(
        a, b_turned.t(), scale_a=inverse[0], scale_b=inverse[1], out_dtype=dtype
    )


class _Fp8Product(torch.autograd.Function):
    """A linear layer whose three products run in fp8 with scales known beforehand (delayed
    scaling).
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, layer: Any) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        layer.set_scale("input", flat)
        narrow, turned = cast_fp8(flat, layer.scale["input"])
        ctx.save_for_backward(turned)
        ctx.layer, ctx.shape, ctx.dtype = layer, x.shape, x.dtype
        out = _multiply_fp8(
            narrow, layer.narrow, (layer.scale["input"], layer.scale["weight"]), x.dtype
        )
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x_turned,) = ctx.saved_tensors
        layer = ctx.layer
        flat = grad.reshape(-1, grad.shape[-1]).contiguous()
        layer.set_scale("gradient", flat)
        narrow, turned = cast_fp8(flat, layer.scale["gradient"])
        scale = layer.scale
        to_input = _multiply_fp8(
            narrow, layer.turned, (scale["gradient"], scale["weight"]), ctx.dtype
        )
        to_weight = _multiply_fp8(turned, x_turned, (scale["gradient"], scale["input"]), ctx.dtype)
        return to_input.view(ctx.shape), to_weight, None


class Fp8Linear(nn.Module):
    """A linear layer in fp8; ``cast_weight`` is called once a step, after the optimiser."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.weight, self.scale = base.weight, {}
        self.set_scale("weight", self.weight.detach())
        self.narrow, self.turned = cast_fp8(self.weight.detach(), self.scale["weight"])

    def set_scale(self, name: str, values: Any) -> None:
        """Take the scale that fills the range of fp8 from the first values seen."""
        if name not in self.scale:
            self.scale[name] = FP8_MOST / values.detach().abs().amax().float().clamp(min=1e-12)

    def cast_weight(self) -> None:
        """Cast the weights again, in both orders, to where they are."""
        cast_fp8(self.weight.detach(), self.scale["weight"], (self.narrow, self.turned))

    def forward(self, x: Any) -> Any:
        """Multiply."""
        return _Fp8Product.apply(x, self.weight, self)


class NarrowWeight(nn.Module):
    """A frozen linear layer of 4-bit codes, which are widened before each product."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.shape, device = base.weight.shape, base.weight.device
        n = base.weight.numel()
        self.register_buffer(
            "codes", torch.randint(0, 256, (n // 2,), dtype=torch.uint8, device=device)
        )
        self.register_buffer("scales", torch.full((-(-n // WEIGHT_BLOCK),), 0.02, device=device))
        self.register_buffer("table", torch.linspace(-1.0, 1.0, 16, device=device))
        self.dtype, self.bias = base.weight.dtype, base.bias

    def widen(self) -> Any:
        """Return the weights as a matrix."""
        n = self.codes.numel() * 2
        if not self.codes.is_cuda:
            code = torch.stack([self.codes >> 4, self.codes & 15], dim=-1).flatten().long()
            return (
                (self.table[code] * self.scales.repeat_interleave(WEIGHT_BLOCK)[:n])
                .to(self.dtype)
                .view(self.shape)
            )
        out = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        _widen_kernel[(triton.cdiv(n, 1024),)](
            self.codes, self.scales, self.table, out, n, BLOCK=1024, GROUP=WEIGHT_BLOCK
        )
        return out

    def forward(self, x: Any) -> Any:
        """Widen and multiply; the weights are widened again in the backward pass."""
        return _NarrowProduct.apply(x, self)


class _NarrowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, layer: NarrowWeight) -> Any:
        ctx.layer = layer
        return nn.functional.linear(x, layer.widen(), layer.bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad @ ctx.layer.widen(), None


class AdaptedLinear(nn.Module):
    """A frozen linear layer with a trained low-rank correction."""

    def __init__(self, base: Any, rank: int, bits: int) -> None:
        super().__init__()
        (features, width), like = (
            base.weight.shape,
            {"dtype": base.weight.dtype, "device": base.weight.device},
        )
        self.base = NarrowWeight(base) if bits == 4 else base
        self.down = nn.Parameter(torch.randn(rank, width, **like) * 0.01)
        self.up = nn.Parameter(torch.randn(features, rank, **like) * 0.01)

    def forward(self, x: Any) -> Any:
        """Add the correction to the frozen product."""
        out = self.base(x)
        return out + nn.functional.linear(nn.functional.linear(x, self.down), self.up) * 2.0


class BlockAdamW(torch.optim.Optimizer):
    """AdamW whose two moments are eight bits with a scale for every block of weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(list(params), {})

    @torch.no_grad()
    def step(self) -> None:
        """Update every weight in one pass, a kernel for each tensor."""
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            n, state = p.numel(), self.state[p]
            blocks = -(-n // STATE_BLOCK)
            if not state:
                for name in ("m", "v"):
                    state[name] = torch.zeros(n, dtype=torch.int8, device=p.device)
                    state[f"{name}_scale"] = torch.zeros(blocks, device=p.device)
            moments = [state[name] for name in ("m", "v", "m_scale", "v_scale")]
            if p.is_cuda:
                _adamw8bit_kernel[(blocks,)](
                    p, p.grad, *moments, n, LEARNING_RATE, BLOCK=STATE_BLOCK
                )
            else:
                _update_plain(p, *moments)


def _update_plain(p: Any, m: Any, v: Any, m_scale: Any, v_scale: Any) -> None:
    """Do what the kernel does with operators of PyTorch."""

    def blocks(values: Any) -> Any:
        short = -values.numel() % STATE_BLOCK
        return nn.functional.pad(values.flatten().float(), (0, short)).view(-1, STATE_BLOCK)

    grad = blocks(p.grad)
    first = 0.9 * blocks(m) * m_scale[:, None] + 0.1 * grad
    second = 0.999 * (blocks(v) * v_scale[:, None]) ** 2 + 0.001 * grad**2
    new = blocks(p) * (1.0 - 0.01 * LEARNING_RATE) - LEARNING_RATE * first / (second.sqrt() + 1e-8)
    for values, kept, scale in ((first, m, m_scale), (second.sqrt(), v, v_scale)):
        scale.copy_(values.abs().amax(dim=1) / 127.0 + 1e-30)
        kept.copy_((values / scale[:, None]).to(torch.int8).flatten()[: kept.numel()])
    p.copy_(new.flatten()[: p.numel()].view_as(p))


def _keep_products(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Keep what products and attention wrote; recompute all else."""
    kept = any(
        word in str(operator) for word in ("aten.mm.", "aten.addmm", "aten.bmm", "dot_product")
    )
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def prepare_module(module: Any, plan: dict[str, Any]) -> None:
    """Change a module built by transformers to what a row of the plan trains."""
    if plan["recompute"] != "none":
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if plan["recompute"] == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if plan["lora"]:
        module.requires_grad_(False)
    if plan["lora"] or plan["precision"] == "fp8":
        for path, part in list(module.named_modules()):
            if isinstance(part, nn.Linear) and "lm_head" not in path:
                own = (
                    AdaptedLinear(part, plan["lora"], plan["base_bits"])
                    if plan["lora"]
                    else Fp8Linear(part)
                )
                parent, _, name = path.rpartition(".")
                setattr(module.get_submodule(parent), name, own)
    if plan["lora"] and plan["recompute"] != "none":
        module.enable_input_require_grads()


def make_step(module: Any, plan: dict[str, Any], given: list[dict[str, Any]]) -> Callable[[], Any]:
    """Return a whole training step: every micro-batch of ``given`` forward and backward, then the
    optimiser.
    """
    optimisers = _make_optimisers(module, plan["optimizer"])
    narrow = [part for part in module.modules() if isinstance(part, Fp8Linear)]
    if plan["stack"] == "compiled":
        _compile_parts(module, "inductor" if given[0]["input_ids"].is_cuda else "aot_eager")

    def step() -> Any:
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=True)
        for batch in given:
            loss = module(**batch).loss
            loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        for part in narrow:
            part.cast_weight()
        return loss.detach()

    return step


def _make_optimisers(module: Any, name: str) -> list[Any]:
    """Return the optimisers of what is trained: Muon takes the matrices of layers and leaves the
    rest to AdamW.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    if name == "adamw8bit":
        return [BlockAdamW(trained)]
    if name == "adafactor":
        fixed = {
            "scale_parameter": False,
            "relative_step": False,
        }  # no number of the GPU is read by the host
        return [Adafactor(trained, lr=LEARNING_RATE, **fixed)]
    others, optimisers = trained, []
    if name == "muon":
        layers, _ = _find_layers(module)
        matrices = [p for p in layers.parameters() if p.requires_grad and p.ndim == 2]
        known = {id(p) for p in matrices}
        others = [p for p in trained if id(p) not in known]
        optimisers = [torch.optim.Muon(matrices, lr=LEARNING_RATE)]
    cuda = trained[0].is_cuda
    return [*optimisers, torch.optim.AdamW(others, lr=LEARNING_RATE, fused=True, capturable=cuda)]


def _find_layers(module: Any) -> tuple[Any, Any]:
    """Return the layers of a decoder, and the norm after them."""
    trunk = module.get_submodule(module.base_model_prefix)
    return (trunk.h, trunk.ln_f) if hasattr(trunk, "h") else (trunk.layers, trunk.norm)


def _compile_parts(module: Any, backend: str) -> None:
    """Compile layers, the last norm and the loss, each by itself: equal layers share their code."""
    torch._dynamo.config.recompile_limit = 64
    layers, norm = _find_layers(module)
    for part in (*layers, norm):
        part.compile(backend=backend)
    module.loss_function = torch.compile(module.loss_function, backend=backend)
