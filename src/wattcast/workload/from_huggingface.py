"""Hugging Face ``config.json`` -> Model. Only numbers are read: no network, no remote code, no weights.

``auto_map`` names Python code inside a repository; it is never run. A field that would change the
operators in a way our template does not know is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wattcast.errors import BadInput, bad_value, clip, unknown_name
from wattcast.files import from_json, read_bytes
from wattcast.workload.models import Model, make

MAX_CONFIG_BYTE = 1 << 20


def read(path: Path) -> Model:
    """A ``config.json`` file; the model is named after its folder."""
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return parse(read_bytes(path, MAX_CONFIG_BYTE), path.name, name)


def parse(data: bytes, where: str, name: str = "") -> Model:
    """JSON text of a configuration -> Model."""
    return model(from_json(data, dict[str, Any], where), where, name)


def model(config: Mapping[str, Any], where: str = "config", name: str = "") -> Model:
    """A configuration as a mapping -> Model."""
    fields = _Fields(config, where)
    kind = fields.text("model_type", "")
    if kind not in READERS:
        raise _unsupported(config, where, kind)
    architecture, dims = READERS[kind](fields)
    notes = ["dimensions from a Hugging Face configuration"]
    if "auto_map" in config:
        notes.append("auto_map (code in the repository) was not run; the standard architecture is assumed")
    if "quantization_config" in config:
        notes.append("quantization_config is not read; choose the number format with dtype")
    title = ", ".join(str(a) for a in fields.get("architectures", []) or [kind])
    return make(name or kind, title, architecture, dims, f"{where} (model_type {kind})", "; ".join(notes))


def _unsupported(config: Mapping[str, Any], where: str, kind: str) -> BadInput:
    named = ", ".join(clip(a) for a in config.get("architectures") or []) or "none"
    remote = " Its auto_map code is never run." if "auto_map" in config else ""
    error = unknown_name(
        f"model_type in {where} (architectures: {named})", kind or "(missing)", READERS,
        f"Known: {', '.join(sorted(READERS))}.{remote} Capture the module with wattcast.workload.from_torch, or "
        "write the operators as workload JSON.",
    )  # fmt: skip
    return BadInput(str(error))


class _Fields:
    """A configuration's fields, each checked as it is read."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def get(self, name: str, default: Any = None) -> Any:
        value = self.config.get(name)
        return default if value is None else value

    def size(self, *names: str, default: int | None = None) -> int:
        """A positive whole number under the first of ``names`` that is there."""
        found = next((name for name in names if self.config.get(name) is not None), None)
        if found is None:
            if default is None:
                raise bad_value(f"{self.where}: {names[0]}", "a whole number", "none")
            return default
        value = self.config[found]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise bad_value(f"{self.where}: {found}", "a whole number above zero", value)
        return value

    def optional(self, name: str) -> int:
        """A positive whole number, or 0 where the field is absent or null."""
        return self.size(name) if self.config.get(name) else 0

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < 1e9:
            raise bad_value(f"{self.where}: {name}", "a number, zero or more", value)
        return float(value)

    def rotary_share(self, default: float) -> float:
        """The part of a head that is rotated; newer files keep it among the rotary parameters."""
        rotary = self.get("rope_parameters", {})
        inside = rotary.get("partial_rotary_factor", default) if isinstance(rotary, dict) else default
        return self.number("partial_rotary_factor", inside)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise bad_value(f"{self.where}: {name}", "true or false", value)
        return value

    def text(self, name: str, default: str) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise bad_value(f"{self.where}: {name}", "text", value)
        return value

    def sizes(self, name: str, default: list[int]) -> list[int]:
        value = self.get(name, default)
        if not isinstance(value, list) or not all(type(v) is int and 0 < v < 1 << 31 for v in value) or not value:
            raise bad_value(f"{self.where}: {name}", "a list of whole numbers above zero", value)
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse a field whose value our template does not know."""
        value = self.config.get(name)
        if value is not None and value not in allowed:
            wanted = " or ".join(repr(a) for a in allowed)
            raise bad_value(f"{self.where}: {name}", f"{wanted} (all the template knows)", value)

    def activation(self, name: str, default: str) -> str:
        value = self.text(name, default)
        if value not in _ACTIVATIONS:
            raise bad_value(f"{self.where}: {name}", f"one of {', '.join(_ACTIVATIONS)}", value)
        return _ACTIVATIONS[value]


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
Read = tuple[str, dict[str, Any]]


def _decoder(f: _Fields, **more: Any) -> Read:
    heads = f.size("num_attention_heads")
    dims = {
        "layers": f.size("num_hidden_layers"),
        "hidden": f.size("hidden_size"),
        "heads": heads,
        "kv_heads": f.size("num_key_value_heads", default=heads),
        "head_dim": (f.get("head_dim") and f.size("head_dim")) or 0,
        "intermediate": f.size("intermediate_size"),
        "vocab": f.size("vocab_size"),
        "activation": f.activation("hidden_act", "silu"),
        "tied": f.flag("tie_word_embeddings"),
        "max_positions": f.size("max_position_embeddings", default=2048),
        "dropout": f.number("attention_dropout", 0.0),
    }
    return "decoder", dims | more


def _llama(f: _Fields) -> Read:
    f.only("mlp_bias", False)
    bias = f.flag("attention_bias")
    return _decoder(f, qkv_bias=bias, out_bias=bias)


def _mistral(f: _Fields) -> Read:
    return _decoder(f, window=f.optional("sliding_window"))


def _mixtral(f: _Fields) -> Read:
    f.only("sliding_window", 0)
    return _decoder(
        f, experts=f.size("num_local_experts", default=8), experts_chosen=f.size("num_experts_per_tok", default=2),
        expert_intermediate=f.size("intermediate_size"),
    )  # fmt: skip


def _qwen2(f: _Fields) -> Read:
    f.only("use_sliding_window", False)
    return _decoder(f, qkv_bias=True)


def _qwen3(f: _Fields) -> Read:
    f.only("use_sliding_window", False)
    f.only("attention_bias", False)
    architecture, dims = _decoder(f, qk_norm=True)
    return architecture, dims | {"head_dim": f.size("head_dim", default=128)}


def _qwen3_moe(f: _Fields) -> Read:
    f.only("decoder_sparse_step", 1)
    f.only("mlp_only_layers", [])
    architecture, dims = _qwen3(f)
    more = {
        "experts": f.size("num_experts", "num_local_experts"),
        "experts_chosen": f.size("num_experts_per_tok"),
        "expert_intermediate": f.size("moe_intermediate_size"),
        "router_wide": False,
        "router_renormalise": f.flag("norm_topk_prob"),
    }
    return architecture, dims | more


def _gemma(f: _Fields) -> Read:
    f.only("attention_bias", False)
    act = f.activation("hidden_activation", f.text("hidden_act", "gelu_pytorch_tanh"))
    act = "gelu_tanh" if act == "gelu" else act  # Hugging Face runs the tanh form for both names
    tied = f.get("tie_word_embeddings", True)
    return _decoder(f, norm="gemma", activation=act, tied=tied, head_dim=f.size("head_dim", default=256))


def _phi(f: _Fields) -> Read:
    f.only("qk_layernorm", False)
    return _decoder(
        f, norm="layer", qkv_bias=True, out_bias=True, head_bias=True, gated=False, parallel=True,
        rotary_share=f.rotary_share(0.5), activation=f.activation("hidden_act", "gelu_new"),
    )  # fmt: skip


def _phi3(f: _Fields) -> Read:
    window = f.optional("sliding_window")
    return _decoder(f, fused_projections=True, window=window, rotary_share=f.rotary_share(1.0))


def _gpt2(f: _Fields) -> Read:
    f.only("add_cross_attention", False)
    f.only("scale_attn_by_inverse_layer_idx", False)
    f.only("reorder_and_upcast_attn", False)
    hidden = f.size("n_embd", "hidden_size", default=768)
    return "gpt", {
        "layers": f.size("n_layer", "num_hidden_layers", default=12),
        "hidden": hidden,
        "heads": f.size("n_head", "num_attention_heads", default=12),
        "intermediate": f.size("n_inner", default=4 * hidden),
        "vocab": f.size("vocab_size", default=50257),
        "max_positions": f.size("n_positions", "max_position_embeddings", default=1024),
        "activation": f.activation("activation_function", "gelu_new"),
        "dropout": f.number("resid_pdrop", 0.1),
    }


def _opt(f: _Fields) -> Read:
    hidden = f.size("hidden_size")
    f.only("word_embed_proj_dim", hidden)
    f.only("do_layer_norm_before", True)
    f.only("enable_bias", True)
    f.only("layer_norm_elementwise_affine", True)
    return "gpt", {
        "layers": f.size("num_hidden_layers"),
        "hidden": hidden,
        "heads": f.size("num_attention_heads"),
        "intermediate": f.size("ffn_dim"),
        "vocab": f.size("vocab_size"),
        "max_positions": f.size("max_position_embeddings", default=2048),
        "style": "opt",
        "activation": f.activation("activation_function", "relu"),
        "dropout": f.number("dropout", 0.1),
    }


def _bert(f: _Fields) -> Read:
    f.only("position_embedding_type", "absolute")
    f.only("is_decoder", False)
    f.only("add_cross_attention", False)
    return "bert", {
        "layers": f.size("num_hidden_layers"),
        "hidden": f.size("hidden_size"),
        "heads": f.size("num_attention_heads"),
        "intermediate": f.size("intermediate_size"),
        "vocab": f.size("vocab_size"),
        "max_positions": f.size("max_position_embeddings", default=512),
        "types": f.size("type_vocab_size", default=2),
        "activation": f.activation("hidden_act", "gelu"),
        "dropout": f.number("hidden_dropout_prob", 0.1),
    }


def _deepseek(f: _Fields) -> Read:
    f.only("attention_bias", False)
    f.only("topk_method", "noaux_tc")
    f.only("moe_layer_freq", 1)
    f.only("rope_interleave", True)
    layers, dense = f.size("num_hidden_layers"), int(f.number("first_k_dense_replace", 0))
    width = f.size("moe_intermediate_size")
    return "latent", {
        "layers": layers,
        "dense_layers": min(dense, layers),
        "hidden": f.size("hidden_size"),
        "heads": f.size("num_attention_heads"),
        "q_rank": f.size("q_lora_rank"),
        "kv_rank": f.size("kv_lora_rank"),
        "plain_dim": f.size("qk_nope_head_dim"),
        "rotary_dim": f.size("qk_rope_head_dim"),
        "value_dim": f.size("v_head_dim"),
        "intermediate": f.size("intermediate_size"),
        "vocab": f.size("vocab_size"),
        "experts": f.size("n_routed_experts"),
        "experts_chosen": f.size("num_experts_per_tok"),
        "expert_intermediate": width,
        "shared_intermediate": width * f.size("n_shared_experts", default=1),
        "groups": f.size("n_group", default=1),
        "groups_chosen": f.size("topk_group", default=1),
        "activation": f.activation("hidden_act", "silu"),
        "max_positions": f.size("max_position_embeddings", default=4096),
    }


def _vit(f: _Fields) -> Read:
    f.only("qkv_bias", True)
    classifier = any("Classification" in str(a) for a in f.get("architectures", []))
    return "vit", {
        "layers": f.size("num_hidden_layers", default=12),
        "hidden": f.size("hidden_size", default=768),
        "heads": f.size("num_attention_heads", default=12),
        "intermediate": f.size("intermediate_size", default=3072),
        "patch": f.size("patch_size", default=16),
        "image": f.size("image_size", default=224),
        "channels": f.size("num_channels", default=3),
        "activation": f.activation("hidden_act", "gelu"),
        "pooler": not classifier,
        "classes": _labels(f) if classifier else 0,
    }


def _labels(f: _Fields) -> int:
    return len(f.get("id2label", {})) or f.size("num_labels", default=2)


def _resnet(f: _Fields) -> Read:
    f.only("layer_type", "bottleneck")
    f.only("downsample_in_first_stage", False)
    f.only("downsample_in_bottleneck", False)
    f.only("hidden_act", "relu")
    return "resnet", {
        "blocks": f.sizes("depths", [3, 4, 6, 3]),
        "widths": f.sizes("hidden_sizes", [256, 512, 1024, 2048]),
        "stem": f.size("embedding_size", default=64),
        "channels": f.size("num_channels", default=3),
        "classes": _labels(f),
    }


def _whisper(f: _Fields) -> Read:
    heads = f.size("encoder_attention_heads")
    f.only("decoder_attention_heads", heads)
    width = f.size("encoder_ffn_dim")
    f.only("decoder_ffn_dim", width)
    return "whisper", {
        "encoder_layers": f.size("encoder_layers"),
        "decoder_layers": f.size("decoder_layers"),
        "hidden": f.size("d_model"),
        "heads": heads,
        "intermediate": width,
        "mel_bins": f.size("num_mel_bins"),
        "vocab": f.size("vocab_size"),
        "frames": f.size("max_source_positions", default=1500),
        "max_positions": f.size("max_target_positions", default=448),
        "activation": f.activation("activation_function", "gelu"),
        "dropout": f.number("dropout", 0.0),
    }


READERS: dict[str, Callable[[_Fields], Read]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "phi": _phi,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "opt": _opt,
    "bert": _bert,
    "deepseek_v3": _deepseek,
    "vit": _vit,
    "resnet": _resnet,
    "whisper": _whisper,
}
