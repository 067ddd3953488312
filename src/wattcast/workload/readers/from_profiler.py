"""PyTorch profiler traces (Chrome JSON with ``record_shapes=True``) -> Graph.

A kernel names the operator that launched it, and the operator's recorded shapes give the work. A
trace does not record the shapes of results; ``result_shapes`` infers them."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import (
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from wattcast.core import (
    BadInput,
    Dtype,
    bad_value,
)
from wattcast.core.strict_files import (
    decode_json,
    gunzip_bytes,
    read_bytes,
)
from wattcast.workload.graph import Block, Graph
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Elementwise
from wattcast.workload.readers.aten_operators import (
    AtenCall,
    describe_rounding,
    launches_kernel,
    map_call,
)
from wattcast.workload.readers.result_shapes import infer_results
from wattcast.workload.symbolic_tensor import Tensor, make_tensor

MAX_PROFILE_BYTE = 1 << 29
_LONGEST_VALUE = 10_000  # characters of a recorded value; longer ones are not sizes
_MICROSECOND_S = 1e-6
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# The rules of these operators cover what they call inside, so that a bias added there is not
# counted twice.
_ATTENTIONS = [f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]
_ATTENTION_GRADIENTS = [f"{name}_backward" for name in _ATTENTIONS]
_OTHER_WHOLE = """convolution convolution_backward native_layer_norm native_group_norm
    native_batch_norm embedding_dense_backward nll_loss_backward constant_pad_nd"""
_WHOLE = {*_ATTENTIONS, *_ATTENTION_GRADIENTS, *_OTHER_WHOLE.split()}
_PASSING = ("_to_copy", "copy")  # the copy_ inside knows both formats
_FLOATING = (Dtype.BF16, Dtype.FP16, Dtype.FP32, Dtype.FP64)
# What reading a call raises when its recorded arguments are not those of the operator.
_WRONG_ARGUMENTS = (
    ArithmeticError,
    AssertionError,
    BadInput,
    LookupError,
    StopIteration,
    TypeError,
    ValueError,
)


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
        identifier = self.args.get("External id")
        return identifier if isinstance(identifier, (int, str)) else None

    @property
    def duration_s(self) -> float:
        """How long it ran."""
        return self.dur * _MICROSECOND_S

    @property
    def is_host_copy(self) -> bool:
        """Whether it is a copy between host and device."""
        return self.cat == "gpu_memcpy" and ("HtoD" in self.name or "DtoH" in self.name)


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
    def has_rule(self) -> bool:
        return launches_kernel(self.name) is True and "Input Dims" in self.event.args

    @property
    def may_launch(self) -> bool:
        is_aten = self.event.name.startswith("aten::")
        return is_aten and launches_kernel(self.name) is not False


@dataclass
class _UnmappedLaunches:
    """Launches without a rule or without shapes, by name."""

    calls: Counter[str] = field(default_factory=Counter)
    duration_s: Counter[str] = field(default_factory=Counter)

    def add(
        self,
        name: str,
        calls: int,
        duration_s: float,
    ) -> None:
        self.calls[name] += calls
        self.duration_s[name] += duration_s  # type: ignore[assignment]  # seconds are no integer

    def describe(self) -> Iterator[str]:
        """Yield a sentence for each name."""
        for name, calls in self.calls.items():
            yield (
                f"{name}: {calls} launch(es), {self.duration_s[name]:.3g} s, has no rule or no "
                "shapes; kept with one element or left out"
            )


def read_profile(path: Path) -> Graph:
    """Read a trace file, gzipped or not."""
    content = read_bytes(path, MAX_PROFILE_BYTE)
    return parse_profile(gunzip_bytes(content, path.name, MAX_PROFILE_BYTE), path.name)


def parse_profile(data: bytes, where: str) -> Graph:
    """Turn trace JSON into a graph.

    The graph's assumptions name the kernels without a known operator, with their time.
    """
    trace = decode_json(data, ProfilerTrace, where)
    events = [event for event in trace.traceEvents if event.ph == "X"]
    nodes = _nest_operators([event for event in events if event.cat == "cpu_op"])
    _check_recording(nodes, where)

    # Operators that launched kernels; without kernels in the trace, those that would.
    kernels = [event for event in events if event.cat in _DEVICE]
    unmapped = _UnmappedLaunches()
    copies = 0
    if kernels:
        copies = _assign_kernels(nodes, kernels, unmapped)
        launching = [node for node in nodes if node.kernels]
    else:
        launching = _find_outermost(nodes, unmapped)

    main_dtype = _find_commonest_format(nodes)
    ops: list[Operator] = []
    for node in launching:
        ops += _map_node(node, main_dtype, unmapped)
    if not ops:
        raise BadInput(
            f"{where}: none of its {len(nodes)} operators is known. "
            "Is it a trace of a PyTorch model?"
        )

    notes = [
        f"from a profiler trace of {len(nodes)} operators and {len(kernels)} kernels; "
        "all of it is one run"
    ]
    if not kernels:
        notes.append(
            "the trace has no kernels: its innermost known operators are taken to launch one each"
        )
    if copies:
        notes.append(f"{copies} copies between host and device are left out")
    notes.append(
        "lists of tensors carry no number format in a trace: "
        f"{main_dtype}, the commonest, is assumed"
    )
    notes += unmapped.describe()
    notes += describe_rounding(ops)
    return Graph(where.split(".")[0], (Block(tuple(ops)),), None, tuple(notes))


def _check_recording(nodes: Sequence[_Node], where: str) -> None:
    """Refuse a trace without operators or without their shapes."""
    if not nodes:
        raise bad_value(where, "operators (cpu_op events)", "none", "Profile the CPU activity too.")
    if not any("Input Dims" in node.event.args for node in nodes):
        raise bad_value(
            where, "operators with their shapes", "none", "Profile with record_shapes=True."
        )


def _assign_kernels(
    nodes: Sequence[_Node],
    kernels: Sequence[ProfilerEvent],
    unmapped: _UnmappedLaunches,
) -> int:
    """Add each kernel to its operator, and return the number of copies from or to the host."""
    by_id = {node.event.external_id: node for node in nodes}
    copies = 0
    for kernel in sorted(kernels, key=lambda event: event.ts):
        node = by_id.get(kernel.external_id)
        owner = _find_owner(node)
        if kernel.is_host_copy:
            copies += 1
        elif owner is not None:
            owner.kernels += 1
            owner.kernel_s += kernel.duration_s
        else:
            launcher = node.event if node is not None else kernel
            unmapped.add(launcher.name, 1, kernel.duration_s)
    return copies


def _find_commonest_format(nodes: Sequence[_Node]) -> Dtype:
    """Return the commonest floating format of all recorded tensors."""
    count: Counter[Dtype | None] = Counter()
    for node in nodes:
        kinds = node.event.args.get("Input type")
        if isinstance(kinds, list):
            count.update(Dtype.recognise(name) for name in kinds if isinstance(name, str))
    for dtype, _ in count.most_common():
        if dtype in _FLOATING:
            return dtype
    return Dtype.FP32


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
    """Return the operator that a kernel belongs to.

    That is the outermost whose rule covers its inside, else the innermost that has a rule.
    """
    nearest = None
    while node is not None:
        if node.name in _WHOLE:
            return node
        if nearest is None and node.has_rule:
            nearest = node
        node = node.parent
    return nearest


def _find_outermost(nodes: Sequence[_Node], unmapped: _UnmappedLaunches) -> list[_Node]:
    """Return the outermost operators that have rules, and note innermost ones that have none.

    They stand for the kernels that the trace does not have.
    """
    inside: set[int] = set()
    outermost = []
    for node in nodes:  # parents come before their children
        if node.parent is not None and id(node.parent) in inside:
            inside.add(id(node))
        elif node.has_rule and node.name not in _PASSING:
            outermost.append(node)
            inside.add(id(node))
        elif node.is_leaf and node.may_launch:
            unmapped.add(node.event.name, 1, node.event.duration_s)
    return outermost


def _map_node(
    node: _Node,
    main_dtype: Dtype,
    unmapped: _UnmappedLaunches,
) -> list[Operator]:
    """Return the operators that a recorded call stands for; one without a rule is unspecified."""
    name = node.event.name
    try:
        args = _read_arguments(node.event.args, main_dtype)
        results = infer_results(node.name, args)
        ops = map_call(AtenCall(node.name, args, results)) if results else None
    except _WRONG_ARGUMENTS:
        ops = None
    if ops is None:
        unmapped.add(name, max(node.kernels, 1), node.kernel_s)
        ops = [Elementwise("unspecified", 1)]
    return [op.with_label(name) for op in ops]


def _read_arguments(args: Mapping[str, Any], main_dtype: Dtype) -> tuple[Any, ...]:
    """Turn recorded dims, strides, types and values into tensors, lists and plain numbers."""

    def recorded(
        key: str,
        index: int,
        default: Any,
    ) -> Any:
        values = args.get(key, [])
        return values[index] if index < len(values) else default

    arguments: list[Any] = []
    for index, kind in enumerate(args.get("Input type", [])):
        shape = recorded("Input Dims", index, [])
        strides = recorded("Input Strides", index, None)
        dtype = Dtype.recognise(kind) if isinstance(kind, str) else None
        if dtype:
            arguments.append(_make_tensor(shape, strides, dtype))
        elif kind == "TensorList":
            arguments.append(_make_tensors(shape, strides, main_dtype))
        else:
            arguments.append(_read_value(recorded("Concrete Inputs", index, "")))
    return tuple(arguments)


def _make_tensors(
    shapes: Sequence[Any],
    strides: Any,
    dtype: Dtype,
) -> tuple[Tensor, ...]:
    """Make the tensors of a list, row-major where their strides were not recorded."""
    if not strides or len(strides) != len(shapes):
        strides = [None] * len(shapes)
    pairs = zip(shapes, strides, strict=True)
    return tuple([_make_tensor(shape, steps, dtype) for shape, steps in pairs])


def _make_tensor(
    shape: Sequence[Any],
    strides: Sequence[Any] | None,
    dtype: Dtype,
) -> Tensor:
    sizes = tuple(map(int, shape))
    steps = tuple(map(int, strides or ()))
    return make_tensor(sizes, dtype, steps if len(steps) == len(sizes) else None)


def _read_value(text: object) -> Any:
    """Return a recorded number or list; text that is neither as it is."""
    if not isinstance(text, str) or not text or len(text) > _LONGEST_VALUE:
        return None
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, (int, float, bool, list)) else text
