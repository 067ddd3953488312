"""PyTorch profiler traces: a CPU trace made here, and one with kernels in the form a GPU writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from wattcast.core.errors import BadInput
from wattcast.core.units import Dtype
from wattcast.workload import ModelOptions
from wattcast.workload.operator_types import (
    Attention,
    Conv2d,
    Elementwise,
    LayerNorm,
    Linear,
    Softmax,
)
from wattcast.workload.readers import from_profiler, load_workload


class Recorder:
    """Writes events as PyTorch's profiler does: operators nest by time, kernels name their
    operator's External id.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.clock, self.id = 0.0, 0

    def op(
        self,
        name: str,
        dims: list[Any],
        types: list[str],
        values: list[str] = (),
        *,
        inside: Any = None,
        kernels=(),
    ):  # type: ignore[no-untyped-def]
        self.id += 1
        mine, start = self.id, self.clock
        self.clock += 1.0
        if inside is not None:
            inside()
        for kernel, dur in kernels:
            cat = "gpu_memcpy" if kernel.startswith("Memcpy") else "kernel"
            args = {"External id": mine, "grid": [132, 1, 1], "block": [128, 1, 1]}
            event = {
                "ph": "X",
                "cat": cat,
                "name": kernel,
                "ts": self.clock,
                "dur": dur,
                "pid": 0,
                "tid": 7,
            }
            self.events.append(event | {"args": args})
        self.clock += 1.0
        values = list(values) or [""] * len(types)
        args = {
            "External id": mine,
            "Input Dims": dims,
            "Input type": types,
            "Concrete Inputs": values,
        }
        event = {
            "ph": "X",
            "cat": "cpu_op",
            "name": name,
            "ts": start,
            "dur": self.clock - start,
            "pid": 1,
            "tid": 1,
        }
        self.events.append(event | {"args": args})
        self.clock += 1.0

    def bytes(self) -> bytes:
        meta = {
            "ph": "M",
            "name": "process_name",
            "pid": 0,
            "tid": 0,
            "ts": 0.0,
            "args": {"name": "python"},
        }
        return json.dumps(
            {"schemaVersion": 1, "deviceProperties": [], "traceEvents": [meta, *self.events]}
        ).encode()


B = "c10::BFloat16"


def gpu_trace() -> bytes:
    r = Recorder()

    def addmm() -> None:
        types = [B, B, B, "Scalar", "Scalar"]
        kernel = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNT"
        r.op(
            "aten::addmm",
            [[3072], [512, 768], [768, 3072], [], []],
            types,
            kernels=[(kernel, 11.5)],
        )

    def copy() -> None:
        types = ["float", B, "Scalar"]
        r.op("aten::copy_", [[512, 3072], [512, 3072], []], types, kernels=[("cast", 3.0)])

    def to_copy() -> None:
        r.op("aten::_to_copy", [[512, 3072]], [B], inside=copy)

    def flash() -> None:
        r.op(
            "aten::_flash_attention_forward",
            [[4, 128, 12, 64]] * 3,
            [B] * 3,
            kernels=[("flash_fwd", 9.0)],
        )

    def cudnn() -> None:
        r.op(
            "aten::cudnn_convolution",
            [[8, 3, 32, 32], [16, 3, 3, 3]],
            [B, B],
            kernels=[("sm90_xmma_fprop", 6.0)],
        )
        r.op(
            "aten::add_",
            [[8, 16, 16, 16], [1, 16, 1, 1], []],
            [B, B, "Scalar"],
            kernels=[("elementwise", 2.0)],
        )

    r.op("aten::linear", [[4, 128, 768], [3072, 768], [3072]], [B, B, B], inside=addmm)
    r.op(
        "aten::to",
        [[512, 3072], [], [], [], []],
        [B, "Scalar", "Scalar", "Scalar", ""],
        inside=to_copy,
    )
    types = [B, "ScalarList", B, B, "Scalar"]
    values = ["", "[768]", "", "", "1e-05"]
    r.op(
        "aten::native_layer_norm",
        [[512, 768], [], [768], [768], []],
        types,
        values,
        kernels=[("layer_norm", 4.0)],
    )
    types, values = ["float", "Scalar", "Scalar"], ["", "-1", "False"]
    r.op(
        "aten::_softmax",
        [[48, 128, 128], [], []],
        types,
        values,
        kernels=[("cunn_SoftMaxForward", 5.0)],
    )
    types, values = [B, B, B, "Scalar", "Scalar", "Scalar"], ["", "", "", "0.", "True", "False"]
    dims = [[4, 12, 128, 64]] * 3 + [[], [], []]
    r.op("aten::_scaled_dot_product_flash_attention", dims, types, values, inside=flash)
    types = [B, B, B, "ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", "Scalar"]
    values = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    dims = [[8, 3, 32, 32], [16, 3, 3, 3], [16], [], [], [], [], [], []]
    r.op("aten::convolution", dims, types, values, inside=cudnn)
    types = ["TensorList", "Scalar"]
    r.op(
        "aten::cat",
        [[[4, 12, 100, 64], [4, 12, 1, 64]], []],
        types,
        ["", "2"],
        kernels=[("CatArray", 2.5)],
    )
    r.op("mylib::secret", [[64, 64]], [B], kernels=[("secret_kernel", 50.0)])
    r.op(
        "aten::copy_",
        [[64], [64], []],
        [B, B, "Scalar"],
        kernels=[("Memcpy HtoD (Pinned -> Device)", 7.0)],
    )
    return r.bytes()


def test_operators_that_launched_kernels_become_the_graph() -> None:
    graph = from_profiler.parse_profile(gpu_trace(), "run.json")
    ops = [op for op, _ in graph.calls()]
    assert ops == [
        Linear(512, 3072, 768, bias=True),
        Elementwise("cast", 512 * 3072, out_dtype=Dtype.FP32),
        LayerNorm(512, 768),
        Softmax(48 * 128, 128, dtype=Dtype.FP32),
        Attention(4, 12, 12, 128, 128, 64, causal=True),
        Conv2d(8, 3, 16, 32, 32, 3, 3, stride=2, padding=1),
        ops[6],
        Elementwise("cat", 4 * 12 * 101 * 64, rows=4 * 12, run=64),
    ]
    assert ops[6].name == "add"
    assert ops[6].n == 8 * 16 * 16 * 16


def test_what_is_not_known_is_named_with_its_time() -> None:
    graph = from_profiler.parse_profile(gpu_trace(), "run.json")
    (unmapped,) = [text for text in graph.assumptions if "has no rule" in text]
    assert unmapped.startswith("mylib::secret: 1 launch(es), 5e-05 s, ")
    said = " | ".join(graph.assumptions)
    assert "1 copies between host and device are left out" in said
    assert "bf16, the commonest" in said


def test_a_trace_recorded_here(tmp_path: Path) -> None:
    """A real trace of the CPU activity: no kernels, so the outermost known operators are taken."""
    torch = pytest.importorskip("torch", reason="PyTorch (CPU build) is not installed")
    from torch.profiler import ProfilerActivity, profile

    module = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128))
    x = torch.randn(8, 64)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record, torch.no_grad():
        module(x).softmax(-1)
    path = tmp_path / "trace.json"
    record.export_chrome_trace(str(path))
    graph = load_workload.load_workload(path, ModelOptions())
    assert [op for op, _ in graph.calls()] == [
        Linear(8, 128, 64, bias=True, dtype=Dtype.FP32),
        Elementwise("gelu", 1024, dtype=Dtype.FP32),
        LayerNorm(8, 128, dtype=Dtype.FP32),
        Softmax(8, 128, dtype=Dtype.FP32),
    ]
    zipped = tmp_path / "trace.json.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert list(load_workload.load_workload(zipped, ModelOptions()).calls()) == list(graph.calls())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"traceEvents": []}', "Profile the CPU activity"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1}]}',
            "record_shapes",
        ),
        (b'{"traceEvents": 7}', "traceEvents"),
        (b'{"traceEvents": [', "not valid JSON"),
    ],
)
def test_a_useless_trace_is_explained(data: bytes, says: str) -> None:
    with pytest.raises(BadInput) as error:
        from_profiler.parse_profile(data, "run.json")
    assert says in str(error.value)


def test_hostile_shapes_do_not_break_the_reader() -> None:
    r = Recorder()
    r.op("aten::mm", [[3], "x"], [B, B], kernels=[("k", 1.0)])
    r.op("aten::mm", [[2, 3], [3, 4]], [B, B], kernels=[("k", 1.0)])
    r.op("aten::sum", [[2, 3], []], [B, "ScalarList"], ["", "[" * 5000], kernels=[("k", 1.0)])
    graph = from_profiler.parse_profile(r.bytes(), "run.json")
    assert Linear(2, 4, 3) in [op for op, _ in graph.calls()]
    assert any("has no rule or no shapes" in text for text in graph.assumptions)


def test_a_gzip_that_is_none_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    path.write_bytes(b"\x1f\x8b" + b"\0" * 20)
    with pytest.raises(BadInput, match="gzip"):
        from_profiler.read_profile(path)
