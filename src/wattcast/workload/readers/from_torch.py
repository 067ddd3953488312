"""Any PyTorch module -> Graph, by recording what it dispatches on tensors that hold no data.

Needs PyTorch (any build; no GPU, no weights). The module is run once on meta tensors under a
dispatch mode. Every call that would launch a kernel becomes an operator. One without a rule is kept
as an ``unspecified`` operator with its bytes, and reported with the FLOPs and bytes that are
uncertain. Memory is that of weights, inputs and the tensors that live at the worst moment; in
training with gradients and AdamW's two moments."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
)
from importlib import import_module
from typing import Any

from wattcast.core import (
    BadInput,
    Dtype,
    bad_value,
    clip_text,
)
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
from wattcast.workload.readers.torch_kernels import route_to_gpu_kernels
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
            "capturing a PyTorch module needs PyTorch. Install it: pip install 'wattcast[torch]', "
            "or give a Hugging Face config.json, a model's name or a profiler trace."
        ) from None

    # The arguments and the module without data; weights and inputs live all the time
    recorder = _CallRecorder(torch, module, tf32)
    tree_map_only = import_module("torch.utils._pytree").tree_map_only
    arguments = _make_inputs(torch, module, inputs)
    args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), arguments)
    run, weights = _without_data(torch, module)
    fixed = [*weights, *find_tensors((args, kwargs), torch.Tensor)]
    fixed_byte = recorder.memory.fix(fixed)

    def run_module() -> None:
        out = run(*args, **kwargs)
        if train:
            recorder.phase = "backward"
            _run_backward(module, (loss or _default_loss)(out))

    _record_run(
        torch,
        module,
        recorder,
        run_module,
        train,
    )

    # One optimiser step for the parameters of each number format
    peak_byte = recorder.memory.peak_byte
    blocks = [Block(tuple(recorder.ops))] if recorder.ops else []
    if train and step:
        for dtype, count in _count_parameters(module).items():
            blocks.append(optimiser_block(count, dtype))
            peak_byte += 2 * count * dtype.byte
    return Graph(
        name=name or type(module).__name__,
        blocks=tuple(blocks),
        memory_byte=float(fixed_byte + peak_byte + WORKSPACE_BYTE),
        assumptions=tuple(recorder.describe()),
        stack="eager",
        phase="train" if train else "forward",
    )


def _record_run(
    torch: Any,
    module: Any,
    recorder: _CallRecorder,
    run_module: Callable[[], None],
    train: bool,
) -> None:
    """Run a module on the meta device and record all calls that it dispatches."""
    keep_saved = torch.autograd.graph.saved_tensors_hooks(  # what backward needs stays alive
        lambda tensor: tensor, lambda tensor: tensor
    )
    dispatch_mode = _make_dispatch_mode(torch, recorder)
    gpu_kernels = route_to_gpu_kernels(torch, recorder.record)
    with torch.device("meta"), dispatch_mode, gpu_kernels, keep_saved:
        try:
            with torch.set_grad_enabled(train):
                run_module()
        except (NotImplementedError, RuntimeError) as error:
            where = recorder.path() or type(module).__name__
            reason = clip_text(str(error).splitlines()[0], 160)
            raise BadInput(
                f"{where}: does not run without data ({reason}). Where a shape or a branch depends "
                "on values, take a profiler trace instead."
            ) from error
        finally:
            recorder.release()


def _run_backward(module: Any, loss: Any) -> None:
    if not getattr(loss, "requires_grad", False):
        where = f"{type(module).__name__}: training"
        raise bad_value(where, "a loss that depends on parameters", "one that does not")
    loss.backward()


def _list_parameters(module: Any) -> list[Any]:
    """Return the parameters of a module; a plain function has none."""
    return list(getattr(module, "parameters", list)())


def _count_parameters(module: Any) -> Counter[Dtype]:
    """Count the parameters of a module by number format."""
    count: Counter[Dtype] = Counter()
    for parameter in _list_parameters(module):
        count[_convert_dtype(parameter.dtype)] += int(parameter.numel())
    return count


def _make_inputs(
    torch: Any,
    module: Any,
    inputs: Any,
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments by place and by name, with tensors in place of shapes."""
    floating = (p.dtype for p in _list_parameters(module) if p.is_floating_point())
    dtype = next(floating, torch.float32)

    def fill(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and value and all(type(size) is int for size in value):
            if min(value) < 1:
                raise bad_value("inputs", "shapes of sizes above zero", str(tuple(value)))
            return torch.empty(tuple(value), dtype=dtype, device="meta")
        if type(value) is dict:  # an encoder's outputs are a mapping too, and more
            return {key: fill(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(fill, value))
        return value

    filled = fill(dict(inputs) if isinstance(inputs, Mapping) else inputs)
    if isinstance(filled, dict):
        return (), filled
    return tuple(filled) if type(filled) in (list, tuple) else (filled,), {}


class _LiveMemory:
    """Bytes of the tensors that are alive, and the most there ever were.

    Tensors that are fixed do not count.
    """

    def __init__(self) -> None:
        self.tensors: Counter[int] = Counter()  # alive on each storage
        self.fixed: dict[int, Any] = {}
        self.byte = 0
        self.peak_byte = 0

    def fix(self, tensors: list[Any]) -> int:
        """Leave out tensors that live all the time, and return their bytes."""
        self.fixed = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        return sum(tensor.untyped_storage().nbytes() for tensor in self.fixed.values())

    def hold(self, tensor: Any) -> None:
        """Count a tensor until nothing refers to it any more; views share one storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key in self.fixed:
            return
        if not self.tensors[key]:
            self.byte += size
        self.tensors[key] += 1
        self.peak_byte = max(self.peak_byte, self.byte)
        weakref.finalize(tensor, self._drop, key, size)

    def _drop(
        self,
        key: int,
        size: int,
    ) -> None:
        self.tensors[key] -= 1
        if not self.tensors[key]:
            self.byte -= size


class _CallRecorder:
    """Operators as they are dispatched, with the submodule that called them."""

    def __init__(
        self,
        torch: Any,
        module: Any,
        tf32: bool | None,
    ) -> None:
        self.torch = torch
        self.tf32 = tf32
        self.ops: list[Operator] = []
        # calls without a rule, by name and submodule
        self.unmapped: dict[tuple[str, str], Counter[str]] = {}
        # submodules that asked their data a question, in order
        self.answered: dict[str, None] = {}
        self.phase = ""
        self.memory = _LiveMemory()
        self.stack: list[str] = []
        self.hooks: list[Any] = []
        for path, child in getattr(module, "named_modules", list)():
            if path:
                self._watch_module(path, child)

    def _watch_module(
        self,
        path: str,
        child: Any,
    ) -> None:
        enter = child.register_forward_pre_hook(lambda *_: self.stack.append(path))
        leave = child.register_forward_hook(self._leave_module, always_call=False)
        self.hooks += [enter, leave]

    def _leave_module(self, *_: Any) -> None:
        if self.stack:
            self.stack.pop()

    def path(self) -> str:
        """Return where in the module the run is."""
        return self.phase or (self.stack[-1] if self.stack else "")

    def release(self) -> None:
        """Stop watching the submodules."""
        for hook in self.hooks:
            hook.remove()

    def record(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        out: Any,
    ) -> None:
        """Append the operators that a call launches."""
        symbolic_args = _to_symbolic(self.torch, (*args, *kwargs.values()))
        results = tuple(find_tensors(_to_symbolic(self.torch, (out,))))
        name = getattr(func, "overloadpacket", func).__name__
        call = AtenCall(
            name,
            symbolic_args,
            results,
            self.tf32,
            len(args),
        )
        has_tensors = bool(results or call.inputs)
        is_empty = bool(results) and not any(tensor.numel for tensor in results)
        if is_empty or not has_tensors:
            return

        ops = map_call(call)
        if ops is None and results and self.torch.Tag.pointwise in func.tags:
            ops = [map_pointwise(call, "unspecified")]
        if ops is None:
            flop = _count_flop(func, args, kwargs, out)
            ops = self._keep_bytes(call, str(func), flop) if results else []
        self.ops += [op.with_label(self.path()) for op in ops]

    def _keep_bytes(
        self,
        call: AtenCall,
        name: str,
        flop: float,
    ) -> list[Operator]:
        """Return an operator that stands for a call without a rule, whose bytes are known."""
        read_byte = sum(tensor.byte for tensor in call.inputs)
        work: dict[str, Any] = {
            "calls": 1,
            "flop": flop,
            "byte": read_byte + call.out_byte,
        }
        self.unmapped.setdefault((name, self.path()), Counter()).update(work)
        op = Elementwise(
            "unspecified",
            max(call.out.numel, 1),
            dtype=call.out.dtype,
            read=read_byte,
            write=call.out_byte,
        )
        return [op]

    def describe(self) -> Iterator[str]:
        """Yield what is assumed of the captured operators."""
        yield (
            "captured from PyTorch on tensors without data; scaled-dot-product attention taken as "
            "one fused kernel"
        )
        for (name, path), work in self.unmapped.items():
            yield (
                f"operator {name} in {path or 'the module'} has no rule: {work['calls']} call(s), "
                f"{work['flop']:.3g} FLOP and {work['byte']:.3g} bytes kept as unspecified "
                "elementwise work"
            )
        for path in self.answered:
            yield f"{path or 'the module'} asks its data a yes-or-no question: answered yes"
        yield from describe_rounding(self.ops)


def _count_flop(
    func: Any,
    args: Any,
    kwargs: Any,
    out: Any,
) -> float:
    """Return the FLOPs of a call by PyTorch's own counter; 0 where that has no rule."""
    registry = import_module("torch.utils.flop_counter").flop_registry
    rule = registry.get(func.overloadpacket)
    return float(rule(*args, **kwargs, out_val=out)) if rule else 0.0


def _make_dispatch_mode(torch: Any, recorder: _CallRecorder) -> Any:
    """Return a mode under which every dispatched call is recorded."""
    base: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode
    read_scalar = torch.ops.aten._local_scalar_dense.default

    class RecordingMode(base):  # type: ignore[misc]
        def __torch_dispatch__(
            self,
            func: Any,
            types: Any,
            args: Any = (),
            kwargs: Any = None,
        ) -> Any:
            if func is read_scalar and args[0].dtype is torch.bool:
                recorder.answered[recorder.path()] = None
                return True
            kwargs = kwargs or {}
            out = func(*args, **kwargs)
            for tensor in find_tensors(out, torch.Tensor):
                recorder.memory.hold(tensor)
            if not _returns_views(func):
                recorder.record(func, args, kwargs, out)
            return out

    return RecordingMode()


def _returns_views(func: Any) -> bool:
    """Tell whether all results alias an argument and nothing is written: no kernel is launched."""
    aliases = [result.alias_info for result in func._schema.returns]
    if not aliases:
        return False
    return all(alias is not None and not alias.is_write for alias in aliases)


def _to_symbolic(torch: Any, value: Any) -> Any:
    """Replace PyTorch's tensors, in nested lists too, by ours."""
    if isinstance(value, torch.Tensor):
        shape = tuple(map(int, value.shape))
        strides = tuple(map(int, value.stride()))
        return make_tensor(shape, _convert_dtype(value.dtype), strides)
    if isinstance(value, (list, tuple)):
        return tuple(_to_symbolic(torch, item) for item in value)
    return value


# Formats by their bytes, for those that we have no name for.
_DTYPES_BY_BYTE = {
    1: Dtype.INT8,
    2: Dtype.FP16,
    4: Dtype.INT32,
    8: Dtype.INT64,
    16: Dtype.FP64,
}


def _convert_dtype(dtype: Any) -> Dtype:
    """Return our name for a format; one we have no name for is taken by its width."""
    return Dtype.recognise(str(dtype)) or _DTYPES_BY_BYTE[dtype.itemsize]


def _default_loss(out: Any) -> Any:
    """Return the loss that a model computes itself, else the sum of its first tensor."""
    loss = getattr(out, "loss", None)
    if loss is not None:
        return loss
    first = out
    while isinstance(first, (list, tuple)):
        first = first[0]
    return getattr(first, "logits", getattr(first, "last_hidden_state", first)).sum()


def _without_data(torch: Any, module: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Return ``module`` as a function of meta parameters and buffers, and those."""
    if not isinstance(module, torch.nn.Module):
        return module, []
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    if all(tensor.device.type == "meta" for tensor in tensors.values()):
        return module, list(tensors.values())

    empty = {}
    for name, tensor in tensors.items():
        twin = tensor.detach().to("meta")
        empty[name] = twin.requires_grad_(tensor.requires_grad)

    def run(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(
            module,
            empty,
            args,
            kwargs,
            tie_weights=True,
        )

    return run, list(empty.values())
