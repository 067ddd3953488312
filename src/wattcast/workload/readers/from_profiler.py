"""PyTorch profiler traces (Chrome JSON with ``record_shapes=True``) -> Graph.

A kernel names the operator that launched it, and the operator's recorded shapes give the work. A
trace does not record the shapes of results, which follow from the rules of each operator."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from wattcast.core import BadInput, Dtype, bad_value
from wattcast.core.strict_files import decode_json, gunzip_bytes, read_bytes
from wattcast.workload.graph import Block, Graph
from wattcast.workload.memory_layout import broadcast_shapes, output_strides, promote_dtypes
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Elementwise
from wattcast.workload.readers.aten_operators import (
    AtenCall,
    describe_rounding,
    find_tensors,
    launches_kernel,
    map_call,
)
from wattcast.workload.symbolic_tensor import Tensor, make_tensor

MAX_PROFILE_BYTE = 1 << 29
_MICROSECOND_S = 1e-6
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# operators whose rule covers what they call inside, so that a bias added there is not counted twice
_ATTENTIONS = [f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]
_WHOLE = {*_ATTENTIONS, *(f"{name}_backward" for name in _ATTENTIONS)} | set(
    """convolution convolution_backward native_layer_norm native_group_norm native_batch_norm
    embedding_dense_backward nll_loss_backward constant_pad_nd""".split()
)
_PASSING = ("_to_copy", "copy")  # the copy_ inside knows both formats
_REDUCTIONS = frozenset("sum mean amax amin max min any all argmax prod".split())
_COMPARISONS = frozenset("lt le gt ge eq ne logical_not logical_and logical_or isin".split())
_FLOATING = (Dtype.BF16, Dtype.FP16, Dtype.FP32, Dtype.FP64)


class ProfilerEvent(msgspec.Struct):
    """An event of a trace: an operator of the host, a kernel, a copy."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: dict[str, Any] = {}

    @property
    def external_id(self) -> int | str | None:
        """What a kernel and the operator that launched it have in common."""
        given = self.args.get("External id")
        return given if isinstance(given, (int, str)) else None


class ProfilerTrace(msgspec.Struct):
    """A trace as PyTorch's profiler writes it."""

    traceEvents: list[ProfilerEvent]
    baseTimeNanoseconds: int | None = None  # Unix time from which events count


@dataclass
class _Node:
    """A recorded operator, the one around it, and the time of the kernels it launched."""

    event: ProfilerEvent
    parent: _Node | None
    is_leaf: bool = True
    kernels: int = 0
    kernel_s: float = 0.0

    @property
    def name(self) -> str:
        return self.event.name.removeprefix("aten::")

    @property
    def is_known(self) -> bool:
        return launches_kernel(self.name) is True and "Input Dims" in self.event.args


def read_profile(path: Path) -> Graph:
    """Read a trace file, gzipped or not."""
    return parse_profile(
        gunzip_bytes(read_bytes(path, MAX_PROFILE_BYTE), path.name, MAX_PROFILE_BYTE), path.name
    )


def parse_profile(data: bytes, where: str) -> Graph:
    """Turn trace JSON into a graph; its assumptions name kernels without a known operator, with
    their time.
    """
    events = [e for e in decode_json(data, ProfilerTrace, where).traceEvents if e.ph == "X"]
    nodes = _nest_operators([e for e in events if e.cat == "cpu_op"])
    if not nodes:
        raise bad_value(where, "operators (cpu_op events)", "none", "Profile the CPU activity too.")
    if not any("Input Dims" in node.event.args for node in nodes):
        raise bad_value(
            where, "operators with their shapes", "none", "Profile with record_shapes=True."
        )
    device = sorted((e for e in events if e.cat in _DEVICE), key=lambda e: e.ts)
    unmapped: dict[str, tuple[int, float]] = {}  # name -> launches, seconds
    copies = 0
    if device:
        by_id = {node.event.external_id: node for node in nodes}
        for event in device:
            node = by_id.get(event.external_id)
            owner = _find_owner(node)
            if event.cat == "gpu_memcpy" and ("HtoD" in event.name or "DtoH" in event.name):
                copies += 1
            elif owner is None:
                _add_unmapped(
                    unmapped, (node.event if node else event).name, 1, event.dur * _MICROSECOND_S
                )
            else:
                owner.kernels += 1
                owner.kernel_s += event.dur * _MICROSECOND_S
        chosen = [node for node in nodes if node.kernels]
    else:
        chosen = _find_outermost(nodes, unmapped)
    listed = [
        kinds for node in nodes if isinstance(kinds := node.event.args.get("Input type"), list)
    ]
    count = Counter(
        Dtype.recognise(name) for kinds in listed for name in kinds if isinstance(name, str)
    )
    main_dtype = next((dtype for dtype, _ in count.most_common() if dtype in _FLOATING), Dtype.FP32)
    ops = tuple(op for node in chosen for op in _map_node(node, main_dtype, unmapped))
    if not ops:
        raise BadInput(
            f"{where}: none of its {len(nodes)} operators is known. Is it a trace of a PyTorch model?"
        )
    said = [
        f"from a profiler trace of {len(nodes)} operators and {len(device)} kernels; all of it is one run"
    ]
    if not device:
        said.append(
            "the trace has no kernels: its innermost known operators are taken to launch one each"
        )
    if copies:
        said.append(f"{copies} copies between host and device are left out")
    said.append(
        f"lists of tensors carry no number format in a trace: {main_dtype}, the commonest, is assumed"
    )
    said += [
        f"{name}: {calls} launch(es), {seconds:.3g} s, has no rule or no shapes; kept with one element or left out"
        for name, (calls, seconds) in unmapped.items()
    ]
    said += describe_rounding(ops)
    return Graph(where.split(".")[0], (Block(ops),), None, tuple(said))


def _nest_operators(events: Sequence[ProfilerEvent]) -> list[_Node]:
    """Return operators in issue order, each with the one around it on the same thread."""
    nodes: list[_Node] = []
    stacks: dict[tuple[int | str, int | str], list[_Node]] = {}
    for event in sorted(events, key=lambda e: (e.ts, -e.dur)):
        stack = stacks.setdefault((event.pid, event.tid), [])
        while stack and stack[-1].event.ts + stack[-1].event.dur <= event.ts:
            stack.pop()
        node = _Node(event, stack[-1] if stack else None)
        if node.parent is not None:
            node.parent.is_leaf = False
        stack.append(node)
        nodes.append(node)
    return nodes


def _find_owner(node: _Node | None) -> _Node | None:
    """Return the operator a kernel belongs to: the outermost that covers its inside, else the
    innermost we know.
    """
    nearest = None
    while node is not None:
        if node.name in _WHOLE:
            return node
        if nearest is None and node.is_known:
            nearest = node
        node = node.parent
    return nearest


def _find_outermost(nodes: list[_Node], unmapped: dict[str, tuple[int, float]]) -> list[_Node]:
    """Without kernels, return the outermost operators we know, and note innermost ones we do not."""
    inside: set[int] = set()
    chosen = []
    for node in nodes:  # parents come before their children
        if node.parent is not None and id(node.parent) in inside:
            inside.add(id(node))
        elif node.is_known and node.name not in _PASSING:
            chosen.append(node)
            inside.add(id(node))
        elif (
            node.is_leaf
            and launches_kernel(node.name) is not False
            and node.event.name.startswith("aten::")
        ):
            _add_unmapped(unmapped, node.event.name, 1, node.event.dur * _MICROSECOND_S)
    return chosen


def _map_node(
    node: _Node, main_dtype: Dtype, unmapped: dict[str, tuple[int, float]]
) -> list[Operator]:
    try:
        args = _read_arguments(node.event.args, main_dtype)
        outs = _infer_results(node.name, args)
        found = map_call(AtenCall(node.name, args, outs)) if outs else None
    except (
        ArithmeticError,
        AssertionError,
        BadInput,
        LookupError,
        StopIteration,
        TypeError,
        ValueError,
    ):
        found = None  # the recorded arguments are not those of the operator
    if found is None:
        _add_unmapped(unmapped, node.event.name, max(node.kernels, 1), node.kernel_s)
        found = [Elementwise("unspecified", 1)]
    return [op.with_label(node.event.name) for op in found]


def _add_unmapped(
    unmapped: dict[str, tuple[int, float]], name: str, calls: int, seconds: float
) -> None:
    before = unmapped.get(name, (0, 0.0))
    unmapped[name] = (before[0] + calls, before[1] + seconds)


def _read_arguments(args: Mapping[str, Any], main_dtype: Dtype) -> tuple[Any, ...]:
    """Turn recorded dims, strides, types and values into tensors, lists and plain numbers, in
    order.
    """

    def recorded(key: str, index: int, default: Any) -> Any:
        values = args.get(key, [])
        return values[index] if index < len(values) else default

    found: list[Any] = []
    for index, kind in enumerate(args.get("Input type", [])):
        shape = recorded("Input Dims", index, [])
        strides = recorded("Input Strides", index, None)
        if isinstance(kind, str) and (dtype := Dtype.recognise(kind)):
            found.append(_make_tensor(shape, strides, dtype))
        elif kind == "TensorList":
            steps = strides if strides and len(strides) == len(shape) else [None] * len(shape)
            found.append(
                tuple(_make_tensor(s, t, main_dtype) for s, t in zip(shape, steps, strict=True))
            )
        else:
            found.append(_read_value(recorded("Concrete Inputs", index, "")))
    return tuple(found)


def _make_tensor(shape: Sequence[Any], strides: Sequence[Any] | None, dtype: Dtype) -> Tensor:
    sizes = tuple(int(size) for size in shape)
    steps = tuple(int(step) for step in strides or ())
    return make_tensor(sizes, dtype, steps if len(steps) == len(sizes) else None)


def _read_value(text: object) -> Any:
    if not isinstance(text, str) or not text or len(text) > 10_000:
        return None
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, (int, float, bool, list)) else text


def _infer_results(name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return the results of a call by the rules of its operator; none where they do not follow from
    its inputs.
    """
    tensors = find_tensors(args)
    if not tensors:
        return ()
    first = tensors[0]
    if name.endswith("_") and not name.startswith("__"):
        return (first,)
    if name == "convolution_backward":
        return tuple(tensors[1:3])
    if name in ("native_layer_norm_backward", "native_group_norm_backward", "nll_loss_backward"):
        return (make_tensor(tensors[1].shape, tensors[1].dtype),)
    shape = _infer_shape(name, args, tensors)
    if shape is not None:
        return (make_tensor(shape, first.dtype),)
    shape = broadcast_shapes(*(t.shape for t in tensors))
    dtype = Dtype.BOOL if name in _COMPARISONS else promote_dtypes([t.operand for t in tensors])
    return (
        make_tensor(shape, dtype, output_strides(shape, [(t.shape, t.strides) for t in tensors])),
    )


def _infer_shape(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> tuple[int, ...] | None:
    """Return the shape of a row-major result, or None where all inputs are broadcast."""
    first = tensors[0]
    last = tensors[-1]
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        return (*tensors[-2].shape[:-1], last.shape[-1])
    if name == "cat":
        parts = [t for t in tensors if t.numel]
        axis = args[1] % len(parts[0].shape) if len(args) > 1 and isinstance(args[1], int) else 0
        sizes = parts[0].shape
        return (*sizes[:axis], sum(t.shape[axis] for t in parts), *sizes[axis + 1 :])
    if name == "embedding":
        return (*last.shape, first.shape[-1])
    if name == "gather":
        return last.shape
    if name == "index_select":
        axis = int(args[1]) % len(first.shape)
        return (*first.shape[:axis], last.numel, *first.shape[axis + 1 :])
    if name == "index":
        return (
            *broadcast_shapes(*(t.shape for t in tensors[1:])),
            *first.shape[len(tensors) - 1 :],
        )
    if name == "embedding_dense_backward":
        return (args[2], first.shape[-1])
    if name in _REDUCTIONS:
        axes = args[1] if len(args) > 1 else None
        axes = [axes] if isinstance(axes, int) and not isinstance(axes, bool) else axes
        if not isinstance(axes, list) or not axes:
            return ()
        gone = {int(axis) % len(first.shape) for axis in axes}
        return tuple(size for axis, size in enumerate(first.shape) if axis not in gone)
    if name == "convolution":
        x, weight, _, stride, padding, dilation = args[:6]
        if len(args) > 6 and args[6] is True:
            raise ValueError("transposed convolution")
        sides = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        out = [
            (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
            for size, kernel, step, pad, gap in sides
        ]
        return (x.shape[0], weight.shape[0], *out)
    if name in ("slice_backward", "select_backward") and isinstance(args[1], list):
        return tuple(args[1])
    if name == "constant_pad_nd" and isinstance(args[1], list):
        padded = list(first.shape)
        for axis in range(len(args[1]) // 2):
            padded[-1 - axis] += args[1][2 * axis] + args[1][2 * axis + 1]
        return tuple(padded)
    alike = any(word in name for word in ("softmax", "norm", "attention"))
    return first.shape if alike or name in ("native_dropout", "nll_loss_forward") else None
