"""Hugging Face ``config.json`` -> ModelSpec. Only numbers are read: no network, no remote code, no
weights.

``huggingface.yaml`` says which field gives which dimension of each ``model_type``; functions below
read what takes more than one field to tell, such as layers that differ.

``auto_map`` names Python code inside a repository; it is never run. A field that would change the
operators in a way our template does not know is refused by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from wattcast.core import BadInput, Dtype, bad_value, clip_text, unknown_name
from wattcast.core.strict_files import decode_json, read_shipped_yaml
from wattcast.workload.dimension_limits import check_layer_count
from wattcast.workload.model_catalogue import ARCHITECTURES, ModelSpec, make_model
from wattcast.workload.model_options import SIZE_LIMIT

Kind = TypeVar("Kind", str, list[Any], dict[str, Any])
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_new",
}
_ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_ACTIVATIONS |= {name: name for name in ("quick_gelu", "relu2")}
# Models of pictures or sounds whose language part is one of the decoders of huggingface.yaml.
_LANGUAGE_PARTS = {
    "aya_vision": "cohere2", "gemma3": "gemma3_text", "glm4v": "glm4", "glm4v_moe": "glm4_moe", "internvl": "qwen2",
    "llama4": "llama4_text", "llava": "llama", "llava_next": "llama", "mistral3": "mistral",
    "paligemma": "gemma2", "phi4_multimodal": "phi3", "phi4mm": "phi3", "qwen2_5_vl": "qwen2", "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe",
}  # fmt: skip


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
    fields = _Fields({name: value for name, value in config.items() if value != "auto"}, where)
    kind = fields.take("model_type", "")
    notes = ["dimensions from a Hugging Face configuration"]
    part = kind
    if kind in _LANGUAGE_PARTS:
        text = fields.take("text_config", {})
        fields = _Fields({**config, **text}, where)
        inner = fields.take(
            "model_type", kind
        )  # llava wraps llama or mistral, internvl qwen2 or qwen3
        part = (
            inner
            if inner in load_rules()
            else _LANGUAGE_PARTS[kind]
            if inner.startswith(kind)
            else inner
        )
        notes.append(
            "the language part alone: pictures and sounds enter as tokens, their encoders are not counted"
        )
    rule = load_rules().get(part)
    if rule is None:
        known = sorted({*load_rules(), *_LANGUAGE_PARTS})
        named = ", ".join(map(clip_text, fields.take("architectures", []))) or "none"
        remote = " Its auto_map code is never run." if "auto_map" in config else ""
        error = unknown_name(
            f"model_type in {where} (architectures: {named})", part or "(missing)", known,
            f"Known: {', '.join(known)}.{remote} Capture the module with "
            "wattcast.workload.readers.from_torch, or write the operators as workload JSON.",
        )  # fmt: skip
        raise BadInput(str(error))
    dims = _read_dims(fields, rule)
    if isinstance(dims.get("state"), dict):
        notes.append(
            "kernels of its sequence scans were never measured; they are estimated from bytes and FLOPs"
        )
    if "auto_map" in config:
        notes.append(
            "auto_map (code in the repository) was not run; the standard architecture is assumed"
        )
    recipe, cache_format = _read_quantization(fields, notes)
    title = ", ".join(map(clip_text, fields.take("architectures", []))) or kind
    source = f"{where} (model_type {kind})"
    architecture = "t5_encoder" if dims.get("decoder_layers") == 0 else rule.architecture
    made = make_model(name or kind, title, architecture, dims, source, "; ".join(notes))
    return replace(made, quantization=recipe, kv_dtype=cache_format)


def _read_quantization(fields: _Fields, notes: list[str]) -> tuple[str | None, Dtype | None]:
    """Return the recipe and the cache format that ``quantization_config`` names; what we do not
    know becomes a note.

    Engines take a cache with scales in 8-bit floats alone (``kv_cache_scheme``).
    """
    found: dict[str, Any] = fields.take("quantization_config", {})
    if not found:
        return None, None
    method = str(found.get("quant_method", "")).lower()
    bits = found.get("bits", found.get("w_bit", 4))
    recipe = None
    if method in ("fp8", "fbgemm_fp8"):
        recipe = "fp8-block" if found.get("weight_block_size") else "fp8"
    elif method in ("awq", "gptq") and bits == 4:
        recipe = method
    elif method == "gptq" and bits == 8:
        recipe = "gptq-8bit"
    elif method == "mxfp4":
        recipe = "mxfp4"
    elif method == "modelopt":
        recipe = {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(found.get("quant_algo", "")).upper())
    elif method == "compressed-tensors":
        recipe = _read_compressed_tensors(found)
    if recipe is None:
        said = clip_text(method or "no quant_method")
        notes.append(f"quantization_config ({said}) is not known: choose --quantization")
    if recipe == "gptq-8bit":
        notes.append(
            "8-bit integer weights are predicted as 8-bit floats, which the same kernel (Marlin) widens"
        )
    scheme = found.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return recipe, None
    if (scheme.get("type"), scheme.get("num_bits")) == ("float", 8):
        return recipe, Dtype.FP8
    notes.append("kv_cache_scheme is not one of 8-bit floats: choose --kv-dtype")
    return recipe, None


def _read_compressed_tensors(found: Mapping[str, Any]) -> str | None:
    """Return the recipe of the first group of layers."""
    groups = found.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    if not isinstance(first, Mapping) or not isinstance(weights := first.get("weights"), Mapping):
        return None
    tokens = first.get("input_activations")
    kind = weights.get("type"), weights.get("num_bits"), isinstance(tokens, Mapping)
    if kind == ("float", 8, True):
        return "fp8-block" if weights.get("strategy") == "block" else "fp8"
    known = {("int", 8, True): "w8a8", ("int", 4, False): "gptq", ("int", 8, False): "gptq-8bit"}
    return (known | {("float", 4, True): "nvfp4"}).get(kind)  # type: ignore[arg-type]


class _LayerRule(msgspec.Struct, forbid_unknown_fields=True):
    """Which layers differ from the others, and in what."""

    words: dict[
        str, dict[str, bool]
    ] = {}  # a field with a word for each layer, and whether a word marks it
    flags: tuple[str, bool] = (
        "",
        True,
    )  # a field with a number for each layer, and whether 1 or 0 marks it
    places: str = ""  # a field that lists the layers marked
    first: str = ""  # so many first ones
    each: Any = 1  # each so-manieth; or [period, offset]
    last: bool = False  # and the last
    only_if: str = ""  # a size that must be there for the rule to hold
    set: dict[str, Any] = {}  # fields of a layer: [where marked, elsewhere], or everywhere


class _Rule(msgspec.Struct, forbid_unknown_fields=True):
    """What ``huggingface.yaml`` says of a ``model_type``."""

    like: list[str] = []
    architecture: str = ""
    assume: dict[str, Any] = {}
    refuse: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    read: dict[str, Any] = {}
    groups: list[_LayerRule] = []
    more: str = ""


@cache
def load_rules() -> dict[str, _Rule]:
    """Return the rule of each ``model_type``, with those it is like worked in."""
    found: dict[str, _Rule] = {}
    for name, own in read_shipped_yaml(
        dict[str, _Rule], "wattcast.workload.readers", "huggingface.yaml"
    ).items():
        whole = _Rule()
        for part in (*(found[other] for other in own.like), own):
            states = [rule.read["state"] for rule in (whole, part) if "state" in rule.read]
            whole = _Rule(
                architecture=part.architecture or whole.architecture,
                assume=whole.assume | part.assume,
                refuse=whole.refuse | part.refuse,
                fixed={key: value for key, value in whole.fixed.items() if key not in part.read}
                | part.fixed,
                read={key: value for key, value in whole.read.items() if key not in part.fixed}
                | part.read,
                groups=part.groups or whole.groups,
                more=part.more or whole.more,
            )
            if states:
                whole.read["state"] = states[0] | states[-1]
        found[name] = whole
    return {name: rule for name, rule in found.items() if not name.startswith("_")}


def _read_dims(f: _Fields, rule: _Rule) -> dict[str, Any]:
    """Return the dimensions of the rule's architecture."""
    rotary = f.get("rope_parameters", {})
    if isinstance(rotary, dict) and "partial_rotary_factor" in rotary:  # where newer files keep it
        f = f.assume({"partial_rotary_factor": rotary["partial_rotary_factor"]})
    f = f.assume(rule.assume)
    for name, allowed in rule.refuse.items():
        f.require(name, [f.find(allowed)] if isinstance(allowed, str) else allowed)
    kinds = get_type_hints(ARCHITECTURES[rule.architecture].dims)
    dims = rule.fixed | (FURTHER[rule.more](f) if rule.more else {})
    for name, spec in rule.read.items():
        if name == "state":
            inner = get_type_hints(kinds[name].__args__[0])
            dims[name] = {key: f.read(value, inner[key]) for key, value in spec.items()}
        elif name not in dims:
            dims[name] = f.read(spec, kinds[name])
    if rule.groups:
        dims["groups"] = _group_layers(f, dims["layers"], rule.groups)
    if rule.architecture in (
        "vit",
        "clip",
    ):  # the convolution leaves out what does not fill a patch
        dims["image"] -= dims["image"] % dims["patch"]
    return dims


class _Fields:
    """A configuration's fields, each checked as it is read."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def get(self, name: str, default: Any) -> Any:
        value = self.config.get(name)
        return default if value is None else value

    def find(self, name: str) -> Any:
        """Return a field, or (``a.b``) b of the object a; None where it is not there."""
        outer, _, inner = name.rpartition(".")
        return self.take(outer, {}).get(inner) if outer else self.config.get(name)

    def check(self, name: str, value: Any, valid: bool, wanted: str) -> Any:
        if not valid:
            raise bad_value(f"{self.where}: {name}", wanted, value)
        return value

    def read(self, spec: Any, kind: Any = int) -> Any:
        """Return what a word of ``huggingface.yaml`` says: a field, a product of fields, or a value
        as it stands.

        ``a=b==c``: whether a word, by default b, is c.
        """
        if not isinstance(spec, str):
            return spec
        if "==" in spec:
            left, _, word = spec.partition("==")
            name, _, default = left.partition("=")
            return self.take(name, default) == word
        *names, last = spec.split(" or ")
        for name in names:
            if self.find(name) is not None:
                return self._read_field(name, kind)
        if not re.search(r"[*/]", last):
            return self._read_field(last, kind)
        found = 1.0
        for sign, word in re.findall(r"([*/]?)([^*/]+)", last):
            value = int(word) if word.isdigit() else self._read_field(word, int)
            found = found / value if sign == "/" else found * value
        return int(found) if found.is_integer() else found

    def _read_field(self, word: str, kind: Any) -> Any:
        """Return the first of the fields named that is there, its default, or 0 or false for
        ``a?``.
        """
        text, _, default = word.rstrip("?").partition("=")
        names = text.split("|")
        name = next((name for name in names if self.find(name) is not None), names[0])
        value: Any = self.find(name)
        if value is None and word.endswith("?"):
            return kind()
        if value is None and default:
            value = decode_json(default.encode(), kind, name) if kind is not str else default
        if kind is int:
            absent = value == 0 and type(value) is int and word.endswith("?")
            valid = absent or _is_size(value)
            wanted = "a whole number above zero"
        elif kind is float:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            valid = number and 0.0 <= value < 1e9
            wanted = "a number, zero or more"
        elif kind is bool:
            valid = isinstance(value, bool)
            wanted = "true or false"
        elif kind is str:
            valid = isinstance(value, str) and value in _ACTIVATIONS
            wanted = f"one of {', '.join(_ACTIVATIONS)}"
        else:
            valid = isinstance(value, list) and bool(value) and all(map(_is_size, value))
            wanted = "a list of whole numbers above zero"
        found = self.check(name, "none" if value is None else value, valid, wanted)
        return _ACTIVATIONS[found] if kind is str else found

    def take(self, name: str, default: Kind) -> Kind:
        """Return text, a list or an object, as its default is one."""
        value = self.get(name, default)
        wanted = {str: "text", list: "a list", dict: "an object"}[type(default)]
        found: Kind = self.check(name, value, isinstance(value, type(default)), wanted)
        return found

    def assume(self, defaults: Mapping[str, Any]) -> _Fields:
        """Return the fields with what transformers assumes where the file says nothing."""
        given = {name: value for name, value in self.config.items() if value is not None}
        fields = _Fields(given, self.where)
        for name, spec in defaults.items():
            if name not in given:
                given[name] = fields.read(spec)
        return fields

    def require(self, name: str, allowed: list[Any]) -> None:
        """Refuse a field whose value our template does not know."""
        value = self.find(name)
        wanted = f"{' or '.join(repr(a) for a in allowed)} (all the template knows)"
        self.check(name, value, value is None or value in allowed, wanted)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < SIZE_LIMIT


def _mark_layers(f: _Fields, layers: int, rule: _LayerRule) -> list[bool]:
    """Tell of each layer whether a rule marks it: as a list in the file says, else by its place."""
    check_layer_count(layers, f"{f.where}: layers")
    for field, marks in rule.words.items():
        if (words := f.config.get(field)) is not None:
            valid = (
                isinstance(words, list)
                and len(words) == layers
                and all(str(word) in marks for word in words)
            )
            f.check(field, words, valid, f"a list of {layers} words, each {' or '.join(marks)}")
            return [marks[word] for word in words]
    if (flags := f.get(rule.flags[0], None)) is not None and flags != []:
        f.check(
            rule.flags[0],
            flags,
            isinstance(flags, list) and len(flags) == layers,
            f"a list of {layers}",
        )
        return [bool(flag) is rule.flags[1] for flag in flags]
    if (places := f.get(rule.places, None)) is not None and places != []:
        are_places = isinstance(places, list) and all(type(place) is int for place in places)
        f.check(rule.places, places, are_places, "a list of layers")
        marked = set(places)
        return [layer in marked for layer in range(layers)]
    if rule.first:
        return [layer < f.read(rule.first, float) for layer in range(layers)]
    every, *offset = rule.each if isinstance(rule.each, list) else [rule.each]
    step = f.read(every)
    place = int(f.read(offset[0], float)) if offset else step - 1
    by_step = [step > 0 and layer % step == place for layer in range(layers)]
    return [*by_step[:-1], by_step[-1] or rule.last]


def _group_layers(f: _Fields, layers: int, rules: Sequence[_LayerRule]) -> list[dict[str, Any]]:
    """Return groups of equal layers in the order in which they first appear; none where all are
    usual.
    """
    check_layer_count(layers, f"{f.where}: layers")
    kinds: list[dict[str, Any]] = [{} for _ in range(layers)]
    for rule in rules:
        if rule.only_if and not f.read(rule.only_if):
            continue
        marks = _mark_layers(f, layers, rule)
        for name, value in rule.set.items():
            pair = value if isinstance(value, list) else [value, value]
            kind = type(_USUAL_LAYER[name])
            yes, no = (one if kind is str else kind(f.read(one)) for one in pair)
            for layer, marked in zip(kinds, marks, strict=True):
                layer[name] = yes if marked else no
    return _count_alike(kinds)


def _count_alike(kinds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    counts = Counter(tuple(sorted(kind.items())) for kind in kinds)
    if len(counts) == 1 and all(value == _USUAL_LAYER[name] for name, value in kinds[0].items()):
        return []
    return [{"layers": count, **dict(kind)} for kind, count in counts.items()]


_USUAL_LAYER: dict[str, Any] = {
    "mixer": "attention",
    "feed_forward": "same",
    "window": 0,
    "chunk": 0,
    "rotary": True,
}


def _read_gemma(f: _Fields) -> dict[str, Any]:
    activation = f.read("hidden_activation|hidden_act=gelu_pytorch_tanh", str)
    return {
        "activation": "gelu_tanh"
        if activation == "gelu"
        else activation,  # Hugging Face runs the tanh form for both
        "multipliers": ["cap"] if f.config.get("final_logit_softcapping") else [],
    }


def _read_granite_experts(f: _Fields) -> dict[str, Any]:
    if not f.read("num_local_experts?"):
        return {}
    sizes = {"experts": "num_local_experts", "experts_chosen": "num_experts_per_tok"}
    sizes |= {
        "expert_intermediate": "intermediate_size",
        "shared_intermediate": "shared_intermediate_size",
    }
    return {"router": "late", **{name: f.read(field) for name, field in sizes.items()}}


def _read_nemotron_pattern(f: _Fields) -> dict[str, Any]:
    letters = {"M": "mamba", "*": "attention", "-": "mlp"}
    pattern = f.take("hybrid_override_pattern", "")
    words = f.get("layers_block_type", [letters.get(letter, letter) for letter in pattern])
    kinds: dict[str, dict[str, Any]] = {
        "mamba": {"mixer": "mamba2", "feed_forward": "none"},
        "attention": {"mixer": "attention", "feed_forward": "none"},
        "mlp": {"mixer": "none", "feed_forward": "dense"},
    }
    kinds |= {"linear_attention": kinds["mamba"], "full_attention": kinds["attention"]}
    known = isinstance(words, list) and len(words) > 0 and all(word in kinds for word in words)
    wanted = "letters M, * and - (experts without a gate, E, are not known), one a layer"
    f.check("hybrid_override_pattern", pattern or words, known, wanted)
    return {"layers": len(words), "groups": _count_alike([kinds[word] for word in words])}


def _read_jamba(f: _Fields) -> dict[str, Any]:
    experts = f.read("num_experts=16")
    return (
        {"experts": experts, "experts_chosen": f.read("num_experts_per_tok=2")}
        if experts > 1
        else {}
    )


def _read_lfm2(f: _Fields) -> dict[str, Any]:
    """Return the width that is left of the one given: two thirds, rounded up."""
    width = f.read("block_ff_dim|intermediate_size")
    if not f.read("num_experts?") and f.read("block_auto_adjust_ff_dim=true", bool):
        rounding = f.read("block_multiple_of=256")
        width = (
            -(-int(f.read("block_ffn_dim_multiplier=1.0", float) * int(2 * width / 3)) // rounding)
            * rounding
        )
    return {"intermediate": width}


def _read_falcon(f: _Fields) -> dict[str, Any]:
    new = f.read("new_decoder_architecture?", bool)
    heads = f.read("num_attention_heads")
    shared = f.read("num_kv_heads|n_head_kv|num_attention_heads")
    return {
        "kv_heads": shared if new else 1 if f.read("multi_query=true", bool) else heads,
        "parallel": new or f.read("parallel_attn=true", bool),
        "parallel_norms": f.read("num_ln_in_parallel_attn=2") if new else 1,
        "rotary_share": 0.0 if f.read("alibi?", bool) else 1.0,
    }


def _read_t5(f: _Fields) -> dict[str, Any]:
    form = f.take("feed_forward_proj", "relu")
    known = {"relu": "relu", "gated-gelu": "gelu_new", "gated-silu": "silu"}
    f.check("feed_forward_proj", form, form in known, f"one of {', '.join(known)}")
    alone = any("EncoderModel" in str(name) for name in f.take("architectures", []))
    deep = 0 if alone else f.read("num_decoder_layers|num_layers=6")
    return {"activation": known[form], "gated": form.startswith("gated"), "decoder_layers": deep}


def _count_unwindowed_layers(f: _Fields) -> dict[str, Any]:
    layers = f.read("vision_config.num_hidden_layers=12")
    places = f.find("vision_config.global_attn_indexes")
    places = [2, 5, 8, 11] if places is None else places
    valid = isinstance(places, list) and all(place in range(layers) for place in places)
    f.check("global_attn_indexes", places, valid, f"a list of layers below {layers}")
    return {"full_layers": len(places)}


def _count_labels(f: _Fields) -> int:
    return len(f.take("id2label", {})) or int(f.read("num_labels=2"))


def _read_vit_classes(f: _Fields) -> dict[str, Any]:
    classifier = any("Classification" in str(name) for name in f.take("architectures", []))
    return {"pooler": not classifier, "classes": _count_labels(f) if classifier else 0}


def _count_full_layers(f: _Fields) -> dict[str, Any]:
    """Count the layers without a window: those that are named so, or every third, the first among
    them.
    """
    words = {"layer_types": {"full_attention": True, "sliding_attention": False}}
    rule = _LayerRule(words=words, each=["global_attn_every_n_layers=3", 0])
    full = _mark_layers(f, f.read("num_hidden_layers"), rule)
    f.check(
        "layer_types", f.get("layer_types", [])[:1], full[0], "full_attention in the first layer"
    )
    return {"full_layers": sum(full)}


FURTHER: dict[str, Callable[[_Fields], dict[str, Any]]] = {
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
    "features_alone": lambda f: {"pooler": False, "classes": 0},
    "resnet_classes": lambda f: {"classes": _count_labels(f)},
    "dense_layers": lambda f: {
        "dense_layers": min(f.read("first_k_dense_replace?"), f.read("num_hidden_layers"))
    },
}
