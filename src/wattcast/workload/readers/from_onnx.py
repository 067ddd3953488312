"""ONNX graphs with shapes -> Graph. Needs the ``onnx`` package; weights are never loaded.

``onnx.csv`` says what each node becomes; products, convolutions, norms and lookups follow the rules
of ATen. External data is not read; a location that points outside the model's own folder is
refused, because other tools would follow it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wattcast.core import BadInput, Dtype, bad_value, clip_text
from wattcast.core.errors import import_extra
from wattcast.core.strict_files import read_bytes, read_shipped_table
from wattcast.workload.graph import Block, Graph
from wattcast.workload.memory_layout import classify_layout, describe_pointwise
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Elementwise, Layout
from wattcast.workload.readers.aten_operators import AtenCall, describe_rounding, map_call
from wattcast.workload.symbolic_tensor import Tensor, make_tensor

MAX_ONNX_BYTE = 1 << 31
MAX_OPS = 1_000_000


def read_onnx(path: Path) -> Graph:
    """Read an ``.onnx`` file; a node without a rule is kept as unspecified work and named."""
    why = ("reading ONNX needs the onnx package", "onnx")
    where = path.name
    folder = path.resolve().parent
    import_extra("onnx.shape_inference", *why)
    onnx = import_extra("onnx", *why)
    data = read_bytes(path, MAX_ONNX_BYTE)
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:  # protobuf's own errors have no common public base
        raise BadInput(f"{where}: not an ONNX model ({clip_text(error, 120)}).") from None
    placed = [
        (tensor, e.value)
        for tensor in model.graph.initializer
        for e in tensor.external_data
        if e.key == "location"
    ]
    for tensor, place in placed:
        if Path(place).is_absolute() or not (folder / place).resolve().is_relative_to(folder):
            holder = f"{where}: initializer {clip_text(tensor.name)}"
            raise bad_value(holder, "external data inside the model's folder", place)
    try:
        model = onnx.shape_inference.infer_shapes(model)
    except Exception as error:
        raise BadInput(f"{where}: shapes cannot be inferred ({clip_text(error, 160)}).") from None
    shapes = _read_shapes(onnx, model.graph)
    ops: list[Operator] = []
    unknown: dict[str, list[str]] = {}
    for node in model.graph.node:
        call = _Call(node, shapes, where)
        found = _map_checked(call)
        if found is None:
            unknown.setdefault(node.op_type, []).append(node.name or "(unnamed)")
            read = sum(t.byte for t in call.inputs)
            out = call.out
            found = [
                Elementwise(
                    "unspecified", max(out.numel, 1), dtype=out.dtype, read=read, write=out.byte
                )
            ]
        ops += [op.with_label(call.label) for op in found]
        if len(ops) > MAX_OPS:
            raise bad_value(where, f"at most {MAX_OPS:,} operators", "more")
    if not ops:
        raise BadInput(f"{where}: no operator that does work. Is it a whole model?")
    said = ["from an ONNX graph: one kernel an operator, no fusion"]
    said += [
        f"{kind} has no rule: {len(names)} node(s) ({clip_text(', '.join(names), 120)}) kept as unspecified work"
        for kind, names in unknown.items()
    ]
    said += describe_rounding(ops)
    return Graph(path.stem, (Block(tuple(ops)),), None, tuple(said))


def _read_shapes(onnx: Any, graph: Any) -> dict[str, Tensor]:
    names = {code: name for name, code in onnx.TensorProto.DataType.items()}

    def dtype(code: int) -> Dtype:
        """Return the format of a type; one that this version of ONNX does not know counts as four
        bytes wide.
        """
        return Dtype.recognise(names.get(code, "")) or Dtype.FP32

    found: dict[str, Tensor] = {}
    for info in (*graph.input, *graph.value_info, *graph.output):
        kind = info.type.tensor_type
        sizes = tuple(d.dim_value if d.HasField("dim_value") else 0 for d in kind.shape.dim)
        if kind.elem_type and all(size > 0 for size in sizes):
            found[info.name] = make_tensor(sizes, dtype(kind.elem_type))
    for tensor in graph.initializer:
        if all(size > 0 for size in tensor.dims):
            found[tensor.name] = make_tensor(tuple(tensor.dims), dtype(tensor.data_type))
    return found


@dataclass(frozen=True)
class _Call:
    """A node with its tensors; asking for one whose shape is unknown is an error that names it."""

    node: Any
    shapes: dict[str, Tensor]
    where: str

    @property
    def label(self) -> str:
        return str(self.node.name or self.node.op_type)

    def _tensor(self, name: str) -> Tensor:
        if name not in self.shapes:
            where = f"{self.where}: node {clip_text(self.label)} ({self.node.op_type})"
            raise bad_value(
                where,
                f"a fixed shape for {clip_text(name)}",
                "none",
                "Export with fixed input sizes.",
            )
        return self.shapes[name]

    @property
    def inputs(self) -> list[Tensor]:
        return [self._tensor(name) for name in self.node.input if name]

    @property
    def out(self) -> Tensor:
        names = [name for name in self.node.output if name]
        if not names:
            where = f"{self.where}: node {clip_text(self.label)} ({clip_text(self.node.op_type)})"
            raise bad_value(where, "an output", "none")
        return self._tensor(names[0])

    def attribute(self, name: str, default: Any) -> Any:
        for item in self.node.attribute:
            if item.name == name:
                return list(item.ints) if item.type == 7 else (item.f if item.type == 1 else item.i)
        return default


# what nodes become, by their type
_RULES = {
    row.pop("onnx"): row for row in read_shipped_table("wattcast.workload.readers", "onnx.csv")
}


def _map_checked(call: _Call) -> list[Operator] | None:
    """Map a node; one whose shapes or attributes are not those of its type is an error that names
    it.
    """
    try:
        return _map_node(call)
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        where = f"{call.where}: node {clip_text(call.label)}"
        kind = clip_text(call.node.op_type)
        raise bad_value(where, f"inputs and attributes of {kind}", clip_text(error, 120)) from None


def _map_node(call: _Call) -> list[Operator] | None:
    """Return the operators of a node, or None where there is no rule."""
    if call.node.op_type not in _RULES:
        return None
    kind, function = _RULES[call.node.op_type].values()
    if kind == "free":
        return []
    inputs = call.inputs
    out = call.out
    if kind == "aten":
        return map_call(AtenCall(function, _list_arguments(call, function), (out,)))
    if kind == "reduction":
        return [Elementwise(function, inputs[0].numel, dtype=inputs[0].dtype, write=out.byte)]
    if kind == "copy":
        layout = Layout.TRANSPOSED if call.node.op_type == "Transpose" else Layout.STRIDED
        x = inputs[0]
        unknown_walk = (None, None)
        return [
            describe_pointwise(function, (x.operand,), out.operand, x.dtype, layout, unknown_walk)
        ]
    main = max(inputs, key=lambda t: t.numel)
    fits = all(len(t.shape) <= len(out.shape) for t in inputs) and main.numel == out.numel
    placed = [(t.shape, t.strides) for t in inputs]
    layout = classify_layout(out.shape, out.strides, placed) if fits else Layout.STRIDED
    return [
        describe_pointwise(function, [t.operand for t in inputs], out.operand, main.dtype, layout)
    ]


def _list_arguments(call: _Call, name: str) -> tuple[Any, ...]:
    """Return the arguments of a node in the order of the ATen call that does the same."""
    x, *rest = call.inputs
    axis = int(call.attribute("axis", -1))
    if name == "_softmax":
        return x, axis
    if name == "native_layer_norm":
        return x, list(x.shape[axis % len(x.shape) :])
    if name == "addmm":
        a, b = (
            make_tensor(t.shape[::-1], t.dtype) if call.attribute(turned, 0) else t
            for t, turned in ((x, "transA"), (rest[0], "transB"))
        )
        return *(make_tensor(b.shape[-1:], b.dtype) for _ in rest[1:]), a, b
    if name == "mm":  # of a stack of matrices by one, or by as many
        k, n = rest[0].shape[-2:] if len(rest[0].shape) > 1 else (rest[0].numel, 1)
        m = x.shape[-2] if len(rest[0].shape) > 2 else x.numel // k
        stack = (call.out.numel // (m * n),) if len(rest[0].shape) > 2 else ()
        return make_tensor((*stack, m, k), x.dtype), make_tensor((*stack, k, n), x.dtype)
    if name != "convolution":
        return x, *rest
    sides = len(x.shape) - 2
    if sides not in (1, 2):
        where = f"{call.where}: node {clip_text(call.label)}"
        raise bad_value(where, "a convolution over one or two dimensions", x.shape)
    stride, dilation = (call.attribute(word, [1] * sides) for word in ("strides", "dilations"))
    pads = call.attribute("pads", [0] * 2 * sides)[:sides]
    groups = int(call.attribute("group", 1))
    return (
        x,
        rest[0],
        rest[1] if len(rest) > 1 else None,
        stride,
        pads,
        dilation,
        False,
        None,
        groups,
    )
