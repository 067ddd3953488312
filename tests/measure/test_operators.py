"""Specs -> PyTorch calls, on the CPU: shapes, bytes, layouts and rotation. Needs PyTorch, not a
GPU.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from wattcast.core.errors import BadInput, UnknownName
from wattcast.lab.campaigns.kernel_plan import OperatorSpec, read_kernel_plan
from wattcast.lab.campaigns.operator_calls import MOST_SETS, CallBuilder, OperandPools, build_call

POOL = {"bf16": 2**24, "fp16": 2**24, "fp32": 2**25, "fp8": 2**22}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def builder() -> CallBuilder:
    operands = OperandPools(torch, "cpu", POOL)
    operands.fill("random")
    return CallBuilder(torch, operands, l2_byte=1e5)


def small(family: str, most: int = 12) -> list[OperatorSpec]:
    specs = [s for s in read_kernel_plan() if s.family == family and s.flop < 3e7 and s.byte < 2e6]
    return [s for s in specs if s.detail.get("backend", "default") == "default"][:most]


@pytest.mark.parametrize(
    "family", ["linear", "bmm", "conv2d", "softmax", "layernorm", "rmsnorm", "attention"]
)
def test_calls_give_what_the_operator_says(builder: CallBuilder, family: str) -> None:
    specs = small(family)
    assert specs
    for spec in specs:
        if spec.operator["dtype"] == "fp8":
            continue
        out = build_call(builder, spec).run(0)
        assert out.numel() == _outputs(spec)


def _outputs(spec: OperatorSpec) -> int:
    o = spec.operator
    match o["op"]:
        case "linear":
            return int(o["m"] * o["n"])
        case "bmm":
            return int(o["b"] * o["m"] * o["n"])
        case "conv2d":
            p = (o["h"] + 2 * o["padding"] - o["r"]) // o["stride"] + 1
            return int(o["n"] * o["k"] * p * p)
        case "attention":
            return int(o["batch"] * o["heads"] * o["q_len"] * o["head_dim"])
        case _:
            return int(o["rows"] * o["dim"])


@pytest.mark.parametrize(
    "form", ["contiguous", "strided", "broadcast", "transposed", "reduce", "gather"]
)
def test_elementwise_forms_write_what_they_say(builder: CallBuilder, form: str) -> None:
    specs = [
        s
        for s in read_kernel_plan()
        if s.family == "elementwise" and s.detail["form"] == form and s.byte < 2e6
    ][:15]
    assert specs
    for spec in specs:
        out = build_call(builder, spec).run(0)
        written = spec.operator.get("write", spec.operator["n"] * out.element_size())
        assert out.numel() * out.element_size() == written, spec


def test_weights_rotate_until_they_pass_the_cache_and_activations_stay(
    builder: CallBuilder,
) -> None:
    operator = {"op": "linear", "m": 8, "n": 64, "k": 64, "bias": False, "dtype": "bf16"}
    call = build_call(builder, OperatorSpec("linear", operator, "nt", "weights"))
    assert call.sets * 64 * 64 * 2 >= 3 * builder.l2_byte
    assert call.footprint_byte(call.sets) == 8 * 64 * 2 + 8 * 64 * 2 + call.sets * 64 * 64 * 2
    assert not torch.equal(call.run(0), call.run(1))
    assert torch.equal(call.run(0), call.run(call.sets))
    still = build_call(builder, OperatorSpec("linear", operator, "nt", "none"))
    assert still.sets == 1
    assert torch.equal(still.run(0), still.run(1))


def test_the_number_of_sets_is_bounded(builder: CallBuilder) -> None:
    assert builder.sets(1.0, True) == MOST_SETS
    assert builder.sets(1e12, True) == 1


def test_patterns_fill_the_pools() -> None:
    operands = OperandPools(torch, "cpu", {"bf16": 2**12, "fp8": 2**10})
    expected = {"zeros": (0.0, 0.0), "ones": (1.0, 1.0)}
    for pattern, (low, high) in expected.items():
        operands.fill(pattern)
        operands.reset()
        values = operands.take("bf16", 100).float()
        assert (values.min().item(), values.max().item()) == (low, high)
    operands.fill("relu")
    operands.reset()
    values = operands.take("bf16", 1000).float()
    assert values.min() == 0.0
    assert 0.4 < (values == 0).float().mean() < 0.6
    with pytest.raises(UnknownName, match="data pattern"):
        operands.fill("noise")


def test_operands_that_do_not_fit_are_refused(builder: CallBuilder) -> None:
    builder.operands.reset()
    with pytest.raises(BadInput, match="do not fit"):
        builder.operands.take("fp8", 2**30)


def test_views_of_one_row_do_not_overlap_and_are_aligned(builder: CallBuilder) -> None:
    builder.operands.reset()
    first, second = builder.operands.take("bf16", 7, 3), builder.operands.take("bf16", 5)
    assert second.data_ptr() - first.data_ptr() == 512
    assert second.data_ptr() % 64 == first.data_ptr() % 64


def test_an_operator_without_a_builder_is_named(builder: CallBuilder) -> None:
    with pytest.raises(UnknownName, match="linear"):
        build_call(builder, OperatorSpec("x", {"op": "linea", "dtype": "bf16"}))
