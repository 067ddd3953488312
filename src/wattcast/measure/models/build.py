"""A planned model as a Hugging Face module with random weights, and one iteration of it as a call.

Weights come from the module's own initialisation, drawn on the device; nothing is downloaded. An
iteration is what a user of Hugging Face runs: a prompt with the head on its last token, one token
behind a full cache, or forward, backward and a fused AdamW step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from wattcast.errors import MissingTool, bad_value
from wattcast.measure.models.plan import Dims, ModelSpec, dims_of

_IMAGE, _CLASSES = 224, 1000
_RESNET_DEPTHS = [3, 4, 6, 3]
LEARNING_RATE = 1e-6  # weights hardly move over a row, so that every iteration sees the same kind of data


@dataclass
class Built:
    """A module on the device, and what for: rows of one model share it where they can."""

    module: Any
    model: str
    training: bool
    parameters: int


def build(spec: ModelSpec, torch: Any, device: str, dims: Dims | None = None) -> Built:
    """The module of a row; ``dims`` cuts it smaller for a test."""
    transformers = _transformers()
    config, kind = _config(dims or dims_of(spec.model), spec, transformers)
    with _default_dtype(torch, _dtype(torch, spec.dtype)), torch.device(device):
        module = getattr(transformers, kind)(config)
    module = module.train() if spec.phase == "train" else module.eval()
    # looks at the tokens' values, for which the host would wait
    module.apply(lambda part: setattr(part, "warn_if_padding_and_no_attention_mask", _nothing))
    return Built(module, spec.model, spec.phase == "train", sum(p.numel() for p in module.parameters()))


def serves(built: Built | None, spec: ModelSpec) -> bool:
    """Whether a module built for another row serves this one: same model, same mode."""
    return built is not None and built.model == spec.model and built.training == (spec.phase == "train")


def iteration(built: Built, spec: ModelSpec, torch: Any, device: str, dims: Dims | None = None) -> Callable[[], Any]:
    """One iteration of the row, ready to be called any number of times."""
    dims = dims or dims_of(spec.model)
    module = built.module
    if dims.architecture != "resnet":  # every layer reads this at each call
        module.config._attn_implementation = "sdpa" if spec.attention == "flash" else "eager"
    if spec.phase == "train":
        return _training(module, _inputs(spec, dims, torch, device), torch, device)
    given = _inputs(spec, dims, torch, device)
    if spec.phase == "decode":
        return _decoding(module, given, spec, dims, torch, device)

    def forward() -> Any:
        with torch.no_grad():
            return module(**given)

    return forward


def _inputs(spec: ModelSpec, dims: Dims, torch: Any, device: str) -> dict[str, Any]:
    """What the module is called with, drawn at random."""
    if dims.vision:
        shape = (spec.batch, 3, _IMAGE, _IMAGE)
        return {"pixel_values": torch.randn(shape, device=device).to(_dtype(torch, spec.dtype))}
    if spec.seq is None:
        raise bad_value(f"{spec.id}: seq", "a sequence length for a language model", None)
    length = 1 if spec.phase == "decode" else spec.seq
    tokens = torch.randint(1, dims.vocab, (spec.batch, length), device=device)
    if spec.phase == "train":
        given = {"input_ids": tokens, "labels": tokens.clone()}
        return given if dims.architecture == "bert" else {**given, "use_cache": False}
    if dims.architecture == "bert":
        return {"input_ids": tokens}
    return {"input_ids": tokens, "use_cache": True, "logits_to_keep": 1}


def _training(module: Any, given: dict[str, Any], torch: Any, device: str) -> Callable[[], Any]:
    captured = str(device).startswith("cuda")
    optimiser = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True, capturable=captured)

    def step() -> Any:
        optimiser.zero_grad(set_to_none=True)
        loss = module(**given).loss
        loss.backward()
        optimiser.step()
        return loss

    return step


def _decoding(
    module: Any, given: dict[str, Any], spec: ModelSpec, dims: Dims, torch: Any, device: str
) -> Callable[[], Any]:
    """One token behind a cache of ``seq``; the grown cache is dropped after each step, the full one kept."""
    cache = _transformers().DynamicCache(config=module.config)
    shape = (spec.batch, dims.kv_heads, spec.seq, dims.head_dim)
    dtype = _dtype(torch, spec.dtype)
    for layer in range(dims.layers):
        cache.update(*(torch.randn(shape, device=device, dtype=dtype) for _ in range(2)), layer)
    full = [(layer.keys, layer.values) for layer in cache.layers]

    def step() -> Any:
        for layer, (keys, values) in zip(cache.layers, full, strict=True):
            layer.keys, layer.values = keys, values
        with torch.no_grad():
            return module(**given, past_key_values=cache)

    return step


def _config(dims: Dims, spec: ModelSpec, transformers: Any) -> tuple[Any, str]:
    """Configuration and class name."""
    training = spec.phase == "train"
    match dims.architecture:
        case "gpt2":
            sizes = {"n_layer": dims.layers, "n_embd": dims.hidden, "n_head": dims.heads, "vocab_size": dims.vocab}
            return transformers.GPT2Config(**sizes, n_positions=dims.max_positions), "GPT2LMHeadModel"
        case "bert":
            config = transformers.BertConfig(vocab_size=dims.vocab, **_transformer(dims))
            return config, "BertForMaskedLM" if training else "BertModel"
        case "vit":
            return transformers.ViTConfig(image_size=_IMAGE, **_transformer(dims)), "ViTModel"
        case "resnet":
            depths = _RESNET_DEPTHS if dims.layers == 50 else [1, 1, 1, 1]
            return transformers.ResNetConfig(depths=depths, num_labels=_CLASSES), "ResNetForImageClassification"
        case _:
            return _decoder(dims, transformers)


def _transformer(dims: Dims) -> dict[str, int]:
    return {
        "num_hidden_layers": dims.layers,
        "hidden_size": dims.hidden,
        "num_attention_heads": dims.heads,
        "intermediate_size": dims.intermediate,
    }


def _decoder(dims: Dims, transformers: Any) -> tuple[Any, str]:
    name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[dims.architecture]
    own = {"head_dim": dims.head_dim} if dims.architecture == "qwen3" else {}
    config = getattr(transformers, f"{name}Config")(
        **_transformer(dims),
        **own,
        num_key_value_heads=dims.kv_heads,
        vocab_size=dims.vocab,
        max_position_embeddings=dims.max_positions,
        tie_word_embeddings=dims.tied,
    )
    return config, f"{name}ForCausalLM"


def _nothing(*_: object, **__: object) -> None:
    return None


def _dtype(torch: Any, name: str) -> Any:
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


@contextlib.contextmanager
def _default_dtype(torch: Any, dtype: Any) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingTool("measuring whole models needs transformers 5, which is not installed.") from None
    return transformers
