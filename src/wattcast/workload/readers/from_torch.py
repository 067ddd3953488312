"""Any PyTorch module -> Graph, by recording what it dispatches on tensors that hold no data.

Needs PyTorch (any build; no GPU, no weights). The module is run once on meta tensors under a
dispatch mode. Every call that would launch a kernel becomes an operator. One without a rule is kept
as an ``unspecified`` operator with its bytes, and reported with the FLOPs and bytes that are
uncertain. Memory is that of weights, inputs and the tensors that live at the worst moment; in
training with gradients and AdamW's two moments."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from wattcast.core import BadInput, Dtype, bad_value, clip_text
from wattcast.core.errors import MissingTool
from wattcast.workload.build_model import WORKSPACE_BYTE
from wattcast.workload.graph import Block, Graph
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Elementwise
from wattcast.workload.program import optimiser_block
from wattcast.workload.readers.aten_operators import (
    AtenCall,
    describe_rounding,
    find_tensors,
    map_call,
    map_pointwise,
)
from wattcast.workload.symbolic_tensor import make_tensor


def capture(
    module: Any,
    inputs: Any = (),
    *,
    name: str = "",
    train: bool = False,
    loss: Callable[[Any], Any] | None = None,
    tf32: bool | None = None,
    step: bool = True,
) -> Graph:
    """Return the operators and the memory of ``module(inputs)``: what ``wattcast.predict`` takes.

    ``inputs`` are tensors or shapes: one, a list of them, or a mapping of keyword arguments. A
    shape, such as ``(8, 3, 224, 224)``, stands for a tensor in the format of the module's
    parameters; token numbers are given as a tensor (``torch.empty(8, 128, dtype=torch.long,
    device="meta")`` needs no memory). Parameters and tensors may be real or meta; real ones are
    only looked at. A yes-or-no question about data ("is nothing padded?") is answered yes, and the
    graph says so. ``train`` adds the backward pass of ``loss(output)`` (default: ``output.loss``,
    or the sum of the first tensor) and, with ``step``, one fused AdamW step. The kernels are those
    of PyTorch eager, in the formats of the module: ``capture(module.to(torch.bfloat16), ...)``.
    ``tf32`` says which products of fp32 tensors run in TF32: by default convolutions alone, as
    PyTorch allows it; True all of them; False none."""
    try:
        torch = import_module("torch")
    except ImportError:
        raise MissingTool(
            "capturing a PyTorch module needs PyTorch. Install it: pip install 'wattcast[torch]', or give a Hugging "
            "Face config.json, a model's name or a profiler trace."
        ) from None
    recorder = _make_recorder(torch, module, tf32)
    given = _make_inputs(torch, module, inputs)
    args, kwargs = import_module("torch.utils._pytree").tree_map_only(
        torch.Tensor, lambda t: t.to("meta"), given
    )
    run, weights = _without_data(torch, module)
    fixed = recorder.memory.fixed = {  # weights and inputs live all the time
        t.untyped_storage()._cdata: t
        for t in (*weights, *find_tensors((args, kwargs), torch.Tensor))
    }
    fixed_byte = sum(t.untyped_storage().nbytes() for t in fixed.values())
    kept = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t
    )  # what backward needs stays alive
    with torch.device("meta"), recorder, _gpu_kernels(torch, recorder), kept:
        try:
            with torch.set_grad_enabled(train):
                out = run(*args, **kwargs)
                if train:
                    recorder.phase = "backward"
                    value = (loss or _default_loss)(out)
                    if not getattr(value, "requires_grad", False):
                        where = f"{type(module).__name__}: training"
                        raise bad_value(
                            where, "a loss that depends on parameters", "one that does not"
                        )
                    value.backward()
        except (NotImplementedError, RuntimeError) as error:
            where = recorder.path() or type(module).__name__
            raise BadInput(
                f"{where}: does not run without data ({clip_text(str(error).splitlines()[0], 160)}). Where a shape "
                "or a branch depends on values, take a profiler trace instead."
            ) from error
        finally:
            recorder.release()
    peak_byte = recorder.memory.peak_byte
    parameters: Counter[Dtype] = Counter()
    for parameter in getattr(module, "parameters", list)():
        parameters[_convert_dtype(parameter.dtype)] += int(parameter.numel())
    blocks = [Block(tuple(recorder.ops))] if recorder.ops else []
    if train and step:
        blocks += [optimiser_block(count, dtype) for dtype, count in parameters.items()]
        peak_byte += 2 * sum(count * dtype.byte for dtype, count in parameters.items())
    said = [
        "captured from PyTorch on tensors without data; scaled-dot-product attention taken as one fused kernel"
    ]
    said += [
        f"operator {called} in {path or 'the module'} has no rule: {u['calls']} call(s), {u['flop']:.3g} FLOP and "
        f"{u['byte']:.3g} bytes kept as unspecified elementwise work"
        for (called, path), u in recorder.unmapped.items()
    ]
    said += [
        f"{path or 'the module'} asks its data a yes-or-no question: answered yes"
        for path in recorder.answered
    ]
    said += describe_rounding(recorder.ops)
    memory_byte = float(fixed_byte + peak_byte + WORKSPACE_BYTE)
    phase = "train" if train else "forward"
    return Graph(
        name or type(module).__name__, tuple(blocks), memory_byte, tuple(said), "eager", phase
    )


def _make_inputs(torch: Any, module: Any, inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments by place and by name, with tensors in place of shapes."""
    format_ = next(
        (p.dtype for p in getattr(module, "parameters", list)() if p.is_floating_point()),
        torch.float32,
    )

    def fill(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and value and all(type(size) is int for size in value):
            if min(value) < 1:
                raise bad_value("inputs", "shapes of sizes above zero", str(tuple(value)))
            return torch.empty(tuple(value), dtype=format_, device="meta")
        if type(value) is dict:  # an encoder's outputs are a mapping too, and more
            return {key: fill(item) for key, item in value.items()}
        return type(value)(fill(item) for item in value) if type(value) in (list, tuple) else value

    filled = fill(dict(inputs) if isinstance(inputs, Mapping) else inputs)
    if isinstance(filled, dict):
        return (), filled
    return tuple(filled) if type(filled) in (list, tuple) else (filled,), {}


class _LiveMemory:
    """Bytes of the tensors that are alive, and the most there ever were; those that are fixed do
    not count.
    """

    def __init__(self) -> None:
        self.tensors: Counter[int] = Counter()  # alive on each storage
        self.fixed: dict[int, Any] = {}
        self.byte = self.peak_byte = 0

    def hold(self, tensor: Any) -> None:
        """Count a tensor until nothing refers to it any more; views share one storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key in self.fixed:
            return
        self.byte += 0 if self.tensors[key] else size
        self.tensors[key] += 1
        self.peak_byte = max(self.peak_byte, self.byte)
        weakref.finalize(tensor, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.tensors[key] -= 1
        self.byte -= 0 if self.tensors[key] else size


def _make_recorder(torch: Any, module: Any, tf32: bool | None) -> Any:
    dispatch: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode

    class Recorder(dispatch):  # type: ignore[misc]
        """Records operators as they are dispatched, with the module that called them."""

        def __init__(self) -> None:
            super().__init__()
            self.ops: list[Operator] = []
            self.unmapped: dict[
                tuple[str, str], Counter[str]
            ] = {}  # what is not known, by name and module
            self.answered: dict[
                str, None
            ] = {}  # modules that asked their data a question, in order
            self.phase = ""
            self.memory = _LiveMemory()
            self.stack: list[str] = []
            self.hooks: list[Any] = []
            for path, child in getattr(module, "named_modules", list)():
                if path:
                    self.hooks.append(
                        child.register_forward_pre_hook(
                            lambda *_, path=path: self.stack.append(path)
                        )
                    )
                    self.hooks.append(
                        child.register_forward_hook(self._leave_module, always_call=False)
                    )

        def _leave_module(self, *_: Any) -> None:
            if self.stack:
                self.stack.pop()

        def path(self) -> str:
            return self.phase or (self.stack[-1] if self.stack else "")

        def release(self) -> None:
            for hook in self.hooks:
                hook.remove()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
                self.answered[self.path()] = None
                return True
            kwargs = kwargs or {}
            out = func(*args, **kwargs)
            for tensor in find_tensors(out, torch.Tensor):
                self.memory.hold(tensor)
            returned = [result.alias_info for result in func._schema.returns]
            views = bool(returned) and all(
                alias is not None and not alias.is_write for alias in returned
            )
            if not views:  # results that alias an argument, with nothing written, launch no kernel
                self.record(func, args, kwargs, out)
            return out

        def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
            given = _to_symbolic(torch, (*args, *kwargs.values()))
            results = tuple(find_tensors(_to_symbolic(torch, (out,))))
            call = AtenCall(
                getattr(func, "overloadpacket", func).__name__, given, results, tf32, len(args)
            )
            if not (results or call.inputs) or (results and not any(t.numel for t in results)):
                return
            found = map_call(call)
            if found is None and torch.Tag.pointwise in func.tags and results:
                found = [map_pointwise(call, "unspecified")]
            if found is None:
                rule = import_module("torch.utils.flop_counter").flop_registry.get(
                    func.overloadpacket
                )
                flop = float(rule(*args, **kwargs, out_val=out)) if rule else 0.0
                found = []
                if results:  # kept with its bytes, which are known
                    read = sum(t.byte for t in call.inputs)
                    stake: dict[str, Any] = {"calls": 1, "flop": flop, "byte": read + call.out_byte}
                    self.unmapped.setdefault((str(func), self.path()), Counter()).update(stake)
                    n = max(call.out.numel, 1)
                    kind = call.out.dtype
                    found = [
                        Elementwise("unspecified", n, dtype=kind, read=read, write=call.out_byte)
                    ]
            self.ops += [op.with_label(self.path()) for op in found]

    return Recorder()


def _gpu_kernels(torch: Any, recorder: Any) -> Any:
    """Return a mode that sends attention, dropout, fp16 softmax and RMS norms to the kernels a GPU
    would pick.

    An RMS norm is one kernel on a GPU since PyTorch 2.9 and eight operators elsewhere
    [pytorch/pytorch#153666]."""
    aten = torch.ops.aten
    functional = torch.nn.functional
    softmaxes = (functional.softmax, torch.softmax, torch.Tensor.softmax)
    base: Any = import_module("torch.overrides").TorchFunctionMode

    class Fused(base):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if (
                func in softmaxes
                and kwargs.get("dtype") is torch.float32
                and args[0].dtype is torch.float16
            ):
                return aten._softmax(args[0], args[1] if len(args) > 1 else kwargs["dim"], True)
            return routes.get(func, func)(*args, **kwargs)

    class RootMeanSquare(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, shape: Sequence[int]) -> Any:
            ctx.save_for_backward(x, weight)
            ctx.shape, out = shape, torch.empty_like(x, memory_format=torch.contiguous_format)
            recorder.record(aten._fused_rms_norm, (x, shape, weight), {}, out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight = ctx.saved_tensors
            found = torch.empty_like(x), None if weight is None else torch.empty_like(weight)
            recorder.record(aten._fused_rms_norm_backward, (grad, x, ctx.shape, weight), {}, found)
            return *found, None

    def norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
        return RootMeanSquare.apply(input, weight, list(normalized_shape))

    def drop(
        input: Any, p: float = 0.5, training: bool = True, train: bool = True, inplace: bool = False
    ) -> Any:
        return aten.native_dropout(input, p, True)[0] if training and train and p > 0.0 else input

    def route(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: Any = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if attn_mask is None and query.shape[-1] == value.shape[-1] <= 256:
            flash = aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        if enable_gqa:
            key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            zero = torch.zeros((), dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, zero, float("-inf"))
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        log = torch.is_grad_enabled() and query.requires_grad
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, attn_mask, log, dropout_p, is_causal, scale=scale)[0]

    routes = {
        functional.scaled_dot_product_attention: route,
        functional.dropout: drop,
        torch.dropout: drop,
    }
    routes |= {functional.rms_norm: norm, torch.rms_norm: norm}
    return Fused()


def _to_symbolic(torch: Any, value: Any) -> Any:
    """Replace PyTorch's tensors, in nested lists too, by ours."""
    if isinstance(value, torch.Tensor):
        shape = tuple(map(int, value.shape))
        strides = tuple(map(int, value.stride()))
        return make_tensor(shape, _convert_dtype(value.dtype), strides)
    if isinstance(value, (list, tuple)):
        return tuple(_to_symbolic(torch, item) for item in value)
    return value


def _convert_dtype(dtype: Any) -> Dtype:
    """Return our name for a format; one we have no name for is taken by its width."""
    by_width = {1: Dtype.INT8, 2: Dtype.FP16, 4: Dtype.INT32, 8: Dtype.INT64, 16: Dtype.FP64}
    return Dtype.recognise(str(dtype)) or by_width[dtype.itemsize]


def _default_loss(out: Any) -> Any:
    loss = getattr(out, "loss", None)
    if loss is not None:
        return loss
    first = out
    while isinstance(first, (list, tuple)):
        first = first[0]
    return getattr(first, "logits", getattr(first, "last_hidden_state", first)).sum()


def _without_data(torch: Any, module: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Return ``module`` as a function whose parameters and buffers are on the meta device, and
    those.
    """
    if not isinstance(module, torch.nn.Module):
        return module, []
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if all(t.device.type == "meta" for t in named.values()):
        return module, list(named.values())
    empty = {
        name: t.detach().to("meta").requires_grad_(t.requires_grad) for name, t in named.items()
    }

    def run(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(module, empty, args, kwargs, tie_weights=True)

    return run, list(empty.values())
