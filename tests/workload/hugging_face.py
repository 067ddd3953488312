"""Hugging Face modules with the dimensions of catalogue models, cut to a few layers, on the meta
device.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch (CPU build) is not installed")
if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

DEVICE = torch.device("meta")


def load_transformers() -> Any:
    """Import the library when a test asks for it.

    It takes seconds, which every worker would spend that collects the tests.
    """
    return importlib.import_module("transformers")


def module(name: str, dims: Any, phase: str, attention: str, dtype: Any = torch.bfloat16) -> Any:
    """The module a user of Hugging Face would run for ``phase``."""
    config, kind = _config(name, dims, phase)
    implementation = "sdpa" if attention == "flash" else "eager"
    if "ResNet" not in kind and "MobileViT" not in kind:
        config._attn_implementation = implementation
        for part in ("text_config", "vision_config"):
            if hasattr(config, part):
                getattr(config, part)._attn_implementation = implementation
    with DEVICE:
        built = getattr(load_transformers(), kind)(config).to(dtype)
    built.tie_weights()
    return built.train() if phase == "train" else built.eval()


def inputs(name: str, dims: Any, built: Any, phase: str, batch: int, seq: int) -> dict[str, Any]:
    """What to call the module with."""
    if name.startswith(("vit", "resnet", "mobilevit", "convnext", "dinov2", "siglip-so400m")):
        picture = torch.zeros(batch, 3, dims.image, dims.image, dtype=torch.bfloat16, device=DEVICE)
        return {"pixel_values": picture}
    if name.startswith(("clip", "siglip")):
        picture = torch.zeros(batch, 3, dims.image, dims.image, dtype=torch.bfloat16, device=DEVICE)
        return {"pixel_values": picture, "input_ids": _tokens(batch, dims.text_length)}
    if name.startswith("whisper"):
        return _heard(dims, batch, seq) if phase == "decode" else _sound(dims, batch, seq)
    tokens = _tokens(batch, 1 if phase == "decode" else seq)
    if phase == "train":
        given = {"input_ids": tokens, "labels": tokens}
        return given if name.startswith("bert") else {**given, "use_cache": False}
    if name.startswith("bert"):
        return {"input_ids": tokens}
    given = {"input_ids": tokens, "use_cache": True, "logits_to_keep": 1}
    if phase == "decode":
        given["past_key_values"] = _cache(name, dims, built, batch, seq)
    return given


def _sound(dims: Any, batch: int, seq: int) -> dict[str, Any]:
    sound = torch.zeros(batch, dims.mel_bins, 2 * dims.frames, dtype=torch.bfloat16, device=DEVICE)
    return {"input_features": sound, "decoder_input_ids": _tokens(batch, seq)}


def _heard(dims: Any, batch: int, seq: int) -> dict[str, Any]:
    """One step of the decoder behind a cache; the sound was encoded before."""
    transformers = load_transformers()
    cache = transformers.EncoderDecoderCache(
        transformers.DynamicCache(), transformers.DynamicCache()
    )
    for layer in range(dims.decoder_layers):
        for part, length in (
            (cache.self_attention_cache, seq),
            (cache.cross_attention_cache, dims.frames),
        ):
            shape = (batch, dims.heads, length, dims.hidden // dims.heads)
            part.update(
                *(torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)), layer
            )
        cache.is_updated[layer] = True
    hidden = torch.zeros(batch, dims.frames, dims.hidden, dtype=torch.bfloat16, device=DEVICE)
    encoded = load_transformers().modeling_outputs.BaseModelOutput(last_hidden_state=hidden)
    given = {
        "encoder_outputs": encoded,
        "decoder_input_ids": _tokens(batch, 1),
        "past_key_values": cache,
    }
    return given | {"use_cache": True}


def _tokens(batch: int, length: int) -> Any:
    return torch.zeros(batch, length, dtype=torch.long, device=DEVICE)


def _cache(name: str, dims: Any, built: Any, batch: int, seq: int) -> Any:
    cache = load_transformers().DynamicCache(config=built.config)
    if name.startswith("deepseek"):
        shapes = [(batch, 1, seq, dims.kv_rank), (batch, 1, seq, dims.rotary_dim)]
    else:
        shapes = [
            (
                batch,
                getattr(dims, "kv_heads", dims.heads),
                seq,
                getattr(dims, "dim", dims.hidden // dims.heads),
            )
        ] * 2
    for layer in range(dims.layers):
        cache.update(*(torch.zeros(s, dtype=torch.bfloat16, device=DEVICE) for s in shapes), layer)
    return cache


def _config(name: str, dims: Any, phase: str) -> tuple[Any, str]:
    hf = load_transformers()
    if name.startswith("gpt2"):
        return hf.GPT2Config(
            n_layer=dims.layers, n_embd=dims.hidden, n_head=dims.heads
        ), "GPT2LMHeadModel"
    if name.startswith("opt"):
        config = hf.OPTConfig(
            num_hidden_layers=dims.layers, hidden_size=dims.hidden, ffn_dim=dims.intermediate, vocab_size=dims.vocab,
            num_attention_heads=dims.heads, word_embed_proj_dim=dims.hidden,
        )  # fmt: skip
        return config, "OPTForCausalLM"
    if name.startswith("bert"):
        config = hf.BertConfig(
            num_hidden_layers=dims.layers, hidden_size=dims.hidden, num_attention_heads=dims.heads,
            intermediate_size=dims.intermediate,
        )  # fmt: skip
        return config, "BertForMaskedLM" if phase == "train" else "BertModel"
    if name.startswith("vit"):
        config = hf.ViTConfig(
            num_hidden_layers=dims.layers, hidden_size=dims.hidden, num_attention_heads=dims.heads,
            intermediate_size=dims.intermediate,
        )  # fmt: skip
        return config, "ViTModel"
    if name.startswith("dinov2"):
        config = hf.Dinov2Config(
            num_hidden_layers=dims.layers, hidden_size=dims.hidden, num_attention_heads=dims.heads,
            image_size=dims.image, patch_size=dims.patch,
        )  # fmt: skip
        return config, "Dinov2Model"
    if name.startswith("siglip-so400m"):
        config = hf.SiglipVisionConfig(
            num_hidden_layers=dims.layers, hidden_size=dims.hidden, num_attention_heads=dims.heads,
            intermediate_size=dims.intermediate, image_size=dims.image, patch_size=dims.patch, vision_use_head=False,
        )  # fmt: skip
        return config, "SiglipVisionModel"
    if name.startswith("convnext"):
        config = hf.ConvNextConfig(
            depths=list(dims.depths), hidden_sizes=list(dims.widths), num_labels=dims.classes
        )
        return config, "ConvNextForImageClassification"
    if name.startswith("resnet"):
        return hf.ResNetConfig(
            depths=list(dims.blocks), num_labels=dims.classes
        ), "ResNetForImageClassification"
    if name.startswith("mobilevit"):
        return hf.MobileViTConfig(num_labels=dims.classes), "MobileViTForImageClassification"
    if name.startswith("whisper"):
        config = hf.WhisperConfig(
            encoder_layers=dims.encoder_layers, decoder_layers=dims.decoder_layers, d_model=dims.hidden,
            encoder_attention_heads=dims.heads, decoder_attention_heads=dims.heads, num_mel_bins=dims.mel_bins,
            encoder_ffn_dim=dims.intermediate, decoder_ffn_dim=dims.intermediate, vocab_size=dims.vocab,
        )  # fmt: skip
        return config, "WhisperForConditionalGeneration"
    if name.startswith(("clip", "siglip")):
        return _two_towers(dims)
    if name.startswith("deepseek"):
        return _deepseek(dims), "DeepseekV3ForCausalLM"
    return _decoder(name, dims)


def _two_towers(dims: Any) -> tuple[Any, str]:
    text = {
        "num_hidden_layers": dims.text_layers, "hidden_size": dims.text_hidden,
        "num_attention_heads": dims.text_heads,
        "intermediate_size": dims.text_intermediate, "projection_dim": dims.shared,
    }  # fmt: skip
    vision = {
        "num_hidden_layers": dims.vision_layers, "hidden_size": dims.vision_hidden, "patch_size": dims.patch,
        "num_attention_heads": dims.vision_heads, "intermediate_size": dims.vision_intermediate,
        "projection_dim": dims.shared,
    }  # fmt: skip
    if dims.pooled:
        return load_transformers().SiglipConfig(
            text_config=text, vision_config=vision
        ), "SiglipModel"
    config = load_transformers().CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=dims.shared
    )
    return config, "CLIPModel"


def _deepseek(dims: Any) -> Any:
    return load_transformers().DeepseekV3Config(
        num_hidden_layers=dims.layers, first_k_dense_replace=dims.dense_layers, hidden_size=dims.hidden,
        num_attention_heads=dims.heads, num_key_value_heads=dims.heads, n_routed_experts=dims.experts,
        num_experts_per_tok=dims.experts_chosen, vocab_size=dims.vocab,
    )  # fmt: skip


def _decoder(name: str, dims: Any) -> tuple[Any, str]:
    common = {
        "num_hidden_layers": dims.layers, "hidden_size": dims.hidden, "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads, "intermediate_size": dims.intermediate, "vocab_size": dims.vocab,
        "max_position_embeddings": dims.max_positions, "tie_word_embeddings": dims.tied,
    }  # fmt: skip
    hf = load_transformers()
    if name.startswith("qwen2"):
        return hf.Qwen2Config(**common), "Qwen2ForCausalLM"
    if name == "qwen3-30b-a3b":
        experts = {
            "num_experts": dims.experts, "num_experts_per_tok": dims.experts_chosen, "norm_topk_prob": True,
            "moe_intermediate_size": dims.expert_intermediate,
        }  # fmt: skip
        return hf.Qwen3MoeConfig(**common, **experts, head_dim=dims.dim), "Qwen3MoeForCausalLM"
    if name.startswith("qwen3"):
        return hf.Qwen3Config(**common, head_dim=dims.dim), "Qwen3ForCausalLM"
    if name.startswith("mistral"):
        return hf.MistralConfig(**common, sliding_window=dims.window), "MistralForCausalLM"
    if name.startswith("mixtral"):
        return hf.MixtralConfig(**common, num_local_experts=dims.experts), "MixtralForCausalLM"
    if name.startswith("gemma"):
        return hf.GemmaConfig(**common, head_dim=dims.dim), "GemmaForCausalLM"
    if name == "phi-2":
        return hf.PhiConfig(**common, partial_rotary_factor=dims.rotary_share), "PhiForCausalLM"
    if name.startswith("phi-3"):
        return hf.Phi3Config(**common, sliding_window=dims.window), "Phi3ForCausalLM"
    return hf.LlamaConfig(**common), "LlamaForCausalLM"
