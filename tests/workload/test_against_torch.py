"""Templates against PyTorch itself: what the Hugging Face module of the same dimensions dispatches.

Both sides are cut to two layers. The modules run on the meta device: no weights, no GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
from comparing import cut, moved_byte, split

hugging_face = pytest.importorskip("hugging_face", reason="PyTorch and transformers are needed")

from wattcast.workload import ModelOptions, build_graph
from wattcast.workload.graph import Graph, compute_totals
from wattcast.workload.operator_types import Bmm
from wattcast.workload.readers.from_torch import capture
from wattcast.workload.readers.torch_kernels import route_to_gpu_kernels

torch = hugging_face.torch
BATCH, SEQ = 4, 128
TRUTH = [
    *(
        (name, phase)
        for name in ("gpt2", "qwen2-1.5b", "llama3-8b")
        for phase in ("prefill", "decode")
    ),
    ("bert-large", "prefill"),
    ("gpt2", "train"),
    ("bert-large", "train"),
    ("llama3-8b", "train"),
    ("vit-large", "forward"),
]
MORE = [
    *(
        (name, phase)
        for name in ("qwen3-8b", "gemma-7b", "phi-2", "phi-3-mini")
        for phase in ("prefill", "decode")
    ),
    ("opt-1.3b", "prefill"),
    ("opt-1.3b", "decode"),
    ("mistral-7b", "prefill"),
    ("mixtral-8x7b", "prefill"),
    ("qwen3-30b-a3b", "prefill"),
    ("deepseek-v3", "prefill"),
    ("clip-base", "forward"),
    ("dinov2-large", "forward"),
    ("siglip-so400m", "forward"),
    ("siglip-base", "forward"),
    ("whisper-tiny", "prefill"),
    ("whisper-tiny", "decode"),
    ("deepseek-v3", "train"),
    ("mixtral-8x7b", "train"),
]


SLOW = pytest.mark.slow


def alternate_attention(runs: list[tuple[str, str]]) -> list[Any]:
    """Return each run with the one and the other attention; by day every run has one of them."""
    cases = []
    for place, (name, phase) in enumerate(runs):
        for kind, attention in enumerate(("flash", "eager")):
            marks = () if place % 2 == kind else SLOW
            cases.append(pytest.param(name, phase, attention, marks=marks))
    return cases


def pair(
    name: str, phase: str, attention: str, batch: int = BATCH, seq: int = SEQ, dtype: str = "bf16"
) -> tuple[Graph, Graph]:
    """The capture and the template's graph of the same run."""
    model = cut(name)
    formats = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "tf32": torch.float32,
    }
    built = hugging_face.module(name, model.dims, phase, attention, formats[dtype])
    given = hugging_face.inputs(name, model.dims, built, phase, batch, seq)
    found = capture(built, given, train=phase == "train", tf32=True if dtype == "tf32" else None)
    assert not [line for line in found.assumptions if "has no rule" in line]
    head = "all" if name.startswith("whisper") else None
    length = None if model.kind == "vision" else seq
    options = ModelOptions(
        stack="eager",
        phase=phase,
        batch=batch,
        seq=length,
        attention=attention,
        head=head,
        dtype=dtype,
    )
    return found, build_graph(model, options)


def check(captured: Graph, built: Graph) -> None:
    large, small = split(captured)
    ours, our_small = split(built)
    assert ours == large, f"only PyTorch: {large - ours}; only ours: {ours - large}"
    assert sum(our_small.values()) == pytest.approx(sum(small.values()), rel=0.05)
    assert moved_byte(our_small) == pytest.approx(moved_byte(small), rel=0.05)


@pytest.mark.parametrize(("name", "phase", "attention"), alternate_attention(TRUTH))
def test_operators_are_those_of_the_module(name: str, phase: str, attention: str) -> None:
    """Elementwise work is the same for the headline models: layouts (strided, broadcast,
    transposed) too.
    """
    captured, built = pair(name, phase, attention)
    check(captured, built)
    assert split(built)[1] == split(captured)[1]


@pytest.mark.parametrize(("name", "phase", "attention"), alternate_attention(MORE))
def test_operators_of_further_families(name: str, phase: str, attention: str) -> None:
    check(*pair(name, phase, attention))


@pytest.mark.parametrize("name", ["resnet50", "resnet101", "convnext-base", "mobilevit-s"])
def test_convolutional_networks(name: str) -> None:
    check(*pair(name, "forward", "eager"))


@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_one_sequence_needs_fewer_copies(attention: str) -> None:
    """With batch 1 some tensors need no copy; templates follow the strides, so they know."""
    captured, built = pair("llama3-8b", "prefill", attention, batch=1)
    check(captured, built)
    assert split(built)[1] == split(captured)[1]


@pytest.mark.parametrize("phase", ["prefill", "train"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32", "tf32"])
@pytest.mark.parametrize("name", ["gpt2", "llama3-8b"])
def test_other_number_formats(name: str, dtype: str, phase: str) -> None:
    """In fp16 PyTorch's softmax widens by itself, where bf16 needs a cast before it; in fp32 casts
    vanish.
    """
    captured, built = pair(name, phase, "eager", dtype=dtype)
    assert split(built) == split(captured)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_window_shorter_than_the_context(phase: str) -> None:
    """Mistral's window makes Hugging Face build a mask, repeat keys and drop old ones from the
    cache.
    """
    check(*pair("mistral-7b", phase, "flash", batch=1, seq=5000))


def test_an_expert_sees_its_share_of_the_tokens() -> None:
    """In decode only the experts that were chosen are read; shapes alone cannot show that to a
    capture.
    """
    captured, built = pair("qwen3-30b-a3b", "decode", "flash")
    large, _ = split(captured)
    ours, _ = split(built)
    assert {op for op in large - ours if not isinstance(op, Bmm)} == set()
    assert all(op.b == BATCH * 8 and op.m == 1 for op in ours - large)


@pytest.mark.parametrize(
    ("name", "phase", "attention"),
    [
        ("gpt2", "prefill", "flash"),
        ("gpt2", "train", "flash"),
        ("gpt2", "train", "eager"),
        ("bert-large", "train", "flash"),
        ("bert-large", "prefill", "eager"),
        ("llama3-8b", "prefill", "eager"),
        ("llama3-8b", "decode", "eager"),
        ("llama3-8b", "train", "eager"),
        ("qwen2-1.5b", "prefill", "eager"),
        ("vit-large", "forward", "flash"),
        ("resnet101", "forward", "eager"),
    ],
)
def test_flops_of_products_equal_pytorchs_counter(name: str, phase: str, attention: str) -> None:
    """PyTorch's counter ignores causality, so the dense count is compared; what a mask skips is
    stated beside it.
    """
    from torch.utils.flop_counter import FlopCounterMode

    model = cut(name)
    built = hugging_face.module(name, model.dims, phase, attention)
    given = hugging_face.inputs(name, model.dims, built, phase, BATCH, SEQ)
    if phase == "train":
        given["attention_mask"] = None
    counter = FlopCounterMode(display=False)
    with (
        torch.device("meta"),
        route_to_gpu_kernels(torch, lambda *_: None),
        counter,
        torch.set_grad_enabled(phase == "train"),
    ):
        if phase == "train":
            given["position_ids"] = torch.arange(SEQ).unsqueeze(0).expand(BATCH, SEQ)
            out = _without_questions(built, given)
            out.loss.backward()
        else:
            built(**given)
    length = None if model.kind == "vision" else SEQ
    graph = build_graph(
        model,
        ModelOptions(stack="eager", phase=phase, batch=BATCH, seq=length, attention=attention),
    )
    sums = compute_totals(graph)
    assert sums.product_flop_dense == counter.get_total_flops()
    causal = attention == "flash" and name == "gpt2" and phase in ("prefill", "train")
    assert (sums.product_flop < sums.product_flop_dense) is causal


def _without_questions(built, given):  # type: ignore[no-untyped-def]
    """Hugging Face asks a training batch whether it is packed, which data-less tensors cannot
    answer.
    """
    from unittest.mock import patch

    with patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None):
        if "bert" in type(built).__name__.lower():
            given.pop("position_ids")
        return built(**given)
