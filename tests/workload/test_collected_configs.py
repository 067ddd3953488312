"""Fifty configurations of the hub are predicted or refused, and templates equal captures of
transformers' classes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from comparing import moved_byte, split
from huggingface_configs import ENCODERS, REFUSED, TAKEN, CollectedConfig

import wattcast
from wattcast.core.errors import BadInput
from wattcast.workload import ModelOptions, build_graph
from wattcast.workload.build_model import compute_footprint, count_parameters
from wattcast.workload.engine_operators import PagedAttention
from wattcast.workload.graph import compute_totals
from wattcast.workload.readers.from_huggingface import convert_config
from wattcast.workload.scan_operators import StateScan


def test_fifty_were_collected() -> None:
    assert len(TAKEN) + len(ENCODERS) == 49
    assert len(REFUSED) == 1


@pytest.mark.parametrize("collected", TAKEN, ids=lambda item: item.id)
def test_a_collected_configuration_is_predicted(collected: CollectedConfig, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(collected.config))
    for phase in ("prefill", "decode"):
        found = wattcast.predict(path, "h200", phase=phase, seq=1024, batch=1, force=True)
        assert 1e-4 < float(found.latency_s) < 10.0
        assert 70.0 < float(found.power_w) <= 700.0
    model = convert_config(collected.config, "config.json")
    if collected.published:
        assert count_parameters(model) / 1e9 == pytest.approx(collected.published, rel=0.03)


@pytest.mark.parametrize(("collected", "says"), REFUSED, ids=lambda item: getattr(item, "id", ""))
def test_the_others_are_refused_with_the_reason(collected: CollectedConfig, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        convert_config(collected.config, "config.json")


_WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
_MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
# transformers' classes of two layers: what is changed of the tiny sizes, and the share that small
# operators differ by
CLASSES: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {},
    "cohere2": {"head_dim": 64, **_WINDOWS},
    "ernie4_5": {"head_dim": 64},
    "exaone4": _WINDOWS,
    "gemma2": {"head_dim": 64, "sliding_window": 64},
    "gemma3_text": {"head_dim": 64, **_WINDOWS},
    "glm": {"head_dim": 64, "pad_token_id": 0},
    "glm4": {"head_dim": 64, "pad_token_id": 0},
    "glm4_moe": {"head_dim": 64, "n_routed_experts": 8, **_MIXTURE},
    "gpt_neox": {"num_key_value_heads": 4},
    "granite": {},
    "hunyuan_v1_dense": {"head_dim": 64},
    "nemotron": {"head_dim": 64},
    "olmo2": {},
    "olmo3": _WINDOWS,
    "olmoe": {"num_experts": 8},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 256, **_MIXTURE},
    "seed_oss": {"head_dim": 64},
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": 0},
    "stablelm": {},
    "starcoder2": {},
}
# Small operators of these are written another way there (interleaved rotary halves, norms in fp32,
# gates in place): their bytes differ by up to this share.
LOOSE = {
    "cohere": 0.25,
    "cohere2": 0.25,
    "ernie4_5": 0.3,
    "glm": 0.3,
    "glm4": 0.3,
    "olmo2": 0.2,
    "olmo3": 0.2,
}
EAGER_ALONE = (
    "gemma2",
)  # PyTorch's fused attention does not bend scores, so the class runs without it
LOOSE |= {"gpt_neox": 0.2, "nemotron": 0.1, "qwen2_moe": 0.1}


def _build_tiny(kind: str, attention: str) -> tuple[Any, Any]:
    hugging_face = pytest.importorskip("hugging_face", reason="PyTorch and transformers are needed")
    torch, transformers = hugging_face.torch, hugging_face.load_transformers()
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 512,
    }  # fmt: skip
    config = transformers.CONFIG_MAPPING[kind](**{**sizes, **CLASSES[kind]})
    config._attn_implementation = "sdpa" if attention == "flash" else "eager"
    name = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    with torch.device("meta"):
        module = getattr(transformers, name)(config).to(torch.bfloat16).eval()
    module.tie_weights()
    return config, module


def list_classes() -> list[Any]:
    """Return each class with the one and the other attention; by day every class has one of
    them.
    """
    cases = []
    for place, kind in enumerate(CLASSES):
        attentions = ("eager",) if kind in EAGER_ALONE else ("flash", "eager")
        by_day = attentions[place % len(attentions)]
        for attention in attentions:
            marks = () if attention == by_day else pytest.mark.slow
            cases.append(pytest.param(kind, attention, marks=marks))
    return cases


@pytest.mark.parametrize(("kind", "attention"), list_classes())
def test_the_template_runs_the_operators_of_transformers_class(kind: str, attention: str) -> None:
    config, module = _build_tiny(kind, attention)
    torch = pytest.importorskip("torch", reason="PyTorch (CPU build) is not installed")
    from wattcast.workload.readers.from_torch import capture

    tokens = torch.zeros(2, 128, dtype=torch.long, device="meta")
    found = capture(module, {"input_ids": tokens, "use_cache": True, "logits_to_keep": 1})
    model = convert_config(config.to_dict(), "config.json")
    weights = sum({id(weight): weight.numel() for weight in module.parameters()}.values())
    assert count_parameters(model) == pytest.approx(
        weights, abs=64
    )  # but for a router's bias, which is a buffer
    graph = build_graph(model, ModelOptions(stack="eager", batch=2, seq=128, attention=attention))
    (large, small), (ours, our_small) = split(found), split(graph)
    assert ours == large, f"only PyTorch: {large - ours}; only ours: {ours - large}"
    assert moved_byte(our_small) == pytest.approx(moved_byte(small), rel=LOOSE.get(kind, 0.02))


@pytest.mark.parametrize("attention", ["flash", "eager"])
@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta"])
def test_encoders_that_count_their_positions_run_the_operators_of_the_class(
    kind: str, attention: str
) -> None:
    hugging_face = pytest.importorskip("hugging_face", reason="PyTorch and transformers are needed")
    torch, transformers = hugging_face.torch, hugging_face.load_transformers()
    from wattcast.workload.readers.from_torch import capture

    config = transformers.CONFIG_MAPPING[kind](
        num_hidden_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        intermediate_size=512,
        type_vocab_size=1,
    )
    config._attn_implementation = "sdpa" if attention == "flash" else "eager"
    with torch.device("meta"):
        module = transformers.MODEL_MAPPING[type(config)](config).to(torch.bfloat16).eval()
    tokens = torch.zeros(2, 128, dtype=torch.long, device="meta")
    found = capture(module, {"input_ids": tokens})
    model = convert_config(config.to_dict(), "config.json")
    assert count_parameters(model) == sum(weight.numel() for weight in module.parameters())
    graph = build_graph(model, ModelOptions(stack="eager", batch=2, seq=128, attention=attention))
    (large, small), (ours, our_small) = split(found), split(graph)
    assert ours == large
    assert sum(our_small.values()) == pytest.approx(sum(small.values()), rel=0.05)
    assert moved_byte(our_small) == pytest.approx(moved_byte(small), rel=0.02)


@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_modernbert_runs_the_operators_of_the_class(attention: str) -> None:
    hugging_face = pytest.importorskip("hugging_face", reason="PyTorch and transformers are needed")
    torch, transformers = hugging_face.torch, hugging_face.load_transformers()
    from wattcast.workload.readers.from_torch import capture

    config = transformers.CONFIG_MAPPING["modernbert"](
        num_hidden_layers=4, hidden_size=256, num_attention_heads=4, intermediate_size=384, vocab_size=1000,
        local_attention=64, pad_token_id=0,
    )  # fmt: skip
    config._attn_implementation = "sdpa" if attention == "flash" else "eager"
    with torch.device("meta"):
        module = transformers.MODEL_MAPPING[type(config)](config).to(torch.bfloat16).eval()
    found = capture(module, {"input_ids": torch.zeros(2, 128, dtype=torch.long, device="meta")})
    model = convert_config(config.to_dict(), "config.json")
    assert count_parameters(model) == sum(weight.numel() for weight in module.parameters())
    graph = build_graph(model, ModelOptions(stack="eager", batch=2, seq=128, attention=attention))
    assert split(graph) == split(found)  # small operators as well


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "width", "billion"),
    [(22, 768, 12, 1152, 0.149), (28, 1024, 16, 2624, 0.395)],
)
def test_flops_of_modernbert_by_hand(
    layers: int, hidden: int, heads: int, width: int, billion: float
) -> None:
    """Base and large over 1,024 tokens: four products and attention a layer, of which a window
    skips nothing.
    """
    (collected,) = ENCODERS
    sizes = {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": width
    }  # fmt: skip
    model = convert_config(collected.config | sizes, "config.json")
    graph = build_graph(model, ModelOptions(phase="forward", seq=1024))
    wanted = layers * (1024 * (8.0 * hidden**2 + 6.0 * hidden * width) + 4.0 * 1024**2 * hidden)
    assert compute_totals(graph).product_flop == pytest.approx(wanted, rel=1e-9)
    assert count_parameters(model) / 1e9 == pytest.approx(billion, rel=0.03)
    found = wattcast.predict(graph, "h200")
    assert 1e-4 < float(found.latency_s) < 1.0


@pytest.mark.parametrize("kinds", [["full_attention"], ["sliding_attention", "full_attention"]])
def test_modernbert_of_other_layers_is_refused(kinds: list[str]) -> None:
    with pytest.raises(BadInput, match="layer_types"):
        convert_config(
            ENCODERS[0].config | {"num_hidden_layers": 2, "layer_types": kinds}, "config.json"
        )


def _layer_flop(hidden: int, heads: int, kv_heads: int, dim: int, width: int) -> float:
    """Products of one token in one layer with a gated feed-forward part."""
    return 2.0 * hidden * dim * (2 * heads + 2 * kv_heads) + 6.0 * hidden * width


@pytest.mark.parametrize(
    ("id", "layers", "sizes", "vocab", "full", "window"),
    [
        ("google/gemma-2-2b", 26, (2304, 8, 4, 256, 9216), 256000, 13, 4096),
        ("google/gemma-2-9b", 42, (3584, 16, 8, 256, 14336), 256000, 21, 4096),
        ("google/gemma-3-4b-it", 34, (2560, 8, 4, 256, 10240), 262208, 5, 1024),
        ("google/gemma-3-12b-it", 48, (3840, 16, 8, 256, 15360), 262208, 8, 1024),
    ],
)
def test_flops_and_cache_of_windows_by_hand(
    id: str, layers: int, sizes: tuple[int, int, int, int, int], vocab: int, full: int, window: int
) -> None:
    """A decode step at 8,192 tokens: layers with a window see that many keys, and their cache holds
    no more.
    """
    (collected,) = [item for item in TAKEN if item.id == id]
    model = convert_config(collected.config, "config.json")
    options = ModelOptions(stack="engine", phase="decode", seq=8191, batch=1)
    hidden, heads, kv_heads, dim, _ = sizes
    seen = full * 8192 + (layers - full) * window
    wanted = layers * _layer_flop(*sizes) + 2.0 * hidden * vocab + 4.0 * heads * dim * seen
    graph = build_graph(model, options)
    assert compute_totals(graph).product_flop == pytest.approx(wanted, rel=1e-9)
    assert {op.window for op, _ in graph.calls() if isinstance(op, PagedAttention)} == {0, window}
    assert compute_footprint(model, options).cache_byte == 2 * 2 * seen * kv_heads * dim


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(64, 4096, 128), (24, 2048, 64)])
def test_work_of_state_space_scans_by_hand(layers: int, hidden: int, heads: int) -> None:
    """Mamba-2 of two sizes: products 2·d·(2i + 2gN + h) + 2·i·d a token; 6·N·P a head and token in
    decode.
    """
    config = {
        "model_type": "mamba2", "num_heads": heads, "head_dim": 64, "vocab_size": 32768, "hidden_size": hidden,
        "state_size": 128, "num_hidden_layers": layers, "n_groups": 8, "expand": 2,
    }  # fmt: skip
    model = convert_config(config, "config.json")
    inner = heads * 64
    products = (
        layers * (2.0 * hidden * (2 * inner + 2 * 8 * 128 + heads) + 2.0 * inner * hidden)
        + 2.0 * hidden * 32768
    )
    options = ModelOptions(stack="engine", phase="decode", seq=512, batch=4)
    graph = build_graph(model, options)
    assert compute_totals(graph).product_flop == pytest.approx(4 * products, rel=1e-9)
    ((scan, calls),) = [(op, calls) for op, calls in graph.calls() if isinstance(op, StateScan)]
    assert (calls, scan.flop) == (layers, 4 * heads * 6 * 128 * 64)
    state = 4 * 2 * (heads * 128 * 64 + 4 * (inner + 2 * 8 * 128))
    assert compute_footprint(model, options).cache_byte == layers * state  # whatever the length
    longer = ModelOptions(stack="engine", phase="decode", seq=4096, batch=4)
    assert compute_footprint(model, longer).cache_byte == layers * state


def test_a_scan_says_that_it_was_never_measured(tmp_path: Path) -> None:
    (collected,) = [item for item in TAKEN if item.id.startswith("mistralai/Mamba")]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**collected.config, "time_step_limit": [0.0, float("inf")]}))
    found = wattcast.predict(path, "h200", phase="prefill", seq=2048)
    assert not found.support.inside
    assert "scan" in found.support.reason
    assert any("never measured" in line for line in found.assumptions)
    assert found.interval.latency_s[0] < found.latency_s < found.interval.latency_s[1]
    with pytest.raises(BadInput, match="gradients of sequence scans"):
        wattcast.predict(path, "h200", phase="train", seq=64)


def test_the_language_part_is_read_by_its_own_type() -> None:
    """InternVL wraps Qwen2 or Qwen3; a part that nobody knows is refused by its name."""
    (qwen3,) = [item.config for item in TAKEN if item.id == "Qwen/Qwen3-8B"]
    model = convert_config({"model_type": "internvl", "text_config": qwen3}, "config.json")
    assert (model.dims.qk_norm, model.dims.qkv_bias) == (True, False)
    with pytest.raises(BadInput, match="mistral4"):
        convert_config(
            {"model_type": "mistral3", "text_config": {**qwen3, "model_type": "mistral4"}},
            "config.json",
        )


def test_chunked_attention_reads_one_chunk() -> None:
    """Llama 4's layers with rotary attend inside pieces of 8,192 tokens; a prompt of 20,000 has two
    and a part.
    """
    (collected,) = [item for item in TAKEN if "Scout" in item.id]
    model = convert_config(collected.config, "config.json")
    graph = build_graph(model, ModelOptions(stack="engine", seq=20000, batch=1))
    found = {op.groups: calls for op, calls in graph.calls() if isinstance(op, PagedAttention)}
    assert found == {((2, 8192, 8192), (1, 3616, 3616)): 36, ((1, 20000, 20000),): 12}
