"""ONNX graphs: shapes become operators, unknown ones are named, external data stays at home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

onnx = pytest.importorskip("onnx", reason="the onnx package is not installed")

from onnx import TensorProto, helper

from wattcast.core.errors import BadInput, MissingTool
from wattcast.core.units import Dtype
from wattcast.workload import ModelOptions
from wattcast.workload.operator_types import Bmm, Conv2d, Linear, Softmax
from wattcast.workload.readers import from_onnx, load_workload

F = TensorProto.FLOAT


def weight(name: str, *dims: int, kind: int = F) -> Any:
    return helper.make_tensor(name, kind, dims, bytes(4 * _prod(dims)), raw=True)


def _prod(dims: tuple[int, ...]) -> int:
    total = 1
    for size in dims:
        total *= size
    return total


def model(
    nodes: list[Any], inputs: dict[str, tuple[Any, ...]], outputs: list[str], weights: list[Any]
) -> Any:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, F, dims) for name, dims in inputs.items()],
        [helper.make_tensor_value_info(name, F, None) for name in outputs],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def small() -> Any:
    nodes = [
        helper.make_node(
            "Conv", ["x", "wc", "bc"], ["c"], name="stem", strides=[2, 2], pads=[1, 1, 1, 1]
        ),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "wg", "bg"], ["g"], transB=1),
        helper.make_node("Softmax", ["g"], ["y"], axis=-1),
    ]
    weights = [weight("wc", 16, 3, 3, 3), weight("bc", 16), weight("wg", 10, 16), weight("bg", 10)]
    return model(nodes, {"x": (8, 3, 32, 32)}, ["y"], weights)


def save(built: Any, path: Path) -> Path:
    path.write_bytes(built.SerializeToString())
    return path


def test_a_small_network(tmp_path: Path) -> None:
    graph = load_workload.load_workload(save(small(), tmp_path / "net.onnx"), ModelOptions())
    ops = [op for op, _ in graph.calls()]
    assert ops[0] == Conv2d(8, 3, 16, 32, 32, 3, 3, stride=2, padding=1, dtype=Dtype.TF32)
    assert [op.name for op in ops[1:4]] == ["add", "relu", "mean"]
    assert ops[4] == Linear(8, 10, 16, bias=True, dtype=Dtype.FP32)
    assert ops[5] == Softmax(8, 10, dtype=Dtype.FP32)
    assert ops[0].label == "stem"
    assert graph.name == "net"


def test_batched_products(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["q", "k"], ["s"]),
        helper.make_node("MatMul", ["s", "w"], ["y"]),
    ]
    built = model(nodes, {"q": (2, 4, 16, 32), "k": (2, 4, 32, 16)}, ["y"], [weight("w", 16, 64)])
    ops = [op for op, _ in from_onnx.read_onnx(save(built, tmp_path / "a.onnx")).calls()]
    assert ops == [Bmm(8, 16, 16, 32, dtype=Dtype.FP32), Linear(128, 64, 16, dtype=Dtype.FP32)]


def test_an_unknown_operator_is_kept_and_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Det", ["r"], ["y"], name="odd.one"),
    ]
    graph = from_onnx.read_onnx(
        save(model(nodes, {"x": (4, 8, 8)}, ["y"], []), tmp_path / "b.onnx")
    )
    assert [op.name for op, _ in graph.calls()] == ["relu", "unspecified"]
    assert any("Det" in line and "odd.one" in line for line in graph.assumptions)


def test_an_open_shape_is_refused_with_the_node(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="act")]
    with pytest.raises(BadInput, match="act") as error:
        from_onnx.read_onnx(save(model(nodes, {"x": ("batch", 8)}, ["y"], []), tmp_path / "c.onnx"))
    assert "fixed" in str(error.value)


@pytest.mark.parametrize("location", ["/etc/passwd", "../../secret.bin", "weights/../../x.bin"])
def test_external_data_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    built = small()
    tensor = built.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    with pytest.raises(BadInput, match="inside the model's folder"):
        from_onnx.read_onnx(save(built, tmp_path / "d.onnx"))


def test_external_data_inside_the_folder_is_not_even_opened(tmp_path: Path) -> None:
    built = small()
    tensor = built.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "absent.bin"
    graph = from_onnx.read_onnx(save(built, tmp_path / "e.onnx"))
    assert next(iter(graph.calls()))[0].name == "conv2d"


def test_a_file_that_is_no_model_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "f.onnx"
    path.write_bytes(b"hello, this is not a protobuf at all")
    with pytest.raises(BadInput, match=r"f\.onnx"):
        from_onnx.read_onnx(path)


def test_without_onnx_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("wattcast.core.errors.import_module", absent)
    with pytest.raises(MissingTool, match=r"wattcast\[onnx\]"):
        from_onnx.read_onnx(tmp_path / "g.onnx")


def test_an_exported_torch_module(tmp_path: Path) -> None:
    """The same products whether captured or written by hand as ONNX."""
    torch = pytest.importorskip("torch", reason="PyTorch (CPU build) is not installed")
    from wattcast.workload.readers.from_torch import capture

    with torch.device("meta"):
        captured = capture(torch.nn.Linear(16, 10), (torch.zeros(8, 16),))
    ours = [
        op
        for op, _ in load_workload.load_workload(
            save(small(), tmp_path / "h.onnx"), ModelOptions()
        ).calls()
        if op.name == "linear"
    ]
    assert ours == [op for op, _ in captured.calls()]
