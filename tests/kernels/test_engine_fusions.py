"""What TensorRT-LLM's attention does itself is left out of steps on its kernels, and of no others."""

from __future__ import annotations

import pytest

import wattcast
from wattcast.kernels.engine_fusions import fuse_attention
from wattcast.predictor.api import find_gpu
from wattcast.serving.step_tabulation import StepRange, tabulate_step_costs
from wattcast.workload.build_model import build_graph
from wattcast.workload.engine_operators import PagedAttention
from wattcast.workload.engine_row_operators import EngineRotary, Quantize
from wattcast.workload.model_catalogue import load_model
from wattcast.workload.model_options import ModelOptions, SoftwareStack


def build_step(model: str = "llama3-8b", **options: object):
    run = ModelOptions.from_names(
        phase="decode", batch=16, seq=2000, stack=SoftwareStack.ENGINE, **options
    )
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
    fused = fuse_attention(graph, "trtllm")
    assert count_kind(fused, EngineRotary) == 0
    assert count_kind(fused, Quantize) == 0
    kept = [op for op, _ in graph.calls() if not isinstance(op, EngineRotary | Quantize)]
    assert [op for op, _ in fused.calls()] == kept
    assert count_kind(fused, PagedAttention) == 32


def test_conversions_to_fp4_stay() -> None:
    """Its blocks have scales of their own, which attention does not write here."""
    graph = build_step(quantization="nvfp4")
    before = [op for op, _ in graph.calls() if isinstance(op, Quantize) and op.mode == "fp4"]
    fused = fuse_attention(graph, "trtllm")
    assert before
    assert [op for op, _ in fused.calls() if isinstance(op, Quantize)] == before


@pytest.mark.parametrize("engine", ["", "vllm", "sglang", "vllm-2025"])
def test_other_engines_run_what_the_graph_has(engine: str) -> None:
    graph = build_step(quantization="fp8")
    assert fuse_attention(graph, engine) is graph


def test_latent_attention_keeps_its_rotary_embedding() -> None:
    graph = build_step("deepseek-v3", tp=8, quantization="fp8-block")
    assert fuse_attention(graph, "trtllm") == graph


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
