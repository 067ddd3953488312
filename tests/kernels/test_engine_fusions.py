"""What TensorRT-LLM's attention and all-reduces do themselves is left out of steps on its kernels,
and of no others.
"""

from __future__ import annotations

import pytest

import wattcast
from wattcast.kernels.engine_fusions import fuse_operators
from wattcast.predictor.api import find_gpu
from wattcast.serving.step_tabulation import StepRange, tabulate_step_costs
from wattcast.workload.build_model import build_graph
from wattcast.workload.engine_operators import PagedAttention
from wattcast.workload.engine_row_operators import CompiledRows, EngineRotary, Quantize
from wattcast.workload.model_catalogue import load_model
from wattcast.workload.model_options import ModelOptions, SoftwareStack
from wattcast.workload.operator_types import Collective


def build_step(model: str = "llama3-8b", **options: object):
    step = {"phase": "decode", "batch": 16, "seq": 2000} | options
    run = ModelOptions.from_names(stack=SoftwareStack.ENGINE, **step)
    return build_graph(load_model(model), run)


def count_kind(graph, kind: type) -> int:
    return sum(isinstance(op, kind) for op, calls in graph.calls() for _ in range(calls))


def test_rotary_and_conversions_beside_attention_are_left_out() -> None:
    """Llama 3 8B in fp8 has 32 layers: a rotary embedding, a conversion of queries and one of
    attention's output each; all other conversions are parts of norms and activations.
    """
    graph = build_step(quantization="fp8", kv_dtype="fp8")
    assert count_kind(graph, EngineRotary) == 32
    assert count_kind(graph, Quantize) == 64
    fused = fuse_operators(graph, "trtllm")
    assert count_kind(fused, EngineRotary) == 0
    assert count_kind(fused, Quantize) == 0
    kept = [op for op, _ in graph.calls() if not isinstance(op, EngineRotary | Quantize)]
    assert [op for op, _ in fused.calls()] == kept
    assert count_kind(fused, PagedAttention) == 32


def test_attention_writes_fp4() -> None:
    """Its output's conversion is left out, those of a norm's and an activation's results stay
    where one GPU runs the model.
    """
    graph = build_step(quantization="nvfp4")
    assert count_kind(graph, Quantize) == 4 * 32
    assert count_kind(fuse_operators(graph, "trtllm"), Quantize) == 3 * 32


def count_norms(graph) -> int:
    calls = [(op, times) for op, times in graph.calls() if isinstance(op, CompiledRows)]
    return sum(times for op, times in calls if "rms_norm" in op.function)


@pytest.mark.parametrize(("quantization", "conversions"), [("fp8", 0), ("nvfp4", 32)])
def test_all_reduces_add_norm_and_convert(quantization: str, conversions: int) -> None:
    """Of Llama 3 8B on four GPUs the norm before the head stays, and fp4 gates are converted."""
    graph = build_step(quantization=quantization, tp=4)
    assert count_norms(graph) == 2 * 32 + 1
    fused = fuse_operators(graph, "trtllm")
    assert count_norms(fused) == 1
    assert count_kind(fused, Quantize) == conversions
    assert count_kind(fused, Collective) == count_kind(graph, Collective)


def test_one_gpu_norms_by_kernels_of_their_own() -> None:
    graph = build_step()
    assert count_norms(fuse_operators(graph, "trtllm")) == count_norms(graph) == 2 * 32 + 1


def test_long_prompts_norm_by_kernels_of_their_own() -> None:
    """Llama 3 8B sums 8 KiB a token: 900 tokens fit into 8 MB, 1,100 do not."""
    short, long = (build_step(phase="prefill", batch=1, seq=tokens, tp=4) for tokens in (900, 1100))
    assert count_norms(fuse_operators(short, "trtllm")) == 1
    assert count_norms(fuse_operators(long, "trtllm")) == 2 * 32 + 1


@pytest.mark.parametrize("engine", ["", "vllm", "sglang", "vllm-2025"])
def test_other_engines_run_what_the_graph_has(engine: str) -> None:
    graph = build_step(quantization="fp8")
    assert fuse_operators(graph, engine) is graph


def test_latent_attention_keeps_its_rotary_embedding() -> None:
    graph = build_step("deepseek-v3", tp=8, quantization="fp8-block")
    fused = fuse_operators(graph, "trtllm")
    assert count_kind(fused, EngineRotary) == count_kind(graph, EngineRotary) == 61
    assert count_kind(fused, Quantize) == count_kind(graph, Quantize)


def test_predict_and_simulate_leave_the_same_out() -> None:
    """A step of either is shorter by what was left out, not by more."""
    options = {"quantization": "fp8", "kv_dtype": "fp8", "tp": 4}
    step = {"phase": "decode", "batch": 16, "seq": 2000, "stack": "engine", "host_launch": 0.0}
    predicted = wattcast.predict("llama3-70b", "h200", engine="trtllm", **options, **step)
    assert not any(isinstance(share.op, EngineRotary) for share in predicted.ops)
    run = ModelOptions.from_names(**options, stack=SoftwareStack.ENGINE)
    costs = tabulate_step_costs(
        load_model("llama3-70b"),
        find_gpu("h200", None, "trtllm"),
        run,
        StepRange(max_tokens=512, max_seqs=16, longest_context=4096),
    )
    step_s = float(costs.decode_cost(16, 16, 2000.0)[0])
    assert step_s == pytest.approx(float(predicted.latency_s), rel=0.06)
