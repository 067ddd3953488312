"""Hugging Face ``config.json`` -> ModelSpec. Only numbers are read: no network, no remote code, no
weights.

``auto_map`` names Python code inside a repository; it is never run. A field that would change the
operators in a way our template does not know is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from wattcast.core import (
    BadInput,
    Dtype,
    clip_text,
    unknown_name,
)
from wattcast.core.strict_files import decode_json
from wattcast.workload.model_catalogue import (
    ARCHITECTURES,
    ModelSpec,
    make_model,
)
from wattcast.workload.readers.huggingface_fields import ConfigFields
from wattcast.workload.readers.huggingface_layers import group_layers
from wattcast.workload.readers.huggingface_rules import (
    FURTHER,
    ModelRule,
    load_rules,
)

# Models of pictures or sounds whose language part is one of the decoders of huggingface.yaml.
_LANGUAGE_PARTS = {
    "aya_vision": "cohere2",
    "gemma3": "gemma3_text",
    "glm4v": "glm4",
    "glm4v_moe": "glm4_moe",
    "internvl": "qwen2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "paligemma": "gemma2",
    "phi4_multimodal": "phi3",
    "phi4mm": "phi3",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}


def name_model(path: Path) -> str:
    """Return the name of the model a configuration file describes: its folder's, or the file's.

    The Hugging Face cache keeps it in ``models--ORGANISATION--NAME/snapshots/COMMIT/config.json``.
    """
    if path.parent.parent.name == "snapshots":
        return path.parents[2].name.split("--")[-1]
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def parse_huggingface(
    data: bytes,
    where: str,
    name: str = "",
) -> ModelSpec:
    """Parse the JSON text of a configuration."""
    return convert_config(decode_json(data, dict[str, Any], where), where, name)


def convert_config(
    config: Mapping[str, Any],
    where: str = "config",
    name: str = "",
) -> ModelSpec:
    """Convert a configuration that was read already."""
    stated = {name: value for name, value in config.items() if value != "auto"}
    fields = ConfigFields(stated, where)
    kind = fields.take("model_type", "")
    notes = ["dimensions from a Hugging Face configuration"]

    # Of a model of several parts, the language part
    part = kind
    if kind in _LANGUAGE_PARTS:
        fields = ConfigFields({**config, **fields.take("text_config", {})}, where)
        part = _find_language_part(kind, fields)
        notes.append(
            "the language part alone: pictures and sounds enter as tokens, their encoders are not "
            "counted"
        )
    rule = load_rules().get(part)
    if rule is None:
        raise _unknown_type_error(fields, part)

    dims = _read_dims(fields, rule)
    if isinstance(dims.get("state"), dict):
        notes.append(
            "kernels of its sequence scans were never measured; they are estimated from bytes and "
            "FLOPs"
        )
    if "auto_map" in config:
        notes.append(
            "auto_map (code in the repository) was not run; the standard architecture is assumed"
        )
    recipe, cache_format = _read_quantization(fields, notes)

    model = make_model(
        name=name or kind,
        title=_list_architectures(fields) or kind,
        architecture="t5_encoder" if dims.get("decoder_layers") == 0 else rule.architecture,
        dims=dims,
        source=f"{where} (model_type {kind})",
        note="; ".join(notes),
    )
    return replace(model, quantization=recipe, kv_dtype=cache_format)


def _find_language_part(kind: str, fields: ConfigFields) -> str:
    """Return the ``model_type`` of the language part: llava wraps llama or mistral."""
    inner = fields.take("model_type", kind)
    is_own_name = inner not in load_rules() and inner.startswith(kind)
    return _LANGUAGE_PARTS[kind] if is_own_name else inner


def _list_architectures(fields: ConfigFields) -> str:
    return ", ".join(map(clip_text, fields.take("architectures", [])))


def _unknown_type_error(fields: ConfigFields, part: str) -> BadInput:
    """Return the error for a ``model_type`` that has no rule."""
    types = sorted({*load_rules(), *_LANGUAGE_PARTS})
    architectures = _list_architectures(fields) or "none"
    advice = ""
    if "auto_map" in fields.config:
        advice += "Its auto_map code is never run. "
    advice += (
        f"{len(types)} types are known (docs/method/workloads.md). Capture the module with "
        "wattcast.capture, or write the operators as workload JSON."
    )
    where = f"model_type in {fields.where} (architectures: {architectures})"
    return BadInput(str(unknown_name(where, part or "(missing)", types, advice)))


def _read_dims(fields: ConfigFields, rule: ModelRule) -> dict[str, Any]:
    """Return the dimensions of the rule's architecture."""
    rotary = fields.get("rope_parameters", {})
    if isinstance(rotary, dict) and "partial_rotary_factor" in rotary:  # where newer files keep it
        fields = fields.assume({"partial_rotary_factor": rotary["partial_rotary_factor"]})
    fields = fields.assume(rule.assume)

    for name, allowed in rule.refuse.items():
        values = [fields.find(allowed)] if isinstance(allowed, str) else allowed
        fields.require(name, values)

    kinds = get_type_hints(ARCHITECTURES[rule.architecture].dims_class)
    dims = dict(rule.fixed)
    if rule.more:
        dims |= FURTHER[rule.more](fields)
    for name, expression in rule.read.items():
        if name == "state":
            dims[name] = _read_state(fields, expression, kinds[name].__args__[0])
        elif name not in dims:
            dims[name] = fields.read(expression, kinds[name])
    if rule.groups:
        dims["groups"] = group_layers(fields, dims["layers"], rule.groups)

    # The convolution into patches leaves out the pixels that do not fill one
    if rule.architecture in ("vit", "clip"):
        dims["image"] -= dims["image"] % dims["patch"]
    return dims


def _read_state(
    fields: ConfigFields,
    expressions: Mapping[str, Any],
    kind: Any,
) -> dict[str, Any]:
    """Return the dimensions of the layers that scan."""
    kinds = get_type_hints(kind)
    return {name: fields.read(text, kinds[name]) for name, text in expressions.items()}


def _read_quantization(fields: ConfigFields, notes: list[str]) -> tuple[str | None, Dtype | None]:
    """Return the recipe and the cache format that ``quantization_config`` names.

    What we do not know becomes a note. Engines take a cache with scales in 8-bit floats alone
    (``kv_cache_scheme``).
    """
    quantization: dict[str, Any] = fields.take("quantization_config", {})
    if not quantization:
        return None, None
    method = str(quantization.get("quant_method", "")).lower()
    recipe = _find_recipe(quantization, method)
    if recipe is None:
        name = clip_text(method or "no quant_method")
        notes.append(f"quantization_config ({name}) is not known: choose --quantization")
    if recipe == "gptq-8bit":
        notes.append(
            "8-bit integer weights are predicted as 8-bit floats, which the same kernel (Marlin) "
            "widens"
        )

    scheme = quantization.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return recipe, None
    if scheme.get("type") == "float" and scheme.get("num_bits") == 8:
        return recipe, Dtype.FP8
    notes.append("kv_cache_scheme is not one of 8-bit floats: choose --kv-dtype")
    return recipe, None


# Recipes by method and bits of a weight.
_RECIPES_BY_BITS = {
    ("awq", 4): "awq",
    ("gptq", 4): "gptq",
    ("gptq", 8): "gptq-8bit",
}
_MODELOPT_RECIPES = {"FP8": "fp8", "NVFP4": "nvfp4"}
# Recipes of compressed-tensors: type and bits of a weight, and whether activations are narrow.
_COMPRESSED_RECIPES = {
    ("int", 8, True): "w8a8",
    ("int", 8, False): "gptq-8bit",
    ("int", 4, False): "gptq",
    ("float", 4, True): "nvfp4",
}


def _find_recipe(quantization: Mapping[str, Any], method: str) -> str | None:
    """Return our name of a recipe, None where we do not know it."""
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8-block" if quantization.get("weight_block_size") else "fp8"
    if method in ("awq", "gptq"):
        bits = quantization.get("bits", quantization.get("w_bit", 4))
        matching = (name for key, name in _RECIPES_BY_BITS.items() if key == (method, bits))
        return next(matching, None)
    if method == "mxfp4":
        return method
    if method == "modelopt":
        algorithm = str(quantization.get("quant_algo", "")).upper()
        return _MODELOPT_RECIPES.get(algorithm)
    if method == "compressed-tensors":
        return _read_compressed_tensors(quantization)
    return None


def _read_compressed_tensors(quantization: Mapping[str, Any]) -> str | None:
    """Return the recipe of the first group of layers."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping):
        return None
    first: Any = next(iter(groups.values()), {})
    if not isinstance(first, Mapping):
        return None
    weights = first.get("weights")
    if not isinstance(weights, Mapping):
        return None
    narrows_activations = isinstance(first.get("input_activations"), Mapping)
    kind: Any = (weights.get("type"), weights.get("num_bits"), narrows_activations)
    if kind == ("float", 8, True):
        return "fp8-block" if weights.get("strategy") == "block" else "fp8"
    return _COMPRESSED_RECIPES.get(kind)
