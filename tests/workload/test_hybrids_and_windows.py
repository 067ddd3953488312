"""T5, LFM2, Jamba, Swin and Segment Anything run the operators of transformers' classes, and FLOPs
by hand.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from comparing import moved_byte, split

import wattcast
from wattcast.core import Dtype
from wattcast.core.errors import BadInput
from wattcast.workload import ModelOptions, build_graph
from wattcast.workload.build_model import compute_footprint, count_parameters
from wattcast.workload.graph import Graph, compute_totals
from wattcast.workload.model_catalogue import load_model
from wattcast.workload.operator_types import Attention, Bmm, Conv2d
from wattcast.workload.readers.from_huggingface import convert_config
from wattcast.workload.scan_operators import CausalConv, StateScan

TINY: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": {"num_layers": 2, "d_model": 256, "num_heads": 4, "d_ff": 512, "vocab_size": 1000},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 768},
    "JambaForCausalLM": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
        "num_experts": 4,
    },
    "MambaForCausalLM": {"tie_word_embeddings": True},
    "SwinForImageClassification": {"image_size": 224, "depths": [2, 3], "embed_dim": 64, "num_heads": [2, 4]},
    "SamModel": {
        "vision_config": {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 256, "mlp_dim": 128,
            "num_pos_feats": 32, "window_size": 7, "global_attn_indexes": [1], "output_channels": 64,
        },
        "prompt_encoder_config": {"hidden_size": 64, "image_size": 256, "image_embedding_size": 16},
        "mask_decoder_config": {"hidden_size": 64, "mlp_dim": 128, "iou_head_hidden_dim": 64},
    },
}  # fmt: skip
TINY["T5EncoderModel"] = {**TINY["T5ForConditionalGeneration"], "feed_forward_proj": "gated-gelu"}
_SIZES = {
    "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 512,
}  # fmt: skip


def _compare(
    name: str, attention: str, given: dict[str, Any], options: ModelOptions
) -> tuple[Graph, Graph]:
    """Return the capture of a tiny class and the graph of its template, both of as many weights."""
    hugging_face = pytest.importorskip("hugging_face", reason="PyTorch and transformers are needed")
    torch, transformers = hugging_face.torch, hugging_face.load_transformers()
    from wattcast.workload.readers.from_torch import capture

    kind = getattr(transformers, name)
    sizes = _SIZES if "CausalLM" in name else {}
    config = kind.config_class(**{**sizes, **TINY[name]})
    parts = [
        getattr(config, key) for key in ("vision_config", "mask_decoder_config") if "Sam" in name
    ]
    for part in (config, *parts):
        part._attn_implementation = (
            "sdpa" if attention == "flash" and "Mamba" not in name else "eager"
        )
    with torch.device("meta"):
        module = kind(config).to(torch.bfloat16).eval()
        inputs = {key: torch.zeros(shape, dtype=torch.bfloat16 if len(shape) > 2 else torch.long)
                  for key, shape in given.items()}  # fmt: skip
    module.tie_weights()
    model = convert_config({**config.to_dict(), "architectures": [name]}, "config.json")
    weights = sum({id(weight): weight.numel() for weight in module.parameters()}.values())
    assert count_parameters(model) == weights
    found = capture(module, inputs)
    assert not [line for line in found.assumptions if "has no rule" in line]
    return found, build_graph(model, options)


@pytest.mark.parametrize("attention", ["flash", "eager"])
@pytest.mark.parametrize(
    "name", ["T5ForConditionalGeneration", "T5EncoderModel", "SwinForImageClassification"]
)
def test_all_operators_are_those_of_the_class(name: str, attention: str) -> None:
    """Small operators as well: the buckets of distances, the shifted windows and their masks."""
    if name.startswith("Swin"):
        given, options = (
            {"pixel_values": (2, 3, 224, 224)},
            ModelOptions(batch=2, attention=attention, stack="eager"),
        )
    else:
        answer = {"decoder_input_ids": (2, 1)} if "Generation" in name else {}
        given = {"input_ids": (2, 96), **answer}
        options = ModelOptions(batch=2, seq=96, attention=attention, stack="eager")
    captured, built = _compare(name, attention, given, options)
    assert split(built) == split(captured)


@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_segment_anything_runs_the_operators_of_the_class(attention: str) -> None:
    """Of 160 small operators, those over single points differ in shape."""
    given = {"pixel_values": (2, 3, 256, 256), "input_points": (2, 1, 1, 2)}
    options = ModelOptions(batch=2, attention=attention, stack="eager")
    captured, built = _compare("SamModel", attention, given, options)
    (large, small), (ours, our_small) = split(captured), split(built)
    assert ours == large
    assert sum(our_small.values()) == pytest.approx(sum(small.values()), rel=0.01)
    assert moved_byte(our_small) == pytest.approx(moved_byte(small), rel=1e-3)


@pytest.mark.parametrize("name", ["JambaForCausalLM", "Lfm2ForCausalLM", "MambaForCausalLM"])
def test_around_scans_and_convolutions_operators_are_those_of_the_class(name: str) -> None:
    """Without its libraries, transformers scans token by token; all products around that are equal."""
    options = ModelOptions(stack="eager", batch=2, seq=16, head="all")
    captured, built = _compare(name, "flash", {"input_ids": (2, 16)}, options)

    def products(graph: Graph) -> Counter[Any]:
        scans = CausalConv, StateScan, Conv2d
        large, _ = split(graph)
        return Counter(
            {
                op: n
                for op, n in large.items()
                if not isinstance(op, scans) and getattr(op, "n", 2) > 1
            }
        )

    assert products(built) == products(captured)
    scan = [op for op, _ in built.calls() if isinstance(op, (StateScan, CausalConv))]
    assert len(scan) == {"Jamba": 2, "Lfm2": 1, "Mamba": 2}[name.removesuffix("ForCausalLM")]


@pytest.mark.parametrize(("name", "layers", "hidden", "inner", "width"), [
    ("t5-base", 12, 768, 768, 2 * 3072), ("flan-t5-xl", 24, 2048, 2048, 3 * 5120),
])  # fmt: skip
def test_flops_of_t5_by_hand(name: str, layers: int, hidden: int, inner: int, width: int) -> None:
    """Encoder over s tokens; a decoder's token attends to itself and to keys and values of the
    source.
    """
    s, vocab = 512, 32128
    graph = build_graph(name, ModelOptions(seq=s, stack="eager"))
    encoder = s * (8.0 * hidden * inner + 2.0 * hidden * width) + 4.0 * s * s * inner
    decoder = (
        8.0 * hidden * inner + 4.0 * inner + (4.0 + 4.0 * s) * hidden * inner + 4.0 * s * inner
    )
    decoder += 2.0 * hidden * width
    wanted = layers * (encoder + decoder) + 2.0 * hidden * vocab
    assert compute_totals(graph).product_flop == pytest.approx(wanted, rel=1e-9)


def test_an_answer_of_t5_grows_while_its_source_stays() -> None:
    """Step n of an answer has n keys of its own, and as many of the source as there are tokens in
    it.
    """
    options = ModelOptions(phase="generate", seq=256, tokens=4, stack="eager")
    seen = Counter({(op.q_len, op.kv_len): n for op, n in build_graph("t5-small", options).calls()
                    if isinstance(op, Attention)})  # fmt: skip
    assert set(seen) == {(256, 256), (1, 1), (1, 2), (1, 3), (1, 4), (1, 256)}
    cache = compute_footprint("t5-small", options).cache_byte
    assert cache == 6 * 2 * 2 * 512 * (256 + 4)  # layers, keys and values, bytes, width, tokens
    step = wattcast.predict("t5-small", "h200", phase="decode", seq=256)
    assert any("encoder reads 256 tokens" in line for line in step.assumptions)


@pytest.mark.parametrize(("name", "hidden", "depths", "giga"), [
    ("swin-tiny", 96, (2, 2, 6, 2), 4.5), ("swin-base", 128, (2, 2, 18, 2), 15.4),
])  # fmt: skip
def test_flops_of_swin_by_hand(
    name: str, hidden: int, depths: tuple[int, ...], giga: float
) -> None:
    """4hwC² + 2M²hwC for attention [Liu2021, equation 2], 8hwC² for the rest of a layer, in
    multiply-adds.
    """
    tokens, total = 56 * 56, 56.0 * 56 * 48 * hidden
    for number, depth in enumerate(depths):
        width = hidden * 2**number
        if number:
            tokens //= 4
            total += tokens * 2.0 * width * width
        total += depth * tokens * (12.0 * width**2 + 2.0 * 49 * width)
    total += 8 * hidden * 1000
    graph = build_graph(name, ModelOptions())
    assert compute_totals(graph).product_flop == pytest.approx(2.0 * total, rel=1e-9)
    assert total / 1e9 == pytest.approx(giga, rel=0.03)  # as published


@pytest.mark.parametrize(("name", "layers", "hidden", "heads"), [
    ("sam-vit-base", 12, 768, 12), ("sam-vit-huge", 32, 1280, 16),
])  # fmt: skip
def test_flops_of_segment_anything_by_hand(name: str, layers: int, hidden: int, heads: int) -> None:
    """The encoder's 4,096 patches, padded to 70 by 70 in windows of 14; biases of rows and columns;
    the neck.
    """
    graph = build_graph(name, ModelOptions())
    patches, padded = 64 * 64, 70 * 70
    near = padded * 8.0 * hidden**2 + 4.0 * padded * 196 * hidden + 4.0 * padded * 14 * hidden
    far = patches * 8.0 * hidden**2 + 4.0 * patches**2 * hidden + 4.0 * patches * 64 * hidden
    wanted = (layers - 4) * near + 4 * far + layers * patches * 16.0 * hidden**2
    wanted += 2.0 * patches * (768 * hidden + 256 * hidden + 9 * 256**2)
    found = sum(n * op.flop for block in graph.blocks if not block.label.startswith(("masks", "positions"))
                for op in block.ops for n in [block.repeat] if isinstance(op, (Attention, Bmm, Conv2d))
                or type(op).__name__ == "Linear")  # fmt: skip
    assert found == pytest.approx(wanted, rel=1e-9)
    with pytest.raises(BadInput, match="gradients of Segment Anything"):
        wattcast.predict(name, "h200", phase="train")


def test_encoders_of_pictures_are_read_as_the_catalogue_has_them() -> None:
    sizes = {
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "image_size": 518,
    }
    dinov2 = convert_config(
        {"model_type": "dinov2", **sizes, "mlp_ratio": 4, "patch_size": 14}, "config.json"
    )
    assert dinov2.dims == load_model("dinov2-large").dims
    convnext = {
        "model_type": "convnext",
        "depths": [3, 3, 27, 3],
        "hidden_sizes": [128, 256, 512, 1024],
    }
    assert (
        convert_config({**convnext, "num_labels": 1000}, "config.json").dims
        == load_model("convnext-base").dims
    )
    siglip = {
        "model_type": "siglip_vision_model", "num_hidden_layers": 27, "hidden_size": 1152, "num_attention_heads": 16,
        "intermediate_size": 4304, "patch_size": 14, "image_size": 384,
    }  # fmt: skip
    assert convert_config(siglip, "config.json").dims == load_model("siglip-so400m").dims
    assert (
        convert_config({"model_type": "clip"}, "config.json").dims == load_model("clip-base").dims
    )  # defaults
    seen = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 14,
    }
    seen["intermediate_size"] = 4096
    said = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    clip = {"model_type": "clip", "projection_dim": 768, "vision_config": seen, "text_config": said}
    assert convert_config(clip, "config.json").dims == load_model("clip-large").dims
    with pytest.raises(BadInput, match=r"vision_config.patch_size: expected a whole number"):
        convert_config(clip | {"vision_config": {"patch_size": 0}}, "config.json")
    with pytest.raises(BadInput, match="text_config: expected an object"):
        convert_config(clip | {"text_config": 5}, "config.json")
    towers = {"model_type": "siglip"}
    assert convert_config(towers, "config.json").dims == load_model("siglip-base").dims
    both = {"vision_config": {"hidden_size": 768}, "text_config": {"projection_size": 512}}
    with pytest.raises(BadInput, match="projection_size: expected 768"):
        convert_config(towers | both, "config.json")
    with pytest.raises(BadInput, match="gradients of SigLIP"):
        wattcast.predict("siglip-base", "h200", phase="train")


@pytest.mark.parametrize(("layers", "hidden", "image"), [(12, 768, 224), (4, 384, 96)])
def test_work_of_siglip_by_hand(layers: int, hidden: int, image: int) -> None:
    """A token of a layer takes 8h² + 4hw of products and 4nh of attention; a probe pools the n
    patches.
    """
    tower = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    model = convert_config(
        {
            "model_type": "siglip",
            "vision_config": tower | {"image_size": image},
            "text_config": tower,
        },
        "config.json",
    )
    graph = build_graph(model, ModelOptions(stack="eager", batch=2))
    patches, width = (image // 16) ** 2, 4 * hidden
    a_layer = [
        n * (8.0 * hidden**2 + 4.0 * hidden * width) + 4.0 * n**2 * hidden for n in (patches, 64)
    ]
    pooling = (
        4.0 * hidden**2 + patches * 4.0 * hidden**2 + 4.0 * patches * hidden + 4.0 * hidden * width
    )
    wanted = (
        layers * sum(a_layer)
        + pooling
        + patches * 2.0 * 3 * 16**2 * hidden
        + 2.0 * hidden**2
        + 2.0 * 2 * hidden
    )
    assert compute_totals(graph).product_flop == pytest.approx(2 * wanted, rel=1e-9)


@pytest.mark.parametrize(("layers", "hidden", "width"), [(16, 2048, 8192), (4, 1024, 4608)])
def test_work_of_lfm2_by_hand(layers: int, hidden: int, width: int) -> None:
    """Convolving layers have 8h² of products a token, attending ones 4h² + 2hk; every one 6hw."""
    config = {
        "model_type": "lfm2", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": 32,
        "num_key_value_heads": 8, "block_ff_dim": 3 * width // 2, "vocab_size": 65536, "full_attn_idxs": [1],
    }  # fmt: skip
    model = convert_config(config, "config.json")
    graph = build_graph(model, ModelOptions(stack="engine", phase="decode", seq=512, batch=4))
    keys = hidden // 4
    products = (
        (layers - 1) * 8.0 * hidden**2
        + 4.0 * hidden**2
        + 4.0 * hidden * keys
        + layers * 6.0 * hidden * width
    )
    wanted = 4 * (products + 2.0 * hidden * 65536 + 4.0 * 513 * hidden)
    assert compute_totals(graph).product_flop == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("layers", "hidden"), [(8, 4096), (16, 2048)])
def test_work_of_jamba_by_hand(layers: int, hidden: int) -> None:
    """A scan costs 7N a channel and token; of eight layers one attends, and every second is a
    mixture.
    """
    config = {
        "model_type": "jamba", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 2 * hidden, "vocab_size": 65536, "mamba_dt_rank": "auto",
    }  # fmt: skip
    model = convert_config(config, "config.json")
    graph = build_graph(model, ModelOptions(stack="engine", phase="decode", seq=512, batch=1))
    ((scan, _), *_) = found = [(op, n) for op, n in graph.calls() if isinstance(op, StateScan)]
    assert sum(n for _, n in found) == layers - layers // 8
    assert scan.flop == 2 * hidden * 7 * 16
    assert scan.read_byte == 2 * (
        3 * 2 * hidden + 2 * 16 + 2 * hidden * 16
    )  # x, step, gate; B, C; the state
    state = 2 * (2 * hidden * 16 + 2 * hidden * 4)
    cache = compute_footprint(model, ModelOptions(phase="decode", seq=512)).cache_byte
    assert cache == (layers - layers // 8) * state + layers // 8 * 513 * 2 * 2 * hidden // 4


_SCANNERS = ("mamba-codestral-7b", "nemotron-h-8b", "granite-4.0-h-small", "qwen3-next-80b-a3b")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", _SCANNERS)
def test_only_products_are_in_fp8(name: str, phase: str) -> None:
    """The norm after a scan once took the format of the layer's quantized input, and so did the
    state that is kept: both are activations. vLLM's mixers write the norm in bf16 and quantize it
    by a kernel of its own before the product that follows.
    """
    shared = {"phase": phase, "batch": 2, "seq": 64, "stack": "engine"}
    wide = build_graph(name, ModelOptions(**shared, dtype="bf16"))
    narrow = build_graph(name, ModelOptions(**shared, dtype="fp8"))
    in_fp8 = {op.name for op, _ in narrow.calls() if op.dtype is Dtype.FP8}
    assert in_fp8 <= {"engine_scaled_mm", "engine_experts"}
    norms = [
        [(op.name, op.rows, op.dim) for op, _ in graph.calls() if op.name == "rmsnorm"]
        for graph in (wide, narrow)
    ]
    assert norms[0] == norms[1] != []
    for block in narrow.blocks:
        names = [op.name for op in block.ops]
        if "state_scan" in names:
            after_scan = names[names.index("state_scan") + 1 :]
            assert after_scan[:3] == ["rmsnorm", "engine_quantize", "engine_scaled_mm"]


def test_a_state_is_kept_in_the_format_of_activations() -> None:
    """Fp8 weights leave the cache of a Mamba model as it is."""
    cache_byte = {
        dtype: compute_footprint(
            "jamba-v0.1",
            ModelOptions(phase="decode", batch=64, seq=1, dtype=dtype, stack="engine"),
        ).cache_byte
        for dtype in ("bf16", "fp8")
    }
    assert cache_byte["fp8"] == cache_byte["bf16"]
