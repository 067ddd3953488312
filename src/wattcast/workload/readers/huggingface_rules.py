"""How each ``model_type`` of Hugging Face becomes the dimensions of one of our architectures.

``huggingface.yaml`` says which field gives which dimension. The functions of ``FURTHER`` read what
takes more than one field to tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec

from wattcast.core.strict_files import read_shipped_yaml
from wattcast.workload.readers.huggingface_fields import ConfigFields
from wattcast.workload.readers.huggingface_layers import (
    LayerRule,
    count_alike,
    mark_layers,
)

# Layers of SAM that attend to the whole picture, as transformers assumes where a file is silent
_SAM_FULL_LAYERS = [2, 5, 8, 11]


class ModelRule(msgspec.Struct, forbid_unknown_fields=True):
    """What ``huggingface.yaml`` says of a ``model_type``."""

    like: list[str] = []
    architecture: str = ""
    assume: dict[str, Any] = {}
    refuse: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    read: dict[str, Any] = {}
    groups: list[LayerRule] = []
    more: str = ""


@cache
def load_rules() -> dict[str, ModelRule]:
    """Return the rule of each ``model_type``, with those it is like worked in."""
    written = read_shipped_yaml(
        dict[str, ModelRule], "wattcast.workload.readers", "huggingface.yaml"
    )
    rules: dict[str, ModelRule] = {}
    for name, rule in written.items():
        whole = ModelRule()
        for ancestor in rule.like:
            whole = _override_rule(whole, rules[ancestor])
        rules[name] = _override_rule(whole, rule)
    return {name: rule for name, rule in rules.items() if not name.startswith("_")}


def _override_rule(base: ModelRule, rule: ModelRule) -> ModelRule:
    """Return ``base`` with everything that ``rule`` says otherwise."""
    fixed = _drop_names(base.fixed, rule.read) | rule.fixed
    read = _drop_names(base.read, rule.fixed) | rule.read
    if "state" in base.read or "state" in rule.read:
        base_state = base.read.get("state", {})
        read["state"] = base_state | rule.read.get("state", {})
    return ModelRule(
        architecture=rule.architecture or base.architecture,
        assume=base.assume | rule.assume,
        refuse=base.refuse | rule.refuse,
        fixed=fixed,
        read=read,
        groups=rule.groups or base.groups,
        more=rule.more or base.more,
    )


def _drop_names(values: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _read_gemma(fields: ConfigFields) -> dict[str, Any]:
    activation = fields.read("hidden_activation|hidden_act=gelu_pytorch_tanh", str)
    if activation == "gelu":  # Hugging Face runs the tanh form for both
        activation = "gelu_tanh"
    multipliers = ["cap"] if fields.config.get("final_logit_softcapping") else []
    return {"activation": activation, "multipliers": multipliers}


def _read_granite_experts(fields: ConfigFields) -> dict[str, Any]:
    if not fields.read("num_local_experts?"):
        return {}
    return {
        "router": "late",
        "experts": fields.read("num_local_experts"),
        "experts_chosen": fields.read("num_experts_per_tok"),
        "expert_intermediate": fields.read("intermediate_size"),
        "shared_intermediate": fields.read("shared_intermediate_size"),
    }


_NEMOTRON_LETTERS = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
}
_NEMOTRON_SCAN = {"mixer": "mamba2", "feed_forward": "none"}
_NEMOTRON_ATTENTION = {"mixer": "attention", "feed_forward": "none"}
_NEMOTRON_LAYERS: dict[str, dict[str, Any]] = {
    "mamba": _NEMOTRON_SCAN,
    "linear_attention": _NEMOTRON_SCAN,
    "attention": _NEMOTRON_ATTENTION,
    "full_attention": _NEMOTRON_ATTENTION,
    "mlp": {"mixer": "none", "feed_forward": "dense"},
}


def _read_nemotron_pattern(fields: ConfigFields) -> dict[str, Any]:
    pattern = fields.take("hybrid_override_pattern", "")
    spelled_out = [_NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]
    words = fields.get("layers_block_type", spelled_out)
    valid = isinstance(words, list) and len(words) > 0
    valid = valid and all(word in _NEMOTRON_LAYERS for word in words)
    expected = "letters M, * and - (experts without a gate, E, are not known), one a layer"
    fields.check("hybrid_override_pattern", pattern or words, valid, expected)
    groups = count_alike([_NEMOTRON_LAYERS[word] for word in words])
    return {"layers": len(words), "groups": groups}


def _read_jamba(fields: ConfigFields) -> dict[str, Any]:
    experts = fields.read("num_experts=16")
    if experts <= 1:
        return {}
    return {"experts": experts, "experts_chosen": fields.read("num_experts_per_tok=2")}


def _read_lfm2(fields: ConfigFields) -> dict[str, Any]:
    """Return the width that is left of the one in the file: two thirds, rounded up."""
    width = fields.read("block_ff_dim|intermediate_size")
    is_mixture = fields.read("num_experts?")
    if is_mixture or not fields.read("block_auto_adjust_ff_dim=true", bool):
        return {"intermediate": width}
    rounding = fields.read("block_multiple_of=256")
    multiplier = fields.read("block_ffn_dim_multiplier=1.0", float)
    narrowed = int(multiplier * int(2 * width / 3))
    return {"intermediate": -(-narrowed // rounding) * rounding}


def _read_falcon(fields: ConfigFields) -> dict[str, Any]:
    is_new = fields.read("new_decoder_architecture?", bool)
    heads = fields.read("num_attention_heads")
    kv_heads = heads
    if is_new:
        kv_heads = fields.read("num_kv_heads|n_head_kv|num_attention_heads")
    elif fields.read("multi_query=true", bool):
        kv_heads = 1
    has_alibi = fields.read("alibi?", bool)
    return {
        "kv_heads": kv_heads,
        "parallel": is_new or fields.read("parallel_attn=true", bool),
        "parallel_norms": fields.read("num_ln_in_parallel_attn=2") if is_new else 1,
        "rotary_share": 0.0 if has_alibi else 1.0,
    }


_T5_ACTIVATIONS = {
    "relu": "relu",
    "gated-gelu": "gelu_new",
    "gated-silu": "silu",
}


def _read_t5(fields: ConfigFields) -> dict[str, Any]:
    form = fields.take("feed_forward_proj", "relu")
    choices = ", ".join(_T5_ACTIVATIONS)
    fields.check("feed_forward_proj", form, form in _T5_ACTIVATIONS, f"one of {choices}")
    is_encoder = _names_architecture(fields, "EncoderModel")
    return {
        "activation": _T5_ACTIVATIONS[form],
        "gated": form.startswith("gated"),
        "decoder_layers": 0 if is_encoder else fields.read("num_decoder_layers|num_layers=6"),
    }


def _count_unwindowed_layers(fields: ConfigFields) -> dict[str, Any]:
    layers = fields.read("vision_config.num_hidden_layers=12")
    places = fields.find("vision_config.global_attn_indexes")
    if places is None:
        places = _SAM_FULL_LAYERS
    valid = isinstance(places, list) and all(place in range(layers) for place in places)
    fields.check("global_attn_indexes", places, valid, f"a list of layers below {layers}")
    return {"full_layers": len(places)}


def _count_labels(fields: ConfigFields) -> int:
    return len(fields.take("id2label", {})) or int(fields.read("num_labels=2"))


def _names_architecture(fields: ConfigFields, word: str) -> bool:
    """Tell whether the file names an architecture with ``word`` in its name."""
    return any(word in str(name) for name in fields.take("architectures", []))


def _read_vit_classes(fields: ConfigFields) -> dict[str, Any]:
    if _names_architecture(fields, "Classification"):
        return {"pooler": False, "classes": _count_labels(fields)}
    return {"pooler": True, "classes": 0}


def _read_no_classes(fields: ConfigFields) -> dict[str, Any]:
    return {"pooler": False, "classes": 0}


def _read_resnet_classes(fields: ConfigFields) -> dict[str, Any]:
    return {"classes": _count_labels(fields)}


def _count_dense_layers(fields: ConfigFields) -> dict[str, Any]:
    dense = fields.read("first_k_dense_replace?")
    return {"dense_layers": min(dense, fields.read("num_hidden_layers"))}


def _count_full_layers(fields: ConfigFields) -> dict[str, Any]:
    """Count the layers without a window.

    They are those that are named so, or every third, the first among them.
    """
    words = {"layer_types": {"full_attention": True, "sliding_attention": False}}
    rule = LayerRule(words=words, each=["global_attn_every_n_layers=3", 0])
    is_full = mark_layers(fields, fields.read("num_hidden_layers"), rule)
    first_type = fields.get("layer_types", [])[:1]
    fields.check("layer_types", first_type, is_full[0], "full_attention in the first layer")
    return {"full_layers": sum(is_full)}


FURTHER: dict[str, Callable[[ConfigFields], dict[str, Any]]] = {
    "gemma": _read_gemma,
    "granite_experts": _read_granite_experts,
    "nemotron_pattern": _read_nemotron_pattern,
    "falcon": _read_falcon,
    "jamba": _read_jamba,
    "lfm2": _read_lfm2,
    "sam": _count_unwindowed_layers,
    "t5": _read_t5,
    "full_layers": _count_full_layers,
    "vit_classes": _read_vit_classes,
    "features_alone": _read_no_classes,
    "resnet_classes": _read_resnet_classes,
    "dense_layers": _count_dense_layers,
}
