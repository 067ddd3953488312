"""Hugging Face ``config.json`` -> ModelSpec. Only numbers are read: no network, no remote code, no weights.

``auto_map`` names Python code inside a repository; it is never run. A field that would change the operators in a way
our template does not know is refused by name.
"""

from __future__ import annotations

from collections import Counter
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
    "relu2": "relu2",
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
    notes = ["dimensions from a Hugging Face configuration"]
    part = kind
    if kind in _LANGUAGE_PARTS:
        text = fields.table("text_config")
        fields = _Fields({**config, **text}, where)
        inner = fields.text("model_type", kind)  # llava wraps llama or mistral, internvl qwen2 or qwen3
        part = inner if inner in CONFIG_READERS else _LANGUAGE_PARTS[kind] if inner.startswith(kind) else inner
        notes.append("the language part alone: pictures and sounds enter as tokens, their encoders are not counted")
    reader = CONFIG_READERS.get(part)
    if reader is None:
        known = sorted({*CONFIG_READERS, *_LANGUAGE_PARTS})
        named = ", ".join(map(clip_text, fields.names("architectures"))) or "none"
        remote = " Its auto_map code is never run." if "auto_map" in config else ""
        error = unknown_name(
            f"model_type in {where} (architectures: {named})", part or "(missing)", known,
            f"Known: {', '.join(known)}.{remote} Capture the module with "
            "wattcast.workload.readers.from_torch, or write the operators as workload JSON.",
        )  # fmt: skip
        raise BadInput(str(error))
    architecture, dims = reader(fields)
    if isinstance(dims.get("state"), dict):
        notes.append("kernels of its sequence scans were never measured; they are estimated from bytes and FLOPs")
    if "auto_map" in config:
        notes.append("auto_map (code in the repository) was not run; the standard architecture is assumed")
    recipe = _read_quantization(fields, notes)
    title = ", ".join(map(clip_text, fields.names("architectures"))) or kind
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

    def table(self, name: str) -> Mapping[str, Any]:
        value = self.get(name, {})
        found: Mapping[str, Any] = self.check(name, value, isinstance(value, Mapping), "an object")
        return found

    def names(self, name: str) -> list[Any]:
        value = self.get(name, [])
        found: list[Any] = self.check(name, value, isinstance(value, list), "a list")
        return found

    def words(self, name: str, count: int, default: list[str]) -> list[str]:
        """Return one word a layer."""
        value = self.get(name, default)
        valid = isinstance(value, list) and len(value) == count and all(isinstance(word, str) for word in value)
        found: list[str] = self.check(name, value, valid, f"a list of {count} words")
        return found

    def assume(self, **defaults: Any) -> _Fields:
        """Return the fields with what transformers assumes where the file says nothing."""
        given = {name: value for name, value in self.config.items() if value is not None}
        return _Fields({**defaults, **given}, self.where)

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
        return len(self.table("id2label")) or self.size("num_labels", default=2)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < SIZE_LIMIT


_Read: TypeAlias = tuple[str, dict[str, Any]]  # our architecture and its dimensions
_Reader: TypeAlias = Callable[[_Fields], _Read]
CONFIG_READERS: dict[str, _Reader] = {}


def _reader_of(*model_types: str) -> Callable[[_Reader], _Reader]:
    """Register the function that reads configurations of these ``model_type``s."""

    def register(reader: _Reader) -> _Reader:
        CONFIG_READERS.update(dict.fromkeys(model_types, reader))
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


# Models of pictures or sounds whose language part is one of the decoders below.
_LANGUAGE_PARTS = {
    "aya_vision": "cohere2", "gemma3": "gemma3_text", "glm4v": "glm4", "glm4v_moe": "glm4_moe", "internvl": "qwen2",
    "llama4": "llama4_text", "llava": "llama", "llava_next": "llama", "mistral3": "mistral",
    "paligemma": "gemma2", "phi4_multimodal": "phi3", "phi4mm": "phi3", "qwen2_5_vl": "qwen2", "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe",
}  # fmt: skip


def _group_layers(kinds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return groups of equal layers in the order in which they first appear; none where all are alike."""
    counts = Counter(tuple(sorted(kind.items())) for kind in kinds)
    return [{"layers": count, **dict(kind)} for kind, count in counts.items()]


def _group_windows(f: _Fields, default: list[str], plain_full: bool = False) -> list[dict[str, Any]]:
    """Return the groups of a decoder of which some layers have a sliding window.

    ``plain_full``: layers that see everything have no rotary embedding.
    """
    window, kinds = f.optional("sliding_window"), []
    for word in f.words("layer_types", len(default), default):
        f.check("layer_types", word, word in ("sliding_attention", "full_attention"), "sliding or full attention")
        sliding = word == "sliding_attention" and window > 0
        kinds.append({"window": window if sliding else 0, "rotary": sliding or not plain_full})
    return _group_layers(kinds)


def _alternate_windows(layers: int, every: int) -> list[str]:
    """Return the words for layers of which each ``every``-th sees everything and the others have a window."""
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


@_reader_of("llama", "internlm3", "code_llama", "arcee", "seed_oss", "ernie4_5", "granite", "smollm3", "ministral3")
def _read_llama(f: _Fields) -> _Read:
    bias = f.flag("attention_bias") or f.flag("use_bias") or f.flag("qkv_bias")
    kind, layers = f.get("model_type", ""), f.size("num_hidden_layers")
    rotary = f.get("no_rope_layers", [1] * layers)
    if kind == "smollm3" and "no_rope_layers" not in f.config:
        every = f.size("no_rope_layer_interval", default=4)
        rotary = [int((layer + 1) % every > 0) for layer in range(layers)]
    f.check("no_rope_layers", rotary, isinstance(rotary, list) and len(rotary) == layers, f"a list of {layers}")
    groups = _group_layers([{"rotary": bool(turned)} for turned in rotary])
    f.require("use_sliding_window", False)
    return _read_decoder(
        f, qkv_bias=bias, out_bias=f.flag("attention_out_bias", f.flag("use_bias", bias)), gated=kind != "arcee",
        mlp_bias=f.flag("mlp_bias", f.flag("use_bias")), groups=groups if len(groups) > 1 else [],
        multipliers=["embedding", "residual", "logits"] if kind == "granite" else [],
        tied=f.flag("tie_word_embeddings", kind in ("smollm3", "ernie4_5")),
    )  # fmt: skip


@_reader_of("internlm2")
def _read_internlm2(f: _Fields) -> _Read:
    return _read_decoder(f, fused_qkv=True, qkv_bias=f.flag("bias"), out_bias=f.flag("bias"))


@_reader_of("mistral", "ministral")
def _read_mistral(f: _Fields) -> _Read:
    return _read_decoder(f, window=f.optional("sliding_window"))


@_reader_of("mixtral", "phimoe", "granitemoe")
def _read_mixtral(f: _Fields) -> _Read:
    kind = f.get("model_type", "")
    if kind != "phimoe":
        f.require("sliding_window", 0)
    bias = f.flag("attention_bias")
    return _read_decoder(
        f, experts=f.size("num_local_experts", default=8), experts_chosen=f.size("num_experts_per_tok", default=2),
        expert_intermediate=f.size("intermediate_size"), qkv_bias=bias, out_bias=bias,
        norm="layer" if kind == "phimoe" else "rms", head_bias=f.flag("lm_head_bias"),
        window=f.optional("sliding_window"), router="late" if kind == "granitemoe" else "softmax",
        multipliers=["embedding", "residual", "logits"] if kind == "granitemoe" else [],
    )  # fmt: skip


@_reader_of("qwen2")
def _read_qwen2(f: _Fields) -> _Read:
    f.require("use_sliding_window", False)
    return _read_decoder(f, qkv_bias=True)


@_reader_of("qwen3", "hunyuan_v1_dense")
def _read_qwen3(f: _Fields) -> _Read:
    f.require("use_sliding_window", False)
    f.require("attention_bias", False)
    if f.get("model_type", "") == "hunyuan_v1_dense":
        return _read_decoder(f, qk_norm=f.flag("use_qk_norm", True))
    return _read_decoder(f, qk_norm=True, head_dim=f.size("head_dim", default=128))


def _read_experts(f: _Fields) -> dict[str, Any]:
    """Return the mixture of Qwen's and OLMoE's files."""
    f.require("decoder_sparse_step", 1)
    f.require("mlp_only_layers", [])
    return {
        "experts": f.size("num_experts", "num_local_experts"),
        "experts_chosen": f.size("num_experts_per_tok"),
        "expert_intermediate": f.size("moe_intermediate_size", "intermediate_size"),
        "router_wide": False,
        "router_renormalise": f.flag("norm_topk_prob"),
    }


@_reader_of("qwen3_moe")
def _read_qwen3_moe(f: _Fields) -> _Read:
    architecture, dims = _read_qwen3(f.assume(intermediate_size=f.size("moe_intermediate_size")))
    return architecture, dims | _read_experts(f)


@_reader_of("qwen2_moe")
def _read_qwen2_moe(f: _Fields) -> _Read:
    architecture, dims = _read_qwen2(f)
    shared = {"shared_intermediate": f.size("shared_expert_intermediate_size"), "shared_gate": True}
    return architecture, dims | _read_experts(f) | shared


@_reader_of("olmoe")
def _read_olmoe(f: _Fields) -> _Read:
    f.require("clip_qkv", 0)
    return _read_decoder(f, qk_norm_wide=True, **_read_experts(f))


@_reader_of("olmo2", "olmo3")
def _read_olmo2(f: _Fields) -> _Read:
    layers = f.size("num_hidden_layers")
    every = 4 if f.get("model_type", "") == "olmo3" else 1
    return _read_decoder(
        f, qk_norm_wide=True, norm_place="after", groups=_group_windows(f, _alternate_windows(layers, every)),
    )  # fmt: skip


@_reader_of("exaone4")
def _read_exaone4(f: _Fields) -> _Read:
    layers, pattern = f.size("num_hidden_layers"), f.get("sliding_window_pattern", "")
    words = ["full_attention"] * layers
    if f.optional("sliding_window"):
        f.check("sliding_window_pattern", pattern, pattern in ("", "LLLG", 4), "LLLG or 4 (all the template knows)")
        words = [*_alternate_windows(layers, 4)[:-1], "full_attention"]
    groups = _group_windows(f, words, plain_full=f.optional("sliding_window") > 0)
    return _read_decoder(f, qk_norm=True, norm_place="after", groups=groups)


@_reader_of("cohere", "cohere2")
def _read_cohere(f: _Fields) -> _Read:
    layers, bias = f.size("num_hidden_layers"), f.flag("attention_bias")
    f.require("use_qk_norm", False)
    groups = []
    if f.get("model_type", "") != "cohere":
        every = f.size("sliding_window_pattern", "_sliding_window_pattern", default=4)
        groups = _group_windows(f, _alternate_windows(layers, every), plain_full=True)
    return _read_decoder(
        f, norm="cohere", parallel=True, qkv_bias=bias, out_bias=bias, multipliers=["logits"], groups=groups,
        tied=f.flag("tie_word_embeddings", True),
    )  # fmt: skip


def _read_gemmas(f: _Fields, **more: Any) -> _Read:
    """Read what all Gemma files share."""
    f.require("attention_bias", False)
    act = f.activation("hidden_activation", f.text("hidden_act", "gelu_pytorch_tanh"))
    act = "gelu_tanh" if act == "gelu" else act  # Hugging Face runs the tanh form for both names
    tied = f.get("tie_word_embeddings", True)
    head_dim = f.size("head_dim", default=256)
    return _read_decoder(f, norm="gemma", activation=act, tied=tied, head_dim=head_dim, **more)


@_reader_of("gemma")
def _read_gemma(f: _Fields) -> _Read:
    return _read_gemmas(f)


@_reader_of("gemma2")
def _read_gemma2(f: _Fields) -> _Read:
    groups = _group_windows(f.assume(sliding_window=4096), _alternate_windows(f.size("num_hidden_layers"), 2))
    cap = ["cap"] if f.get("final_logit_softcapping", 30.0) else []
    softcap = f.number("attn_logit_softcapping", 50.0)
    return _read_gemmas(f, norm_place="around", groups=groups, softcap=softcap, multipliers=cap)


@_reader_of("gemma3_text")
def _read_gemma3(f: _Fields) -> _Read:
    f = f.assume(
        vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=4096,
        max_position_embeddings=131072,
    )  # fmt: skip
    every = f.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    groups = _group_windows(f, _alternate_windows(f.size("num_hidden_layers"), every))
    cap = ["cap"] if f.config.get("final_logit_softcapping") else []
    return _read_gemmas(f, norm_place="around", qk_norm=True, groups=groups, rotary_tables=2, multipliers=cap)


@_reader_of("gpt_oss")
def _read_gpt_oss(f: _Fields) -> _Read:
    layers = f.size("num_hidden_layers")
    words = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    return _read_decoder(
        f, qkv_bias=True, out_bias=True, sink=True, groups=_group_windows(f, words), router="late", expert_bias=True,
        experts=f.size("num_local_experts", "num_experts"),
        experts_chosen=f.size("num_experts_per_tok", "experts_per_token"),
        expert_intermediate=f.size("intermediate_size"),
    )  # fmt: skip


@_reader_of("llama4_text")
def _read_llama4(f: _Fields) -> _Read:
    layers, step = f.size("num_hidden_layers"), f.size("interleave_moe_layer_step", default=1)
    turned = f.get("no_rope_layers", None) or [int((layer + 1) % 4 > 0) for layer in range(layers)]
    mixed = f.get("moe_layers", None) or list(range(step - 1, layers, step))
    f.check("no_rope_layers", turned, isinstance(turned, list) and len(turned) == layers, f"a list of {layers}")
    f.check("moe_layers", mixed, isinstance(mixed, list), "a list of layers")
    chunk = f.size("attention_chunk_size", default=8192)
    kinds = [
        {"chunk": chunk if turned[layer] else 0, "rotary": bool(turned[layer]),
         "feed_forward": "same" if layer in mixed else "dense"}
        for layer in range(layers)
    ]  # fmt: skip
    width = f.size("intermediate_size")
    return _read_decoder(
        f, intermediate=f.size("intermediate_size_mlp", default=width), experts=f.size("num_local_experts"),
        experts_chosen=f.size("num_experts_per_tok", default=1), expert_intermediate=width, router="late",
        shared_intermediate=width, groups=_group_layers(kinds),
    )  # fmt: skip


@_reader_of("qwen3_next")
def _read_qwen3_next(f: _Fields) -> _Read:
    layers, every = f.size("num_hidden_layers"), f.size("full_attention_interval", default=4)
    words = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    words = f.words("layer_types", layers, words)
    kinds = [{"mixer": "attention" if word == "full_attention" else "delta"} for word in words]
    state = {
        "heads": f.size("linear_num_value_heads"), "value_dim": f.size("linear_value_head_dim"),
        "key_heads": f.size("linear_num_key_heads"), "key_dim": f.size("linear_key_head_dim"),
        "kernel": f.size("linear_conv_kernel_dim", default=4), "chunk": 64, "conv_bias": False,
    }  # fmt: skip
    return _read_decoder(
        f, norm="gemma", qk_norm=True, attention_gate=True, rotary_share=f.rotary_share(0.25), state=state,
        groups=_group_layers(kinds), shared_intermediate=f.size("shared_expert_intermediate_size"), shared_gate=True,
        **_read_experts(f),
    )  # fmt: skip


@_reader_of("minimax")
def _read_minimax(f: _Fields) -> _Read:
    layers, heads = f.size("num_hidden_layers"), f.size("num_attention_heads")
    words = ["full_attention" if layer % 2 == 0 else "linear_attention" for layer in range(layers)]
    if isinstance(f.config.get("attn_type_list"), list):  # 0: linear, 1: softmax
        words = ["full_attention" if kind else "linear_attention" for kind in f.config["attn_type_list"]]
    words = f.words("layer_types", layers, words)
    dim = f.size("head_dim", default=f.size("hidden_size") // heads)
    state = {"heads": heads, "key_heads": heads, "key_dim": dim, "value_dim": dim, "kernel": 0}
    kinds = [{"mixer": "attention" if word == "full_attention" else "lightning"} for word in words]
    return _read_decoder(
        f, state={**state, "chunk": f.size("block_size", default=256)}, groups=_group_layers(kinds),
        experts=f.size("num_local_experts"), experts_chosen=f.size("num_experts_per_tok"),
        expert_intermediate=f.size("intermediate_size"), multipliers=["residual"],
    )  # fmt: skip


@_reader_of("minimax_m2")
def _read_minimax_m2(f: _Fields) -> _Read:
    share = f.size("rotary_dim", default=64) / f.size("head_dim", default=128)
    return _read_decoder(
        f, qk_norm_wide=f.flag("use_qk_norm", True), rotary_share=f.rotary_share(share), router="grouped",
        experts=f.size("num_local_experts"), experts_chosen=f.size("num_experts_per_tok"),
        expert_intermediate=f.size("intermediate_size"),
    )  # fmt: skip


@_reader_of("glm", "glm4")
def _read_glm4(f: _Fields) -> _Read:
    return _read_decoder(
        f, qkv_bias=f.flag("attention_bias"), rotary_share=f.rotary_share(0.5), fused_gate=True,
        norm_place="around" if f.get("model_type", "") != "glm" else "before",
        head_dim=f.size("head_dim", default=128),
    )  # fmt: skip


def _dense_first(f: _Fields, layers: int, dense: int) -> list[dict[str, Any]]:
    kinds = [{"feed_forward": "dense" if layer < dense else "same"} for layer in range(layers)]
    return _group_layers(kinds) if 0 < dense < layers else []


@_reader_of("glm4_moe", "dots1")
def _read_glm4_moe(f: _Fields) -> _Read:
    layers, width = f.size("num_hidden_layers"), f.size("moe_intermediate_size")
    dots = f.get("model_type", "") == "dots1"
    return _read_decoder(
        f, qkv_bias=f.flag("attention_bias"), qk_norm=dots or f.flag("use_qk_norm"),
        head_dim=f.size("head_dim", default=128),
        rotary_share=f.rotary_share(1.0 if dots else 0.5), router="grouped", experts=f.size("n_routed_experts"),
        experts_chosen=f.size("num_experts_per_tok"), expert_intermediate=width,
        shared_intermediate=width * f.size("n_shared_experts", default=1), router_groups=f.size("n_group", default=1),
        router_groups_chosen=f.size("topk_group", default=1), router_renormalise=f.flag("norm_topk_prob", True),
        groups=_dense_first(f, layers, int(f.number("first_k_dense_replace", 1))),
    )  # fmt: skip


@_reader_of("ernie4_5_moe")
def _read_ernie_moe(f: _Fields) -> _Read:
    layers, width, bias = f.size("num_hidden_layers"), f.size("moe_intermediate_size"), f.flag("use_bias")
    f.require("moe_layer_interval", 1)
    return _read_decoder(
        f, qkv_bias=bias, out_bias=bias, mlp_bias=bias, experts=f.size("moe_num_experts"),
        experts_chosen=f.size("moe_k"), expert_intermediate=width,
        shared_intermediate=width * int(f.number("moe_num_shared_experts", 0)),
        groups=_dense_first(f, layers, int(f.number("moe_layer_start_index", 1))),
        tied=f.flag("tie_word_embeddings", True),
    )  # fmt: skip


def _read_mamba(f: _Fields, **names: str) -> dict[str, Any]:
    """Return the dimensions of Mamba-2 layers, by the names this file has for them."""
    return {
        **f.sizes(**names),
        "conv_bias": f.flag("mamba_conv_bias", f.flag("use_conv_bias", True)),
        "bias": f.flag("mamba_proj_bias", f.flag("use_bias")),
    }


_MAMBA_NAMES = {
    "heads": "mamba_n_heads", "value_dim": "mamba_d_head", "key_dim": "mamba_d_state", "key_heads": "mamba_n_groups",
    "kernel": "mamba_d_conv", "chunk": "mamba_chunk_size",
}  # fmt: skip


@_reader_of("mamba2")
def _read_mamba2(f: _Fields) -> _Read:
    f = f.assume(
        conv_kernel=4, chunk_size=256, intermediate_size=1, num_attention_heads=1, n_groups=8, state_size=128,
        head_dim=64, num_heads=f.size("expand", default=2) * f.size("hidden_size") // f.size("head_dim", default=64),
    )  # fmt: skip
    state = _read_mamba(
        f, heads="num_heads", value_dim="head_dim", key_dim="state_size", key_heads="n_groups", kernel="conv_kernel",
        chunk="chunk_size",
    )  # fmt: skip
    group = {"layers": f.size("num_hidden_layers"), "mixer": "mamba2", "feed_forward": "none"}
    return _read_decoder(f, state=state, groups=[group], rotary_share=0.0)


@_reader_of("granitemoehybrid", "bamba")
def _read_granite_hybrid(f: _Fields) -> _Read:
    layers, bamba = f.size("num_hidden_layers"), f.get("model_type", "") == "bamba"
    places = f.get("attn_layer_indices", [])
    words = ["attention" if bamba and layer in places else "mamba" for layer in range(layers)]
    words = f.words("layer_types", layers, words)
    rotary = f.text("position_embedding_type", "rope" if bamba else "") == "rope"
    kinds = [
        {"mixer": "attention" if "attention" in word and "linear" not in word else "mamba2", "rotary": rotary}
        for word in words
    ]
    experts = f.optional("num_local_experts") if not bamba else 0
    mixture = {}
    if experts:
        mixture = {
            "experts": experts, "experts_chosen": f.size("num_experts_per_tok"), "router": "late",
            "expert_intermediate": f.size("intermediate_size"),
            "shared_intermediate": f.size("shared_intermediate_size"),
        }  # fmt: skip
    width = f.size("intermediate_size") if bamba else f.size("shared_intermediate_size")
    return _read_decoder(
        f, state=_read_mamba(f, **_MAMBA_NAMES), groups=_group_layers(kinds), fused_gate=not bamba,
        intermediate=width,
        rotary_share=f.rotary_share(0.5) if bamba else 1.0,
        multipliers=[] if bamba else ["embedding", "residual", "logits"], **mixture,
    )  # fmt: skip


@_reader_of("falcon_h1")
def _read_falcon_h1(f: _Fields) -> _Read:
    f.require("projectors_bias", False)
    state = _read_mamba(f, **_MAMBA_NAMES) | {"norm": f.flag("mamba_rms_norm")}
    group = {"layers": f.size("num_hidden_layers"), "mixer": "attention and mamba2"}
    return _read_decoder(f, state=state, groups=[group], multipliers=["embedding", "residual", "logits"])


@_reader_of("nemotron_h")
def _read_nemotron_h(f: _Fields) -> _Read:
    letters = {"M": "mamba", "*": "attention", "-": "mlp"}
    pattern = f.text("hybrid_override_pattern", "")
    words = f.get("layers_block_type", [letters.get(letter, letter) for letter in pattern])
    kinds: dict[str, dict[str, Any]] = {
        "mamba": {"mixer": "mamba2", "feed_forward": "none"},
        "attention": {"mixer": "attention", "feed_forward": "none"},
        "mlp": {"mixer": "none", "feed_forward": "dense"},
    }
    kinds |= {"linear_attention": kinds["mamba"], "full_attention": kinds["attention"]}
    known = isinstance(words, list) and len(words) > 0 and all(word in kinds for word in words)
    f.check(
        "hybrid_override_pattern",
        pattern or words,
        known,
        "letters M, * and - (experts without a gate, E, are not known), one a layer",
    )
    state = _read_mamba(
        f, heads="mamba_num_heads", value_dim="mamba_head_dim", key_dim="ssm_state_size", key_heads="n_groups",
        kernel="conv_kernel", chunk="chunk_size",
    )  # fmt: skip
    return _read_decoder(
        f.assume(num_hidden_layers=len(words)), state=state, groups=_group_layers([kinds[word] for word in words]),
        gated=False, activation=f.activation("mlp_hidden_act", "relu2"), rotary_share=0.0, layers=len(words),
    )  # fmt: skip


@_reader_of("starcoder2")
def _read_starcoder2(f: _Fields) -> _Read:
    bias = f.flag("use_bias", True)
    return _read_decoder(
        f, norm="layer", gated=False, qkv_bias=bias, out_bias=bias, mlp_bias=bias,
        window=f.optional("sliding_window"), activation=f.activation("hidden_act", "gelu_pytorch_tanh"),
        tied=f.flag("tie_word_embeddings", True),
    )  # fmt: skip


@_reader_of("stablelm")
def _read_stablelm(f: _Fields) -> _Read:
    f.require("qk_layernorm", False)
    return _read_decoder(
        f, norm="layer", qkv_bias=f.flag("use_qkv_bias"), rotary_share=f.rotary_share(0.25),
        parallel=f.flag("use_parallel_residual"),
    )  # fmt: skip


@_reader_of("nemotron")
def _read_nemotron(f: _Fields) -> _Read:
    bias = f.flag("attention_bias")
    return _read_decoder(
        f, norm="layer", gated=False, qkv_bias=bias, out_bias=bias, mlp_bias=f.flag("mlp_bias"),
        rotary_share=f.rotary_share(0.5), activation=f.activation("hidden_act", "relu2"),
    )  # fmt: skip


@_reader_of("gpt_neox")
def _read_gpt_neox(f: _Fields) -> _Read:
    parallel, bias = f.flag("use_parallel_residual", True), f.flag("attention_bias", True)
    return _read_decoder(
        f, norm="layer", gated=False, qkv_bias=bias, out_bias=bias, mlp_bias=True, fused_qkv=True, parallel=parallel,
        parallel_norms=2 if parallel else 1, rotary_share=f.rotary_share(f.number("rotary_pct", 0.25)),
        activation=f.activation("hidden_act", "gelu"),
    )  # fmt: skip


@_reader_of("gptj")
def _read_gptj(f: _Fields) -> _Read:
    hidden, heads = f.size("n_embd"), f.size("n_head")
    return "decoder", {
        "layers": f.size("n_layer"), "hidden": hidden, "heads": heads, "kv_heads": heads,
        "vocab": f.size("vocab_size"),
        "intermediate": f.size("n_inner", default=4 * hidden), "norm": "layer", "gated": False, "mlp_bias": True,
        "parallel": True, "head_bias": True, "activation": f.activation("activation_function", "gelu_new"),
        "rotary_share": f.size("rotary_dim", default=64) * heads / hidden, "max_positions": f.size("n_positions"),
    }  # fmt: skip


@_reader_of("falcon")
def _read_falcon(f: _Fields) -> _Read:
    heads, new = f.size("num_attention_heads", "n_head"), f.flag("new_decoder_architecture")
    kv_heads = (
        f.size("num_kv_heads", "n_head_kv", default=heads) if new else 1 if f.flag("multi_query", True) else heads
    )
    hidden, bias = f.size("hidden_size"), f.flag("bias")
    parallel = new or f.flag("parallel_attn", True)
    f = f.assume(num_attention_heads=heads, intermediate_size=f.size("ffn_hidden_size", default=4 * hidden))
    f = f.assume(num_hidden_layers=f.config.get("n_layer"), num_key_value_heads=kv_heads, tie_word_embeddings=True)
    return _read_decoder(
        f, kv_heads=kv_heads, norm="layer", gated=False, qkv_bias=bias, out_bias=bias, mlp_bias=bias, fused_qkv=True,
        parallel=parallel, activation=f.activation("activation", "gelu"), alibi=f.flag("alibi"),
        parallel_norms=f.size("num_ln_in_parallel_attn", default=2) if new else 1,
        rotary_share=0.0 if f.flag("alibi") else 1.0,
    )  # fmt: skip


@_reader_of("bloom")
def _read_bloom(f: _Fields) -> _Read:
    hidden, heads = f.size("hidden_size", "n_embed"), f.size("n_head", "num_attention_heads")
    f.require("apply_residual_connection_post_layernorm", False)
    return "decoder", {
        "layers": f.size("n_layer", "num_hidden_layers"), "hidden": hidden, "heads": heads, "kv_heads": heads,
        "vocab": f.size("vocab_size"), "intermediate": 4 * hidden, "norm": "layer", "gated": False, "qkv_bias": True,
        "out_bias": True, "mlp_bias": True, "fused_qkv": True, "alibi": True, "rotary_share": 0.0,
        "activation": "gelu_tanh", "embedding_norm": True, "tied": True,
    }  # fmt: skip


@_reader_of("mpt")
def _read_mpt(f: _Fields) -> _Read:
    hidden, heads, attention = f.size("d_model"), f.size("n_heads"), f.table("attn_config")
    f.check("attn_config.alibi", attention.get("alibi", True), attention.get("alibi", True) is True, "true")
    f.check("attn_config.qk_ln", attention.get("qk_ln", False), not attention.get("qk_ln", False), "false")
    return "decoder", {
        "layers": f.size("n_layers"), "hidden": hidden, "heads": heads, "kv_heads": heads,
        "vocab": f.size("vocab_size"),
        "intermediate": f.size("expansion_ratio", default=4) * hidden, "norm": "layer without bias", "gated": False,
        "fused_qkv": True, "alibi": True, "rotary_share": 0.0, "activation": "gelu", "tied": True,
        "max_positions": f.size("max_seq_len", default=2048),
    }  # fmt: skip


@_reader_of("phi")
def _read_phi(f: _Fields) -> _Read:
    f.require("qk_layernorm", False)
    return _read_decoder(
        f, norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True, head_bias=True, gated=False, parallel=True,
        rotary_share=f.rotary_share(0.5), activation=f.activation("hidden_act", "gelu_new"),
    )  # fmt: skip


@_reader_of("phi3")
def _read_phi3(f: _Fields) -> _Read:
    window = f.optional("sliding_window")
    return _read_decoder(f, fused_qkv=True, fused_gate=True, window=window, rotary_share=f.rotary_share(1.0))


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


@_reader_of("bert", "roberta", "xlm-roberta", "camembert")
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
        "counted_positions": f.get("model_type", "") != "bert",
    }


@_reader_of("deepseek_v3", "kimi_k2", "deepseek_v2")
def _read_deepseek(f: _Fields) -> _Read:
    f.require("attention_bias", False)
    second = f.get("model_type", "") == "deepseek_v2"
    if not second:
        f.require("topk_method", "noaux_tc")
        f.require("rope_interleave", True)
    f.require("moe_layer_freq", 1)
    dims = _read_transformer(f) | f.sizes(
        kv_rank="kv_lora_rank", plain_dim="qk_nope_head_dim", rotary_dim="qk_rope_head_dim",
        value_dim="v_head_dim", experts="n_routed_experts", experts_chosen="num_experts_per_tok",
        expert_intermediate="moe_intermediate_size",
    )  # fmt: skip
    return "latent", {
        **dims,
        "q_rank": f.optional("q_lora_rank"),
        "router": "softmax" if second else "grouped",
        "router_renormalise": f.flag("norm_topk_prob", not second),
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
    classifier = any("Classification" in str(a) for a in f.names("architectures"))
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
