"""ONNX graphs with shapes -> Graph. Needs the ``onnx`` package; weights are never loaded.

``onnx.csv`` says what each node becomes; products, convolutions, norms and lookups follow the rules
of ATen. External data is not read; a location that points outside the model's own folder is
refused, because other tools would follow it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wattcast.core import (
    BadInput,
    Dtype,
    bad_value,
    clip_text,
)
from wattcast.core.errors import import_extra
from wattcast.core.strict_files import read_bytes, read_shipped_table
from wattcast.workload.graph import Block, Graph
from wattcast.workload.memory_layout import classify_layout, describe_pointwise
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Elementwise, Layout
from wattcast.workload.readers.aten_operators import (
    AtenCall,
    describe_rounding,
    map_call,
)
from wattcast.workload.symbolic_tensor import Tensor, make_tensor

MAX_ONNX_BYTE = 1 << 31
MAX_OPS = 1_000_000
_ATTRIBUTE_FLOAT = 1  # AttributeProto.FLOAT
_ATTRIBUTE_INTS = 7  # AttributeProto.INTS
# what nodes become, by their type
_RULES = {
    row.pop("onnx"): row for row in read_shipped_table("wattcast.workload.readers", "onnx.csv")
}


def read_onnx(path: Path) -> Graph:
    """Read an ``.onnx`` file; a node without a rule is kept as unspecified work and named."""
    why = ("reading ONNX needs the onnx package", "onnx")
    where = path.name
    import_extra("onnx.shape_inference", *why)
    onnx = import_extra("onnx", *why)
    data = read_bytes(path, MAX_ONNX_BYTE)
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:  # protobuf's own errors have no common public base
        raise BadInput(f"{where}: not an ONNX model ({clip_text(error, 120)}).") from None
    _check_external_data(model, path.resolve().parent, where)
    try:
        model = onnx.shape_inference.infer_shapes(model)
    except Exception as error:
        raise BadInput(f"{where}: shapes cannot be inferred ({clip_text(error, 160)}).") from None

    shapes = _read_shapes(onnx, model.graph)
    ops: list[Operator] = []
    unmapped: dict[str, list[str]] = {}  # names of nodes without a rule, by their type
    for node in model.graph.node:
        call = _Call(node, shapes, where)
        node_ops = _map_checked(call)
        if node_ops is None:
            unmapped.setdefault(node.op_type, []).append(node.name or "(unnamed)")
            node_ops = [_keep_bytes(call)]
        ops += [op.with_label(call.label) for op in node_ops]
        if len(ops) > MAX_OPS:
            raise bad_value(where, f"at most {MAX_OPS:,} operators", "more")
    if not ops:
        raise BadInput(f"{where}: no operator that does work. Is it a whole model?")

    notes = ["from an ONNX graph: one kernel an operator, no fusion"]
    for kind, names in unmapped.items():
        nodes = clip_text(", ".join(names), 120)
        notes.append(f"{kind} has no rule: {len(names)} node(s) ({nodes}) kept as unspecified work")
    notes += describe_rounding(ops)
    return Graph(path.stem, (Block(tuple(ops)),), None, tuple(notes))


def _check_external_data(
    model: Any,
    folder: Path,
    where: str,
) -> None:
    """Refuse weights that are said to lie outside the model's own folder."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key != "location":
                continue
            place = Path(entry.value)
            if place.is_absolute() or not (folder / place).resolve().is_relative_to(folder):
                holder = f"{where}: initializer {clip_text(tensor.name)}"
                raise bad_value(holder, "external data inside the model's folder", entry.value)


def _read_shapes(onnx: Any, graph: Any) -> dict[str, Tensor]:
    """Return the tensors of a graph whose shapes are fixed, by name."""
    names = {code: name for name, code in onnx.TensorProto.DataType.items()}

    def convert_dtype(code: int) -> Dtype:
        """Return the format of a type; one that ONNX does not name counts as four bytes wide."""
        return Dtype.recognise(names.get(code, "")) or Dtype.FP32

    tensors: dict[str, Tensor] = {}
    for info in (*graph.input, *graph.value_info, *graph.output):
        kind = info.type.tensor_type
        sizes = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in kind.shape.dim]
        if kind.elem_type and all(size > 0 for size in sizes):
            tensors[info.name] = make_tensor(tuple(sizes), convert_dtype(kind.elem_type))
    for tensor in graph.initializer:
        if all(size > 0 for size in tensor.dims):
            dtype = convert_dtype(tensor.data_type)
            tensors[tensor.name] = make_tensor(tuple(tensor.dims), dtype)
    return tensors


@dataclass(frozen=True)
class _Call:
    """A node with its tensors; asking for one whose shape is unknown is an error that names it."""

    node: Any
    shapes: dict[str, Tensor]
    where: str

    @property
    def label(self) -> str:
        return str(self.node.name or self.node.op_type)

    @property
    def place(self) -> str:
        """The node as errors name it."""
        return f"{self.where}: node {clip_text(self.label)}"

    @property
    def kind(self) -> str:
        """The type of the node, short enough for an error."""
        return clip_text(self.node.op_type)

    def _tensor(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise bad_value(
                f"{self.place} ({self.node.op_type})",
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
        for name in self.node.output:
            if name:
                return self._tensor(name)
        raise bad_value(f"{self.place} ({self.kind})", "an output", "none")

    def attribute(
        self,
        name: str,
        default: Any,
    ) -> Any:
        """Return an attribute: whole numbers, a fraction or one whole number."""
        for item in self.node.attribute:
            if item.name == name:
                if item.type == _ATTRIBUTE_INTS:
                    return list(item.ints)
                return item.f if item.type == _ATTRIBUTE_FLOAT else item.i
        return default


def _keep_bytes(call: _Call) -> Operator:
    """Return an operator that stands for a node without a rule, whose bytes are known."""
    return Elementwise(
        "unspecified",
        max(call.out.numel, 1),
        dtype=call.out.dtype,
        read=sum(tensor.byte for tensor in call.inputs),
        write=call.out.byte,
    )


def _map_checked(call: _Call) -> list[Operator] | None:
    """Map a node, and name it in the error where its shapes or attributes do not fit its type."""
    try:
        return _map_node(call)
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        expected = f"inputs and attributes of {call.kind}"
        raise bad_value(call.place, expected, clip_text(error, 120)) from None


def _map_node(call: _Call) -> list[Operator] | None:
    """Return the operators of a node, or None where there is no rule."""
    rule = _RULES.get(call.node.op_type)
    if rule is None:
        return None
    kind, function = rule.values()
    if kind == "free":
        return []
    inputs = call.inputs
    out = call.out
    if kind == "aten":
        arguments = _list_arguments(call, function)
        return map_call(AtenCall(function, arguments, (out,)))
    if kind == "reduction":
        first = inputs[0]
        return [Elementwise(function, first.numel, dtype=first.dtype, write=out.byte)]
    if kind == "copy":
        layout = Layout.TRANSPOSED if call.node.op_type == "Transpose" else Layout.STRIDED
        first = inputs[0]
        unknown_walk = (None, None)
        copy = describe_pointwise(
            function,
            (first.operand,),
            out.operand,
            first.dtype,
            layout,
            unknown_walk,
        )
        return [copy]
    return [_map_pointwise(function, inputs, out)]


def _map_pointwise(
    function: str,
    inputs: list[Tensor],
    out: Tensor,
) -> Operator:
    """Return one elementwise kernel over broadcast inputs."""
    main = max(inputs, key=lambda tensor: tensor.numel)
    is_broadcast = all(len(tensor.shape) <= len(out.shape) for tensor in inputs)
    layout = Layout.STRIDED
    if is_broadcast and main.numel == out.numel:
        walks = [(tensor.shape, tensor.strides) for tensor in inputs]
        layout = classify_layout(out.shape, out.strides, walks)
    operands = [tensor.operand for tensor in inputs]
    return describe_pointwise(
        function,
        operands,
        out.operand,
        main.dtype,
        layout,
    )


def _list_arguments(call: _Call, name: str) -> tuple[Any, ...]:
    """Return the arguments of a node in the order of the ATen call that does the same."""
    x, *further = call.inputs
    axis = int(call.attribute("axis", -1))
    if name == "_softmax":
        return x, axis
    if name == "native_layer_norm":
        return x, list(x.shape[axis % len(x.shape) :])
    if name == "addmm":
        left_operand = _transpose_marked(call, x, "transA")
        right = _transpose_marked(call, further[0], "transB")
        biases = [make_tensor(right.shape[-1:], right.dtype) for _ in further[1:]]
        return (*biases, left_operand, right)
    if name == "mm":
        return _fold_product(x, further[0], call.out)
    if name == "convolution":
        return _list_convolution(call, x, further)
    return x, *further


def _transpose_marked(
    call: _Call,
    matrix: Tensor,
    attribute: str,
) -> Tensor:
    """Return a matrix as it is multiplied: transposed where an attribute says so."""
    if call.attribute(attribute, 0):
        return make_tensor(matrix.shape[::-1], matrix.dtype)
    return matrix


def _fold_product(
    x: Tensor,
    other: Tensor,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the factors of a stack of matrices times one matrix, or times as many."""
    k, n = other.shape[-2:] if len(other.shape) > 1 else (other.numel, 1)
    if len(other.shape) <= 2:
        return make_tensor((x.numel // k, k), x.dtype), make_tensor((k, n), x.dtype)
    m = x.shape[-2]
    products = out.numel // (m * n)
    return make_tensor((products, m, k), x.dtype), make_tensor((products, k, n), x.dtype)


def _list_convolution(
    call: _Call,
    x: Tensor,
    further: list[Tensor],
) -> tuple[Any, ...]:
    """Return picture, weight, bias, stride, padding, dilation, transposed, its padding, groups."""
    sides = len(x.shape) - 2
    if sides not in (1, 2):
        raise bad_value(call.place, "a convolution over one or two dimensions", x.shape)
    weight = further[0]
    bias = further[1] if len(further) > 1 else None
    stride = call.attribute("strides", [1] * sides)
    dilation = call.attribute("dilations", [1] * sides)
    padding = call.attribute("pads", [0] * 2 * sides)[:sides]
    groups = int(call.attribute("group", 1))
    return (x, weight, bias, stride, padding, dilation, False, None, groups)
