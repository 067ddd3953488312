"""ONNX graphs with shapes -> Graph. Needs the ``onnx`` package; weights are never loaded.

External data is not read at all; a location that points outside the model's own folder is refused,
because other tools would follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

from wattcast.dtypes import Dtype
from wattcast.errors import BadInput, MissingTool, bad_value, clip
from wattcast.files import read_bytes
from wattcast.workload.graph import (
    Block,
    Bmm,
    Conv2d,
    Elementwise,
    Graph,
    LayerNorm,
    Layout,
    Linear,
    Operator,
    Softmax,
)
from wattcast.workload.pointwise import elementwise
from wattcast.workload.strides import contiguous, layout_of
from wattcast.workload.symbolic import Storage, Tape, Tensor

MAX_ONNX_BYTE = 1 << 31


def read(path: Path) -> Graph:
    """An ``.onnx`` file -> Graph."""
    onnx = _onnx()
    data = read_bytes(path, MAX_ONNX_BYTE)
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:  # protobuf's own errors have no common public base
        raise BadInput(f"{path.name}: not an ONNX model ({clip(error, 120)}).") from None
    check_external(model, path)
    return convert(model, path.stem, path.name)


def check_external(model: Any, path: Path) -> None:
    """Refuse weights kept outside the model's folder."""
    folder = path.resolve().parent
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            target = (folder / entry.value).resolve() if entry.key == "location" else folder
            if entry.key == "location" and (Path(entry.value).is_absolute() or not target.is_relative_to(folder)):
                where = f"{path.name}: initializer {clip(tensor.name)}"
                raise bad_value(where, "external data inside the model's folder", entry.value)


def convert(model: Any, name: str, where: str) -> Graph:
    """A loaded model -> Graph; every node is mapped, or kept as unspecified work and named."""
    onnx = _onnx()
    try:
        model = onnx.shape_inference.infer_shapes(model)
    except Exception as error:
        raise BadInput(f"{where}: shapes cannot be inferred ({clip(error, 160)}).") from None
    shapes = _shapes(onnx, model.graph)
    constants = _constants(onnx, model.graph)
    ops: list[Operator] = []
    unknown: dict[str, list[str]] = {}
    for node in model.graph.node:
        found = _mapped(_Call(node, shapes, constants, where))
        if found is None:
            unknown.setdefault(node.op_type, []).append(node.name or "(unnamed)")
            found = _kept(_Call(node, shapes, constants, where))
        ops += found
    if not ops:
        raise BadInput(f"{where}: no operator that does work. Is it a whole model?")
    said = ["from an ONNX graph: one kernel an operator, no fusion"]
    said += [
        f"{kind} has no rule: {len(names)} node(s) ({clip(', '.join(names), 120)}) kept as unspecified work"
        for kind, names in unknown.items()
    ]
    return Graph(name, (Block(tuple(ops)),), None, tuple(said))


def _shapes(onnx: Any, graph: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for info in (*graph.input, *graph.value_info, *graph.output):
        kind = info.type.tensor_type
        sizes = [d.dim_value if d.HasField("dim_value") else 0 for d in kind.shape.dim]
        if kind.elem_type and all(size > 0 for size in sizes):
            found[info.name] = _tensor(tuple(sizes), _dtype(onnx, kind.elem_type))
    for tensor in graph.initializer:
        found[tensor.name] = _tensor(tuple(tensor.dims), _dtype(onnx, tensor.data_type))
    return found


def _constants(onnx: Any, graph: Any) -> dict[str, list[int]]:
    """Small integer initializers, such as axes."""
    found = {}
    for tensor in graph.initializer:
        if prod(tensor.dims) <= 16 and not tensor.external_data and tensor.data_type in (6, 7):
            found[tensor.name] = [int(v) for v in onnx.numpy_helper.to_array(tensor).reshape(-1)]
    return found


def _tensor(shape: tuple[int, ...], dtype: Dtype) -> Tensor:
    return Tensor(Tape(), shape, contiguous(shape), dtype, Storage(0))


def _dtype(onnx: Any, code: int) -> Dtype:
    name = onnx.TensorProto.DataType.Name(code).lower()
    return _NAMES.get(name, Dtype.FP32)


_NAMES = {
    "float": Dtype.FP32,
    "float16": Dtype.FP16,
    "bfloat16": Dtype.BF16,
    "double": Dtype.FP64,
    "int64": Dtype.INT64,
    "int32": Dtype.INT32,
    "int8": Dtype.INT8,
    "uint8": Dtype.INT8,
    "bool": Dtype.BOOL,
    "float8e4m3fn": Dtype.FP8,
    "float8e5m2": Dtype.FP8,
}


@dataclass(frozen=True)
class _Call:
    """A node with its tensors; asking for one whose shape is unknown is an error that names it."""

    node: Any
    shapes: dict[str, Tensor]
    constants: dict[str, list[int]]
    where: str

    @property
    def label(self) -> str:
        return str(self.node.name or self.node.op_type)

    def tensor(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise bad_value(
                f"{self.where}: node {clip(self.label)} ({self.node.op_type})",
                f"a fixed shape for {clip(name)}",
                "none",
                "Export with fixed input sizes.",
            )
        return self.shapes[name]

    @property
    def inputs(self) -> list[Tensor]:
        return [self.tensor(name) for name in self.node.input if name]

    @property
    def out(self) -> Tensor:
        return self.tensor(next(name for name in self.node.output if name))

    def attribute(self, name: str, default: Any) -> Any:
        for item in self.node.attribute:
            if item.name == name:
                return list(item.ints) if item.type == 7 else (item.f if item.type == 1 else item.i)
        return default


def _mapped(call: _Call) -> list[Operator] | None:
    kind = call.node.op_type
    if kind in _FREE:
        return []
    if kind in _SPECIAL:
        found = _SPECIAL[kind](call)
    elif kind in _POINTWISE:
        found = [_pointwise(call, _POINTWISE[kind])]
    else:
        return None
    for op in found:
        object.__setattr__(op, "label", call.label)
    return found


def _kept(call: _Call) -> list[Operator]:
    read, out = sum(t.byte for t in call.inputs), call.out
    op = Elementwise("unspecified", max(out.numel, 1), dtype=out.dtype, read=read, write=out.byte, label=call.label)
    return [op]


def _pointwise(call: _Call, function: str) -> Operator:
    inputs, out = call.inputs, call.out
    main = max(inputs, key=lambda t: t.numel)
    given = [(t.shape, t.strides) for t in inputs]
    fits = all(len(shape) <= len(out.shape) for shape, _ in given) and main.numel == out.numel
    layout = layout_of(out.shape, out.strides, given) if fits else Layout.STRIDED
    return elementwise(function, inputs, out, main.dtype, layout)


def _matmul(call: _Call) -> list[Operator]:
    a, b = call.inputs[:2]
    k, n = b.shape[-2:] if len(b.shape) > 1 else (b.shape[0], 1)
    if len(b.shape) <= 2:
        return [Linear(a.numel // k, n, k, dtype=a.dtype)]
    m = a.shape[-2]
    return [Bmm(call.out.numel // (m * n), m, n, k, dtype=a.dtype)]


def _gemm(call: _Call) -> list[Operator]:
    a, b = call.inputs[:2]
    m, k = reversed(a.shape) if call.attribute("transA", 0) else a.shape
    n = b.shape[0] if call.attribute("transB", 0) else b.shape[1]
    return [Linear(m, n, k, bias=len(call.inputs) > 2, dtype=a.dtype)]


def _conv(call: _Call) -> list[Operator]:
    x, weight = call.inputs[:2]
    if len(x.shape) not in (3, 4):
        raise bad_value(f"{call.where}: node {clip(call.label)}", "a convolution over one or two dimensions", x.shape)
    one = len(x.shape) == 3
    h, w = (1, x.shape[2]) if one else x.shape[2:]
    r, s = (1, weight.shape[2]) if one else weight.shape[2:]
    stride, pads = call.attribute("strides", [1] * (2 - one)), call.attribute("pads", [0] * 2 * (2 - one))
    step, step_w = (1, stride[0]) if one else stride
    pad, pad_w = (0, pads[0]) if one else (pads[0], pads[1])
    dilation = call.attribute("dilations", [1])[-1]
    op = Conv2d(
        x.shape[0], x.shape[1], weight.shape[0], h, w, r, s, step, pad, int(call.attribute("group", 1)), dilation,
        dtype=x.dtype, stride_w=None if step_w == step else step_w, padding_w=None if pad_w == pad else pad_w,
    )  # fmt: skip
    if len(call.inputs) == 2:
        return [op]
    planes = prod(call.out.shape[:2]), None
    bias = elementwise("add", (call.out, call.inputs[2]), call.out, x.dtype, Layout.BROADCAST, planes)
    return [op, bias]


def _softmax(call: _Call) -> list[Operator]:
    x = call.inputs[0]
    dim = x.shape[int(call.attribute("axis", -1))]
    return [Softmax(x.numel // dim, dim, dtype=x.dtype)]


def _layer_norm(call: _Call) -> list[Operator]:
    x = call.inputs[0]
    dim = prod(x.shape[int(call.attribute("axis", -1)) % len(x.shape) :])
    return [LayerNorm(x.numel // dim, dim, dtype=x.dtype)]


def _batch_norm(call: _Call) -> list[Operator]:
    x = call.inputs[0]
    return [Elementwise("batchnorm", x.numel, dtype=x.dtype, rows=x.shape[1], run=prod(x.shape[2:]))]


def _reduce(function: str) -> Callable[[_Call], list[Operator]]:
    def rule(call: _Call) -> list[Operator]:
        x = call.inputs[0]
        return [Elementwise(function, x.numel, dtype=x.dtype, write=call.out.byte)]

    return rule


def _gather(call: _Call) -> list[Operator]:
    out, index = call.out, call.inputs[1]
    return [Elementwise("gather", max(out.numel, 1), dtype=out.dtype, read=out.byte + index.byte)]


def _copy(call: _Call) -> list[Operator]:
    x, out = call.inputs[0], call.out
    layout = Layout.TRANSPOSED if call.node.op_type == "Transpose" else Layout.STRIDED
    return [elementwise("copy", (x,), out, x.dtype, layout, (None, None))]  # how it walks is not looked at


def _power(call: _Call) -> list[Operator]:
    return [_pointwise(call, "pow")]


_FREE = frozenset(
    ["Constant", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape", "Dropout", "ConstantOfShape"]
)
_POINTWISE = {
    "Add": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Div": "div",
    "Relu": "relu",
    "Gelu": "gelu",
    "Erf": "gelu",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Sqrt": "sqrt",
    "Exp": "exp",
    "Log": "log",
    "Neg": "neg",
    "Abs": "abs",
    "Sin": "sin",
    "Cos": "cos",
    "HardSwish": "hardswish",
    "Clip": "relu",
    "LeakyRelu": "relu",
    "Cast": "cast",
    "Where": "where",
    "Max": "maximum",
    "Min": "maximum",
    "Equal": "compare",
    "Less": "compare",
    "LessOrEqual": "compare",
    "Greater": "compare",
    "And": "compare",
    "Not": "compare",
    "Reciprocal": "div",
}
_SPECIAL: dict[str, Callable[[_Call], list[Operator]]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "Softmax": _softmax,
    "LayerNormalization": _layer_norm,
    "BatchNormalization": _batch_norm,
    "ReduceMean": _reduce("mean"),
    "ReduceSum": _reduce("sum"),
    "ReduceMax": _reduce("max"),
    "GlobalAveragePool": _reduce("mean"),
    "AveragePool": _reduce("pool"),
    "MaxPool": _reduce("pool"),
    "Gather": _gather,
    "Transpose": _copy,
    "Concat": _copy,
    "Slice": _copy,
    "Split": _copy,
    "Expand": _copy,
    "Pad": _copy,
    "Pow": _power,
}


def _onnx() -> Any:
    try:
        onnx = import_module("onnx")
        import_module("onnx.shape_inference")
        import_module("onnx.numpy_helper")
    except ImportError:
        raise MissingTool("reading ONNX needs the onnx package. Install wattcast[onnx].") from None
    return onnx
