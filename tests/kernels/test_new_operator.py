"""A new operator is one file: a made-up one is added in one place, predicted from JSON and
measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import wattcast
from wattcast.core import measured_calls
from wattcast.core.arrays import Array
from wattcast.core.errors import BadInput
from wattcast.hardware import load_gpu
from wattcast.kernels import families, lower_graph, reference_chip
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.families.row_reductions import row_reduction_work
from wattcast.kernels.kernel_table import ConditionColumns, FamilyColumns, ReferenceChip
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.workload import operator_base
from wattcast.workload.graph import Graph
from wattcast.workload.operator_base import Operator, register_operator
from wattcast.workload.operator_types import LayerNorm
from wattcast.workload.readers.from_json import graph_to_plain, parse_workload


def add_group_norm() -> type[Operator]:
    """What a contributor writes into one file of ``kernels/families``: a class and two functions."""

    @register_operator("groupnorm", family="layernorm")
    class GroupNorm(Operator):
        """Normalises groups of channels of images, each group of an image by its own mean and
        variance.
        """

        images: int
        channels: int
        groups: int
        pixels: int

        @property
        def flop(self) -> float:
            return 8.0 * self.images * self.channels * self.pixels

        @property
        def read_byte(self) -> float:
            return float(self.dtype.byte * self.images * self.channels * self.pixels)

        @property
        def write_byte(self) -> float:
            return self.read_byte

    def group_norm_work(
        ops: Sequence[Any], told: ConditionColumns, rate: Array, reference: ReferenceChip
    ) -> FamilyColumns:
        """Count it as a layer norm whose rows are the groups."""
        rows = [
            LayerNorm(op.images * op.groups, op.channels * op.pixels // op.groups, dtype=op.dtype)
            for op in ops
        ]
        return row_reduction_work(rows, told, rate, reference)

    def call_group_norm(
        torch: Any, take: Callable[..., Any], operator: Mapping[str, Any]
    ) -> Callable[[], Any]:
        image = take(
            operator["dtype"], operator["images"], operator["channels"], operator["pixels"]
        )
        weight, bias = (take(operator["dtype"], operator["channels"]) for _ in range(2))
        return lambda: torch.nn.functional.group_norm(image, operator["groups"], weight, bias)

    register_kernels(
        GroupNorm, mapping=KernelMapping(group_norm_work), measured_call=call_group_norm
    )
    return GroupNorm


@pytest.fixture(scope="module")
def group_norm() -> Iterator[type[Operator]]:
    cls = add_group_norm()
    yield cls
    del (
        operator_base._REGISTRY["groupnorm"],
        families._MAPPINGS[cls],
        measured_calls._BUILDERS["groupnorm"],
    )
    shipped_bundle.cache_clear()  # the bundle knows the operator by now, and no other process can


ENTRY = {
    "op": "groupnorm",
    "images": 8,
    "channels": 320,
    "groups": 32,
    "pixels": 4096,
    "dtype": "fp16",
}
WORKLOAD = {
    "name": "made up",
    "ops": [{"op": "linear", "m": 4096, "n": 320, "k": 320, "dtype": "fp16"}, ENTRY],
}


def test_it_is_predicted_from_json(group_norm: type[Operator], tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(WORKLOAD))
    found = wattcast.predict(str(path), "h200")
    (own,) = [share for share in found.ops if share.op.name == "groupnorm"]
    assert isinstance(own.op, group_norm)
    like = wattcast.predict(
        Graph.from_operators("like", [LayerNorm(256, 40960, dtype=own.op.dtype)]), "h200"
    )
    assert float(own.latency_s) == pytest.approx(
        float(like.ops[0].latency_s), rel=0.3
    )  # in a model, not alone
    assert not found.support.inside  # nobody has measured this form
    assert "groupnorm" in found.support.reason


def test_its_json_form_is_read_back(group_norm: type[Operator]) -> None:
    graph = parse_workload(json.dumps(WORKLOAD).encode(), "made up")
    assert graph_to_plain(graph)["ops"] == [{**WORKLOAD["ops"][0]}, ENTRY]
    assert parse_workload(json.dumps(graph_to_plain(graph)).encode(), "again") == graph


def test_it_is_measured(group_norm: type[Operator]) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from wattcast.lab.campaigns.kernel_plan import spec_from_operator
    from wattcast.lab.campaigns.operator_calls import CallBuilder, OperandPools, build_call

    spec = spec_from_operator({**ENTRY, "images": 2, "pixels": 16, "dtype": "fp32"})
    assert spec is not None
    operands = OperandPools(
        torch, "cpu", {"bf16": 2**16, "fp16": 2**16, "fp32": 2**20, "fp8": 2**12}
    )
    operands.fill("random")
    call = build_call(CallBuilder(torch, operands, l2_byte=1e5), spec)
    assert call.run(0).shape == (2, 320, 16)
    assert call.footprint_byte(3) == 4 * (2 * 320 * 16 + 2 * 320)


def test_an_operator_without_kernels_is_refused_by_name() -> None:
    @dataclass(frozen=True)
    class Unknown(Operator):
        kind = "unknown"

    gpu = load_gpu("h200")
    with pytest.raises(BadInput, match="Unknown"):
        lower_graph(Graph.from_operators("made up", [Unknown()]), gpu, reference_chip(gpu))
