"""Any PyTorch module -> Graph, by watching what it dispatches on tensors that hold no data.

Needs PyTorch (any build; no GPU, no weights). The module is run once on meta tensors under a
dispatch mode. Every call that would launch a kernel becomes an operator; one that nobody knows is
kept as an ``unspecified`` operator with its bytes, and named in the report with what is at stake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from wattcast.dtypes import Dtype
from wattcast.errors import BadInput, MissingTool, UnknownName, bad_value, clip
from wattcast.workload.graph import Block, Elementwise, Graph, Operator
from wattcast.workload.program import optimiser
from wattcast.workload.symbolic import Storage, Tape, Tensor
from wattcast.workload.torch_call import Call
from wattcast.workload.torch_operators import operators
from wattcast.workload.torch_pointwise import pointwise


@dataclass(frozen=True)
class Unmapped:
    """An ATen operator without a rule: where it was called, and what leaving it out would lose."""

    name: str
    module: str
    calls: int
    flop: float
    byte: float


@dataclass(frozen=True)
class Capture:
    """What a module does, and what of it is only roughly known."""

    graph: Graph
    unmapped: tuple[Unmapped, ...]


def capture(
    module: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    train: bool = False,
    loss: Callable[[Any], Any] | None = None,
    tf32: bool = False,
    step: bool = True,
) -> Capture:
    """Run ``module(*args, **kwargs)`` without data and note every operator.

    Parameters and tensors may be real or meta; real ones are only looked at. A yes-or-no question
    about data ("is nothing padded?") is answered yes, and the graph says so. ``train`` adds
    the backward pass of ``loss(output)`` (default: ``output.loss``, or the sum of the first tensor)
    and, with ``step``, one fused AdamW step over the module's parameters.
    """
    torch = _torch()
    watch = _watcher(torch, module, tf32)
    args, kwargs = _to_meta(torch, tuple(args)), _to_meta(torch, dict(kwargs or {}))
    run = _without_data(torch, module)
    with torch.device("meta"), watch:
        try:
            with torch.set_grad_enabled(train):
                out = run(*args, **kwargs)
                if train:
                    watch.phase = "backward"
                    _backward(loss or _default_loss, out, type(module).__name__)
        except (NotImplementedError, RuntimeError) as error:
            where = watch.path() or type(module).__name__
            raise BadInput(
                f"{where}: does not run without data ({clip(str(error).splitlines()[0], 160)}). Where a shape or a "
                "branch depends on values, take a profiler trace instead."
            ) from error
        finally:
            watch.release()
    return _finish(watch, module, name or type(module).__name__, train and step)


def _backward(loss: Callable[[Any], Any], out: Any, name: str) -> None:
    value = loss(out)
    if not getattr(value, "requires_grad", False):
        raise bad_value(f"{name}: training", "a loss that depends on parameters", "one that does not")
    value.backward()


def _finish(watch: Any, module: Any, name: str, step: bool) -> Capture:
    blocks = [Block(tuple(watch.ops))] if watch.ops else []
    if step:
        for dtype, count in _parameters(module).items():
            blocks.append(optimiser(count, dtype))
    unmapped = tuple(
        Unmapped(op, where, calls, watch.lost[op, where][0], watch.lost[op, where][1])
        for (op, where), calls in watch.unknown.items()
    )
    said = ["captured from PyTorch on tensors without data; scaled-dot-product attention taken as one fused kernel"]
    said += [
        f"operator {u.name} in {u.module or 'the module'} has no rule: {u.calls} call(s), {u.flop:.3g} FLOP and "
        f"{u.byte:.3g} bytes kept as unspecified elementwise work"
        for u in unmapped
    ]
    said += [f"{where or 'the module'} asks its data a yes-or-no question: answered yes" for where in watch.answered]
    weights = sum(count * dtype.byte for dtype, count in _parameters(module).items())
    return Capture(Graph(name, tuple(blocks), None, (*said, f"weights take {weights} bytes")), unmapped)


def _watcher(torch: Any, module: Any, tf32: bool) -> Any:
    dispatch: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode

    class Watch(dispatch):  # type: ignore[misc]
        """Notes operators as they are dispatched."""

        def __init__(self) -> None:
            super().__init__()
            self.ops: list[Operator] = []
            self.unknown: Counter[tuple[str, str]] = Counter()
            self.lost: dict[tuple[str, str], tuple[float, float]] = {}
            self.answered: Counter[str] = Counter()
            self.phase = ""
            self.stack: list[str] = []
            self.hooks: list[Any] = []
            for path, child in _modules(module):
                self.hooks.append(child.register_forward_pre_hook(self._entering(path)))
                self.hooks.append(child.register_forward_hook(self._leaving, always_call=False))
            self.fused = _gpu_kernels(torch)

        def __enter__(self) -> Any:
            self.fused.__enter__()
            return super().__enter__()

        def __exit__(self, *exc: Any) -> None:
            super().__exit__(*exc)
            self.fused.__exit__(*exc)

        def _entering(self, path: str) -> Callable[..., None]:
            def enter(*_: Any) -> None:
                self.stack.append(path)

            return enter

        def _leaving(self, *_: Any) -> None:
            if self.stack:
                self.stack.pop()

        def path(self) -> str:
            return self.phase or (self.stack[-1] if self.stack else "")

        def release(self) -> None:
            for hook in self.hooks:
                hook.remove()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
                self.answered[self.path()] += 1
                return True
            out = func(*args, **(kwargs or {}))
            if not _is_view(func):
                self.note(func, args, kwargs or {}, out)
            return out

        def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
            tape = Tape()
            given = _symbolic(torch, tape, (*args, *kwargs.values()))
            results = tuple(t for t in _flat(_symbolic(torch, tape, (out,))) if isinstance(t, Tensor))
            call = Call(func.overloadpacket.__name__, given, results, tf32, len(args))
            if not results and not call.inputs:
                return
            if results and all(t.numel == 0 for t in results):
                return
            found = operators(call) if results or call.inputs else []
            if found is None:
                found = self.guess(torch, func, call, args, kwargs, out)
            for op in found:
                object.__setattr__(op, "label", self.path())
            self.ops += found

        def guess(self, torch: Any, func: Any, call: Call, args: Any, kwargs: Any, out: Any) -> list[Operator]:
            """An operator without a rule: bytes are known, so it is kept; what is not known is said."""
            if not call.outs:
                return []
            if torch.Tag.pointwise in func.tags:
                return [pointwise(call, "unspecified")]
            key = (str(func), self.path())
            byte = sum(t.byte for t in call.inputs) + sum(t.byte for t in call.outs)
            flop = _flop(func, args, kwargs, out)
            before = self.lost.get(key, (0.0, 0.0))
            self.unknown[key] += 1
            self.lost[key] = (before[0] + flop, before[1] + byte)
            read = sum(t.byte for t in call.inputs)
            write = sum(t.byte for t in call.outs)
            n = max(call.outs[0].numel, 1)
            return [Elementwise("unspecified", n, dtype=call.outs[0].dtype, read=read, write=write)]

    return Watch()


def _gpu_kernels(torch: Any) -> Any:
    """Send attention, dropout and fp16 softmax to the kernels a GPU would pick, not to those of meta tensors."""
    aten, plain = torch.ops.aten, torch.nn.functional.scaled_dot_product_attention
    dropouts = (torch.nn.functional.dropout, torch.dropout)
    softmaxes = (torch.nn.functional.softmax, torch.softmax, torch.Tensor.softmax)
    base: Any = import_module("torch.overrides").TorchFunctionMode

    class Fused(base):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is plain:
                return route(*args, **(kwargs or {}))
            if func in dropouts:
                return drop(*args, **(kwargs or {}))
            if func in softmaxes and (kwargs or {}).get("dtype") is torch.float32 and args[0].dtype is torch.float16:
                return aten._softmax(args[0], args[1] if len(args) > 1 else kwargs["dim"], True)
            return func(*args, **(kwargs or {}))

    def drop(input: Any, p: float = 0.5, training: bool = True, train: bool = True, inplace: bool = False) -> Any:
        return aten.native_dropout(input, p, True)[0] if training and train and p > 0.0 else input

    def route(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: Any = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if attn_mask is None and query.shape[-1] == value.shape[-1] <= 256:
            out = aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )
            return out[0]
        if enable_gqa:
            key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            zero = torch.zeros((), dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, zero, float("-inf"))
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        log = torch.is_grad_enabled() and query.requires_grad
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, log, dropout_p, is_causal, scale=scale
        )[0]

    return Fused()


def _is_view(func: Any) -> bool:
    """The schema says that the results alias an argument and nothing is written."""
    results = func._schema.returns
    return bool(results) and all(r.alias_info is not None and not r.alias_info.is_write for r in results)


def _symbolic(torch: Any, tape: Tape, values: Any) -> tuple[Any, ...]:
    return tuple(_one(torch, tape, value) for value in values)


def _one(torch: Any, tape: Tape, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        shape = tuple(int(size) for size in value.shape)
        strides = tuple(int(step) for step in value.stride())
        return Tensor(tape, shape, strides, _dtype(value.dtype), Storage(0))
    if isinstance(value, (list, tuple)):
        return _symbolic(torch, tape, value)
    return value


def _dtype(dtype: Any) -> Dtype:
    """Our name for a format; one we have no name for is taken by its width."""
    name = str(dtype).removeprefix("torch.")
    try:
        return Dtype.of(name)
    except UnknownName:
        return _BY_WIDTH[dtype.itemsize]


_BY_WIDTH = {1: Dtype.INT8, 2: Dtype.FP16, 4: Dtype.INT32, 8: Dtype.INT64, 16: Dtype.FP64}


def _flat(values: Any) -> list[Any]:
    if isinstance(values, (list, tuple)):
        return [item for value in values for item in _flat(value)]
    return [values]


def _modules(module: Any) -> list[tuple[str, Any]]:
    named = getattr(module, "named_modules", None)
    return [(path, child) for path, child in named() if path] if named else []


def _parameters(module: Any) -> dict[Dtype, int]:
    count: dict[Dtype, int] = {}
    for parameter in getattr(module, "parameters", list)():
        dtype = _dtype(parameter.dtype)
        count[dtype] = count.get(dtype, 0) + int(parameter.numel())
    return count


def _default_loss(out: Any) -> Any:
    loss = getattr(out, "loss", None)
    if loss is not None:
        return loss
    first = out
    while isinstance(first, (list, tuple)):
        first = first[0]
    return getattr(first, "logits", getattr(first, "last_hidden_state", first)).sum()


def _flop(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    registry: Any = import_module("torch.utils.flop_counter").flop_registry
    rule = registry.get(func.overloadpacket)
    return float(rule(*args, **kwargs, out_val=out)) if rule else 0.0


def _to_meta(torch: Any, values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return values.to("meta")
    if isinstance(values, Mapping) and type(values) is dict:
        return {key: _to_meta(torch, value) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(_to_meta(torch, value) for value in values)
    return values


def _without_data(torch: Any, module: Any) -> Callable[..., Any]:
    """``module`` as a function whose parameters and buffers are on the meta device, whatever they really are."""
    if not isinstance(module, torch.nn.Module):
        return module  # type: ignore[no-any-return]
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if all(t.device.type == "meta" for t in named.values()):
        return module  # type: ignore[no-any-return]
    empty = {name: t.detach().to("meta").requires_grad_(t.requires_grad) for name, t in named.items()}
    return lambda *args, **kwargs: torch.func.functional_call(module, empty, args, kwargs, tie_weights=True)


def _torch() -> Any:
    try:
        return import_module("torch")
    except ImportError:
        raise MissingTool(
            "capturing a PyTorch module needs PyTorch. Install wattcast[torch], or give a Hugging Face config.json, "
            "a model's name or a profiler trace."
        ) from None
