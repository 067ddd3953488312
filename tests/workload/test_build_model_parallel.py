"""Several GPUs: shares of the work, and the exchanges between them."""

from __future__ import annotations

import pytest

from wattcast.core.errors import BadInput
from wattcast.workload import ModelOptions, build_graph
from wattcast.workload.engine_operators import PagedAttention
from wattcast.workload.graph import Graph, compute_totals
from wattcast.workload.models.sparse_layers import busiest_picks
from wattcast.workload.operator_types import Attention, Collective, Linear
from wattcast.workload.program import ADAMW_ALIGNMENT


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
    """Megatron's scheme (Shoeybi et al. 2019, section 3): one exchange after attention, one after
    feed-forward.
    """
    graph = build_graph(name, ModelOptions(tp=4, batch=2, seq=64, stack=stack))
    layers = {"llama3-8b": 32, "opt-1.3b": 24, "mixtral-8x7b": 32, "deepseek-v3": 61}[name]
    hidden = {"llama3-8b": 4096, "opt-1.3b": 2048, "mixtral-8x7b": 4096, "deepseek-v3": 7168}[name]
    found = exchanges(graph)
    assert found["all_reduce"] == (2 * layers + 1, (2 * layers + 1) * 2 * 64 * hidden * 2)
    assert found["all_gather"][0] == 1


def test_gpus_share_the_products_evenly() -> None:
    one, four = (
        build_graph("llama3-8b", ModelOptions(stack="eager", tp=tp, batch=2, seq=64))
        for tp in (1, 4)
    )
    assert compute_totals(four).product_flop == pytest.approx(
        compute_totals(one).product_flop / 4, rel=1e-12
    )
    (attention,) = {op for op, _ in four.calls() if isinstance(op, Attention)}
    assert (attention.heads, attention.kv_heads) == (8, 2)


def test_key_heads_are_repeated_when_gpus_outnumber_them() -> None:
    graph = build_graph("qwen2-1.5b", ModelOptions(stack="eager", tp=4, seq=64))
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


@pytest.mark.parametrize("name", ["whisper-tiny", "whisper-base", "t5-small", "flan-t5-base"])
def test_each_input_of_a_parallel_part_has_one_gradient_exchange(name: str) -> None:
    """Whisper's self-attention once entered the parallel part twice, by its queries and again by
    its keys, and T5's cross-attention never summed the gradients of the encoder's result.

    Megatron sums the gradient of each tensor that enters a column-parallel product: one in
    self-attention and one in feed-forward; cross-attention reads two tensors, so it has two.
    """
    options = ModelOptions(phase="train", stack="eager", tp=2, batch=2, seq=64)
    counts = {}
    for block in build_graph(name, options).blocks:
        summed = [op for op in block.ops if isinstance(op, Collective)]
        counts[block.label] = len([op for op in summed if op.collective == "all_reduce"])
    assert counts["encoder.layers"] == counts["encoder.layers.backward"] == 2
    assert counts["decoder.layers"] == 3  # self-attention, cross-attention, feed-forward
    assert counts["decoder.layers.backward"] == 4


def test_pipeline_stages_hand_on_activations() -> None:
    graph = build_graph("llama3-8b", ModelOptions(stack="eager", pp=5, batch=2, seq=64))
    assert exchanges(graph)["send"] == (1, 2 * 64 * 4096 * 2)
    assert max(block.repeat for block in graph.blocks) == 7  # of 32 layers, the largest share
    train = build_graph("llama3-8b", ModelOptions(phase="train", pp=4, batch=2, seq=64))
    assert exchanges(train)["send"][0] == 2
    assert any("pipeline" in line for line in graph.assumptions)


def test_replicas_that_serve_exchange_nothing() -> None:
    assert exchanges(build_graph("llama3-8b", ModelOptions(stack="eager", dp=8, seq=64))) == {}


def test_tensor_parallel_experts_of_one_replica_need_no_exchange_but_the_sum() -> None:
    plain, spread = (
        exchanges(build_graph("mixtral-8x7b", ModelOptions(tp=4, ep=ep, seq=64, stack="engine")))
        for ep in (1, 4)
    )
    assert plain == spread


def test_replicas_that_share_experts_send_tokens_there_and_back() -> None:
    options = ModelOptions(tp=2, dp=4, ep=8, batch=16, seq=512, phase="decode", stack="engine")
    graph = build_graph("deepseek-v3", options)
    layers, own = 61 - 3, 16 // 2
    reached = 8 * (1 - (1 - 1 / 8) ** 8)  # GPUs that eight choices of a token fall on
    calls, byte = exchanges(graph)["all_to_all"]
    assert calls == 2 * layers
    assert byte == calls * round(own * reached) * 7168 * 2
    (there,) = {op for op, _ in graph.calls() if isinstance(op, Collective) and op.overlaps}
    assert (there.collective, there.gpus) == ("all_to_all", 8)  # hidden behind the shared expert
    assert graph.gpu_count == 8


def test_a_gpu_holds_its_share_of_the_experts() -> None:
    def weights(**options: int) -> float:
        return build_graph(
            "mixtral-8x7b", ModelOptions(seq=64, stack="engine", **options)
        ).memory_byte

    assert weights(tp=4, ep=4) == pytest.approx(weights(tp=4), rel=0.02)
    assert weights(dp=4, ep=4) < 0.4 * weights(dp=4)


def test_the_busiest_of_many_gpus_has_more_than_its_share() -> None:
    def rows(groups: list[tuple[int, int]]) -> int:
        return sum(size * count for size, count in groups)

    mean = 8192 / 16
    assert mean * 1.05 < rows(busiest_picks(8192, 64, 8, 0.0, 16)) < mean * 1.2
    assert rows(busiest_picks(8192, 64, 8, 0.5, 16)) == pytest.approx(
        mean / 2 + 8192 / 2 / 8, rel=0.1
    )
    assert rows(busiest_picks(8192, 64, 8, 1.0, 16)) == 8192 // 8
    assert busiest_picks(1, 64, 1, 0.0, 64) == [(1, 1)]


def test_gpus_that_share_a_sequence_share_its_cache_and_attention() -> None:
    def graph(cp: int, phase: str) -> Graph:
        return build_graph(
            "llama3-70b", ModelOptions(tp=4, cp=cp, batch=2, seq=8192, phase=phase, stack="engine")
        )

    for phase in ("prefill", "decode"):
        one, two = (
            next(op for op, _ in graph(cp, phase).calls() if isinstance(op, PagedAttention))
            for cp in (1, 2)
        )
        assert two.flop == pytest.approx(one.flop / 2, rel=0.01)
        assert {op.stride for op, _ in graph(2, phase).calls() if isinstance(op, Collective)} == {
            1,
            4,
        }
    assert graph(2, "decode").memory_byte < graph(1, "decode").memory_byte
    assert graph(2, "decode").gpu_count == 8


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("llama3-8b", {"ep": 2, "tp": 2}, "without experts"),
        ("mixtral-8x7b", {"ep": 3, "tp": 3}, "divisor of"),
        ("mixtral-8x7b", {"ep": 4, "tp": 2}, "--dp"),
        ("mixtral-8x7b", {"ep": 2, "tp": 2, "phase": "train", "stack": "eager"}, "in training"),
        ("llama3-8b", {"cp": 2, "stack": "eager"}, "--stack engine"),
        ("deepseek-v3", {"cp": 2}, "keys and values of heads"),
        ("llama3-8b", {"cp": 64, "seq": 32}, "at most as many GPUs as tokens"),
        ("resnet50", {"cp": 2}, "language models"),
    ],
)
def test_parallelism_that_cannot_be_is_refused_with_what_to_do(
    model: str, options: dict, words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        build_graph(model, ModelOptions(**{"stack": "engine", **options}))


@pytest.mark.parametrize(
    ("options", "stride"), [({"tp": 4, "pp": 2, "dp": 2}, 4), ({"tp": 8, "pp": 2}, 8)]
)
def test_stages_that_serve_stand_next_to_one_another(options: dict, stride: int) -> None:
    graph = build_graph("llama3-8b", ModelOptions(seq=64, **options))
    (send,) = {
        op for op, _ in graph.calls() if isinstance(op, Collective) and op.collective == "send"
    }
    assert send.stride == stride


def test_the_head_is_shared_out() -> None:
    graph = build_graph("llama3-8b", ModelOptions(stack="eager", tp=8, seq=64))
    assert 128256 // 8 in {op.n for op, _ in graph.calls() if isinstance(op, Linear)}
