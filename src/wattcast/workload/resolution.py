"""Options with every default filled in for a model, each said in words; what does not go together is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wattcast.dtypes import Dtype
from wattcast.errors import bad_value
from wattcast.workload.architectures import Kind, default_seq
from wattcast.workload.models import Model
from wattcast.workload.options import AttentionMode, Head, Options, Phase, Stack

DEFAULT_TOKENS = 128
GENERATE_GROUPS = 16
_PHASES = {
    Kind.LANGUAGE: tuple(Phase),
    Kind.ENCODER: (Phase.PREFILL, Phase.FORWARD, Phase.TRAIN),
    Kind.VISION: (Phase.FORWARD, Phase.TRAIN),
}


def resolve(model: Model, options: Options) -> tuple[Options, list[str]]:
    """Options with no None left where the model needs a value, and a sentence for each default taken."""
    said: list[str] = []
    taken: dict[str, Any] = {}
    kind, phase = model.kind, options.phase
    if phase is None:
        taken["phase"] = phase = Phase.FORWARD if kind is Kind.VISION else Phase.PREFILL
        said.append(f"phase {phase} (default of a {kind} model)")
    if phase not in _PHASES[kind]:
        raise bad_value(f"{model.name}: phase", f"one of {', '.join(_PHASES[kind])}", str(phase))
    sizes, more = _sizes(model, options, phase)
    taken |= sizes
    said += more
    if options.head is None and kind is not Kind.VISION:
        taken["head"] = _default_head(kind, phase)
        said.append(f"head {taken['head']} (default)")
    options = replace(options, **taken) if taken else options
    check_parallel(model, options)
    return options, said + spoken(model, options)


def _sizes(model: Model, options: Options, phase: Phase) -> tuple[dict[str, int], list[str]]:
    """The sizes that are left to the model, and a sentence for each."""
    said, taken = [], {}
    if model.kind is Kind.VISION:
        if options.seq is not None:
            raise bad_value(f"{model.name}: seq", "no sequence length for a vision model", options.seq)
        image = options.image
        if image is None:
            taken["image"] = image = model.dims.image
            said.append(f"pictures of {image} by {image} (the published input)")
        _check_image(model, image)
        return taken, said
    if options.image is not None:
        raise bad_value(f"{model.name}: image", f"no picture for a {model.kind} model", options.image)
    seq, tokens = options.seq, options.tokens
    if seq is None:
        taken["seq"] = seq = default_seq(model.kind, model.dims)
        said.append(f"seq {seq} (default)")
    if phase is Phase.GENERATE and tokens is None:
        taken["tokens"] = tokens = DEFAULT_TOKENS
        said.append(f"tokens {DEFAULT_TOKENS} (default)")
    most = getattr(model.dims, "max_positions", 0)
    longest = seq + (tokens or 1) - 1
    if most and longest > most:
        said.append(f"{longest} positions are more than the {most} this model was made for")
    return taken, said


def _check_image(model: Model, image: int | None) -> None:
    step = getattr(model.dims, "patch", 0) or {"resnet": 32, "mobilevit": 32, "unet": 8}.get(model.architecture, 1)
    step = 64 if model.architecture == "mobilevit" else step
    if image is not None and (image < step or image % step):
        raise bad_value(f"{model.name}: image", f"a multiple of {step} pixels", image)


def _default_head(kind: Kind, phase: Phase | None) -> Head:
    if phase is Phase.TRAIN:
        return Head.ALL
    return Head.NONE if kind is Kind.ENCODER else Head.LAST


def check_parallel(model: Model, options: Options) -> None:
    """Tensor-parallel GPUs share heads and widths evenly; there are no more stages than layers."""
    dims: Any = model.dims
    if options.tp > 1:
        if model.kind is Kind.VISION:
            raise bad_value(f"{model.name}: tp", "1 for a vision model", options.tp)
        for name in ("heads", "intermediate", "expert_intermediate", "shared_intermediate"):
            size = getattr(dims, name, 0)
            if size % options.tp:
                raise bad_value(f"{model.name}: tp", f"a divisor of {name}={size}", options.tp)
        kv_heads = getattr(dims, "kv_heads", options.tp)
        if kv_heads % options.tp and options.tp % kv_heads:
            raise bad_value(f"{model.name}: tp", f"a divisor or multiple of kv_heads={kv_heads}", options.tp)
    layers = getattr(dims, "layers", getattr(dims, "decoder_layers", 1))
    if options.pp > layers:
        raise bad_value(f"{model.name}: pp", f"at most as many stages as layers ({layers})", options.pp)


def spoken(model: Model, options: Options) -> list[str]:
    """What holds for this run and is not an option."""
    said = []
    if model.note:
        said.append(f"{model.name}: {model.note}")
    if model.kind is not Kind.VISION:
        said.append("no padding: all sequences are of one length")
    if options.phase is Phase.DECODE:
        said.append(f"one new token a sequence behind a cache of {options.seq}")
    if options.phase in (Phase.DECODE, Phase.GENERATE) and options.stack is not Stack.ENGINE:
        said.append("the cache grows by concatenation (Hugging Face DynamicCache)")
    if options.phase is Phase.GENERATE:
        said.append(_generation(options))
    if options.phase is Phase.TRAIN:
        said.append(f"weights, gradients and AdamW moments in {activation_dtype(options)}; fused AdamW, no clipping")
    return said + _formats(model, options) + _stacks(model, options) + _experts(model, options) + _parallel(options)


def _generation(options: Options) -> str:
    size = group_size((options.tokens or 1) - 1)
    return f"the prefill yields the first token; decode steps in groups of {size}, each at its mean context"


def group_size(steps: int) -> int:
    """Decode steps that share one context: an odd number, so that at most about sixteen groups come out."""
    return max(-(-steps // GENERATE_GROUPS) | 1, 1)


def _formats(model: Model, options: Options) -> list[str]:
    grouped = getattr(model.dims, "kv_heads", 0) not in (0, getattr(model.dims, "heads", 0))
    if grouped and activation_dtype(options) is Dtype.FP32 and options.attention is AttentionMode.FLASH:
        return ["fused attention is assumed, though PyTorch has no fused kernel for grouped queries in fp32"]
    if options.dtype is Dtype.FP8:
        return ["fp8: linear layers multiply in fp8, activations cast by static scales; all else in bf16"]
    if options.dtype is Dtype.INT8:
        return ["int8: weights of linear layers are kept in int8 and multiplied in bf16; all else in bf16"]
    return []


def _stacks(model: Model, options: Options) -> list[str]:
    if options.stack is Stack.COMPILED:
        return ["compiled: pointwise runs and row reductions are fused as TorchInductor does; products are not"]
    if options.stack is Stack.ENGINE and model.template.engine:
        return ["engine: merged projections, residual in the norm, rotary in place, paged cache"]
    if options.stack is Stack.ENGINE:
        return [f"no engine template for {model.architecture}: fused as a compiler would"]
    return []


def _experts(model: Model, options: Options) -> list[str]:
    if not getattr(model.dims, "experts", 0):
        return []
    if options.skew:
        return [f"a share of {options.skew:g} of all expert choices falls on the same experts, the rest is even"]
    return ["tokens are spread evenly over the experts"]


def _parallel(options: Options) -> list[str]:
    said = []
    if options.tp > 1:
        said.append(
            f"one of {options.tp} tensor-parallel GPUs; heads, feed-forward width and vocabulary are shared out"
        )
    if options.pp > 1:
        said.append(
            f"one of {options.pp} pipeline stages, with the largest share of the layers and both embedding and head; "
            "waiting for other stages is not counted"
        )
    if options.dp > 1:
        said.append(f"one of {options.dp} replicas, each with its own batch")
    return said


def activation_dtype(options: Options) -> Dtype:
    """Format of activations: fp8 and int8 narrow the linear weights only."""
    if options.dtype is Dtype.TF32:
        return Dtype.FP32
    return Dtype.BF16 if options.dtype in (Dtype.FP8, Dtype.INT8) else options.dtype


def title(model: Model, options: Options) -> str:
    """Such as ``llama3-8b prefill b8 s1024 bf16``."""
    size = f"i{options.image}" if model.kind is Kind.VISION else f"s{options.seq}"
    words = [model.name, str(options.phase), f"b{options.batch}", size]
    if options.tokens:
        words.append(f"t{options.tokens}")
    words.append(str(options.dtype))
    if options.stack is not Stack.EAGER:
        words.append(str(options.stack))
    words += [f"{name}{getattr(options, name)}" for name in ("tp", "pp", "dp") if getattr(options, name) > 1]
    return " ".join(words)
