"""Training steps as libraries run them: torchao's fp8, bitsandbytes' 4-bit weights below adapters of
PEFT, convolutions with channels last, documents packed into sequences, and padded batches.

PyTorch 2.11, Triton, transformers 5, torchao 0.18, bitsandbytes 0.50 and PEFT 0.21 are needed. Without
a GPU, fp8 is emulated or left out and packed attention is dense, for tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn

LEARNING_RATE = 1e-6  # weights hardly move, so that every step sees the same kind of data
SPREAD = 0.6  # of the logarithm of documents' lengths
SHORTEST = 32  # tokens of a document
CLASSES = 1000
RESNET_DEPTHS = {"resnet50": [3, 4, 6, 3], "resnet101": [3, 4, 23, 3]}
CONVNEXT = {"depths": [3, 3, 27, 3], "hidden_sizes": [128, 256, 512, 1024]}
FP8_RECIPES = {"fp8-tensor": "tensorwise", "fp8-row": "rowwise"}


def draw_lengths(total: int, mean: int) -> list[int]:
    """Return lengths of documents that fill ``total`` tokens.

    They are quantiles of a log-normal distribution of this mean, in an order that is always the same.
    """
    count = max(round(total / mean), 1)
    normal = torch.distributions.Normal(0.0, 1.0)
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    shares = torch.exp(SPREAD * normal.icdf(places))
    lengths = [max(int(share * total / float(shares.sum())), SHORTEST) for share in shares]
    lengths[-1] += total - sum(lengths)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(7)).tolist()
    return [lengths[place] for place in order]


def draw_padded_lengths(batch: int, seq: int, mean: int) -> list[int]:
    """Return lengths of sequences of a padded batch: evenly apart, the longest fills ``seq``."""
    step = 2 * (seq - mean) / max(batch - 1, 1)
    return [max(int(seq - step * place), 1) for place in range(batch)]


def build_network(model: str, precision: str, device: str) -> Any:
    """Build a convolutional network with random weights and channels last."""
    import transformers

    if model in RESNET_DEPTHS:
        config = transformers.ResNetConfig(depths=RESNET_DEPTHS[model], num_labels=CLASSES)
        kind = transformers.ResNetForImageClassification
    else:
        config = transformers.ConvNextConfig(**CONVNEXT, num_labels=CLASSES)
        kind = transformers.ConvNextForImageClassification
    dtype = torch.float32 if precision == "tf32" else torch.bfloat16
    with torch.device(device):
        module = kind(config).to(dtype)
    return module.to(memory_format=torch.channels_last).train()


def draw_pictures(plan: dict[str, Any], device: str) -> dict[str, Any]:
    """Return pictures with channels last and their classes."""
    dtype = torch.float32 if plan["recipe"] == "tf32" else torch.bfloat16
    pictures = torch.randn(plan["batch"], 3, plan["seq"], plan["seq"], device=device, dtype=dtype)
    classes = torch.randint(0, CLASSES, (plan["batch"],), device=device)
    return {
        "pixel_values": pictures.contiguous(memory_format=torch.channels_last),
        "labels": classes,
    }


def prepare_language_model(module: Any, plan: dict[str, Any]) -> Any:
    """Change a module built by transformers to what a row of the plan trains, and return it."""
    recipe = plan["recipe"]
    if plan["recompute"] == "full":
        options = {"use_reentrant": False, "preserve_rng_state": False}
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if recipe in FP8_RECIPES:
        _multiply_in_fp8(module, FP8_RECIPES[recipe])
    elif recipe == "fp8-block":
        _multiply_in_blocks(module)
    elif recipe == "nf4":
        return _adapt_narrow_weights(module, plan["lora"])
    return module


def _list_layer_products(module: Any) -> list[tuple[Any, str, Any]]:
    """Return the linear layers but the head: the part that holds each, its name there, and it."""
    products = []
    for path, part in list(module.named_modules()):
        if isinstance(part, nn.Linear) and "lm_head" not in path:
            parent, _, name = path.rpartition(".")
            products.append((module.get_submodule(parent), name, part))
    return products


def _multiply_in_fp8(module: Any, recipe: str) -> None:
    """Let linear layers multiply in fp8 with dynamic scales of a tensor or of rows, by torchao."""
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    if not next(module.parameters()).is_cuda:
        config = replace(config, emulate=True)
    convert_to_float8_training(
        module,
        config=config,
        module_filter_fn=lambda _part, path: "lm_head" not in path,
    )


def _multiply_in_blocks(module: Any) -> None:
    """Let linear layers multiply in fp8 with scales of blocks, by torchao's prototype."""
    if not next(module.parameters()).is_cuda:
        return
    from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear

    _narrow_search()
    for owner, name, part in _list_layer_products(module):
        setattr(owner, name, Float8BlockwiseLinear.from_float(part))


def _narrow_search() -> None:
    """Let Triton try three forms of each kernel that casts tokens, not all 45, and two of weights.

    Compiling them all would take minutes; tiles of 16 to 64 rows of 128 are in the middle of the list.
    """
    import triton
    from torchao.prototype.blockwise_fp8_training import kernels

    forms = [
        triton.Config({"NUM_GROUPS": rows}, num_warps=warps, num_stages=2)
        for rows, warps in ((16, 4), (32, 4), (64, 8))
    ]
    plain = [triton.Config({}, num_warps=warps, num_stages=2) for warps in (4, 8)]
    kernels.triton_fp8_blockwise_act_quant_lhs_kernel.configs = forms
    kernels.triton_fp8_blockwise_act_quant_rhs_kernel.configs = forms
    kernels.triton_fp8_blockwise_act_quant_transposed_lhs_kernel.configs = forms
    kernels.triton_fp8_blockwise_weight_quant_rhs_kernel.configs = plain
    kernels.triton_fp8_blockwise_weight_quant_transposed_rhs_kernel.configs = plain


def _adapt_narrow_weights(module: Any, rank: int) -> Any:
    """Keep weights of linear layers in nf4 by bitsandbytes, and train PEFT's adapters beside them."""
    import bitsandbytes
    from peft import LoraConfig, get_peft_model

    device = next(module.parameters()).device
    for owner, name, part in _list_layer_products(module):
        narrow = bitsandbytes.nn.Linear4bit(
            part.in_features,
            part.out_features,
            bias=part.bias is not None,
            compute_dtype=part.weight.dtype,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        narrow.weight = bitsandbytes.nn.Params4bit(
            part.weight.data,
            requires_grad=False,
            quant_type="nf4",
            compress_statistics=True,
        )
        if part.bias is not None:
            narrow.bias = part.bias
        setattr(owner, name, narrow.to(device))
    module.is_loaded_in_4bit = True
    module.enable_input_require_grads()
    targets = sorted({name for _, name, _ in _list_layer_products(module)})
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(module, config, autocast_adapter_dtype=False)


def attend_to_documents(lengths: list[int], device: str) -> Callable[..., Any]:
    """Return attention over tokens of the same document alone, as transformers calls attention."""
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    ends = ends.to(device)
    longest = max(lengths)

    def attend(
        _module: Any,
        query: Any,
        key: Any,
        value: Any,
        _mask: Any,
        scaling: float | None = None,
        **_options: Any,
    ) -> tuple[Any, None]:
        batch, heads, seq, dim = query.shape
        if not query.is_cuda:
            out = nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                scale=scaling,
                enable_gqa=True,
            )
            return out.transpose(1, 2).contiguous(), None
        flat = [
            part.transpose(1, 2).reshape(batch * seq, part.shape[1], dim)
            for part in (query, key, value)
        ]
        out = varlen_attn(
            *flat,
            ends,
            ends,
            longest,
            longest,
            scale=scaling or 1.0 / math.sqrt(dim),
            window_size=(-1, 0),
        )
        return out.view(batch, seq, heads, dim), None

    return attend


def add_inputs(
    plan: dict[str, Any],
    inputs: dict[str, Any],
    device: str,
) -> dict[str, Any]:
    """Return inputs with positions of packed documents or the mask of a padded batch."""
    batch, seq = inputs["input_ids"].shape
    if plan["recipe"] == "packed":
        lengths = draw_lengths(batch * seq, min(plan["documents"], batch * seq))
        positions = torch.cat([torch.arange(length) for length in lengths])
        return inputs | {"position_ids": positions.view(batch, seq).to(device)}
    if plan["recipe"] != "padded":
        return inputs
    lengths = draw_padded_lengths(batch, seq, min(plan["documents"], seq))
    place = torch.arange(seq, device=device)
    is_token = place[None, :] < torch.tensor(lengths, device=device)[:, None]
    causal = place[None, :] <= place[:, None]
    labels = inputs["labels"].masked_fill(~is_token, -100)
    mask = causal[None, None] & is_token[:, None, None, :]
    return inputs | {"attention_mask": mask, "labels": labels}


def register_packed_attention(
    plan: dict[str, Any],
    device: str,
) -> str:
    """Register the attention of a packed row, and return its name."""
    from transformers import AttentionInterface

    tokens = plan["batch"] * plan["seq"]
    lengths = draw_lengths(tokens, min(plan["documents"], tokens))
    AttentionInterface.register("packed", attend_to_documents(lengths, device))
    return "packed"


def make_step(
    module: Any,
    plan: dict[str, Any],
    inputs: dict[str, Any],
) -> Callable[[], Any]:
    """Return a whole training step: forward, backward, and a fused AdamW."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(
        trained,
        lr=LEARNING_RATE,
        fused=True,
        capturable=trained[0].is_cuda,
    )
    if plan["stack"] == "compiled":
        compile_parts(module, "inductor" if trained[0].is_cuda else "aot_eager")

    def step() -> Any:
        optimiser.zero_grad(set_to_none=True)
        loss = module(**inputs).loss
        loss.backward()
        optimiser.step()
        return loss.detach()

    return step


def compile_parts(module: Any, backend: str) -> None:
    """Compile layers, the last norm and the loss, each by itself: equal layers share their code."""
    torch._dynamo.config.recompile_limit = 64
    trunk = module.get_submodule(module.base_model_prefix)
    for part in (*trunk.layers, trunk.norm):
        part.compile(backend=backend)
    module.loss_function = torch.compile(module.loss_function, backend=backend)


def are_finite(module: Any, loss: Any) -> bool:
    """Whether a loss and all trained weights are numbers after the steps of a row."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return bool(torch.isfinite(loss)) and all(
        bool(torch.isfinite(weight.detach().sum())) for weight in trained
    )
