"""Capture of any PyTorch module: against an independent count, and what it says of what it does not
know.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch (CPU build) is not installed")

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import wattcast
from wattcast.core.errors import BadInput
from wattcast.workload import ModelOptions, build_graph, model_catalogue
from wattcast.workload.build_model import WORKSPACE_BYTE
from wattcast.workload.operator_types import Attention, Conv2d, Elementwise, Linear
from wattcast.workload.readers.from_torch import capture


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10), nn.Softmax(-1)
    )


class Counter(TorchDispatchMode):
    """Bytes and calls counted by hand: every tensor an operator that is no view reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.byte = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if "view" not in str(func) and "aten.t." not in str(func):
            tensors = [
                t
                for t in (*args, *(out if isinstance(out, tuple) else (out,)))
                if torch.is_tensor(t)
            ]
            small = (
                func is torch.ops.aten.native_layer_norm.default
            )  # its weights and row statistics are not counted
            self.calls += 1
            self.byte += sum(
                t.numel() * t.element_size()
                for t in tensors
                if not small or (t.dim() == 2 and t.size(1) > 1)
            )
        return out


def test_bytes_and_calls_agree_with_a_count_by_hand() -> None:
    with torch.device("meta"):
        module, x = network().to(torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    with Counter() as counter, torch.no_grad():
        module(x)
    graph = capture(module, (x,))
    assert sum(calls for _, calls in graph.calls()) == counter.calls == 5
    assert graph.byte == counter.byte


def test_real_weights_are_only_looked_at() -> None:
    module = network()
    before = {name: p.clone() for name, p in module.named_parameters()}
    graph = capture(module, (torch.randn(32, 64),), train=True)
    assert all(
        torch.equal(before[name], p) and p.grad is None for name, p in module.named_parameters()
    )
    with torch.device("meta"):
        bare = capture(network(), (torch.zeros(32, 64),), train=True)
    assert list(graph.calls()) == list(bare.calls())


def test_labels_say_where_in_the_module() -> None:
    with torch.device("meta"):
        graph = capture(network(), (torch.zeros(4, 64),))
    assert [op.label for op, _ in graph.calls()] == ["0", "1", "2", "3", "4"]


def test_training_adds_backward_and_optimiser() -> None:
    with torch.device("meta"):
        module, x = network(), torch.zeros(32, 64)
        train = capture(module, (x,), train=True)
    products = [op for op, _ in train.calls() if isinstance(op, Linear)]
    first, second = 2 * 32 * 64 * 128, 2 * 32 * 128 * 10
    assert (
        sum(op.flop for op in products) == 2 * first + 3 * second
    )  # the first layer's input wants no gradient
    (step,) = [
        op for op, _ in train.calls() if isinstance(op, Elementwise) and op.function == "adamw"
    ]
    assert step.n == sum(p.numel() for p in module.parameters())


class Odd(nn.Module):
    """Uses an operator nobody has a rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):  # type: ignore[no-untyped-def]
        return torch.linalg.svdvals(self.inner(x) @ x.mT)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = Odd()

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.odd(x)


def test_an_operator_without_a_rule_is_kept_and_named_with_what_is_at_stake() -> None:
    with torch.device("meta"):
        found = capture(Wrapped(), (torch.zeros(64, 32),))
    (op,) = [op for op, _ in found.calls() if op.name == "unspecified"]
    assert (op.label, op.read_byte) == ("odd", 64 * 64 * 4)
    (line,) = [line for line in found.assumptions if "svd" in line]
    assert "in odd has no rule: 1 call(s)" in line
    assert f"{op.read_byte + op.write_byte:.3g} bytes kept" in line


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.linear(x) * float(x.sum())


def test_a_shape_that_needs_data_is_refused_with_the_module() -> None:
    with torch.device("meta"), pytest.raises(BadInput, match="does not run without data"):
        capture(Asking(), (torch.zeros(4, 8),))


def test_a_yes_or_no_question_is_answered_and_said() -> None:
    def ask(x):  # type: ignore[no-untyped-def]
        return x * 2 if bool((x == 0).all()) else x * x

    with torch.device("meta"):
        graph = capture(ask, (torch.zeros(16),), name="ask")
    assert graph.name == "ask"
    assert [op.name for op, _ in graph.calls()] == ["compare", "sum", "scale"]
    assert any("yes-or-no" in line for line in graph.assumptions)


def test_attention_is_one_kernel_and_masks_are_read() -> None:
    with torch.device("meta"):
        q = torch.zeros(2, 8, 64, 32, dtype=torch.bfloat16)
        kv = torch.zeros(2, 2, 64, 32, dtype=torch.bfloat16)
        sdpa = nn.functional.scaled_dot_product_attention
        grouped = capture(lambda: sdpa(q, kv, kv, is_causal=True, enable_gqa=True))
        masked = capture(lambda: sdpa(q, q, q, attn_mask=torch.ones(64, 64, dtype=torch.bool)))
    (op,) = [op for op, _ in grouped.calls()]
    assert op == Attention(2, 8, 2, 64, 64, 32, causal=True)
    assert Attention(2, 8, 8, 64, 64, 32) in [op for op, _ in masked.calls()]


@pytest.mark.parametrize(("stride", "padding", "groups"), [(1, 0, 1), (2, 1, 1), (1, 1, 16)])
def test_convolutions_of_all_kinds(stride: int, padding: int, groups: int) -> None:
    with torch.device("meta"):
        module = nn.Conv2d(16, 32, 3, stride=stride, padding=padding, groups=groups, bias=False)
        graph = capture(module, (torch.zeros(4, 16, 28, 28),), train=True, step=False)
        out = module(torch.zeros(4, 16, 28, 28))
    convs = [op for op, _ in graph.calls() if isinstance(op, Conv2d)]
    assert [op.direction for op in convs] == ["forward", "wgrad"]
    assert (convs[0].p, convs[0].q) == tuple(out.shape[2:])
    assert convs[0].groups == groups


def test_three_dimensions_do_the_arithmetic_pytorch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        for module, shape in (
            (nn.Conv3d(4, 8, 3, stride=2, padding=1), (2, 4, 9, 16, 16)),
            (nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1), (2, 16, 8, 8)),
            (nn.Conv1d(6, 8, 5, stride=2, padding=2), (2, 6, 100)),
        ):
            x = torch.zeros(shape, requires_grad=True)
            with FlopCounterMode(display=False) as counter:
                module(x).sum().backward()
            graph = capture(module, (x,), train=True, step=False)
            assert (
                sum(op.flop for op, _ in graph.calls() if isinstance(op, Conv2d))
                == counter.get_total_flops()
            )


def test_training_without_parameters_is_refused() -> None:
    with torch.device("meta"), pytest.raises(BadInput, match="depends on parameters"):
        capture(nn.ReLU(), (torch.zeros(4),), train=True)


def test_without_pytorch_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from wattcast.core.errors import MissingTool
    from wattcast.workload.readers import from_torch

    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(from_torch, "import_module", absent)
    with pytest.raises(MissingTool, match=r"wattcast\[torch\]"):
        capture(None)


def test_memory_by_hand() -> None:
    """Two layers in fp32: weights, inputs, and at the worst moment what goes into the activation
    and out of it.
    """
    module = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    weights, given = sum(4 * p.numel() for p in module.parameters()), 4 * 8 * 256
    graph = capture(module, (8, 256))
    assert graph.memory_byte == weights + given + 2 * 4 * 8 * 1024 + WORKSPACE_BYTE
    train = capture(module, [(8, 256)], train=True)
    assert train.memory_byte > 4 * weights + given + WORKSPACE_BYTE  # gradients and two moments
    assert (graph.stack, graph.phase, train.phase) == ("eager", "forward", "train")


@pytest.mark.parametrize("phase", ["prefill", "train"])
def test_memory_is_that_of_the_template(phase: str) -> None:
    hugging_face = pytest.importorskip("hugging_face", reason="PyTorch and transformers are needed")
    model = model_catalogue.load_model("gpt2")
    model = replace(model, dims=replace(model.dims, layers=3))
    built = hugging_face.module("gpt2", model.dims, phase, "flash", torch.bfloat16)
    given = hugging_face.inputs("gpt2", model.dims, built, phase, 4, 256)
    captured = capture(built, given, train=phase == "train")
    options = ModelOptions(phase=phase, batch=4, seq=256, stack="eager")
    assert captured.memory_byte == pytest.approx(build_graph(model, options).memory_byte, rel=0.1)


def test_predict_takes_a_module_and_shapes_or_tensors() -> None:
    module = network().to(torch.bfloat16)
    shaped = wattcast.predict(module, inputs=(32, 64), gpu="h200")
    given = wattcast.predict(module, "h200", inputs=torch.zeros(32, 64, dtype=torch.bfloat16))
    named = wattcast.predict(module, "h200", inputs={"input": (32, 64)})
    assert shaped.latency_s == given.latency_s == named.latency_s
    assert shaped.fits
    assert shaped.name == "Sequential"
    assert (
        wattcast.predict(module, "h200", inputs=(32, 64), phase="train").energy_j > shaped.energy_j
    )
    for wrong in (
        {},
        {"inputs": (32, 64), "batch": 3},
        {"inputs": (32, 64), "phase": "decode"},
        {"inputs": (0, 64)},
    ):
        with pytest.raises(BadInput):
            wattcast.predict(module, "h200", **wrong)
    with pytest.raises(BadInput, match="inputs"):
        wattcast.predict("gpt2", "h200", inputs=(32, 64))
