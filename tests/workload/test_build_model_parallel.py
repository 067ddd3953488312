"""Several GPUs: shares of the work, and the exchanges between them."""

from __future__ import annotations

import pytest

from wattcast.workload import ModelOptions, build_graph
from wattcast.workload.graph import Graph, compute_totals
from wattcast.workload.operator_types import Attention, Collective, Linear
from wattcast.workload.tracing.program import ADAMW_ALIGNMENT


def exchanges(graph: Graph) -> dict[str, tuple[int, int]]:
    """Collective -> (calls, bytes of all)."""
    found: dict[str, tuple[int, int]] = {}
    for op, calls in graph.calls():
        if isinstance(op, Collective):
            before = found.get(op.collective, (0, 0))
            found[op.collective] = (before[0] + calls, before[1] + calls * op.bytes)
    return found


@pytest.mark.parametrize("stack", ["eager", "compiled", "engine"])
@pytest.mark.parametrize("name", ["llama3-8b", "opt-1.3b", "mixtral-8x7b", "deepseek-v3"])
def test_two_all_reduces_a_layer_and_one_for_the_embedding(name: str, stack: str) -> None:
    """Megatron's scheme (Shoeybi et al. 2019, section 3): one exchange after attention, one after feed-forward."""
    graph = build_graph(name, ModelOptions(tp=4, batch=2, seq=64, stack=stack))
    layers = {"llama3-8b": 32, "opt-1.3b": 24, "mixtral-8x7b": 32, "deepseek-v3": 61}[name]
    hidden = {"llama3-8b": 4096, "opt-1.3b": 2048, "mixtral-8x7b": 4096, "deepseek-v3": 7168}[name]
    found = exchanges(graph)
    assert found["all_reduce"] == (2 * layers + 1, (2 * layers + 1) * 2 * 64 * hidden * 2)
    assert found["all_gather"][0] == 1


def test_gpus_share_the_products_evenly() -> None:
    one, four = (build_graph("llama3-8b", ModelOptions(tp=tp, batch=2, seq=64)) for tp in (1, 4))
    assert compute_totals(four).product_flop == pytest.approx(compute_totals(one).product_flop / 4, rel=1e-12)
    (attention,) = {op for op, _ in four.calls() if isinstance(op, Attention)}
    assert (attention.heads, attention.kv_heads) == (8, 2)


def test_key_heads_are_repeated_when_gpus_outnumber_them() -> None:
    graph = build_graph("qwen2-1.5b", ModelOptions(tp=4, seq=64))
    (attention,) = {op for op, _ in graph.calls() if isinstance(op, Attention)}
    assert (attention.heads, attention.kv_heads) == (3, 1)


def test_training_exchanges_gradients_of_activations_and_of_weights() -> None:
    graph = build_graph("llama3-8b", ModelOptions(phase="train", tp=2, dp=8, seq=64))
    assert exchanges(graph)["all_reduce"][0] == (2 * 32 + 1) + (2 * 32 + 1) + 1
    (gradients,) = [op for op, _ in graph.calls() if isinstance(op, Collective) and op.gpus == 8]
    step = next(op for op, _ in graph.calls() if op.name == "adamw")
    assert (
        0 <= step.n * step.count * 2 - gradients.bytes < 2 * ADAMW_ALIGNMENT * step.count
    )  # launches are whole vectors


def test_pipeline_stages_hand_on_activations() -> None:
    graph = build_graph("llama3-8b", ModelOptions(pp=5, batch=2, seq=64))
    assert exchanges(graph)["send"] == (1, 2 * 64 * 4096 * 2)
    assert max(block.repeat for block in graph.blocks) == 7  # of 32 layers, the largest share
    train = build_graph("llama3-8b", ModelOptions(phase="train", pp=4, batch=2, seq=64))
    assert exchanges(train)["send"][0] == 2
    assert any("pipeline" in line for line in graph.assumptions)


def test_replicas_that_serve_exchange_nothing() -> None:
    assert exchanges(build_graph("llama3-8b", ModelOptions(dp=8, seq=64))) == {}


def test_the_head_is_shared_out() -> None:
    graph = build_graph("llama3-8b", ModelOptions(tp=8, seq=64))
    assert 128256 // 8 in {op.n for op, _ in graph.calls() if isinstance(op, Linear)}
