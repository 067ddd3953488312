"""Hugging Face ``config.json`` -> ModelSpec. Only numbers are read: no network, no remote code, no weights.

``auto_map`` names Python code inside a repository; it is never run. A field that would change the operators in a way
our template does not know is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from wattcast.core.errors import BadInput, bad_value, clip_text, unknown_name
from wattcast.core.strict_files import decode_json
from wattcast.workload.model_catalogue import ModelSpec, make_model
from wattcast.workload.model_options import SIZE_LIMIT

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


def name_model(path: Path) -> str:
    """Return the name of the model a configuration file describes: its folder's, or the file's own.

    The Hugging Face cache keeps it in ``models--ORGANISATION--NAME/snapshots/COMMIT/config.json``.
    """
    if path.parent.parent.name == "snapshots":
        return path.parents[2].name.split("--")[-1]
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def parse_huggingface(data: bytes, where: str, name: str = "") -> ModelSpec:
    """Parse the JSON text of a configuration."""
    return convert_config(decode_json(data, dict[str, Any], where), where, name)


def convert_config(config: Mapping[str, Any], where: str = "config", name: str = "") -> ModelSpec:
    """Convert a configuration that was read already."""
    fields = _Fields(config, where)
    kind = fields.text("model_type", "")
    if kind not in CONFIG_READERS:
        named = ", ".join(clip_text(a) for a in config.get("architectures") or []) or "none"
        remote = " Its auto_map code is never run." if "auto_map" in config else ""
        error = unknown_name(
            f"model_type in {where} (architectures: {named})", kind or "(missing)", CONFIG_READERS,
            f"Known: {', '.join(sorted(CONFIG_READERS))}.{remote} Capture the module with "
            "wattcast.workload.readers.from_torch, or write the operators as workload JSON.",
        )  # fmt: skip
        raise BadInput(str(error))
    architecture, dims = CONFIG_READERS[kind](fields)
    notes = ["dimensions from a Hugging Face configuration"]
    if "auto_map" in config:
        notes.append("auto_map (code in the repository) was not run; the standard architecture is assumed")
    recipe = _read_quantization(fields, notes)
    title = ", ".join(str(a) for a in fields.get("architectures", []) or [kind])
    source = f"{where} (model_type {kind})"
    return replace(make_model(name or kind, title, architecture, dims, source, "; ".join(notes)), quantization=recipe)


def _read_quantization(fields: _Fields, notes: list[str]) -> str | None:
    """Return the recipe that ``quantization_config`` names; what it names and we do not know becomes a note."""
    found = fields.get("quantization_config", {})
    fields.check("quantization_config", found, isinstance(found, Mapping), "an object")
    if not found:
        return None
    method = str(found.get("quant_method", "")).lower()
    bits, recipe = found.get("bits", found.get("w_bit", 4)), None
    if method in ("fp8", "fbgemm_fp8"):
        recipe = "fp8-block" if found.get("weight_block_size") else "fp8"
    elif method in ("awq", "gptq") and bits == 4:
        recipe = method
    elif method == "mxfp4":
        recipe = "mxfp4"
    elif method == "modelopt":
        recipe = {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(found.get("quant_algo", "")).upper())
    elif method == "compressed-tensors":
        recipe = _read_compressed_tensors(found)
    if recipe is None:
        notes.append(
            f"quantization_config ({clip_text(method or 'no quant_method')}) is not known: choose --quantization"
        )
    return recipe


def _read_compressed_tensors(found: Mapping[str, Any]) -> str | None:
    """Return the recipe of the first group of layers."""
    groups = found.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) and groups else {}
    weights, tokens = (
        first.get(name) if isinstance(first, Mapping) else None for name in ("weights", "input_activations")
    )
    if not isinstance(weights, Mapping):
        return None
    kind = weights.get("type"), weights.get("num_bits"), isinstance(tokens, Mapping)
    if kind == ("float", 8, True):
        return "fp8-block" if weights.get("strategy") == "block" else "fp8"
    return {("int", 8, True): "w8a8", ("int", 4, False): "gptq", ("float", 4, True): "nvfp4"}.get(kind)  # type: ignore[arg-type]


class _Fields:
    """A configuration's fields, each checked as it is read."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def get(self, name: str, default: Any) -> Any:
        value = self.config.get(name)
        return default if value is None else value

    def check(self, name: str, value: Any, valid: bool, wanted: str) -> Any:
        if not valid:
            raise bad_value(f"{self.where}: {name}", wanted, value)
        return value

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a positive whole number under the first of ``names`` that is there."""
        found = next((name for name in names if self.config.get(name) is not None), None)
        if found is None:
            self.check(names[0], "none", default is not None, "a whole number")
            return default or 0
        value = self.config[found]
        size: int = self.check(found, value, _is_size(value), "a whole number above zero")
        return size

    def sizes(self, **names: str) -> dict[str, int]:
        """Return required sizes, by our name for each."""
        return {ours: self.size(name) for ours, name in names.items()}

    def optional(self, name: str) -> int:
        """Return a positive whole number, or 0 where the field is absent, null or 0."""
        return self.size(name) if self.config.get(name) else 0

    def size_list(self, name: str, default: list[int]) -> list[int]:
        value = self.get(name, default)
        valid = isinstance(value, list) and bool(value) and all(map(_is_size, value))
        found: list[int] = self.check(name, value, valid, "a list of whole numbers above zero")
        return found

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        valid = isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value < 1e9
        return float(self.check(name, value, valid, "a number, zero or more"))

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        return bool(self.check(name, value, isinstance(value, bool), "true or false"))

    def text(self, name: str, default: str) -> str:
        value = self.get(name, default)
        return str(self.check(name, value, isinstance(value, str), "text"))

    def require(self, name: str, *allowed: Any) -> None:
        """Refuse a field whose value our template does not know."""
        value = self.config.get(name)
        wanted = f"{' or '.join(repr(a) for a in allowed)} (all the template knows)"
        self.check(name, value, value is None or value in allowed, wanted)

    def activation(self, name: str, default: str) -> str:
        value = self.text(name, default)
        self.check(name, value, value in _ACTIVATIONS, f"one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def rotary_share(self, default: float) -> float:
        """Return the part of a head that is rotated; newer files keep it among the rotary parameters."""
        rotary = self.get("rope_parameters", {})
        inside = rotary.get("partial_rotary_factor", default) if isinstance(rotary, dict) else default
        return self.number("partial_rotary_factor", inside)

    def label_count(self) -> int:
        """Return the number of classes of a classifier."""
        return len(self.get("id2label", {})) or self.size("num_labels", default=2)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < SIZE_LIMIT


_Read: TypeAlias = tuple[str, dict[str, Any]]  # our architecture and its dimensions
_Reader: TypeAlias = Callable[[_Fields], _Read]
CONFIG_READERS: dict[str, _Reader] = {}


def _reader_of(model_type: str) -> Callable[[_Reader], _Reader]:
    """Register the function that reads configurations of a ``model_type``."""

    def register(reader: _Reader) -> _Reader:
        CONFIG_READERS[model_type] = reader
        return reader

    return register


def _read_decoder(f: _Fields, **more: Any) -> _Read:
    dims = {
        **_read_transformer(f),
        "kv_heads": f.size("num_key_value_heads", "num_attention_heads"),
        "head_dim": f.optional("head_dim"),
        "activation": f.activation("hidden_act", "silu"),
        "tied": f.flag("tie_word_embeddings"),
        "max_positions": f.size("max_position_embeddings", default=2048),
        "dropout": f.number("attention_dropout", 0.0),
    }
    return "decoder", dims | more


def _read_transformer(f: _Fields) -> dict[str, int]:
    return f.sizes(
        layers="num_hidden_layers", hidden="hidden_size", heads="num_attention_heads",
        intermediate="intermediate_size", vocab="vocab_size",
    )  # fmt: skip


@_reader_of("llama")
def _read_llama(f: _Fields) -> _Read:
    f.require("mlp_bias", False)
    bias = f.flag("attention_bias")
    return _read_decoder(f, qkv_bias=bias, out_bias=bias)


@_reader_of("mistral")
def _read_mistral(f: _Fields) -> _Read:
    return _read_decoder(f, window=f.optional("sliding_window"))


@_reader_of("mixtral")
def _read_mixtral(f: _Fields) -> _Read:
    f.require("sliding_window", 0)
    return _read_decoder(
        f, experts=f.size("num_local_experts", default=8), experts_chosen=f.size("num_experts_per_tok", default=2),
        expert_intermediate=f.size("intermediate_size"),
    )  # fmt: skip


@_reader_of("qwen2")
def _read_qwen2(f: _Fields) -> _Read:
    f.require("use_sliding_window", False)
    return _read_decoder(f, qkv_bias=True)


@_reader_of("qwen3")
def _read_qwen3(f: _Fields) -> _Read:
    f.require("use_sliding_window", False)
    f.require("attention_bias", False)
    return _read_decoder(f, qk_norm=True, head_dim=f.size("head_dim", default=128))


@_reader_of("qwen3_moe")
def _read_qwen3_moe(f: _Fields) -> _Read:
    f.require("decoder_sparse_step", 1)
    f.require("mlp_only_layers", [])
    architecture, dims = _read_qwen3(f)
    return architecture, dims | {
        "experts": f.size("num_experts", "num_local_experts"),
        "experts_chosen": f.size("num_experts_per_tok"),
        "expert_intermediate": f.size("moe_intermediate_size"),
        "router_wide": False,
        "router_renormalise": f.flag("norm_topk_prob"),
    }


@_reader_of("gemma")
def _read_gemma(f: _Fields) -> _Read:
    f.require("attention_bias", False)
    act = f.activation("hidden_activation", f.text("hidden_act", "gelu_pytorch_tanh"))
    act = "gelu_tanh" if act == "gelu" else act  # Hugging Face runs the tanh form for both names
    tied = f.get("tie_word_embeddings", True)
    return _read_decoder(f, norm="gemma", activation=act, tied=tied, head_dim=f.size("head_dim", default=256))


@_reader_of("phi")
def _read_phi(f: _Fields) -> _Read:
    f.require("qk_layernorm", False)
    return _read_decoder(
        f, norm="layer", qkv_bias=True, out_bias=True, head_bias=True, gated=False, parallel=True,
        rotary_share=f.rotary_share(0.5), activation=f.activation("hidden_act", "gelu_new"),
    )  # fmt: skip


@_reader_of("phi3")
def _read_phi3(f: _Fields) -> _Read:
    window = f.optional("sliding_window")
    return _read_decoder(f, fused_projections=True, window=window, rotary_share=f.rotary_share(1.0))


@_reader_of("gpt2")
def _read_gpt2(f: _Fields) -> _Read:
    f.require("add_cross_attention", False)
    f.require("scale_attn_by_inverse_layer_idx", False)
    f.require("reorder_and_upcast_attn", False)
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


@_reader_of("opt")
def _read_opt(f: _Fields) -> _Read:
    hidden = f.size("hidden_size")
    f.require("word_embed_proj_dim", hidden)
    for name in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        f.require(name, True)
    return "gpt", {
        **f.sizes(layers="num_hidden_layers", heads="num_attention_heads", intermediate="ffn_dim"),
        "hidden": hidden,
        "vocab": f.size("vocab_size"),
        "max_positions": f.size("max_position_embeddings", default=2048),
        "style": "opt",
        "activation": f.activation("activation_function", "relu"),
        "dropout": f.number("dropout", 0.1),
    }


@_reader_of("bert")
def _read_bert(f: _Fields) -> _Read:
    f.require("position_embedding_type", "absolute")
    f.require("is_decoder", False)
    f.require("add_cross_attention", False)
    return "bert", {
        **_read_transformer(f),
        "max_positions": f.size("max_position_embeddings", default=512),
        "types": f.size("type_vocab_size", default=2),
        "activation": f.activation("hidden_act", "gelu"),
        "dropout": f.number("hidden_dropout_prob", 0.1),
    }


@_reader_of("deepseek_v3")
def _read_deepseek(f: _Fields) -> _Read:
    f.require("attention_bias", False)
    f.require("topk_method", "noaux_tc")
    f.require("moe_layer_freq", 1)
    f.require("rope_interleave", True)
    dims = _read_transformer(f) | f.sizes(
        q_rank="q_lora_rank", kv_rank="kv_lora_rank", plain_dim="qk_nope_head_dim", rotary_dim="qk_rope_head_dim",
        value_dim="v_head_dim", experts="n_routed_experts", experts_chosen="num_experts_per_tok",
        expert_intermediate="moe_intermediate_size",
    )  # fmt: skip
    return "latent", {
        **dims,
        "dense_layers": min(int(f.number("first_k_dense_replace", 0)), dims["layers"]),
        "shared_intermediate": dims["expert_intermediate"] * f.size("n_shared_experts", default=1),
        "groups": f.size("n_group", default=1),
        "groups_chosen": f.size("topk_group", default=1),
        "activation": f.activation("hidden_act", "silu"),
        "max_positions": f.size("max_position_embeddings", default=4096),
    }


@_reader_of("vit")
def _read_vit(f: _Fields) -> _Read:
    f.require("qkv_bias", True)
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
        "classes": f.label_count() if classifier else 0,
    }


@_reader_of("resnet")
def _read_resnet(f: _Fields) -> _Read:
    f.require("layer_type", "bottleneck")
    f.require("downsample_in_first_stage", False)
    f.require("downsample_in_bottleneck", False)
    f.require("hidden_act", "relu")
    return "resnet", {
        "blocks": f.size_list("depths", [3, 4, 6, 3]),
        "widths": f.size_list("hidden_sizes", [256, 512, 1024, 2048]),
        "stem": f.size("embedding_size", default=64),
        "channels": f.size("num_channels", default=3),
        "classes": f.label_count(),
    }


@_reader_of("whisper")
def _read_whisper(f: _Fields) -> _Read:
    dims = f.sizes(
        encoder_layers="encoder_layers", decoder_layers="decoder_layers", hidden="d_model",
        heads="encoder_attention_heads", intermediate="encoder_ffn_dim", mel_bins="num_mel_bins", vocab="vocab_size",
    )  # fmt: skip
    f.require("decoder_attention_heads", dims["heads"])
    f.require("decoder_ffn_dim", dims["intermediate"])
    return "whisper", {
        **dims,
        "frames": f.size("max_source_positions", default=1500),
        "max_positions": f.size("max_target_positions", default=448),
        "activation": f.activation("activation_function", "gelu"),
        "dropout": f.number("dropout", 0.0),
    }
