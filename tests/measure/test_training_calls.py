"""Gradients, caches, batch norm and the optimiser as the campaign runs them: each against autograd,
on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from wattcast.lab.campaigns.kernel_plan import OperatorSpec, spec_from_operator
from wattcast.lab.campaigns.operator_calls import DROPPED, CallBuilder, OperandPools, build_call

POOL = {"bf16": 2**24, "fp16": 2**22, "fp32": 2**25}
F = torch.nn.functional


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def builder() -> CallBuilder:
    operands = OperandPools(torch, "cpu", POOL)
    operands.fill("random")
    return CallBuilder(torch, operands, l2_byte=1e5)


def spec_of(**operator: Any) -> OperatorSpec:
    spec = spec_from_operator({"dtype": "fp32", **operator})
    assert spec is not None
    return spec


def views(builder: CallBuilder, *shapes: tuple[int, ...]) -> list[Any]:
    """The same views that a call built next takes, in order."""
    builder.operands.reset()
    return [builder.operands.take("fp32", *shape).clone() for shape in shapes]


def by_autograd(function: Any, inputs: list[Any], grad: Any) -> tuple[Any, ...]:
    with torch.enable_grad():
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        return tuple(torch.autograd.grad(out, leaves, grad))


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


def test_gradient_of_layer_norm(builder: CallBuilder) -> None:
    grad, x, weight, bias = views(builder, (24, 48), (24, 48), (48,), (48,))
    found = build_call(builder, spec_of(op="layernorm", rows=24, dim=48, backward=True)).run(0)
    wanted = by_autograd(
        lambda x, w, b: F.layer_norm(x, (48,), w, b, 1e-5), [x, weight, bias], grad
    )
    close(tuple(found), wanted)


def test_gradient_of_softmax(builder: CallBuilder) -> None:
    grad, out = views(builder, (24, 48), (24, 48))
    found = build_call(builder, spec_of(op="softmax", rows=24, dim=48, backward=True)).run(0)
    close(found, out * (grad - (grad * out).sum(-1, keepdim=True)))


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_of_attention(builder: CallBuilder, causal: bool) -> None:
    shape = {"batch": 2, "heads": 3, "kv_heads": 3, "q_len": 16, "kv_len": 16, "head_dim": 8}
    spec = spec_from_operator(
        {"op": "attention", "dtype": "bf16", "causal": causal, "backward": True, **shape}
    )
    assert spec is not None
    spec = OperatorSpec(
        spec.family, spec.operator | {"dtype": "fp32"}, spec.layout, spec.rotated, spec.detail
    )
    drawn = views(builder, *((2, 16, 3, 8),) * 4)
    q, grad, k, v = (x.transpose(1, 2) for x in drawn)
    found = build_call(builder, spec).run(0)
    attend = F.scaled_dot_product_attention
    close(
        tuple(found),
        by_autograd(lambda q, k, v: attend(q, k, v, is_causal=causal), [q, k, v], grad),
    )


def test_attention_with_dropped_weights_runs(builder: CallBuilder) -> None:
    shape = {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": 8, "kv_len": 8, "head_dim": 8}
    plain = {"op": "attention", "dtype": "bf16", **shape}
    spec, whole = spec_from_operator({**plain, "dropout": True}), spec_from_operator(plain)
    assert spec is not None
    assert whole is not None
    call = build_call(builder, spec)
    assert not torch.equal(call.run(0), call.run(0))  # another mask each time
    call = build_call(builder, whole)
    assert torch.equal(call.run(0), call.run(0))


@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
@pytest.mark.parametrize(
    "places",
    [
        {"padding": 1},
        {"stride": 2},
        {"padding_w": 2, "stride_w": 2},
        {"groups": 4},
        {"channels_last": True},
    ],
)
def test_gradients_of_convolutions(
    builder: CallBuilder, direction: str, places: dict[str, Any]
) -> None:
    shape = {"n": 2, "c": 4, "k": 8, "h": 10, "w": 12, "r": 3, "s": 3}
    spec = spec_of(op="conv2d", direction=direction, **shape, **places)
    stride = [places.get("stride", 1), places.get("stride_w", places.get("stride", 1))]
    padding = [places.get("padding", 0), places.get("padding_w", places.get("padding", 0))]
    groups, last = places.get("groups", 1), places.get("channels_last", False)
    p, q = (
        (side + 2 * pad - 3) // step + 1
        for side, pad, step in zip((10, 12), padding, stride, strict=True)
    )
    sizes = [(2, 4, 10, 12), (2, 8, p, q), (8, 4 // groups, 3, 3)]
    drawn = views(builder, *((n, h, w, c) if last else (n, c, h, w) for n, c, h, w in sizes))
    image, grad, weight = (x.permute(0, 3, 1, 2) if last else x for x in drawn)
    found = build_call(builder, spec).run(0)
    wanted = by_autograd(
        lambda x, w: F.conv2d(x, w, stride=stride, padding=padding, groups=groups),
        [image, weight],
        grad,
    )
    close(found, wanted[0 if direction == "dgrad" else 1])


def test_gradient_of_a_weight(builder: CallBuilder) -> None:
    left, right = views(builder, (40, 7), (40, 9))
    found = build_call(builder, spec_of(op="linear", m=7, n=9, k=40, turned=True)).run(0)
    close(found, left.t() @ right)


@pytest.mark.parametrize(
    ("name", "forward"),
    [
        ("gelu_grad", F.gelu),
        ("gelu_tanh_grad", lambda x: F.gelu(x, approximate="tanh")),
        ("silu_grad", F.silu),
        ("hardswish_grad", F.hardswish),
        ("relu_grad", F.relu),
    ],
)
def test_gradients_of_activations_from_their_input(
    builder: CallBuilder, name: str, forward: Any
) -> None:
    grad, x = views(builder, (1, 1024), (1, 1024))
    close(
        build_call(builder, spec_of(op=name, n=1024)).run(0).view(1, 1024),
        by_autograd(forward, [x], grad)[0],
    )


def test_gradients_of_activations_from_their_result(builder: CallBuilder) -> None:
    grad, out = views(builder, (1, 1024), (1, 1024))
    close(build_call(builder, spec_of(op="tanh_grad", n=1024)).run(0), grad * (1 - out * out))
    close(build_call(builder, spec_of(op="sigmoid_grad", n=1024)).run(0), grad * out * (1 - out))


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_a_cache_grows_by_one_token(builder: CallBuilder, layout: str) -> None:
    """The new part lies in memory as a slice of one projection of q, k and v where the operator is
    strided.
    """
    rows, cols, last = 12, 17 * 8, 8
    spec = spec_of(op="cat", n=rows * cols, rows=rows, run=last, layout=layout)
    assert (spec.detail["form"], spec.rotated) == ("append", "all")
    call = build_call(builder, spec)
    out = call.run(0)
    assert out.shape == (1, 12, 17, 8)
    assert call.sets > 1
    (old,) = views(builder, (1, 12, 16, 8))
    assert torch.equal(out[:, :, :16], old)


def test_a_sum_over_rows_has_a_result_a_column(builder: CallBuilder) -> None:
    (x,) = views(builder, (64, 96))
    spec = spec_of(op="sum", n=64 * 96, write=96 * 4, layout="transposed")
    assert spec.detail["form"] == "columns"
    close(build_call(builder, spec).run(0), x.sum(0))
    other = spec_of(op="sum", n=64 * 96, write=64 * 4)
    close(build_call(builder, other).run(0), x.sum(1))


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_batch_norm_serving_training_and_its_gradient(builder: CallBuilder, layout: str) -> None:
    n, c, h, w = 3, 8, 4, 6
    sizes = (n, h, w, c) if layout == "transposed" else (n, c, h, w)
    x, weight, bias, grad = views(builder, sizes, (c,), (c,), sizes)
    x, grad = (t.permute(0, 3, 1, 2) if layout == "transposed" else t for t in (x, grad))
    mean, variance = torch.zeros(c), torch.ones(c)

    def run(name: str, **more: Any) -> Any:
        operator = {
            "op": name,
            "n": n * c * h * w,
            "rows": c,
            "run": h * w,
            "layout": layout,
            **more,
        }
        return build_call(builder, spec_of(**operator)).run(0)

    close(run("batchnorm"), F.batch_norm(x, mean, variance, weight, bias))
    close(run("batchnorm_train"), F.batch_norm(x, mean, variance, weight, bias, training=True))
    wanted = by_autograd(
        lambda x: F.batch_norm(x, None, None, weight, bias, training=True), [x], grad
    )[0]
    close(run("batchnorm_grad", read=4 * x.numel() * 4), wanted)


def test_pooling_and_its_gradient(builder: CallBuilder) -> None:
    x, grad = views(builder, (1, 6, 16, 16), (1, 6, 8, 8))
    byte = 6 * 8 * 8 * (4 + 8)
    spec = spec_of(op="pool", n=6 * 256, rows=6, write=byte)
    assert (spec.detail["size"], spec.detail["stride"], spec.detail["padding"]) == (3, 2, 1)
    close(build_call(builder, spec).run(0), F.max_pool2d(x, 3, 2, 1))
    back = build_call(builder, spec_of(op="pool_grad", n=6 * 256, rows=6, read=byte)).run(0)
    close(back, by_autograd(lambda x: F.max_pool2d(x, 3, 2, 1), [x], grad)[0])


def test_dropout_and_its_gradient(builder: CallBuilder) -> None:
    (x,) = views(builder, (1, 4096))
    out, mask = build_call(builder, spec_of(op="dropout", n=4096, write=5 * 4096)).run(0)
    assert mask.float().mean().item() == pytest.approx(1 - DROPPED, abs=0.03)
    close(out, x * mask / (1 - DROPPED))
    back = build_call(builder, spec_of(op="dropout_grad", n=4096, read=5 * 4096)).run(0)
    kept = back != 0
    assert kept.float().mean().item() == pytest.approx(1 - DROPPED, abs=0.03)
    close(back[kept], (x / (1 - DROPPED))[kept])


def test_a_step_of_the_optimiser(builder: CallBuilder) -> None:
    """Sixteen tensors; none of the shared pool is written to."""
    size = 64
    before = views(builder, *((size,),) * (4 * 16))
    spec = spec_of(op="adamw", n=16 * size, write=3 * 16 * size * 4)
    values = build_call(builder, spec).run(0)
    assert all(
        torch.equal(a, b)
        for a, b in zip(views(builder, *((size,),) * (4 * 16)), before, strict=True)
    )
    value, gradient, first = before[0], before[16], before[32]
    second = before[48].abs()
    first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
    step = 2  # it counted one before
    moved = first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
    torch.testing.assert_close(values[0], value * (1 - 1e-8) - 1e-6 * moved, rtol=1e-5, atol=1e-6)


def test_gradient_of_an_embedding(builder: CallBuilder) -> None:
    (grad,) = views(builder, (32, 16))
    operator = {"op": "scatter_add", "n": 512, "read": 2 * 512 * 4 + 8 * 32, "write": 512 * 4}
    found = build_call(builder, spec_of(**operator)).run(0)
    assert found.shape == (32, 16)
    close(found.sum(0), grad.sum(0))  # every row of the gradient is added somewhere


def test_rows_that_serve_several_and_small_tensors_spread_out(builder: CallBuilder) -> None:
    small, full = views(builder, (2, 1, 8), (2, 3, 8))
    spec = spec_of(op="mul", n=48, rows=6, layout="broadcast", read=(48 + 16) * 4)
    assert spec.detail["groups"] == 2
    close(build_call(builder, spec).run(0), full * small)
    spread = build_call(
        builder, spec_of(op="copy", n=48, rows=6, layout="broadcast", read=16 * 4)
    ).run(0)
    assert torch.equal(spread, small.expand(2, 3, 8))
    by_row, full = views(builder, (6, 1), (6, 8))
    close(
        build_call(builder, spec_of(op="mul", n=48, rows=6, layout="broadcast", read=54 * 4)).run(
            0
        ),
        full * by_row,
    )
    channel, full = views(builder, (1, 3, 1), (2, 3, 8))
    bias = spec_of(op="add", n=48, rows=6, layout="broadcast", read=51 * 4)
    close(build_call(builder, bias).run(0), full + channel)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"phase": "train", "batch": 1, "seq": 8}),
        ("gpt2", {"phase": "decode", "batch": 2, "seq": 8}),
        ("bert-large", {"phase": "train", "batch": 1, "seq": 8, "attention": "eager"}),
        ("llama3-8b", {"phase": "decode", "batch": 2, "seq": 8}),
    ],
)
def test_operators_of_models_run_and_write_what_they_say(
    builder: CallBuilder, name: str, options: dict[str, Any]
) -> None:
    """Small ones are run; of all, next to no bytes are in operators that no row can stand for."""
    from wattcast.workload import ModelOptions, build_graph
    from wattcast.workload.readers.from_json import operator_to_plain

    graph = build_graph(name, ModelOptions(**{"stack": "eager"} | options))
    lost = total = 0.0
    ran: set[str] = set()
    for op in dict.fromkeys(op for op, _ in graph.calls()):
        plain = {k: str(v) if isinstance(v, str) else v for k, v in operator_to_plain(op).items()}
        spec = spec_from_operator(plain)
        byte = op.read_byte + op.write_byte
        total += byte
        lost += byte * (spec is None)
        if spec is None or byte > 3e6 or op.flop > 3e7 or spec.operator["op"] == "attention":
            continue
        out = build_call(builder, spec).run(0)
        parts = [t for t in (out if isinstance(out, (list, tuple)) else [out]) if t is not None]
        if op.name not in _MORE_THAN_SAID:
            assert sum(t.numel() * t.element_size() for t in parts) == op.write_byte, spec
        ran.add(op.name)
    assert len(ran) >= 8
    assert lost < 0.02 * total


# weights' gradients beside the input's; the moments; indices of a table
_MORE_THAN_SAID = ("layernorm", "rmsnorm", "adamw", "scatter_add")


def test_formats_the_pools_lack_are_left_out() -> None:
    """A cast of token numbers was suggested once and failed on the GPU with ``KeyError: 'int64'``."""
    assert (
        spec_from_operator({"op": "cast", "n": 128, "dtype": "int64", "out_dtype": "int32"}) is None
    )
    assert (
        spec_from_operator({"op": "cast", "n": 128, "dtype": "fp32", "out_dtype": "bool"}) is None
    )


def test_what_the_gpu_alone_can_run_is_built(builder: CallBuilder) -> None:
    """What has no kernel here fails at the call, where it costs the campaign one row."""
    call = build_call(builder, spec_of(op="rmsnorm", rows=24, dim=48, backward=True))
    with pytest.raises(NotImplementedError, match="_fused_rms_norm_backward"):
        call.run(0)
    spec = spec_from_operator(
        {"op": "linear", "m": 16, "n": 32, "k": 64, "dtype": "fp8", "out_dtype": "bf16"}
    )
    assert spec is not None
    assert (spec.layout, spec.rotated) == ("nt", "weights")
    assert (
        spec_from_operator(
            {"op": "linear", "m": 15, "n": 32, "k": 64, "dtype": "fp8", "out_dtype": "bf16"}
        )
        is None
    )


def test_the_plan_of_training_is_fixed_and_its_small_operators_run(builder: CallBuilder) -> None:
    from wattcast.lab.campaigns.kernel_campaign import read_listed
    from wattcast.lab.campaigns.kernel_chains import PLANS
    from wattcast.lab.campaigns.kernel_plan import LARGEST_BYTE, LONGEST_S, read_kernel_plan

    specs = read_listed(PLANS / "training.jsonl")
    assert len({spec.id for spec in specs}) == len(specs) == 906
    assert not {spec.id for spec in specs} & {spec.id for spec in read_kernel_plan()}
    assert max(spec.guessed_s for spec in specs) <= LONGEST_S
    assert max(spec.byte for spec in specs) <= LARGEST_BYTE
    kinds = {(spec.operator["op"], spec.detail.get("form", "")) for spec in specs}
    assert {(spec.operator["op"], spec.detail.get("form", "")) for spec in specs[:60]} == kinds
    small = [
        s
        for s in specs
        if s.byte < 4e6 and s.flop < 3e7 and s.operator["op"] not in ("rmsnorm", "attention")
    ]
    ran = set()
    for spec in small[:60]:
        build_call(builder, spec).run(0)
        ran.add((spec.operator["op"], spec.detail.get("form", "")))
    assert len(ran) >= 8, ran


def test_the_plan_of_training_is_one_of_our_workloads() -> None:
    """Every operator reads back as a workload file's, into the group that its rows are to speak
    for.
    """
    import json

    from wattcast.hardware import load_gpu
    from wattcast.kernels import RunCondition, build_kernels, reference_chip
    from wattcast.lab.campaigns.database_files import make_workload_form
    from wattcast.lab.campaigns.kernel_campaign import read_listed
    from wattcast.lab.campaigns.kernel_chains import PLANS
    from wattcast.workload.readers.from_json import parse_workload

    specs = read_listed(PLANS / "training.jsonl")
    text = json.dumps(
        {"name": "training", "ops": [make_workload_form(spec.operator) for spec in specs]}
    )
    ops = tuple(op for op, _ in parse_workload(text.encode(), "training").calls())
    conditions = [
        RunCondition(s.layout, s.rotated, "", int(s.detail.get("rows", 0))) for s in specs
    ]
    gpu = load_gpu("h200")
    groups = set(build_kernels(ops, conditions, gpu, reference_chip(gpu), ()).work.kernel_family)
    wanted = {
        "cat.append",
        "vector.cat",
        "reduce.columns",
        "batchnorm",
        "batchnorm.train",
        "batchnorm.backward",
    }
    wanted |= {"pool", "pool.backward", "optimizer", "scatter", "vector.dropout"}
    assert {f"elementwise.{name}" for name in wanted} <= groups
    assert {
        "layernorm.backward",
        "rmsnorm.backward",
        "softmax.backward",
        "attention.backward",
    } <= groups
    assert {"attention.prefill.dropout", "gemm.turing"} <= groups


def test_every_operator_of_the_plan_runs_on_tensors_without_data() -> None:
    """Shapes and arguments of all calls, cuDNN's and FlashAttention's among them, through PyTorch's
    meta device.
    """
    from dataclasses import replace

    from wattcast.lab.campaigns.kernel_campaign import read_listed
    from wattcast.lab.campaigns.kernel_chains import PLANS, read_chains
    from wattcast.lab.campaigns.operator_rows import POOL_BYTE

    without = CallBuilder(torch, OperandPools(torch, "meta", POOL_BYTE), l2_byte=50e6)
    specs = read_listed(PLANS / "training.jsonl")
    back = [s for s in specs if s.operator["op"] == "attention" and s.operator.get("backward")]
    flash = [replace(spec, detail={"backend": "flash"}) for spec in back]
    for spec in [*specs[:450], *flash, *back, *(chain.spec() for chain in read_chains())]:
        out = build_call(without, spec).run(0)
        if spec in flash or spec in back:
            o = spec.operator
            assert out[0].shape == (o["batch"], o["heads"], o["q_len"], o["head_dim"])
            assert out[1].shape == (o["batch"], o["kv_heads"], o["kv_len"], o["head_dim"])
