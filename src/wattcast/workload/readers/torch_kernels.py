"""A PyTorch mode that calls the fused kernels a GPU would run.

On meta tensors PyTorch dispatches attention, dropout, fp16 softmax and RMS norms as several
operators where a GPU runs one kernel. An RMS norm is one kernel on a GPU since PyTorch 2.9 and
eight operators elsewhere [pytorch/pytorch#153666]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeAlias

# Records a call (function, arguments by place, arguments by name, results).
RecordCall: TypeAlias = Callable[[Any, Any, Any, Any], None]
_WIDEST_FLASH_HEAD = 256  # elements of a head that FlashAttention takes


def route_to_gpu_kernels(torch: Any, record: RecordCall) -> Any:
    """Return a mode that sends functions to the kernels a GPU would pick."""
    functional = torch.nn.functional
    attend = _make_attention(torch)
    drop = _make_dropout(torch)
    norm = _make_rms_norm(torch, record)
    routes = {
        functional.scaled_dot_product_attention: attend,
        functional.dropout: drop,
        torch.dropout: drop,
        functional.rms_norm: norm,
        torch.rms_norm: norm,
    }
    softmaxes = (functional.softmax, torch.softmax, torch.Tensor.softmax)
    base: Any = import_module("torch.overrides").TorchFunctionMode

    class FusedKernels(base):  # type: ignore[misc]
        def __torch_function__(
            self,
            func: Any,
            types: Any,
            args: Any = (),
            kwargs: Any = None,
        ) -> Any:
            kwargs = kwargs or {}
            if func in softmaxes and _widens_half(torch, args, kwargs):
                axis = args[1] if len(args) > 1 else kwargs["dim"]
                return torch.ops.aten._softmax(args[0], axis, True)
            return routes.get(func, func)(*args, **kwargs)

    return FusedKernels()


def _widens_half(
    torch: Any,
    args: Any,
    kwargs: Any,
) -> bool:
    """Tell whether a softmax of fp16 returns fp32, which its kernel does on the fly."""
    if kwargs.get("dtype") is not torch.float32:
        return False
    return args[0].dtype is torch.float16


def _make_rms_norm(torch: Any, record: RecordCall) -> Callable[..., Any]:
    """Return an RMS norm that is recorded as one kernel, forward and backward."""
    aten = torch.ops.aten

    class RootMeanSquare(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(
            ctx: Any,
            x: Any,
            weight: Any,
            shape: Sequence[int],
        ) -> Any:
            ctx.save_for_backward(x, weight)
            ctx.shape = shape
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            record(aten._fused_rms_norm, (x, shape, weight), {}, out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight = ctx.saved_tensors
            d_x = torch.empty_like(x)
            d_weight = None if weight is None else torch.empty_like(weight)
            args = (grad, x, ctx.shape, weight)
            record(aten._fused_rms_norm_backward, args, {}, (d_x, d_weight))
            return d_x, d_weight, None

    def norm(
        input: Any,
        normalized_shape: Any,
        weight: Any = None,
        eps: Any = None,
    ) -> Any:
        return RootMeanSquare.apply(input, weight, list(normalized_shape))

    return norm


def _make_dropout(torch: Any) -> Callable[..., Any]:
    """Return a dropout that is one kernel; ``training`` and ``train`` are PyTorch's two names."""

    def drop(
        input: Any,
        p: float = 0.5,
        training: bool = True,
        train: bool = True,
        inplace: bool = False,
    ) -> Any:
        if training and train and p > 0.0:
            return torch.ops.aten.native_dropout(input, p, True)[0]
        return input

    return drop


def _make_attention(torch: Any) -> Callable[..., Any]:
    """Return attention that is FlashAttention where it can be, else memory-efficient attention."""
    aten = torch.ops.aten

    # The parameters are those of torch.nn.functional.scaled_dot_product_attention.
    def attend(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: Any = None,
        enable_gqa: bool = False,
    ) -> Any:
        if attn_mask is None and query.shape[-1] == value.shape[-1] <= _WIDEST_FLASH_HEAD:
            flash = aten._scaled_dot_product_flash_attention
            return flash(
                query,
                key,
                value,
                dropout_p,
                is_causal,
                False,
                scale=scale,
            )[0]

        if enable_gqa:
            key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            zero = torch.zeros((), dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, zero, float("-inf"))
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        needs_logsumexp = torch.is_grad_enabled() and query.requires_grad
        efficient = aten._scaled_dot_product_efficient_attention
        results = efficient(
            query,
            key,
            value,
            attn_mask,
            needs_logsumexp,
            dropout_p,
            is_causal,
            scale=scale,
        )
        return results[0]

    return attend
