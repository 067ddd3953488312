"""A PyTorch profiler trace (Chrome JSON, ``record_shapes=True``) -> the operators and kernels that really ran.

Each kernel names the operator that launched it (``External id``); that operator, or the nearest one
around it that we know, becomes an operator of the graph with the shapes recorded. Kernels without a
known operator are reported with the time they took; a trace without kernels (CPU only) is read by
its innermost known operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from wattcast.errors import BadInput, bad_value
from wattcast.files import from_json, read_bytes, unzipped
from wattcast.workload.graph import Block, Elementwise, Graph, Operator
from wattcast.workload.torch_call import Call
from wattcast.workload.torch_operators import free, known, operators
from wattcast.workload.trace_shapes import arguments, main_dtype, results

MAX_TRACE_BYTE = 1 << 29
MICROSECOND_S = 1e-6
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# operators whose rule covers what they call inside, so that a bias added there is not counted twice
_WHOLE = frozenset(
    [
        "convolution",
        "convolution_backward",
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "embedding_dense_backward",
        "nll_loss_backward",
        "constant_pad_nd",
        *(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
        *(f"_scaled_dot_product_{kind}_attention_backward" for kind in ("flash", "efficient", "cudnn")),
    ]
)
_PASSING = ("_to_copy", "copy")  # the copy_ inside knows both formats


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: dict[str, Any] = {}


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]


@dataclass(frozen=True)
class Launch:
    """A kernel as it ran."""

    kernel: str
    operator: str  # ATen name, empty where unknown
    start_s: float
    duration_s: float
    grid: tuple[int, ...]
    block: tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """What a trace shows."""

    graph: Graph
    launches: tuple[Launch, ...]
    unmapped: tuple[tuple[str, int, float], ...]  # operator or kernel, calls, seconds


def read(path: Path) -> Profile:
    """A trace file, gzipped or not."""
    data = unzipped(read_bytes(path, MAX_TRACE_BYTE), path.name, MAX_TRACE_BYTE)
    return parse(data, path.name)


def parse(data: bytes, where: str) -> Profile:
    """Trace JSON -> Profile."""
    events = [e for e in from_json(data, _Trace, where).traceEvents if e.ph == "X"]
    ops = _nested([e for e in events if e.cat == "cpu_op"])
    if not ops:
        raise bad_value(where, "operators (cpu_op events)", "none", "Profile the CPU activity too.")
    if not any("Input Dims" in node.event.args for node in ops):
        raise bad_value(where, "operators with their shapes", "none", "Profile with record_shapes=True.")
    device = sorted((e for e in events if e.cat in _DEVICE), key=lambda e: e.ts)
    return _build(ops, device, where)


@dataclass
class _Node:
    event: _Event
    parent: _Node | None
    leaf: bool = True
    kernels: list[_Event] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.event.name.removeprefix("aten::")


def _nested(events: Sequence[_Event]) -> list[_Node]:
    """Operators in issue order, each with the one around it on the same thread."""
    nodes: list[_Node] = []
    open_: dict[tuple[int | str, int | str], list[_Node]] = {}
    for event in sorted(events, key=lambda e: (e.ts, -e.dur)):
        stack = open_.setdefault((event.pid, event.tid), [])
        while stack and stack[-1].event.ts + stack[-1].event.dur <= event.ts:
            stack.pop()
        node = _Node(event, stack[-1] if stack else None)
        if node.parent is not None:
            node.parent.leaf = False
        stack.append(node)
        nodes.append(node)
    return nodes


def _build(nodes: list[_Node], device: list[_Event], where: str) -> Profile:
    by_id = {node.event.args.get("External id"): node for node in nodes}
    usual = main_dtype([node.event.args for node in nodes])
    chosen: dict[int, _Node] = {}
    lost: dict[str, tuple[int, float]] = {}
    launches, copies = [], 0
    for event in device:
        node = by_id.get(event.args.get("External id"))
        owner = _owner(node) if node is not None else None
        launches.append(_launch(event, owner))
        if _crosses_the_bus(event):
            copies += 1
        elif owner is None:
            _lose(lost, node.event.name if node is not None else event.name, event.dur)
        else:
            owner.kernels.append(event)
            chosen[id(owner)] = owner
    if not device:
        chosen = {id(node): node for node in _outermost(nodes, lost)}
    found = [_operators(node, usual, lost) for node in nodes if id(node) in chosen]
    ops = tuple(op for group in found for op in group)
    if not ops:
        raise BadInput(f"{where}: none of its {len(nodes)} operators is known. Is it a trace of a PyTorch model?")
    unmapped = tuple((name, calls, seconds) for name, (calls, seconds) in lost.items())
    graph = Graph(where.split(".")[0], (Block(ops),), None, tuple(_said(nodes, device, copies, unmapped, str(usual))))
    return Profile(graph, tuple(launches), unmapped)


def _owner(node: _Node) -> _Node | None:
    """The operator a kernel belongs to: the outermost that covers its inside, else the innermost we know."""
    nearest, at = None, node
    while at is not None:
        if at.name in _WHOLE:
            return at
        if nearest is None and known(at.name) and "Input Dims" in at.event.args:
            nearest = at
        at = at.parent  # type: ignore[assignment]
    return nearest


def _outermost(nodes: list[_Node], lost: dict[str, tuple[int, float]]) -> list[_Node]:
    """Without kernels: the outermost operators we know, and a word on innermost ones we do not."""
    inside: set[int] = set()
    chosen = []
    for node in nodes:  # parents come before their children
        if node.parent is not None and id(node.parent) in inside:
            inside.add(id(node))
        elif known(node.name) and node.name not in _PASSING and "Input Dims" in node.event.args:
            chosen.append(node)
            inside.add(id(node))
        elif node.leaf and not free(node.name) and node.event.name.startswith("aten::"):
            _lose(lost, node.event.name, node.event.dur)
    return chosen


def _operators(node: _Node, usual: Any, lost: dict[str, tuple[int, float]]) -> list[Operator]:
    seconds = sum(k.dur for k in node.kernels)
    try:
        args = arguments(node.event.args, usual)
        outs = results(node.name, args)
        found = operators(Call(node.name, args, outs)) if outs is not None else None
    except (IndexError, KeyError, ValueError, TypeError, StopIteration, AssertionError, BadInput):
        found = None
    if found is None:
        _lose(lost, node.event.name, seconds, max(len(node.kernels), 1))
        return [Elementwise("unspecified", 1, label=node.event.name)]
    for op in found:
        object.__setattr__(op, "label", node.event.name)
    return found


def _lose(lost: dict[str, tuple[int, float]], name: str, dur: float, calls: int = 1) -> None:
    before = lost.get(name, (0, 0.0))
    lost[name] = (before[0] + calls, before[1] + dur * MICROSECOND_S)


def _crosses_the_bus(event: _Event) -> bool:
    return event.cat == "gpu_memcpy" and ("HtoD" in event.name or "DtoH" in event.name)


def _launch(event: _Event, owner: _Node | None) -> Launch:
    grid, block = (tuple(v for v in event.args.get(key) or () if isinstance(v, int)) for key in ("grid", "block"))
    name = owner.event.name if owner is not None else ""
    return Launch(event.name, name, event.ts * MICROSECOND_S, event.dur * MICROSECOND_S, grid, block)


def _said(
    nodes: list[_Node], device: list[_Event], copies: int, unmapped: Sequence[tuple[str, int, float]], usual: str
) -> list[str]:
    said = [f"from a profiler trace of {len(nodes)} operators and {len(device)} kernels; all of it is one run"]
    if not device:
        said.append("the trace has no kernels: its innermost known operators are taken to launch one each")
    if copies:
        said.append(f"{copies} copies between host and device are left out")
    said.append(f"lists of tensors carry no number format in a trace: {usual}, the commonest, is assumed")
    said += [
        f"{name}: {calls} launch(es), {seconds:.3g} s, has no rule or no shapes; kept with one element or left out"
        for name, calls, seconds in unmapped
    ]
    return said
